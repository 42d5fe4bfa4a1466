"""Every public layer and every builder keeps the contract."""

import keras
import numpy as np
import pytest
from contract import check_layer
from user_layers import TemperedMultiHead, squared_relu

import keras_tx as tx

# Batch, queries, keys, features, heads, key heads, head size, context's
# features, hidden features, tokens: no two alike.
B, T, S, D, N, K, H, C, F, V = 3, 5, 7, 24, 4, 2, 6, 10, 28, 31

SCORES = {"return_attention_scores": True}

# Softmax does not see what is added to all keys alike.
KEY_BIAS = ("key/bias",)


def features(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype("float32")


def integers(low, high, *shape):
    return np.random.default_rng(7).integers(low, high, shape).astype("int32")


def growing_positions():
    return np.cumsum(integers(1, 4, B, T), axis=1).astype("int32")


def segments():
    return np.sort(integers(0, 2, B, T), axis=1)


X = {"x": features(B, T, D)}
QUERY = {"query": features(B, T, D)}
HEADS = {"x": features(B, T, N, H)}
CROSS = {"query": features(B, T, D), "value": features(B, S, C)}
CONTEXT = {"x": features(B, T, D), "context": features(B, S, C)}
TOKENS = {"tokens": integers(1, V, B, T)}
PAIR = {"target": integers(1, V, B, T), "source": integers(1, V, B, S)}
PACKED = {
    "tokens": TOKENS["tokens"],
    "positions": growing_positions(),
    "segment_ids": segments(),
}

MIXES = {"mixes": True}
CAUSAL = {"mixes": True, "causal": True}
PADDED_X = {"padded": ("x",)}
PADDED_QUERY = {"padded": ("query",)}

LAYERS = {
    "scaled_attention": (
        lambda: tx.ScaledAttention(),
        QUERY,
        {"variants": (SCORES, {}), **MIXES, **PADDED_QUERY},
    ),
    "scaled_attention_of_grouped_heads": (
        lambda: tx.ScaledAttention(0.3, window=4, soft_cap=5.0, dropout=0.1, seed=3),
        {
            "query": features(B, T, N, H),
            "key": features(B, S, K, H),
            "value": features(B, S, K, C),
        },
        {"variants": (SCORES, {}), "padded": ("key", "value")},
    ),
    "multi_head": (
        lambda: tx.MultiHead(N),
        QUERY,
        {
            "variants": (SCORES, {}),
            **MIXES,
            **PADDED_QUERY,
            "still": KEY_BIAS,
            "jit": True,
        },
    ),
    "multi_head_with_everything": (
        lambda: tx.MultiHead(
            N,
            8,
            num_kv_heads=K,
            causal=True,
            attention=tx.ScaledAttention(window=3, soft_cap=5.0),
            position=tx.RotaryPosition(
                500,
                rotary_dim=4,
                layout="interleaved",
                scaling=tx.YarnScaling(4.0, original_max_length=16),
            ),
            query_key_norm="rms",
            use_bias=False,
            kernel_initializer=keras.initializers.GlorotNormal(seed=5),
            merge_initializer="zeros",
        ),
        QUERY,
        {"variants": (SCORES, {}), **CAUSAL, **PADDED_QUERY},
    ),
    "multi_head_across": (
        lambda: tx.MultiHead(
            N,
            8,
            attention=tx.ScaledAttention(dropout=0.2, seed=1),
            position=tx.RelativePosition(N, num_buckets=4, max_distance=5),
            query_key_norm=keras.layers.LayerNormalization(epsilon=1e-3),
            use_bias="qkv",
        ),
        {
            **CROSS,
            "key": features(B, S, 9),
            "attention_mask": integers(0, 2, B, T, S) | np.eye(T, S, dtype="int32"),
            "bias": features(B, N, T, S),
        },
        {
            "variants": (SCORES, {}),
            "padded": ("value", "key"),
            "still": ("key_norm/beta",),
        },
    ),
    "multi_query": (
        lambda: tx.MultiHead(N, num_kv_heads=1, position=tx.AlibiPosition(N)),
        {
            **QUERY,
            "positions": growing_positions(),
            "segment_ids": segments(),
        },
        {**MIXES, **PADDED_QUERY, "still": KEY_BIAS},
    ),
    "sinusoidal": (
        lambda: tx.SinusoidalPosition(500, layout="half"),
        X,
        PADDED_X,
    ),
    "sinusoidal_positions": (
        lambda: tx.SinusoidalPosition(),
        {**X, "positions": growing_positions()},
        PADDED_X,
    ),
    "learned": (
        lambda: tx.LearnedPosition(20, embeddings_initializer="uniform"),
        {**X, "positions": growing_positions()},
        PADDED_X,
    ),
    "rotary": (
        lambda: tx.RotaryPosition(scaling=tx.LinearScaling(2.0)),
        {**HEADS, "positions": growing_positions()},
        {},
    ),
    "relative": (
        lambda: tx.RelativePosition(N, num_buckets=8, max_distance=12),
        X,
        {},
    ),
    "relative_one_way": (
        lambda: tx.RelativePosition(
            N, num_buckets=8, max_distance=12, bidirectional=False
        ),
        {**X, "positions": growing_positions()},
        {},
    ),
    "alibi": (lambda: tx.AlibiPosition(6), X, {}),
    "feed_forward": (
        lambda: tx.FeedForward(F, "gelu_tanh", dropout=0.1, seed=4),
        X,
        {**PADDED_X, "jit": True},
    ),
    "gated_feed_forward": (
        lambda: tx.FeedForward(
            F,
            squared_relu,
            gated=True,
            use_bias=False,
            kernel_initializer="he_normal",
            narrow_initializer=keras.initializers.RandomNormal(0.0, 0.1, seed=2),
        ),
        X,
        PADDED_X,
    ),
    "rms_norm": (lambda: tx.RMSNorm(epsilon=1e-4), X, PADDED_X),
    "block": (
        lambda: tx.TransformerBlock(N, F),
        X,
        {
            "variants": (SCORES, {}),
            **MIXES,
            **PADDED_X,
            "still": KEY_BIAS,
            "jit": True,
        },
    ),
    "causal_post_norm_block": (
        lambda: tx.TransformerBlock(
            tx.MultiHead(N, 8, num_kv_heads=K, position=tx.RotaryPosition()),
            tx.FeedForward(F, "silu", gated=True),
            causal=True,
            norm="rms",
            norm_position="post",
            dropout=0.1,
            seed=6,
        ),
        {**X, "positions": growing_positions(), "segment_ids": segments()},
        {**CAUSAL, **PADDED_X},
    ),
    "cross_block": (
        lambda: tx.TransformerBlock(
            N, F, cross_attention=K, causal=True, norm_position="sandwich"
        ),
        {**CONTEXT, "context_mask": integers(0, 2, B, S) | np.eye(B, S, dtype="int32")},
        {
            "variants": (SCORES, {}),
            **CAUSAL,
            "padded": ("x", "context"),
            "still": KEY_BIAS,
        },
    ),
    "parallel_block": (
        lambda: tx.TransformerBlock(
            TemperedMultiHead(N, start=2.0),
            keras.Sequential(
                [
                    keras.layers.Dense(F, "relu", name="up"),
                    keras.layers.Dense(D, name="down"),
                ]
            ),
            norm=keras.layers.RMSNormalization(epsilon=1e-6),
            norm_position="sandwich",
            residual="parallel",
        ),
        {**X, "bias": features(B, N, T, T)},
        {**MIXES, **PADDED_X, "still": KEY_BIAS},
    ),
    "bare_block": (
        lambda: tx.TransformerBlock(
            N, keras.layers.Dense(D), norm=None, residual="none"
        ),
        {**X, "attention_mask": np.tril(np.ones((B, T, T), "int32"))},
        {**CAUSAL, **PADDED_X, "still": KEY_BIAS},
    ),
    "token_embedding": (
        lambda: tx.TokenEmbedding(V, D, pad_id=0),
        {"inputs": TOKENS["tokens"]},
        {"padded": ("inputs",)},
    ),
    "tied_logits": (
        lambda: tx.TokenEmbedding(V, D, use_bias=True, soft_cap=3.0),
        {"inputs": X["x"]},
        {"variants": ({"reverse": True},), "padded": ("inputs",), "wide": True},
    ),
    "free_logits": (
        lambda: tx.TokenEmbedding(V, D, tie_weights=False, use_bias=True),
        {"inputs": X["x"]},
        {
            "variants": ({"reverse": True},),
            "padded": ("inputs",),
            "wide": True,
            "still": ("subject/embeddings",),
        },
    ),
    "segment": (
        lambda: tx.LearnedSegment(2),
        {**X, "token_types": segments()},
        PADDED_X,
    ),
}

DECODER = {"wide": True, "padded": ("tokens",), **CAUSAL}
ENCODER = {"padded": ("tokens",), **MIXES}

MODELS = {
    "decoder": (
        lambda: tx.decoder(V, D, 2, N, pad_id=0),
        TOKENS,
        {**DECODER, "jit": True, "optimizer": True},
    ),
    "sinusoidal_decoder": (
        lambda: tx.decoder(
            V,
            D,
            1,
            N,
            position="sinusoidal",
            embedding_scale="sqrt",
            gated=False,
            use_bias=True,
            norm="layer",
            norm_position="post",
            pad_id=0,
        ),
        TOKENS,
        {**DECODER, "still": KEY_BIAS},
    ),
    "learned_decoder": (
        lambda: tx.decoder(
            V,
            D,
            1,
            N,
            position="learned",
            max_length=20,
            tie_embeddings=False,
            output_bias=True,
            dropout=0.1,
            pad_id=0,
        ),
        TOKENS,
        DECODER,
    ),
    "relative_decoder": (
        lambda: tx.decoder(V, D, 2, N, position="relative", logit_cap=9.0, pad_id=0),
        TOKENS,
        DECODER,
    ),
    "packed_alibi_decoder": (
        lambda: tx.decoder(V, D, 1, N, position="alibi", packed=True, pad_id=0),
        PACKED,
        DECODER,
    ),
    "own_block_decoder": (
        lambda: tx.decoder(
            V,
            D,
            2,
            block=lambda index: tx.TransformerBlock(
                TemperedMultiHead(N, num_kv_heads=K),
                tx.FeedForward(F),
                norm_position="sandwich",
            ),
            position=None,
            embedding_norm="rms",
            pad_id=0,
        ),
        TOKENS,
        {**DECODER, "still": KEY_BIAS},
    ),
    "encoder": (
        lambda: tx.encoder(V, D, 1, N, window=3, pad_id=0),
        TOKENS,
        {**ENCODER, "optimizer": True},
    ),
    "pooled_encoder": (
        lambda: tx.encoder(V, D, 1, N, pooler="tanh", pooling="first", pad_id=0),
        TOKENS,
        ENCODER,
    ),
    "classifier": (
        lambda: tx.encoder(
            V,
            D,
            1,
            N,
            output="classes",
            num_classes=6,
            num_segments=2,
            token_types=True,
            pad_id=0,
        ),
        {**TOKENS, "token_types": segments()},
        {"padded": ("tokens",), "wide": True},
    ),
    "encoder_decoder": (
        lambda: tx.encoder_decoder(V, D, 2, N, num_encoder_layers=1, pad_id=0),
        PAIR,
        {
            "wide": True,
            "padded": ("target", "source"),
            **CAUSAL,
            "jit": True,
            "optimizer": True,
        },
    ),
    "untied_encoder_decoder": (
        lambda: tx.encoder_decoder(
            37,
            D,
            1,
            N,
            target_vocab_size=V,
            position="relative",
            tie_embeddings=False,
            pad_id=0,
        ),
        PAIR,
        {"wide": True, "padded": ("target", "source"), **CAUSAL},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_keeps_the_contract(name, process):
    make, inputs, keywords = LAYERS[name]
    check_layer(make, inputs, process=process, lengths=(T, S), **keywords)


@pytest.mark.parametrize("name", MODELS)
def test_every_builder_keeps_the_contract(name, process):
    make, inputs, keywords = MODELS[name]
    check_layer(make, inputs, process=process, lengths=(T, S), **keywords)


def test_the_contract_covers_every_public_layer():
    public = {
        name
        for name in tx.__all__
        if isinstance(getattr(tx, name), type)
        and issubclass(getattr(tx, name), keras.layers.Layer)
    }
    checked = {
        type(make()).__name__ for make, _, _ in (*LAYERS.values(), *MODELS.values())
    }
    assert public <= checked
