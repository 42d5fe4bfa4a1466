"""A model read in pieces says what it says of the whole."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx as tx
from keras_tx import cache, kernels

POSITIONS = {
    "rotary": lambda: "rotary",
    "scaled": lambda: tx.RotaryPosition(
        100,
        rotary_dim=2,
        scaling=tx.YarnScaling(4.0, original_max_length=8),
        layout="interleaved",
    ),
    "sinusoidal": lambda: "sinusoidal",
    "learned": lambda: tx.LearnedPosition(60),
    "relative": lambda: tx.RelativePosition(
        4, num_buckets=8, max_distance=12, bidirectional=False
    ),
    "alibi": lambda: "alibi",
    "none": lambda: None,
}


def language_model(position="rotary", dtype=None, **options):
    """Two blocks whose initial values are large enough to tell tokens apart."""
    if isinstance(position, str):
        position = POSITIONS[position]()
    return tx.decoder(
        23, 16, 2, 4, position=position, init_stddev=0.3, dtype=dtype, **options
    )


def left_padded(rows):
    """Returns rows as one array and the column at which each begins."""
    width = max(map(len, rows))
    tokens = np.zeros((len(rows), width), "int32")
    for index, row in enumerate(rows):
        tokens[index, width - len(row) :] = row
    return tokens, np.array([width - len(row) for row in rows], "int32")


def in_pieces(model, tokens, pieces, starts, capacity=64):
    """Returns the logits of tokens that arrive in pieces, as NumPy."""
    entries = owners = None
    column, logits = 0, []
    for piece in pieces:
        part = ops.convert_to_tensor(tokens[:, column : column + piece])
        scope = cache.Scope(
            part,
            column=column,
            starts=starts,
            capacity=capacity,
            entries=entries,
            owners=owners,
        )
        with scope:
            logits.append(ops.convert_to_numpy(model(part)))
        entries, owners = scope.entries, scope.owners
        column += piece
    return np.concatenate(logits, axis=1), entries


def rows_of(*lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(1, 23, length).astype("int32") for length in lengths]


def alone(model, row):
    return ops.convert_to_numpy(model(row[None]))[0]


def assert_rows_match(model, rows, logits, tolerance=1e-5):
    for row, found in zip(rows, logits, strict=True):
        expected = alone(model, row)
        error = np.abs(found[-len(row) :] - expected).max()
        assert error <= tolerance * max(1.0, np.abs(expected).max())


GROUPINGS = [(position, 2) for position in sorted(POSITIONS)]
GROUPINGS += [("rotary", 4), ("rotary", 1), ("relative", 1)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("position", "num_kv_heads"), GROUPINGS)
def test_pieces_give_the_logits_of_the_whole(
    position, num_kv_heads, window, monkeypatch
):
    monkeypatch.setattr(cache, "BLOCK", 2)  # a window of 3 is a ring of 4
    model = language_model(position, num_kv_heads=num_kv_heads, window=window)
    rows = rows_of(10, 7, 3)
    tokens, starts = left_padded(rows)
    for pieces in ([10], [4, 3, 3], [2, *[1] * 8]):
        logits, entries = in_pieces(model, tokens, pieces, starts)
        assert_rows_match(model, rows, logits)
        slots = 4 if window else 64
        assert entries[0]["key"].shape == (3, num_kv_heads, slots, 4)


@pytest.mark.parametrize("position", sorted(POSITIONS))
def test_the_step_behind_49_tokens_stands_at_position_49(position):
    model = language_model(position)
    (row,) = rows_of(50)
    logits, _ = in_pieces(model, row[None], [49, 1], np.zeros(1, "int32"))
    assert_rows_match(model, [row], logits)


def test_right_padding_changes_nothing_before_it():
    model = language_model(pad_id=0)
    rows = rows_of(3, 6)
    padded = np.zeros((2, 6), "int32")
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    logits, _ = in_pieces(model, padded, [2, 4], np.zeros(2, "int32"))
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found[: len(row)], alone(model, row), atol=1e-5)


def test_padding_tokens_inside_a_text_stay_masked():
    model = language_model(pad_id=0)
    row = np.array([4, 0, 7, 0, 0, 9, 2], "int32")
    logits, entries = in_pieces(model, row[None], [2, 1, 1, 3], np.zeros(1, "int32"))
    assert "valid" in entries[0]
    assert_rows_match(model, [row], logits)


def test_nan_of_padding_columns_reaches_no_row():
    model = language_model("none")
    rows = rows_of(6, 2)
    tokens, starts = left_padded(rows)
    embedding = model.get_layer("embedding")
    table = ops.convert_to_numpy(embedding.embeddings)
    table[0] = np.nan
    embedding.embeddings.assign(table)
    tokens[1, :4] = 0
    # The tied head makes the logit of token 0 NaN; all others count.
    logits, _ = in_pieces(model, tokens, [4, 1, 1], starts)
    assert np.isfinite(logits[1, 4:, 1:]).all()
    assert np.isfinite(logits[0, :, 1:]).all()


def test_soft_caps_biases_and_segments_are_those_of_the_whole():
    attention = tx.MultiHead(
        4,
        num_kv_heads=2,
        causal=True,
        attention=tx.ScaledAttention(soft_cap=2.0, scale=0.7),
        position=tx.RotaryPosition(),
        query_key_norm="rms",
    )
    x = np.random.default_rng(0).normal(size=(2, 7, 16)).astype("float32")
    segments = np.array([[1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 3, 3, 3]], "int32")

    def call(part, ids):
        return attention(
            ops.convert_to_tensor(part), segment_ids=ops.convert_to_tensor(ids)
        )

    expected = ops.convert_to_numpy(call(x, segments))
    entries, column = None, 0
    for piece in (4, 1, 2):
        part = ops.convert_to_tensor(x[:, column : column + piece])
        scope = cache.Scope(
            part,
            column=column,
            starts=np.zeros(2, "int32"),
            capacity=64,
            entries=entries,
        )
        with scope:
            found = call(part, segments[:, column : column + piece])
        entries = scope.entries
        np.testing.assert_allclose(
            ops.convert_to_numpy(found),
            expected[:, column : column + piece],
            atol=1e-5,
        )
        column += piece


def test_weights_of_a_step_cover_what_is_held():
    attention = tx.MultiHead(4, causal=True)
    x = ops.convert_to_tensor(
        np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    )
    attention(x)
    starts = np.zeros(2, "int32")
    first = cache.Scope(x, column=0, starts=starts, capacity=64)
    with first:
        attention(x)
    last = cache.Scope(
        x[:, :1], column=5, starts=starts, capacity=64, entries=first.entries
    )
    with last:
        _, weights = attention(x[:, :1], return_attention_scores=True)
    weights = ops.convert_to_numpy(weights)
    assert weights.shape == (2, 4, 1, 64)
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
    assert (weights[..., 6:] == 0).all()


def test_attention_without_weights_is_cached_too():
    raw = tx.ScaledAttention(causal=True)
    x = np.random.default_rng(0).normal(size=(1, 6, 4)).astype("float32")
    expected = ops.convert_to_numpy(raw(x))
    logits, _ = in_pieces_of_features(raw, x, (3, 1, 2))
    np.testing.assert_allclose(logits, expected, atol=1e-6)


def in_pieces_of_features(layer, x, pieces):
    entries, column, found = None, 0, []
    for piece in pieces:
        part = ops.convert_to_tensor(x[:, column : column + piece])
        scope = cache.Scope(
            part,
            column=column,
            starts=np.zeros(len(x), "int32"),
            capacity=64,
            entries=entries,
        )
        with scope:
            found.append(ops.convert_to_numpy(layer(part)))
        entries = scope.entries
        column += piece
    return np.concatenate(found, axis=1), entries


def test_a_layer_that_is_called_twice_has_two_entries():
    block = tx.TransformerBlock(
        tx.MultiHead(2, position=tx.RotaryPosition()), 12, causal=True
    )

    class Twice(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.block = block

        def call(self, x):
            return self.block(self.block(x))

    twice = Twice()
    x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
    expected = ops.convert_to_numpy(twice(x))
    found, entries = in_pieces_of_features(twice, x, (3, 1, 1, 1))
    assert len(entries) == 2
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_stays_within_a_hundredth_of_the_logits(dtype):
    model = language_model(num_kv_heads=2, dtype=dtype)
    rows = rows_of(9, 4)
    tokens, starts = left_padded(rows)
    logits, entries = in_pieces(model, tokens, [4, 1, 1, 3], starts)
    assert_rows_match(model, rows, logits, tolerance=2e-2)
    expected = dtype.removeprefix("mixed_")
    assert keras.backend.standardize_dtype(entries[0]["key"].dtype) == expected


def test_an_exception_leaves_no_scope_behind():
    model = language_model()
    part = ops.convert_to_tensor(np.ones((1, 3), "int32"))
    scope = cache.Scope(part, column=0, starts=np.zeros(1, "int32"), capacity=64)
    with pytest.raises(RuntimeError), scope:
        model(part)
        raise RuntimeError("on the way")
    assert cache.scope() is None


def test_scopes_do_not_nest():
    part = ops.convert_to_tensor(np.ones((1, 3), "int32"))

    def scope():
        return cache.Scope(part, column=0, starts=np.zeros(1, "int32"), capacity=64)

    with pytest.raises(ValueError, match="open in this thread"), scope(), scope():
        pass
    assert cache.scope() is None


def test_two_way_attention_is_refused_by_name():
    attention = tx.MultiHead(2, name="looker")
    x = ops.ones((1, 3, 8))
    attention(x)
    scope = cache.Scope(x, column=0, starts=np.zeros(1, "int32"), capacity=64)
    with pytest.raises(ValueError, match=r"looker.*later ones"), scope:
        attention(x)


def test_masks_over_pairs_are_refused():
    attention = tx.MultiHead(2, causal=True)
    x = ops.ones((1, 3, 8))
    attention(x)
    scope = cache.Scope(x, column=0, starts=np.zeros(1, "int32"), capacity=64)
    with pytest.raises(ValueError, match="pairs"), scope:
        attention(x, attention_mask=ops.ones((1, 3, 3), dtype="bool"))


def test_other_layers_or_fewer_than_in_the_prompt_are_refused():
    first, second = (tx.MultiHead(2, causal=True, name=name) for name in "ab")
    x = ops.ones((1, 3, 8))
    first(x), second(x)
    starts = np.zeros(1, "int32")
    scope = cache.Scope(x, column=0, starts=starts, capacity=64)
    with scope:
        second(first(x))

    def step():
        return cache.Scope(
            x[:, :1],
            column=3,
            starts=starts,
            capacity=64,
            entries=scope.entries,
            owners=scope.owners,
        )

    with pytest.raises(ValueError, match="another layer"), step():
        first(second(x[:, :1]))
    with pytest.raises(ValueError, match="through 2 attentions"), step():
        first(x[:, :1])


def test_a_transform_around_the_layer_is_refused():
    backend = keras.backend.backend()
    attention = tx.MultiHead(2, causal=True)
    x = ops.ones((1, 3, 8))
    attention(x)
    scope = cache.Scope(x, column=0, starts=np.zeros(1, "int32"), capacity=64)
    if backend == "tensorflow":
        import tensorflow as tf

        inner = tf.function(attention, autograph=False)
    elif backend == "jax":
        import jax

        inner = jax.checkpoint(attention)
    else:  # torch's checkpoint runs the layer as it is, and may
        with scope:
            attention(x)
        assert len(scope.entries) == 1
        return
    with pytest.raises(ValueError, match="transform of its own"), scope:
        inner(x)


@pytest.mark.parametrize("batch", [2, 6])
@pytest.mark.parametrize("with_bias", [False, True])
def test_reading_the_filled_part_is_reading_all(batch, with_bias):
    # Few rows read in blocks, many in parts; both against float64 in NumPy.
    rng = np.random.default_rng(0)
    heads, groups, slots, dim, length = 2, 2, 256, 8, 3
    query = rng.normal(size=(batch, length, heads * groups, dim)).astype("float32")
    key, value = rng.normal(size=(2, batch, heads, slots, dim)).astype("float32")
    bias = rng.normal(size=(1, heads * groups, length, slots)).astype("float32")
    split = query.reshape(batch, length, heads, groups, dim).astype("float64")
    scores = np.einsum("btkgh,bksh->bkgts", split, key) * 0.3
    scores = 5.0 * np.tanh(scores / 5.0)
    if with_bias:
        scores = scores + bias.reshape(1, heads, groups, length, slots)
    for filled in (3, 64, 65, 200, 256):
        allowed = np.broadcast_to(np.arange(slots) < filled, (batch, length, slots))
        allowed = allowed.copy()
        allowed[0, 0] = False  # a query that sees nothing
        weights = np.where(allowed[:, None, None], np.exp(scores), 0.0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        expected = np.einsum("bkgts,bksh->btkgh", weights, value)
        for known in (filled, ops.convert_to_tensor(np.int32(filled))):
            held = cache.Held(
                *map(ops.convert_to_tensor, (key, value, allowed)), None, known
            )
            found, _ = kernels.held(
                ops.convert_to_tensor(query),
                held,
                scale=0.3,
                soft_cap=5.0,
                bias=ops.convert_to_tensor(bias) if with_bias else None,
            )
            np.testing.assert_allclose(
                ops.convert_to_numpy(found),
                expected.reshape(query.shape),
                atol=1e-5,
            )
