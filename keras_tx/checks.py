"""Checks of arguments: what arrived, what was expected, the remedy."""

import functools
import inspect
import math
import numbers

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.symbolic_scope import in_symbolic_scope


def positive_integer(name, value, *, optional=False):
    """Returns `value` as an `int` of at least 1, or `None` where allowed."""
    if value is None and optional:
        return None
    # Integers arrive as `np.int64` too; `True` is a flag that went astray.
    if (
        isinstance(value, numbers.Integral)
        and not isinstance(value, bool)
        and value >= 1
    ):
        return int(value)
    raise ValueError(
        f"`{name}` must be a positive integer"
        f"{' or None' if optional else ''}. Received: {name}={value!r} "
        f"(of type {type(value).__name__})."
    )


def integer(name, value, *, optional=False):
    """Returns `value` as an `int`, or `None` where allowed."""
    if value is None and optional:
        return None
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    raise ValueError(
        f"`{name}` must be an integer{' or None' if optional else ''}. "
        f"Received: {name}={value!r} (of type {type(value).__name__})."
    )


def positive_number(name, value, *, optional=False):
    """Returns `value` as a finite `float` above 0, or `None` where allowed."""
    if value is None and optional:
        return None
    if (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    ):
        return float(value)
    raise ValueError(
        f"`{name}` must be a finite number above 0"
        f"{' or None' if optional else ''}. Received: {name}={value!r}."
    )


def rate(name, value):
    """Returns a dropout rate in [0, 1) as a `float`."""
    if (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and 0 <= value < 1
    ):
        return float(value)
    raise ValueError(
        f"`{name}` is the share of features to drop, a number from 0 up to "
        f"but not including 1. Received: {name}={value!r}."
    )


def boolean(name, value):
    """Returns `value` as a `bool`."""
    if isinstance(value, (bool,)) or type(value).__name__ in ("bool_", "bool"):
        return bool(value)
    raise ValueError(
        f"`{name}` must be True or False. Received: {name}={value!r} "
        f"(of type {type(value).__name__})."
    )


def choice(name, value, options):
    """Returns `value`, one of `options`."""
    # `1 == True`, so identity of type matters beside equality.
    for option in options:
        if type(value) is type(option) and value == option:
            return value
    raise ValueError(
        f"`{name}` must be one of {', '.join(map(repr, options))}. "
        f"Received: {name}={value!r}."
    )


def rank(name, x, ranks, layout, remedy=None):
    """Refuses a tensor whose rank is not among `ranks`."""
    if len(x.shape) not in ranks:
        remedy = f" {remedy}" if remedy else ""
        raise ValueError(
            f"`{name}` must have the shape {layout}. "
            f"Received: {name}.shape={tuple(x.shape)}.{remedy}"
        )


def tensor(name, x):
    """Returns `x` as a tensor: Keras leaves lists inside arguments as they are."""
    if x is None or hasattr(x, "shape"):
        return x
    try:
        array = np.asarray(x)
    except ValueError:  # rows of different lengths
        array = np.asarray(None)
    if array.dtype == object:
        raise ValueError(
            f"`{name}` must be a tensor, an array or a list whose rows are "
            f"equally long. Received: {name}={x!r}. Pad the rows."
        )
    return ops.convert_to_tensor(array)


def floats(name, x):
    """Refuses a tensor of integers or booleans where features are needed."""
    if not keras.backend.is_float_dtype(x.dtype):
        raise ValueError(
            f"`{name}` must hold floats. Received: {name}.dtype="
            f"{keras.backend.standardize_dtype(x.dtype)}. Embed tokens first, "
            "with a `TokenEmbedding`, or cast with "
            f"`keras.ops.cast({name}, 'float32')`."
        )


def features(name, x, expected, layer):
    """Refuses another number of features than a layer was built for."""
    if expected is not None and x.shape[-1] != expected:
        raise ValueError(
            f"This `{type(layer).__name__}` was built for `{name}` with "
            f"{expected} features. Received: {name}.shape={tuple(x.shape)}. "
            "Make a new layer for another number of features."
        )


def size(name, x, axis, allowed, what, remedy):
    """Refuses an axis whose known size is none of the known `allowed` ones.

    Nothing is known of lengths that Keras invents while it works out shapes.
    """
    actual = x.shape[axis]
    if while_tracing_shapes() or not isinstance(actual, int):
        return
    if all(isinstance(one, int) for one in allowed) and actual not in allowed:
        expected = " or ".join(str(one) for one in sorted(set(allowed)))
        raise ValueError(
            f"`{name}` has {actual} {what} where {expected} "
            f"{'was' if expected == '1' else 'were'} expected. {remedy} "
            f"Received: {name}.shape={tuple(x.shape)}."
        )


def is_integer_dtype(x):
    """Whether `x` holds integers."""
    return keras.backend.is_int_dtype(x.dtype)


def integers(name, x, meaning):
    """Returns integers that can be looked up; refuses floats and booleans."""
    x = tensor(name, x)
    if while_tracing_shapes() and not keras.backend.is_keras_tensor(x):
        # Keras builds a subclassed model that it loads with invented floats.
        return ops.cast(x, "int32")
    if not is_integer_dtype(x):
        raise ValueError(
            f"`{name}` must hold integers ({meaning}). Received: "
            f"{name}.dtype={keras.backend.standardize_dtype(x.dtype)}. Cast "
            'it, or declare the input as `keras.Input(..., dtype="int32")`.'
        )
    # TensorFlow looks nothing up by 8 bits, and 8 bits compare with no length.
    if keras.backend.standardize_dtype(x.dtype) in ("int32", "int64"):
        return x
    return ops.cast(x, "int32")


@functools.cache
def _argument_names(call):
    return list(inspect.signature(call).parameters)[1:]


def given_by_name(call, args, skip):
    """Names what came by place and is not `None`.

    Keras adds implicit masks by name, also where a `None` came by place, so that
    an argument would come twice.

    Args:
        call: Method `call` of a layer's class.
        args: What came by place, without `self`.
        skip: Number of arguments at the start that stay in place.
    """
    names = _argument_names(call)
    if len(args) > len(names):
        raise ValueError(
            f"`{call.__qualname__}` takes {len(names)} arguments: "
            f"{', '.join(names)}. Received: {len(args)}."
        )
    named = dict(zip(names[skip:], args[skip:], strict=False))
    return {name: x for name, x in named.items() if x is not None}


def while_tracing_shapes():
    """Whether Keras is only working out shapes, with invented lengths."""
    return in_symbolic_scope()


def known_value(x):
    """Returns the NumPy value of `x`, or `None` while it is being traced."""
    if while_tracing_shapes() or keras.backend.is_keras_tensor(x):
        return None
    # A traced tensor refuses conversion, each backend with its own error.
    try:
        return ops.convert_to_numpy(x)
    except Exception:
        return None
