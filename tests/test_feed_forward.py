"""The feed-forward layer, one token at a time."""

import keras
import numpy as np
import pytest
import reference
from numeric import assert_near, normal, randomize, to_numpy, weights_of

import keras_tx as tx


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("use_bias", [False, True])
def test_feed_forward_equals_the_reference(activation, gated, use_bias):
    x = normal(2, 5, 6)
    layer = tx.FeedForward(11, activation, gated=gated, use_bias=use_bias)
    layer(x)
    randomize(layer)
    weights = weights_of(layer)
    assert len(weights) == (2 + gated) * (1 + use_bias)
    bend = reference.ACTIVATIONS[activation]
    assert_near(layer(x), reference.feed_forward(weights, x, bend, gated))


def test_each_token_is_processed_by_itself():
    x = normal(2, 5, 6)
    layer = tx.FeedForward(11, gated=True)
    together = to_numpy(layer(x))
    for row, token in np.ndindex(2, 5):
        alone = to_numpy(layer(x[row, token][None]))[0]
        np.testing.assert_allclose(alone, together[row, token], atol=1e-6)


def test_the_two_gelus_differ_by_what_is_known():
    x = np.linspace(-6, 6, 2001, dtype="float32")
    exact = to_numpy(keras.activations.gelu(x, approximate=False))
    approximate = to_numpy(tx.gelu_tanh(x))
    np.testing.assert_allclose(exact, reference.gelu(x.astype("float64")), atol=2e-6)
    np.testing.assert_allclose(
        approximate, reference.gelu_tanh(x.astype("float64")), atol=2e-6
    )
    assert np.abs(exact - approximate).max() == pytest.approx(4.7e-4, abs=2e-5)


def test_gelu_by_name_is_the_exact_one():
    x = normal(3, 6)
    for name, bend in (("gelu", reference.gelu), ("gelu_tanh", reference.gelu_tanh)):
        layer = tx.FeedForward(11, name)
        layer(x)
        randomize(layer, spread=1.0)
        assert_near(layer(x), reference.feed_forward(weights_of(layer), x, bend))


def test_kernels_of_one_initializer_differ():
    for initializer in (
        keras.initializers.RandomNormal(),
        keras.initializers.RandomNormal(seed=3),
    ):
        layer = tx.FeedForward(6, gated=True, kernel_initializer=initializer)
        layer(normal(2, 6))
        kernels = [
            weights_of(layer)[f"{n}/kernel"] for n in ("widen", "gate", "narrow")
        ]
        assert (kernels[0] != kernels[1]).any() and (kernels[0] != kernels[2]).any()


def test_hidden_features_are_dropped_only_in_training():
    x = normal(2, 5, 6)
    layer = tx.FeedForward(64, dropout=0.5)
    first, second = to_numpy(layer(x)), to_numpy(layer(x))
    np.testing.assert_array_equal(first, second)
    first, second = (to_numpy(layer(x, training=True)) for _ in range(2))
    assert (first != second).any()
