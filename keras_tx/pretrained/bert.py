"""BERT: post layer norm, learned positions, token types. See
[Devlin et al., 2019](https://arxiv.org/abs/1810.04805)."""

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

SELF = "encoder.layer.{i}.attention.self."
OUTPUT = "encoder.layer.{i}.attention.output."
BODY = (
    Row("embeddings.word_embeddings.weight", "embedding/embeddings"),
    Row("embeddings.token_type_embeddings.weight", "segment/embeddings"),
    *layer_norm("embeddings.LayerNorm", "embedding_norm"),
    *dense(SELF + "query", "block_{i}/attention/query"),
    *dense(SELF + "key", "block_{i}/attention/key"),
    *dense(SELF + "value", "block_{i}/attention/value"),
    *dense(OUTPUT + "dense", "block_{i}/attention/merge", LINEAR_FROM_HEADS),
    *layer_norm(OUTPUT + "LayerNorm", "block_{i}/attention_norm"),
    *dense("encoder.layer.{i}.intermediate.dense", "block_{i}/feed_forward/widen"),
    *dense("encoder.layer.{i}.output.dense", "block_{i}/feed_forward/narrow"),
    *layer_norm("encoder.layer.{i}.output.LayerNorm", "block_{i}/feed_forward_norm"),
)
POSITIONS = Row("embeddings.position_embeddings.weight", "position/embeddings")
POOLER = dense("pooler.dense", "pooler")
HEADS = (
    *dense("cls.predictions.transform.dense", "transform"),
    *layer_norm("cls.predictions.transform.LayerNorm", "transform_norm"),
    Row("cls.predictions.decoder.weight", "embedding/reverse_embeddings", LINEAR),
    Row("cls.predictions.bias", "embedding/bias"),
    *dense("classifier", "classes"),
)
# Fields of some configs that the published code never reads.
UNREAD = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")


def build(config, options, **model):
    """Builds the encoder of a config; RoBERTa passes where it differs."""
    config.only("is_decoder", False)
    config.only("add_cross_attention", False)
    config.only("position_embedding_type", "absolute")
    config.harmless(*(f"pooler_{what}" for what in UNREAD))
    return build_encoder(
        config,
        options,
        dim=config.integer("hidden_size"),
        num_layers=config.layers("num_hidden_layers"),
        num_heads=config.integer("num_attention_heads"),
        hidden_dim=config.integer("intermediate_size"),
        activation=config.activation("hidden_act", "gelu"),
        epsilon=config.number("layer_norm_eps", 1e-12),
        dropout=config.rate("hidden_dropout_prob", 0.1),
        attention_dropout=config.rate("attention_probs_dropout_prob", 0.1),
        pooled_dropout=config.get("classifier_dropout"),
        num_segments=config.integer("type_vocab_size", 2),
        **model,
    )


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    parts = Parts(model)
    return {
        **describe_encoder(parts),
        "hidden_size": parts.dim,
        "num_hidden_layers": parts.num_blocks,
        "num_attention_heads": parts.heads.num_heads,
        "intermediate_size": parts.hidden_dim,
        "hidden_act": activation_name(parts.activation),
        "layer_norm_eps": parts.epsilon,
        "hidden_dropout_prob": parts.block(0).dropout,
        "attention_probs_dropout_prob": parts.heads.attention.dropout,
        "classifier_dropout": parts.dropout("pooled_dropout"),
        "type_vocab_size": getattr(parts.get("segment"), "num_segments", 1),
    }


FAMILY = Family(
    name="bert",
    architectures={
        "BertModel": "features",
        "BertForMaskedLM": "tokens",
        "BertForPreTraining": "tokens",
        "BertForSequenceClassification": "classes",
    },
    prefix="bert.",
    rows=(*BODY, POSITIONS, *POOLER),
    heads=HEADS,
    parts={
        "tokens": ("cls.predictions.",),
        "classes": ("pooler.", "classifier."),
        "pooled": ("pooler.",),
        "others": ("cls.seq_relationship.", "qa_outputs."),
    },
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=(r"embeddings\.(position_ids|token_type_ids)",),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    build=build,
    describe=describe,
)
