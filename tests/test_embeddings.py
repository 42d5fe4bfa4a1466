"""Tokens in, logits out, and token types."""

import keras
import numpy as np
import pytest
from keras import ops
from numeric import assert_near, gradients, normal, randomize, to_numpy, weights_of

import keras_tx as tx
from keras_tx import masks

TOKENS = np.array([[5, 7, 0], [2, 0, 0]])


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "int32", "int64", "uint16"]
)
def test_tokens_of_any_integer_dtype_find_their_rows(dtype):
    layer = tx.TokenEmbedding(300, 4, pad_id=0)
    x = layer(TOKENS.astype(dtype))
    np.testing.assert_array_equal(to_numpy(x), weights_of(layer)["embeddings"][TOKENS])
    assert to_numpy(masks.implicit(x)).tolist() == (TOKENS != 0).tolist()


@pytest.mark.parametrize("pad_id", [0, 2, 7, None])
def test_any_token_can_be_padding(pad_id):
    layer = tx.TokenEmbedding(9, 4, pad_id=pad_id)
    mask = masks.implicit(layer(TOKENS))
    if pad_id is None:
        assert mask is None
    else:
        np.testing.assert_array_equal(to_numpy(mask), np.not_equal(TOKENS, pad_id))


@pytest.mark.parametrize("tie_weights", [True, False])
@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("soft_cap", [None, 2.5])
def test_logits_equal_the_reference(tie_weights, use_bias, soft_cap):
    layer = tx.TokenEmbedding(
        9, 4, tie_weights=tie_weights, use_bias=use_bias, soft_cap=soft_cap
    )
    layer(TOKENS)
    randomize(layer)
    w, x = weights_of(layer), normal(2, 3, 4)
    kernel = w["embeddings"].T if tie_weights else w["reverse_embeddings"]
    expected = x @ kernel + w.get("bias", 0.0)
    if soft_cap is not None:
        expected = soft_cap * np.tanh(expected / soft_cap)
    assert_near(layer(x, reverse=True), expected)
    assert len(w) == 1 + (not tie_weights) + use_bias


@pytest.mark.parametrize(
    "dtype", ["float16", "bfloat16", "mixed_float16", "mixed_bfloat16"]
)
@pytest.mark.parametrize("tie_weights", [True, False])
def test_logits_are_float32_and_summed_in_it_under_half_precision(dtype, tie_weights):
    # 1000 features of 10 with a kernel of 10: the sum overflows float16.
    layer = tx.TokenEmbedding(3, 1000, tie_weights=tie_weights, dtype=dtype)
    layer(np.array([[0]]))
    for weight in layer.weights:
        weight.assign(np.full(weight.shape, 10.0))
    logits = layer(np.full((1, 1, 1000), 10.0, "float32"), reverse=True)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    np.testing.assert_allclose(to_numpy(logits), 100_000.0, rtol=1e-5)
    x = layer(np.array([[0]]))
    assert keras.backend.standardize_dtype(x.dtype) == layer.compute_dtype


def test_a_tied_table_has_the_gradients_of_both_uses():
    layer = tx.TokenEmbedding(9, 4)
    layer(TOKENS)

    def way_in(x):
        return ops.sum(ops.square(layer(TOKENS)))

    def way_out(x):
        return ops.sum(ops.sin(layer(x, reverse=True)))

    x = normal(2, 3, 4)
    both, first, second = (
        gradients(layer, function, x)[1]["embeddings"]
        for function in (lambda x: way_in(x) + way_out(x), way_in, way_out)
    )
    assert np.abs(first).max() > 0 and np.abs(second).max() > 0
    np.testing.assert_allclose(both, first + second, atol=1e-5)


def test_the_mask_of_features_is_kept_on_the_way_out():
    layer = tx.TokenEmbedding(9, 4, pad_id=0)
    logits = layer(layer(TOKENS), reverse=True)
    assert to_numpy(masks.implicit(logits)).tolist() == (TOKENS != 0).tolist()


def test_segments_add_the_row_of_each_type():
    x, types = normal(2, 3, 4), np.array([[0, 1, 1], [2, 0, 0]])
    layer = tx.LearnedSegment(3)
    layer(x)
    randomize(layer)
    table = weights_of(layer)["embeddings"]
    assert_near(layer(x), x + table[0])
    for given in (types, types.astype("uint8"), types.tolist()):
        assert_near(layer(x, token_types=given), x + table[types])


def test_tables_start_normal_with_a_spread_of_two_hundredths():
    for layer, inputs in (
        (tx.TokenEmbedding(500, 40), TOKENS),
        (tx.LearnedPosition(500), np.zeros((1, 3, 40), "float32")),
        (tx.LearnedSegment(500), np.zeros((1, 3, 40), "float32")),
    ):
        layer(inputs)
        table = weights_of(layer)["embeddings"]
        assert table.shape == (500, 40)
        assert table.std() == pytest.approx(0.02, rel=0.05)
        assert abs(table.mean()) < 0.001
