"""Features times a matrix, whatever stands before the features."""

import keras
import numpy as np
import pytest
from keras import ops

from keras_tx import kernels


@pytest.mark.parametrize("equation", ["nd,dv->nv", "nd,vd->nv"])
@pytest.mark.parametrize("leading", [(6,), (2, 3), (2, 3, 4), (2, 0), (0, 3)])
def test_project_is_a_product_over_the_last_axis(equation, leading):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*leading, 5)).astype("float32")
    kernel = rng.normal(size=(5, 7)).astype("float32")
    given = kernel if equation == "nd,dv->nv" else kernel.T
    y = kernels.project(
        ops.convert_to_tensor(x), ops.convert_to_tensor(given), equation
    )
    assert tuple(y.shape) == (*leading, 7)
    np.testing.assert_allclose(
        ops.convert_to_numpy(y),
        x.astype("float64") @ kernel.astype("float64"),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_project_of_half_precision_is_in_float32(dtype):
    # 300 products of 300 sum to more than float16 holds.
    x = ops.full((2, 3, 300), 300.0, dtype=dtype)
    y = kernels.project(x, ops.full((300, 7), 300.0, dtype=dtype), "nd,dv->nv")
    assert keras.backend.standardize_dtype(y.dtype) == "float32"
    np.testing.assert_allclose(ops.convert_to_numpy(y), 2.7e7, rtol=1e-2)


def test_project_keeps_known_sizes():
    x = keras.Input((None, 5))
    layer = keras.layers.Lambda(
        lambda x: kernels.project(x, ops.ones((5, 7)), "nd,dv->nv")
    )
    assert tuple(layer(x).shape) == (None, None, 7)
