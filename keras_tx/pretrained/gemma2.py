"""Gemma 2: four norms a block, caps on scores and logits, windows in turn. See
[Gemma Team, 2024](https://arxiv.org/abs/2408.00118)."""

import dataclasses

from keras_tx.pretrained import llama
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.recipes import KINDS, build_decoder, describe_windows
from keras_tx.pretrained.table import PlusOne, Row

NORMS = {
    "layers.{i}.input_layernorm": "block_{i}/attention_norm",
    # Here it really comes after attention; Llama calls the next norm that.
    "layers.{i}.post_attention_layernorm": "block_{i}/attention_output_norm",
    "layers.{i}.pre_feedforward_layernorm": "block_{i}/feed_forward_norm",
    "layers.{i}.post_feedforward_layernorm": "block_{i}/feed_forward_output_norm",
    "norm": "final_norm",
}
# Their scales are stored as the distance from 1.
ROWS = (
    *llama.BODY,
    *(
        Row(f"{file}.weight", f"{path}/scale", PlusOne())
        for file, path in NORMS.items()
    ),
)


def build(config, options):
    """Builds the decoder of a config."""
    config.only("use_bidirectional_attention", False)
    config.harmless("hidden_act")  # the reference reads `hidden_activation`
    window = config.integer("sliding_window", 4096)
    config.only("sliding_window_size", window)
    num_layers = config.layers("num_hidden_layers")
    # The first layer has a window, the second has none, and so on.
    kinds = config.get("layer_types") or [
        KINDS[index % 2 == 0] for index in range(num_layers)
    ]
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        raise config.wrong("layer_types", kinds, f"{num_layers} of {KINDS}")
    return build_decoder(
        config,
        options,
        use_bias=config.flag("attention_bias", False),
        activation=config.activation("hidden_activation", "gelu_pytorch_tanh"),
        windows=[window if kind == KINDS[1] else None for kind in kinds],
        scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        soft_cap=_cap(config, "attn_logit_softcapping", 50.0),
        head_dim=256,
        norm_position="sandwich",
        tied=True,
        embedding_scale="sqrt",
        logit_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


def _cap(config, name, default):
    """A cap whose absence is the default's, and whose null is no cap."""
    if name in config.fields:
        return config.number(name, None)
    return default


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    fields = llama.describe(model)
    fields.pop("mlp_bias")
    attention = Parts(model).heads.attention
    windows = describe_windows(model)
    scale = attention.scale or fields["head_dim"] ** -0.5
    return {
        **fields,
        "hidden_activation": fields.pop("hidden_act"),
        "query_pre_attn_scalar": round(scale**-2),
        "attn_logit_softcapping": attention.soft_cap,
        "final_logit_softcapping": Parts(model).embedding.soft_cap,
        "sliding_window": windows["sliding_window"]
        or fields["max_position_embeddings"],
        "layer_types": windows["layer_types"],
    }


FAMILY = dataclasses.replace(
    llama.FAMILY,
    name="gemma2",
    architectures={"Gemma2ForCausalLM": None, "Gemma2Model": None},
    rows=ROWS,
    build=build,
    describe=describe,
)
