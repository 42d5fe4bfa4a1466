"""Attention as pure functions: heads in, heads out.

Shapes: queries `(B, T, N, H)`, keys and values `(B, S, K, H)` with N a multiple
of K. Query head n uses key head `n // (N / K)`; no key is ever repeated in
memory.
"""

import contextlib
import contextvars
import math
import warnings

import keras
from keras import ops

# Far below any score, far above the smallest float32: a softmax over a row that
# is masked throughout stays finite, and so does its gradient.
MASKED_SCORE = -1e30

# XLA on a CPU reads a matrix of so many elements faster in so many parts; see
# `_Flat`.
LARGE_MATRIX = 2**19
PARTS = 8

_matrices: contextvars.ContextVar = contextvars.ContextVar(
    "keras_tx_matrices", default=None
)


def sizes(x):
    """Returns the sizes of `x`, static where known."""
    dynamic = ops.shape(x)
    return tuple(
        dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)
    )


def is_one_row(x):
    """Whether `x` is known to be `(1, 1, ...)`.

    A size that a graph learns only later is a tensor, which has no truth yet.
    """
    return tuple(x.shape)[:2] == (1, 1)


def dtype_name(x):
    """Returns the dtype of `x` as a string."""
    return keras.backend.standardize_dtype(x.dtype)


def group_heads(x, num_kv_heads, groups):
    """Splits heads: `(1|B, 1|N, t, s)` -> `(1|B, 1|K, 1|G, t, s)`."""
    rows, heads, *rest = sizes(x)
    split = (1, 1) if heads == 1 else (num_kv_heads, groups)
    return ops.reshape(x, (rows, *split, *rest))


def einsum_float32(equation, *operands):
    """`einsum` that accumulates in at least float32 and returns that dtype.

    Scores of float16 operands overflow at 65,504 and bfloat16 keeps 8
    significant bits, so products must not be rounded to the operands' dtype.
    """
    dtype = keras.backend.standardize_dtype(operands[0].dtype)
    if "..." not in equation and any(0 in x.shape for x in operands):
        # Keras on TensorFlow guesses sizes by division, and fails at zero.
        labels = equation.split("->")[0].split(",")
        sizes = {
            label: size
            for names, x in zip(labels, operands, strict=True)
            for label, size in zip(names, ops.shape(x), strict=True)
        }
        shape = tuple(sizes[label] for label in equation.split("->")[1])
        return ops.zeros(shape, "float64" if dtype == "float64" else "float32")
    if dtype in ("float32", "float64"):
        return ops.einsum(equation, *operands)
    if keras.backend.backend() == "jax":
        # JAX has mixed products: half-precision operands, float32 result.
        import jax.numpy as jnp

        return jnp.einsum(
            equation,
            *operands,
            preferred_element_type="float32",
        )
    # TensorFlow and torch round a product to its operands' dtype.
    return ops.einsum(equation, *(ops.cast(x, "float32") for x in operands))


def rowwise(layer, x):
    """Applies a layer to `(B, T, ...)` as rows `(B T, ...)`.

    A matrix applied to all tokens is one product either way, but TensorFlow
    computes the gradient of the matrix as one outer product per leading index,
    all of them held and then summed, which on a CPU can take longer than the
    rest of a training step.
    """
    flat = _flat_of(layer, x)
    if flat is not None:
        return flat(x)
    batch, length = sizes(x)[:2]
    result = layer(ops.reshape(x, (-1, *x.shape[2:])))
    return ops.reshape(result, (batch, length, *result.shape[1:]))


def apply(layer, x):
    """Applies a layer to `(..., D)`, one row by what `matrices_before` laid out."""
    flat = _flat_of(layer, x) if len(x.shape) == 3 else None
    return layer(x) if flat is None else flat(x)


@contextlib.contextmanager
def matrices_before(layers):
    """Lays kernels of heads, and large ones, flat outside of the loop to come.

    XLA on a CPU multiplies one row by a matrix at the speed of memory, unless the
    matrix is a view made in the same loop, such as a kernel `(D, N, H)` seen as
    `(D, N H)`: then it writes one plain loop, with the norm before it computed
    again for each element, and a step of a small model takes three times as long.
    JAX would turn the matrix behind the heads round in each step, and torch takes
    ten operations for a product of more than two axes.

    Args:
        layers: Those that the loop may call.
    """
    flat = {}
    for layer in layers:
        plain = (
            type(layer) in (keras.layers.EinsumDense, keras.layers.Dense)
            and layer.built
            and not layer.quantization_mode
            and not layer.lora_enabled
            and layer.activation in (None, keras.activations.linear)
        )
        if plain and type(layer) is keras.layers.EinsumDense:
            operands, outputs = layer.equation.split("->")
            if "." not in operands:
                inputs = len(operands.split(",")[0]) - 1
                flat[id(layer)] = _Flat(layer, inputs, len(outputs) - 1)
        # One product already, and better off that way unless it comes in parts.
        elif plain and _comes_in_parts(*layer.kernel.shape):
            flat[id(layer)] = _Flat(layer, 1, 1)
    token = _matrices.set(flat)
    try:
        yield
    finally:
        _matrices.reset(token)


def _flat_of(layer, x):
    """Returns the `_Flat` of a layer, if there is one and `x` is one row."""
    flat = (_matrices.get() or {}).get(id(layer))
    return flat if flat is not None and is_one_row(x) else None


def _comes_in_parts(size, width):
    large = size * width >= LARGE_MATRIX and size % PARTS == 0
    return large and keras.backend.backend() == "tensorflow"


class _Flat:
    """A layer applied to one row, by its kernel laid flat.

    XLA on a CPU multiplies one row by a large matrix a sixth to a third faster as a
    batch of products with some of its rows each, which are then summed: so it
    reaches the speed that it has with a matrix laid the other way round.

    Args:
        layer: An `EinsumDense` or `Dense`.
        inputs: How many leading axes of its kernel are summed over.
        outputs: How many trailing axes it has besides.
    """

    def __init__(self, layer, inputs, outputs):
        self.layer = layer
        kernel = ops.convert_to_tensor(layer.kernel)
        size, width = math.prod(kernel.shape[:inputs]), math.prod(kernel.shape[inputs:])
        self.parts = PARTS if _comes_in_parts(size, width) else None
        # (D, V), or (P, D / P, V).
        shape = (self.parts, size // self.parts) if self.parts else (size,)
        self.matrix = ops.reshape(kernel, (*shape, width))
        self.shape = (1, *kernel.shape[-outputs:])

    def __call__(self, x):
        """Maps `(1, 1, ...)` to `(1, 1, ...)`."""
        row = ops.cast(ops.reshape(x, (1, -1)), self.layer.compute_dtype)
        matrix = ops.cast(self.matrix, row.dtype)
        if self.parts:
            result = ops.matmul(ops.reshape(row, (self.parts, 1, -1)), matrix)
            result = ops.sum(result, axis=0)
        else:
            result = ops.matmul(row, matrix)
        result = ops.reshape(result, self.shape)
        if self.layer.bias is not None:
            result = ops.add(result, ops.cast(self.layer.bias, row.dtype))
        return result[None]


def project(x, kernel, equation):
    """Multiplies features `(..., D)` by a matrix, in at least float32.

    Leading axes become one first; see `rowwise`.

    Args:
        x: `(..., D)`.
        kernel: `(D, V)` or `(V, D)`.
        equation: What einsum does with rows, `"nd,dv->nv"` or `"nd,vd->nv"`.
    """
    if len(x.shape) == 3 and is_one_row(x) and equation == "nd,vd->nv":
        # The table first, as it lies; XLA would turn it round for one row.
        column = ops.reshape(x, (-1, 1))
        return ops.reshape(einsum_float32("vd,dn->vn", kernel, column), (1, 1, -1))
    rows = ops.reshape(x, (-1, x.shape[-1]))
    result = einsum_float32(equation, rows, kernel)
    # Sizes that are known stay known.
    shape = (*sizes(x)[:-1], result.shape[-1])
    return ops.reshape(result, shape)


def scores(query, key, *, scale, soft_cap=None, bias=None):
    """Returns the raw scores `(B, N, T, S)` in at least float32.

    `soft_cap` bends scores into (-cap, cap) by `cap * tanh(score / cap)`;
    `bias` is added behind it.
    """
    batch, length, num_heads, head_dim = sizes(query)
    num_kv_heads = key.shape[2]
    if num_heads == num_kv_heads:
        result = einsum_float32("btnh,bsnh->bnts", query, key)
    else:
        grouped = ops.reshape(
            query,
            (batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim),
        )
        result = einsum_float32("btkgh,bskh->bkgts", grouped, key)
        result = ops.reshape(result, (batch, num_heads, length, ops.shape(key)[1]))
    result = result * scale
    if soft_cap is not None:
        result = soft_cap * ops.tanh(result / soft_cap)
    if bias is not None:
        result = result + ops.cast(bias, result.dtype)
    return result


def softmax(scores):
    """Softmax over the last axis, of one key too."""
    # Keras warns that a softmax over one is always 1. Here that is meant: a
    # first token has only itself to attend to.
    if scores.shape[-1] == 1:
        return scores * 0.0 + 1.0
    return ops.softmax(scores, axis=-1)


def masked_softmax(scores, mask, rows_may_be_empty):
    """Softmax over the last axis where `mask` is true.

    Args:
        scores: `(B, N, T, S)` in at least float32.
        mask: Boolean, broadcastable to `scores`, or `None`.
        rows_may_be_empty: Whether a row may be masked throughout. Such a row
            gets zero weights.

    Returns:
        Weights shaped and typed like `scores`.
    """
    if mask is None:
        return softmax(scores)
    # A select, never a sum: it also keeps NaN in a masked key out.
    weights = softmax(ops.where(mask, scores, MASKED_SCORE))
    if rows_may_be_empty:
        weights = ops.where(mask, weights, 0.0)
    return weights


def mix(weights, value):
    """Returns the weighted sum of values, `(B, T, N, H)`, in `value`'s dtype."""
    batch, num_heads, length, num_keys = sizes(weights)
    num_kv_heads, head_dim = value.shape[2], value.shape[3]
    dtype = value.dtype
    if keras.backend.backend() == "jax":
        weights = ops.cast(weights, dtype)
    else:
        # Without mixed products the cast would only lose bits.
        value = ops.cast(value, weights.dtype)
    if num_heads == num_kv_heads:
        result = einsum_float32("bnts,bsnh->btnh", weights, value)
    else:
        grouped = ops.reshape(
            weights,
            (batch, num_kv_heads, num_heads // num_kv_heads, length, num_keys),
        )
        result = einsum_float32("bkgts,bskh->btkgh", grouped, value)
        result = ops.reshape(result, (batch, length, num_heads, head_dim))
    return ops.cast(result, dtype)


def weights(query, key, mask, *, scale, soft_cap=None, bias=None):
    """Returns the weights of attention, and which keys some query sees.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        mask: A `Mask`.
        scale: Number that multiplies the dot products.
        soft_cap: Optional bound of the scores.
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`.

    Returns:
        Tuple of the weights `(B, N, T, S)` in at least float32, and a boolean
        `(1 or B, S, 1, 1)`, or `None` where every key is seen.
    """
    allowed = mask.dense(ops.shape(query)[1], ops.shape(key)[1])
    rows_may_be_empty = mask.may_leave_queries_without_keys()
    seen = None
    if rows_may_be_empty:
        # 0 x NaN is NaN still: what no query sees is zeroed before it is mixed.
        seen = mask.seen_keys(allowed)[:, :, None, None]
        key = ops.where(seen, key, 0.0)
    if bias is not None:
        # Who masks by bias writes -inf, or -1e9, which is -inf in float16; a
        # row of nothing else would be NaN, and one of the least float32 would
        # look at what is masked.
        possible = ops.not_equal(bias, -math.inf)
        allowed = possible if allowed is None else ops.logical_and(allowed, possible)
        rows_may_be_empty = True
    found = masked_softmax(
        scores(query, key, scale=scale, soft_cap=soft_cap, bias=bias),
        allowed,
        rows_may_be_empty,
    )
    if mask.queries is not None:
        found = ops.where(mask.queries[:, None, :, None], found, 0.0)
    return found, seen


def dense(query, key, value, mask, *, drop=None, **options):
    """Attention that holds all scores at once.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, H)`.
        mask: A `Mask`.
        drop: Optional function that drops some of the weights.
        **options: As of `weights`.

    Returns:
        Tuple of the mixed values `(B, T, N, H)` in `value`'s dtype and the
        weights `(B, N, T, S)`, before dropout, in at least float32.
    """
    found, seen = weights(query, key, mask, **options)
    if seen is not None:
        value = ops.where(seen, value, 0.0)
    return mix(found if drop is None else drop(found), value), found


# ----------------------------------------------------------------------------
# Which one
# ----------------------------------------------------------------------------

# From so many scores a head on, T x S, scores are made block by block.
MANY_SCORES = 1024 * 1024


def choose(wish, query, key, value, mask, *, plain):
    """Returns `"dense"`, `"fused"` or `"blockwise"` for what is wished.

    What `"auto"` takes, the first line that fits; weights that are asked for are
    always written out, beside the output of what is chosen:

    | | |
    |---|---|
    | torch, plain | fused |
    | JAX on a GPU, plain, half precision | fused |
    | T or S unknown | dense |
    | T x S below 1,024 x 1,024 | dense |
    | anything else | blockwise |

    *Plain* means: as many key heads as query heads, not float64, no dropout, soft
    cap, bias, window, segments or mask but causality, and T = S known where causal.
    Only torch and JAX on a GPU have a kernel that beats the scores written out, and
    masked throughout, its rows would not be zero.

    Args:
        wish: `"auto"`, or one of the three; a wish that can't be met warns and
            falls back to `"auto"`.
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, H)`.
        mask: A `Mask`.
        plain: Whether there is neither dropout, soft cap nor bias.
    """
    if wish == "dense":
        return wish
    length, num_keys = query.shape[1], key.shape[1]
    known = isinstance(length, int) and isinstance(num_keys, int)
    alone = not mask.may_leave_queries_without_keys()
    alone = alone and mask.window is None and mask.segments is None
    plain = plain and alone and query.shape[2] == key.shape[2]
    plain = plain and query.shape[-1] == value.shape[-1]
    plain = plain and dtype_name(query) != "float64"  # torch's is not as exact
    possible = {
        "fused": plain and (known or not mask.causal),
        "blockwise": known and length > 0 and num_keys > 0,
    }
    if wish in possible:
        if possible[wish]:
            return wish
        warnings.warn(
            f'implementation="{wish}" is not to be had here, another is used. '
            + {
                "fused": "It takes equal numbers of query and key heads, no float64, "
                "no dropout, soft cap, bias, window, segments or masks but causality "
                "over as many keys as queries.",
                "blockwise": "It needs to know the lengths: give the model a fixed "
                "one, or call it on arrays.",
            }[wish],
            stacklevel=2,
        )
    if possible["fused"] and _has_fused_kernel(query):
        return "fused"
    if possible["blockwise"] and length * num_keys >= MANY_SCORES:
        return "blockwise"
    return "dense"


def _has_fused_kernel(query):
    """Whether the device has attention of its own, in one kernel."""
    if keras.backend.backend() == "torch":
        return True
    if keras.backend.backend() == "jax":
        import jax

        half = dtype_name(query) in ("float16", "bfloat16")
        return half and jax.default_backend() == "gpu"
    return False


def fused(query, key, value, mask, *, scale):
    """Attention by the backend's own kernel; see `choose` for what it takes."""
    return ops.dot_product_attention(
        query, key, value, scale=scale, is_causal=mask.causal
    )
