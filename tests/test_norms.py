"""Norms by name, by template, and the mask that they keep."""

import keras
import numpy as np
import pytest
import reference
from numeric import TOLERANCE, assert_near, normal, randomize, to_numpy, weights_of

import keras_tx as tx
from keras_tx import masks
from keras_tx.norms import NormTemplate

NORMS = ("layer", "rms")


@pytest.mark.parametrize("kind", NORMS)
def test_norm_equals_the_formula_with_an_epsilon_of_1e_5(kind):
    # Small features, where Keras' own default epsilon of 1e-3 would show.
    x = normal(2, 5, 8) * 0.01
    norm = NormTemplate(kind).make("norm")
    norm(x)
    randomize(norm)
    assert_near(norm(x), reference.norm(kind, weights_of(norm), x))
    assert norm.epsilon == 1e-5


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "mixed_float16"])
def test_norm_of_large_features_stays_right_in_half_precision(kind, dtype):
    # Squares of 3,000 overflow float16, whose largest number is 65,504.
    x = (normal(2, 5, 64) * 3000).astype("float16").astype("float32")
    norm = NormTemplate(kind).make("norm", dtype)
    y = to_numpy(norm(x))
    expected = reference.norm(kind, weights_of(norm), x)
    np.testing.assert_allclose(y, expected, atol=4 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_norm_of_zeros_is_zero(kind, dtype):
    norm = NormTemplate(kind).make("norm", dtype)
    np.testing.assert_array_equal(to_numpy(norm(np.zeros((1, 2, 8)))), 0.0)


@pytest.mark.parametrize(
    "template", [keras.layers.RMSNormalization(epsilon=0.25), "rms", "layer"]
)
def test_norm_keeps_the_mask(template):
    x = tx.TokenEmbedding(9, 8, pad_id=0)(np.array([[3, 4, 0]]))
    y = NormTemplate(template).make("norm")(x)
    assert to_numpy(masks.implicit(y)).tolist() == [[True, True, False]]


def test_a_template_gives_its_kind_and_epsilon_and_no_weights():
    template = keras.layers.RMSNormalization(epsilon=0.25)
    x = normal(2, 5, 8)
    template(x)
    template.scale.assign(np.full(8, 3.0))
    norm = NormTemplate(template).make("norm")
    assert norm.epsilon == 0.25 and norm.name == "norm"
    w = {"scale": np.ones(8)}
    assert_near(norm(x), reference.norm("rms", w, x, epsilon=0.25))


def test_a_template_survives_its_config():
    for norm in ("layer", "rms", None, keras.layers.LayerNormalization(epsilon=0.5)):
        template = NormTemplate(norm)
        again = NormTemplate(template)
        assert again.config == template.config
    assert NormTemplate(None).make("norm") is None
