"""Numbers in and out of layers, and gradients, the same way on every backend."""

import contextlib

import keras
import numpy as np
from keras import ops

# What half-precision results may differ by, relative to the largest number.
TOLERANCE = {
    "float64": 1e-9,
    "float32": 2e-5,
    "float16": 2e-3,
    "mixed_float16": 2e-3,
    "bfloat16": 2e-2,
    "mixed_bfloat16": 2e-2,
}


def to_numpy(x):
    """Returns tensors as float64, booleans or integers, in any nesting."""
    if isinstance(x, (tuple, list)):
        return tuple(to_numpy(one) for one in x)
    if keras.backend.is_float_dtype(x.dtype):
        # By way of float32: NumPy itself has no bfloat16.
        dtype = keras.backend.standardize_dtype(x.dtype)
        wide = "float64" if dtype == "float64" else "float32"
        return ops.convert_to_numpy(ops.cast(x, wide)).astype("float64")
    return ops.convert_to_numpy(x)


def weights_of(layer):
    """Returns the weights of a built layer by path, without the layer's name."""
    return {
        variable.path.split("/", 1)[1]: to_numpy(variable.value)
        for variable in layer.weights
    }


def randomize(layer, seed=0, spread=0.5):
    """Gives every weight of a built layer random values, biases and scales too."""
    rng = np.random.default_rng(seed)
    for variable in layer.trainable_weights:
        values = rng.normal(0, spread, variable.shape)
        variable.assign(
            values + (1 if variable.path.endswith(("gamma", "scale")) else 0)
        )


def normal(*shape, seed=0, dtype="float32"):
    """Returns normal random numbers."""
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_near(actual, expected, policy="float32", scale=1.0):
    """Asserts equality up to what a dtype policy can hold."""
    actual = actual if isinstance(actual, np.ndarray) else to_numpy(actual)
    tolerance = TOLERANCE[policy] * scale
    assert actual.shape == expected.shape
    size = max(1.0, np.abs(expected).max(initial=0.0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * size)


@contextlib.contextmanager
def float64_on_every_backend():
    """Lets JAX, too, compute in float64."""
    if keras.backend.backend() != "jax":
        yield
        return
    import jax

    if hasattr(jax, "enable_x64"):
        context = jax.enable_x64(True)
    else:  # older versions
        context = jax.experimental.enable_x64()
    with context:
        yield


def gradients(layer, function, *inputs):
    """Returns gradients of `function(*inputs)`, a scalar, as NumPy.

    Args:
        layer: Layer or model whose trainable weights are differentiated for.
        function: Function of tensors that calls `layer`.
        *inputs: Float arrays, also differentiated for.

    Returns:
        The list of the inputs' gradients, and a dict of the weights' by path.
        Zeros stand for no gradient at all.
    """
    variables = layer.trainable_variables
    inputs = [ops.convert_to_tensor(x) for x in inputs]
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = function(*inputs)
        found = tape.gradient(result, [*inputs, *(v.value for v in variables)])
    elif backend == "jax":
        import jax

        def of_values(inputs, values):
            mapping = list(zip(variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return function(*inputs)

        of_inputs, of_weights = jax.jit(jax.grad(of_values, argnums=(0, 1)))(
            inputs, [v.value for v in variables]
        )
        found = [*of_inputs, *of_weights]
    else:
        import torch

        inputs = [x.detach().requires_grad_() for x in inputs]
        found = torch.autograd.grad(
            function(*inputs),
            [*inputs, *(v.value for v in variables)],
            allow_unused=True,
        )
    sources = [*inputs, *(v.value for v in variables)]
    found = [
        np.zeros(tuple(x.shape)) if g is None else to_numpy(g)
        for g, x in zip(found, sources, strict=True)
    ]
    by_path = {
        variable.path.split("/", 1)[1]: gradient
        for variable, gradient in zip(variables, found[len(inputs) :], strict=True)
    }
    return found[: len(inputs)], by_path
