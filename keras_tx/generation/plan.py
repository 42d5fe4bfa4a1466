"""How a model runs step by step, found out once and kept with it."""

import collections
import contextlib
import functools
import threading

import keras
import numpy as np
from keras import ops

from keras_tx import masks, remat
from keras_tx.embeddings import TokenEmbedding
from keras_tx.generation import first_use
from keras_tx.generation.backends import compile_function, without_gradients
from keras_tx.generation.graph import (
    OTHER_INPUTS,
    Part,
    check_logits,
    find_target,
    inputs_by_name,
    like_inputs,
    other_inputs,
    pick_output,
)
from keras_tx.positions import LearnedPosition

# Compiled functions kept per model; the one that was not used for longest goes.
MAX_FUNCTIONS = 24

_PLANS = "_keras_tx_plans"
_lock = threading.RLock()


def plan_of(model, has_source, target, output):
    """Returns the model's plan, made at the first use.

    It lives on the model itself: a store elsewhere would keep the model alive.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a `keras.Model`. Received: {model!r} (of type "
            f"{type(model).__name__}). `keras.Sequential([layer, ...])` makes one "
            "of layers."
        )
    if keras.backend.backend() == "jax":
        # While it trains, the newest weights are the trainer's.
        model.jax_state_sync()
    with _lock:
        plans = model.__dict__.get(_PLANS)
        if plans is None:
            plans = {}
            # Not as a tracked attribute: it is no part of the model.
            object.__setattr__(model, _PLANS, plans)
        key = (has_source, target, output)
        plan = plans.get(key)
        # Quantising, enabling LoRA, `Sequential.add` and the like put other
        # variables or layers in place.
        if plan is None or not plan.is_of_now():
            plan = plans[key] = Plan(model, has_source, target, output)
            if plan.kind == "whole" and not model.built:
                without_gradients(plan.probe)(None)
        return plan


class Plan:
    """How to run a model step by step, and the functions compiled for it."""

    def __init__(self, model, has_source, target, output):
        self.model = model
        self.output = output
        self.encoder = self.decoder = None
        self.memory_structure = None
        self.lock = threading.RLock()
        self.functions = collections.OrderedDict()
        self.owners = self.windows = None  # of the attentions, in order
        self.vocab_size = None
        self.checked = False
        self.strict = True
        inputs = inputs_by_name(model)
        self.inputs = inputs
        self.target = find_target(inputs, target, has_source)
        self._check_length()
        subclassed = callable(getattr(model, "encode", None)) and callable(
            getattr(model, "decode", None)
        )
        if has_source and subclassed:
            self.kind = "methods"
        elif has_source and len(inputs) > 1:
            self.kind = "split"
            self._split()
        elif has_source:
            raise ValueError(
                "`source` belongs to an encoder-decoder: a functional model with "
                "two inputs, or a subclassed one with the methods "
                "`encode(source)` and `decode(target, encoded)`. Received: "
                f"'{model.name}' of type {type(model).__name__} with the inputs "
                f"{sorted(inputs)}."
            )
        else:
            self.kind = "whole"
            unknown = sorted(set(inputs) - {self.target} - set(OTHER_INPUTS))
            if unknown:
                raise ValueError(
                    f"'{model.name}' also wants the inputs {unknown}. Pass them as "
                    "`source=`, an array or a dict of arrays by name; the input "
                    f"that is continued is '{self.target}', or say which with "
                    "`target=`."
                )
        self._look_up()

    @staticmethod
    def _limit(layers):
        lengths = [x.max_length for x in layers if isinstance(x, LearnedPosition)]
        return min(lengths, default=None)

    def _check_length(self):
        x = self.inputs.get(self.target)
        # A Sequential model notes the length of its first call, and takes others.
        fixed = not isinstance(self.model, keras.Sequential)
        if fixed and x is not None and len(x.shape) == 2 and x.shape[1] is not None:
            raise ValueError(
                f"The input '{self.target}' of '{self.model.name}' has the fixed "
                f"length {x.shape[1]}, so that no step can be one token long. "
                "Declare it as `keras.Input((None,))`."
            )
        if x is not None and len(x.shape) != 2:
            raise ValueError(
                f"The input '{self.target}' of '{self.model.name}' must be tokens "
                f"(batch, time). Received: shape {tuple(x.shape)}."
            )

    def _split(self):
        """Cuts a functional model where source-only tensors meet the target."""
        model = self.model
        target = self.inputs[self.target]
        sources = {
            name: x
            for name, x in self.inputs.items()
            if x is not target and name not in OTHER_INPUTS
        }
        others = {name: x for name, x in self.inputs.items() if name in OTHER_INPUTS}
        reads_target = {id(target)} | {id(x) for x in others.values()}
        reads_source = {id(x) for x in sources.values()}
        border, source_nodes, target_nodes = {}, [], []
        for depth in sorted(model._nodes_by_depth, reverse=True):
            for node in model._nodes_by_depth[depth]:
                if node.is_input:
                    continue
                inputs = node.input_tensors
                if any(id(x) in reads_target for x in inputs):
                    reads_target.update(id(x) for x in node.outputs)
                    border.update((id(x), x) for x in inputs if id(x) in reads_source)
                    target_nodes.append(node)
                else:
                    reads_source.update(id(x) for x in node.outputs)
                    source_nodes.append(node)
        logits = pick_output(model.output, self.output)
        if id(logits) not in reads_target:
            raise ValueError(
                f"The logits of '{model.name}' do not depend on its input "
                f"'{self.target}'. Say which input is continued with `target=`."
            )
        self.source_names = list(sources)
        self.other_names = list(others)
        border = list(border.values())
        self.encoder = Part(source_nodes, list(sources.values()), border)
        self.decoder = Part(target_nodes, [target, *others.values(), *border], [logits])

    def _look_up(self):
        """Notes variables and layers, and what they say of the tokens."""
        self.variables = list(self.model.variables)
        self.parts = list(self.model._flatten_layers())
        self.layers = (
            self.decoder.layers() if self.kind == "split" else all_layers(self.model)
        )
        self.remat = [
            x for x in (self.model, *self.layers) if getattr(x, "_remat_mode", None)
        ]
        tables = _tables(self.layers)
        self.num_tokens = max((x.input_dim for x in tables), default=None)
        # What the method `encode` of a user's reads may be anything.
        reading = self.encoder.layers() if self.kind == "split" else []
        sizes = [x.input_dim for x in _tables(reading)]
        self.num_source_tokens = max(sizes, default=None)
        pads = [x.pad_id for x in tables if getattr(x, "pad_id", None) is not None]
        pads += [0 for x in tables if getattr(x, "mask_zero", False)]
        self.pad_id = pads[0] if pads else None
        self.max_length = self._limit(self.layers)
        self.source_limit = self._limit(all_layers(self.model))

    def is_of_now(self):
        """Whether the model has the variables and layers that it had."""
        return _same_objects(self.variables, self.model.variables) and _same_objects(
            self.parts, self.model._flatten_layers()
        )

    # Arguments

    def check_tokens(self, name, rows):
        """Refuses ids that the model's embedding does not have."""
        self._check_ids(name, rows, self.num_tokens)

    def check_source(self, source):
        """Refuses ids that the encoder's embedding does not have."""
        if self.num_source_tokens is None:
            return
        for x in keras.tree.flatten(source):
            if x.ndim == 2 and np.issubdtype(x.dtype, np.integer):
                self._check_ids("source", x, self.num_source_tokens)

    @staticmethod
    def _check_ids(name, rows, bound):
        low = min((int(np.min(row)) for row in rows if len(row)), default=0)
        high = max((int(np.max(row)) for row in rows if len(row)), default=0)
        if low < 0 or (bound is not None and high >= bound):
            upper = "" if bound is None else f" to {bound - 1}"
            raise ValueError(
                f"`{name}` must hold tokens of the model, 0{upper}. Received ids "
                f"from {low} to {high}. Check the tokenizer."
            )

    @staticmethod
    def check_stuck(stuck):
        if ops.convert_to_numpy(stuck).any():
            rows = np.nonzero(ops.convert_to_numpy(stuck))[0].tolist()
            raise ValueError(
                f"No token was left to choose in rows {rows}: the samplers ruled "
                "out all of them, or the logits are not finite. Loosen the "
                "constraint, or look for NaN in the weights."
            )

    # Running

    def encode(self, source, compiled, repeats=1):
        """Returns what the decoder needs of the source: tensors and masks."""
        if source is None:
            return ()
        leaves = keras.tree.flatten(source)
        key = ("encode", tuple((x.shape, str(x.dtype)) for x in leaves))
        run = self.function(key, self.encode_tensors, compiled)
        memory = run(keras.tree.map_structure(ops.convert_to_tensor, source))
        return repeated(memory, repeats)

    def encode_tensors(self, source):
        if self.kind == "methods":
            encoded = self.model.encode(source)
        else:
            if isinstance(source, dict):
                source = [source[name] for name in self.source_names]
            else:
                source = [source]
            encoded = self.encoder(source)
        tensors = keras.tree.flatten(encoded)
        found = [masks.implicit(x) for x in tensors]
        self.memory_structure = keras.tree.map_structure(lambda x: 0, encoded)
        return tensors, found

    def forward(self, tokens, memory, scope=None):
        """Returns logits `(B, T, V)`, inside `scope` if there is one."""
        with contextlib.ExitStack() as stack:
            # Of no use without gradients, and a trace of its own.
            stack.enter_context(remat.without(self.remat))
            if scope is not None:
                stack.enter_context(scope)
            return self._forward(tokens, memory, scope)

    def _forward(self, tokens, memory, scope):
        if self.kind == "whole":
            names = [x for x in self.inputs if x != self.target]
            if not names:
                outputs = self.model(tokens, training=False)
            else:
                given = {self.target: tokens, **other_inputs(names, tokens, scope)}
                outputs = self.model(like_inputs(self.model, given), training=False)
            return check_logits(pick_output(outputs, self.output), tokens, self)
        tensors, found = memory
        carried = []
        for x, mask in zip(tensors, found, strict=True):
            x = ops.convert_to_tensor(x)
            if mask is not None:
                # Compiled code hands tensors on without their masks.
                x = ops.copy(x) if keras.backend.backend() == "torch" else x
                masks.attach(x, mask)
            carried.append(x)
        if self.kind == "split":
            others = other_inputs(self.other_names, tokens, scope)
            (logits,) = self.decoder([tokens, *others.values(), *carried])
            return check_logits(logits, tokens, self)
        encoded = keras.tree.pack_sequence_as(self.memory_structure, carried)
        outputs = self.model.decode(tokens, encoded)
        return check_logits(pick_output(outputs, self.output), tokens, self)

    def function(self, key, function, compiled, donate=(), draft=None):
        """Returns `function`, compiled once for `key`, with a draft's weights too."""
        if not compiled:
            return without_gradients(function)
        with self.lock:
            found = self.functions.get(key)
            if found is None:
                variables = self.variables + (draft.variables if draft else [])
                found = compile_function(function, self.model, variables, donate)
                found = self.functions[key] = without_gradients(found)
                while len(self.functions) > MAX_FUNCTIONS:
                    self.functions.popitem(last=False)
            self.functions.move_to_end(key)
            return found

    # First use

    def prepare(self, source, check):
        """Builds the model, learns V, and checks that it can be cached."""
        with self.lock:
            self.strict = check
            if self.vocab_size is not None and (self.checked or not check):
                return
            if check and self.kind != "methods":
                first_use.refuse_mixers(self)
            one = source
            if source is not None:
                one = keras.tree.map_structure(lambda x: x[:1], source)
            without_gradients(
                functools.partial(first_use.compare, self) if check else self.probe
            )(one)
            self.checked = self.checked or check

    def probe(self, source):
        """Builds the model, if its first call does, and learns V."""
        tokens = ops.convert_to_tensor(np.zeros((1, 2), "int32"))
        logits = self.forward(tokens, self.encode_eagerly(source))
        self.vocab_size = int(logits.shape[-1])
        self._look_up()

    def encode_eagerly(self, source):
        if source is None:
            return ()
        return self.encode_tensors(
            keras.tree.map_structure(ops.convert_to_tensor, source)
        )


def repeated(memory, repeats):
    """Returns what the decoder needs of the source, each row several times."""
    if not memory or repeats == 1:
        return memory

    def repeat(x):
        return None if x is None else ops.repeat(x, repeats, axis=0)

    tensors, found = memory
    return [*map(repeat, tensors)], [*map(repeat, found)]


def _tables(layers):
    """Returns the embeddings of tokens among some layers."""
    ours = [x for x in layers if isinstance(x, TokenEmbedding)]
    kinds = (keras.layers.Embedding, keras.layers.ReversibleEmbedding)
    return ours or [x for x in layers if isinstance(x, kinds)]


def _same_objects(first, second):
    second = list(second)
    return len(first) == len(second) and all(
        a is b for a, b in zip(first, second, strict=True)
    )


def all_layers(model):
    """Returns the model's layers and theirs, without the model itself."""
    return [x for x in model._flatten_layers() if x is not model]
