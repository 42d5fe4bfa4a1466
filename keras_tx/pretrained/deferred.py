"""Models without values: shapes first, weights straight from the file after.

A model that is initialized and then loaded exists twice where it matters: the
largest table is drawn, then read, then copied. Keras already knows variables
that have a shape and no value yet, for the sake of shape inference; here they
are checked against the file's header and then filled by it.
"""

import math

import keras
import ml_dtypes  # comes with Keras
import numpy as np
from keras.src.backend.common import global_state

_PENDING = "uninitialized_variables"

# What backends ask of memory that they take over instead of copying.
_ALIGNMENT = 64


def build_without_values(build):
    """Calls `build()`, whose variables get shapes and no values.

    Args:
        build: A function without arguments that returns a model.

    Returns:
        The model, and all variables that wait for a value, seeds of dropout
        included. Nothing has been allocated for them.
    """
    before = list(global_state.get_global_attribute(_PENDING, []) or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            model = build()
        pending = list(global_state.get_global_attribute(_PENDING, []) or [])
    finally:
        # Keras would initialize them at the end of any later scope, even those
        # of a model that was refused.
        global_state.set_global_attribute(_PENDING, before)
    known = {id(variable) for variable in before}
    return model, [variable for variable in pending if id(variable) not in known]


def fill(pending, readers):
    """Gives every variable its value, one after the other.

    Args:
        pending: Variables without values, in the order of their making.
        readers: `{id(variable): function that returns its array}`. The rest
            start as their own initializers say.
    """
    for variable in pending:
        reader = readers.get(id(variable))
        if reader is not None:
            variable._initializer = lambda shape, dtype=None, read=reader: _take(read())
        variable._deferred_initialize()


def aligned_empty(shape, dtype):
    """Returns an uninitialized array that a backend can take over.

    Args:
        shape: Its shape.
        dtype: Its NumPy dtype.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def settle(array, dtype):
    """Returns an array in a dtype, contiguous and aligned; copied only if not so."""
    if (
        array.dtype == dtype
        and array.flags["C_CONTIGUOUS"]
        and array.flags["WRITEABLE"]
        and array.ctypes.data % _ALIGNMENT == 0
    ):
        return array
    settled = aligned_empty(array.shape, dtype)
    settled[...] = array
    return settled


def _take(array):
    """Returns a tensor of the backend in the array's own memory, if it can."""
    # Unaligned memory, once taken over, ends the process in TensorFlow's kernels.
    array = settle(array, array.dtype)
    half = array.dtype == ml_dtypes.bfloat16
    if keras.backend.backend() == "jax":
        import jax.numpy as jnp

        return jnp.asarray(array, dtype=array.dtype)  # without the dtype it copies
    if keras.backend.backend() == "torch" and half:
        import torch

        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    if keras.backend.backend() == "tensorflow" and array.size:
        import tensorflow as tf

        # Every other way copies twice.
        plain = array.reshape(-1).view(np.int16 if half else array.dtype)
        tensor = tf.experimental.dlpack.from_dlpack(plain.__dlpack__())
        tensor = tf.bitcast(tensor, tf.bfloat16) if half else tensor
        return tf.reshape(tensor, array.shape)
    return array  # torch takes it over as it is
