"""What was reported elsewhere and belongs to no one module; see `cases.py`."""

import ast
import copy
import pathlib
import pickle

import keras
import numpy as np
import pytest
from cases import CASES, HERE, verdict
from contract import array, assert_same_description, describe, paths, randomize
from keras import ops
from numeric import normal, to_numpy

import keras_tx as tx

REAL = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], bool)


def functions(file):
    """Returns the names of the tests that a file defines."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", CASES)
def test_every_case_names_tests_that_there_are(name):
    assert CASES[name].tests
    for test in CASES[name].tests:
        file, _, function = test.partition("::")
        function, _, parameter = function.partition("[")
        assert function in functions(file), test
        text = (HERE / file).read_text(encoding="utf-8")
        assert not parameter or f'"{parameter.rstrip("]")}":' in text, test


def test_a_case_is_green_only_if_all_its_tests_passed():
    assert verdict(["passed", "passed"]) == "passed (2)"
    assert not verdict(["passed", "skipped"]).startswith("passed")
    assert not verdict(["failure", "passed"]).startswith("passed")
    assert verdict([]) == "missing"


# ----------------------------------------------------------------------------
# Masks
# ----------------------------------------------------------------------------


def test_an_explicit_mask_survives_a_transform_around_the_layer():
    # An implicit one is lost in it, in Keras' layers as in ours: tensors go in.
    x = normal(2, 5, 8)
    layer = tx.MultiHead(2)
    expected = to_numpy(layer(x, key_mask=REAL, query_mask=REAL))

    def call(x, mask):
        return layer(x, key_mask=mask, query_mask=mask)

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        call = tf.function(call)
    elif backend == "jax":
        import jax

        call = jax.jit(call)
    else:
        import torch

        call = torch.func.vmap(
            lambda x, mask: layer(x[None], key_mask=mask[None], query_mask=mask[None])[
                0
            ]
        )
    y = call(ops.convert_to_tensor(x), ops.convert_to_tensor(REAL))
    np.testing.assert_allclose(to_numpy(y), expected, atol=1e-6)


def test_no_layer_wraps_its_own_call():
    for file in pathlib.Path(tx.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "call":
                assert not node.decorator_list, f"{file.name}: {node.lineno}"


def test_masks_may_be_given_or_not_by_place_or_by_name():
    x, context = normal(2, 5, 8), normal(2, 7, 8)
    symbols = keras.Input((5, 8)), keras.Input((7, 8))
    of_query = keras.Input((5,), dtype="bool")
    over_pairs = keras.Input((5, 7), dtype="bool")
    layer = tx.MultiHead(2)
    by_place = layer(*symbols, None, of_query, None, None, over_pairs)
    by_name = layer(*symbols, attention_mask=over_pairs, query_mask=of_query)
    alone = layer(*symbols)
    model = keras.Model([*symbols, of_query, over_pairs], [by_place, by_name, alone])
    pairs = np.random.default_rng(0).random((2, 5, 7)) < 0.7
    first, second, third = to_numpy(model([x, context, REAL, pairs]))
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - third).max() > 0.01
    assert layer.compute_output_shape(x.shape, context.shape) == first.shape
    block = tx.TransformerBlock(2, 8, cross_attention=2)
    by_place = block(x, context, None, REAL[:, [0, 1, 2, 3, 4, 4, 4]])
    by_name = block(x, context=context, context_mask=REAL[:, [0, 1, 2, 3, 4, 4, 4]])
    np.testing.assert_array_equal(to_numpy(by_place), to_numpy(by_name))
    assert to_numpy(block(x, context, None, None)).shape == x.shape
    with pytest.raises(ValueError, match=r"takes 13 arguments: .*Received: 14"):
        layer(*[x] * 14)


# ----------------------------------------------------------------------------
# Shapes
# ----------------------------------------------------------------------------


def test_attention_along_an_inner_axis_is_that_of_each_slice():
    x = normal(3, 2, 5, 8)
    layer = tx.MultiHead(2, causal=True)
    along_last_but_one = keras.layers.TimeDistributed(layer)
    y = to_numpy(along_last_but_one(x))
    for index in range(2):
        np.testing.assert_allclose(y[:, index], to_numpy(layer(x[:, index])), atol=1e-6)
    with pytest.raises(ValueError, match=r"\(batch, time, features\)"):
        tx.MultiHead(2)(x)


# ----------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------


def test_six_blocks_predict_the_same_after_a_reload(process):
    model = tx.encoder(11, 8, 6, 2, pad_id=0)
    randomize(model, np.random.default_rng(0))
    inputs = {"tokens": np.array([[1, 5, 10, 0], [3, 4, 7, 9]], "int32")}
    found = process.reload(model, inputs)
    mine = describe(model, inputs)
    assert_same_description(found, mine)
    assert_same_description(found["again"], mine)


def test_no_two_variables_share_a_path_and_weights_load_under_other_names(tmp_path):
    def build(prefix):
        x, context = keras.Input((None, 8)), keras.Input((None, 6))
        y = x
        for index in range(2):
            y = tx.TransformerBlock(
                2,
                12,
                cross_attention=2,
                norm_position="sandwich",
                name=f"{prefix}_{index}",
            )(y, context)
        return keras.Model([x, context], y)

    first, second = build("one"), build("two")
    names = paths(first)
    assert len(set(names)) == len(names) == len(first.weights)
    randomize(first, np.random.default_rng(0))
    first.save_weights(tmp_path / "x.weights.h5")
    second.load_weights(tmp_path / "x.weights.h5")
    inputs = [normal(2, 5, 8), normal(2, 7, 6)]
    np.testing.assert_array_equal(to_numpy(second(inputs)), to_numpy(first(inputs)))


def test_a_tied_table_is_one_variable_in_every_copy(tmp_path):
    model = tx.decoder(11, 8, 1, 2)
    tokens = np.array([[1, 5, 10, 3]])
    model.save(tmp_path / "tied.keras")
    for twin in (
        keras.saving.load_model(tmp_path / "tied.keras"),
        keras.models.clone_model(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        tables = [v for v in twin.weights if "embedding" in v.path]
        assert [tuple(v.shape) for v in tables] == [(11, 8)]
        before = array(twin(tokens))
        tables[0].assign(2.0 * array(tables[0].value))
        # The norm undoes the scale on the way in; the way out keeps it, and both
        # are the same table.
        assert np.abs(array(twin(tokens)) - before).max() > 0
        tables[0].assign(0.0 * array(tables[0].value))
        np.testing.assert_array_equal(array(twin(tokens)), 0.0)
