"""Does an installation work: build, train, save, load in a fresh process.

Needs nothing of the repository, so that it also runs against an installed
wheel, and on the oldest Keras that the package admits. The contract tests
prove all of it at length, so `pytest` alone leaves it out.
"""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_tx as tx

LOAD = """
import json, sys
import keras, numpy as np
import keras_tx

folder, names = sys.argv[1], sys.argv[2:]
paths = {}
for name in names:
    model = keras.models.load_model(f"{folder}/{name}.keras")
    outputs = model(list(np.load(f"{folder}/{name}.npy")))
    np.save(f"{folder}/{name}_outputs.npy", keras.ops.convert_to_numpy(outputs))
    paths[name] = [variable.path for variable in model.weights]
print(json.dumps(paths))
"""


def models():
    decoder = tx.decoder(
        vocab_size=31, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, pad_id=0
    )
    encoder = tx.encoder(
        vocab_size=31,
        dim=16,
        num_layers=1,
        num_heads=4,
        pad_id=0,
        output="classes",
        num_classes=3,
        norm="layer",
        norm_position="post",
        position="learned",
        max_length=9,
    )
    encoder_decoder = tx.encoder_decoder(
        vocab_size=31, dim=16, num_layers=1, num_heads=4, pad_id=0, position="relative"
    )
    return {
        "decoder": decoder,
        "encoder": encoder,
        "encoder_decoder": encoder_decoder,
    }


def run(model, inputs):
    return keras.ops.convert_to_numpy(model(list(inputs)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Three models after one step of `fit`, with their inputs and their files."""
    folder = tmp_path_factory.mktemp("models")
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    result = {}
    for name, model in models().items():
        inputs = random.integers(0, 31, (len(model.inputs), 3, 7)).astype("int32")
        outputs = run(model, inputs)
        targets = random.integers(0, outputs.shape[-1], outputs.shape[:-1])
        model.compile(
            "adamw",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
        before = model.get_weights()
        history = model.fit(list(inputs), targets, epochs=1, verbose=0)
        model.save(folder / f"{name}.keras")
        np.save(folder / f"{name}.npy", inputs)
        result[name] = (model, inputs, before, history.history["loss"])
    return folder, result


def test_one_step_of_training_moves_every_weight(trained):
    for name, (model, _, before, losses) in trained[1].items():
        assert np.isfinite(losses).all(), name
        after = model.get_weights()
        for variable, old, new in zip(model.weights, before, after, strict=True):
            if variable.trainable:
                assert np.abs(new - old).max() > 0, variable.path


def test_a_fresh_process_loads_the_same_models(trained):
    folder, result = trained
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), *result],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    paths = json.loads(done.stdout.strip().splitlines()[-1])
    for name, (model, inputs, _, _) in result.items():
        assert paths[name] == [variable.path for variable in model.weights]
        loaded = np.load(folder / f"{name}_outputs.npy")
        np.testing.assert_array_equal(loaded, run(model, inputs))


def test_the_decoder_does_not_see_the_future(trained):
    model, inputs, _, _ = trained[1]["decoder"]
    changed = inputs.copy()
    changed[..., 4:] = 30 - changed[..., 4:]
    logits, others = run(model, inputs), run(model, changed)
    np.testing.assert_array_equal(logits[:, :4], others[:, :4])
    assert np.abs(logits[:, 4:] - others[:, 4:]).max() > 0


def test_layers_serve_in_a_model_of_ones_own():
    inputs = keras.Input((None, 16))
    x = tx.SinusoidalPosition()(inputs)
    x = tx.TransformerBlock(attention=4, feed_forward=24)(x)
    outputs = keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs, outputs)
    assert run(model, np.ones((1, 3, 5, 16), "float32")).shape == (3, 1)
