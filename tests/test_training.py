"""Training in a user's hands: `fit` in every way that Keras offers."""

import contextlib

import keras
import numpy as np
import pytest
from contract import array, compile_for_training, paths
from keras import ops
from numeric import gradients, to_numpy

import keras_tx as tx

V = 11
BACKEND = keras.backend.backend()
AT_ONCE = {} if BACKEND == "torch" else {"steps_per_execution": 2}


def cycles(rows, length, step=3, seed=0):
    """Tokens that go round by a fixed step: what comes next is certain."""
    starts = np.random.default_rng(seed).integers(1, V, (rows, 1))
    return (starts - 1 + step * np.arange(length)) % (V - 1) + 1


def make(**options):
    keras.utils.set_random_seed(1)
    return tx.decoder(V, 16, 1, 2, **options)


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fit(model, data, optimizer=None, batch_size=4, epochs=2, **compiled):
    """Returns the losses of some epochs in a fixed order."""
    optimizer = optimizer or keras.optimizers.Adam(0.03)
    model.compile(optimizer, cross_entropy(), **compiled)
    x, y, *weights = data
    history = model.fit(
        x,
        y,
        sample_weight=weights[0] if weights else None,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
    )
    return history.history["loss"]


# ----------------------------------------------------------------------------
# Half precision
# ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_200_steps_in_half_precision_stay_finite_and_learn(policy):
    rows = cycles(40, 7)
    rows[::2, 5:] = 0
    model = make(pad_id=0, dropout=0.1, dtype=policy)
    data = tx.next_token(rows, pad_id=0)
    losses = fit(model, data, batch_size=8, epochs=40, **AT_ONCE)
    # A step whose scaled gradients overflow is left out, and the scale lowered.
    assert 190 <= int(model.optimizer.iterations) <= 200
    assert np.isfinite(losses).all()
    assert losses[0] > 1.0 and losses[-1] < 0.3 * losses[0]
    scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert scaled == (policy == "mixed_float16")


def own_train_step(model, x, y):
    """A step as the guides of each backend write it, with a scaled loss."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=y, y_pred=model(x, training=True))
            scaled = model.optimizer.scale_loss(loss)
        found = tape.gradient(scaled, model.trainable_weights)
        model.optimizer.apply_gradients(
            zip(found, model.trainable_weights, strict=True)
        )
    else:
        import torch

        model.zero_grad()
        loss = model.compute_loss(y=y, y_pred=model(x, training=True))
        model.optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            model.optimizer.apply(
                [v.value.grad for v in model.trainable_weights],
                model.trainable_weights,
            )
    return loss


class OwnStep(keras.Model):
    """A model with a training step of the user's own."""

    def train_step(self, *arguments):
        if BACKEND != "jax":
            ((x, y),) = arguments
            loss = own_train_step(self, x, y)
            self._loss_tracker.update_state(loss)
            return {"loss": self._loss_tracker.result()}
        import jax

        (trainable, others, of_optimizer, metrics), (x, y) = arguments

        def scaled_loss(trainable):
            logits, new = self.stateless_call(trainable, others, x, training=True)
            loss = self.compute_loss(y=y, y_pred=logits)
            mapping = zip(self.optimizer.variables, of_optimizer, strict=True)
            with keras.StatelessScope(mapping):
                return self.optimizer.scale_loss(loss), (loss, new)

        found, (loss, others) = jax.grad(scaled_loss, has_aux=True)(trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(
            of_optimizer, found, trainable
        )
        metrics = self._loss_tracker.stateless_update_state(metrics, loss)
        return {"loss": loss}, (trainable, others, of_optimizer, metrics)


def test_a_train_step_of_ones_own_stays_finite_in_mixed_float16():
    built = make(dtype="mixed_float16", dropout=0.1)
    model = OwnStep(built.inputs, built.outputs)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.03))
    data = tx.next_token(cycles(40, 7))
    losses = fit(model, data, optimizer, batch_size=8, epochs=20)
    assert 90 <= int(model.optimizer.iterations) <= 100
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.5 * losses[0]
    assert [x.dtype for x in model.outputs] == ["float32"]


# ----------------------------------------------------------------------------
# Ways to run
# ----------------------------------------------------------------------------

# Three batches an epoch, the last one smaller.
ROWS = cycles(10, 7)

WAYS = {
    "eager": {"run_eagerly": True},
    "compiled": {"jit_compile": True},
    "not compiled": {"jit_compile": False},
    "two steps at once": AT_ONCE,
}
# What torch compiles takes minutes, and it runs one step at once; what JAX runs
# eagerly it cannot train.
MISSING = {"torch": ["compiled", "two steps at once"], "jax": ["eager", "not compiled"]}
for way in MISSING.get(BACKEND, []):
    del WAYS[way]


@pytest.fixture(scope="module")
def plain():
    """Losses and weights of an ordinary `fit`."""
    model = make()
    return fit(model, tx.next_token(ROWS)), [array(v.value) for v in model.weights]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_run_gives_the_same_losses_and_weights(way, plain):
    losses, weights = plain
    model = make()
    found = fit(model, tx.next_token(ROWS), **WAYS[way])
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    # Adam makes much of tiny gradients, which are rounding where all is exact.
    for v, expected in zip(model.weights, weights, strict=True):
        assert np.abs(array(v.value) - expected).mean() < 1e-4


def test_a_step_is_traced_once():
    """The optimizer's variables are there before, or TensorFlow traces again."""
    traced = []

    class Counted(tx.LanguageModel):
        def train_step(self, *arguments):
            traced.append(self.optimizer.built)
            return super().train_step(*arguments)

    model = make()
    model = Counted(model.inputs, model.outputs)
    fit(model, tx.next_token(cycles(8, 7)), batch_size=4, epochs=2)
    assert traced == [True] * (4 if BACKEND == "torch" else 1)


def test_a_smaller_last_batch_counts_by_its_rows():
    model = make()
    inputs, targets = tx.next_token(ROWS)
    whole = float(ops.mean(cross_entropy()(targets, model(inputs))))
    losses = fit(model, (inputs, targets), keras.optimizers.SGD(0.0))
    np.testing.assert_allclose(losses, whole, rtol=1e-5)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    data = tx.next_token(cycles(8, 7))
    whole, parts = make(), make()
    fit(whole, data, keras.optimizers.SGD(0.5), batch_size=8)
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    fit(parts, data, optimizer, batch_size=4)
    start = make().get_weights()
    for mine, expected, before in zip(
        parts.get_weights(), whole.get_weights(), start, strict=True
    ):
        assert np.abs(expected - before).max() > 0
        np.testing.assert_allclose(mine, expected, atol=1e-5)


def build(dim, num_layers):
    """What a tuner calls with its choices, again and again."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    return tx.decoder(V, dim, num_layers, 2, dropout=0.1)


def test_a_model_built_again_in_one_process_is_the_same_model(tmp_path):
    data = tx.next_token(cycles(8, 7))
    first = build(8, 1)
    losses, names = fit(first, data), paths(first)
    first.save_weights(tmp_path / "best.weights.h5")
    fit(build(16, 2), data, epochs=1)
    again = build(8, 1)
    assert fit(again, data) == losses
    assert paths(again) == names
    best = build(8, 1)
    best.load_weights(tmp_path / "best.weights.h5")
    np.testing.assert_array_equal(array(best(data[0])), array(first(data[0])))


# ----------------------------------------------------------------------------
# Rematerialisation
# ----------------------------------------------------------------------------

SCOPES = {
    "full": {"mode": "full"},
    "blocks": {"mode": "list_of_layers", "layer_names": ["block_0", "block_1"]},
    "option": {"remat": True},
}


def remat(**scope):
    return keras.RematScope(**scope) if scope else contextlib.nullcontext()


def small(scope, build=tx.decoder, **options):
    keras.utils.set_random_seed(1)
    if "remat" in scope:
        return build(V, 8, 2, 2, pad_id=0, **scope, **options)
    with remat(**scope):
        return build(V, 8, 2, 2, pad_id=0, **options)


@pytest.mark.parametrize("scope", SCOPES)
def test_rematerialised_training_has_the_same_losses(scope):
    rows = cycles(8, 7)
    rows[::2, 4:] = 0
    data = tx.next_token(rows, pad_id=0)
    expected, found = (
        fit(small(chosen, dropout=0.2), data, keras.optimizers.SGD(0.5), epochs=3)
        for chosen in ({}, SCOPES[scope])
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("build", [tx.encoder, tx.encoder_decoder])
def test_rematerialised_blocks_have_the_same_gradients_under_every_mask(build):
    rows = cycles(3, 6)
    rows[0, 4:] = 0
    inputs = {"source": rows, "target": rows[:, ::-1].copy()}
    found = []
    for scope in ({}, {"remat": True}):
        model = small(scope, build, position="relative", norm="layer")

        def loss(model=model):
            x = inputs if build is tx.encoder_decoder else rows
            return ops.sum(ops.sin(model(x)))

        found.append(gradients(model, loss)[1])
    for path, expected in found[0].items():
        np.testing.assert_allclose(found[1][path], expected, atol=1e-5)
    assert any(np.abs(gradient).max() > 0.1 for gradient in found[0].values())


def test_rematerialised_blocks_are_computed_twice_and_their_children_no_more():
    x = ops.convert_to_tensor(np.ones((2, 3, 8), "float32"))
    block = tx.TransformerBlock(2, 12, remat=True)
    block(x)
    calls = []
    narrow = block.feed_forward.narrow
    call = narrow.call

    def counted(*args, **kwargs):
        calls.append(1)
        return call(*args, **kwargs)

    object.__setattr__(narrow, "call", counted)
    # JAX traces once and repeats what it traced.
    gradients(block, lambda: ops.sum(ops.square(block(x))))
    assert len(calls) == (1 if BACKEND == "jax" else 2)


def test_rematerialisation_is_saved_and_off_while_generating(tmp_path):
    def make(**options):
        return tx.decoder(
            V, 8, 2, block=lambda index: tx.TransformerBlock(2, 12), **options
        )

    model = make(remat=True)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for one in (model, again):
        assert one.get_layer("block_1").get_config()["remat"]
        assert one.get_layer("block_1")._remat_mode.mode == "full"
    plain = make()
    plain.set_weights(model.get_weights())
    prompt = cycles(2, 5)
    expected = array(plain(prompt))
    assert np.array_equal(array(model(prompt)), expected)
    assert np.array_equal(array(again(prompt)), expected)
    texts = [tx.generate(one, prompt, max_new_tokens=3) for one in (again, plain)]
    assert np.array_equal(*texts)


def test_layers_that_update_state_are_refused_in_a_remat_scope():
    x = np.ones((2, 3, 8), "float32")
    with keras.RematScope(mode="full"):
        feed_forward = keras.Sequential(
            [keras.layers.BatchNormalization(name="counts"), keras.layers.Dense(8)]
        )
        block = tx.TransformerBlock(2, feed_forward, dropout=0.1)
    block(x)
    with pytest.raises(ValueError, match=r"counts.*is updated.*RematScope"):
        block(x, training=True)


# ----------------------------------------------------------------------------
# Padding
# ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def padded():
    """Two models of the same weights, of which one knows padding by its token.

    Neither sees the future, so that padding behind a text is nothing to it.
    """
    knows, blind = make(pad_id=0), make()
    blind.set_weights(knows.get_weights())
    x, y = (
        np.array([[1, 2, 0, 0], [1, 2, 3, 4]]),
        np.array([[1, 5, 0, 0], [1, 2, 3, 4]]),
    )
    logits = array(blind(x))
    spread = np.log(np.exp(logits).sum(-1))
    chosen = np.take_along_axis(logits, y[..., None], -1)[..., 0]
    mean = (spread - chosen)[y != 0].mean()
    right = (logits.argmax(-1) == y)[y != 0].mean()
    assert 0 < right < 1  # nor is it the share where padding counts
    return knows, blind, (x, y), mean, right


def evaluate(model, data, weights=None, loss=None, **metrics):
    model.compile(loss=loss or cross_entropy(), **metrics)
    return model.evaluate(*data, sample_weight=weights, verbose=0, return_dict=True)


def with_more_padding(data, extra):
    """Returns wider data, and weights that are 1 where a token is real."""
    x, y = (np.pad(tokens, ((0, 0), (0, extra))) for tokens in data)
    return (x, y), (y != 0).astype("float32")


@pytest.mark.parametrize("extra", [0, 3])
def test_padding_counts_in_no_loss_however_it_is_told(extra, padded):
    knows, blind, data, mean, _ = padded
    data, weights = with_more_padding(data, extra)
    over_weights = cross_entropy(reduction="mean_with_sample_weight")
    for name, found in {
        "embedding": evaluate(knows, data),
        "sample_weight": evaluate(blind, data, weights, over_weights),
        "ignore_class": evaluate(blind, data, loss=cross_entropy(ignore_class=0)),
        "embedding and sample_weight": evaluate(knows, data, weights, over_weights),
        "embedding and ignore_class": evaluate(
            knows, data, loss=cross_entropy(ignore_class=0)
        ),
    }.items():
        np.testing.assert_allclose(found["loss"], mean, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("extra", [0, 3])
def test_padding_counts_in_no_accuracy(extra, padded):
    knows, blind, data, _, right = padded
    data, weights = with_more_padding(data, extra)
    masked = evaluate(knows, data, metrics=["accuracy"], weighted_metrics=["accuracy"])
    weighted = evaluate(blind, data, weights, weighted_metrics=["accuracy"])
    found = [v for k, v in (*masked.items(), *weighted.items()) if k != "loss"]
    assert len(found) == 3
    np.testing.assert_allclose(found, right, rtol=1e-6)


def test_what_next_token_returns_trains_on_the_mean_over_targets(padded):
    knows, _, _, _, _ = padded
    rows = np.array([[1, 2, 3, 0, 0], [1, 2, 3, 4, 5]])
    inputs, targets, weights = tx.next_token(rows, pad_id=0)
    each = to_numpy(
        keras.losses.sparse_categorical_crossentropy(
            targets, knows(inputs), from_logits=True
        )
    )
    loss = cross_entropy(reduction="mean_with_sample_weight")
    found = evaluate(knows, (inputs, targets), weights, loss)["loss"]
    np.testing.assert_allclose(found, each[weights == 1].mean(), rtol=1e-5)


# ----------------------------------------------------------------------------
# Whole tasks
# ----------------------------------------------------------------------------


def test_random_tokens_teach_nothing():
    rng = np.random.default_rng(0)
    model = tx.decoder(V, 16, 2, 2)
    model.compile(keras.optimizers.Adam(0.01), cross_entropy(), metrics=["accuracy"])
    model.fit(*tx.next_token(rng.integers(0, V, (64, 9))), epochs=5, verbose=0)
    fresh = tx.next_token(rng.integers(0, V, (256, 9)))
    accuracy = model.evaluate(*fresh, verbose=0, return_dict=True)["accuracy"]
    assert abs(accuracy - 1 / V) < 0.03  # a look ahead would bring it to 1


def test_an_encoder_decoder_learns_to_reverse():
    start, length = 8, 3
    rng = np.random.default_rng(0)
    source = rng.integers(1, start, (600, length))
    whole = np.concatenate([np.full((600, 1), start), source[:, ::-1]], axis=1)
    target, answer = tx.next_token(whole)
    keras.utils.set_random_seed(2)
    model = tx.encoder_decoder(start + 1, 32, 1, 4, pad_id=0)
    # Slower towards the end, or a last step may undo what was learnt.
    rate = keras.optimizers.schedules.CosineDecay(0.01, decay_steps=250)
    model.compile(keras.optimizers.Adam(rate), cross_entropy(), metrics=["accuracy"])
    inputs = {"source": source[:500], "target": target[:500]}
    model.fit(inputs, answer[:500], batch_size=50, epochs=25, verbose=0)
    held_out = {"source": source[500:], "target": target[500:]}
    found = model.evaluate(held_out, answer[500:], verbose=0, return_dict=True)
    assert found["accuracy"] >= 0.99


class Stack(keras.Model):
    """Blocks in a list of the user's own."""

    def __init__(self, num_layers):
        super().__init__()
        self.blocks = [tx.TransformerBlock(2, 8)]
        self.blocks = [tx.TransformerBlock(2, 8) for _ in range(num_layers)]

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_in_a_list_are_all_trained():
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    counts = []
    for num_layers in (0, 1, 4):
        model = Stack(num_layers)
        model(x)
        counts.append(len(model.trainable_variables))
    assert counts[0] == 0 and counts[2] == 4 * counts[1] > 0
    before = {v.path: array(v.value) for v in model.trainable_variables}
    assert len(before) == counts[2]
    compile_for_training(model, keras.optimizers.SGD(1.0))
    model.train_on_batch(x, x[::-1].copy())
    for v in model.trainable_variables:
        if not v.path.endswith("key/bias"):  # which softmax does not see
            assert np.abs(array(v.value) - before[v.path]).max() > 0


def test_a_model_trains_on_batches_of_a_size_not_known_before():
    model = tx.decoder(vocab_size=7, dim=8, num_layers=1, num_heads=2)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def batches():
        while True:
            yield np.ones((3, 5), "int32"), np.ones((3, 5), "int32")

    history = model.fit(batches(), steps_per_epoch=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["loss"]).all()
