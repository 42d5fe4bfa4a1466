"""Attention block by block and by the backend's kernel, against written-out scores."""

import warnings

import keras
import numpy as np
import pytest
import reference
from keras import ops
from numeric import assert_near, gradients, normal, randomize, to_numpy

import keras_tx as tx
from keras_tx import blockwise, kernels, masks

BATCH, HEADS, KEY_HEADS, DIM, VALUE_DIM = 2, 4, 2, 6, 3
RNG = np.random.default_rng(7)
KEYS = RNG.random((BATCH, 13)) > 0.3
KEYS[1] = False  # a row that sees nothing
SEGMENTS = np.sort(RNG.integers(0, 3, (BATCH, 13)))

# What the layer is told, what the call is told; 13 queries and keys unless `keys`.
CASES = {
    "nothing": ({}, {}),
    "causal": ({"causal": True}, {}),
    "causal over more keys": ({"causal": True}, {"keys": 17}),
    "causal over fewer keys": ({"causal": True}, {"keys": 9}),
    "window": ({"window": 3}, {}),
    "causal window": ({"causal": True, "window": 4}, {}),
    "causal window over more keys": ({"causal": True, "window": 2}, {"keys": 17}),
    "soft cap": ({"causal": True, "soft_cap": 0.7}, {}),
    "key mask": ({}, {"key_mask": KEYS}),
    "causal key mask": ({"causal": True}, {"key_mask": KEYS}),
    "query mask": ({"causal": True}, {"query_mask": ~KEYS}),
    "pairs": ({}, {"attention_mask": RNG.random((BATCH, HEADS, 13, 13)) > 0.4}),
    "pairs of all heads": ({}, {"attention_mask": RNG.random((BATCH, 13, 13)) > 0.4}),
    "segments": ({"causal": True, "window": 5}, {"segment_ids": SEGMENTS}),
    "bias": ({"causal": True}, {"bias": normal(1, HEADS, 13, 13)}),
    "bias over keys": ({"soft_cap": 2.0}, {"bias": normal(BATCH, 1, 1, 13)}),
    "bias that masks": (
        {},
        {"bias": np.where(RNG.random((13, 13)) > 0.5, 0.5, -np.inf).astype("float32")},
    ),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Five queries a block, so that thirteen make two whole ones and a rest."""
    monkeypatch.setattr(blockwise, "BLOCK", 5)


def compiled(function):
    """One program on JAX, which would compile every operation by itself."""
    if keras.backend.backend() != "jax":
        return function
    import jax

    return jax.jit(function)


def heads(num_keys=13):
    return (
        normal(BATCH, 13, HEADS, DIM, seed=1),
        normal(BATCH, num_keys, KEY_HEADS, DIM, seed=2),
        normal(BATCH, num_keys, KEY_HEADS, VALUE_DIM, seed=3),
    )


@pytest.mark.parametrize("name", CASES)
def test_blocks_give_the_reference_and_the_gradients_of_written_out_scores(name):
    options, call = CASES[name]
    call = dict(call)
    inputs = heads(call.pop("keys", 13))
    learned_bias = name == "bias"
    bias = call.pop("bias", None)
    if learned_bias:
        inputs = (*inputs, bias)
    weighting = normal(BATCH, 13, HEADS, VALUE_DIM, seed=4)
    found = {}
    for implementation in ("dense", "blockwise"):
        layer = tx.ScaledAttention(implementation=implementation, **options)

        def attend(query, key, value, *learned, layer=layer):
            own = learned[0] if learned else bias
            return layer(query, key=key, value=value, bias=own, **call)

        def total(*inputs, attend=attend):
            return ops.sum(ops.multiply(attend(*inputs), weighting))

        output = to_numpy(compiled(attend)(*map(ops.convert_to_tensor, inputs)))
        found[implementation] = (output, gradients(layer, total, *inputs)[0])
    query, key, value = (x.astype("float64") for x in inputs[:3])
    allow = reference.allowed(
        (BATCH, HEADS, 13, key.shape[1]),
        causal=options.get("causal", False),
        window=options.get("window"),
        query_mask=call.get("query_mask"),
        key_masks=[call["key_mask"]] if "key_mask" in call else (),
        attention_mask=call.get("attention_mask"),
        segment_ids=call.get("segment_ids"),
    )
    expected, _ = reference.attention(
        query,
        key,
        value,
        allow,
        soft_cap=options.get("soft_cap"),
        bias=0.0 if bias is None else bias.astype("float64"),
    )
    output, slopes = found["blockwise"]
    assert_near(output, expected)
    for one, other in zip(slopes, found["dense"][1], strict=True):
        assert np.abs(one).max() > 0
        assert_near(one, other)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16", "bfloat16"])
def test_blocks_are_as_exact_in_half_precision(dtype):
    inputs = heads()
    results = [
        to_numpy(
            tx.ScaledAttention(causal=True, implementation=name, dtype=dtype)(
                inputs[0], key=inputs[1], value=inputs[2]
            )
        )
        for name in ("blockwise", "dense")
    ]
    assert_near(results[0], results[1], dtype)


def test_what_no_query_sees_may_be_not_a_number():
    query, key, value = heads()
    key[0, 12], value[0, 12] = np.nan, np.inf
    mask = np.ones((BATCH, 13), bool)
    mask[0, 12] = False
    layer = tx.ScaledAttention(implementation="blockwise")
    output = to_numpy(layer(query, key=key, value=value, key_mask=mask))
    assert np.isfinite(output).all()


@pytest.mark.parametrize("masked", [False, True])
def test_no_rows_at_all_give_no_rows(masked):
    layer = tx.ScaledAttention(causal=True, implementation="blockwise")
    query, key, value = (x[:0] for x in heads())
    mask = np.ones((0, 13), bool) if masked else None
    output = layer(query, key=key, value=value, key_mask=mask)
    assert tuple(output.shape) == (0, 13, HEADS, VALUE_DIM)
    found, _ = gradients(
        layer,
        lambda query: ops.sum(layer(query, key=key, value=value, key_mask=mask)),
        query,
    )
    assert found[0].shape == (0, 13, HEADS, DIM)


def test_dropout_drops_weights_and_its_gradient_knows_which():
    """With one-hot values the output is the weights themselves."""
    length = 13
    query = normal(1, length, 1, DIM, seed=1)
    values = np.eye(length, dtype="float32")[None, :, None]
    weighting = normal(1, length, 1, length, seed=4)

    def layer(dropout):
        return tx.ScaledAttention(
            dropout=dropout, implementation="blockwise", seed=3, dtype="float32"
        )

    dropping = layer(0.4)
    dropping.build()
    start = ops.convert_to_numpy(dropping.seed_generator.state)
    whole = to_numpy(layer(0.0)(query, key=query, value=values))
    dropped = to_numpy(dropping(query, key=query, value=values, training=True))
    kept = dropped > 0
    assert 0.4 < kept.mean() < 0.8
    np.testing.assert_allclose(dropped[kept], whole[kept] / 0.6, rtol=1e-5)
    # Each block draws anew.
    assert not np.array_equal(kept[0, 0:5], kept[0, 5:10])
    # At inference nothing is dropped.
    calm = to_numpy(dropping(query, key=query, value=values))
    np.testing.assert_allclose(calm, whole, rtol=1e-5)

    def total(value):
        output = dropping(query, key=query, value=value, training=True)
        return ops.sum(ops.multiply(output, weighting))

    dropping.seed_generator.state.assign(start)
    (slope,), _ = gradients(dropping, total, values)
    expected = np.einsum("btns,btnv->bsnv", dropped, weighting)
    assert_near(slope, expected)


def test_a_gradient_of_dropped_scores_is_that_of_the_weights_kept():
    """Against differences, with the dropped weights held still."""
    layer = tx.ScaledAttention(dropout=0.5, implementation="blockwise", seed=3)
    query, key, value = (normal(1, 7, 1, 4, seed=seed) for seed in range(3))
    layer(query, key=key, value=value, training=True)
    start = ops.convert_to_numpy(layer.seed_generator.state)

    def total(query):
        return ops.sum(ops.square(layer(query, key=key, value=value, training=True)))

    layer.seed_generator.state.assign(start)
    (slope,), _ = gradients(layer, total, query)
    step = 1e-2
    for at in [(0, 0, 0, 1), (0, 6, 0, 3)]:
        values = []
        for sign in (1, -1):
            moved = query.copy()
            moved[at] += sign * step
            layer.seed_generator.state.assign(start)
            values.append(float(total(ops.convert_to_tensor(moved))))
        expected = (values[0] - values[1]) / (2 * step)
        assert abs(slope[at] - expected) < 2e-2 * max(1.0, abs(expected))


def test_a_block_has_the_mask_of_its_part():
    whole = masks.Mask(causal=True, window=3)
    for block in [(0, 5, 0, 9), (5, 5, 4, 10), (10, 3, 2, 12)]:
        start, size, low, width = block
        part = to_numpy(whole.band(block, 13, 17))
        full = to_numpy(whole.dense(13, 17))[0, 0]
        assert np.array_equal(part, full[start : start + size, low : low + width])


def test_blocks_leave_out_keys_that_nobody_sees():
    def widths(mask, num_keys):
        work = blockwise._Blocks(mask, 1, 1, 13, num_keys)
        return [(low, width) for _, _, low, width in work.plan()]

    assert widths(masks.Mask(causal=True), 13) == [(0, 5), (0, 10), (0, 13)]
    assert widths(masks.Mask(causal=True, window=2), 13) == [(0, 5), (4, 6), (9, 4)]
    assert widths(masks.Mask(window=2), 13) == [(0, 6), (4, 7), (9, 4)]
    assert widths(masks.Mask(), 17) == [(0, 17)] * 3


def test_the_rule_of_auto():
    def chosen(length, num_keys=None, plain=True, key_heads=2, wish="auto", **mask):
        mask.setdefault("same_length", num_keys is None)
        query = keras.KerasTensor((1, length, 2, 8))
        key = keras.KerasTensor((1, num_keys or length, key_heads, 8))
        return kernels.choose(wish, query, key, key, masks.Mask(**mask), plain=plain)

    by_itself = "fused" if keras.backend.backend() == "torch" else None
    assert chosen(64) == (by_itself or "dense")
    assert chosen(1024, causal=True) == (by_itself or "blockwise")
    assert chosen(64, key_heads=1) == "dense"
    assert chosen(2048, plain=False) == "blockwise"
    assert chosen(2048, window=64, causal=True) == "blockwise"
    assert chosen(64, num_keys=65, causal=True) == "dense"
    assert chosen(None, plain=False) == "dense"
    assert chosen(4096, wish="dense") == "dense"


def test_a_wish_that_cannot_be_met_warns_and_another_serves():
    query = keras.KerasTensor((1, None, 2, 8))
    with pytest.warns(UserWarning, match="needs to know the lengths"):
        found = kernels.choose(
            "blockwise", query, query, query, masks.Mask(same_length=True), plain=False
        )
    assert found == "dense"
    query, key, value = heads()
    expected = to_numpy(tx.ScaledAttention()(query, key=key, value=value))
    with pytest.warns(UserWarning, match="equal numbers of query and key heads"):
        output = tx.ScaledAttention(implementation="fused")(query, key=key, value=value)
    assert_near(output, expected)


@pytest.mark.parametrize("causal", [False, True])
def test_the_backends_kernel_gives_the_same(causal):
    inputs = [normal(BATCH, 13, HEADS, DIM, seed=seed) for seed in range(3)]
    results = [
        to_numpy(
            tx.ScaledAttention(causal=causal, implementation=name)(
                inputs[0], key=inputs[1], value=inputs[2]
            )
        )
        for name in ("fused", "dense")
    ]
    assert_near(results[0], results[1])


def test_a_model_trains_the_same_by_blocks_and_asks_for_scores_in_vain():
    def model(implementation):
        block = tx.TransformerBlock(
            tx.MultiHead(
                4,
                num_kv_heads=2,
                causal=True,
                position=tx.RotaryPosition(),
                attention=tx.ScaledAttention(implementation=implementation),
            ),
            16,
        )
        return block

    x = normal(2, 13, 8)
    dense, blocks = model("dense"), model("blockwise")
    dense(x), blocks(x)
    for one, other in zip(blocks.weights, dense.weights, strict=True):
        one.assign(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        output, weights = blocks(x, return_attention_scores=True)
    assert np.array_equal(to_numpy(blocks(x)), to_numpy(output))
    assert np.allclose(to_numpy(weights).sum(-1), 1.0, atol=1e-5)
    slopes = [
        gradients(block, lambda x, block=block: ops.sum(ops.square(block(x))), x)
        for block in (dense, blocks)
    ]
    assert_near(slopes[1][0][0], slopes[0][0][0])
    for one, other in zip(slopes[1][1].values(), slopes[0][1].values(), strict=True):
        assert_near(one, other)


def test_weights_beside_another_output_mix_no_values(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("values were mixed for nothing")

    layer = tx.ScaledAttention(causal=True, implementation="blockwise")
    query, key, value = heads()
    expected = to_numpy(layer(query, key=key, value=value))
    monkeypatch.setattr(kernels, "mix", refuse)
    output, weights = layer(query, key=key, value=value, return_attention_scores=True)
    assert np.array_equal(to_numpy(output), expected)
    assert_near(to_numpy(weights).sum(-1), np.ones((BATCH, HEADS, 13)))


# ----------------------------------------------------------------------------
# Biases by position
# ----------------------------------------------------------------------------


@keras.saving.register_keras_serializable("tests")
class Clock(keras.layers.Layer):
    """A position of a user's own: a learned wave, and a step that stays."""

    def build(self, x_shape=None):
        self.depth = self.add_weight(name="depth", shape=(HEADS, 1, 1))
        self.pace = self.add_weight(
            name="pace", shape=(), initializer="ones", trainable=False
        )

    def bias(self, query_positions, key_positions):
        distance = ops.expand_dims(query_positions, -1) - ops.expand_dims(
            key_positions, -2
        )
        wave = ops.sin(self.pace * ops.cast(distance, "float32"))
        return ops.expand_dims(wave, -3) * self.depth


POSITIONS = {
    "alibi": lambda: tx.AlibiPosition(HEADS),
    "relative": lambda: tx.RelativePosition(HEADS, num_buckets=8, max_distance=9),
    "a user's": Clock,
}


@pytest.mark.parametrize("name", POSITIONS)
def test_biases_by_position_are_made_by_blocks_with_the_same_gradients(name):
    x, added = normal(BATCH, 13, 8), normal(1, HEADS, 13, 13)
    positions = np.cumsum(RNG.integers(1, 3, (BATCH, 13)), axis=1).astype("int32")
    call = {
        "alibi": {"key_mask": KEYS, "positions": positions},
        "relative": {"bias": added},
        "a user's": {"segment_ids": SEGMENTS},
    }[name]
    layers = [
        tx.MultiHead(
            HEADS,
            num_kv_heads=2,
            causal=True,
            position=POSITIONS[name](),
            attention=tx.ScaledAttention(
                soft_cap=3.0, window=11, implementation=implementation
            ),
        )
        for implementation in ("dense", "blockwise")
    ]
    for layer in layers:
        layer(x)
        randomize(layer)
    sizes = []
    bias = layers[1].position.bias

    def noted(query_positions, key_positions):
        found = bias(query_positions, key_positions)
        sizes.append(tuple(found.shape)[-2:])
        return found

    object.__setattr__(layers[1].position, "bias", noted)
    found = []
    for layer in layers:

        def total(x, layer=layer):
            return ops.sum(ops.sin(layer(x, **call)))

        found.append(gradients(layer, total, x))
    assert max(sizes) <= (5, 13) and len(sizes) >= 3
    assert_near(found[1][0][0], found[0][0][0])
    for path, expected in found[0][1].items():
        assert_near(found[1][1][path], expected)
        assert np.abs(expected).max() > 0
    assert_near(to_numpy(layers[1](x, **call)), to_numpy(layers[0](x, **call)))


@pytest.mark.parametrize("large", [False, True])
def test_one_row_by_matrices_laid_out_before_is_what_the_layers_give(
    large, monkeypatch
):
    """In parts or whole, with and without a bias; other rows and layers as ever."""
    monkeypatch.setattr(kernels, "LARGE_MATRIX", 1 if large else 2**19)
    dense = [
        keras.layers.Dense(24, bias_initializer="ones"),
        keras.layers.Dense(24, use_bias=False),
        keras.layers.Dense(24, activation="relu"),
    ]
    heads = keras.layers.EinsumDense(  # of rows, as `rowwise` calls it
        "rd,dnh->rnh", (3, 8), bias_axes="nh", bias_initializer="ones"
    )
    features = keras.random.normal((2, 3, 16))
    for apply, layers in ((kernels.apply, dense), (kernels.rowwise, [*dense, heads])):
        for layer in layers:
            for x in (features[:1, :1], features):
                expected = to_numpy(layer(ops.reshape(x, (-1, 16))))
                with kernels.matrices_before(layers):
                    found = to_numpy(apply(layer, x))
                assert found.shape == (*x.shape[:2], *expected.shape[1:])
                found = found.reshape(expected.shape)
                np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("gated", [False, True])
def test_text_is_the_same_with_matrices_in_parts(gated, monkeypatch):
    def block(index):
        return tx.TransformerBlock(2, tx.FeedForward(32, gated=gated), norm="rms")

    model = tx.decoder(31, 16, 2, block=block)
    prompt = np.array([[3, 1, 4, 1, 5]])
    whole = tx.generate(model, prompt, 12)
    monkeypatch.setattr(kernels, "LARGE_MATRIX", 1)
    again = keras.models.clone_model(model)
    again.set_weights(model.get_weights())
    np.testing.assert_array_equal(tx.generate(again, prompt, 12), whole)
