"""The block, against the essay's own in NumPy and in all its shapes."""

import math

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

# ----------------------------------------------------------------------------
# The essay's block, transcribed: pre-norm, attention without biases, a GELU
# feed-forward with them. One text at a time, T tokens of d features, h heads.
# ----------------------------------------------------------------------------


def softmax(x):
    parts = np.exp(x - x.max(-1, keepdims=True))
    return parts / parts.sum(-1, keepdims=True)


def layer_norm(x, gamma, beta):
    centred = x - x.mean(-1, keepdims=True)
    return gamma * centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + beta


def gelu(x):
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def essay_block(x, p, num_heads):
    y = layer_norm(x, p["gamma1"], p["beta1"])
    q, k, v = y @ p["Wq"], y @ p["Wk"], y @ p["Wv"]
    heads = []
    for head in range(num_heads):
        size = x.shape[-1] // num_heads
        mine = slice(head * size, (head + 1) * size)
        weights = softmax(q[:, mine] @ k[:, mine].T / math.sqrt(size))
        heads.append(weights @ v[:, mine])
    x = x + np.concatenate(heads, -1) @ p["Wo"]
    y = layer_norm(x, p["gamma2"], p["beta2"])
    return x + gelu(y @ p["W1"] + p["b1"]) @ p["W2"] + p["b2"]


NAMES_IN_THE_ESSAY = {
    "attention_norm/gamma": "gamma1",
    "attention_norm/beta": "beta1",
    "attention/query/kernel": "Wq",
    "attention/key/kernel": "Wk",
    "attention/value/kernel": "Wv",
    "attention/merge/kernel": "Wo",
    "feed_forward_norm/gamma": "gamma2",
    "feed_forward_norm/beta": "beta2",
    "feed_forward/widen/kernel": "W1",
    "feed_forward/widen/bias": "b1",
    "feed_forward/narrow/kernel": "W2",
    "feed_forward/narrow/bias": "b2",
}
SHAPES_IN_THE_ESSAY = {"Wq": (12, 12), "Wk": (12, 12), "Wv": (12, 12), "Wo": (12, 12)}


def test_the_block_equals_the_essays_block_to_one_in_a_million():
    x = normal(2, 5, 12, dtype="float64")
    with float64_on_every_backend():
        block = tx.TransformerBlock(
            tx.MultiHead(3, use_bias=False), 48, dtype="float64"
        )
        block(x)
        randomize(block)
        weights = weights_of(block)
        y = to_numpy(block(x))
    assert set(weights) == set(NAMES_IN_THE_ESSAY)
    p = {
        name: weights[path].reshape(SHAPES_IN_THE_ESSAY.get(name, weights[path].shape))
        for path, name in NAMES_IN_THE_ESSAY.items()
    }
    expected = np.stack([essay_block(row, p, num_heads=3) for row in x])
    # Of the largest feature: Keras on torch multiplies float64 in float32.
    assert np.abs(y - expected).max() <= 1e-6 * np.abs(expected).max()


# ----------------------------------------------------------------------------
# Every place of the norm and the residual
# ----------------------------------------------------------------------------

KINDS = [
    (norm, position, residual)
    for norm in ("layer", "rms", None)
    for position in ("pre", "post", "sandwich")
    for residual in ("serial", "parallel", "none")
    if not (norm is None and position != "pre")
    and not (residual == "parallel" and position == "post")
]


def expected_of(block, x, context=None):
    """The reference's block with the weights of one of ours, plain attention."""
    w, num_heads = weights_of(block), block.attention.num_heads

    def attend(name, memory=None):
        def function(x):
            other = x if memory is None else memory
            allow = np.ones((len(x), num_heads, x.shape[1], other.shape[1]), bool)
            part = reference.part(w, name)
            return reference.multi_head(part, x, other, other, allow)[0]

        return function

    branches = {"attention": attend("attention")}
    if context is not None:
        branches["cross_attention"] = attend("cross_attention", context)
    branches["feed_forward"] = lambda x: reference.feed_forward(
        reference.part(w, "feed_forward"), x, reference.gelu
    )
    return reference.block(
        w,
        x,
        branches,
        kind=block.norm.config,
        norm_position=block.norm_position,
        residual=block.residual,
    )


@pytest.mark.parametrize("norm, norm_position, residual", KINDS)
def test_block_equals_the_reference(norm, norm_position, residual):
    x = normal(2, 5, 8)
    block = tx.TransformerBlock(
        4, 12, norm=norm, norm_position=norm_position, residual=residual
    )
    block(x)
    randomize(block)
    assert_near(block(x), expected_of(block, x), scale=2)


@pytest.mark.parametrize("norm_position", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("residual", ["serial", "none"])
def test_block_with_context_equals_the_reference(norm_position, residual):
    x, context = normal(2, 5, 8), normal(2, 7, 6, seed=1)
    block = tx.TransformerBlock(
        4, 12, cross_attention=4, norm_position=norm_position, residual=residual
    )
    block(x, context)
    randomize(block)
    assert_near(block(x, context), expected_of(block, x, context), scale=2)


def test_parallel_branches_read_the_same_input():
    x = normal(2, 5, 8)
    block = tx.TransformerBlock(4, 12, residual="parallel")
    y = to_numpy(block(x))
    attended = block.attention(block.attention_norm(x))
    fed = block.feed_forward(block.feed_forward_norm(x))
    np.testing.assert_allclose(y, x + to_numpy(attended) + to_numpy(fed), atol=1e-6)


# ----------------------------------------------------------------------------
# What the block hands on
# ----------------------------------------------------------------------------


def test_what_a_call_brings_reaches_the_attention():
    x = normal(2, 5, 8)
    block = tx.TransformerBlock(tx.MultiHead(4, position=tx.RotaryPosition()), 12)
    plain = to_numpy(block(x))
    brought = {
        "attention_mask": np.tril(np.ones((1, 5, 5), bool)),
        "bias": np.eye(5, dtype="float32"),
        "positions": np.array([0, 2, 4, 6, 8]),
        "segment_ids": np.array([[0, 0, 1, 1, 1]] * 2),
        "use_causal_mask": True,
    }
    for name, value in brought.items():
        y = to_numpy(block(x, **{name: value}))
        inside = block.attention(block.attention_norm(x), **{name: value})
        after = x + to_numpy(inside)
        fed = block.feed_forward(block.feed_forward_norm(after.astype("float32")))
        np.testing.assert_allclose(y, after + to_numpy(fed), atol=1e-5)
        assert np.abs(y - plain).max() > 1e-3


def test_scores_are_those_of_each_attention_and_change_nothing():
    x, context = normal(2, 5, 8), normal(2, 7, 6)
    alone = tx.TransformerBlock(4, 12)
    y, weights = alone(x, return_attention_scores=True)
    np.testing.assert_array_equal(to_numpy(alone(x)), to_numpy(y))
    _, expected = alone.attention(alone.attention_norm(x), return_attention_scores=True)
    np.testing.assert_array_equal(to_numpy(weights), to_numpy(expected))
    crossing = tx.TransformerBlock(4, 12, cross_attention=2)
    y, over_self, over_context = crossing(x, context, return_attention_scores=True)
    np.testing.assert_array_equal(to_numpy(crossing(x, context)), to_numpy(y))
    assert over_self.shape == (2, 4, 5, 5)
    assert over_context.shape == (2, 2, 5, 7)


def test_a_template_is_copied_to_every_place_with_its_kind_and_epsilon():
    template = keras.layers.LayerNormalization(epsilon=0.5, center=False)
    block = tx.TransformerBlock(4, 12, norm=template, norm_position="sandwich")
    block(normal(1, 3, 8))
    norms = [
        getattr(block, name)
        for name in (
            "attention_norm",
            "attention_output_norm",
            "feed_forward_norm",
            "feed_forward_output_norm",
        )
    ]
    assert len({id(norm) for norm in (template, *norms)}) == 5
    for norm in norms:
        assert norm.epsilon == 0.5 and not norm.center
        assert len(norm.weights) == 1
    assert not template.built


def test_any_layer_that_keeps_the_shape_can_be_the_feed_forward():
    x = normal(2, 5, 8)
    block = tx.TransformerBlock(4, keras.layers.Dense(8, activation="tanh"))
    block(x)
    assert {v.path.split("/", 1)[1] for v in block.weights} >= {
        "feed_forward/kernel",
        "feed_forward/bias",
    }


def test_dropout_drops_each_branch_only_in_training():
    x = normal(2, 5, 8)
    dropping, plain = (
        tx.TransformerBlock(4, 12, dropout=0.5),
        tx.TransformerBlock(4, 12),
    )
    dropping(x), plain(x)
    plain.set_weights([v.numpy() for v in dropping.trainable_weights])
    np.testing.assert_array_equal(to_numpy(dropping(x)), to_numpy(plain(x)))
    first, second = (to_numpy(dropping(x, training=True)) for _ in range(2))
    assert (first != second).any() and (first != to_numpy(plain(x))).any()


def test_seeds_repeat_dropout_and_do_not_repeat_branches():
    x = np.ones((1, 4, 8), "float32")

    def dropped(seed):
        block = tx.TransformerBlock(4, 12, dropout=0.5, seed=seed, name="block")
        block(x)
        ones = [
            getattr(block, f"{branch}_dropout")(x, training=True)
            for branch in ("attention", "feed_forward")
        ]
        return to_numpy(tuple(ones))

    first, again, other = dropped(7), dropped(7), dropped(8)
    np.testing.assert_array_equal(first, again)
    assert (first[0] != first[1]).any() and (first[0] != other[0]).any()


def test_gradients_reach_every_weight_and_equal_the_slope_of_the_reference():
    x = normal(2, 5, 8)
    block = tx.TransformerBlock(
        tx.MultiHead(4, num_kv_heads=2), 12, norm="rms", norm_position="sandwich"
    )
    block(x)
    randomize(block)
    towards = normal(2, 5, 8, seed=4)
    (of_x,), of_weights = gradients(
        block, lambda x: ops.sum(block(x) * ops.convert_to_tensor(towards)), x
    )
    assert all(np.abs(gradient).max() > 0 for gradient in of_weights.values())
    # Along one direction, as a difference of the float64 reference.
    direction, step = normal(2, 5, 8, seed=6, dtype="float64"), 1e-5
    ahead, behind = (
        (expected_of(block, x + sign * step * direction) * towards).sum()
        for sign in (1, -1)
    )
    slope = (ahead - behind) / (2 * step)
    assert (of_x * direction).sum() == pytest.approx(slope, rel=1e-4, abs=1e-4)


def test_a_deep_stack_without_residual_loses_its_input_and_with_it_does_not():
    x = normal(1, 6, 8)

    def spread(residual):
        y = x
        for _ in range(8):
            y = tx.TransformerBlock(2, 16, residual=residual, norm=None)(y)
        y = to_numpy(y)[0]
        return (y - y.mean(0)).std() / y.std()

    assert spread("none") < 0.1 < spread("serial")
