"""Qwen3: Llama with heads normalized before they rotate. See
[Yang et al., 2025](https://arxiv.org/abs/2505.09388)."""

import dataclasses

from keras_tx.pretrained import llama
from keras_tx.pretrained.recipes import describe_windows, windows_of
from keras_tx.pretrained.table import Row

ROWS = (
    *llama.ROWS,
    Row(llama.ATTENTION + "q_norm.weight", "block_{i}/attention/query_norm/scale"),
    Row(llama.ATTENTION + "k_norm.weight", "block_{i}/attention/key_norm/scale"),
)


def build(config, options):
    """Builds the decoder of a config."""
    return llama.build(
        config,
        options,
        feed_forward_bias=False,
        query_key_norm=True,
        windows=windows_of(config),
        head_dim=128,
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    fields = llama.describe(model)
    fields.pop("mlp_bias")
    return {**fields, **describe_windows(model)}


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="qwen3",
    architectures={"Qwen3ForCausalLM": None, "Qwen3Model": None},
    rows=ROWS,
    build=build,
    describe=describe,
)
