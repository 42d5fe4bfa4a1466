"""Half precision: right where it can be, and finite everywhere."""

import keras
import numpy as np
import pytest
from numeric import TOLERANCE, normal, randomize, to_numpy

import keras_tx as tx
from keras_tx import masks

HALF = ("float16", "bfloat16", "mixed_float16", "mixed_bfloat16")
REAL = np.array([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]], bool)


def twins(make, policy, *inputs):
    """The layer of `make` in float32 and under a policy, with equal weights."""
    wide, half = make("float32"), make(policy)
    wide(*inputs), half(*inputs)
    randomize(wide, spread=0.3)
    for source, target in zip(wide.weights, half.weights, strict=True):
        target.assign(source.value)
    return wide, half


def dead_rows():
    mask = np.ones((2, 6, 6), bool)
    mask[0, [1, 4]] = False
    mask[1] = False
    return mask


MASKS = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "padding": {"attention_mask": REAL},
    "both": {"attention_mask": REAL, "use_causal_mask": True},
    "dead rows": {"attention_mask": dead_rows()},
}


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("layer", ["heads", "block"])
def test_half_precision_is_finite_and_near_float32_under_every_mask(layer, policy):
    def make(dtype):
        heads = tx.MultiHead(
            2, num_kv_heads=1, position=tx.RotaryPosition(), dtype=dtype
        )
        if layer == "heads":
            return heads
        return tx.TransformerBlock(heads, 12, norm="rms", dtype=dtype)

    x = normal(2, 6, 8)
    wide, half = twins(make, policy, x)
    for call in MASKS.values():
        expected, y = to_numpy(wide(x, **call)), to_numpy(half(x, **call))
        assert np.isfinite(y).all()
        size = np.abs(expected).max()
        np.testing.assert_allclose(y, expected, atol=TOLERANCE[policy] * size)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_scores_near_the_least_float16_survive_two_masks_at_once(policy):
    # Scores of -60,000, where adding one mask's number after another, or just
    # -1e9, is -inf in float16.
    query = np.full((2, 6, 4), 100.0, "float32")
    key = np.full((2, 6, 4), -150.0, "float32") + np.arange(6)[:, None]
    attention = tx.ScaledAttention(1.0, dtype=policy)
    y, weights = to_numpy(
        attention(
            query,
            key=key.astype("float32"),
            value=normal(2, 6, 3),
            attention_mask=REAL,
            use_causal_mask=True,
            return_attention_scores=True,
        )
    )
    assert np.isfinite(y).all()
    causal = np.tril(np.ones((6, 6), bool))
    allow = causal[None] & REAL[:, None]
    assert (weights[~allow] == 0).all()
    sums = weights.sum(-1)
    np.testing.assert_allclose(sums, allow.any(-1), atol=2e-3)


@pytest.mark.parametrize("policy", ["float16", "mixed_float16"])
def test_products_beyond_float16_choose_what_float32_chooses(policy):
    x = normal(1, 6, 64) * 60

    def make(dtype):
        return tx.MultiHead(8, dtype=dtype)

    wide, half = make("float32"), make(policy)
    wide(x), half(x)
    for source, target in zip(wide.weights, half.weights, strict=True):
        # Exact in float16, so that both start from the same numbers.
        values = np.asarray(to_numpy(source.value) * 4, "float16")
        source.assign(values.astype("float32")), target.assign(values)
    _, expected = to_numpy(wide(x, return_attention_scores=True))
    y, weights = to_numpy(half(x, return_attention_scores=True))
    query, key = to_numpy(wide.query(x[0])), to_numpy(wide.key(x[0]))
    assert np.abs(np.einsum("tnh,snh->nts", query, key)).max() > 65_504
    assert np.isfinite(y).all() and np.isfinite(weights).all()
    np.testing.assert_array_equal(weights.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("policy", HALF)
def test_scores_keep_the_bits_that_half_precision_drops(policy):
    # Scores of 1024 and 1025: bfloat16 has one number for both, and float16
    # cannot add ones beyond 2048.
    query = np.ones((1, 1, 4096), "float32")
    key = np.zeros((1, 2, 4096), "float32")
    key[0, 0, :1024] = key[0, 1, :1025] = 1.0
    _, weights = tx.ScaledAttention(1.0, dtype=policy)(
        query, key=key, return_attention_scores=True
    )
    expected = np.array([1, np.e]) / (1 + np.e)
    np.testing.assert_allclose(
        to_numpy(weights).ravel(), expected, atol=TOLERANCE[policy]
    )


@pytest.mark.parametrize("policy", HALF)
def test_a_mean_over_many_keys_is_a_mean(policy):
    # 4,096 weights of 1/4096: a half-precision sum would stop growing midway.
    query, value = np.zeros((1, 1, 2), "float32"), np.ones((1, 4096, 2), "float32")
    y = tx.ScaledAttention(dtype=policy)(query, key=0 * value, value=value)
    np.testing.assert_allclose(to_numpy(y), 1.0, atol=TOLERANCE[policy])


@pytest.mark.parametrize("policy", HALF)
def test_outputs_have_the_compute_dtype_and_logits_are_float32(policy):
    x, tokens = normal(2, 6, 8), np.array([[1, 2, 3, 4, 0, 0]] * 2)
    compute = keras.dtype_policies.get(policy).compute_dtype

    def dtype(x):
        return keras.backend.standardize_dtype(x.dtype)

    for layer in (
        tx.ScaledAttention(dtype=policy),
        tx.MultiHead(2, dtype=policy),
        tx.TransformerBlock(2, 8, dtype=policy),
        tx.TransformerBlock(2, 8, norm_position="post", dtype=policy),
        tx.FeedForward(8, gated=True, dtype=policy),
        tx.SinusoidalPosition(dtype=policy),
        tx.LearnedPosition(9, dtype=policy),
        tx.LearnedSegment(2, dtype=policy),
        tx.RMSNorm(dtype=policy),
        tx.AlibiPosition(2, dtype=policy),
        tx.RelativePosition(2, dtype=policy),
    ):
        assert dtype(layer(x)) == compute
    heads = normal(2, 6, 2, 4)
    assert dtype(tx.RotaryPosition(dtype=policy)(heads)) == compute
    embedding = tx.TokenEmbedding(9, 8, dtype=policy)
    assert dtype(embedding(tokens)) == compute
    assert dtype(embedding(x, reverse=True)) == "float32"
    assert dtype(tx.decoder(9, 8, 1, 2, dtype=policy)(tokens)) == "float32"
    classes = tx.encoder(9, 8, 1, 2, output="classes", num_classes=3, dtype=policy)
    assert dtype(classes(tokens)) == "float32"


def test_children_take_the_dtype_of_their_parent_whatever_the_policy_of_their_birth():
    x = normal(2, 6, 8)
    keras.config.set_dtype_policy("mixed_bfloat16")
    parts = {"attention": tx.ScaledAttention(), "position": tx.RotaryPosition()}
    feed_forward, norm = tx.FeedForward(8), keras.layers.LayerNormalization()
    keras.config.set_dtype_policy("float32")
    block = tx.TransformerBlock(tx.MultiHead(2, **parts), feed_forward, norm=norm)
    plain = tx.TransformerBlock(
        tx.MultiHead(2, position=tx.RotaryPosition()),
        tx.FeedForward(8),
        norm=keras.layers.LayerNormalization(),
    )
    block(x), plain(x)
    plain.set_weights(block.weights)
    np.testing.assert_array_equal(to_numpy(block(x)), to_numpy(plain(x)))


def test_a_mask_outlives_a_change_of_dtype():
    tokens = np.array([[3, 4, 5, 0], [6, 7, 0, 0]])
    x = tx.TokenEmbedding(9, 8, pad_id=0, dtype="float32")(tokens)
    for dtype in ("mixed_float16", "bfloat16"):
        y, weights = tx.MultiHead(2, dtype=dtype)(x, return_attention_scores=True)
        np.testing.assert_array_equal(to_numpy(masks.implicit(y)), tokens != 0)
        seen = to_numpy(weights).max((1, 2)) > 0
        np.testing.assert_array_equal(seen, tokens != 0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_bias_and_a_biasing_position_add_up_in_half_precision(policy):
    x, bias = normal(2, 6, 8), normal(6, 6, seed=3)
    for position in (tx.AlibiPosition, tx.RelativePosition):

        def make(dtype, position=position):
            return tx.MultiHead(2, position=position(2), dtype=dtype)

        wide, half = twins(make, policy, x)
        expected, y = to_numpy(wide(x, bias=bias)), to_numpy(half(x, bias=bias))
        size = np.abs(expected).max()
        np.testing.assert_allclose(y, expected, atol=2 * TOLERANCE[policy] * size)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_whole_models_in_half_precision_stay_near_float32(policy):
    tokens = np.array([[1, 2, 3, 4, 5, 6, 7, 8], [8, 7, 6, 5, 0, 0, 0, 0]])

    def make(dtype):
        return tx.decoder(9, 16, 2, 4, num_kv_heads=2, pad_id=0, dtype=dtype)

    wide, half = twins(make, policy, tokens)
    expected, y = to_numpy(wide(tokens)), to_numpy(half(tokens))
    difference = np.abs(y - expected).max() / expected.std()
    assert difference < 10 * TOLERANCE[policy]


def test_mixed_float16_learns_under_a_causal_and_a_padding_mask():
    # Copy the token before: what causal attention finds and nothing else does.
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 9, (64, 8))
    tokens[::2, 5:] = 0
    targets = np.roll(tokens, 1, 1)
    targets[:, 0] = tokens[:, 0]
    model = tx.decoder(9, 16, 1, 2, pad_id=0, dtype="mixed_float16")
    model.compile(
        keras.optimizers.Adam(0.03),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    history = model.fit(tokens, targets, batch_size=16, epochs=10, verbose=0)
    losses = history.history["loss"]
    assert np.isfinite(losses).all()
    assert losses[0] > 1.5 > 1.0 > losses[-1]
