"""DistilBERT: BERT of half the layers, without token types. See
[Sanh et al., 2019](https://arxiv.org/abs/1910.01108)."""

from keras_tx.pretrained.bert import FAMILY as BERT
from keras_tx.pretrained.bert import build_encoder, describe_encoder
from keras_tx.pretrained.config import activation_name
from keras_tx.pretrained.parts import Parts
from keras_tx.pretrained.table import FLAT, LINEAR, LINEAR_FROM_HEADS, Family, Row

LAYER = "transformer.layer.{i}."
ROWS = (
    Row("embeddings.word_embeddings.weight", "embedding/embeddings"),
    Row("embeddings.position_embeddings.weight", "position/embeddings"),
    Row("embeddings.LayerNorm.weight", "embedding_norm/gamma"),
    Row("embeddings.LayerNorm.bias", "embedding_norm/beta"),
    *(
        row
        for letter, name in (("q", "query"), ("k", "key"), ("v", "value"))
        for row in (
            Row(
                LAYER + f"attention.{letter}_lin.weight",
                f"block_{{i}}/attention/{name}/kernel",
                LINEAR,
            ),
            Row(
                LAYER + f"attention.{letter}_lin.bias",
                f"block_{{i}}/attention/{name}/bias",
                FLAT,
            ),
        )
    ),
    Row(
        LAYER + "attention.out_lin.weight",
        "block_{i}/attention/merge/kernel",
        LINEAR_FROM_HEADS,
    ),
    Row(LAYER + "attention.out_lin.bias", "block_{i}/attention/merge/bias"),
    Row(LAYER + "sa_layer_norm.weight", "block_{i}/attention_norm/gamma"),
    Row(LAYER + "sa_layer_norm.bias", "block_{i}/attention_norm/beta"),
    Row(LAYER + "ffn.lin1.weight", "block_{i}/feed_forward/widen/kernel", LINEAR),
    Row(LAYER + "ffn.lin1.bias", "block_{i}/feed_forward/widen/bias"),
    Row(LAYER + "ffn.lin2.weight", "block_{i}/feed_forward/narrow/kernel", LINEAR),
    Row(LAYER + "ffn.lin2.bias", "block_{i}/feed_forward/narrow/bias"),
    Row(LAYER + "output_layer_norm.weight", "block_{i}/feed_forward_norm/gamma"),
    Row(LAYER + "output_layer_norm.bias", "block_{i}/feed_forward_norm/beta"),
)
HEADS = (
    Row("vocab_transform.weight", "transform/kernel", LINEAR),
    Row("vocab_transform.bias", "transform/bias"),
    Row("vocab_layer_norm.weight", "transform_norm/gamma"),
    Row("vocab_layer_norm.bias", "transform_norm/beta"),
    Row("vocab_projector.weight", "embedding/reverse_embeddings", LINEAR),
    Row("vocab_projector.bias", "embedding/bias"),
    Row("pre_classifier.weight", "pooler/kernel", LINEAR),
    Row("pre_classifier.bias", "pooler/bias"),
    Row("classifier.weight", "classes/kernel", LINEAR),
    Row("classifier.bias", "classes/bias"),
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
