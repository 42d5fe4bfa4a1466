"""Masks of every rank, together, and what they keep out."""

import keras
import numpy as np
import pytest
import reference
from keras import ops
from numeric import assert_near, gradients, normal, randomize, to_numpy, weights_of

import keras_tx as tx
from keras_tx import masks

HALF = ("float16", "mixed_float16", "bfloat16", "mixed_bfloat16")


def random_mask(*shape, seed=0, share=0.6):
    return np.random.default_rng(seed).random(shape) < share


def masked(x, mask):
    """Returns a tensor that carries an implicit mask, as an embedding's does."""
    x = ops.convert_to_tensor(x)
    masks.attach(x, ops.convert_to_tensor(mask))
    return x


def assert_equals_reference(layer, inputs, call, **allowed):
    """Compares outputs and weights of a `MultiHead` with the reference's."""
    layer(*inputs)
    randomize(layer)
    query = inputs[0]
    value = inputs[1] if len(inputs) > 1 else query
    y, weights = layer(*inputs, **call, return_attention_scores=True)
    shape = (len(query), layer.num_heads, query.shape[1], value.shape[1])
    arrays = [to_numpy(ops.convert_to_tensor(x)) for x in (query, value)]
    allow = reference.allowed(shape, **allowed)
    expected = reference.multi_head(
        weights_of(layer), arrays[0], arrays[1], arrays[1], allow
    )
    assert_near(y, expected[0])
    assert_near(weights, expected[1])
    return allow


# ----------------------------------------------------------------------------
# Ranks and kinds
# ----------------------------------------------------------------------------

SHAPES = [(2, 7), (2, 5, 7), (2, 1, 7), (1, 5, 7), (2, 1, 5, 7), (2, 4, 5, 7)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_of_every_rank_equal_the_reference(shape):
    mask = random_mask(*shape)
    inputs = normal(2, 5, 8), normal(2, 7, 6)
    call = {"attention_mask": mask}
    assert_equals_reference(tx.MultiHead(4), inputs, call, attention_mask=mask)


def test_a_mask_of_rank_2_is_over_keys_also_where_all_sizes_agree():
    x = normal(4, 4, 8)
    mask = random_mask(4, 4)
    layer = tx.MultiHead(4)
    call = {"attention_mask": mask}
    assert_equals_reference(layer, (x,), call, attention_mask=mask[:, None])
    for name in ("value_mask", "key_mask"):
        y = to_numpy(layer(x, **{name: mask}))
        np.testing.assert_array_equal(y, to_numpy(layer(x, attention_mask=mask)))


def test_integers_booleans_and_lists_are_the_same_mask():
    x, mask = normal(2, 5, 8), random_mask(2, 5, 5)
    layer = tx.MultiHead(4)
    expected = to_numpy(layer(x, attention_mask=mask))
    for kind in ("int32", "int64", "int8", "uint8"):
        y = to_numpy(layer(x, attention_mask=mask.astype(kind)))
        np.testing.assert_array_equal(y, expected)
    y = to_numpy(layer(x, attention_mask=mask.tolist()))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("heads", [2, 3])
def test_masks_over_keys_and_over_pairs_combine_whatever_the_sizes(heads):
    # B = 3 rows and B = N both, where a missing axis would broadcast wrongly.
    x = normal(3, 4, 6)
    keys, pairs = random_mask(3, 4), random_mask(3, 4, 4, seed=1)
    layer = tx.MultiHead(heads, 2)
    call = {"value_mask": keys, "attention_mask": pairs}
    assert_equals_reference(layer, (x,), call, key_masks=[keys], attention_mask=pairs)
    by_hand = layer(x, attention_mask=keys[:, None, None, :] & pairs[:, None])
    np.testing.assert_array_equal(to_numpy(layer(x, **call)), to_numpy(by_hand))


def test_every_mask_counts_where_many_are_given():
    query_mask, key_mask = random_mask(2, 6, share=0.8), random_mask(2, 6, seed=1)
    explicit, pairs = random_mask(2, 6, seed=2, share=0.8), random_mask(2, 6, 6, seed=3)
    segments = np.array([[0, 0, 0, 1, 1, 1], [5, 5, 5, 5, 2, 2]])
    x = masked(normal(2, 6, 8), explicit)  # masks the queries and the keys
    call = {
        "query_mask": query_mask,
        "key_mask": key_mask,
        "attention_mask": pairs,
        "segment_ids": segments,
        "use_causal_mask": True,
    }
    layer = tx.MultiHead(4, attention=tx.ScaledAttention(window=3))
    allow = assert_equals_reference(
        layer,
        (x,),
        call,
        query_mask=query_mask & explicit,
        key_masks=[key_mask, explicit],
        attention_mask=pairs,
        segment_ids=segments,
        causal=True,
        window=3,
    )
    assert 0 < allow.mean() < 0.15


def test_an_explicit_mask_never_replaces_an_implicit_one():
    real = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)
    x, open_mask = masked(normal(2, 5, 8), real), np.ones((2, 5, 5), bool)
    layer = tx.MultiHead(4)
    expected = to_numpy(layer(x))
    for call in (
        {"attention_mask": open_mask},
        {"value_mask": open_mask[:, 0]},
        {"key_mask": open_mask[:, 0]},
        {"query_mask": open_mask[:, 0]},
        {"use_causal_mask": False},
    ):
        np.testing.assert_array_equal(to_numpy(layer(x, **call)), expected)
    _, weights = layer(x, return_attention_scores=True)
    seen = to_numpy(weights).max((1, 2)) > 0
    assert seen.tolist() == real.tolist()


@pytest.mark.parametrize("layer", ["MultiHead", "TransformerBlock"])
def test_implicit_masks_survive_compilation(layer):
    # Under `jit` a tensor of JAX takes no attribute, and the mask was lost.
    tokens = np.array([[3, 4, 5, 0, 0], [6, 7, 0, 0, 0]])
    body = tx.MultiHead(2) if layer == "MultiHead" else tx.TransformerBlock(2, 8)
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Sequential([inputs, tx.TokenEmbedding(9, 8, pad_id=0), body])
    eager = to_numpy(model(tokens))
    compiled = model.predict(tokens, verbose=0)
    np.testing.assert_allclose(compiled, eager, atol=1e-6)
    alone = to_numpy(model(tokens[:1, :3]))
    np.testing.assert_allclose(compiled[:1, :3], alone, atol=1e-6)


def test_masks_of_query_and_of_context_are_kept_apart():
    real = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    source = np.array([[1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]], bool)
    x, context = normal(2, 4, 8), normal(2, 7, 6)
    block = tx.TransformerBlock(2, 8, cross_attention=2)
    implicit = block(
        masked(x, real), masked(context, source), return_attention_scores=True
    )
    explicit = block(
        masked(x, real), context, context_mask=source, return_attention_scores=True
    )
    for one, other in zip(implicit, explicit, strict=True):
        np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
    over_context = to_numpy(implicit[2])
    allow = np.broadcast_to(
        real[:, None, :, None] & source[:, None, None], (2, 2, 4, 7)
    )
    assert ((over_context > 0) == allow).all()


def test_context_that_is_padding_changes_nothing():
    source = np.array([[1, 1, 1, 1, 0, 0, 0]], bool)
    x, context = normal(1, 4, 8), normal(1, 7, 6)
    block = tx.TransformerBlock(2, 8, cross_attention=2, causal=True)
    y = to_numpy(block(x, context, context_mask=source))
    context[:, 4:] += 5
    again = to_numpy(block(x, context, context_mask=source))
    np.testing.assert_array_equal(y, again)


# ----------------------------------------------------------------------------
# Causality, windows, segments
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(5, 5), (3, 5), (5, 3), (1, 5), (5, 1)], ids=str)
@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_band_equals_its_definition(lengths, window, causal):
    if not causal and window is None:
        window = 9  # wider than all: every pair
    band = to_numpy(masks.band(*lengths, causal, window))
    allow = reference.allowed((1, 1, *lengths), causal=causal, window=window)
    np.testing.assert_array_equal(band, allow[0, 0])


def test_causal_is_bottom_right_and_leaves_early_queries_without_keys():
    layer = tx.MultiHead(2, causal=True)
    inputs = normal(1, 5, 8), normal(1, 3, 8, seed=1)
    allow = assert_equals_reference(layer, inputs, {}, causal=True)
    assert not allow[:, :, :2].any()
    bias = weights_of(layer)["merge/bias"]
    np.testing.assert_allclose(to_numpy(layer(*inputs))[0, :2], [bias, bias])


VARIANTS = {
    "plain": {},
    "scores": {"return_attention_scores": True},
    "open mask": {"attention_mask": np.ones((2, 6, 6), bool)},
    "not training": {"training": False},
    "segments": {"segment_ids": np.zeros((2, 6), "int32")},
    "bias": {"bias": np.ones((6, 6), "float32")},
}
CAUSAL_LAYERS = {
    "constructor": lambda: tx.MultiHead(4, causal=True),
    "dropout": lambda: tx.MultiHead(
        4, causal=True, attention=tx.ScaledAttention(dropout=0.1)
    ),
    "attention": lambda: tx.MultiHead(4, attention=tx.ScaledAttention(causal=True)),
    "grouped": lambda: tx.MultiHead(4, num_kv_heads=2, causal=True),
    "window": lambda: tx.MultiHead(
        4, causal=True, attention=tx.ScaledAttention(window=3)
    ),
    "half": lambda: tx.MultiHead(4, causal=True, dtype="mixed_bfloat16"),
    "rotary": lambda: tx.MultiHead(4, causal=True, position=tx.RotaryPosition()),
    "raw": lambda: tx.ScaledAttention(causal=True),
    "block": lambda: tx.TransformerBlock(4, 12, causal=True),
    "parallel": lambda: tx.TransformerBlock(4, 12, causal=True, residual="parallel"),
    "block of heads": lambda: tx.TransformerBlock(tx.MultiHead(4, causal=True), 12),
}


@pytest.mark.parametrize("name", CAUSAL_LAYERS)
def test_changing_the_future_changes_the_past_by_exactly_nothing(name):
    layer = CAUSAL_LAYERS[name]()
    x = normal(2, 6, 8)
    future = x.copy()
    future[:, 4:] += 5
    for call in VARIANTS.values():
        y, changed = to_numpy(layer(x, **call)), to_numpy(layer(future, **call))
        if isinstance(y, tuple):
            assert np.triu(y[1], 1).max() == 0.0
            y, changed = y[0], changed[0]
        np.testing.assert_array_equal(y[:, :4], changed[:, :4])
        assert (y[:, 4:] != changed[:, 4:]).any()


def test_a_call_makes_any_layer_causal():
    x = normal(2, 6, 8)
    for make in (
        lambda **kw: tx.MultiHead(4, **kw),
        lambda **kw: tx.ScaledAttention(**kw),
    ):
        called, made = make(), make(causal=True)
        called(x), made(x)
        made.set_weights(called.get_weights())
        y = to_numpy(called(x, use_causal_mask=True))
        np.testing.assert_array_equal(y, to_numpy(made(x)))


def test_packed_documents_equal_separate_ones_outputs_and_gradients():
    documents = normal(2, 3, 8)  # of one length, to be compiled once
    packed = documents.reshape(1, 6, 8)
    call = {
        "positions": np.array([[0, 1, 2, 0, 1, 2]]),
        "segment_ids": np.array([[7, 7, 7, 2, 2, 2]]),
    }
    heads = tx.MultiHead(4, num_kv_heads=2, position=tx.RotaryPosition())
    block = tx.TransformerBlock(heads, 12)
    for causal in (True, False):
        call["use_causal_mask"] = causal
        together = to_numpy(block(packed, **call))
        apart = to_numpy(block(documents, use_causal_mask=causal))
        np.testing.assert_allclose(together.reshape(apart.shape), apart, atol=1e-5)

    def loss(x, **call):
        return ops.sum(ops.sin(block(x, **call)))

    together = gradients(block, lambda x: loss(x, **call), packed)
    apart = gradients(block, loss, documents)
    of_x = together[0][0].reshape(documents.shape)
    np.testing.assert_allclose(of_x, apart[0][0], atol=1e-5)
    for path, gradient in together[1].items():
        assert_near(gradient, apart[1][path])


# ----------------------------------------------------------------------------
# What masks keep out
# ----------------------------------------------------------------------------

KEEPERS = {
    "raw": lambda: tx.ScaledAttention(),
    "heads": lambda: tx.MultiHead(4),
    "grouped": lambda: tx.MultiHead(
        4, num_kv_heads=2, query_key_norm="rms", position=tx.RotaryPosition()
    ),
    "biased": lambda: tx.MultiHead(4, position=tx.AlibiPosition(4)),
    "capped": lambda: tx.MultiHead(4, attention=tx.ScaledAttention(soft_cap=3.0)),
    "causal": lambda: tx.MultiHead(4, causal=True),
    "pre": lambda: tx.TransformerBlock(4, 12),
    "post": lambda: tx.TransformerBlock(4, 12, norm_position="post"),
    "sandwich": lambda: tx.TransformerBlock(
        4, 12, norm="rms", norm_position="sandwich"
    ),
    "parallel": lambda: tx.TransformerBlock(4, 12, residual="parallel"),
}


@pytest.mark.parametrize("rubbish", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("name", KEEPERS)
def test_rubbish_in_a_masked_slot_reaches_no_other_row(name, rubbish):
    # Slots masked on the left and on the right, by either mask over keys.
    real = np.array([[0, 1, 1, 1], [1, 1, 1, 0]], bool)
    x = normal(2, 4, 8)
    clean, dirty = x.copy(), x.copy()
    clean[~real], dirty[~real] = 0.0, rubbish
    layer = KEEPERS[name]()
    explicit = {"attention_mask": real}
    for inputs, call in (
        ((clean, dirty), explicit),
        ((masked(clean, real), masked(dirty, real)), {}),
    ):
        expected, y = (to_numpy(layer(x, **call)) for x in inputs)
        np.testing.assert_array_equal(y[real], expected[real])
        assert np.isfinite(y[real]).all()


@pytest.mark.parametrize("dtype", ["float32", *HALF])
def test_queries_without_keys_give_zero_weights_and_finite_gradients(dtype):
    mask = random_mask(2, 5, 5, share=0.7)
    mask[0, [0, 2]] = False  # two queries
    mask[1] = False  # a whole row
    layer = tx.MultiHead(4, dtype=dtype)
    x = normal(2, 5, 8)
    layer(x)
    randomize(layer)
    y, weights = to_numpy(layer(x, attention_mask=mask, return_attention_scores=True))
    dead = ~mask.any(-1)
    assert (np.moveaxis(weights, 1, 2)[dead] == 0).all()
    bias = to_numpy(ops.cast(layer.merge.bias, layer.compute_dtype))
    np.testing.assert_array_equal(y[dead], np.broadcast_to(bias, y[dead].shape))
    # The live ones are as if the dead were not dead.
    opened = mask.copy()
    opened[dead] = True
    np.testing.assert_array_equal(
        y[~dead], to_numpy(layer(x, attention_mask=opened))[~dead]
    )

    def loss(x):
        y = ops.cast(layer(x, attention_mask=mask), "float32")
        return ops.sum(ops.square(y))

    (of_x,), of_weights = gradients(layer, loss, x)
    for gradient in (of_x, *of_weights.values()):
        assert np.isfinite(gradient).all()
    assert np.abs(of_weights["value/kernel"]).max() > 0


def test_a_bias_of_minus_infinity_is_a_mask():
    x = normal(2, 5, 8)
    layer = tx.MultiHead(4)
    mask = random_mask(2, 1, 5, 5, share=0.7)
    mask[0, 0, [0, 2]] = False
    for lowest in (-np.inf, np.finfo("float32").min, -1e9):
        bias = np.where(mask, 0.0, lowest).astype("float32")
        y = layer(x, bias=bias)
        alive = mask.any(-1)[:, 0]
        by_mask = layer(x, attention_mask=mask)
        np.testing.assert_allclose(
            to_numpy(y)[alive], to_numpy(by_mask)[alive], atol=1e-6
        )
        assert np.isfinite(to_numpy(y)).all()
        # A mask beside it stays a mask, even in rows that the bias empties.
        causal = layer(x, bias=bias, use_causal_mask=True, return_attention_scores=True)
        assert np.triu(to_numpy(causal[1]), 1).max() == 0.0
    half = tx.MultiHead(4, dtype="float16")  # where -1e9 is -inf
    y = half(x, bias=np.where(mask, 0.0, -1e9).astype("float32"))
    assert np.isfinite(to_numpy(y)).all()


def test_more_padding_changes_nothing():
    tokens = np.array([[3, 4, 5], [6, 7, 0]])
    padded = np.pad(tokens, [(0, 0), (0, 4)])
    for body in (
        tx.TransformerBlock(2, 8, norm="rms"),
        tx.TransformerBlock(tx.MultiHead(2, position=tx.RotaryPosition()), 8),
        tx.TransformerBlock(2, 8, norm_position="post", causal=True),
    ):
        model = keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                tx.TokenEmbedding(9, 8, pad_id=0),
                tx.SinusoidalPosition(),
                body,
            ]
        )
        short, long = to_numpy(model(tokens)), to_numpy(model(padded))
        real = tokens != 0
        np.testing.assert_allclose(long[:, :3][real], short[real], atol=2e-6)


def test_the_mask_is_readable_behind_any_number_of_blocks():
    tokens = np.array([[3, 4, 0, 0], [5, 6, 7, 0]])
    x = tx.TokenEmbedding(9, 8, pad_id=0)(tokens)
    for layer in (
        tx.SinusoidalPosition(),
        tx.LearnedPosition(9),
        tx.LearnedSegment(2),
        tx.TransformerBlock(2, 8),
        tx.TransformerBlock(2, 8, norm="rms", norm_position="sandwich"),
        tx.TransformerBlock(
            2, 8, norm=keras.layers.RMSNormalization(), residual="parallel"
        ),
        tx.RMSNorm(),
        tx.MultiHead(2),
        tx.FeedForward(8),
        tx.ScaledAttention(),
    ):
        x = layer(x)
        np.testing.assert_array_equal(to_numpy(masks.implicit(x)), tokens != 0)
    pooled = to_numpy(keras.layers.GlobalAveragePooling1D()(x))
    expected = [to_numpy(x)[row, tokens[row] != 0].mean(0) for row in (0, 1)]
    np.testing.assert_allclose(pooled, expected, atol=1e-6)
