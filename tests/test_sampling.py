"""Samplers against NumPy, and noise that is the same everywhere."""

import numpy as np
import pytest
from keras import ops

import keras_tx as tx
from keras_tx import sampling


def logits_of(batch=3, size=41):
    rng = np.random.default_rng(0)
    return rng.normal(size=(batch, size)).astype("float32") * 2


def history_of(tokens, known=None, step=0):
    tokens = np.asarray(tokens, "int32")
    known = np.ones_like(tokens, bool) if known is None else np.asarray(known)
    return sampling.History(
        ops.convert_to_tensor(tokens),
        ops.convert_to_tensor(known),
        tokens.shape[1] - 1,
        step,
    )


def apply(sampler, logits, history=None):
    return ops.convert_to_numpy(sampler(ops.convert_to_tensor(logits), history))


def kept(sampler, logits, history=None):
    return apply(sampler, logits, history) > sampling.RULED_OUT / 2


def softmax(logits):
    logits = logits.astype("float64")
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def draw(sampler, logits, seed=7, step=0):
    rows = [[5]] * len(logits)
    tokens, stuck = sampling.choose(
        sampling.chain(sampler),
        ops.convert_to_tensor(logits),
        history_of([[5]] * len(logits), step=step),
        ops.convert_to_tensor(sampling.row_keys(seed, rows)),
    )
    return ops.convert_to_numpy(tokens), ops.convert_to_numpy(stuck)


@pytest.mark.parametrize("k", [1, 5, 41, 1000])
def test_top_k_keeps_the_k_likeliest(k):
    logits = logits_of()
    order = np.argsort(-logits, axis=-1)[:, :k]
    expected = np.zeros_like(logits, bool)
    np.put_along_axis(expected, order, True, axis=-1)
    np.testing.assert_array_equal(kept(tx.TopK(k), logits), expected)


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.9, 0.999, 1.0])
def test_top_p_keeps_the_smallest_set_that_holds_p(p):
    logits = logits_of()
    shares = softmax(logits)
    order = np.argsort(-shares, axis=-1)
    sums = np.cumsum(np.take_along_axis(shares, order, -1), axis=-1)
    size = logits.shape[-1]
    counts = np.minimum((sums < p).sum(-1) + 1, size) if p < 1 else [size] * 3
    found = kept(tx.TopP(p), logits)
    np.testing.assert_array_equal(found.sum(-1), counts)
    for row, ranked, count in zip(found, order, counts, strict=True):
        assert row[ranked[:count]].all()


@pytest.mark.parametrize("p", [0.05, 0.5, 1.0])
def test_min_p_keeps_what_is_p_times_as_likely_as_the_likeliest(p):
    shares = softmax(logits_of())
    expected = shares >= p * shares.max(-1, keepdims=True) * (1 - 1e-6)
    np.testing.assert_array_equal(kept(tx.MinP(p), logits_of()), expected)


def test_repetition_penalty_follows_its_paper():
    logits = np.array([[2.0, -2.0, 1.0, -1.0]], "float32")
    found = apply(tx.RepetitionPenalty(2.0), logits, history_of([[0, 1, 1]]))
    np.testing.assert_allclose(found, [[1.0, -4.0, 1.0, -1.0]])


def test_presence_counts_once_and_frequency_every_time():
    logits = np.zeros((1, 4), "float32")
    sampler = tx.PresencePenalty(0.5, frequency=0.25)
    found = apply(sampler, logits, history_of([[0, 1, 1]]))
    np.testing.assert_allclose(found, [[-0.75, -1.0, 0.0, 0.0]])


def test_unknown_places_of_the_buffer_count_for_nothing():
    logits = np.zeros((1, 4), "float32")
    history = history_of([[3, 1, 2]], known=[[False, True, False]])
    found = apply(tx.PresencePenalty(1.0), logits, history)
    np.testing.assert_allclose(found, [[0.0, -1.0, 0.0, 0.0]])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_n_gram_repeats(n):
    rng = np.random.default_rng(2)
    tokens = rng.integers(0, 4, (2, 14))
    known = np.ones_like(tokens, bool)
    known[1, :5] = False  # left padding
    found = kept(tx.NoRepeatNGrams(n), logits_of(2, 4), history_of(tokens, known))
    for row, there, allowed in zip(tokens, known, found, strict=True):
        text = row[there].tolist()
        grams = {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
        end = text[len(text) - n + 1 :] if n > 1 else []
        expected = [(*end, token) not in grams for token in range(4)]
        assert allowed.tolist() == expected


def test_constraints_rule_out_all_else():
    allowed = np.array([True, False, True, False])
    sampler = tx.Constrain(lambda history: ops.convert_to_tensor(allowed))
    np.testing.assert_array_equal(kept(sampler, logits_of(1, 4))[0], allowed)


def test_samplers_compose_from_left_to_right():
    logits = logits_of()
    warm = [tx.Temperature(4.0), tx.MinP(0.5)]
    cold = [tx.MinP(0.5), tx.Temperature(4.0)]

    def run(samplers):
        x = logits
        for sampler in samplers:
            x = apply(sampler, x)
        return (x > sampling.RULED_OUT / 2).sum()

    assert run(warm) > run(cold)


@pytest.mark.parametrize("sampler", [0, 1e-6, 1e-38, tx.TopK(1), "greedy", [1.0, 0]])
def test_no_temperature_is_too_low(sampler):
    logits = logits_of()
    tokens, stuck = draw(sampler, logits)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    assert not stuck.any()


def test_draws_follow_the_softmax():
    logits = np.repeat(np.array([[0.0, 1.0, 2.0, -1.0]], "float32"), 20_000, axis=0)
    tokens, _ = draw(2.0, logits)
    shares = np.bincount(tokens, minlength=4) / len(tokens)
    np.testing.assert_allclose(shares, softmax(logits[0] / 2), atol=0.015)


def test_noise_is_the_same_on_every_backend():
    keys = sampling.row_keys(7, [[1, 2], [1, 2], [3]])
    expected_keys = [
        [-2126283102, -1062315727],
        [-619163053, -820457795],
        [1393309539, -1751260792],
    ]
    assert keys.tolist() == expected_keys
    found = ops.convert_to_numpy(sampling.uniform(keys, 3, 3))
    expected = [
        [0.9817937, 0.66231614, 0.8270138],
        [0.67688173, 0.26887864, 0.57129055],
        [0.0313409, 0.3234107, 0.820782],
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_noise_is_uniform_and_independent_between_steps_rows_and_tokens():
    keys = sampling.row_keys(1, [[1], [1]])
    now, then = (
        ops.convert_to_numpy(sampling.uniform(keys, step, 30_000)) for step in (0, 1)
    )
    assert now.min() > 0 and now.max() < 1
    counts = np.histogram(now, bins=20, range=(0, 1))[0]
    np.testing.assert_allclose(counts, now.size / 20, rtol=0.08)
    pairs = [(now[0], now[1]), (now[0], then[0]), (now[0, 1:], now[0, :-1])]
    for x, y in pairs:
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.03


def test_nothing_left_to_choose_is_noticed():
    nothing = tx.Constrain(lambda history: ops.zeros((4,), dtype="bool"))
    for chain in ([nothing], [nothing, 0.7, tx.TopP(0.5), tx.TopK(2)]):
        tokens, stuck = draw(chain, logits_of(2, 4))
        assert stuck.all() and (tokens < 4).all()
    nan = np.full((2, 4), np.nan, "float32")
    tokens, stuck = draw("greedy", nan)
    assert stuck.all() and (tokens < 4).all() and (tokens >= 0).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tx.Temperature(-0.1), "at least 0"),
        (lambda: tx.Temperature(float("nan")), "finite"),
        (lambda: tx.TopP(0), "above 0 and at most 1"),
        (lambda: tx.TopP(1.1), "above 0 and at most 1"),
        (lambda: tx.MinP(-1), "above 0 and at most 1"),
        (lambda: tx.TopK(0), "positive integer"),
        (lambda: tx.TopK(2.5), "positive integer"),
        (lambda: tx.RepetitionPenalty(0), "above 0"),
        (lambda: tx.PresencePenalty("a"), "finite number"),
        (lambda: tx.NoRepeatNGrams(0), "positive integer"),
        (lambda: tx.Constrain([1, 2]), "function"),
        (lambda: tx.Beam(0), "positive integer"),
        (lambda: sampling.chain("beam"), "A sampler is"),
        (lambda: sampling.chain([tx.Beam(2)]), "stands alone"),
        (lambda: sampling.chain(True), "A sampler is"),
    ],
)
def test_samplers_refuse_what_has_no_meaning(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_numbers_are_no_part_of_what_is_compiled():
    assert tx.Temperature(0.7).key() == tx.Temperature(0.8).key()
    assert tx.Temperature(0.0).key() != tx.Temperature(0.8).key()
    assert tx.TopK(3).key() != tx.TopK(4).key()
    assert tx.TopP(0.3).key() != tx.MinP(0.3).key()
