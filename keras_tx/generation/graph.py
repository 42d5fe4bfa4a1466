"""The inputs and outputs of models, and parts of a functional model's graph."""

import keras
from keras import ops

# Inputs that follow from the tokens, beside the tokens themselves.
TOKEN_INPUTS = ("target", "tokens")
OTHER_INPUTS = ("positions", "segment_ids", "token_types")


class Part:
    """Some nodes of a functional model's graph, as a function.

    `keras.Model` of tensors in the middle of a graph would rewire the model
    that they belong to, which could then not be saved.

    Args:
        nodes: The nodes, in the order of the graph.
        inputs: Symbolic tensors that are given.
        outputs: Symbolic tensors that are wanted.
    """

    def __init__(self, nodes, inputs, outputs):
        self.inputs = inputs
        self.outputs = outputs
        needed = {id(x) for x in outputs}
        self.nodes = []
        for node in reversed(nodes):
            if any(id(x) in needed for x in node.outputs):
                needed.update(id(x) for x in node.input_tensors)
                self.nodes.insert(0, node)

    def __call__(self, values):
        known = {id(x): value for x, value in zip(self.inputs, values, strict=True)}
        for node in self.nodes:
            args, kwargs = node.arguments.fill_in(known)
            results = keras.tree.flatten(node.operation(*args, **kwargs))
            known.update((id(x), y) for x, y in zip(node.outputs, results, strict=True))
        return [known[id(x)] for x in self.outputs]

    def layers(self):
        """Returns the layers of these nodes and theirs, each once."""
        found = {}
        for node in self.nodes:
            if isinstance(node.operation, keras.layers.Layer):
                for layer in node.operation._flatten_layers():
                    found[id(layer)] = layer
        return list(found.values())


def inputs_by_name(model):
    """Returns `{name: symbolic input}`; nothing of a subclassed model."""
    try:
        inputs = model.inputs
    except (AttributeError, ValueError):
        inputs = None
    return {x.name: x for x in inputs or ()}


def find_target(inputs, target, has_source):
    """Returns the name of the input that is continued."""
    if target is not None:
        if inputs and target not in inputs:
            raise ValueError(
                "`target` must name an input of the model, one of "
                f"{sorted(inputs)}. Received: target={target!r}."
            )
        return target
    if len(inputs) == 1:
        return next(iter(inputs))
    for name in TOKEN_INPUTS:
        if name in inputs:
            return name
    if inputs:
        raise ValueError(
            f"The model has the inputs {sorted(inputs)}, none of them called "
            "'target' or 'tokens'. Say which is continued with `target=`."
        )
    return "target" if has_source else "tokens"


def like_inputs(model, given):
    """Arranges inputs by name as the functional model takes them."""
    return keras.tree.map_structure(lambda x: given[x.name], model.input)


def other_inputs(names, tokens, scope):
    """Inputs that follow from the tokens, by name."""
    batch, length = tokens.shape
    ones = ops.ones((batch, length), dtype="int32")
    if scope is not None:
        positions = scope.positions
    else:
        positions = ones * ops.arange(length, dtype="int32")[None, :]
    values = {
        "positions": positions,
        "segment_ids": ones,
        "token_types": ops.zeros_like(ones),
    }
    return {name: values[name] for name in names}


def pick_output(outputs, output):
    """Returns the logits among a model's outputs."""
    if isinstance(outputs, dict):
        name = "logits" if output is None else output
        if name not in outputs:
            raise ValueError(
                f"The model returns {sorted(outputs)}. Say which are the logits "
                f"with `output=`, or call them 'logits'. Received: output={output!r}."
            )
        return outputs[name]
    if isinstance(outputs, (list, tuple)):
        index = 0 if output is None else output
        if not isinstance(index, int) or not -len(outputs) <= index < len(outputs):
            raise ValueError(
                f"The model returns {len(outputs)} outputs. Say which are the "
                f"logits with `output=`, a number. Received: output={output!r}."
            )
        return outputs[index]
    if output not in (None, 0):
        raise ValueError(
            f"The model returns one tensor. Received: output={output!r}. Leave it out."
        )
    return outputs


def check_logits(logits, tokens, plan):
    """Returns the logits, if they are such: one distribution a token."""
    if len(logits.shape) != 3 or logits.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"'{plan.model.name}' must give logits (batch, time, vocabulary) for "
            f"tokens (batch, time). Received: logits of shape "
            f"{tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}."
        )
    return logits
