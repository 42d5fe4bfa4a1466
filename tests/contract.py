"""The contract: what every layer and every model of keras_tx promises.

`check_layer` is the whole of it. It takes no notice of what a layer computes,
which is for the tests of that layer, but of all that a user relies on without a
thought: shapes, dtypes, masks, configs, files, training.
"""

import copy
import inspect
import json
import os
import pathlib
import pickle
import subprocess
import sys
import tempfile

import keras
import numpy as np
from keras import ops

HALF_POLICIES = ("mixed_float16", "mixed_bfloat16", "float16")


def check_layer(
    make,
    inputs,
    *,
    process,
    variants=({},),
    lengths=(),
    wide=False,
    mixes=False,
    causal=False,
    padded=(),
    still=(),
    rough=8,
    jit=False,
    optimizer=False,
):
    """Asserts what every layer and every model of keras_tx promises.

    1. **Config.** `from_config` undoes `get_config`, before and after building,
       through JSON too; every constructor argument is in it, and `trainable`.
    2. **Shapes and dtypes.** What a symbolic call announces is what a real call
       gives, also where batch and time are unknown and T is not S, for every
       variant. The functional model computes exactly what the layer does.
    3. **Half precision.** Under mixed_float16, mixed_bfloat16 and float16, set
       on the layer alone or globally for a model, all is finite, near the
       float32 result and of the announced dtype; logits are in float32.
    4. **Copies.** `clone_model`, `deepcopy` and `pickle` give the same paths,
       weights and outputs.
    5. **Files.** A `.keras` file and a `.weights.h5` file loaded in a fresh
       process give identical variable paths and bit-identical weights, and
       outputs that differ by 0.0; so does a mixed-precision file loaded under a
       float32 global policy. A compiled model goes on training where it
       stopped: the optimizer's state and the next steps' losses are identical.
    6. **Training.** One step of `fit` moves every trainable weight, so that
       gradients reach all; none moves where `trainable` is false.
    7. **Compilation.** `jit_compile` on and off agree. (On torch it stands for
       `torch.compile`, which takes minutes for one model and is left out.)
    8. **Masks.** The mask of the input can be read on the output. What stands
       in padding, NaN included, changes real rows by exactly 0.0. The loss of a
       padded batch is that of its unpadded rows.
    9. **Causality.** Changing the future changes the past by exactly 0.0.

    Args:
        make: Function that makes a fresh, unbuilt layer or a model.
        inputs: Dict of arrays. Names are the layer's call arguments, the first
            of which is passed by position, or the model's inputs.
        process: A `FreshProcess`.
        variants: Dicts of call arguments that are no tensors. Files, copies and
            training are checked for the first, the rest for all.
        lengths: Sizes of axes that are times and stay unknown in models. No
            other axis may have one of these sizes.
        wide: Whether the first output is in float32 under half precision, as
            logits are.
        mixes: Whether tokens see each other.
        causal: Whether none sees a later one.
        padded: Names of the inputs that may be padded.
        still: Ends of the paths of weights that have no gradient by nature.
        rough: Bound of the mean error under half precision, relative to the
            mean output, in units of the last place.
        jit: Whether compilation is checked; it takes seconds.
        optimizer: Whether continued training is checked; likewise.
    """
    for index, variant in enumerate(variants):
        case = Case(make, inputs, variant, lengths, wide)
        case.check_shapes_and_dtypes()
        case.check_half_precision(rough)
        for name in padded:
            is_first = name == next(iter(inputs))
            case.check_masks(name, is_first, mixes and not (causal and is_first))
        if mixes:
            case.check_causality(causal)
        if index > 0:
            continue
        case.check_config()
        case.check_copies()
        case.check_files(process)
        case.check_training(still)
        case.check_frozen()
        if optimizer:
            case.check_continued_training(process)
        # On torch this is `torch.compile`: minutes for one model.
        if jit and keras.backend.backend() != "torch":
            case.check_compilation()


class Case:
    """A layer with what it is called with, and one method for each promise."""

    def __init__(self, make, inputs, variant, lengths, wide):
        self.make = make
        self.inputs = inputs
        self.variant = variant
        self.lengths = lengths
        self.wide = wide
        self.rng = np.random.default_rng(0)
        self.layer = self.made()
        self.is_model = isinstance(self.layer, keras.Model)
        self.fresh = self.made() if not self.is_model else None
        self.model = self.functional(self.layer)
        randomize(self.model, self.rng)
        self.outputs = arrays(self.model(self.arguments(self.model)))

    def made(self, **overrides):
        """A fresh layer, named alike every time so that paths compare."""
        layer = self.make()
        if not isinstance(layer, keras.Model):
            layer.name = "subject"
        if overrides:
            layer = type(layer).from_config({**layer.get_config(), **overrides})
        return layer

    def arguments(self, model, **changes):
        """What goes into a functional model: a dict, or the only tensor."""
        given = {**self.inputs, **changes}
        return given if len(given) > 1 else next(iter(given.values()))

    def call(self, layer, inputs):
        """Calls a layer as a user does."""
        if isinstance(layer, keras.Model):
            return layer(inputs if len(inputs) > 1 else next(iter(inputs.values())))
        first, *others = inputs
        return layer(inputs[first], **{k: inputs[k] for k in others}, **self.variant)

    def functional(self, layer, static=False):
        """A model of the layer, with batch and time unknown."""
        if isinstance(layer, keras.Model):
            return layer
        symbols = {}
        for name, x in self.inputs.items():
            shape = tuple(
                None if not static and (axis == 0 or size in self.lengths) else size
                for axis, size in enumerate(x.shape)
            )
            symbols[name] = keras.Input(
                batch_shape=shape, dtype=str(x.dtype), name=name
            )
        only = next(iter(symbols.values()))
        return keras.Model(
            symbols if len(symbols) > 1 else only, self.call(layer, symbols)
        )

    # 1

    def check_config(self):
        if self.is_model:
            config = self.model.get_config()
            twin = type(self.model).from_config(copy.deepcopy(config))
            assert twin.get_config() == config == self.model.get_config()
            return
        for layer in (self.fresh, self.layer):
            config = layer.get_config()
            kept = copy.deepcopy(config)
            twin = type(layer).from_config(config)
            assert config == kept, "from_config changed the config it was given"
            assert twin.get_config() == config == layer.get_config()
            text = json.dumps(keras.saving.serialize_keras_object(layer))
            read = keras.saving.deserialize_keras_object(json.loads(text))
            assert read.get_config() == config
        assert self.fresh.get_config() == self.layer.get_config()
        arguments = inspect.signature(type(self.layer).__init__).parameters.values()
        named = {
            argument.name
            for argument in arguments
            if argument.kind is not argument.VAR_KEYWORD and argument.name != "self"
        }
        assert named <= set(config), f"not in the config: {named - set(config)}"
        frozen = self.made()
        frozen.trainable = False
        assert type(frozen).from_config(frozen.get_config()).trainable is False

    # 2

    def check_shapes_and_dtypes(self):
        self.check_announced(self.model, self.outputs)
        if self.is_model:
            return
        self.assert_same_outputs(arrays(self.call(self.layer, self.inputs)))
        # Known sizes are announced in full.
        static = self.functional(self.layer, static=True)
        for symbol, real in zip(static.outputs, self.outputs, strict=True):
            assert tuple(symbol.shape) == real.shape
        if len(self.inputs) == 1:
            (x,) = self.inputs.values()
            answer = self.layer.compute_output_shape
            known = inspect.signature(answer).parameters
            shape = answer(
                x.shape, **{k: v for k, v in self.variant.items() if k in known}
            )
            assert tuple(shape) == self.outputs[0].shape

    def check_announced(self, model, outputs):
        reals = keras.tree.flatten(model(self.arguments(model)))
        for symbol, real in zip(model.outputs, reals, strict=True):
            assert len(symbol.shape) == len(real.shape)
            for announced, size in zip(symbol.shape, real.shape, strict=True):
                assert announced in (None, size), (symbol.shape, real.shape)
                assert announced is not None or size in (
                    *self.lengths,
                    len(next(iter(self.inputs.values()))),
                ), f"{symbol.shape} leaves a known size open: {tuple(real.shape)}"
            assert symbol.dtype == keras.backend.standardize_dtype(real.dtype)

    # 3

    def check_half_precision(self, rough):
        for policy in HALF_POLICIES:
            model = self.under(policy)
            model.set_weights(self.model.get_weights())
            self.check_announced(model, self.outputs)
            reals = keras.tree.flatten(model(self.arguments(model)))
            compute = keras.DTypePolicy(policy).compute_dtype
            first = keras.backend.standardize_dtype(reals[0].dtype)
            assert first == ("float32" if self.wide else compute)
            epsilon = 2**-8 if "bfloat16" in policy else 2**-11
            for real, wide in zip(reals, self.outputs, strict=True):
                assert np.isfinite(array(real)).all(), policy
                error = np.abs(array(real) - wide).mean() / np.abs(wide).mean()
                assert error <= rough * epsilon, policy

    def under(self, policy):
        """The functional model, of a layer with a policy of its own."""
        if not self.is_model:
            return self.functional(self.made(dtype=policy))
        keras.config.set_dtype_policy(policy)
        try:
            return self.made()
        finally:
            keras.config.set_dtype_policy("float32")

    # 4

    def check_copies(self):
        # `deepcopy` and `pickle` are one road through Keras, so each goes once.
        for twin in (self.clone(), pickle.loads(pickle.dumps(self.model))):
            assert paths(twin) == paths(self.model)
            self.assert_same_weights(twin.get_weights())
            self.assert_same_outputs(arrays(twin(self.arguments(twin))))
        if self.is_model:
            return
        twin = copy.deepcopy(self.fresh)
        assert twin.get_config() == self.fresh.get_config()
        twin = copy.deepcopy(self.layer)
        assert twin.get_config() == self.layer.get_config()
        assert paths(twin) == paths(self.layer)
        self.assert_same_weights(twin.get_weights())

    def clone(self):
        clone = keras.models.clone_model(self.model)
        clone.set_weights(self.model.get_weights())
        return clone

    def assert_same_weights(self, weights):
        for mine, other in zip(self.model.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(mine, other)

    def assert_same_outputs(self, outputs):
        for mine, other in zip(self.outputs, outputs, strict=True):
            np.testing.assert_array_equal(mine, other)

    # 5

    def check_files(self, process):
        mine = describe(self.model, self.inputs)
        found = process.reload(self.model, self.inputs)
        assert_same_description(found, mine)
        assert_same_description(found["again"], mine)
        model = self.under("mixed_bfloat16")
        model.set_weights(self.model.get_weights())
        found = process.reload(model, self.inputs, weights_file=False)
        assert_same_description(found, describe(model, self.inputs))

    def check_continued_training(self, process):
        model = self.clone()
        train(model, self.inputs, 1)
        found = process.reload(model, self.inputs, steps=2, weights_file=False)
        losses, optimizer = train(model, self.inputs, 2)
        np.testing.assert_array_equal(losses, found["losses"])
        for mine, other in zip(optimizer, found["optimizer"], strict=True):
            np.testing.assert_array_equal(mine, other)

    # 6

    def check_training(self, still):
        if not self.model.trainable_weights:
            return
        model = self.clone()
        before = [array(v.value) for v in model.trainable_weights]
        # Plain descent moves a weight by its gradient and nothing else.
        compile_for_training(model, keras.optimizers.SGD(1.0))
        batch = len(next(iter(self.inputs.values())))
        model.fit(self.arguments(model), targets(model, self.inputs), batch, verbose=0)
        for v, old in zip(model.trainable_weights, before, strict=True):
            gradient = np.abs(array(v.value) - old).max()
            assert np.isfinite(gradient), v.path
            if not v.path.endswith(tuple(still)):
                assert gradient > 1e-7, f"{v.path} has no gradient"

    def check_frozen(self):
        """A frozen layer stays frozen in a copy made from its config."""
        model = self.functional(self.made())
        model.trainable = False
        twin = type(model).from_config(model.get_config())
        assert not twin.trainable_weights
        assert len(twin.weights) == len(self.model.weights)
        twin.trainable = True
        assert len(twin.trainable_weights) == len(self.model.trainable_weights)

    # 7

    def check_compilation(self):
        results = []
        for jit_compile in (False, True):
            model = self.clone()
            model.compile(jit_compile=jit_compile)
            predicted = model.predict(self.arguments(model), verbose=0)
            results.append(keras.tree.flatten(predicted))
        for off, on, eager in zip(*results, self.outputs, strict=True):
            np.testing.assert_allclose(off, on, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(off, eager, rtol=1e-5, atol=1e-5)

    # 8

    def check_masks(self, padded, is_first, mask_has_effect):
        x = self.inputs[padded]
        kept = np.arange(x.shape[1] - len(x) + 1, x.shape[1] + 1)
        real = np.arange(x.shape[1]) < kept[:, None]
        hide = Padding(kept.tolist())
        junk = x.dtype.type("nan" if x.dtype.kind == "f" else 0)
        spoilt = np.where(real[(...,) + (None,) * (x.ndim - 2)], x, junk)

        def result(x):
            y = self.call(self.layer, {**self.inputs, padded: x})
            return keras.tree.flatten(y)[0]

        plain, dirty = result(x), result(spoilt if self.is_model else hide(spoilt))
        # A model tells padding by its token; a layer is told by the mask.
        clean = dirty if self.is_model else result(hide(x))
        by_token = is_first and len(plain.shape) > 2
        rows = real if by_token else slice(None)
        np.testing.assert_array_equal(array(clean)[rows], array(dirty)[rows])
        if mask_has_effect:
            assert (array(clean)[rows] != array(plain)[rows]).any()
        if by_token:
            np.testing.assert_array_equal(array(ReadMask()(clean)), real)
        self.check_unpadded(clean, kept, padded, by_token)

    def check_unpadded(self, padded_result, kept, padded, by_token):
        """Row by row without its padding: the same outputs, the same loss."""
        y = array(padded_result)
        target = self.rng.normal(size=y.shape).astype("float32")
        loss = keras.losses.MeanSquaredError()
        total = 0.0
        for row, length in enumerate(kept):
            times = self.inputs[padded].shape[1]
            short = {}
            for name, x in self.inputs.items():
                mine = x[row : row + 1] if len(x) == len(kept) else x
                for axis, size in enumerate(mine.shape):
                    if axis > 0 and size == times:
                        mine = mine.take(range(length), axis)
                short[name] = mine
            alone = keras.tree.flatten(self.call(self.layer, short))[0]
            there = (slice(row, row + 1), slice(length if by_token else None))
            np.testing.assert_allclose(array(alone), y[there], rtol=1e-4, atol=1e-5)
            share = length / kept.sum() if by_token else 1 / len(kept)
            total += share * array(loss(target[there], alone))
        np.testing.assert_allclose(array(loss(target, padded_result)), total, 1e-5)

    # 9

    def check_causality(self, causal):
        name, x = next(iter(self.inputs.items()))
        now = x.shape[1] // 2
        changed = x.copy()
        changed[:, now:] = x[:, now:][:, ::-1] if x.dtype.kind == "i" else -2.0
        assert (changed != x).any()
        before, after = (
            array(
                keras.tree.flatten(self.call(self.layer, {**self.inputs, name: x}))[0]
            )
            for x in (x, changed)
        )
        same = (before[:, :now] == after[:, :now]).all()
        assert same == causal, "the past changed" if causal else "it did not"
        assert (before[:, now:] != after[:, now:]).any()


@keras.saving.register_keras_serializable("contract")
class Padding(keras.layers.Layer):
    """Marks what lies behind a length in each row as padding."""

    def __init__(self, lengths, **kwargs):
        super().__init__(**kwargs)
        self.lengths = lengths

    def call(self, x):
        return x

    def compute_mask(self, x, previous_mask=None):
        return ops.arange(x.shape[1]) < ops.expand_dims(self.lengths, 1)


class ReadMask(keras.layers.Layer):
    """The implicit mask of its input as integers, or -1 where there is none."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        if mask is None:
            return -ops.ones(ops.shape(x)[:2], "int32")
        return ops.cast(mask, "int32")


# ----------------------------------------------------------------------------
# What both processes do
# ----------------------------------------------------------------------------


def array(x):
    """NumPy values; bfloat16, which NumPy cannot store, as float32."""
    x = ops.convert_to_numpy(ops.stop_gradient(x))
    return x.astype("float32") if x.dtype.kind not in "fiub" else x


def arrays(result):
    return [array(x) for x in keras.tree.flatten(result)]


def paths(layer):
    return [v.path for v in layer.weights]


def randomize(layer, rng):
    """Moves every weight, so that zeros and ones cannot stand for each other."""
    for v in layer.weights:
        v.assign(array(v.value) + rng.normal(0, 0.2, v.shape).astype("float32"))


def call(model, inputs):
    return model(inputs if len(inputs) > 1 else next(iter(inputs.values())))


def describe(model, inputs):
    """All of a model that a file must keep."""
    results = keras.tree.flatten(call(model, inputs))
    return {
        "paths": paths(model),
        "weights": [array(v.value) for v in model.weights],
        "outputs": [array(x) for x in results],
        "dtypes": [keras.backend.standardize_dtype(x.dtype) for x in results],
        "masked": [bool(array(ReadMask()(x)).min() >= 0) for x in results],
    }


def assert_same_description(found, mine):
    for key, expected in mine.items():
        if not isinstance(expected[0] if expected else None, np.ndarray):
            assert found[key] == expected, key
            continue
        for here, there in zip(expected, found[key], strict=True):
            np.testing.assert_array_equal(here, there)


def targets(model, inputs):
    """Random numbers shaped like the outputs, one row for each of the inputs."""
    rng = np.random.default_rng(2)
    batch = len(next(iter(inputs.values())))
    return keras.tree.map_structure(
        lambda x: rng.normal(size=(batch, *x.shape[1:])).astype("float32"),
        call(model, inputs),
    )


def compile_for_training(model, optimizer):
    # Tracing a step costs seconds. JAX compiles one way or the other, and a whole
    # step faster than its operations one by one.
    jit = keras.backend.backend() == "jax"
    model.compile(optimizer, "mse", run_eagerly=not jit, jit_compile=jit)


def train(model, inputs, steps):
    """Returns the losses of some steps and the optimizer's state behind them."""
    if not model.compiled:
        compile_for_training(model, keras.optimizers.Adam(0.01))
    x = inputs if len(inputs) > 1 else next(iter(inputs.values()))
    y = targets(model, inputs)
    losses = []
    for _ in range(steps):
        losses.append(float(model.train_on_batch(x, y)))
        model.reset_metrics()
    return losses, [array(v.value) for v in model.optimizer.variables]


def split_arrays(found):
    """Returns what goes into an `.npz` file and what goes into JSON."""
    stored, rest = {}, {}
    for key, values in found.items():
        if isinstance(values, dict):
            inner, rest[key] = split_arrays(values)
            stored |= {f"{key}/{name}": x for name, x in inner.items()}
        elif values and isinstance(values[0], np.ndarray):
            stored |= {f"{key}/{index}": x for index, x in enumerate(values)}
            rest[key] = len(values)
        else:
            rest[key] = values
    return stored, rest


def join_arrays(stored, rest, prefix=""):
    """Undoes `split_arrays`."""
    found = {}
    for key, values in rest.items():
        if isinstance(values, dict):
            found[key] = join_arrays(stored, values, f"{prefix}{key}/")
        elif isinstance(values, int):
            found[key] = [stored[f"{prefix}{key}/{i}"] for i in range(values)]
        else:
            found[key] = values
    return found


class FreshProcess:
    """A process that loads files it did not write; see `reload_child.py`."""

    def __init__(self, *modules):
        self.modules = modules
        self.folder = tempfile.TemporaryDirectory()
        self.process = None

    def start(self):
        here = pathlib.Path(__file__).parent
        search = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(here / "reload_child.py")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def reload(self, model, inputs, *, steps=0, weights_file=True):
        """Saves a model and returns what another process makes of the files."""
        if self.process is None:
            self.start()
        folder = pathlib.Path(self.folder.name)
        file = folder / "model.keras"
        model.save(file)
        weights = folder / "model.weights.h5" if weights_file else None
        if weights:
            model.save_weights(weights)
        np.savez(folder / "inputs.npz", **inputs)
        request = {
            "modules": self.modules,
            "file": str(file),
            "weights_file": str(weights) if weights else None,
            "inputs": str(folder / "inputs.npz"),
            "names": list(inputs),
            "policy": "float32",
            "steps": steps,
            "answer": str(folder / "answer.npz"),
        }
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process that loads files ended"
        answer = json.loads(line)
        assert "found" in answer, answer.get("error")
        with np.load(folder / "answer.npz") as stored:
            return join_arrays(stored, answer["found"])

    def stop(self):
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()
        self.folder.cleanup()
