"""GPT-2: pre layer norm, learned positions, biases. See
[Radford et al., 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)."""

import keras

from keras_tx.attention import MultiHead, ScaledAttention
from keras_tx.blocks import TransformerBlock
from keras_tx.feed_forward import FeedForward
from keras_tx.models import decoder
from keras_tx.pretrained.config import activation_name
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.table import (
    FLAT,
    LINEAR,
    Family,
    Joined,
    Matrix,
    Row,
    dense,
    layer_norm,
)

# Its "Conv1D" has inputs first, and queries, keys and values side by side.
PLAIN = Matrix(transposed=False)
PLAIN_FROM_HEADS = Matrix(inputs=2, transposed=False)
QKV = ("query", "key", "value")
ROWS = (
    Row("wte.weight", "embedding/embeddings"),
    Row("wpe.weight", "position/embeddings"),
    *layer_norm("h.{i}.ln_1", "block_{i}/attention_norm"),
    Row(
        "h.{i}.attn.c_attn.weight",
        tuple(f"block_{{i}}/attention/{name}/kernel" for name in QKV),
        Joined(PLAIN),
    ),
    Row(
        "h.{i}.attn.c_attn.bias",
        tuple(f"block_{{i}}/attention/{name}/bias" for name in QKV),
        Joined(FLAT),
    ),
    *dense("h.{i}.attn.c_proj", "block_{i}/attention/merge", PLAIN_FROM_HEADS),
    *layer_norm("h.{i}.ln_2", "block_{i}/feed_forward_norm"),
    *dense("h.{i}.mlp.c_fc", "block_{i}/feed_forward/widen", PLAIN),
    *dense("h.{i}.mlp.c_proj", "block_{i}/feed_forward/narrow", PLAIN),
    *layer_norm("ln_f", "final_norm"),
)


def build(config, options):
    """Builds the decoder of a config."""
    config.only("add_cross_attention", False)
    config.only("scale_attn_by_inverse_layer_idx", False)
    config.harmless("n_ctx", "reorder_and_upcast_attn")
    config.harmless(*(f"summary_{what}" for what in SUMMARY))
    dim, num_heads = config.integer("n_embd"), config.integer("n_head")
    hidden_dim = config.integer("n_inner", 4 * dim)
    activation = config.activation("activation_function", "gelu_new")
    scale = None if config.flag("scale_attn_weights", True) else 1.0
    attention_dropout = config.rate("attn_pdrop", 0.1)
    dropout = config.rate("resid_pdrop", 0.1)
    norm = keras.layers.LayerNormalization(
        epsilon=config.number("layer_norm_epsilon", 1e-5)
    )

    def block(index):
        return TransformerBlock(
            MultiHead(
                num_heads, attention=ScaledAttention(scale, dropout=attention_dropout)
            ),
            FeedForward(hidden_dim, activation),
            norm=norm,
            dropout=dropout,
        )

    return decoder(
        config.integer("vocab_size"),
        dim,
        config.layers("n_layer"),
        block=block,
        position="learned",
        max_length=config.integer("n_positions"),
        pad_id=options.padding(config, masked=False),
        tie_embeddings=config.flag("tie_word_embeddings", True),
        dropout=config.rate("embd_pdrop", 0.1),
        packed=options.packed,
        name="gpt2",
        dtype=options.dtype,
    )


# Fields of a head that is not loaded.
SUMMARY = ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    parts = Parts(model)
    attention = parts.heads.attention
    return {
        **parts.describe_embedding(),
        "n_embd": parts.dim,
        "n_head": parts.heads.num_heads,
        "n_layer": parts.num_blocks,
        "n_inner": parts.hidden_dim,
        "n_positions": parts.longest,
        "activation_function": activation_name(parts.activation, "gelu_new"),
        "scale_attn_weights": attention.scale != 1.0,
        "attn_pdrop": attention.dropout,
        "resid_pdrop": parts.block(0).dropout,
        "embd_pdrop": parts.dropout("embedding_dropout"),
        "layer_norm_epsilon": parts.epsilon,
    }


FAMILY = Family(
    name="gpt2",
    architectures={"GPT2LMHeadModel": None, "GPT2Model": None},
    prefix="transformer.",
    rows=ROWS,
    heads=(Row("lm_head.weight", "embedding/reverse_embeddings", LINEAR),),
    tied={"lm_head.weight": "wte.weight"},
    buffers=(r"h\.\d+\.attn\.(bias|masked_bias)",),
    build=build,
    describe=describe,
)
