"""Mistral: Llama with a window. See [Jiang et al., 2023](
https://arxiv.org/abs/2310.06825)."""

import dataclasses

from keras_tx.pretrained import llama
from keras_tx.pretrained.parts import Parts


def build(config, options):
    """Builds the decoder of a config."""
    window = config.integer("sliding_window", None)
    windows = [window] * config.layers("num_hidden_layers")
    return llama.build(config, options, windows=windows)


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    return {**llama.describe(model), "sliding_window": Parts(model).window(0)}


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="mistral",
    architectures={"MistralForCausalLM": None, "MistralModel": None},
    build=build,
    describe=describe,
)
