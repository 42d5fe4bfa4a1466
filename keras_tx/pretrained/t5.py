"""T5, 1.0 and 1.1: relative bias shared by all layers, no scaling. See
[Raffel et al., 2020](https://arxiv.org/abs/1910.10683)."""

from keras_tx.attention import MultiHead, ScaledAttention
from keras_tx.blocks import TransformerBlock
from keras_tx.feed_forward import FeedForward
from keras_tx.models import encoder_decoder
from keras_tx.norms import RMSNorm
from keras_tx.positions import RelativePosition
from keras_tx.pretrained.config import activation_name
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.table import LINEAR, LINEAR_FROM_HEADS, Family, Row


def _attention(file, path):
    """The rows of one attention."""
    return (
        Row(f"{file}.q.weight", f"{path}/query/kernel", LINEAR),
        Row(f"{file}.k.weight", f"{path}/key/kernel", LINEAR),
        Row(f"{file}.v.weight", f"{path}/value/kernel", LINEAR),
        Row(f"{file}.o.weight", f"{path}/merge/kernel", LINEAR_FROM_HEADS),
    )


def _stack(side, last, gated):
    """The rows of the encoder or the decoder, whose last branch is `last`."""
    file, path = f"{side}.block.{{i}}.layer.", f"{side}_block_{{i}}/"
    inner = f"{file}{last}.DenseReluDense."
    return (
        *_attention(f"{file}0.SelfAttention", f"{path}attention"),
        Row(f"{file}0.layer_norm.weight", f"{path}attention_norm/scale"),
        Row(f"{file}{last}.layer_norm.weight", f"{path}feed_forward_norm/scale"),
        Row(
            inner + ("wi_1.weight" if gated else "wi.weight"),
            f"{path}feed_forward/widen/kernel",
            LINEAR,
        ),
        Row(inner + "wi_0.weight", f"{path}feed_forward/gate/kernel", LINEAR),
        Row(inner + "wo.weight", f"{path}feed_forward/narrow/kernel", LINEAR),
        Row(
            f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{side}_position/embeddings",
        ),
        Row(f"{side}.final_layer_norm.weight", f"{side}_final_norm/scale"),
    )


def tables(fields, output):
    """Returns the tables: a gated layer names what 1.0 calls `wi` otherwise."""
    gated = fields.get("feed_forward_proj", "relu").startswith("gated-")
    return (
        Row("shared.weight", "embedding/embeddings"),
        Row("lm_head.weight", "embedding/reverse_embeddings", LINEAR),
        *_stack("encoder", 1, gated),
        *_stack("decoder", 2, gated),
        *_attention(
            "decoder.block.{i}.layer.1.EncDecAttention",
            "decoder_block_{i}/cross_attention",
        ),
        Row(
            "decoder.block.{i}.layer.1.layer_norm.weight",
            "decoder_block_{i}/cross_attention_norm/scale",
        ),
    ), ()


def build(config, options):
    """Builds the encoder-decoder of a config."""
    if options.packed:
        raise ValueError("`packed=True` is for encoders and decoders; T5 is both.")
    config.only("is_encoder_decoder", True)
    config.only("is_decoder", False)
    # Said again by `feed_forward_proj`, or of heads that are not loaded.
    config.harmless("is_gated_act", "dense_act_fn", "classifier_dropout", "n_positions")
    num_heads, head_dim = config.integer("num_heads"), config.integer("d_kv")
    dim, hidden_dim = config.integer("d_model"), config.integer("d_ff")
    num_layers = config.layers("num_layers")
    proj = config.get("feed_forward_proj", "relu")
    gated = proj.startswith("gated-")
    # Of "gated-gelu" 1.1 means the approximation.
    name = "gelu_new" if proj == "gated-gelu" else proj.removeprefix("gated-")
    activation = config.activation_of("feed_forward_proj", name)
    dropout = config.rate("dropout_rate", 0.1)
    norm = RMSNorm(epsilon=config.number("layer_norm_epsilon", 1e-6))
    pad_id = options.padding(config, masked=True)
    stated = config.flag("tie_word_embeddings", True)
    scaled = config.flag("scale_decoder_outputs", stated)

    def heads():
        attention = ScaledAttention(1.0, dropout=dropout)
        return MultiHead(num_heads, head_dim, attention=attention, use_bias=False)

    def block(cross=None):
        return TransformerBlock(
            heads(),
            FeedForward(
                hidden_dim, activation, gated=gated, use_bias=False, dropout=dropout
            ),
            cross_attention=cross,
            norm=norm,
            dropout=dropout,
        )

    return encoder_decoder(
        config.integer("vocab_size"),
        dim,
        config.layers("num_decoder_layers", num_layers),
        num_encoder_layers=num_layers,
        encoder_block=lambda index: block(),
        decoder_block=lambda index: block(heads()),
        position=RelativePosition(
            num_heads,
            num_buckets=config.integer("relative_attention_num_buckets", 32),
            max_distance=config.integer("relative_attention_max_distance", 128),
        ),
        pad_id=pad_id,
        # Targets start with the padding token, which must be seen there.
        mask_target=pad_id is None,
        tie_embeddings=config.tied("lm_head.weight", "shared.weight", stated),
        output_scale=dim**-0.5 if scaled else None,
        dropout=dropout,
        name="t5",
        dtype=options.dtype,
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    parts, encoder = Parts(model, "decoder_"), Parts(model, "encoder_")
    position = encoder.get("encoder_position")
    gated = parts.block(0).feed_forward.gated
    name = activation_name(parts.activation, "gelu_new")
    if gated:
        name = {"gelu_new": "gelu", "gelu": "gelu_python"}.get(name, name)
    return {
        **parts.describe_embedding(),
        "is_encoder_decoder": True,
        "decoder_start_token_id": parts.embedding.pad_id,
        "d_model": parts.dim,
        "d_kv": parts.head_dim,
        "d_ff": parts.hidden_dim,
        "num_heads": parts.heads.num_heads,
        "num_layers": encoder.num_blocks,
        "num_decoder_layers": parts.num_blocks,
        "feed_forward_proj": f"gated-{name}" if gated else name,
        "relative_attention_num_buckets": getattr(position, "num_buckets", 32),
        "relative_attention_max_distance": getattr(position, "max_distance", 128),
        "dropout_rate": parts.block(0).dropout,
        "layer_norm_epsilon": parts.epsilon,
        "scale_decoder_outputs": parts.get("output_scale") is not None,
    }


FAMILY = Family(
    name="t5",
    architectures={
        "T5ForConditionalGeneration": None,
        "T5WithLMHeadModel": None,
    },
    rows=(),
    tables=tables,
    tied={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    # A table that old files have and no code reads.
    buffers=(
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
    build=build,
    describe=describe,
)
