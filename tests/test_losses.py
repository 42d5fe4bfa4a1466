"""Cross-entropy by chunks, against written-out logits, and what never exists."""

import warnings

import keras
import numpy as np
import pytest
from keras import ops
from numeric import assert_near, gradients, normal, to_numpy

import keras_tx as tx
from keras_tx import losses

V, DIM, ROWS, LENGTH = 23, 6, 3, 5
BACKEND = keras.backend.backend()
RNG = np.random.default_rng(3)
LABELS = RNG.integers(0, V, (ROWS, LENGTH)).astype("int32")


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def reference(features, kernel, bias, labels, soft_cap, upstream):
    """Losses of tokens, and gradients of their sum weighted by `upstream`."""
    raw = features @ kernel.T + bias
    logits = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    own = np.eye(V)[labels]
    losses = -np.log((weights * own).sum(-1))
    slope = 1.0 if soft_cap is None else 1 - (logits / soft_cap) ** 2
    of_logits = (weights - own) * upstream[..., None] * slope
    of_kernel = np.einsum("btv,btd->vd", of_logits, features)
    return losses, [of_logits @ kernel, of_kernel, of_logits.sum((0, 1))]


@pytest.mark.parametrize(
    ("tied", "chunk_size"), [(True, 4), (False, 1), (True, None), (False, 15)]
)
def test_chunks_give_the_reference_and_its_gradients(tied, chunk_size):
    features, kernel, bias = (
        normal(*shape, seed=seed)
        for seed, shape in enumerate([(ROWS, LENGTH, DIM), (V, DIM), (V,)])
    )
    upstream = normal(ROWS, LENGTH, seed=4)
    soft_cap = 2.0 if tied else None
    inputs = (features, kernel if tied else np.ascontiguousarray(kernel.T), bias)

    def of_tokens(features, kernel, bias):
        head = losses.Head(kernel, tied=tied, bias=bias, soft_cap=soft_cap)
        return losses.crossentropy(
            features, ops.convert_to_tensor(LABELS), head, chunk_size
        )

    def total(*inputs):
        return ops.sum(ops.multiply(of_tokens(*inputs), upstream))

    wide = [x.astype("float64") for x in (features, kernel, bias, upstream)]
    expected, slopes = reference(*wide[:3], LABELS, soft_cap, wide[3])
    slopes[1] = slopes[1] if tied else slopes[1].T
    found = to_numpy(of_tokens(*map(ops.convert_to_tensor, inputs)))
    assert_near(found, expected, scale=0.1)
    layer = keras.layers.Identity()
    for one, other in zip(gradients(layer, total, *inputs)[0], slopes, strict=True):
        assert_near(one, other, scale=0.1)


def test_labels_outside_of_the_vocabulary_are_no_number():
    head = losses.Head(ops.convert_to_tensor(normal(V, DIM)))
    labels = np.array([[0, V, -1, V - 1]], "int32")
    found = losses.crossentropy(
        ops.convert_to_tensor(normal(1, 4, DIM)), ops.convert_to_tensor(labels), head, 3
    )
    assert np.isnan(to_numpy(found)).tolist() == [[False, True, True, False]]


def test_entries_that_a_bias_rules_out_may_fill_a_chunk():
    features, kernel = normal(ROWS, LENGTH, DIM), normal(V, DIM, seed=1)
    bias = np.where(np.arange(V) < 9, -np.inf, 0.0).astype("float32")
    labels = np.maximum(LABELS, 9)
    head = losses.Head(ops.convert_to_tensor(kernel), bias=ops.convert_to_tensor(bias))
    found = losses.crossentropy(
        ops.convert_to_tensor(features), ops.convert_to_tensor(labels), head, 4
    )
    wide = [x.astype("float64") for x in (features, kernel)]
    raw = wide[0] @ wide[1].T + bias
    own = np.take_along_axis(raw, labels[..., None], -1)[..., 0]
    assert_near(to_numpy(found), np.log(np.exp(raw).sum(-1)) - own, scale=0.1)


# ----------------------------------------------------------------------------
# In a user's hands
# ----------------------------------------------------------------------------


def make(build=tx.decoder, **options):
    keras.utils.set_random_seed(5)
    return build(V, 8, 1, 2, **options)


def weights_of(model):
    return np.concatenate([to_numpy(w.value).ravel() for w in model.weights])


def steps(model, loss, x, y, weights=None, evaluate=False, **compiled):
    """Returns the losses of two steps and, if wanted, of an evaluation behind them."""
    model.compile(keras.optimizers.SGD(0.5), loss, **compiled)
    found = [model.train_on_batch(x, y, sample_weight=weights) for _ in range(2)]
    if evaluate:
        found.append(model.test_on_batch(x, y, sample_weight=weights))
    return np.array([float(np.ravel(one)[0]) for one in found])


PADDED = LABELS.copy()
PADDED[0, 3:] = 0
PADDED[2, 1:] = 0
MODELS = {
    "tied, padded, weighted": (
        {"pad_id": 0, "output_bias": True, "logit_cap": 3.0},
        {},
        RNG.random((ROWS, LENGTH)).astype("float32"),
    ),
    "untied, a class ignored": (
        {"tie_embeddings": False},
        {"ignore_class": 7, "reduction": "sum"},
        RNG.random((ROWS, LENGTH)).astype("float32"),
    ),
    "masked and ignored": (
        {"pad_id": 0, "tie_embeddings": False, "output_bias": True},
        {"ignore_class": 7, "reduction": "mean_with_sample_weight"},
        None,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_with_the_plain_loss(name):
    options, of_loss, weights = MODELS[name]
    x = PADDED
    y = np.where(LABELS % 3 == 0, 7, LABELS)
    results = []
    for loss in (cross_entropy, tx.ChunkedCrossentropy):
        model = make(**options)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            own = {} if loss is cross_entropy else {"chunk_size": 4}
            found = steps(model, loss(**of_loss, **own), x, y, weights, weights is None)
        results.append((found, weights_of(model)))
    assert results[0][0][0] != results[0][0][1]
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_half_precision_trains_as_with_the_plain_loss(policy):
    results = []
    for loss in (cross_entropy(), tx.ChunkedCrossentropy(chunk_size=4)):
        model = make(dtype=policy, output_bias=True)
        found = steps(model, loss, LABELS, LABELS)
        results.append((found, weights_of(model)))
    tolerance = 2e-3 if policy == "mixed_float16" else 1e-2
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def test_texts_of_any_length_come_from_a_generator():
    def batches():
        # TensorFlow learns from the first two what varies.
        for rows, length in ((3, 3), (2, 5), (2, 5), (3, 3)):
            yield LABELS[:rows, :length], LABELS[:rows, :length]

    results = []
    for loss in (cross_entropy(), tx.ChunkedCrossentropy(chunk_size=4)):
        model = make()
        model.compile(keras.optimizers.SGD(0.5), loss)
        model.fit(batches(), steps_per_epoch=4, verbose=0)
        results.append(weights_of(model))
    np.testing.assert_allclose(*results, rtol=2e-6, atol=2e-6)


def test_encoders_and_encoder_decoders_train_too():
    for build, inputs in (
        (lambda *sizes: tx.encoder(*sizes, output="tokens", transform="gelu"), LABELS),
        (
            lambda *sizes: tx.encoder_decoder(*sizes, pad_id=0, output_scale=0.5),
            {"source": PADDED[:, :4], "target": PADDED},
        ),
    ):
        found = [
            steps(make(build), loss, inputs, LABELS)
            for loss in (cross_entropy(), tx.ChunkedCrossentropy(chunk_size=4))
        ]
        np.testing.assert_allclose(*found, rtol=2e-6)


def elements_of_a_step(model, x, y):
    """Returns the size of the largest tensor that a training step computes."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        function = tf.function(model.train_step).get_concrete_function(
            (tf.constant(x), tf.constant(y))
        )
        found, graphs = [], [function.graph]
        while graphs:
            graph = graphs.pop()
            graphs += [
                f.graph for f in graph._functions.values() if hasattr(f, "graph")
            ]
            found += [
                output.shape.num_elements() or 0
                for operation in graph.get_operations()
                for output in operation.outputs
                if output.shape.is_fully_defined()
            ]
        return max(found)
    if BACKEND == "jax":
        import jax

        state = [
            [v.value for v in variables]
            for variables in (
                model.trainable_variables,
                model.non_trainable_variables,
                model.optimizer.variables,
                model.metrics_variables,
            )
        ]
        programs = [jax.make_jaxpr(model.train_step)(state, (x, y)).jaxpr]
        found = []
        while programs:
            for equation in programs.pop().eqns:
                programs += jax.core.jaxprs_in_params(equation.params)
                found += [v.aval.size for v in equation.outvars]
        return max(found)
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    found = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            leaves = keras.tree.flatten(result)
            found.extend(x.numel() for x in leaves if torch.is_tensor(x))
            return result

    with Watch():
        model.train_step((x, y))
    return max(found)


def test_no_tensor_of_a_step_is_as_large_as_the_logits():
    x = RNG.integers(0, 1201, (4, 32)).astype("int32")
    sizes = {}
    for loss in (cross_entropy(), tx.ChunkedCrossentropy(chunk_size=8)):
        model = tx.decoder(1201, 8, 1, 2)
        model.compile("sgd", loss)
        model.train_on_batch(x, x)
        sizes[loss.name] = elements_of_a_step(model, x, x)
    assert sizes["sparse_categorical_crossentropy"] >= x.size * 1201
    assert sizes["chunked_crossentropy"] <= x.size * 1201 // 8


def test_outside_of_training_the_model_gives_logits_and_so_does_its_file(tmp_path):
    model = make(pad_id=0, output_bias=True)
    before = steps(
        model, tx.ChunkedCrossentropy(ignore_class=2), PADDED, LABELS, evaluate=True
    )
    logits = model.predict(PADDED, verbose=0)
    assert logits.shape == (ROWS, LENGTH, V)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert type(again) is type(model) is tx.LanguageModel
    assert np.array_equal(again.predict(PADDED, verbose=0), logits)
    assert again.loss.get_config() == model.loss.get_config()
    after = again.test_on_batch(PADDED, LABELS)
    np.testing.assert_allclose(float(after), before[-1], rtol=1e-6)
    text = tx.generate(again, PADDED[:1, :3], max_new_tokens=2)
    assert np.array_equal(text, tx.generate(model, PADDED[:1, :3], max_new_tokens=2))
    history = again.fit(PADDED, LABELS, validation_data=(PADDED, LABELS), verbose=0)
    assert np.isfinite(history.history["val_loss"]).all()


def test_a_head_that_is_rematerialized_puts_its_logits_off_too():
    with keras.RematScope(mode="full"):
        model = make()
    found = [
        steps(model, loss, LABELS, LABELS)
        for model, loss in (
            (model, tx.ChunkedCrossentropy(chunk_size=4)),
            (make(), cross_entropy()),
        )
    ]
    np.testing.assert_allclose(*found, rtol=2e-6)


def test_metrics_get_logits_and_the_loss_says_what_that_costs():
    model = make()
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    with pytest.warns(UserWarning, match="compiled without metrics"):
        found = steps(model, tx.ChunkedCrossentropy(), LABELS, LABELS, metrics=metrics)
    np.testing.assert_allclose(
        found, steps(make(), cross_entropy(), LABELS, LABELS), rtol=2e-6
    )


def test_logits_that_are_given_count_the_same_and_warn():
    logits = normal(ROWS, LENGTH, V)
    with pytest.warns(UserWarning, match="no memory is spared"):
        found = tx.ChunkedCrossentropy(ignore_class=3)(LABELS, logits)
    expected = cross_entropy(ignore_class=3)(LABELS, logits)
    np.testing.assert_allclose(float(found), float(expected), rtol=1e-6)


def test_what_happens_behind_the_head_is_refused():
    tokens = keras.Input((LENGTH,), dtype="int32")
    embedding = tx.TokenEmbedding(V, DIM)
    logits = embedding(embedding(tokens), reverse=True)
    model = tx.LanguageModel(tokens, keras.layers.Rescaling(2.0)(logits))
    model.compile("sgd", tx.ChunkedCrossentropy(), run_eagerly=BACKEND != "jax")
    with pytest.raises(ValueError, match="as their head returned them"):
        model.train_on_batch(LABELS, LABELS)


def test_labels_of_another_shape_are_refused():
    model = make()
    model.compile("sgd", tx.ChunkedCrossentropy(), run_eagerly=BACKEND != "jax")
    with pytest.raises(ValueError, match="one label, an integer"):
        model.train_on_batch(LABELS, np.eye(V, dtype="float32")[LABELS])
    found = float(model.test_on_batch(LABELS, LABELS[..., None]))
    assert found == pytest.approx(float(model.test_on_batch(LABELS, LABELS)))
