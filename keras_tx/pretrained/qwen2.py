"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. See
[Yang et al., 2024](https://arxiv.org/abs/2407.10671)."""

import dataclasses

from keras_tx.pretrained import llama
from keras_tx.pretrained.parts import Parts

KINDS = ("full_attention", "sliding_attention")


def windows_of(config, first_sliding=28):
    """Returns the window of each layer, from either way to state it.

    Args:
        config: The `Config`.
        first_sliding: The first layer with a window, where the config only
            switches them on.
    """
    num_layers = config.layers("num_hidden_layers")
    slides = config.flag("use_sliding_window", False)
    window = config.integer("sliding_window", None) if slides else None
    first = config.get("max_window_layers", first_sliding)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [KINDS[window is not None and i >= first] for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        raise config.wrong("layer_types", kinds, f"{num_layers} of {KINDS}")
    return [window if kind == KINDS[1] else None for kind in kinds]


def describe_windows(model):
    """Returns the fields that `windows_of` reads, from a model."""
    parts = Parts(model)
    windows = [parts.window(index) for index in range(parts.num_blocks)]
    widest = max((w for w in windows if w is not None), default=None)
    return {
        "use_sliding_window": widest is not None,
        "sliding_window": widest,
        "max_window_layers": next(
            (i for i, w in enumerate(windows) if w is not None), len(windows)
        ),
        "layer_types": [KINDS[window is not None] for window in windows],
    }


def build(config, options):
    """Builds the decoder of a config."""
    config.only("use_mrope", False)
    return llama.build(
        config,
        options,
        use_bias="qkv",
        feed_forward_bias=False,
        windows=windows_of(config),
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    fields = llama.describe(model)
    for name in ("attention_bias", "mlp_bias"):
        fields.pop(name)
    return {**fields, **describe_windows(model)}


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen2",
    architectures={"Qwen2ForCausalLM": None, "Qwen2Model": None},
    build=build,
    describe=describe,
)
