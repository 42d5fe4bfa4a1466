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
