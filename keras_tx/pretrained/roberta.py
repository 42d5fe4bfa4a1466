"""RoBERTa: BERT whose positions start behind the padding token's. See
[Liu et al., 2019](https://arxiv.org/abs/1907.11692)."""

import dataclasses

from keras_tx.pretrained import bert
from keras_tx.pretrained.table import LINEAR, Row, SkipRows, dense, layer_norm

HEADS = (
    *dense("lm_head.dense", "transform"),
    *layer_norm("lm_head.layer_norm", "transform_norm"),
    Row("lm_head.decoder.weight", "embedding/reverse_embeddings", LINEAR),
    Row("lm_head.bias", "embedding/bias"),
    *dense("classifier.out_proj", "classes"),
)
# The classifier has a pooler of its own, where BERT uses the body's.
CLASSES = dense("classifier.dense", "pooler")


def tables(fields, output):
    """Returns the tables, which depend on the padding token and the head."""
    position = dataclasses.replace(bert.POSITIONS, form=SkipRows(skipped(fields)))
    if output == "classes":
        return (*bert.BODY, position), (*HEADS, *CLASSES)
    return (*bert.BODY, position, *bert.POOLER), HEADS


def skipped(fields):
    """Returns how many rows of positions come before the first token's."""
    padding = fields.get("pad_token_id")
    return (1 if padding is None else padding) + 1


def build(config, options):
    """Builds the encoder of a config."""
    longest = config.integer("max_position_embeddings") - skipped(config.fields)
    # Its head has the exact GELU whatever `hidden_act` says.
    return bert.build(config, options, max_length=longest, transform="gelu")


def describe(model):
    """Returns the fields that `build` reads, from a model."""
    fields = bert.describe(model)
    if fields["pad_token_id"] is None:
        raise ValueError("positions are counted from a padding token, and it has none")
    fields["max_position_embeddings"] += skipped(fields)
    return fields


FAMILY = dataclasses.replace(
    bert.FAMILY,
    name="roberta",
    architectures={
        "RobertaModel": "features",
        "RobertaForMaskedLM": "tokens",
        "RobertaForSequenceClassification": "classes",
    },
    prefix="roberta.",
    heads=HEADS,
    parts={
        "tokens": ("lm_head.",),
        "classes": ("classifier.",),
        "pooled": ("pooler.",),
        "others": ("qa_outputs.",),
    },
    tied={
        "lm_head.decoder.weight": "embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    tables=tables,
    build=build,
    describe=describe,
)
