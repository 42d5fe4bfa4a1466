"""What a model computes, as facts that two models can be compared by."""

import keras

from keras_tx.attention import MultiHead
from keras_tx.blocks import TransformerBlock
from keras_tx.feed_forward import FeedForward, activation_config
from keras_tx.norms import NormTemplate
from keras_tx.positions import RotaryPosition

# Entries of configs that say how training starts or goes, not what a trained
# model computes.
TRAINING = ("name", "trainable", "dtype", "seed", "dropout", "rate", "implementation")
TRAINING_ENDINGS = ("_initializer", "_regularizer", "_constraint")


def facts(model):
    """Returns `{what: value}` of a functional model's arithmetic.

    Args:
        model: A functional model.
    """
    config = model.get_config()
    layers = {layer.name: layer for layer in model.layers}
    wires = _Wires(config["layers"])
    found = {}
    for entry in config["layers"]:
        if entry["class_name"] == "Dropout":
            continue
        layer, label = layers.get(entry["name"]), wires.label(entry["name"])
        about = layer_facts(layer, entry["config"])
        calls = [
            (node["args"], dict(node["kwargs"])) for node in entry["inbound_nodes"]
        ]
        asked = [kwargs.pop("use_causal_mask", None) for _, kwargs in calls]
        if "causal" in about:
            about["causal"] = about["causal"] or any(asked)
        about["inputs"] = [
            [wires.trace(args), {k: wires.trace(v) for k, v in kwargs.items()}]
            for args, kwargs in calls
        ]
        found |= _prefixed(label, about)
    found["outputs"] = wires.trace(config["output_layers"])
    return found


class _Wires:
    """Which layer reads which, with dropout layers left out.

    Args:
        entries: The serialized layers of a model.
    """

    def __init__(self, entries):
        self.drops = {
            entry["name"]: entry["inbound_nodes"][0]["args"][0]
            for entry in entries
            if entry["class_name"] == "Dropout"
        }
        # Operations are numbered by the process, not by the model.
        self.labels = {}
        for entry in entries:
            if entry["module"].startswith("keras.src.ops") or entry[
                "module"
            ].startswith("keras.ops"):
                number = len(self.labels)
                self.labels[entry["name"]] = f"{entry['class_name']} {number}"

    def label(self, name):
        """Returns a name that does not depend on the process."""
        return self.labels.get(name, name)

    def trace(self, value):
        """Returns a value of a serialized call, tensors as who makes them."""
        if isinstance(value, dict):
            if value.get("class_name") == "__keras_tensor__":
                return self.trace(value["config"]["keras_history"])
            return {key: self.trace(part) for key, part in value.items()}
        if not isinstance(value, (list, tuple)):
            return value
        if len(value) == 3 and isinstance(value[0], str):
            if value[0] in self.drops:
                return self.trace(self.drops[value[0]])
            return f"{self.label(value[0])} call {value[1]}"
        return [self.trace(part) for part in value]


def layer_facts(layer, config):
    """Returns `{what: value}` of one layer's arithmetic.

    Args:
        layer: The layer, or `None` for an operation.
        config: Its config.
    """
    if isinstance(layer, TransformerBlock):
        return _block_facts(layer)
    if isinstance(layer, keras.layers.Layer) and _is_norm(layer):
        return _norm_facts(layer)
    return {"class": type(layer).__name__, **_plain(config)}


def _block_facts(block):
    found = {
        "class": type(block).__name__,
        "norm_position": block.norm_position,
        "residual": block.residual,
        "causal": block.causal or _causal(block.attention),
        **_prefixed("norm", _template_facts(block.norm)),
    }
    for branch in block.branches[:-1]:
        found |= _prefixed(branch, _heads_facts(getattr(block, branch)))
    if block.cross_attention is not None:
        found["cross_attention/causal"] = _causal(block.cross_attention)
    feed_forward = block.feed_forward
    if type(feed_forward) is FeedForward:
        found |= {
            "feed_forward/hidden_dim": feed_forward.hidden_dim,
            "feed_forward/activation": activation_config(feed_forward.activation),
            "feed_forward/gated": feed_forward.gated,
            "feed_forward/use_bias": feed_forward.use_bias,
        }
    else:
        found["feed_forward/class"] = type(feed_forward).__name__
    return found


def _causal(heads):
    return bool(
        getattr(heads, "causal", False)
        or getattr(getattr(heads, "attention", None), "causal", False)
    )


def _heads_facts(heads):
    if type(heads) is not MultiHead:
        return {"class": type(heads).__name__}
    head_dim = heads.query.kernel.shape[-1]
    attention = heads.attention
    return {
        "num_heads": heads.num_heads,
        "num_kv_heads": heads.num_kv_heads,
        "head_dim": head_dim,
        "use_bias": heads.use_bias,
        "class of scores": type(attention).__name__,
        "scale": float(attention.scale or head_dim**-0.5),
        "window": attention.window,
        "soft_cap": attention.soft_cap,
        **_prefixed("query_key_norm", _template_facts(heads.query_key_norm)),
        **_prefixed("position", _position_facts(heads.position, head_dim)),
    }


def _position_facts(position, head_dim):
    if position is None:
        return {"class": None}
    if type(position) is not RotaryPosition:
        return {"class": type(position).__name__, **_plain(position.get_config())}
    rotary_dim = position.rotary_dim or head_dim
    scaling = position.scaling
    return {
        "class": "RotaryPosition",
        "layout": position.layout,
        "rotary_dim": rotary_dim,
        # What a scaling comes to, however it is stated.
        "frequencies": tuple(map(float, position.frequencies(rotary_dim))),
        "magnitude": 1.0 if scaling is None else float(scaling.magnitude),
    }


def _template_facts(template):
    norm = NormTemplate(template).make("norm")
    return {"class": None} if norm is None else _norm_facts(norm)


def _is_norm(layer):
    return isinstance(
        layer, (keras.layers.LayerNormalization, keras.layers.RMSNormalization)
    )


def _norm_facts(norm):
    rms = isinstance(norm, keras.layers.RMSNormalization)
    return {
        "class": "RMSNorm" if rms else type(norm).__name__,
        "epsilon": float(norm.epsilon),
        **({} if rms else {"center": norm.center, "scale": norm.scale}),
    }


def _prefixed(prefix, found):
    return {f"{prefix}/{key}": value for key, value in found.items()}


def _plain(config, prefix=""):
    """Returns the entries of a config that matter, nested ones by their path."""
    found = {}
    for key, value in config.items():
        if key in TRAINING or key.endswith(TRAINING_ENDINGS):
            continue
        if isinstance(value, dict):
            found |= _plain(value, f"{prefix}{key}/")
        else:
            found[prefix + key] = value
    return found


def differences(model, other):
    """Returns sentences about where two models do not compute the same.

    Args:
        model: The model of the user.
        other: What a family would make of it.
    """
    ours, theirs = facts(model), facts(other)
    sentences = []
    for key in sorted({*ours, *theirs}):
        mine, its = ours.get(key, "absent"), theirs.get(key, "absent")
        if not _same(mine, its):
            sentences.append(f"`{key}` is {_short(mine)}, not {_short(its)}")
    return sentences


def _same(a, b):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= 1e-9 * max(abs(a), abs(b))
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _short(value):
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."
