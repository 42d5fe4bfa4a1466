"""Layers that hold layers: slots, configs, templates and initializers.

A composite layer keeps each child in a *slot*: an attribute whose name is also
the child's name, and so part of every variable's path and of the file format.
This module is the one place that knows how children enter a slot and how they
travel through configs.
"""

import copy
import zlib

import keras

PACKAGE = "keras_tx"

# Counts changes to configs or variable paths that older files would feel.
# Files written under an older number must load for ever; see tests/golden.
FORMAT = 1

register = keras.saving.register_keras_serializable(PACKAGE)


def adopt(parent, slot, child):
    """Puts `child` into a slot of `parent`: its name, its dtype, its owner.

    Args:
        parent: The layer that will hold `child`.
        slot: Name of the slot. It becomes the name of the child, whatever its
            maker called it, because names are the file format.
        child: A fresh layer, or `None` for an empty slot.

    Returns:
        `child`, named and in the dtype policy of `parent`.

    Raises:
        ValueError: If `child` is no layer, already sits in another slot, or
            has weights already, whose paths could no longer be right.
    """
    if child is None:
        return None
    if not isinstance(child, keras.layers.Layer):
        raise ValueError(
            f"`{slot}` of `{type(parent).__name__}` must be a Keras layer. "
            f"Received: {slot}={child!r} (of type {type(child).__name__})."
        )
    owner = getattr(child, "_slot_owner", None)
    if owner is not None:
        raise ValueError(
            f"`{slot}` of `{type(parent).__name__}` received the layer "
            f"'{child.name}' that already is {owner}. A layer has one place, "
            "or its weights would be saved twice and come apart on loading. "
            "Make a second one: `type(layer).from_config(layer.get_config())`."
        )
    if child.built and child.weights:
        raise ValueError(
            f"`{slot}` of `{type(parent).__name__}` received the layer "
            f"'{child.name}' that is built already, so that the paths of its "
            "weights lack the parent's name. Pass a fresh layer, for example "
            "`type(layer).from_config(layer.get_config())`; a `Sequential` "
            "without an `Input`."
        )
    child._slot_owner = f"`{slot}` of a `{type(parent).__name__}`"
    child.name = slot
    share_dtype(child, parent.dtype_policy)
    return child


def share_dtype(child, policy):
    """Gives `child` and all that it holds a dtype policy.

    A layer made under another global policy would round what passes through.
    """
    child.dtype_policy = policy
    for grandchild in getattr(child, "_layers", ()):
        share_dtype(grandchild, policy)


def keep_frozen(layer):
    """Freezes what `build` has made in a frozen layer, at the end of `build`.

    Children made there know nothing of it, and whoever holds the layer asks
    their variables.
    """
    if layer.trainable:
        return
    # Not `layer.trainable = False`: on TensorFlow, setting what is set does nothing.
    for child in layer._layers:
        child.trainable = False
    for variable in layer.weights:
        variable.trainable = False


def dtype_config(layer):
    """Returns the `dtype` of a layer for its config, quantized children included.

    `quantize` changes the policies of children that only `build` makes, so that
    the layer's config must remember them by path.
    """
    policy = layer.dtype_policy
    quantized = {
        child.path: child.dtype_policy
        for child in layer._flatten_layers(include_self=False)
        if child.dtype_policy.quantization_mode is not None
    }
    if quantized and not isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        policy = keras.dtype_policies.DTypePolicyMap(policy, quantized)
    return keras.dtype_policies.serialize(policy)


def child_dtype(layer, name):
    """Returns the dtype policy of the child that `build` makes under a name.

    A map of policies is looked up here: Keras' own layers save their quantized
    weights only under a policy of their own.
    """
    policy = layer.dtype_policy
    if isinstance(policy, keras.dtype_policies.DTypePolicyMap):
        return policy[f"{layer.path}/{name}"]
    return policy


def child_config(child):
    """Returns the config of a child layer, without what it was built with.

    Keras builds a child that carries a `build_config` outside its parent on
    loading, and the paths of its variables then lose the parent's name. The same
    goes for what the child holds, and for the input that `Sequential` notes. All
    is removed in place because Keras may add a tag to this very dict later.
    """
    config = keras.saving.serialize_keras_object(child)
    _forget_building(config)
    return config


def _forget_building(config):
    if isinstance(config, (list, tuple)):
        for item in config:
            _forget_building(item)
    elif isinstance(config, dict):
        if "class_name" in config:
            config.pop("build_config", None)
        if config.get("class_name") == "Sequential":
            inner = config["config"]
            inner.pop("build_input_shape", None)
            inner["layers"] = [
                layer
                for layer in inner["layers"]
                if layer["class_name"] != "InputLayer"
            ]
        for item in config.values():
            _forget_building(item)


def serialize_children(layer, *slots):
    """Returns `{slot: config}` for the children of `layer`."""
    return {slot: child_config(getattr(layer, slot)) for slot in slots}


def deserialize_children(config, *slots):
    """Returns a copy of `config` whose serialized children are live again."""
    children = {
        slot: keras.saving.deserialize_keras_object(config[slot])
        for slot in slots
        if isinstance(config.get(slot), dict)
    }
    return {**config, **children}


def replicate(layer, **overrides):
    """Returns a fresh layer like `layer`, with no weights of its own yet.

    Args:
        layer: The layer that serves as a template.
        **overrides: Config entries that the copy does not share, such as
            `name`.
    """
    config = copy.deepcopy(child_config(layer))
    config["config"].update(overrides)
    return keras.saving.deserialize_keras_object(config)


def fresh_initializer(initializer, salt):
    """Returns an initializer that no other kernel shares.

    One initializer object gives the same values at every call, so that two
    kernels of one shape would start equal. An unseeded one is made anew; a
    seeded one gets a seed of its own from its seed and the kernel's path, so
    that the values still follow from the seed.

    Args:
        initializer: A Keras initializer, or what `keras.initializers.get`
            understands.
        salt: Path of the kernel within its model.
    """
    initializer = keras.initializers.get(initializer)
    if not isinstance(initializer, keras.initializers.Initializer):
        return initializer
    config = initializer.get_config()
    if isinstance(config.get("seed"), int):
        config["seed"] = fresh_seed(config["seed"], salt)
    return type(initializer).from_config(config)


def fresh_seed(seed, salt):
    """Returns a seed that no other layer shares, or `None` for an unseeded one.

    Two layers copied from one seeded template would drop the same features.
    """
    if seed is None:
        return None
    return zlib.crc32(f"{seed}/{salt}".encode()) & 0x7FFFFFFF
