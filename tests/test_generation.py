"""Generated text is what full forward passes say, whatever the model and batch."""

import contextlib
import gc
import inspect
import itertools
import threading
import weakref

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx as tx
from keras_tx import cache, remat
from keras_tx.generation import plan as plans
from keras_tx.generation import record, sizes
from keras_tx.generation.job import Job

VOCAB = 23


def language_model(num_layers=1, **options):
    options = {"position": "rotary", "num_kv_heads": 2, "pad_id": 0, **options}
    keras.utils.set_random_seed(3)
    return tx.decoder(VOCAB, 16, num_layers, 4, init_stddev=0.5, **options)


def translator(**options):
    keras.utils.set_random_seed(4)
    options = {"pad_id": 0, **options}
    return tx.encoder_decoder(VOCAB, 16, 1, 4, init_stddev=0.5, **options)


@pytest.fixture(scope="module")
def lm():
    return language_model(num_layers=2)


@pytest.fixture(scope="module")
def seq2seq():
    return translator()


PROMPTS = [[5, 7, 11, 2, 9], [3, 4]]


def numpy(x):
    return ops.convert_to_numpy(x)


def next_logits(model, row, source=None):
    """Logits behind a row, from a forward pass over a row of one length."""
    tokens = np.zeros((1, 24), "int32")  # one shape: one eager compilation on JAX
    tokens[0, : len(row)] = row
    inputs = tokens
    if source is not None:
        inputs = {"source": np.array([source], "int32"), "target": tokens}
    return numpy(model(inputs))[0, len(row) - 1]


def greedy(model, row, count, source=None):
    row = list(row)
    for _ in range(count):
        row.append(int(next_logits(model, row, source).argmax()))
    return row


# ----------------------------------------------------------------------------
# The text
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("compile", [True, False])
def test_each_row_gets_what_the_full_forward_pass_says(lm, compile):
    found = tx.generate(lm, PROMPTS, 6, compile=compile)
    assert found == [greedy(lm, row, 6) for row in PROMPTS]
    assert all(isinstance(token, int) for row in found for token in row)


@pytest.mark.parametrize("position", ["sinusoidal", "learned", "relative", "alibi"])
def test_every_position_kind_generates(position):
    model = language_model(
        position=position, max_length=24 if position == "learned" else None, window=3
    )
    found = tx.generate(model, PROMPTS, 4, compile=False)
    assert found == [greedy(model, row, 4) for row in PROMPTS]


def test_padding_left_right_or_none_gives_the_same_text(lm):
    expected = tx.generate(lm, PROMPTS, 6)
    right = tx.generate(lm, np.array([[5, 7, 11, 2, 9], [3, 4, 0, 0, 0]]), 6)
    left = tx.generate(lm, np.array([[5, 7, 11, 2, 9], [0, 0, 0, 3, 4]]), 6)
    assert right.shape == left.shape == (2, 11)
    assert right.dtype == left.dtype == np.int32
    assert right[1, :8].tolist() == left[1, 3:].tolist() == expected[1]
    assert right[0].tolist() == left[0].tolist() == expected[0]


def test_one_flat_prompt_gives_one_flat_text(lm):
    expected = tx.generate(lm, PROMPTS, 6)[1]
    assert tx.generate(lm, [3, 4], 6, compile=False) == expected
    array = tx.generate(lm, np.array([3, 4]), 6, compile=False)
    assert array.tolist() == expected


def test_long_prompts_are_read_in_pieces(lm, monkeypatch):
    monkeypatch.setattr(sizes, "PROMPT_CHUNK", 4)
    rows = [list(range(1, 12)), [3, 4, 5, 6, 7, 8]]
    expected = [greedy(lm, row, 3) for row in rows]
    assert tx.generate(lm, rows, 3, compile=False) == expected


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
def test_many_rows_say_what_each_says_alone_however_far_they_go(options):
    # So many rows read what is held by quarters of the capacity; see
    # `generation.steps`. The prompts end in the first, the texts in the last.
    model = language_model(position="alibi", num_kv_heads=2)
    prompts = [[5, 7, 11, 2, 9], [3, 4], [8], [6, 1, 2], [10, 4, 4, 9], [2]]
    sampler = tx.Beam(**options) if options else "greedy"
    found = tx.generate(model, prompts, 200, sampler=sampler)
    for row, text in list(zip(prompts, found, strict=True))[:2]:
        assert tx.generate(model, row, 200, sampler=sampler) == text


def test_stream_takes_what_generate_takes():
    options = inspect.signature(tx.generate).parameters
    assert options == inspect.signature(Job).parameters


def test_as_many_tokens_come_as_were_asked_for(lm):
    prompt = np.array([[5, 7, 11]])
    assert tx.generate(lm, prompt, 2, compile=False).shape == (1, 5)
    np.testing.assert_array_equal(tx.generate(lm, prompt, 0), prompt)
    assert tx.generate(lm, [[5], [6, 7]], 0) == [[5], [6, 7]]
    with pytest.raises(ValueError, match="max_new_tokens"):
        tx.generate(lm, prompt, -1)


def test_a_row_ends_behind_its_stop_token(lm):
    free = tx.generate(lm, PROMPTS, 6)
    stop = free[0][7]  # the third new token of the first row
    found = tx.generate(lm, PROMPTS, 6, stop_tokens=stop)

    def cut(row, prompt):
        new = row[len(prompt) :]
        return row[: len(prompt) + (new.index(stop) + 1 if stop in new else 6)]

    expected = [cut(row, prompt) for row, prompt in zip(free, PROMPTS, strict=True)]
    assert found == expected
    array = tx.generate(lm, np.array([PROMPTS[0]]), 6, stop_tokens=[stop])
    assert array[0].tolist() == expected[0]


# ----------------------------------------------------------------------------
# Draws
# ----------------------------------------------------------------------------


def test_a_seed_gives_one_text_in_every_batch_and_way_to_run(lm):
    sampler = [0.9, tx.TopP(0.95)]

    def run(prompts, seed, **options):
        return tx.generate(lm, prompts, 6, sampler=sampler, seed=seed, **options)

    first = run(PROMPTS, 7)
    state = [numpy(v) for v in lm.variables]
    assert run(PROMPTS, 7) == first
    assert run(PROMPTS[::-1], 7) == first[::-1]
    assert run(PROMPTS, 7, compile=False) == first
    assert run(PROMPTS[1], 7, compile=False) == first[1]
    assert run(PROMPTS, 8) != first
    for before, now in zip(state, lm.variables, strict=True):
        np.testing.assert_array_equal(before, numpy(now))
    same = run([PROMPTS[0], PROMPTS[0]], 7)
    assert same[0] == first[0] and same[1] != same[0]


def test_without_a_seed_texts_differ_and_follow_keras_seed(lm):
    def run():
        return tx.generate(lm, PROMPTS, 6, sampler=2.0)

    assert run() != run()
    keras.utils.set_random_seed(5)
    first = run()
    keras.utils.set_random_seed(5)
    assert run() == first


@pytest.mark.parametrize("sampler", [0.0, 1e-6, tx.TopK(1), [tx.TopK(999), 0]])
def test_cold_samplers_are_greedy(lm, sampler):
    expected = tx.generate(lm, PROMPTS, 6)
    assert tx.generate(lm, PROMPTS, 6, sampler=sampler, compile=False) == expected


def test_tokens_always_lie_in_the_vocabulary(lm):
    chain = [
        tx.RepetitionPenalty(1.3),
        tx.PresencePenalty(0.1),
        tx.NoRepeatNGrams(2),
        tx.TopK(999),
        tx.TopP(1.0),
        1e-6,
    ]
    found = tx.generate(lm, PROMPTS, 6, sampler=chain, seed=1)
    assert all(0 <= token < VOCAB for row in found for token in row)
    for row in found:
        pairs = list(itertools.pairwise(row))
        assert len(set(pairs)) == len(pairs)


def test_constraints_may_be_any_python_without_compiling(lm):
    def alternate(history):
        step = int(history.step)
        return np.arange(VOCAB) % 2 == step % 2

    found = tx.generate(lm, [3], 4, sampler=tx.Constrain(alternate), compile=False)
    assert [token % 2 for token in found[1:]] == [0, 1, 0, 1]


def test_a_constraint_that_allows_nothing_is_an_error(lm):
    nothing = tx.Constrain(lambda history: ops.zeros((VOCAB,), dtype="bool"))
    with pytest.raises(ValueError, match=r"rows \[0\]"):
        tx.generate(lm, [3], 2, sampler=nothing, compile=False)


# ----------------------------------------------------------------------------
# Beams
# ----------------------------------------------------------------------------


def test_enough_beams_find_the_likeliest_text_of_all():
    model = language_model(num_kv_heads=None)
    length = 2
    prompt = [5, 7]
    scores = {}
    for text in itertools.product(range(VOCAB), repeat=1):
        logits = next_logits(model, [*prompt, *text]).astype("float64")
        scores[text] = logits - np.log(np.exp(logits).sum())
    first = next_logits(model, prompt).astype("float64")
    first = first - np.log(np.exp(first).sum())
    totals = np.stack([first[a] + scores[(a,)] for a in range(VOCAB)])
    best = np.unravel_index(totals.argmax(), totals.shape)
    found = tx.generate(model, prompt, length, sampler=tx.Beam(VOCAB), compile=False)
    assert tuple(found[2:]) == tuple(int(x) for x in best)


def test_one_beam_is_greedy_and_beams_never_score_less(lm):
    assert tx.generate(lm, PROMPTS, 6, sampler=tx.Beam(1)) == tx.generate(
        lm, PROMPTS, 6
    )

    def score(row, prompt):
        total = 0.0
        for end in range(len(prompt), len(row)):
            logits = next_logits(lm, row[:end]).astype("float64")
            total += logits[row[end]] - np.log(np.exp(logits).sum())
        return total

    beams = tx.generate(lm, [[3, 4]], 4, sampler=tx.Beam(3), compile=False)[0]
    assert score(beams, [3, 4]) >= score(greedy(lm, [3, 4], 4), [3, 4]) - 1e-5


def test_frozen_beams_keep_their_score():
    # A model of one distribution: token 1 stops, and is likely.
    table = np.log(np.array([0.1, 0.5, 0.4]))

    class Constant(keras.Model):
        def call(self, tokens):
            logits = ops.convert_to_tensor(table.astype("float32"))
            return ops.zeros((*tokens.shape, 3)) + logits

    options = {"stop_tokens": 1, "compile": False}
    short = tx.generate(
        Constant(), [0], 4, sampler=tx.Beam(3, length_penalty=0.0), **options
    )
    assert short == [0, 1]
    # By the token, 4 times log 0.4 ... 0.5 loses against log 0.5 alone.
    assert tx.generate(Constant(), [0], 4, sampler=tx.Beam(3), **options) == [0, 1]


# ----------------------------------------------------------------------------
# Encoder-decoders
# ----------------------------------------------------------------------------

SOURCES = [[5, 6, 7, 8, 9, 1, 2], [3, 4]]


@pytest.mark.parametrize("count", [3, 12])
def test_translations_follow_the_full_forward_pass(seq2seq, count):
    found = tx.generate(seq2seq, [1], count, source=SOURCES)
    expected = [greedy(seq2seq, [1], count, source) for source in SOURCES]
    assert found == expected
    one_beam = tx.generate(
        seq2seq, [1], count, source=SOURCES, sampler=tx.Beam(1), compile=False
    )
    assert one_beam == expected


def test_beams_share_their_source(seq2seq):
    both = tx.generate(
        seq2seq, [1], 5, source=SOURCES, sampler=tx.Beam(2), compile=False
    )
    for row, source in zip(both, SOURCES, strict=True):
        alone = tx.generate(
            seq2seq, [1], 5, source=[source], sampler=tx.Beam(2), compile=False
        )
        assert alone == row or alone == [row]


def test_prompts_of_targets_have_rows_of_their_own(seq2seq):
    prompts = [[1, 5], [1]]
    found = tx.generate(seq2seq, prompts, 3, source=SOURCES, compile=False)
    assert found == [
        greedy(seq2seq, row, 3, source)
        for row, source in zip(prompts, SOURCES, strict=True)
    ]


@pytest.mark.parametrize("position", ["relative", "learned"])
def test_positions_of_both_stacks(position):
    model = translator(
        position=position, max_length=24 if position == "learned" else None
    )
    found = tx.generate(model, [1], 4, source=SOURCES, compile=False)
    assert found == [greedy(model, [1], 4, source) for source in SOURCES]


class Subclassed(keras.Model):
    """An encoder-decoder in the user's own words; rotary cross-attention."""

    def __init__(self):
        super().__init__()
        self.embedding = tx.TokenEmbedding(VOCAB, 16, pad_id=0)
        self.reader = tx.TransformerBlock(2, 20)
        self.position = tx.SinusoidalPosition()
        self.writer = tx.TransformerBlock(
            2,
            20,
            cross_attention=tx.MultiHead(2, position=tx.RotaryPosition()),
            causal=True,
        )

    def encode(self, source):
        return self.reader(self.position(self.embedding(source)))

    def decode(self, target, context):
        x = self.writer(self.position(self.embedding(target)), context=context)
        return self.embedding(x, reverse=True)

    def call(self, inputs):
        return self.decode(inputs["target"], self.encode(inputs["source"]))


def test_a_subclassed_encoder_decoder_has_encode_and_decode():
    model = Subclassed()
    found = tx.generate(model, [1], 4, source=SOURCES)
    assert found == [greedy(model, [1], 4, source) for source in SOURCES]


# ----------------------------------------------------------------------------
# Models
# ----------------------------------------------------------------------------


def test_a_reloaded_model_says_the_same(lm, tmp_path):
    path = str(tmp_path / "lm.keras")
    lm.save(path)
    loaded = keras.saving.load_model(path)
    assert tx.generate(loaded, PROMPTS, 6, compile=False) == tx.generate(lm, PROMPTS, 6)


def test_saving_after_generating_changes_nothing(tmp_path):
    model = translator()
    config = model.get_config()
    text = tx.generate(model, [1], 3, source=SOURCES, compile=False)
    assert model.get_config() == config
    path = str(tmp_path / "seq2seq.keras")
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert [v.path for v in loaded.weights] == [v.path for v in model.weights]
    assert tx.generate(loaded, [1], 3, source=SOURCES, compile=False) == text


def sequential():
    return keras.Sequential(
        [
            keras.layers.Embedding(VOCAB, 16),
            tx.SinusoidalPosition(),
            tx.TransformerBlock(2, 20, causal=True),
            keras.layers.Dense(VOCAB),
        ]
    )


def two_outputs():
    tokens = keras.Input((None,), dtype="int32")
    x = tx.TokenEmbedding(VOCAB, 16)(tokens)
    block = tx.TransformerBlock(2, 20, causal=True)
    x = block(block(x))  # one block, twice
    bias = tx.RelativePosition(2, num_buckets=8, max_distance=12)(x)
    x = tx.TransformerBlock(2, 20, causal=True)(x, bias=bias)
    outputs = {"logits": keras.layers.Dense(VOCAB)(x), "features": x}
    return keras.Model(tokens, outputs)


def packed():
    return language_model(packed=True, position="rotary")


@pytest.mark.parametrize("make", [sequential, two_outputs, packed])
def test_models_of_the_users_own(make):
    model = make()

    def full(row):
        tokens = np.array([row], "int32")
        if make is packed:
            tokens = {
                "tokens": tokens,
                "positions": np.arange(len(row), dtype="int32")[None],
                "segment_ids": np.ones_like(tokens),
            }
        outputs = model(tokens)
        outputs = outputs["logits"] if make is two_outputs else outputs
        return [*row, int(numpy(outputs)[0, -1].argmax())]

    found = tx.generate(model, PROMPTS, 2, compile=False)
    assert found == [full(full(row)) for row in PROMPTS]


def test_outputs_are_found_by_name_or_number():
    model = two_outputs()
    logits, features = model.output["logits"], model.output["features"]
    expected = tx.generate(model, [5], 2, compile=False)
    listed = keras.Model(model.input, [features, logits])
    assert tx.generate(listed, [5], 2, output=1, compile=False) == expected
    renamed = keras.Model(model.input, {"a": features, "b": logits})
    assert tx.generate(renamed, [5], 2, output="b", compile=False) == expected
    with pytest.raises(ValueError, match="output="):
        tx.generate(renamed, [5], 2)


# ----------------------------------------------------------------------------
# Models that cannot be read token by token
# ----------------------------------------------------------------------------


class Ahead(keras.layers.Layer):
    """Adds the token before, out of sight of the cache."""

    def call(self, x):
        return x + ops.pad(x, [(0, 0), (1, 0), (0, 0)])[:, :-1]


class OwnPosition(keras.layers.Layer):
    def call(self, x):
        return x + ops.cast(ops.arange(ops.shape(x)[1]), x.dtype)[None, :, None]


def model_with(layer):
    tokens = keras.Input((None,), dtype="int32")
    x = tx.TokenEmbedding(VOCAB, 16)(tokens)
    x = layer(tx.TransformerBlock(2, 20, causal=True)(x))
    return keras.Model(tokens, keras.layers.Dense(VOCAB)(x))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: keras.layers.Conv1D(16, 3, padding="causal", name="culprit"),
        lambda: keras.layers.GRU(16, return_sequences=True, name="culprit"),
        lambda: keras.layers.MaxPooling1D(2, 1, padding="same", name="culprit"),
        lambda: Ahead(name="culprit"),
        lambda: OwnPosition(name="culprit"),
        lambda: tx.TransformerBlock(2, 20, name="culprit"),
    ],
)
def test_layers_that_mix_positions_are_refused_by_name(layer):
    with pytest.raises(ValueError, match="culprit"):
        tx.generate(model_with(layer()), [5, 7], 2, compile=False)
    assert cache.scope() is None


def test_who_knows_better_may_say_so():
    model = model_with(keras.layers.Conv1D(16, 1))
    expected = tx.generate(model, [5, 7], 2, compile=False)
    assert tx.generate(model, [5, 7], 2, compile=False, check=False) == expected
    mixing = model_with(Ahead())
    assert len(tx.generate(mixing, [5, 7], 2, compile=False, check=False)) == 4


# ----------------------------------------------------------------------------
# Streams, threads, exceptions
# ----------------------------------------------------------------------------


def test_a_stream_yields_what_generate_returns(lm):
    whole = tx.generate(lm, PROMPTS, 6)
    rows = list(tx.stream(lm, PROMPTS, 6))
    assert np.array(rows).T.tolist() == [row[-6:] for row in whole]
    stop = whole[0][7]
    flat = list(tx.stream(lm, PROMPTS[0], 6, stop_tokens=stop, compile=False))
    assert flat == tx.generate(lm, PROMPTS[0], 6, stop_tokens=stop, compile=False)[5:]


def test_streams_may_be_interleaved_and_left(lm):
    whole = tx.generate(lm, PROMPTS, 6)
    one, two = (tx.stream(lm, row, 6, compile=False) for row in PROMPTS)
    mixed = []
    for left, right in zip(one, two, strict=True):
        assert cache.scope() is None
        lm(np.array([[1, 2]], "int32"))  # a forward pass in between
        mixed.append((left, right))
    assert [list(x) for x in zip(*mixed, strict=True)] == [row[-6:] for row in whole]
    for compile in (False, True):
        left = tx.stream(lm, PROMPTS[0], 6, compile=compile)
        next(left)
        left.close()
        assert cache.scope() is None


def test_a_stream_checks_its_arguments_at_once(lm):
    with pytest.raises(ValueError, match="max_new_tokens"):
        tx.stream(lm, [5], -1)
    with pytest.raises(ValueError, match="beam"):
        tx.stream(lm, [5], 3, sampler=tx.Beam(2))


def test_threads_do_not_mix(lm):
    rows = [PROMPTS[0], PROMPTS[1], [9], [2, 2, 2]]
    expected = [greedy(lm, row, 6) for row in rows]
    found = [None] * len(rows)

    def work(index):
        for _ in range(2):
            found[index] = tx.generate(lm, [rows[index], rows[index]], 6)[0]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_an_exception_on_the_way_leaves_nothing_behind(lm):
    def fail(history):
        raise RuntimeError("on the way")

    for compile in (False, True):
        with pytest.raises(RuntimeError):
            tx.generate(lm, PROMPTS, 6, sampler=tx.Constrain(fail), compile=compile)
        assert cache.scope() is None
    with pytest.raises(RuntimeError):
        next(tx.stream(lm, PROMPTS, 6, sampler=tx.Constrain(fail), compile=False))
    assert cache.scope() is None
    assert tx.generate(lm, PROMPTS, 6)[1] == greedy(lm, PROMPTS[1], 6)


# ----------------------------------------------------------------------------
# Prefixes
# ----------------------------------------------------------------------------

LONG = list(range(1, 22)) + [5, 3]


@pytest.mark.parametrize("compile", [True, False])
def test_a_prefix_changes_nothing_but_what_is_read(lm, compile):
    prefix = tx.prefill(lm, LONG, compile=compile)
    assert len(prefix) == len(LONG)
    rows = [[7], [], [9, 2, 4], [11]]
    options = {"sampler": [0.9, tx.TopP(0.95)], "seed": 7, "compile": compile}
    whole = tx.generate(lm, [LONG + row for row in rows], 5, **options)
    for _ in range(2):  # nothing that is held is used up
        found = tx.generate(lm, rows, 5, prefix=prefix, **options)
        assert found == [row[len(LONG) :] for row in whole]
    if not compile:
        alone = tx.generate(lm, [], 5, prefix=prefix, **options)
        assert alone == found[1]


@pytest.mark.parametrize("position", ["learned", "relative"])
def test_a_prefix_keeps_positions_and_more_than_a_window(position, monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", 4)
    monkeypatch.setattr(sizes, "PROMPT_CHUNK", 8)
    model = language_model(
        position=position, max_length=40 if position == "learned" else None, window=5
    )
    prefix = tx.prefill(model, LONG, compile=False)
    rows = [[7], [], [9, 2, 4, 1, 1, 8, 3, 4, 6, 12]]
    whole = tx.generate(model, [LONG + row for row in rows], 4, compile=False)
    found = tx.generate(model, rows, 4, prefix=prefix, compile=False)
    assert found == [row[len(LONG) :] for row in whole]


def test_a_prefix_takes_its_source_along(seq2seq):
    source = SOURCES[:1]
    prefix = tx.prefill(seq2seq, LONG, source=source, compile=False)
    rows = [[7], [9, 2]]
    for sampler in ("greedy", tx.Beam(2)):
        options = {"sampler": sampler, "compile": False}
        found = tx.generate(seq2seq, rows, 4, prefix=prefix, **options)
        for row, more in zip(rows, found, strict=True):
            whole = tx.generate(seq2seq, LONG + row, 4, source=source, **options)
            assert more == whole[len(LONG) :]
    streamed = list(tx.stream(seq2seq, [7], 4, prefix=prefix, compile=False))
    whole = tx.generate(seq2seq, LONG + [7], 4, source=source, compile=False)
    assert streamed == whole[-4:]


def test_prefixes_of_other_models_and_other_things_are_refused(lm, seq2seq):
    prefix = tx.prefill(lm, LONG, compile=False)
    for model, options, message in (
        (language_model(), {}, "another model"),
        (lm, {"source": SOURCES}, "has its source"),
        (lm, {"output": 1}, "another model|one tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            tx.generate(model, [5], 2, prefix=prefix, **options)
    with pytest.raises(ValueError, match="prefill"):
        tx.generate(lm, [5], 2, prefix=LONG)
    with pytest.raises(ValueError, match="one prompt"):
        tx.prefill(lm, PROMPTS)
    with pytest.raises(ValueError, match="8 positions"):
        learned = language_model(position="learned", max_length=8)
        prefix = tx.prefill(learned, [1, 2, 3], compile=False)
        tx.generate(learned, [4], 5, prefix=prefix)


@pytest.mark.parametrize("compile", [True, False])
def test_small_caches_serve_prefixes_drafts_and_beams(compile):
    model = language_model()
    options = {"cache_dtype": "int8", "compile": compile}
    expected = tx.generate(model, PROMPTS, 5, **options)
    drafted = tx.generate(model, PROMPTS, 5, draft=model, **options)
    assert drafted == expected
    if compile:
        return
    prefix = tx.prefill(model, LONG, **options)
    assert "int8" in str(prefix.entries[0]["key"].dtype)
    text = tx.generate(model, PROMPTS, 4, prefix=prefix, compile=False)
    assert [len(row) for row in text] == [9, 6]
    beams = tx.generate(model, PROMPTS, 4, sampler=tx.Beam(2), prefix=prefix, **options)
    assert [len(row) for row in beams] == [9, 6]
    with pytest.raises(ValueError, match="A prefix is kept"):
        tx.generate(model, [5], 2, prefix=prefix, cache_dtype="float16")
    with pytest.raises(ValueError, match="cache_dtype"):
        tx.generate(model, [5], 2, cache_dtype="int4")


# ----------------------------------------------------------------------------
# Drafts
# ----------------------------------------------------------------------------


def near(model, amount):
    """A copy of a model with other weights, but for some."""
    copy = keras.models.clone_model(model)
    rng = np.random.default_rng(5)
    copy.set_weights(
        [w + amount * rng.normal(size=w.shape) for w in model.get_weights()]
    )
    return copy


@pytest.mark.parametrize("compile", [True, False])
def test_a_draft_changes_no_text(compile):
    model = language_model()
    draft = near(model, 0.1)  # its guesses stand sometimes
    sampler = [0.9, tx.RepetitionPenalty(1.2)] if compile else "greedy"
    count = 9 if compile else 5
    options = {"sampler": sampler, "seed": 7, "compile": compile}
    expected = tx.generate(model, PROMPTS, count, **options)
    options |= {"draft": draft, "draft_tokens": 3}
    assert tx.generate(model, PROMPTS, count, **options) == expected
    streamed = np.array(list(tx.stream(model, PROMPTS, count, **options)))
    assert streamed.T.tolist() == [row[-count:] for row in expected]
    stop = expected[0][7]
    if compile:
        cut = tx.generate(model, PROMPTS, count, stop_tokens=stop, **options)
        for found, row in zip(cut, expected, strict=True):
            assert found == row[: len(found)]
            assert found[-1] == stop or found == row
        assert len(cut[0]) <= 8


def test_a_draft_needs_fewer_passes_of_the_model():
    model = language_model()
    passes = counted(model)
    expected = tx.generate(model, PROMPTS[0], 12, compile=False)
    before = len(passes)
    draft = near(model, 0.0)
    found = tx.generate(model, PROMPTS[0], 12, draft=draft, compile=False)
    assert found == expected
    assert len(passes) - before <= 1 + 3  # a prompt, and 5 + 5 + 2 tokens


def test_guesses_are_taken_back_from_rings_and_beyond_tables(monkeypatch):
    monkeypatch.setattr(cache, "BLOCK", 2)
    model = language_model(position="learned", max_length=16, window=5)
    draft = near(model, 0.1)
    prefix = tx.prefill(model, [8, 9], compile=False)
    expected = tx.generate(model, [[8, 9, *row] for row in PROMPTS], 9, compile=False)
    options = {"draft": draft, "draft_tokens": 3, "prefix": prefix, "compile": False}
    found = tx.generate(model, PROMPTS, 9, **options)
    assert found == [row[2:] for row in expected]


def test_drafts_that_cannot_guess_are_refused(lm, seq2seq):
    other = tx.decoder(VOCAB + 1, 8, 1, 2)
    with pytest.raises(ValueError, match="vocabulary of the model"):
        tx.generate(lm, PROMPTS, 2, draft=other)
    with pytest.raises(ValueError, match="Beam"):
        tx.generate(lm, PROMPTS, 2, draft=lm, sampler=tx.Beam(2))
    with pytest.raises(ValueError, match="encoder-decoders"):
        tx.generate(seq2seq, [1], 2, draft=lm, source=SOURCES)
    with pytest.raises(ValueError, match="draft_tokens"):
        tx.generate(lm, PROMPTS, 2, draft=lm, draft_tokens=0)


# ----------------------------------------------------------------------------
# What is compiled, and what is kept
# ----------------------------------------------------------------------------


def counted(model):
    """Counts how often the model's Python code runs, by its first block."""
    block = model.get_layer("block_0")
    calls = []
    call = block.call

    def wrapped(*args, **kwargs):
        calls.append(1)
        return call(*args, **kwargs)

    object.__setattr__(block, "call", wrapped)
    return calls


def test_one_bucket_is_traced_once(monkeypatch):
    if keras.backend.backend() == "torch":
        # So few tokens are not worth a record; tests/test_record.py has the others.
        monkeypatch.setattr(record, "record", None)
        tx.generate(language_model(), [5], 5)
        return
    model = language_model()
    calls = counted(model)
    tx.generate(model, [5, 7], 3)
    traced = len(calls)
    for length, count, heat in zip(
        range(3, 12), range(1, 10), range(1, 10), strict=True
    ):
        tx.generate(model, list(range(1, length + 1)), count, stop_tokens=[length % 3])
        assert len(calls) == traced
        tx.generate(model, [5, 7], count, sampler=heat / 10, seed=heat)
        if heat == 1:
            traced = len(calls)
        assert len(calls) == traced


def test_functions_kept_are_bounded(lm, monkeypatch):
    monkeypatch.setattr(plans, "MAX_FUNCTIONS", 2)
    plan = plans.Plan(lm, False, None, None)
    for index in range(9):
        plan.function(index, len, True)
    assert len(plan.functions) <= 2


def test_weights_that_change_are_those_of_the_next_call(tmp_path):
    model = language_model()
    texts = [tx.generate(model, PROMPTS, 6)]

    def assert_newest_weights():
        found = tx.generate(model, PROMPTS, 6)
        assert found == [greedy(model, row, 6) for row in PROMPTS]
        assert found not in texts
        texts.append(found)

    x = np.random.default_rng(0).integers(1, VOCAB, (8, 7)).astype("int32")
    y = np.roll(x, -1, axis=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.05), loss)
    while_training = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            while_training.append(tx.generate(model, PROMPTS, 6))

    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[Look()])
    assert_newest_weights()
    assert while_training[-1] == texts[-1]
    assert while_training[0] != texts[-1]

    other = language_model()
    rng = np.random.default_rng(0)
    other.set_weights([rng.normal(size=w.shape) * 0.5 for w in other.weights])
    path = str(tmp_path / "other.weights.h5")
    other.save_weights(path)
    model.load_weights(path)
    assert_newest_weights()

    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.EinsumDense):
            layer.enable_lora(2)
            layer.lora_kernel_b.assign(rng.normal(size=layer.lora_kernel_b.shape))
    assert_newest_weights()


def test_quantized_weights_are_those_of_the_next_call():
    model = language_model()
    tx.generate(model, PROMPTS, 4, compile=False)
    model.quantize("int8")
    found = tx.generate(model, PROMPTS, 4)
    assert found == [greedy(model, row, 4) for row in PROMPTS]
    assert any("int8" in str(v.dtype) for v in model.variables)


def test_layers_that_are_added_take_part_in_the_next_call():
    model = sequential()
    model(np.ones((2, 7)))  # from here on, Keras says that its length is 7
    before = tx.generate(model, [5, 7], 3)
    model.add(keras.layers.Rescaling(-1.0))
    after = tx.generate(model, [5, 7], 3)
    assert after == greedy(model, [5, 7], 3) != before


def test_a_model_that_its_first_call_builds_is_known_whole():
    embedding = tx.TokenEmbedding(VOCAB, 16)
    embedding.build((None, None))

    class Late(keras.Model):
        def build(self, tokens_shape):
            self.embedding = embedding
            self.position = tx.LearnedPosition(8)
            self.block = tx.TransformerBlock(2, 20, causal=True)
            self.built = True

        def call(self, tokens):
            x = self.block(self.position(self.embedding(tokens)))
            return self.embedding(x, reverse=True)

    model = Late()
    with pytest.raises(ValueError, match="8 positions"):
        tx.generate(model, [5, 7], 7)
    plan = plans.plan_of(model, False, None, None)
    assert len(plan.variables) == len(model.variables) > 4


def test_a_text_is_no_part_of_a_gradient(lm):
    expected = tx.generate(lm, PROMPTS, 6)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            found = [tx.generate(lm, PROMPTS, 6, compile=c) for c in (True, False)]
            loss = ops.sum(lm.trainable_variables[0])
        assert tape.gradient(loss, lm.trainable_variables[0]) is not None
    else:
        found = [tx.generate(lm, PROMPTS, 6, compile=c) for c in (True, False)]
    assert found == [expected, expected]


@pytest.mark.parametrize("inside", [False, True])
def test_rematerialization_changes_no_text(inside):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = tx.TokenEmbedding(VOCAB, 16, pad_id=0)
            heads = tx.MultiHead(2, position=tx.RotaryPosition())
            self.block = tx.TransformerBlock(heads, 20, causal=True)

        def call(self, tokens):
            return self.embedding(self.block(self.embedding(tokens)), reverse=True)

    with keras.RematScope(mode="full"):
        model = Own()
    model(np.array(PROMPTS[:1]))
    modes = [layer._remat_mode for layer in model._flatten_layers()]
    assert any(modes)
    scope = keras.RematScope(mode="full") if inside else contextlib.nullcontext()
    with scope:
        found = tx.generate(model, PROMPTS, 4, compile=not inside)
    assert found == [greedy(model, row, 4) for row in PROMPTS]
    assert modes == [layer._remat_mode for layer in model._flatten_layers()]


def test_threads_that_switch_rematerialization_off_bring_it_back():
    with keras.RematScope(mode="full"):
        layer = keras.layers.Dense(2)
    mode = layer._remat_mode
    first, second = remat.without([layer]), remat.without([layer])
    first.__enter__()
    second.__enter__()  # as another thread would, before the first one leaves
    first.__exit__(None, None, None)
    assert layer._remat_mode is None
    second.__exit__(None, None, None)
    assert layer._remat_mode == mode is not None


def test_nothing_keeps_a_model_alive():
    model = language_model()
    tx.generate(model, PROMPTS, 2, compile=False)
    list(tx.stream(model, PROMPTS, 2, compile=False))
    gone = weakref.ref(model)
    del model
    keras.backend.clear_session()
    gc.collect()
    assert gone() is None


# ----------------------------------------------------------------------------
# Mistakes
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one token"),
        ([[5], []], {}, "row 1 of length 0"),
        (np.zeros((1, 0), "int32"), {}, "at least one token"),
        (np.array([[5, 6], [0, 0]]), {}, "nothing but padding"),
        ([5.0, 6.0], {}, "integers"),
        ([[5], [VOCAB]], {}, "0 to 22"),
        ([-1], {}, "0 to 22"),
        (np.zeros((1, 2, 3), "int32"), {}, "must be tokens"),
        ([5], {"stop_tokens": VOCAB}, "stop_tokens"),
        ([5], {"stop_tokens": -1}, "stop_tokens"),
        ([5], {"sampler": -0.5}, "at least 0"),
        ([5], {"sampler": "beam"}, "A sampler is"),
        ([5], {"seed": 1.5}, "seed"),
        ([5], {"target": "text"}, "target"),
        ([5], {"source": [[1]]}, "encoder-decoder"),
    ],
)
def test_mistakes_are_named(lm, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        tx.generate(lm, prompts, 2, **options)


def test_no_text_exceeds_a_learned_length():
    model = language_model(position="learned", max_length=8)
    assert len(tx.generate(model, [5, 7, 9], 5, compile=False)) == 8
    with pytest.raises(ValueError, match="8 positions"):
        tx.generate(model, [5, 7, 9], 6)


def test_fixed_lengths_classes_and_other_things_are_refused(seq2seq):
    tokens = keras.Input((8,), dtype="int32")
    fixed = keras.Model(tokens, tx.TokenEmbedding(VOCAB, 8)(tokens))
    with pytest.raises(ValueError, match="fixed length 8"):
        tx.generate(fixed, [5], 2)
    classes = tx.encoder(VOCAB, 8, 1, 2, output="classes", num_classes=3)
    with pytest.raises(ValueError, match=r"must give logits|Pooling"):
        tx.generate(classes, [5], 2)
    with pytest.raises(ValueError, match=r"keras\.Model"):
        tx.generate(tx.TokenEmbedding(VOCAB, 8), [5], 2)
    with pytest.raises(ValueError, match="source="):
        tx.generate(seq2seq, [5], 2)
    with pytest.raises(ValueError, match="as many rows"):
        tx.generate(seq2seq, [[1], [1], [1]], 2, source=SOURCES)
    with pytest.raises(ValueError, match="`source` must hold tokens"):
        tx.generate(seq2seq, [1], 2, source=[[5, VOCAB]])
