"""Maps are the weights that the model used, and health warns of what is planted."""

import sys
import warnings

import hard_models
import keras
import numpy as np
import pytest
import reference
import user_layers
from numeric import normal, randomize, to_numpy, weights_of

import keras_tx as tx

SMALL = {"vocab_size": 31, "dim": 16, "num_layers": 2, "num_heads": 4}


# ----------------------------------------------------------------------------
# Maps
# ----------------------------------------------------------------------------


def test_raw_attention_maps_are_the_softmax_of_similarities():
    x = normal(2, 5, 3)
    (weights,) = tx.attention_maps(tx.ScaledAttention(), x).values()
    scores = np.einsum("bth,bsh->bts", x, x) / np.sqrt(3)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(weights, expected[:, None], atol=1e-6)


@pytest.mark.parametrize("implementation", ["auto", "blockwise"])
def test_maps_are_the_weights_of_the_reference(implementation):
    attention = tx.ScaledAttention(implementation=implementation)
    heads = tx.MultiHead(4, num_kv_heads=2, causal=True, attention=attention)
    x = normal(2, 5, 12)
    with warnings.catch_warnings():  # not every backend has every implementation
        warnings.simplefilter("ignore", UserWarning)
        heads(x)
    randomize(heads)
    w = weights_of(heads)
    allow = reference.allowed((2, 4, 5, 5), causal=True)
    *_, expected = reference.multi_head(w, x, x, x, allow)
    (weights,) = tx.attention_maps(heads, x).values()
    np.testing.assert_allclose(weights, expected, atol=1e-6)


def test_every_layer_of_an_encoder_decoder_is_there_also_reloaded(tmp_path):
    model = hard_models.t5()
    source = np.array([[4, 7, 9, 2, 0], [5, 5, 8, 3, 6]])
    target = np.array([[3, 8, 6], [9, 1, 4]])
    inputs = {"source": source, "target": target}
    maps = tx.attention_maps(model, inputs)
    shapes = {path: weights.shape for path, weights in maps.items()}
    assert shapes == {
        **{f"encoder_block_{i}/attention": (2, 4, 5, 5) for i in range(3)},
        **{f"decoder_block_{i}/attention": (2, 4, 3, 3) for i in range(2)},
        **{f"decoder_block_{i}/cross_attention": (2, 4, 3, 5) for i in range(2)},
    }
    for path, weights in maps.items():
        attends = (source if path.startswith("encoder") else target) != 0
        sums = np.broadcast_to(attends[:, None], weights.shape[:3])
        np.testing.assert_allclose(weights.sum(-1), sums, atol=1e-5)
    np.testing.assert_array_equal(
        maps["decoder_block_1/cross_attention"][0, :, :, 4], 0.0
    )
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    for path, weights in tx.attention_maps(again, inputs).items():
        np.testing.assert_array_equal(weights, maps[path])


class Twice(keras.Model):
    """A subclassed model that calls one layer of ours twice and wraps another."""

    def __init__(self):
        super().__init__()
        self.embedding = tx.TokenEmbedding(31, 16)
        self.block = tx.TransformerBlock(4, 20)
        self.inner = keras.Sequential([tx.TransformerBlock(2, 20, causal=True)])

    def call(self, tokens):
        x = self.embedding(tokens)
        return self.inner(self.block(self.block(x)))


def test_a_subclassed_model_shows_each_call_and_nested_models():
    model = Twice()  # not built, and its call knows nothing of `training`
    maps = tx.attention_maps(model, [[5, 7, 11]])
    names = [path.rsplit("/", 1)[-1] for path in maps]
    assert names == ["attention", "attention:2", "attention"]
    assert [w.shape[1] for w in maps.values()] == [4, 4, 2]
    first, second, nested = maps.values()
    assert np.abs(first - second).max() > 0
    np.testing.assert_array_equal(np.triu(nested, 1), 0.0)


def test_looking_changes_neither_the_model_nor_its_outputs():
    model = tx.decoder(**SMALL, dropout=0.3)
    tokens = np.arange(12).reshape(2, 6)
    before = to_numpy(model(tokens))
    variables = [to_numpy(v) for v in model.variables]
    tx.attention_maps(model, tokens)
    for old, new in zip(variables, model.variables, strict=True):
        np.testing.assert_array_equal(old, to_numpy(new))
    np.testing.assert_array_equal(to_numpy(model(tokens)), before)
    single = tx.TransformerBlock(4, 20)
    x = normal(2, 5, 16)
    assert not isinstance(single(x), tuple)
    _, weights = single(x, return_attention_scores=True)
    (found,) = tx.attention_maps(single, x).values()
    np.testing.assert_allclose(found, to_numpy(weights), atol=1e-6)


def test_a_subclass_of_a_user_shows_what_it_used():
    heads = user_layers.TemperedMultiHead(4)
    (weights,) = tx.attention_maps(heads, normal(2, 5, 16)).values()
    assert weights.shape == (2, 4, 5, 5)


def test_weights_are_there_in_half_precision_and_under_rematerialisation():
    with keras.RematScope(mode="full"):
        model = tx.decoder(**SMALL, dtype="mixed_bfloat16")
    maps = tx.attention_maps(model, [[5, 7, 11]])
    assert {weights.dtype for weights in maps.values()} == {np.dtype("float32")}
    for weights in maps.values():
        np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-2)


def test_models_without_our_attention_are_refused():
    with pytest.raises(ValueError, match="called no `MultiHead`"):
        tx.attention_maps(keras.layers.Dense(2), normal(2, 3))
    with pytest.raises(ValueError, match="must be a Keras model or layer"):
        tx.attention_maps(lambda x: x, normal(2, 3))


@pytest.mark.skipif(keras.backend.backend() == "torch", reason="torch compiles nothing")
def test_attention_inside_a_compiled_function_is_refused_in_words():
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        compiled = tf.function
    else:
        import jax

        compiled = jax.jit

    class Compiled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = tx.ScaledAttention()

        def call(self, x):
            return compiled(lambda x: self.attention(x))(x)

    with pytest.raises(ValueError, match="compiled function of its own"):
        tx.attention_maps(Compiled(), normal(2, 3, 4))


# ----------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------


def shown(figure):
    """The images of a figure."""
    return [image.get_array() for axes in figure.axes for image in axes.get_images()]


def test_a_plot_shows_every_layer_and_head_with_its_tokens(tmp_path):
    pytest.importorskip("matplotlib")
    rng = np.random.default_rng(0)
    maps = {
        "block_0/attention": rng.random((2, 3, 4, 4)),
        "block_0/cross_attention": rng.random((2, 2, 4, 5)),
    }
    figure = tx.plot_attention(maps, tokens=["a", "$b", "c", "d"], example=1)
    images = shown(figure)
    heads = [*maps["block_0/attention"][1], *maps["block_0/cross_attention"][1]]
    for image, expected in zip(images, heads, strict=True):
        np.testing.assert_allclose(image, expected, rtol=1e-6)
    figure.savefig(tmp_path / "maps.png")
    assert (tmp_path / "maps.png").stat().st_size > 1000


def test_a_plot_of_cross_attention_labels_both_sides():
    pytest.importorskip("matplotlib")
    figure = tx.plot_attention(
        np.eye(2, 3), tokens=["x", "y"], context=["one", "two", "three"]
    )
    panel = figure.axes[0]
    assert [t.get_text() for t in panel.get_xticklabels()] == ["one", "two", "three"]
    assert [t.get_text() for t in panel.get_yticklabels()] == ["x", "y"]


def test_a_plot_refuses_what_does_not_fit():
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="a label for each of 3 tokens"):
        tx.plot_attention(np.eye(3), tokens=["a"])
    with pytest.raises(ValueError, match="shape \\(3,\\)"):
        tx.plot_attention(np.ones(3))
    with pytest.raises(ValueError, match="example=2"):
        tx.plot_attention(np.ones((2, 1, 3, 3)), example=2)
    with pytest.raises(ValueError, match="no layer"):
        tx.plot_attention({})


def test_without_matplotlib_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "keras-tx\[plots\]"'):
        tx.plot_attention(np.eye(3))


# ----------------------------------------------------------------------------
# Health: the numbers
# ----------------------------------------------------------------------------


def look(model, sample):
    health = tx.AttentionHealth(sample)
    health.set_model(model)
    return health.look(), health.findings


def test_numbers_of_a_head_are_those_of_the_reference():
    """Two tokens of the first row are padding; nothing of them counts."""
    heads = tx.MultiHead(3, 5, num_kv_heads=1, causal=True, name="heads")
    inputs = keras.Input((6, 12))
    model = keras.Model(inputs, heads(keras.layers.Masking()(inputs)))
    randomize(heads)
    x = normal(2, 6, 12)
    x[0, 4:] = 0.0
    numbers, _ = look(model, x)

    w = weights_of(heads)
    real = np.any(x != 0, axis=-1)
    allow = reference.allowed(
        (2, 3, 6, 6), causal=True, query_mask=real, key_masks=[real]
    )
    query, key, value = (
        np.einsum("btd,dnh->btnh", x, w[f"{name}/kernel"]) + w[f"{name}/bias"]
        for name in ("query", "key", "value")
    )
    mixed, weights = reference.attention(query, key, value, allow)
    for n in range(3):
        entropies, spreads, sharp, apart = [], [], [], []
        for b in range(2):
            rows = mixed[b, real[b], n]
            away = np.linalg.norm(rows - rows.mean(0))
            apart.append(away / np.linalg.norm(rows))
            for t in range(1, 6 if b else 4):  # the first has no choice
                p = weights[b, n, t, : t + 1]
                entropies.append(-np.sum(p * np.log(p)) / np.log(t + 1))
                scores = key[b, : t + 1, 0] @ query[b, t, n] / np.sqrt(5)
                spreads.append(scores.var())
                sharp.append(p.max() > 0.99)
        expected = {
            "entropy": np.mean(entropies),
            "saturated": np.mean(sharp),
            "logit_scale": np.sqrt(np.mean(spreads)),
            "rank_one": np.mean(apart),
            "dead": 0.0,
        }
        found = {name: numbers[f"heads/head_{n}/{name}"] for name in expected}
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_head_that_adds_nothing_is_dead():
    heads = tx.MultiHead(3, name="heads")
    inputs = keras.Input((6, 12))
    model = keras.Model(inputs, heads(inputs))
    kernel = to_numpy(heads.merge.kernel)
    kernel[1] = 0.0
    heads.merge.kernel.assign(kernel)
    numbers, _ = look(model, normal(2, 6, 12))
    assert [numbers[f"heads/head_{n}/dead"] for n in range(3)] == [0.0, 1.0, 0.0]


def test_numbers_of_a_block_are_those_of_what_it_returns():
    model = tx.encoder(**SMALL, pad_id=0)
    tokens = np.array([[5, 7, 11, 0], [3, 1, 2, 8]])
    numbers, _ = look(model, tokens)
    returned = keras.Model(model.input, model.get_layer("block_1").output)
    y = to_numpy(returned(tokens))
    real = tokens != 0
    apart = [
        np.linalg.norm(rows - rows.mean(0)) / np.linalg.norm(rows)
        for rows in (y[0, :3], y[1])
    ]
    assert numbers["block_1/norm"] == pytest.approx(
        np.sqrt(np.square(y[real]).mean()), rel=1e-5
    )
    assert numbers["block_1/rank_one"] == pytest.approx(np.mean(apart), rel=1e-5)
    assert "block_1/gradient" not in numbers  # no targets


def test_the_gradient_of_a_block_is_the_slope_of_the_loss():
    """Along the gradient, found by differences, the loss rises by its norm."""
    model = tx.decoder(**SMALL)
    randomize(model, spread=0.3)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    x, y = np.array([[5, 7, 11, 2]]), np.array([[7, 11, 2, 9]])
    numbers, _ = look(model, (x, y))
    block = model.get_layer("block_1")
    before = [to_numpy(v) for v in block.trainable_variables]
    # One step of gradient descent moves each weight by rate times gradient.
    model.optimizer.learning_rate = 1e-2
    model.train_on_batch(x, y)
    moved = [
        old - to_numpy(new)
        for old, new in zip(before, block.trainable_variables, strict=True)
    ]
    norm = np.sqrt(sum(np.square(step).sum() for step in moved)) / 1e-2
    assert numbers["block_1/gradient"] == pytest.approx(norm, rel=1e-3)


# ----------------------------------------------------------------------------
# Health: the callback
# ----------------------------------------------------------------------------


def trained(model, *, epochs=1, rate=1e-3, steps=None, **options):
    """Trains on a text of a small alphabet; returns the callback and history."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss)
    rng = np.random.default_rng(0)
    follow = rng.integers(0, 31, (31, 2))  # each token has two that may follow
    rows = np.zeros((64, 17), "int32")
    rows[:, 0] = rng.integers(0, 31, 64)
    for t in range(16):
        rows[:, t + 1] = follow[rows[:, t], rng.integers(0, 2, 64)]
    x, y = tx.next_token(rows)
    health = tx.AttentionHealth((x[:4], y[:4]), **options)
    history = model.fit(
        x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[health]
    )
    return health, history.history


def test_history_has_a_number_for_every_block_and_head_and_epoch():
    health, history = trained(tx.decoder(**SMALL), epochs=3, every=2)
    names = ("entropy", "saturated", "logit_scale", "rank_one", "dead")
    expected = {
        f"block_{i}/attention/head_{n}/{name}"
        for i in range(2)
        for n in range(4)
        for name in names
    }
    expected |= {f"block_{i}/{name}" for i in range(2) for name in ("rank_one", "norm")}
    expected |= {f"block_{i}/gradient" for i in range(2)}
    assert set(history) - {"loss"} == set(health.history) == expected
    for values in health.history.values():
        assert np.isnan(values).tolist() == [True, False, True]


def test_tensorboard_gets_the_numbers_of_every_look(tmp_path):
    tensorflow = pytest.importorskip("tensorflow")
    pytest.importorskip("tensorboard")
    health, _ = trained(tx.decoder(**SMALL), epochs=2, log_dir=tmp_path / "logs")
    (file,) = (tmp_path / "logs").iterdir()
    found = {}
    for event in tensorflow.compat.v1.train.summary_iterator(str(file)):
        for value in event.summary.value:
            number = float(tensorflow.make_ndarray(value.tensor))
            found.setdefault(value.tag, []).append((event.step, number))
    assert found.keys() == health.history.keys()
    for name, values in health.history.items():
        assert [step for step, _ in found[name]] == [0, 1]
        np.testing.assert_allclose(np.array(found[name])[:, 1], values, rtol=1e-6)


def test_without_tensorboard_the_line_that_installs_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install .* tensorboard"):
        trained(tx.decoder(**SMALL), log_dir=tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


def test_a_look_changes_nothing_about_training():
    def losses(callbacks):
        keras.utils.set_random_seed(1)
        model = tx.decoder(31, 16, 1, 4, dropout=0.1)
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
        x, y = tx.next_token(np.arange(136).reshape(8, 17) % 31)
        chosen = [tx.AttentionHealth((x[:2], y[:2]))] if callbacks else []
        done = model.fit(x, y, epochs=2, shuffle=False, verbose=0, callbacks=chosen)
        return done.history["loss"]

    assert losses(True) == losses(False)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="every"):
        tx.AttentionHealth(np.ones((1, 3)), every=0)


# ----------------------------------------------------------------------------
# Health: planted failures
# ----------------------------------------------------------------------------


def deep(depth=12, num_heads=2, head_dim=None, scale=None, **options):
    """A decoder of small blocks, queries and keys as wide as theory assumes."""

    def block(index):
        heads = tx.MultiHead(
            num_heads,
            head_dim,
            attention=tx.ScaledAttention(scale),
            kernel_initializer=keras.initializers.RandomNormal(stddev=16**-0.5),
        )
        return tx.TransformerBlock(heads, 64, **options)

    post = options.get("norm_position") == "post"
    return tx.decoder(31, 16, depth, block=block, final_norm=None if post else "rms")


@pytest.fixture(scope="module")
def text():
    """Rows in which each token has two that may follow, and their targets."""
    rng = np.random.default_rng(0)
    follow = rng.integers(0, 31, (31, 2))
    rows = np.zeros((16, 17), "int32")
    rows[:, 0] = rng.integers(0, 31, 16)
    for t in range(16):
        rows[:, t + 1] = follow[rows[:, t], rng.integers(0, 2, 16)]
    return tx.next_token(rows)


def found_while_training(model, text):
    """Trains for four steps, looks, and returns what was found and warned of."""
    x, y = text
    model.compile(
        keras.optimizers.Adam(1e-2),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # A few steps take less than compiling one of twelve blocks.
        run_eagerly=True,
    )
    health = tx.AttentionHealth((x[:4], y[:4]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[health])
    said = [str(w.message) for w in caught if "After epoch" in str(w.message)]
    assert len(said) == len(health.findings)
    return health.findings


def test_dot_products_without_scaling_are_caught_at_a_large_head(text):
    options = {"depth": 2, "head_dim": 256}
    _, findings = look(deep(**options, scale=1.0), text[0][:4])
    assert list(findings) == ["saturation"]
    assert "`scale` at None" in findings["saturation"]
    _, findings = look(deep(**options), text[0][:4])
    assert not findings


def test_a_missing_residual_is_caught_at_depth(text):
    numbers, findings = look(deep(residual="none"), text[0][:4])
    assert list(findings) == ["collapse"]
    assert "keep the residual" in findings["collapse"]
    assert numbers["block_11/rank_one"] < 1e-2 < numbers["block_0/rank_one"]


def test_post_norm_without_warm_up_is_caught_at_depth(text):
    findings = found_while_training(deep(norm_position="post"), text)
    assert "collapse" in findings
    assert "warm it up" in findings["collapse"]


def test_a_healthy_model_raises_no_alarm(text):
    assert not found_while_training(deep(), text)


def test_an_exploding_stream_is_caught(text):
    model = deep(depth=4, norm=None)
    for layer in model.layers:
        if isinstance(layer, tx.TransformerBlock):
            kernel = layer.feed_forward.narrow.kernel
            kernel.assign(40.0 * to_numpy(kernel))
    _, findings = look(model, text[0][:4])
    assert "explosion" in findings
    weight = model.get_layer("block_2").feed_forward.narrow.kernel
    weight.assign(np.nan * to_numpy(weight))
    assert "become nan" in look(model, text[0][:4])[1]["explosion"]
