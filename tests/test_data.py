"""Shifted, masked and packed tokens: examples that train what they should."""

import keras
import numpy as np
import pytest
from keras import ops

import keras_tx as tx


def to_numpy(x):
    return ops.convert_to_numpy(x)


# ----------------------------------------------------------------------------
# Next token
# ----------------------------------------------------------------------------


def test_each_target_is_the_token_after_its_input():
    rows = np.arange(15).reshape(3, 5)
    inputs, targets = tx.next_token(rows)
    np.testing.assert_array_equal(targets, inputs + 1)
    assert inputs.shape == (3, 4)


def test_padding_is_no_target_that_counts():
    rows = np.array([[5, 6, 7, 0, 0], [5, 6, 7, 8, 9]])
    _, targets, weights = tx.next_token(rows, pad_id=0)
    np.testing.assert_array_equal(weights, [[1, 1, 0, 0], [1, 1, 1, 1]])
    assert weights.dtype == "float32"
    assert (targets[weights == 0] == 0).all()


def test_the_first_token_of_a_document_is_no_target_of_the_one_before():
    packed = tx.pack([[5, 6, 7], [8, 9], [1, 2]], length=6)
    inputs, targets, weights = tx.next_token(
        packed["tokens"],
        segment_ids=packed["segment_ids"],
        positions=packed["positions"],
    )
    np.testing.assert_array_equal(
        packed["segment_ids"], [[1] * 3 + [2] * 2 + [0], [1] * 2 + [0] * 4]
    )
    np.testing.assert_array_equal(weights, [[1, 1, 0, 1, 0], [1, 0, 0, 0, 0]])
    assert set(inputs) == {"tokens", "segment_ids", "positions"}
    np.testing.assert_array_equal(targets[weights == 1], [6, 7, 9, 2])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: tx.next_token(np.ones((2, 5))), "must be an array of integers"),
        (lambda: tx.next_token(np.ones((2, 1), int)), "at least two tokens"),
        (lambda: tx.next_token(np.array(3)), "time on the last axis"),
        (
            lambda: tx.next_token(np.ones((2, 5), int), positions=np.ones((2, 5), int)),
            "come with `segment_ids`",
        ),
        (lambda: tx.mask_tokens(np.ones((2, 5)), 1, 9), "must be an array of integers"),
        (lambda: tx.mask_tokens(np.ones((2, 5), int), 9, 9), "`mask_id` must be one"),
        (
            lambda: tx.mask_tokens(np.ones((2, 5), int), 1, 9, rate=0),
            "must be above 0",
        ),
        (lambda: tx.mask_tokens(np.ones((2, 5), int), 1, 9, rate=1.5), "rate=1.5"),
        (lambda: tx.pack([], 4), "no documents"),
        (lambda: tx.pack([[1], []], 4), "at index 1"),
        (lambda: tx.pack([[1.5]], 4), "at index 0"),
        (lambda: tx.pack([[1]], 0), "`length` must be a positive integer"),
    ],
)
def test_bad_tokens_are_refused_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# ----------------------------------------------------------------------------
# Fill in the blank
# ----------------------------------------------------------------------------


def test_only_chosen_tokens_count_and_four_in_five_are_hidden():
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, 90, (200, 50))
    inputs, targets, weights = tx.mask_tokens(
        tokens, mask_id=1, vocab_size=90, seed=3, keep=(7,)
    )
    np.testing.assert_array_equal(targets, tokens)
    chosen = weights == 1
    np.testing.assert_array_equal(inputs[~chosen], tokens[~chosen])
    assert not chosen[tokens == 7].any()
    assert abs(chosen[tokens != 7].mean() - 0.15) < 0.01
    assert abs((inputs[chosen] == 1).mean() - 0.8) < 0.03
    assert abs((inputs[chosen] == tokens[chosen]).mean() - 0.1) < 0.03
    assert inputs.min() >= 0 and inputs.max() < 90


def test_one_seed_hides_the_same_tokens_and_none_hides_others_each_time():
    tokens = np.arange(300).reshape(10, 30)
    first, again, other = (
        tx.mask_tokens(tokens, 300, 301, seed=seed)[0] for seed in (5, 5, 6)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    anew = [tx.mask_tokens(tokens, 300, 301)[0] for _ in range(2)]
    assert (anew[0] != anew[1]).any()


# ----------------------------------------------------------------------------
# Pipelines
# ----------------------------------------------------------------------------


def test_helpers_work_inside_tf_data():
    tf = pytest.importorskip("tensorflow")
    rows = np.array([[5, 6, 7, 0], [8, 9, 2, 3]], "int32")
    dataset = tf.data.Dataset.from_tensor_slices(rows).batch(2)
    for pad_id in (None, 0):
        expected = tx.next_token(rows, pad_id=pad_id)
        found = next(
            iter(dataset.map(lambda x, pad=pad_id: tx.next_token(x, pad_id=pad)))
        )
        for x, y in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x.numpy(), y)

    tokens = np.tile(np.arange(2, 52, dtype="int32"), (40, 1))
    dataset = tf.data.Dataset.from_tensors(tokens)
    masked = dataset.map(lambda x: tx.mask_tokens(x, 1, 60, keep=(3,)))
    inputs, targets, weights = (x.numpy() for x in next(iter(masked)))
    np.testing.assert_array_equal(targets, tokens)
    np.testing.assert_array_equal(inputs[weights == 0], tokens[weights == 0])
    assert 0.1 < weights.mean() < 0.2
    assert (inputs == 1).sum() > 0.6 * weights.sum()


def test_helpers_work_inside_a_py_dataset():
    class Rows(keras.utils.PyDataset):
        def __init__(self, rows):
            super().__init__()
            self.rows = rows

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return tx.next_token(self.rows[2 * index : 2 * index + 2], pad_id=0)

    rows = np.random.default_rng(0).integers(0, 11, (6, 8))
    model = tx.decoder(11, 8, 1, 2, pad_id=0)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(Rows(rows), verbose=0)
    assert np.isfinite(history.history["loss"]).all()


# ----------------------------------------------------------------------------
# Packing
# ----------------------------------------------------------------------------


def test_packing_loses_no_token_and_wastes_little():
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 99, n) for n in rng.integers(1, 40, 60)]
    packed = tx.pack(documents, length=16)
    pieces = sorted(
        tuple(document[i : i + 16])
        for document in documents
        for i in range(0, len(document), 16)
    )
    found = []
    for tokens, segments, positions in zip(
        packed["tokens"], packed["segment_ids"], packed["positions"], strict=True
    ):
        for segment in range(1, segments.max() + 1):
            inside = segments == segment
            found.append(tuple(tokens[inside]))
            np.testing.assert_array_equal(positions[inside], np.arange(inside.sum()))
        assert (tokens[segments == 0] == 0).all()
    assert sorted(found) == pieces
    assert (packed["segment_ids"] == 0).mean() < 0.1


@pytest.mark.parametrize(
    "position, max_length",
    [
        ("rotary", None),
        ("sinusoidal", None),
        ("learned", 8),
        ("relative", None),
        ("alibi", None),
    ],
)
def test_packed_documents_equal_separate_ones_gradients_included(position, max_length):
    documents = [[5, 6, 7, 8], [9, 10, 3], [4, 11, 2, 1], [7, 7, 2]]
    model = tx.decoder(
        12, 8, 2, 2, position=position, max_length=max_length, packed=True
    )
    packed = tx.pack(documents, length=8)
    alone = [tx.pack([document], length=len(document)) for document in documents]

    together = to_numpy(model(packed))
    for document in alone:
        expected = to_numpy(model(document))[0]
        starts = [
            (row, start)
            for row in range(len(packed["tokens"]))
            for start in range(8 - len(expected) + 1)
            if (
                packed["tokens"][row, start : start + len(expected)]
                == document["tokens"][0]
            ).all()
            and packed["positions"][row, start] == 0
        ]
        (row, start), *_ = starts
        found = together[row, start : start + len(expected)]
        np.testing.assert_allclose(found, expected, atol=1e-5)

    def gradients(parts):
        total = None
        for part in parts:
            counts = part["segment_ids"] != 0
            grads = loss_gradients(model, part, counts)
            total = (
                grads
                if total is None
                else [a + b for a, b in zip(total, grads, strict=True)]
            )
        return total

    for a, b in zip(gradients([packed]), gradients(alone), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def loss_gradients(model, inputs, counts):
    """Gradients of the summed squared logits of tokens that count, as NumPy."""
    counts = counts[..., None].astype("float32")
    weights = model.trainable_variables
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = ops.sum(counts * model(inputs) ** 2)
        return [
            tf.convert_to_tensor(g).numpy()
            for g in tape.gradient(loss, [v.value for v in weights])
        ]
    if keras.backend.backend() == "jax":
        import jax

        def loss(values):
            logits, _ = model.stateless_call(
                values, model.non_trainable_variables, inputs
            )
            return ops.sum(counts * logits**2)

        grads = jax.jit(jax.grad(loss))([v.value for v in weights])
        return [np.asarray(g) for g in grads]
    model.zero_grad()
    ops.sum(ops.convert_to_tensor(counts) * model(inputs) ** 2).backward()
    return [v.value.grad.numpy() for v in weights]
