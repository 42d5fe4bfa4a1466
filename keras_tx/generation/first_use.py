"""Whether a model can be read token by token: looked at, then tried."""

import contextlib
import functools

import keras
import numpy as np
from keras import ops

from keras_tx import cache
from keras_tx.generation import sizes
from keras_tx.generation.backends import compile_function

# Cached logits may differ from those of a full forward pass by this share of
# their spread. Sound models stay below 1e-5 in float32; a layer that mixes
# positions out of sight of the cache is off by half of it or more.
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
TOLERANCE_HALF = 0.2

# Layers of Keras that mix positions without a cache.
MIXERS = (
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.AveragePooling1D,
    keras.layers.MaxPooling1D,
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.Conv1DTranspose,
    keras.layers.UpSampling1D,
    keras.layers.ZeroPadding1D,
    keras.layers.Cropping1D,
)
# These mix positions unless their kernel spans one.
CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.SeparableConv1D,
    keras.layers.DepthwiseConv1D,
)


def refuse_mixers(plan):
    """Refuses layers of Keras that are known to mix positions."""
    for layer in plan.layers:
        spans = isinstance(layer, CONVOLUTIONS) and any(
            size > 1 for size in np.ravel(layer.kernel_size)
        )
        if spans or isinstance(layer, MIXERS):
            refuse(plan, layer, "mixes positions")


def refuse(plan, layer, what):
    """Refuses a model because of one of its layers."""
    raise ValueError(
        f"'{getattr(layer, 'path', None) or layer.name}' "
        f"({type(layer).__name__}) {what}, "
        "and knows nothing of the tokens before a step, so that text "
        "generated token by token would differ from what the model says. Use "
        "causal layers of keras_tx for what looks across positions, and "
        "position layers of keras_tx for what counts them. If you know better, "
        "pass check=False."
    )


def compare(plan, source):
    """Compares one full forward pass with prompt, two and one tokens."""
    if plan.num_tokens is None or not plan.model.built:
        plan.probe(source)
    length = min(8, plan.max_length or 8)
    bound = plan.num_tokens or plan.vocab_size
    tokens = np.random.default_rng(0).integers(0, bound, (1, length))
    tokens = np.where(tokens == plan.pad_id, (tokens + 1) % bound, tokens)
    tokens = tokens.astype("int32")
    pieces = [length - 3, 2, 1] if length > 3 else [1] * length

    def both_ways(source, tokens):
        memory = () if source is None else plan.encode_tensors(source)
        full = plan.forward(tokens, memory)
        return full, _in_pieces(plan, tokens, pieces, memory)

    run = both_ways
    if keras.backend.backend() == "jax":
        # Operation by operation it would compile each of them.
        run = compile_function(both_ways, plan.model, plan.variables, ())
    given = None
    if source is not None:
        given = keras.tree.map_structure(ops.convert_to_tensor, source)
    full, cached = map(ops.convert_to_numpy, run(given, ops.convert_to_tensor(tokens)))
    plan.vocab_size = full.shape[-1]
    if _close(plan, full, cached):
        return
    memory = plan.encode_eagerly(source)
    tokens = ops.convert_to_tensor(tokens)
    with recorded(plan.layers) as calls:
        plan.forward(tokens, memory)
        whole = list(calls)
        calls.clear()
        _in_pieces(plan, tokens, pieces, memory)
        parts = list(calls)
    refuse(plan, _first_difference(plan, whole, parts, pieces), "looks across them")


def _in_pieces(plan, tokens, pieces, memory):
    """Returns logits of tokens `(1, T)` that came in pieces."""
    starts = ops.zeros((1,), dtype="int32")
    entries, owners, column, logits = None, None, 0, []
    for piece in pieces:
        part = tokens[:, column : column + piece]
        scope = cache.Scope(
            part,
            column=column,
            starts=starts,
            capacity=sizes.capacity_of(tokens.shape[1]),
            entries=entries,
            owners=owners,
        )
        logits.append(plan.forward(part, memory, scope))
        entries, owners = scope.entries, scope.owners
        column += piece
    return ops.concatenate(logits, axis=1)


def _close(plan, full, cached):
    if full.shape != cached.shape:
        return False
    full, cached = full.astype("float64"), cached.astype("float64")
    dtypes = {x.compute_dtype for x in plan.layers}
    half = dtypes & {"float16", "bfloat16"} or any(
        getattr(x, "quantization_mode", None) for x in plan.layers
    )
    tolerance = TOLERANCE_HALF if half else TOLERANCE["float32"]
    spread = max(full.std(), 1e-6)
    return bool(np.abs(full - cached).max() <= tolerance * spread)


def _first_difference(plan, whole, parts, pieces):
    """Returns the layer whose output differs first, innermost first."""
    per_pass = len(whole)
    if len(parts) == per_pass * len(pieces):
        for index, (layer, full) in enumerate(whole):
            some = [parts[index + per_pass * k][1] for k in range(len(pieces))]
            if any(full.ndim != x.ndim or x.ndim < 2 for x in some):
                continue
            # There is one row of tokens; what works on tokens alone, such as
            # a projection of heads, has them on the first axis.
            axis = 1 if len(full) == 1 else 0
            others = {x.shape[:axis] + x.shape[axis + 1 :] for x in (full, *some)}
            joined = np.concatenate(some, axis) if len(others) == 1 else None
            if joined is None or joined.shape != full.shape:
                continue
            spread = max(float(full.std()), 1e-6)
            if np.abs(joined - full).max() > 1e-2 * spread:
                return layer
    return plan.model


@contextlib.contextmanager
def recorded(layers):
    """Records what each layer returns, in the order in which calls end."""
    calls = []

    def record(layer, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        for x in keras.tree.flatten(outputs)[:1]:
            calls.append((layer, np.asarray(ops.convert_to_numpy(x), "float64")))
        return outputs

    patched = []
    try:
        for layer in layers:
            wrapped = functools.wraps(layer.call)(
                functools.partial(record, layer, layer.call)
            )
            object.__setattr__(layer, "call", wrapped)
            patched.append(layer)
        yield calls
    finally:
        for layer in patched:
            object.__delattr__(layer, "call")
