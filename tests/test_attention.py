"""What attention computes, against the essay, NumPy and Keras."""

import warnings

import keras
import numpy as np
import pytest
import reference
from keras import ops
from numeric import (
    assert_near,
    float64_on_every_backend,
    gradients,
    normal,
    randomize,
    to_numpy,
    weights_of,
)

import keras_tx as tx

# "an apple and a banana": tech, fruit, grammar.
TOKENS = ["An", "apple", "and", "a", "banana"]
X = np.array([[0, 0, 1], [0.7, 0.8, 0], [0, 0, 0.5], [0, 0, 1], [0, 0.8, 0]])
AFTER = np.array(
    [
        [0.1015, 0.2320, 0.6133],
        [0.2111, 0.4231, 0.3926],
        [0.1202, 0.2747, 0.5575],
        [0.1015, 0.2320, 0.6133],
        [0.1719, 0.3928, 0.4242],
    ]
)
LOGITS = np.array(
    [
        [0.5774, 0, 0.2887, 0.5774, 0],
        [0, 0.6524, 0, 0, 0.3695],
        [0.2887, 0, 0.1443, 0.2887, 0],
        [0.5774, 0, 0.2887, 0.5774, 0],
        [0, 0.3695, 0, 0, 0.3695],
    ]
)
APPLE, BANANA = TOKENS.index("apple"), TOKENS.index("banana")


@pytest.fixture(scope="module")
def passes():
    """The worked example after 0 to 60 passes of raw attention, in float64."""
    with float64_on_every_backend():
        attention = tx.ScaledAttention(dtype="float64")
        features, weights = [X[None]], []
        for _ in range(60):
            after, weight = attention(features[-1], return_attention_scores=True)
            features.append(to_numpy(after))
            weights.append(to_numpy(weight))
    return [x[0] for x in features], [w[0] for w in weights]


def deviation(x):
    """The largest deviation of any row from the mean row."""
    return np.abs(x - x.mean(0)).max()


# ----------------------------------------------------------------------------
# The worked example
# ----------------------------------------------------------------------------


def test_worked_example_gives_the_numbers_of_the_essay(passes):
    features, weights = passes
    np.testing.assert_allclose(features[1], AFTER, atol=5e-5)
    apple = [0.1571, 0.3016, 0.1571, 0.1571, 0.2273]
    np.testing.assert_allclose(weights[0][APPLE], apple, atol=5e-5)


def test_worked_example_gives_the_same_numbers_in_float32():
    after = tx.ScaledAttention()(X[None].astype("float32"))
    np.testing.assert_allclose(to_numpy(after)[0], AFTER, atol=6e-5)


def test_weights_are_the_softmax_of_the_worked_logits(passes):
    # The logarithm of the weights gives the logits back, up to one number a row.
    logits = np.log(passes[1][0])
    logits -= logits[:, [2]]
    np.testing.assert_allclose(logits, LOGITS - LOGITS[:, [2]], atol=1e-4)
    np.testing.assert_allclose(X @ X.T / np.sqrt(3), LOGITS, atol=5e-5)


def test_one_pass_brings_apple_and_banana_together(passes):
    before, after = (
        np.linalg.norm(x[APPLE] - x[BANANA]) for x in (passes[0][0], passes[0][1])
    )
    assert before == pytest.approx(0.7000, abs=5e-5)
    assert after == pytest.approx(0.0587, abs=5e-5)


def test_repeated_attention_collapses_to_one_vector_that_is_not_the_mean(passes):
    features, weights = passes
    deviations = [deviation(x) for x in features[1:5]]
    np.testing.assert_allclose(deviations[:3], [0.128, 1.3e-3, 1.3e-9], rtol=0.05)
    assert deviations[3] < 1e-15
    limit = [0.1408, 0.3101, 0.5211]
    np.testing.assert_allclose(features[-1], np.tile(limit, (5, 1)), atol=5e-5)
    np.testing.assert_allclose(X.mean(0), [0.14, 0.32, 0.50], atol=1e-9)
    np.testing.assert_allclose(weights[-1], np.full((5, 5), 0.2), atol=1e-9)


def test_collapse_cubes_the_deviation_at_every_pass(passes):
    first, second, third = (deviation(x) for x in passes[0][1:4])
    ratios = np.array([second / first**3, third / second**3])
    # One constant for both, over six orders of magnitude.
    assert ratios.min() > 0.1 and ratios.max() < 2 * ratios.min()


# ----------------------------------------------------------------------------
# Raw attention
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 1.0},
        {"scale": 0.3, "soft_cap": 1.5},
        {"causal": True},
        {"window": 2},
        {"causal": True, "window": 3, "soft_cap": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_kv_heads", [6, 3, 1])
def test_scaled_attention_equals_the_reference(options, num_kv_heads):
    query = normal(2, 5, 6, 4)
    key = normal(2, 7, num_kv_heads, 4, seed=1)
    value = normal(2, 7, num_kv_heads, 3, seed=2)
    y, weights = tx.ScaledAttention(**options)(
        query, key=key, value=value, return_attention_scores=True
    )
    masks = {name: options.get(name) for name in ("causal", "window")}
    allow = reference.allowed((2, 6, 5, 7), **masks)
    rest = {name: options.get(name) for name in ("scale", "soft_cap")}
    expected = reference.attention(query, key, value, allow, **rest)
    assert_near(y, expected[0])
    assert_near(weights, expected[1])


def test_heads_attend_apart_and_three_axes_are_one_head():
    x = normal(2, 5, 3, 4)
    together = to_numpy(tx.ScaledAttention()(x))
    for head in range(3):
        alone = tx.ScaledAttention()(x[:, :, head])
        np.testing.assert_allclose(to_numpy(alone), together[:, :, head], atol=1e-6)


def test_query_alone_is_its_own_key_and_value():
    x = normal(2, 5, 4)
    attention = tx.ScaledAttention()
    alone = to_numpy(attention(x))
    np.testing.assert_array_equal(alone, to_numpy(attention(x, key=x, value=x)))
    np.testing.assert_array_equal(alone, to_numpy(attention(x, key=x)))


def test_scale_keeps_the_softmax_from_saturating():
    wide = normal(1, 32, 256)
    scaled, raw = (
        to_numpy(
            tx.ScaledAttention(scale)(
                wide, key=normal(1, 32, 256, seed=1), return_attention_scores=True
            )[1]
        )
        for scale in (None, 1.0)
    )
    # Scores of spread √256 leave nearly all weight on one key.
    assert raw.max(-1).mean() > 0.8 > 0.3 > scaled.max(-1).mean()


def test_dropout_is_off_unless_training_and_leaves_the_mean():
    # The same row 400 times, each with a dropout of its own.
    x = np.tile(normal(1, 6, 4), (400, 1, 1))
    dropping, plain = tx.ScaledAttention(dropout=0.5, seed=3), tx.ScaledAttention()
    expected = to_numpy(plain(x))
    np.testing.assert_array_equal(to_numpy(dropping(x)), expected)
    runs = to_numpy(dropping(x, training=True))
    assert runs.std(0).min() > 0.1
    np.testing.assert_allclose(runs.mean(0), expected[0], atol=0.2)
    assert (to_numpy(dropping(x, training=True)) != runs).any()


def test_asking_for_weights_returns_those_before_dropout():
    x = normal(2, 5, 4)
    attention = tx.ScaledAttention(dropout=0.5)
    _, weights = attention(x, return_attention_scores=True, training=True)
    np.testing.assert_allclose(to_numpy(weights).sum(-1), 1.0, atol=1e-6)


# ----------------------------------------------------------------------------
# Attention with heads
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False, "qkv"])
@pytest.mark.parametrize("head_norm", [None, "rms", "layer"])
def test_multi_head_equals_the_reference(use_bias, head_norm):
    query, value, key = normal(2, 5, 12), normal(2, 7, 9, seed=1), normal(2, 7, 8)
    layer = tx.MultiHead(
        6, 4, num_kv_heads=2, use_bias=use_bias, query_key_norm=head_norm
    )
    layer(query, value, key)
    randomize(layer)
    weights = weights_of(layer)
    biased = {name for name in weights if name.endswith("/bias")}
    expected = set() if use_bias is False else {"query/bias", "key/bias", "value/bias"}
    assert biased == expected | ({"merge/bias"} if use_bias is True else set())
    y, shares = layer(query, value, key, return_attention_scores=True)
    expected = reference.multi_head(
        weights, query, value, key, np.ones((2, 6, 5, 7), bool), head_norm=head_norm
    )
    assert_near(y, expected[0])
    assert_near(shares, expected[1])


def test_identity_projections_reduce_one_head_to_raw_attention():
    x = normal(2, 5, 4)
    layer = tx.MultiHead(1, use_bias=False)
    layer(x)
    for variable in layer.weights:
        variable.assign(np.eye(4).reshape(variable.shape))
    assert_near(layer(x), to_numpy(tx.ScaledAttention()(x)))


def test_head_dim_defaults_to_an_equal_share_whatever_the_number_of_heads():
    for num_heads in (1, 2, 4, 8):
        layer = tx.MultiHead(num_heads)
        layer(normal(1, 3, 16))
        assert layer.count_params() == 4 * (16 * 16 + 16) == 1088


def test_grouped_heads_equal_heads_repeated():
    x = normal(2, 5, 12)
    grouped, full = tx.MultiHead(6, 2, num_kv_heads=2), tx.MultiHead(6, 2)
    grouped(x), full(x)
    randomize(grouped)
    weights = weights_of(grouped)
    for variable in full.weights:
        values = weights[variable.path.split("/", 1)[1]]
        if values.shape != variable.shape:
            values = np.repeat(values, 3, axis=-2)
        variable.assign(values)
    np.testing.assert_allclose(to_numpy(grouped(x)), to_numpy(full(x)), atol=2e-5)


def test_neighbouring_query_heads_share_a_key_head():
    query, key = normal(1, 3, 4, 8), normal(1, 5, 2, 8, seed=1)
    call = {"key": key, "value": key, "return_attention_scores": True}
    before = to_numpy(tx.ScaledAttention()(query, **call)[1])
    call["key"] = key * np.array([1.0, 2.0], "float32")[:, None]
    after = to_numpy(tx.ScaledAttention()(query, **call)[1])
    changed = np.abs(after - before).max((0, 2, 3)) > 1e-3
    assert changed.tolist() == [False, False, True, True]


def test_attention_is_permutation_equivariant():
    x, order = normal(2, 7, 12), np.array([3, 0, 6, 1, 5, 2, 4])
    for layer in (tx.ScaledAttention(), tx.MultiHead(3), tx.TransformerBlock(3, 8)):
        layer(x)
        shuffled = to_numpy(layer(x[:, order]))
        np.testing.assert_allclose(shuffled, to_numpy(layer(x))[:, order], atol=2e-6)


def test_position_breaks_the_permutation():
    x, order = normal(2, 7, 12), np.array([3, 0, 6, 1, 5, 2, 4])
    for layer in (
        tx.MultiHead(3, position=tx.RotaryPosition()),
        tx.MultiHead(3, position=tx.AlibiPosition(3)),
        keras.Sequential([tx.SinusoidalPosition(), tx.MultiHead(3)]),
    ):
        layer(x)
        shuffled = to_numpy(layer(x[:, order]))
        assert np.abs(shuffled - to_numpy(layer(x))[:, order]).max() > 1e-2


def test_asking_for_scores_never_changes_the_output():
    x = normal(2, 5, 12)
    for options in ({}, {"causal": True}, {"num_kv_heads": 1}):
        layer = tx.MultiHead(3, attention=tx.ScaledAttention(dropout=0.4), **options)
        y, _ = layer(x, return_attention_scores=True)
        np.testing.assert_array_equal(to_numpy(layer(x)), to_numpy(y))


def test_the_same_tensor_given_twice_is_self_attention_in_every_dtype():
    # Keras casts each argument on its own, which makes two tensors of one.
    x, positions = normal(2, 5, 12), np.array([7, 8, 9, 30, 31])
    for dtype in ("float32", "mixed_bfloat16"):
        layer = tx.MultiHead(3, position=tx.RotaryPosition(), dtype=dtype)
        alone = to_numpy(layer(x, positions=positions))
        for given in ((x, x), (x, x, x)):
            again = to_numpy(layer(*given, positions=positions))
            np.testing.assert_array_equal(alone, again)
        by_name = to_numpy(layer(x, value=x, positions=positions))
        np.testing.assert_array_equal(alone, by_name)


def test_numbers_of_numpy_are_numbers():
    x = normal(2, 5, 12)
    layer = tx.MultiHead(np.int64(3), np.int32(4), num_kv_heads=np.int16(1))
    assert layer(x).shape == (2, 5, 12)
    assert isinstance(layer.get_config()["num_heads"], int)


# ----------------------------------------------------------------------------
# Beside Keras
# ----------------------------------------------------------------------------

PATHS_IN_KERAS = {
    "query/kernel": "query/kernel",
    "query/bias": "query/bias",
    "key/kernel": "key/kernel",
    "key/bias": "key/bias",
    "value/kernel": "value/kernel",
    "value/bias": "value/bias",
    "merge/kernel": "attention_output/kernel",
    "merge/bias": "attention_output/bias",
}


def twins(*inputs, num_heads=4, num_kv_heads=None, head_dim=3):
    """A `MultiHead` and the layer of Keras that it replaces, with equal weights."""
    ours = tx.MultiHead(num_heads, head_dim, num_kv_heads=num_kv_heads)
    if num_kv_heads is None:
        theirs = keras.layers.MultiHeadAttention(num_heads, head_dim)
    else:
        theirs = keras.layers.GroupQueryAttention(head_dim, num_heads, num_kv_heads)
    arguments = inputs if len(inputs) > 1 else inputs * 2
    ours(*arguments), theirs(*arguments)
    randomize(ours)
    weights = weights_of(ours)
    in_keras = {v.path.split("/", 1)[1]: v for v in theirs.weights}
    for path, value in weights.items():
        in_keras[PATHS_IN_KERAS[path]].assign(value)
    assert len(in_keras) == len(weights)
    return ours, theirs


REAL = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]], bool)
PAIRS = np.random.default_rng(0).random((2, 5, 5)) < 0.6
PAIRS[:, 0] = False  # a query that may attend to nothing
MASKS_THAT_MEAN_THE_SAME = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "keys": {"value_mask": REAL},
    "key and value": {"key_mask": REAL, "value_mask": REAL[::-1]},
    "pairs": {"attention_mask": PAIRS},
    "all": {
        "attention_mask": PAIRS,
        "query_mask": REAL,
        "value_mask": REAL,
        "use_causal_mask": True,
    },
}


def live_queries(call):
    """Returns the queries `(B, T)` that may attend to something.

    Keras gives the others zero weights if the weights are asked for, and other
    weights if not, so that there is nothing to agree with.
    """
    allow = reference.allowed(
        (2, 1, 5, 5),
        causal=call.get("use_causal_mask", False),
        query_mask=call.get("query_mask"),
        key_masks=[call[name] for name in ("key_mask", "value_mask") if name in call],
        attention_mask=call.get("attention_mask"),
    )
    return allow.any(-1)[:, 0]


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1], ids=["full", "grouped", "multi"])
@pytest.mark.parametrize("name", MASKS_THAT_MEAN_THE_SAME)
def test_multi_head_gives_the_outputs_of_keras(name, num_kv_heads):
    x = normal(2, 5, 12)
    ours, theirs = twins(x, num_kv_heads=num_kv_heads)
    call = MASKS_THAT_MEAN_THE_SAME[name]
    live = live_queries(call)
    y, weights = to_numpy(ours(x, x, **call, return_attention_scores=True))
    expected = to_numpy(theirs(x, x, **call, return_attention_scores=True))
    assert_near(y[live], expected[0][live])
    rows = live[:, None, :, None]
    assert_near(np.where(rows, weights, 0), np.where(rows, expected[1], 0))
    assert (weights[~np.broadcast_to(rows, weights.shape)] == 0).all()


@pytest.mark.parametrize("num_kv_heads", [None, 2], ids=["full", "grouped"])
@pytest.mark.parametrize("name", ["none", "all"])
def test_multi_head_gives_the_gradients_of_keras(name, num_kv_heads):
    x = normal(2, 5, 12)
    ours, theirs = twins(x, num_kv_heads=num_kv_heads)
    call = MASKS_THAT_MEAN_THE_SAME[name]
    towards = normal(2, 5, 12, seed=5) * live_queries(call)[..., None]
    towards = ops.convert_to_tensor(towards.astype("float32"))

    def of(layer):
        def loss(x):
            return ops.sum(layer(x, x, **call) * towards)

        return gradients(layer, loss, x)

    (of_x,), of_weights = of(ours)
    (expected_of_x,), expected_of_weights = of(theirs)
    assert_near(of_x, expected_of_x)
    for path, gradient in of_weights.items():
        assert_near(gradient, expected_of_weights[PATHS_IN_KERAS[path]])


@pytest.mark.parametrize("num_kv_heads", [None, 2], ids=["full", "grouped"])
def test_multi_head_gives_the_outputs_of_keras_across_lengths(num_kv_heads):
    query, value, key = normal(2, 5, 12), normal(2, 7, 8, seed=1), normal(2, 7, 9)
    ours, theirs = twins(query, value, key, num_kv_heads=num_kv_heads)
    pairs = np.random.default_rng(1).random((2, 5, 7)) < 0.6
    for call in ({}, {"attention_mask": pairs}, {"key_mask": pairs[:, 0]}):
        y, expected = ours(query, value, key, **call), theirs(query, value, key, **call)
        assert_near(y, to_numpy(expected))


def test_multi_head_reads_the_implicit_masks_that_keras_reads():
    embed = keras.layers.Embedding(9, 12, mask_zero=True)
    query = embed(np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]))
    value = embed(np.array([[1, 2, 0], [4, 0, 0]]))
    for inputs in ((query, query), (query, value)):
        ours, theirs = twins(*inputs)
        assert_near(ours(*inputs), to_numpy(theirs(*inputs)))


def test_exception_one_a_mask_of_rank_2_is_over_keys():
    x = normal(4, 4, 12)
    ours, theirs = twins(x)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], bool)
    over_keys = to_numpy(ours(x, x, attention_mask=mask[:, None]))
    np.testing.assert_array_equal(to_numpy(ours(x, x, attention_mask=mask)), over_keys)
    # Keras takes the same array for (T, S), one for all rows.
    over_pairs = to_numpy(ours(x, x, attention_mask=mask[None]))
    assert_near(theirs(x, x, attention_mask=mask), over_pairs)
    assert np.abs(over_pairs - over_keys).max() > 0.1


def test_exception_two_a_float_mask_is_refused_and_not_inverted():
    x = normal(1, 4, 12)
    ours, theirs = twins(x)
    additive = np.array([[[0, 0, -1e9, -1e9]] * 4], "float32")
    with pytest.raises(ValueError, match="bias="):
        ours(x, x, attention_mask=additive)
    # What was meant: the first two keys. Keras attends to the last two.
    meant = to_numpy(ours(x, x, bias=additive, return_attention_scores=True)[1])
    assert meant[..., 2:].max() == 0.0
    inverted = theirs(x, x, attention_mask=additive, return_attention_scores=True)[1]
    assert to_numpy(inverted)[..., :2].max() == 0.0


def test_exception_three_causal_is_bottom_right():
    query, value = normal(1, 2, 12), normal(1, 5, 12, seed=1)
    ours, theirs = twins(query, value)
    call = {"use_causal_mask": True, "return_attention_scores": True}
    seen = to_numpy(ours(query, value, **call)[1])[0, 0] > 0
    assert seen.tolist() == [[True] * 4 + [False], [True] * 5]
    seen = to_numpy(theirs(query, value, **call)[1])[0, 0] > 0
    assert seen.tolist() == [[True] + [False] * 4, [True] * 2 + [False] * 3]


def test_one_token_alone_attends_to_itself_and_nobody_warns():
    x = normal(2, 1, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for causal in (False, True):
            mixed, weights = tx.ScaledAttention(causal=causal)(
                x, return_attention_scores=True
            )
            np.testing.assert_array_equal(to_numpy(weights), np.ones((2, 1, 1)))
            np.testing.assert_array_equal(to_numpy(mixed), x)
