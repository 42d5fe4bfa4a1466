"""Llama 2 and 3, SmolLM2, and what Mistral, Qwen and Gemma share with them.

Pre RMS norm, grouped heads that rotate, gated SiLU. See
[Touvron et al., 2023](https://arxiv.org/abs/2307.09288).
"""

from keras_tx.pretrained.config import activation_name, describe_rotary
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.recipes import build_decoder
from keras_tx.pretrained.table import LINEAR, LINEAR_FROM_HEADS, Family, Row, dense

ATTENTION = "layers.{i}.self_attn."
# Without the norms, whose names differ between relatives. Biases are there
# where a model has them.
BODY = (
    Row("embed_tokens.weight", "embedding/embeddings"),
    *dense(ATTENTION + "q_proj", "block_{i}/attention/query"),
    *dense(ATTENTION + "k_proj", "block_{i}/attention/key"),
    *dense(ATTENTION + "v_proj", "block_{i}/attention/value"),
    *dense(ATTENTION + "o_proj", "block_{i}/attention/merge", LINEAR_FROM_HEADS),
    *dense("layers.{i}.mlp.gate_proj", "block_{i}/feed_forward/gate"),
    *dense("layers.{i}.mlp.up_proj", "block_{i}/feed_forward/widen"),
    *dense("layers.{i}.mlp.down_proj", "block_{i}/feed_forward/narrow"),
)
ROWS = (
    *BODY,
    Row("layers.{i}.input_layernorm.weight", "block_{i}/attention_norm/scale"),
    Row(
        "layers.{i}.post_attention_layernorm.weight",
        "block_{i}/feed_forward_norm/scale",
    ),
    Row("norm.weight", "final_norm/scale"),
)
HEADS = (Row("lm_head.weight", "embedding/reverse_embeddings", LINEAR),)
TIED = {"lm_head.weight": "embed_tokens.weight"}
BUFFERS = (r"(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",)


def build(config, options, *, use_bias=None, feed_forward_bias=None, **block):
    """Builds the decoder of a config; relatives pass where they differ."""
    config.only("rope_interleaved", False)
    if use_bias is None:
        use_bias = config.flag("attention_bias", False)
    if feed_forward_bias is None:
        feed_forward_bias = config.flag("mlp_bias", False)
    return build_decoder(
        config,
        options,
        use_bias=use_bias,
        feed_forward_bias=feed_forward_bias,
        activation=config.activation("hidden_act", "silu"),
        **block,
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    parts = Parts(model)
    heads = parts.heads
    if parts.dim % heads.num_heads:
        raise ValueError(
            f"`transformers` wants {parts.dim} features to divide into "
            f"{heads.num_heads} heads"
        )
    return {
        **parts.describe_embedding(),
        "hidden_size": parts.dim,
        "num_hidden_layers": parts.num_blocks,
        "num_attention_heads": heads.num_heads,
        "num_key_value_heads": heads.num_kv_heads,
        "head_dim": parts.head_dim,
        "intermediate_size": parts.hidden_dim,
        "hidden_act": activation_name(parts.activation),
        "attention_bias": heads.use_bias is True,
        "mlp_bias": parts.block(0).feed_forward.use_bias,
        "attention_dropout": heads.attention.dropout,
        "rms_norm_eps": parts.epsilon,
        "max_position_embeddings": parts.longest,
        **describe_rotary(heads.position, parts.head_dim),
    }


FAMILY = Family(
    name="llama",
    architectures={"LlamaForCausalLM": None, "LlamaModel": None},
    prefix="model.",
    rows=ROWS,
    heads=HEADS,
    tied=TIED,
    buffers=BUFFERS,
    build=build,
    describe=describe,
)
