"""Mistakes: each a `ValueError` with what arrived, what was expected, the remedy."""

import re

import keras
import numpy as np
import pytest
from numeric import normal, to_numpy

import keras_tx as tx

X = normal(2, 5, 8)  # (B, T, D)
CONTEXT = normal(2, 7, 6)  # (B, S, D')
TOKENS = np.array([[1, 2, 3, 4, 0], [5, 6, 7, 0, 0]])


def ones(*shape, dtype="bool"):
    return np.ones(shape, dtype)


def plainly(error):
    """Returns the message without the frame that Keras puts around it."""
    return re.sub(r"\x1b\[\d*m", "", str(error.value))


def built(layer, x=X, *args):
    """Returns a layer that has been called once."""
    layer(x, *args)
    return layer


# ----------------------------------------------------------------------------
# Making layers
#
# Each row: what was done wrong, and parts of the message.
# ----------------------------------------------------------------------------

POSITIVE_INTEGERS = {
    "num_heads": lambda n: tx.MultiHead(n),
    "head_dim": lambda n: tx.MultiHead(2, n),
    "num_kv_heads": lambda n: tx.MultiHead(4, num_kv_heads=n),
    "window": lambda n: tx.ScaledAttention(window=n),
    "hidden_dim": lambda n: tx.FeedForward(n),
    "vocab_size": lambda n: tx.TokenEmbedding(n, 4),
    "dim": lambda n: tx.TokenEmbedding(9, n),
    "num_segments": lambda n: tx.LearnedSegment(n),
    "max_length": lambda n: tx.LearnedPosition(n),
    "rotary_dim": lambda n: tx.RotaryPosition(rotary_dim=n),
    "num_buckets": lambda n: tx.RelativePosition(2, num_buckets=n),
    "max_distance": lambda n: tx.RelativePosition(2, max_distance=n),
    "original_max_length": lambda n: tx.YarnScaling(2.0, n),
    "num_layers": lambda n: tx.decoder(9, 8, n, 2),
    "num_heads of a bias": lambda n: tx.AlibiPosition(n),
    "num_heads of a model": lambda n: tx.encoder(9, 8, 1, n),
    "vocab_size of a model": lambda n: tx.decoder(n, 8, 1, 2),
    "dim of a model": lambda n: tx.decoder(9, n, 1, 2),
    "num_encoder_layers": lambda n: tx.encoder_decoder(
        9, 8, 1, 2, num_encoder_layers=n
    ),
    "num_classes": lambda n: tx.encoder(9, 8, 1, 2, output="classes", num_classes=n),
}


@pytest.mark.parametrize("wrong", [0, -3, 2.0, True, "4"], ids=repr)
@pytest.mark.parametrize("name", POSITIVE_INTEGERS)
def test_a_size_is_a_positive_integer(name, wrong):
    with pytest.raises(ValueError) as error:
        POSITIVE_INTEGERS[name](wrong)
    message = plainly(error)
    assert "positive integer" in message
    assert repr(wrong) in message


POSITIVE_NUMBERS = {
    "scale": lambda x: tx.ScaledAttention(x),
    "soft_cap": lambda x: tx.ScaledAttention(soft_cap=x),
    "soft_cap of logits": lambda x: tx.TokenEmbedding(9, 4, soft_cap=x),
    "max_wavelength": lambda x: tx.SinusoidalPosition(x),
    "max_wavelength of rotary": lambda x: tx.RotaryPosition(x),
    "factor": lambda x: tx.LinearScaling(x),
    "factor of NTK": lambda x: tx.NtkScaling(x),
    "factor of YaRN": lambda x: tx.YarnScaling(x, 4096),
    "factor of Llama 3": lambda x: tx.Llama3Scaling(x),
    "init_stddev": lambda x: tx.decoder(9, 8, 1, 2, init_stddev=x),
    "embedding_scale": lambda x: tx.decoder(9, 8, 1, 2, embedding_scale=x),
    "logit_cap": lambda x: tx.decoder(9, 8, 1, 2, logit_cap=x),
}


@pytest.mark.parametrize("wrong", [0.0, -1.5, float("nan"), "1", True], ids=repr)
@pytest.mark.parametrize("name", POSITIVE_NUMBERS)
def test_a_number_is_finite_and_above_0(name, wrong):
    with pytest.raises(ValueError) as error:
        POSITIVE_NUMBERS[name](wrong)
    message = plainly(error)
    assert "above 0" in message
    assert repr(wrong) in message


RATES = {
    "attention": lambda x: tx.ScaledAttention(dropout=x),
    "feed-forward": lambda x: tx.FeedForward(8, dropout=x),
    "block": lambda x: tx.TransformerBlock(2, 8, dropout=x),
    "decoder": lambda x: tx.decoder(9, 8, 1, 2, dropout=x),
    "encoder": lambda x: tx.encoder(9, 8, 1, 2, dropout=x),
    "encoder-decoder": lambda x: tx.encoder_decoder(9, 8, 1, 2, dropout=x),
}


@pytest.mark.parametrize("wrong", [1.0, 1, -0.1, "0.1", None, True], ids=repr)
@pytest.mark.parametrize("name", RATES)
def test_a_dropout_is_a_share(name, wrong):
    with pytest.raises(ValueError) as error:
        RATES[name](wrong)
    message = plainly(error)
    assert "from 0 up to but not including 1" in message
    assert f"dropout={wrong!r}" in message


SWITCHES = {
    "causal": lambda x: tx.MultiHead(2, causal=x),
    "causal attention": lambda x: tx.ScaledAttention(causal=x),
    "causal block": lambda x: tx.TransformerBlock(2, 8, causal=x),
    "gated": lambda x: tx.FeedForward(8, gated=x),
    "use_bias": lambda x: tx.FeedForward(8, use_bias=x),
    "tie_weights": lambda x: tx.TokenEmbedding(9, 4, tie_weights=x),
    "bidirectional": lambda x: tx.RelativePosition(2, bidirectional=x),
    "truncate": lambda x: tx.YarnScaling(2.0, 4096, truncate=x),
    "packed": lambda x: tx.decoder(9, 8, 1, 2, packed=x),
    "token_types": lambda x: tx.encoder(9, 8, 1, 2, num_segments=2, token_types=x),
}


@pytest.mark.parametrize("wrong", ["yes", 1, None], ids=repr)
@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_true_or_false(name, wrong):
    with pytest.raises(ValueError, match="must be True or False") as error:
        SWITCHES[name](wrong)
    assert repr(wrong) in plainly(error)


CHOICES = {
    "norm_position": lambda x: tx.TransformerBlock(2, 8, norm_position=x),
    "residual": lambda x: tx.TransformerBlock(2, 8, residual=x),
    "norm": lambda x: tx.TransformerBlock(2, 8, norm=x),
    "query_key_norm": lambda x: tx.MultiHead(2, query_key_norm=x),
    "use_bias": lambda x: tx.MultiHead(2, use_bias=x),
    "implementation": lambda x: tx.ScaledAttention(implementation=x),
    "layout": lambda x: tx.SinusoidalPosition(layout=x),
    "layout of rotary": lambda x: tx.RotaryPosition(layout=x),
    "scaling": lambda x: tx.RotaryPosition(scaling=x),
    "activation": lambda x: tx.FeedForward(8, x),
    "activation of a model": lambda x: tx.decoder(9, 8, 1, 2, activation=x),
    "position of a model": lambda x: tx.decoder(9, 8, 1, 2, position=x),
    "position of heads": lambda x: tx.MultiHead(2, position=x),
    "attention of heads": lambda x: tx.MultiHead(2, attention=x),
    "attention": lambda x: tx.TransformerBlock(x, 8),
    "cross_attention": lambda x: tx.TransformerBlock(2, 8, cross_attention=x),
    "feed_forward": lambda x: tx.TransformerBlock(2, x),
    "output": lambda x: tx.encoder(9, 8, 1, 2, output=x),
    "pooling": lambda x: tx.encoder(9, 8, 1, 2, pooling=x),
    "final_norm": lambda x: tx.decoder(9, 8, 1, 2, final_norm=x),
    "embedding_norm": lambda x: tx.decoder(9, 8, 1, 2, embedding_norm=x),
    "block": lambda x: tx.decoder(9, 8, 1, block=x),
    "what a block function returns": lambda x: tx.decoder(9, 8, 1, block=lambda i: x),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_unknown_option_is_named_beside_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        CHOICES[name]("swish-glu")
    message = plainly(error)
    assert "'swish-glu'" in message
    assert re.search("must|is given as|A norm is", message)


WRONG_TO_MAKE = {
    "heads that do not divide": (
        lambda: tx.MultiHead(4, num_kv_heads=3),
        ["multiple of `num_kv_heads`", "num_heads=4, num_kv_heads=3"],
    ),
    "features that do not divide": (
        lambda: tx.MultiHead(3)(X),
        ["8 features do not divide into 3 heads", "state `head_dim`", "(2, 5, 8)"],
    ),
    "features of a model that do not divide": (
        lambda: tx.decoder(9, 21, 1, 8),
        ["21 features do not divide into 8 heads"],
    ),
    "position of embeddings in heads": (
        lambda: tx.MultiHead(2, position=tx.SinusoidalPosition()),
        ["RotaryPosition", "before the block"],
    ),
    "position for other heads": (
        lambda: tx.MultiHead(2, position=tx.AlibiPosition(4)),
        ["4 heads", "has 2", "Make both the same"],
    ),
    "odd rotary size": (
        lambda: tx.RotaryPosition(rotary_dim=3),
        ["must be even", "rotary_dim=3"],
    ),
    "odd head size": (
        lambda: tx.MultiHead(2, 3, position=tx.RotaryPosition())(X),
        ["must be even", "Choose an even `head_dim`"],
    ),
    "rotary size beyond the head": (
        lambda: tx.MultiHead(2, 4, position=tx.RotaryPosition(rotary_dim=6))(X),
        ["at most the head size", "rotary_dim=6"],
    ),
    "too few pairs for NTK": (
        lambda: tx.RotaryPosition(scaling=tx.NtkScaling(2.0), rotary_dim=2)(
            normal(1, 2, 1, 4)
        ),
        ["at least two pairs", "rotary_dim=2"],
    ),
    "crossed factors": (
        lambda: tx.Llama3Scaling(8.0, low_frequency_factor=4, high_frequency_factor=1),
        ["must lie below", "low_frequency_factor=4"],
    ),
    "odd buckets": (
        lambda: tx.RelativePosition(2, num_buckets=7),
        ["even number", "num_buckets=7"],
    ),
    "too short a distance": (
        lambda: tx.RelativePosition(2, num_buckets=32, max_distance=8),
        ["must exceed", "max_distance=8"],
    ),
    "padding out of range": (
        lambda: tx.TokenEmbedding(9, 4, pad_id=9),
        ["0 to 8", "pad_id=9"],
    ),
    "negative padding": (
        lambda: tx.decoder(9, 8, 1, 2, pad_id=-1),
        ["0 to 8", "pad_id=-1"],
    ),
    "padding that is no integer": (
        lambda: tx.TokenEmbedding(9, 4, pad_id=0.0),
        ["must be an integer", "pad_id=0.0"],
    ),
    "seed that is no integer": (
        lambda: tx.TransformerBlock(2, 8, seed=1.5),
        ["must be an integer", "seed=1.5"],
    ),
    "no attention": (lambda: tx.TransformerBlock(None, 8), ["`MultiHead`", "None"]),
    "no feed-forward": (lambda: tx.TransformerBlock(2, None), ["hidden size", "None"]),
    "place of no norm": (
        lambda: tx.TransformerBlock(2, 8, norm=None, norm_position="post"),
        ["`norm` is None", "Choose a norm"],
    ),
    "parallel and post": (
        lambda: tx.TransformerBlock(2, 8, residual="parallel", norm_position="post"),
        ['residual="parallel"', "Choose"],
    ),
    "parallel and context": (
        lambda: tx.TransformerBlock(2, 8, residual="parallel", cross_attention=2),
        ["no place for `cross_attention`", 'Choose residual="serial"'],
    ),
    "no heads": (lambda: tx.decoder(9, 8, 1), ["`num_heads` is needed"]),
    "learned without length": (
        lambda: tx.decoder(9, 8, 1, 2, position="learned"),
        ["`max_length`", "position='learned'", "max_length=None"],
    ),
    "length without learned": (
        lambda: tx.decoder(9, 8, 1, 2, max_length=16),
        ["`max_length`", "position='rotary'", "max_length=16"],
    ),
    "block and its options": (
        lambda: tx.decoder(
            9, 8, 1, 2, block=lambda i: tx.TransformerBlock(2, 8), norm="layer"
        ),
        ["Blocks of your own", "'norm': 'layer'", "Move these"],
    ),
    "named bias for blocks of one's own": (
        lambda: tx.decoder(
            9, 8, 1, block=lambda i: tx.TransformerBlock(2, 8), position="alibi"
        ),
        ["needs `num_heads`", "pass the layer"],
    ),
    "classes without a number": (
        lambda: tx.encoder(9, 8, 1, 2, output="classes"),
        ["`num_classes`", "num_classes=None"],
    ),
    "number without classes": (
        lambda: tx.encoder(9, 8, 1, 2, num_classes=3),
        ["`num_classes`", "output='features'"],
    ),
    "types without a number": (
        lambda: tx.encoder(9, 8, 1, 2, token_types=True),
        ["`num_segments`"],
    ),
    "cap without logits": (
        lambda: tx.encoder(9, 8, 1, 2, logit_cap=30.0),
        ['belongs to output="tokens"', "logit_cap=30.0"],
    ),
    "packed classes": (
        lambda: tx.encoder(9, 8, 1, 2, output="classes", num_classes=2, packed=True),
        ["`packed=True`", "Choose"],
    ),
    "one block of two": (
        lambda: tx.encoder_decoder(
            9, 8, 1, encoder_block=lambda i: tx.TransformerBlock(2, 8)
        ),
        ["come together", "decoder_block=None"],
    ),
    "one table for two vocabularies": (
        lambda: tx.encoder_decoder(
            9, 8, 1, 2, target_vocab_size=7, share_embeddings=True
        ),
        ["one vocabulary", "vocab_size=9, target_vocab_size=7"],
    ),
}


@pytest.mark.parametrize("name", WRONG_TO_MAKE)
def test_what_cannot_be_made_is_refused(name):
    make, parts = WRONG_TO_MAKE[name]
    with pytest.raises(ValueError) as error:
        make()
    for part in parts:
        assert part in plainly(error)


def test_one_layer_in_two_slots_is_refused_with_the_remedy():
    heads = tx.MultiHead(2)
    with pytest.raises(ValueError, match=r"from_config\(layer.get_config\(\)\)"):
        tx.TransformerBlock(heads, 8, cross_attention=heads)
    feed_forward = tx.FeedForward(8)
    tx.TransformerBlock(2, feed_forward)
    with pytest.raises(ValueError, match="already is `feed_forward` of a"):
        tx.TransformerBlock(2, feed_forward)
    rotary = tx.RotaryPosition()
    tx.MultiHead(2, position=rotary)
    with pytest.raises(ValueError, match="one place"):
        tx.MultiHead(2, position=rotary)
    attention = tx.ScaledAttention()
    tx.MultiHead(2, attention=attention)
    with pytest.raises(ValueError, match="one place"):
        tx.MultiHead(2, attention=attention)


def test_a_layer_with_weights_is_refused_for_a_slot():
    with pytest.raises(ValueError, match="built already"):
        tx.TransformerBlock(built(tx.MultiHead(2)), 8)


# ----------------------------------------------------------------------------
# Calling layers
# ----------------------------------------------------------------------------

MASK_LAYOUTS = "Masks over keys are (B, S); masks over pairs are (B, T, S)"

WRONG_TO_CALL = {
    # Ranks
    "heads on two axes": (
        lambda: tx.MultiHead(2)(X[0]),
        ["(batch, time, features)", "(5, 8)"],
    ),
    "heads on four axes, built": (
        lambda: built(tx.MultiHead(2))(X[None]),
        ["(batch, time, features)", "(1, 2, 5, 8)"],
    ),
    "raw attention on two axes": (
        lambda: tx.ScaledAttention()(X[0]),
        ["(batch, time, features)", "query.shape=(5, 8)"],
    ),
    "value on two axes": (
        lambda: tx.MultiHead(2)(X, CONTEXT[0]),
        ["`value`", "(7, 6)"],
    ),
    "block on two axes": (
        lambda: tx.TransformerBlock(2, 8)(X[0]),
        ["(batch, time, dim)", "(5, 8)"],
    ),
    "block on two symbolic axes": (
        lambda: tx.TransformerBlock(2, 8)(keras.Input((8,))),
        ["(batch, time, dim)", "(None, 8)"],
    ),
    "block of unknown width": (
        lambda: tx.TransformerBlock(2, 8)(keras.Input((None, None))),
        ["known dim", "(None, None, None)"],
    ),
    "context on two axes": (
        lambda: tx.TransformerBlock(2, 8, cross_attention=2)(X, CONTEXT[0]),
        ["`context`", "(7, 6)"],
    ),
    "feed-forward on one axis": (lambda: tx.FeedForward(8)(X[0, 0]), ["(8,)"]),
    "sinusoid on two axes": (
        lambda: tx.SinusoidalPosition()(X[0]),
        ["(batch, time, dim)", "(5, 8)"],
    ),
    "rotation on three axes": (
        lambda: tx.RotaryPosition()(X),
        ["(batch, time, heads, head_dim)", "(2, 5, 8)", "MultiHead(position=...)"],
    ),
    "segments on two axes": (
        lambda: tx.LearnedSegment(2)(X[0]),
        ["(batch, time, dim)", "(5, 8)"],
    ),
    # Widths
    "other width for heads": (
        lambda: built(tx.MultiHead(2))(X[..., :6]),
        ["`query` with 8 features", "(2, 5, 6)", "Make a new layer"],
    ),
    "other width for a context": (
        lambda: built(tx.MultiHead(2), X, CONTEXT)(X, CONTEXT[..., :4]),
        ["`value` with 6 features", "(2, 7, 4)"],
    ),
    "other width for a block": (
        lambda: built(tx.TransformerBlock(2, 8))(X[..., :6]),
        ["`x` with 8 features", "(2, 5, 6)"],
    ),
    "other width for a feed-forward": (
        lambda: built(tx.FeedForward(8))(X[..., :6]),
        ["`x` with 8 features", "(2, 5, 6)"],
    ),
    "other width for learned positions": (
        lambda: built(tx.LearnedPosition(9))(X[..., :6]),
        ["`x` with 8 features", "(2, 5, 6)"],
    ),
    "other width for segments": (
        lambda: built(tx.LearnedSegment(2))(X[..., :6]),
        ["`x` with 8 features", "(2, 5, 6)"],
    ),
    "other width for logits": (
        lambda: tx.TokenEmbedding(9, 4)(X, reverse=True),
        ["with 4 features", "(2, 5, 8)"],
    ),
    "odd heads for a built rotation": (
        lambda: built(tx.RotaryPosition(), normal(1, 2, 2, 4))(normal(1, 2, 2, 3)),
        ["must be even", "(1, 2, 2, 3)"],
    ),
    "key of another width": (
        lambda: tx.ScaledAttention()(X, key=CONTEXT),
        ["last axes must agree", "(2, 5, 8)", "(2, 7, 6)"],
    ),
    "heads that do not divide": (
        lambda: tx.ScaledAttention()(normal(1, 2, 4, 3), key=normal(1, 2, 3, 3)),
        ["multiple", "(1, 2, 4, 3)", "(1, 2, 3, 3)"],
    ),
    # Lengths and rows
    "key and value of two lengths": (
        lambda: tx.MultiHead(2)(X, CONTEXT, CONTEXT[:, :6]),
        ["6", "7", "must agree"],
    ),
    "raw key and value of two lengths": (
        lambda: tx.ScaledAttention()(X, key=X, value=X[:, :4]),
        ["must agree", "(2, 5, 8)", "(2, 4, 8)"],
    ),
    "context of other rows": (
        lambda: tx.MultiHead(2)(X, CONTEXT[:1]),
        ["`value` has 1 rows where 2 were expected", "(1, 7, 6)"],
    ),
    "key without value": (
        lambda: tx.MultiHead(2)(X, key=CONTEXT),
        ["`key` came without `value`", "Pass `value=`"],
    ),
    "value without key": (
        lambda: tx.ScaledAttention()(X, value=CONTEXT),
        ["`value` came without `key`", "Pass `key=`"],
    ),
    "context of no use": (
        lambda: tx.TransformerBlock(2, 8)(X, CONTEXT),
        ["no `cross_attention`", "TransformerBlock(..., cross_attention=num_heads)"],
    ),
    "missing context": (
        lambda: tx.TransformerBlock(2, 8, cross_attention=2)(X),
        ["no `context`", "block(x, context=...)"],
    ),
    # Kinds
    "integers for heads": (
        lambda: tx.MultiHead(2)(X.astype("int32")),
        ["must hold floats", "int32", "TokenEmbedding"],
    ),
    "integers for raw attention": (
        lambda: tx.ScaledAttention()(X.astype("int32")),
        ["must hold floats", "int32"],
    ),
    "tokens for a block": (
        lambda: tx.TransformerBlock(2, 8)(np.ones((2, 5, 8), "int32")),
        ["must hold floats", "int32", "TokenEmbedding"],
    ),
    "booleans for a feed-forward": (
        lambda: tx.FeedForward(8)(X > 0),
        ["must hold floats", "bool"],
    ),
    "integers for a sinusoid": (
        lambda: tx.SinusoidalPosition()(X.astype("int32")),
        ["must hold floats", "int32"],
    ),
    "integers for a rotation": (
        lambda: tx.RotaryPosition()(ones(1, 2, 2, 4, dtype="int32")),
        ["must hold floats", "int32"],
    ),
    "integers for segments": (
        lambda: tx.LearnedSegment(2)(X.astype("int32")),
        ["must hold floats", "int32"],
    ),
    "floats for tokens": (
        lambda: tx.TokenEmbedding(9, 4)(TOKENS.astype("float32")),
        ["must hold integers", "float32", 'dtype="int32"'],
    ),
    "symbolic floats for tokens": (
        lambda: tx.TokenEmbedding(9, 4)(keras.Input((None,))),
        ["must hold integers", "float32", 'dtype="int32"'],
    ),
    # Masks
    "float mask": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(2, 5, dtype="float32")),
        ["boolean or integer", "float32", "`bias=`", "ops.cast(mask, 'bool')"],
    ),
    "float mask of queries": (
        lambda: tx.MultiHead(2)(X, query_mask=ones(2, 5, dtype="float32")),
        ["`query_mask`", "boolean or integer", "float32"],
    ),
    "float mask of values": (
        lambda: tx.MultiHead(2)(X, value_mask=ones(2, 5, dtype="float32")),
        ["`value_mask`", "boolean or integer", "float32"],
    ),
    "float mask of a context": (
        lambda: tx.TransformerBlock(2, 8, cross_attention=2)(
            X, CONTEXT, context_mask=ones(2, 7, dtype="float32")
        ),
        ["boolean or integer", "float32"],
    ),
    "mask on one axis": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(5)),
        ["1 axes", MASK_LAYOUTS, "(5,)"],
    ),
    "mask on five axes": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(1, 1, 1, 5, 5)),
        ["5 axes", MASK_LAYOUTS],
    ),
    "mask of other keys": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(2, 4)),
        ["4 keys where 5 were expected", MASK_LAYOUTS, "(2, 4)"],
    ),
    "mask of other queries": (
        lambda: tx.MultiHead(2)(X, CONTEXT, attention_mask=ones(2, 4, 7)),
        ["4 queries where 1 or 5 were expected", MASK_LAYOUTS],
    ),
    "mask of other heads": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(2, 3, 5, 5)),
        ["3 heads where 1 or 2 were expected", MASK_LAYOUTS],
    ),
    "mask over pairs as Keras takes it": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(5, 5)),
        ["5 rows where 1 or 2 were expected", "`mask[None]`"],
    ),
    "mask of other rows": (
        lambda: tx.MultiHead(2)(X, attention_mask=ones(3, 5, 5)),
        ["3 rows where 1 or 2 were expected"],
    ),
    "mask of queries of another length": (
        lambda: tx.MultiHead(2)(X, query_mask=ones(2, 7)),
        ["`query_mask`", "7 queries where 1 or 5 were expected"],
    ),
    "mask of values on three axes": (
        lambda: tx.MultiHead(2)(X, value_mask=ones(2, 5, 5)),
        ["`value_mask`", "(batch, keys)", "(2, 5, 5)"],
    ),
    "mask of another length while making a model": (
        lambda: tx.MultiHead(2)(
            keras.Input((5, 8)), attention_mask=keras.Input((4,), dtype="bool")
        ),
        ["4 keys where 5 were expected"],
    ),
    "ragged mask": (
        lambda: tx.MultiHead(2)(X, attention_mask=[[True] * 5, [True] * 4]),
        ["`attention_mask`", "equally long", "Pad the rows"],
    ),
    # Scores to add
    "mask as a bias": (
        lambda: tx.MultiHead(2)(X, bias=ones(5, 5)),
        ["scores to add", "bool", "`attention_mask=`"],
    ),
    "bias of other keys": (
        lambda: tx.MultiHead(2)(X, bias=ones(5, 4, dtype="float32")),
        ["4 keys", "broadcastable to (batch, heads, queries, keys)", "(5, 4)"],
    ),
    "bias of other heads": (
        lambda: tx.TransformerBlock(2, 8)(X, bias=ones(3, 5, 5, dtype="float32")),
        ["3 heads", "broadcastable"],
    ),
    "bias on five axes": (
        lambda: tx.ScaledAttention()(X, bias=ones(1, 1, 1, 5, 5, dtype="float32")),
        ["broadcastable", "(1, 1, 1, 5, 5)"],
    ),
    # Positions and segments
    "float positions": (
        lambda: tx.MultiHead(2)(X, positions=np.arange(5.0)),
        ["must hold integers", "float"],
    ),
    "float positions of a sinusoid": (
        lambda: tx.SinusoidalPosition()(X, positions=np.arange(5.0)),
        ["must hold integers", "float"],
    ),
    "too few positions": (
        lambda: tx.MultiHead(2, position=tx.RotaryPosition())(
            X, positions=np.arange(4)
        ),
        ["4 positions where 5 were expected", "(batch, time)"],
    ),
    "too few positions of a sinusoid": (
        lambda: tx.SinusoidalPosition()(X, positions=np.arange(4)),
        ["4 positions where 5 were expected"],
    ),
    "positions of other rows": (
        lambda: tx.LearnedPosition(9)(X, positions=ones(3, 5, dtype="int32")),
        ["3 rows where 1 or 2 were expected"],
    ),
    "positions on three axes": (
        lambda: tx.AlibiPosition(2)(X, positions=ones(1, 1, 5, dtype="int32")),
        ["(time,) or (batch, time)", "(1, 1, 5)"],
    ),
    "float segments": (
        lambda: tx.MultiHead(2)(X, segment_ids=np.zeros((2, 5))),
        ["must hold integers", "float"],
    ),
    "segments of another length": (
        lambda: tx.MultiHead(2)(X, segment_ids=ones(2, 4, dtype="int32")),
        ["4 segments where 5 were expected"],
    ),
    "segments of other rows": (
        lambda: tx.MultiHead(2)(X, segment_ids=ones(3, 5, dtype="int32")),
        ["3 rows where 1 or 2 were expected"],
    ),
    "segments across lengths": (
        lambda: tx.MultiHead(2)(X, CONTEXT, segment_ids=ones(2, 5, dtype="int32")),
        ["self-attention", "5 queries and 7 keys", "`attention_mask`"],
    ),
    "types of another length": (
        lambda: tx.LearnedSegment(2)(X, token_types=ones(2, 4, dtype="int32")),
        ["4 types where 5 were expected"],
    ),
    "float types": (
        lambda: tx.LearnedSegment(2)(X, token_types=np.zeros((2, 5))),
        ["must hold integers", "float"],
    ),
    # Values, where they are known
    "negative token": (
        lambda: tx.TokenEmbedding(9, 4)(TOKENS - 3),
        ["0 to 8", "from -3 to 4", "`vocab_size`"],
    ),
    "token beyond the vocabulary": (
        lambda: tx.TokenEmbedding(7, 4)(TOKENS),
        ["0 to 6", "from 0 to 7", "`vocab_size`"],
    ),
    "token beyond a model's vocabulary": (
        lambda: tx.decoder(7, 8, 1, 2)(TOKENS),
        ["0 to 6", "from 0 to 7"],
    ),
    "source beyond the vocabulary": (
        lambda: tx.encoder_decoder(7, 8, 1, 2)(
            {"source": TOKENS, "target": TOKENS % 7}
        ),
        ["0 to 6", "from 0 to 7"],
    ),
    "type out of range": (
        lambda: tx.LearnedSegment(2)(X, token_types=np.full((2, 5), 2)),
        ["0 to 1", "from 2 to 2"],
    ),
    "length beyond the learned positions": (
        lambda: tx.LearnedPosition(4)(X),
        ["has 4 positions", "received 5 tokens", "max_length=5"],
    ),
    "length beyond a model's learned positions": (
        lambda: tx.decoder(9, 8, 1, 2, position="learned", max_length=4)(TOKENS),
        ["has 4 positions", "received 5 tokens"],
    ),
    "length beyond, compiled": (
        lambda: tx.decoder(9, 8, 1, 2, position="learned", max_length=4).predict(
            TOKENS, verbose=0
        ),
        ["has 4 positions", "received 5 tokens"],
    ),
    "position beyond the learned": (
        lambda: tx.LearnedPosition(4)(X, positions=np.arange(5)),
        ["0 to 3", "from 0 to 4"],
    ),
    "negative learned position": (
        lambda: tx.LearnedPosition(9)(X, positions=np.arange(5) - 1),
        ["0 to 8", "from -1 to 3"],
    ),
}


@pytest.mark.parametrize("name", WRONG_TO_CALL)
def test_what_cannot_be_computed_is_refused(name):
    call, parts = WRONG_TO_CALL[name]
    with pytest.raises(ValueError) as error:
        call()
    for part in parts:
        assert part in plainly(error)


def test_a_refused_call_leaves_the_layer_as_it_was():
    layer = built(tx.MultiHead(2))
    expected = to_numpy(layer(X))
    with pytest.raises(ValueError):
        layer(X, attention_mask=ones(3, 5, 5))
    np.testing.assert_array_equal(to_numpy(layer(X)), expected)


# ----------------------------------------------------------------------------
# Nothing at all is no mistake
# ----------------------------------------------------------------------------

LAYERS = {
    "raw": lambda: tx.ScaledAttention(window=2),
    "heads": lambda: tx.MultiHead(2, query_key_norm="rms"),
    "grouped": lambda: tx.MultiHead(
        4, num_kv_heads=2, position=tx.RotaryPosition(layout="interleaved"), causal=True
    ),
    "relative": lambda: tx.MultiHead(2, position=tx.RelativePosition(2)),
    "block": lambda: tx.TransformerBlock(2, 8, norm="rms"),
    "feed-forward": lambda: tx.FeedForward(8, gated=True),
    "sinusoid": tx.SinusoidalPosition,
    "learned": lambda: tx.LearnedPosition(9),
    "segment": lambda: tx.LearnedSegment(2),
    "norm": tx.RMSNorm,
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_empty_batch_gives_an_empty_result(name):
    layer = LAYERS[name]()
    assert tuple(layer(X[:0]).shape) == (0, 5, 8)
    assert tuple(layer(X).shape) == (2, 5, 8)
    assert tuple(layer(X[:, :0]).shape) == (2, 0, 8)


def test_an_empty_batch_passes_masks_scores_and_contexts():
    call = {
        "attention_mask": ones(0, 5, 5),
        "segment_ids": ones(0, 5, dtype="int32"),
        "positions": ones(0, 5, dtype="int32"),
        "return_attention_scores": True,
    }
    layer = tx.MultiHead(4, num_kv_heads=2, position=tx.RotaryPosition())
    y, weights = layer(X[:0], **call)
    assert tuple(y.shape) == (0, 5, 8) and tuple(weights.shape) == (0, 4, 5, 5)
    block = tx.TransformerBlock(2, 8, cross_attention=2)
    assert tuple(block(X[:0], CONTEXT[:0]).shape) == (0, 5, 8)
    # No context at all: queries without keys, which get nothing from it.
    assert np.isfinite(to_numpy(block(X, CONTEXT[:, :0]))).all()


def test_an_empty_batch_passes_models():
    none = TOKENS[:0]
    embedding = tx.TokenEmbedding(9, 8, pad_id=0)
    assert tuple(embedding(none).shape) == (0, 5, 8)
    assert tuple(embedding(X[:0], reverse=True).shape) == (0, 5, 9)
    assert tuple(tx.decoder(9, 8, 1, 2, pad_id=0)(none).shape) == (0, 5, 9)
    classes = tx.encoder(9, 8, 1, 2, output="classes", num_classes=3, pad_id=0)
    assert tuple(classes(none).shape) == (0, 3)
    both = tx.encoder_decoder(9, 8, 1, 2, pad_id=0)
    assert tuple(both({"source": none, "target": none[:, :3]}).shape) == (0, 3, 9)
