"""Layers within layers: what files keep, whatever holds what."""

import copy
import json
import zipfile

import keras
import numpy as np
import pytest
from contract import array, assert_same_description, describe, paths, randomize
from user_layers import Tagger

import keras_tx as tx
from keras_tx import serialization

B, T, D, N, V = 3, 5, 24, 4, 31


def features(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def tokens():
    return np.random.default_rng(7).integers(1, V, (B, T)).astype("int32")


def moved(model):
    randomize(model, np.random.default_rng(0))
    return model


def assert_reloads(model, inputs, process, same_paths=True):
    found = process.reload(model, inputs)
    mine = describe(model, inputs)
    if not same_paths:
        # Keras builds what these hold outside of them, ours or its own, so that
        # the paths lose their first name on loading.
        del mine["paths"]
    assert_same_description(found, mine)
    if "again" in found:
        assert_same_description(found["again"], mine)


# ----------------------------------------------------------------------------
# Whatever holds the layers
# ----------------------------------------------------------------------------


def test_layers_in_a_sequential_model_reload(process):
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int32"),
            tx.TokenEmbedding(V, D, pad_id=0),
            tx.SinusoidalPosition(),
            tx.TransformerBlock(N, 28),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(2),
        ]
    )
    assert_reloads(moved(model), {"tokens": tokens()}, process, same_paths=False)


def test_layers_in_a_subclassed_model_reload(process):
    model = Tagger(V, D, 3)
    model(tokens())
    assert_reloads(moved(model), {"tokens": tokens()}, process, same_paths=False)
    assert "tagger/block_1/attention/query/kernel" in paths(model)


def test_a_builders_model_within_a_model_reloads(process):
    inner = tx.encoder(V, D, 1, N, pad_id=0)
    inputs = keras.Input((None,), dtype="int32")
    outputs = keras.layers.Dense(2, name="labels")(inner(inputs))
    model = keras.Model(inputs, outputs)
    assert_reloads(moved(model), {"tokens": tokens()}, process)


def test_a_block_called_twice_is_one_layer_after_reloading(process):
    inputs = keras.Input((None, D))
    block = tx.TransformerBlock(N, 28, name="twice")
    model = keras.Model(inputs, block(block(inputs)))
    assert_reloads(moved(model), {"x": features(B, T, D)}, process)


def test_a_wrapper_of_keras_holds_our_layers(process):
    inputs = keras.Input((None, T, D))
    model = keras.Model(inputs, keras.layers.TimeDistributed(tx.MultiHead(N))(inputs))
    assert_reloads(moved(model), {"x": features(B, 2, T, D)}, process, same_paths=False)


# ----------------------------------------------------------------------------
# Slots
# ----------------------------------------------------------------------------


def test_the_slot_names_the_child_whatever_its_maker_called_it():
    block = tx.TransformerBlock(
        tx.MultiHead(
            N,
            attention=tx.ScaledAttention(name="a"),
            position=tx.RelativePosition(N, name="b"),
            name="c",
        ),
        tx.FeedForward(28, name="d"),
        cross_attention=tx.MultiHead(N, name="e"),
        name="block",
    )
    block(features(B, T, D), context=features(B, 7, D))
    for path in (
        "block/attention/position/embeddings",
        "block/attention/merge/kernel",
        "block/cross_attention/query/kernel",
        "block/feed_forward/narrow/bias",
    ):
        assert path in paths(block)


@pytest.mark.parametrize(
    "twice",
    [
        lambda x: tx.TransformerBlock(x, 28, cross_attention=x),
        lambda x: [tx.TransformerBlock(x, 28) for _ in range(2)],
    ],
    ids=["in one block", "in two blocks"],
)
def test_a_layer_has_one_place(twice):
    with pytest.raises(ValueError, match="has one place"):
        twice(tx.MultiHead(N))


def test_a_position_has_one_place():
    position = tx.RotaryPosition()
    tx.MultiHead(N, position=position)
    with pytest.raises(ValueError, match="has one place"):
        tx.MultiHead(N, position=position)


def test_a_layer_with_weights_is_refused_for_their_paths_would_be_wrong():
    attention = tx.MultiHead(N)
    attention(features(B, T, D))
    with pytest.raises(ValueError, match="built already"):
        tx.TransformerBlock(attention, 28)
    fresh = type(attention).from_config(attention.get_config())
    tx.TransformerBlock(fresh, 28)


def test_a_slot_takes_layers_only():
    with pytest.raises(ValueError, match="must be a Keras layer"):
        tx.TransformerBlock(N, "relu")


def test_a_norm_is_a_template_that_any_number_of_blocks_may_copy():
    norm = keras.layers.RMSNormalization(epsilon=1e-3)
    first, second = (
        tx.TransformerBlock(N, 28, norm=norm, name=name) for name in ("one", "two")
    )
    for block in (first, second):
        block(features(B, T, D))
        assert block.attention_norm.epsilon == block.feed_forward_norm.epsilon == 1e-3
    assert not norm.built
    assert first.attention_norm.scale is not second.attention_norm.scale


def test_a_frozen_child_stays_frozen_in_the_file(tmp_path):
    model = tx.decoder(V, D, 2, N)
    model.get_layer("block_0").attention.trainable = False
    model.get_layer("block_1").trainable = False
    model.save(tmp_path / "frozen.keras")
    loaded = keras.saving.load_model(tmp_path / "frozen.keras")
    trainable = [v.path for v in model.trainable_weights]
    assert [v.path for v in loaded.trainable_weights] == trainable
    assert trainable and len(trainable) < len(model.weights)
    assert not any("block_0/attention/" in p or "block_1/" in p for p in trainable)


# ----------------------------------------------------------------------------
# Dtypes
# ----------------------------------------------------------------------------


def test_children_compute_in_the_dtype_of_their_parent():
    attention = tx.MultiHead(N, position=tx.RotaryPosition(), query_key_norm="rms")
    block = tx.TransformerBlock(
        attention, keras.Sequential([keras.layers.Dense(D)]), dtype="mixed_bfloat16"
    )
    block(features(B, T, D))
    dtypes = {
        layer.compute_dtype
        for layer in block._flatten_layers()
        if not isinstance(layer, keras.layers.InputLayer)
    }
    assert dtypes == {"bfloat16"}


def test_a_model_of_another_dtype_than_the_global_one_keeps_it(process):
    model = moved(tx.decoder(V, D, 1, N, dtype="mixed_bfloat16", pad_id=0))
    dtypes = {
        layer.compute_dtype
        for layer in model._flatten_layers(include_self=False)
        if layer.weights
    }
    assert dtypes == {"bfloat16"}
    assert_reloads(model, {"tokens": tokens()}, process)


def test_a_map_of_dtype_policies_reaches_every_child(tmp_path):
    policies = keras.dtype_policies.DTypePolicyMap("float32")
    policies["block_0/attention/query"] = keras.DTypePolicy("mixed_bfloat16")
    model = tx.decoder(V, D, 1, N, dtype=policies)
    block = model.get_layer("block_0")
    assert block.attention.query.compute_dtype == "bfloat16"
    assert block.attention.key.compute_dtype == "float32"
    model.save(tmp_path / "map.keras")
    loaded = keras.saving.load_model(tmp_path / "map.keras")
    block = loaded.get_layer("block_0")
    assert block.attention.query.compute_dtype == "bfloat16"
    assert block.attention.key.compute_dtype == "float32"
    np.testing.assert_array_equal(array(loaded(tokens())), array(model(tokens())))


@pytest.mark.filterwarnings("ignore:.*`quantize` method")
def test_a_quantized_model_reloads(tmp_path):
    model = moved(tx.decoder(V, D, 2, N, use_bias=True, pad_id=0))
    exact = array(model(tokens()))
    model.quantize("int8")
    kernels = [v for v in model.weights if v.path.endswith("/kernel")]
    assert {v.dtype for v in kernels} == {"int8"}
    rounded = array(model(tokens()))
    assert 0 < np.abs(rounded - exact).mean() < 0.05 * np.abs(exact).mean()
    model.save(tmp_path / "int8.keras")
    loaded = keras.saving.load_model(tmp_path / "int8.keras")
    assert paths(loaded) == paths(model)
    np.testing.assert_array_equal(array(loaded(tokens())), rounded)
    loaded.save(tmp_path / "again.keras")
    again = keras.saving.load_model(tmp_path / "again.keras")
    np.testing.assert_array_equal(array(again(tokens())), rounded)


# ----------------------------------------------------------------------------
# Configs and files
# ----------------------------------------------------------------------------


def test_a_file_outlives_the_module_that_a_class_lived_in(tmp_path):
    model = tx.decoder(V, D, 1, N, norm=keras.layers.RMSNormalization())
    model.save(tmp_path / "new.keras")
    with (
        zipfile.ZipFile(tmp_path / "new.keras") as new,
        zipfile.ZipFile(tmp_path / "old.keras", "w") as old,
    ):
        for name in new.namelist():
            data = new.read(name)
            if name == "config.json":
                assert b'"keras_tx.blocks"' in data
                data = data.replace(b'"keras_tx.', b'"keras_tx.that_was.')
            old.writestr(name, data)
    loaded = keras.saving.load_model(tmp_path / "old.keras")
    np.testing.assert_array_equal(array(loaded(tokens())), array(model(tokens())))


def test_a_file_names_no_class_but_registered_ones_and_those_of_keras(tmp_path):
    model = tx.encoder_decoder(V, D, 1, N, position="relative", pad_id=0)
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        config = json.loads(file.read("config.json"))

    def classes(item):
        if isinstance(item, list):
            for part in item:
                yield from classes(part)
        elif isinstance(item, dict):
            if "registered_name" in item:
                yield item["module"], item["class_name"], item["registered_name"]
            for part in item.values():
                yield from classes(part)

    for module, name, registered in classes(config):
        if module.startswith("keras_tx"):
            assert registered == f"keras_tx>{name}"
        else:
            assert module.startswith("keras"), module
            # Private parts of Keras may move; only the model itself is named so.
            assert not module.startswith("keras.src") or name == "Functional"


def test_a_config_is_the_same_whatever_was_built_before():
    def config():
        block = tx.TransformerBlock(
            tx.MultiHead(N, query_key_norm=keras.layers.LayerNormalization()),
            28,
            norm=keras.layers.RMSNormalization(),
            name="block",
        )
        block(features(B, T, D))
        return block.get_config()

    first = config()
    keras.layers.LayerNormalization()  # moves Keras' counters of names
    keras.layers.RMSNormalization()
    assert config() == first


def test_a_copy_of_a_template_can_be_placed_though_the_original_is():
    attention = tx.MultiHead(N)
    tx.TransformerBlock(attention, 28)
    tx.TransformerBlock(copy.deepcopy(attention), 28)
    tx.TransformerBlock(serialization.replicate(attention), 28)


def test_a_lambda_that_could_not_be_loaded_again_is_refused_on_saving():
    layer = tx.FeedForward(28, activation=lambda x: x)
    layer(features(B, T, D))
    with pytest.raises(ValueError, match="lambda"):
        layer.get_config()


def test_the_format_has_a_number():
    assert isinstance(serialization.FORMAT, int)
