"""DistilBERT: BERT of half the layers, without token types. See
[Sanh et al., 2019](https://arxiv.org/abs/1910.01108)."""

from keras_tx.pretrained.bert import FAMILY as BERT
from keras_tx.pretrained.config import activation_name
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.recipes import build_encoder, describe_encoder
from keras_tx.pretrained.table import (
    LINEAR,
    LINEAR_FROM_HEADS,
    Family,
    Row,
    dense,
    layer_norm,
)

ATTENTION = "transformer.layer.{i}.attention."
ROWS = (
    Row("embeddings.word_embeddings.weight", "embedding/embeddings"),
    Row("embeddings.position_embeddings.weight", "position/embeddings"),
    *layer_norm("embeddings.LayerNorm", "embedding_norm"),
    *dense(ATTENTION + "q_lin", "block_{i}/attention/query"),
    *dense(ATTENTION + "k_lin", "block_{i}/attention/key"),
    *dense(ATTENTION + "v_lin", "block_{i}/attention/value"),
    *dense(ATTENTION + "out_lin", "block_{i}/attention/merge", LINEAR_FROM_HEADS),
    *layer_norm("transformer.layer.{i}.sa_layer_norm", "block_{i}/attention_norm"),
    *dense("transformer.layer.{i}.ffn.lin1", "block_{i}/feed_forward/widen"),
    *dense("transformer.layer.{i}.ffn.lin2", "block_{i}/feed_forward/narrow"),
    *layer_norm(
        "transformer.layer.{i}.output_layer_norm", "block_{i}/feed_forward_norm"
    ),
)
HEADS = (
    *dense("vocab_transform", "transform"),
    *layer_norm("vocab_layer_norm", "transform_norm"),
    Row("vocab_projector.weight", "embedding/reverse_embeddings", LINEAR),
    Row("vocab_projector.bias", "embedding/bias"),
    *dense("pre_classifier", "pooler"),
    *dense("classifier", "classes"),
)


def build(config, options):
    """Builds the encoder of a config."""
    # The sines are in the table of positions; the flag says how it began.
    config.harmless("sinusoidal_pos_embds", "tie_weights_", "qa_dropout")
    return build_encoder(
        config,
        options,
        dim=config.integer("dim"),
        num_layers=config.layers("n_layers"),
        num_heads=config.integer("n_heads"),
        hidden_dim=config.integer("hidden_dim"),
        activation=config.activation("activation", "gelu"),
        epsilon=1e-12,
        dropout=config.rate("dropout", 0.1),
        attention_dropout=config.rate("attention_dropout", 0.1),
        pooled_dropout=config.rate("seq_classif_dropout", 0.2),
        pooler="relu",
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    parts = Parts(model)
    return {
        **describe_encoder(parts),
        "dim": parts.dim,
        "n_layers": parts.num_blocks,
        "n_heads": parts.heads.num_heads,
        "hidden_dim": parts.hidden_dim,
        "activation": activation_name(parts.activation),
        "dropout": parts.block(0).dropout,
        "attention_dropout": parts.heads.attention.dropout,
        "seq_classif_dropout": parts.dropout("pooled_dropout"),
    }


FAMILY = Family(
    name="distilbert",
    architectures={
        "DistilBertModel": "features",
        "DistilBertForMaskedLM": "tokens",
        "DistilBertForSequenceClassification": "classes",
    },
    prefix="distilbert.",
    rows=ROWS,
    heads=HEADS,
    parts={
        "tokens": ("vocab_",),
        "classes": ("pre_classifier.", "classifier."),
        "others": ("qa_outputs.",),
    },
    tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    buffers=BERT.buffers,
    renamed=BERT.renamed,
    build=build,
    describe=describe,
)
