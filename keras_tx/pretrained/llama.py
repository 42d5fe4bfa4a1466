"""Llama 2 and 3, SmolLM2, and what Mistral, Qwen and Gemma share with them.

Pre RMS norm, grouped heads that rotate, gated SiLU. See
[Touvron et al., 2023](https://arxiv.org/abs/2307.09288).
"""

from keras_tx.attention import MultiHead, ScaledAttention
from keras_tx.blocks import TransformerBlock
from keras_tx.feed_forward import FeedForward
from keras_tx.models import decoder
from keras_tx.norms import RMSNorm
from keras_tx.pretrained.config import activation_name, describe_rotary, rotary
from keras_tx.pretrained.parts import Parts
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


def build_decoder(
    config,
    options,
    *,
    use_bias,
    activation,
    feed_forward_bias=False,
    query_key_norm=False,
    windows=None,
    scale=None,
    soft_cap=None,
    head_dim=None,
    epsilon=1e-6,
    norm_position="pre",
    tied=False,
    **model,
):
    """Builds a decoder with rotary positions, RMS norms and gates.

    Args:
        config: The `Config`.
        options: The `Options`.
        use_bias: As in `MultiHead`.
        activation: As in `FeedForward`.
        feed_forward_bias: Whether the feed-forward layers have biases.
        query_key_norm: Whether heads are normalized before they rotate.
        windows: Optional width or `None` of each layer.
        scale: As in `ScaledAttention`.
        soft_cap: As in `ScaledAttention`.
        head_dim: Size of a head where the config states none.
        epsilon: Epsilon of the norms where the config states none.
        norm_position: As in `TransformerBlock`.
        tied: Whether embeddings are tied where the config states nothing.
        **model: Further arguments of `decoder`.
    """
    num_layers = config.layers("num_hidden_layers")
    num_heads = config.integer("num_attention_heads")
    num_kv_heads = config.integer("num_key_value_heads", num_heads)
    head_dim = config.integer("head_dim", head_dim)
    hidden_dim = config.integer("intermediate_size")
    dropout = config.rate("attention_dropout")
    position = rotary(config)
    norm = RMSNorm(epsilon=config.number("rms_norm_eps", epsilon))

    def block(index):
        return TransformerBlock(
            MultiHead(
                num_heads,
                head_dim,
                num_kv_heads=num_kv_heads,
                attention=ScaledAttention(
                    scale,
                    window=None if windows is None else windows[index],
                    soft_cap=soft_cap,
                    dropout=dropout,
                ),
                query_key_norm=norm if query_key_norm else None,
                use_bias=use_bias,
            ),
            FeedForward(hidden_dim, activation, gated=True, use_bias=feed_forward_bias),
            norm=norm,
            norm_position=norm_position,
        )

    return decoder(
        config.integer("vocab_size"),
        config.integer("hidden_size"),
        num_layers,
        block=block,
        position=position,
        pad_id=options.padding(config, masked=False),
        tie_embeddings=config.flag("tie_word_embeddings", tied),
        packed=options.packed,
        name=config.fields["model_type"],
        dtype=options.dtype,
        **model,
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
