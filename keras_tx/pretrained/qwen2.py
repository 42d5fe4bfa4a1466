"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. See
[Yang et al., 2024](https://arxiv.org/abs/2407.10671)."""

import dataclasses

from keras_tx.pretrained import llama
from keras_tx.pretrained.recipes import describe_windows, windows_of


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
