"""Attention as pure functions: heads in, heads out.

Shapes: queries `(B, T, N, H)`, keys and values `(B, S, K, H)` with N a multiple
of K. Query head n uses key head `n // (N / K)`; no key is ever repeated in
memory.
"""

import keras
from keras import ops

# Far below any score, far above the smallest float32: a softmax over a row that
# is masked throughout stays finite, and so does its gradient.
MASKED_SCORE = -1e30


def einsum_float32(equation, *operands):
    """`einsum` that accumulates in at least float32 and returns that dtype.

    Scores of float16 operands overflow at 65,504 and bfloat16 keeps 8
    significant bits, so products must not be rounded to the operands' dtype.
    """
    dtype = keras.backend.standardize_dtype(operands[0].dtype)
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


def scores(query, key, *, scale, soft_cap=None, bias=None):
    """Returns the raw scores `(B, N, T, S)` in at least float32.

    `soft_cap` bends scores into (-cap, cap) by `cap * tanh(score / cap)`;
    `bias` is added behind it.
    """
    batch, length, num_heads, head_dim = _sizes(query)
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
        return ops.softmax(scores, axis=-1)
    # A select, never a sum: it also keeps NaN in a masked key out.
    weights = ops.softmax(ops.where(mask, scores, MASKED_SCORE), axis=-1)
    if rows_may_be_empty:
        weights = ops.where(ops.any(mask, axis=-1, keepdims=True), weights, 0.0)
    return weights


def mix(weights, value):
    """Returns the weighted sum of values, `(B, T, N, H)`, in `value`'s dtype."""
    batch, num_heads, length, num_keys = _sizes(weights)
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


def dense(
    query,
    key,
    value,
    mask,
    *,
    scale,
    soft_cap=None,
    bias=None,
    drop=None,
):
    """Attention that holds all scores at once.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, H)`.
        mask: A `Mask`.
        scale: Number that multiplies the dot products.
        soft_cap: Optional bound of the scores.
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`.
        drop: Optional function that drops some of the weights.

    Returns:
        Tuple of the mixed values `(B, T, N, H)` in `value`'s dtype and the
        weights `(B, N, T, S)`, before dropout, in at least float32.
    """
    allowed = mask.dense(ops.shape(query)[1], ops.shape(key)[1])
    rows_may_be_empty = mask.may_leave_queries_without_keys()
    if rows_may_be_empty:
        key = without_unseen(key, allowed)
        value = without_unseen(value, allowed)
    weights = masked_softmax(
        scores(query, key, scale=scale, soft_cap=soft_cap, bias=bias),
        allowed,
        rows_may_be_empty,
    )
    if mask.queries is not None:
        weights = ops.where(mask.queries[:, None, :, None], weights, 0.0)
    mixed = mix(weights if drop is None else drop(weights), value)
    return mixed, weights


def without_unseen(value, allowed):
    """Zeros keys or values that no query may see: 0 x NaN is NaN still.

    Args:
        value: `(B, S, K, H)`.
        allowed: Boolean `(1 or B, 1 or N, T, S)`.
    """
    seen = ops.any(allowed, axis=(1, 2))  # (1 or B, S)
    return ops.where(seen[:, :, None, None], value, 0.0)


def _sizes(x):
    """Returns the sizes of `x`, static where known."""
    dynamic = ops.shape(x)
    return tuple(
        dynamic[axis] if size is None else size for axis, size in enumerate(x.shape)
    )
