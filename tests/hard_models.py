"""The four shapes that test a file format hardest, small: T5, Gemma 2, BERT, Llama."""

import keras

import keras_tx as tx


def t5():
    """Shared relative bias, no scaling, RMS norm, gated tanh GELU, tied and scaled."""
    norm = keras.layers.RMSNormalization(epsilon=1e-6)

    def heads():
        return tx.MultiHead(
            4, 6, attention=tx.ScaledAttention(scale=1.0), use_bias=False
        )

    def feed_forward():
        return tx.FeedForward(20, "gelu_tanh", gated=True, use_bias=False)

    return tx.encoder_decoder(
        vocab_size=31,
        dim=16,
        num_layers=2,
        num_encoder_layers=3,
        encoder_block=lambda index: tx.TransformerBlock(
            heads(), feed_forward(), norm=norm
        ),
        decoder_block=lambda index: tx.TransformerBlock(
            heads(), feed_forward(), cross_attention=heads(), norm=norm
        ),
        position=tx.RelativePosition(4, num_buckets=8, max_distance=16),
        pad_id=0,
        output_scale=16**-0.5,
    )


def gemma2():
    """Four norms, caps on scores and logits, windows on every second layer."""
    norm = keras.layers.RMSNormalization(epsilon=1e-6)

    def block(index):
        return tx.TransformerBlock(
            tx.MultiHead(
                4,
                10,
                num_kv_heads=2,
                attention=tx.ScaledAttention(
                    scale=12**-0.5,
                    soft_cap=50.0,
                    window=3 if index % 2 == 0 else None,
                ),
                position=tx.RotaryPosition(),
                use_bias=False,
            ),
            tx.FeedForward(20, "gelu_tanh", gated=True, use_bias=False),
            norm=norm,
            norm_position="sandwich",
        )

    return tx.decoder(
        vocab_size=31,
        dim=16,
        num_layers=3,
        block=block,
        position=None,
        embedding_scale="sqrt",
        logit_cap=30.0,
        pad_id=0,
    )


def bert():
    """Embedding norm, token types, post norm, tied head with transform and bias."""
    norm = keras.layers.LayerNormalization(epsilon=1e-12)
    return tx.encoder(
        vocab_size=31,
        dim=16,
        num_layers=2,
        num_heads=4,
        output="tokens",
        hidden_dim=20,
        activation="gelu",
        gated=False,
        use_bias=True,
        norm=norm,
        norm_position="post",
        position="learned",
        max_length=24,
        num_segments=2,
        token_types=True,
        embedding_norm=norm,
        transform="gelu",
        output_bias=True,
        pad_id=0,
        dropout=0.1,
    )


def llama():
    """Grouped heads, rotary positions with Llama 3's scaling, gated SiLU, untied."""
    return tx.decoder(
        vocab_size=31,
        dim=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=20,
        position=tx.RotaryPosition(
            500_000, scaling=tx.Llama3Scaling(8.0, original_max_length=16)
        ),
        norm=keras.layers.RMSNormalization(epsilon=1e-5),
        tie_embeddings=False,
        pad_id=0,
    )


HARD_MODELS = {"t5": t5, "gemma2": gemma2, "bert": bert, "llama": llama}
