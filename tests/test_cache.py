"""A model read in pieces says what it says of the whole.

The whole grid of position, heads, window, context, padding and pieces, in three
precisions, takes long and prints the largest differences:

    pytest tests/test_cache.py -k grid --whole-grid -s
"""

import functools
import itertools

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx as tx
from keras_tx import cache, reading
from keras_tx.generation.plan import plan_of

POSITIONS = {
    "sinusoidal": lambda: "sinusoidal",
    "learned": lambda: tx.LearnedPosition(60),
    "rotary": lambda: "rotary",
    "linear": lambda: tx.RotaryPosition(scaling=tx.LinearScaling(2.5)),
    "ntk": lambda: tx.RotaryPosition(50, scaling=tx.NtkScaling(3.0)),
    "yarn": lambda: tx.RotaryPosition(
        100,
        rotary_dim=2,
        scaling=tx.YarnScaling(4.0, original_max_length=8),
        layout="interleaved",
    ),
    "llama3": lambda: tx.RotaryPosition(
        scaling=tx.Llama3Scaling(8.0, original_max_length=16)
    ),
    "relative": lambda: tx.RelativePosition(
        4, num_buckets=8, max_distance=12, bidirectional=False
    ),
    "alibi": lambda: tx.AlibiPosition(4),
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


def in_pieces(run, tokens, pieces, starts, **options):
    """Returns the logits of tokens that arrive in pieces, as NumPy, and entries.

    Args:
        run: Function of tokens and a scope that opens it and returns logits.
        tokens: Array `(B, T)`.
        pieces: Lengths that sum to T.
        starts: Array `(B,)`.
        **options: Those of the scope.
    """
    entries = owners = None
    column, logits = 0, []
    for piece in pieces:
        part = ops.convert_to_tensor(tokens[:, column : column + piece])
        scope = cache.Scope(
            part,
            column=column,
            starts=starts,
            entries=entries,
            owners=owners,
            **{"capacity": 64, **options},
        )
        logits.append(ops.convert_to_numpy(run(part, scope)))
        entries, owners = scope.entries, scope.owners
        column += piece
    return np.concatenate(logits, axis=1), entries


def inside(model):
    """Returns a function that runs a layer or model in a scope."""

    def run(part, scope):
        with scope:
            return model(part)

    return run


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


# ----------------------------------------------------------------------------
# The grid
# ----------------------------------------------------------------------------

HEADS = (4, 2, 1)  # keys' heads for 4 of queries
WINDOWS = (None, 3)
CONTEXTS = (False, True)
PADDING = ("none", "left", "right")
PIECES = {"one by one": [1] * 10, "pieces": [4, 3, 3], "at once": [10]}

# Differences of logits, for logits up to 1 in size, else as a share of the largest.
BOUNDS = {"float32": 1e-5, "mixed_float16": 5e-3, "mixed_bfloat16": 4e-2}


def grid(whole):
    """Yields position, heads, window, context, dtype and pairs of padding and pieces.

    The part of it that always runs has each position once, and each of the others
    several times.
    """
    pairs = list(itertools.product(PADDING, PIECES))
    if whole:
        axes = (POSITIONS, HEADS, WINDOWS, CONTEXTS, BOUNDS)
        for cell in itertools.product(*axes):
            yield (*cell, pairs)
        return
    for index, position in enumerate(POSITIONS):
        some = [pairs[3 * row + (row + index) % 3] for row in range(3)]
        window, context = WINDOWS[index % 2], CONTEXTS[index // 2 % 2]
        yield position, HEADS[index % 3], window, context, "float32", some


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        cells = list(grid(metafunc.config.getoption("whole_grid")))
        names = ["-".join(map(str, cell[:-1])) for cell in cells]
        metafunc.parametrize("cell", cells, ids=names)


def grid_model(position, num_kv_heads, window, context, dtype):
    def block(index, cross=False):
        def heads(window=None):
            return tx.MultiHead(
                4,
                num_kv_heads=num_kv_heads,
                attention=tx.ScaledAttention(window=window),
                kernel_initializer=keras.initializers.RandomNormal(stddev=0.3),
            )

        crossing = heads() if cross else None
        return tx.TransformerBlock(heads(window), 20, cross_attention=crossing)

    options = {"position": POSITIONS[position](), "pad_id": 0, "dtype": dtype}
    if context:
        crossing = functools.partial(block, cross=True)
        model = tx.encoder_decoder(
            23, 16, 1, encoder_block=block, decoder_block=crossing, **options
        )
    else:
        model = tx.decoder(23, 16, 2, block=block, **options)
    # Logits of a size that tells tokens apart.
    table = model.get_layer("embedding").embeddings
    table.assign(np.random.default_rng(3).normal(size=table.shape) * 0.5)
    return model


def test_grid_of_pieces_gives_the_logits_of_the_whole(cell, monkeypatch):
    *kind, pairs = cell
    *_, num_kv_heads, window, context, dtype = kind
    monkeypatch.setattr(cache, "BLOCK", 2)  # a window of 3 is a ring of 4
    model = grid_model(*kind)
    rows = rows_of(10, 7, 3)
    sources = np.array([[5, 6, 7, 8], [3, 4, 0, 0], [9, 1, 2, 0]], "int32")

    def whole(row, source):
        tokens = row[None]
        inputs = {"source": source[None], "target": tokens} if context else tokens
        return ops.convert_to_numpy(model(inputs)).astype("float64")[0]

    expected = [whole(*pair) for pair in zip(rows, sources, strict=True)]
    plan = plan_of(model, context, None, None)
    worst = 0.0
    for padding, pieces in pairs:
        count = 1 if padding == "none" else 3
        memory = plan.encode(sources[:count] if context else None, False)
        tokens = np.zeros((count, 10), "int32")
        starts = np.zeros(count, "int32")
        places = []
        for index, row in enumerate(rows[:count]):
            if padding == "left":
                starts[index] = 10 - len(row)
            places.append(slice(starts[index], starts[index] + len(row)))
            tokens[index, places[-1]] = row
        logits, entries = in_pieces(
            lambda part, scope, memory=memory: plan.forward(part, memory, scope),
            tokens,
            PIECES[pieces],
            starts,
        )
        slots = 64 if window is None else 4
        assert entries[0]["key"].shape == (count, num_kv_heads, slots, 4)
        for index, place in enumerate(places):
            error = np.abs(logits[index, place] - expected[index]).max()
            worst = max(worst, error / max(1.0, np.abs(expected[index]).max()))
    print(f"largest difference {worst:.1e} of {kind}")
    assert worst <= BOUNDS[dtype]


@pytest.mark.parametrize("position", sorted(POSITIONS))
def test_the_step_behind_49_tokens_stands_at_position_49(position):
    model = language_model(position)
    (row,) = rows_of(50)
    logits, _ = in_pieces(inside(model), row[None], [49, 1], np.zeros(1, "int32"))
    assert_rows_match(model, [row], logits)


def test_right_padding_changes_nothing_before_it():
    model = language_model(pad_id=0)
    rows = rows_of(3, 6)
    padded = np.zeros((2, 6), "int32")
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    logits, _ = in_pieces(inside(model), padded, [2, 4], np.zeros(2, "int32"))
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found[: len(row)], alone(model, row), atol=1e-5)


def test_padding_tokens_inside_a_text_stay_masked():
    model = language_model(pad_id=0)
    row = np.array([4, 0, 7, 0, 0, 9, 2], "int32")
    logits, entries = in_pieces(
        inside(model), row[None], [2, 1, 1, 3], np.zeros(1, "int32")
    )
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
    logits, _ = in_pieces(inside(model), tokens, [4, 1, 1], starts)
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
    logits, _ = in_pieces(inside(raw), x, (3, 1, 2), np.zeros(1, "int32"))
    np.testing.assert_allclose(logits, expected, atol=1e-6)


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
    found, entries = in_pieces(inside(twice), x, (3, 1, 1, 1), np.zeros(2, "int32"))
    assert len(entries) == 2
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("dtype", ["mixed_bfloat16", "mixed_float16"])
def test_half_precision_stays_near_the_whole_and_keeps_its_dtype(dtype):
    model = language_model(num_kv_heads=2, dtype=dtype)
    rows = rows_of(9, 4)
    tokens, starts = left_padded(rows)
    logits, entries = in_pieces(inside(model), tokens, [4, 1, 1, 3], starts)
    assert_rows_match(model, rows, logits, tolerance=BOUNDS[dtype])
    expected = dtype.removeprefix("mixed_")
    assert keras.backend.standardize_dtype(entries[0]["key"].dtype) == expected


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("dtype", "bound"), [("float16", 2e-3), ("bfloat16", 2e-2), ("int8", 2e-2)]
)
def test_keys_and_values_may_be_kept_in_less(dtype, bound, window, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", 2)
    model = language_model(num_kv_heads=2, window=window)
    rows = rows_of(9, 4)
    tokens, starts = left_padded(rows)
    kept = cache.Kept(dtype=dtype)
    logits, entries = in_pieces(inside(model), tokens, [4, 1, 3, 1], starts, kept=kept)
    assert_rows_match(model, rows, logits, tolerance=bound)
    assert keras.backend.standardize_dtype(entries[0]["key"].dtype) == dtype
    assert keras.backend.standardize_dtype(entries[0]["value"].dtype) == dtype


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
@pytest.mark.parametrize(("length", "slots"), [(1, 128), (1, 256), (3, 256), (6, 256)])
def test_reading_the_filled_part_is_reading_all(batch, with_bias, length, slots):
    # Few rows read in blocks or all at once, many in parts; all against float64 in
    # NumPy.
    rng = np.random.default_rng(0)
    heads, groups, dim = 2, 2, 8
    query = rng.normal(size=(batch, length, heads * groups, dim)).astype("float32")
    key, value = rng.normal(size=(2, batch, heads, slots, dim)).astype("float32")
    bias = rng.normal(size=(1, heads * groups, length, slots)).astype("float32")
    split = query.reshape(batch, length, heads, groups, dim).astype("float64")
    scores = np.einsum("btkgh,bksh->bkgts", split, key) * 0.3
    scores = 5.0 * np.tanh(scores / 5.0)
    if with_bias:
        scores = scores + bias.reshape(1, heads, groups, length, slots)
    for filled in (3, 64, 65, 100, slots - 56, slots):
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
            found, _ = reading.attend(
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
