"""What several families share: their builders' arguments, from a config.

No layers of their own: an encoder as BERT is, and a decoder as Llama is, with
what their relatives change as arguments.
"""

import keras

from keras_tx.attention import MultiHead, ScaledAttention
from keras_tx.blocks import TransformerBlock
from keras_tx.feed_forward import FeedForward
from keras_tx.models import decoder, encoder
from keras_tx.norms import RMSNorm
from keras_tx.pretrained.config import rotary
from keras_tx.pretrained.parts import Parts

# ----------------------------------------------------------------------------
# Encoders
# ----------------------------------------------------------------------------


def build_encoder(
    config,
    options,
    *,
    dim,
    num_heads,
    hidden_dim,
    activation,
    epsilon,
    attention_dropout,
    max_length=None,
    transform=None,
    pooler="tanh",
    pooled_dropout=None,
    **model,
):
    """Builds an encoder with post layer norm and learned positions.

    Args:
        config: The `Config`.
        options: The `Options`.
        dim: Number of features.
        num_heads: Number of heads.
        hidden_dim: Width of the feed-forward layers.
        activation: As in `FeedForward`.
        epsilon: Epsilon of the norms.
        attention_dropout: Share of the weights to drop while training.
        max_length: Number of positions. Default: what the config says.
        transform: Activation before the logits. Default: `activation`.
        pooler: Activation of the pooled vector.
        pooled_dropout: Share to drop from it. Default: as everywhere.
        **model: Further arguments of `encoder`.
    """
    norm = keras.layers.LayerNormalization(epsilon=epsilon)

    def block(index):
        return TransformerBlock(
            MultiHead(num_heads, attention=ScaledAttention(dropout=attention_dropout)),
            FeedForward(hidden_dim, activation),
            norm=norm,
            norm_position="post",
            dropout=model["dropout"],
        )

    longest = config.integer("max_position_embeddings")
    tied = config.flag("tie_word_embeddings", True)
    head = {
        "features": {"pooler": pooler if options.pooler else None},
        "tokens": {"transform": transform or activation, "output_bias": True},
        "classes": {
            "pooler": pooler,
            "pooled_dropout": pooled_dropout,
            "num_classes": num_classes(config),
        },
    }[options.output]
    return encoder(
        config.integer("vocab_size"),
        dim,
        block=block,
        output=options.output,
        pooling="first",
        position="learned",
        max_length=max_length or longest,
        pad_id=options.padding(config, masked=True),
        token_types=options.token_types,
        embedding_norm=norm,
        tie_embeddings=tied or options.output != "tokens",
        packed=options.packed,
        name=config.fields["model_type"],
        dtype=options.dtype,
        **head,
        **model,
    )


def num_classes(config):
    """Returns how many classes a config names; two if it names none."""
    labels = config.get("id2label")
    return len(labels) if labels else config.integer("num_labels", 2)


def describe_encoder(parts):
    """Returns the fields that all encoders share."""
    fields = {
        **parts.describe_embedding(),
        "max_position_embeddings": parts.longest,
    }
    classes = parts.get("classes")
    if classes is not None:
        fields["id2label"] = {str(i): f"LABEL_{i}" for i in range(classes.units)}
        fields["label2id"] = {f"LABEL_{i}": i for i in range(classes.units)}
    return fields


# ----------------------------------------------------------------------------
# Decoders
# ----------------------------------------------------------------------------


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


KINDS = ("full_attention", "sliding_attention")


def windows_of(config, first_sliding=28):
    """Returns the window of each layer, from either way to state it.

    Args:
        config: The `Config`.
        first_sliding: The first layer with a window, where the config only
            switches them on.
    """
    num_layers = config.layers("num_hidden_layers")
    slides = config.flag("use_sliding_window", False)
    # Stated where it is switched off too.
    window = config.integer("sliding_window", None)
    window = window if slides else None
    first = config.get("max_window_layers", first_sliding)
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [KINDS[window is not None and i >= first] for i in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        raise config.wrong("layer_types", kinds, f"{num_layers} of {KINDS}")
    return [window if kind == KINDS[1] else None for kind in kinds]


def describe_windows(model):
    """Returns the fields that `windows_of` reads, from a model."""
    parts = Parts(model)
    windows = [parts.window(index) for index in range(parts.num_blocks)]
    widest = max((w for w in windows if w is not None), default=None)
    return {
        "use_sliding_window": widest is not None,
        "sliding_window": widest,
        "max_window_layers": next(
            (i for i, w in enumerate(windows) if w is not None), len(windows)
        ),
        "layer_types": [KINDS[window is not None] for window in windows],
    }
