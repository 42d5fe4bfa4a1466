"""Whole models: encoder-only, decoder-only, encoder-decoder."""

import contextlib
import math

import keras
import numpy as np
from keras import ops
from keras.src.models.functional import Functional

from keras_tx import checks, losses, masks
from keras_tx.attention import MultiHead, ScaledAttention
from keras_tx.blocks import TransformerBlock
from keras_tx.embeddings import LearnedSegment, TokenEmbedding
from keras_tx.feed_forward import FeedForward, get_activation
from keras_tx.norms import NormTemplate, RMSNorm
from keras_tx.positions import (
    AlibiPosition,
    LearnedPosition,
    RelativePosition,
    RotaryPosition,
    SinusoidalPosition,
)
from keras_tx.remat import leave_to_parts
from keras_tx.serialization import child_config, register, replicate

POSITIONS = ("rotary", "sinusoidal", "learned", "relative", "alibi")

# Options that only the default block reads, with their defaults. A `block=`
# of the user's own decides these for itself.
BLOCK_OPTIONS = {
    "num_heads": None,
    "hidden_dim": None,
    "num_kv_heads": None,
    "head_dim": None,
    "window": None,
    "activation": "silu",
    "gated": True,
    "use_bias": False,
    "norm": "rms",
    "norm_position": "pre",
}


def decoder(
    vocab_size,
    dim,
    num_layers,
    num_heads=None,
    *,
    # The block
    hidden_dim=None,
    num_kv_heads=None,
    head_dim=None,
    window=None,
    activation="silu",
    gated=True,
    use_bias=False,
    norm="rms",
    norm_position="pre",
    block=None,
    # Embeddings and head
    position="rotary",
    max_length=None,
    pad_id=None,
    embedding_scale=None,
    embedding_norm=None,
    final_norm="same",
    tie_embeddings=True,
    output_bias=False,
    logit_cap=None,
    # Training and inputs
    dropout=0.0,
    init_stddev=0.02,
    remat=False,
    packed=False,
    name="decoder",
    dtype=None,
):
    """Builds a decoder-only language model, as GPT, Llama and Qwen are.

    Tokens `(B, T)` to the logits of each next token, `(B, T, V)` in float32.
    No token ever sees a later one, whatever block it is given.

    Kernels start normal with a standard deviation of `init_stddev`, those that
    write into the residual stream with `init_stddev / sqrt(2 num_layers)`, so
    that deep stacks start with the activations of shallow ones (GPT-2,
    [Radford et al., 2019](https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf)).

    Args:
        vocab_size: Number of tokens, V.
        dim: Number of features, D.
        num_layers: Number of blocks.
        num_heads: Number of query heads. Not with `block`.

        hidden_dim: Width of the feed-forward layer. Default: 4 D, or 8 D / 3
            rounded up to a multiple of 8 if `gated`, which has as many weights.
        num_kv_heads: Number of key and value heads. Default: `num_heads`.
        head_dim: Size of a head. Default: D / `num_heads`.
        window: Optional width of sliding-window attention, in tokens.
        activation: Activation of the feed-forward layer.
        gated: Whether the feed-forward layer is gated.
        use_bias: Whether projections have biases.
        norm: `"rms"`, `"layer"`, `None`, or a Keras layer as a template.
        norm_position: `"pre"`, `"post"` or `"sandwich"`.
        block: A function of the layer index that returns a fresh
            `TransformerBlock`, in place of all options of this group.

        position: `"rotary"`, `"sinusoidal"`, `"learned"`, `"relative"`,
            `"alibi"`, `None`, or a layer, copied per place. What rotates heads
            or biases scores goes into every block whose attention has none; a
            `RelativePosition` is one layer, shared by all blocks as in T5; the
            rest is added to embeddings.
        max_length: Number of positions if `position="learned"`.
        pad_id: Optional token that is padding; it is masked everywhere and
            counts in no loss.
        embedding_scale: Optional number that multiplies embeddings; `"sqrt"`
            is √D, as in 2017 and Gemma.
        embedding_norm: Norm of the embeddings, like `norm`. Default: none.
        final_norm: Norm before the head, like `norm`. `"same"` is that of the
            blocks, and none if those are in post position.
        tie_embeddings: Whether logits use the embedding table.
        output_bias: Whether logits have a bias.
        logit_cap: Optional bound of the logits: `cap * tanh(logits / cap)`.

        dropout: Share dropped from embeddings, attention weights and branches
            while training.
        init_stddev: Standard deviation of the initial kernels.
        remat: Whether blocks are computed again for the gradient instead of kept:
            less memory for more time. No matter outside of training.
        packed: Whether the model also takes `positions` and `segment_ids`,
            each `(B, T)`, so that several texts share a row unseen by each
            other.
        name: Name of the model.
        dtype: Dtype policy of all layers. Default: the global one.

    Returns:
        A `LanguageModel`, a `keras.Model`, with the input `tokens`.

    Raises:
        ValueError: For options that are out of range or contradict each other.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> model(keras.ops.ones((1, 10), dtype="int32")).shape
    (1, 10, 96)
    """
    make_block = _block_maker(
        block,
        dim=dim,
        num_layers=num_layers,
        dropout=dropout,
        init_stddev=init_stddev,
        remat=remat,
        dtype=dtype,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        activation=activation,
        gated=gated,
        use_bias=use_bias,
        norm=norm,
        norm_position=norm_position,
    )
    place = _Placement(
        position, max_length, num_heads, bidirectional=False, dtype=dtype
    )
    embedding = TokenEmbedding(
        vocab_size,
        dim,
        pad_id=pad_id,
        tie_weights=tie_embeddings,
        use_bias=output_bias,
        soft_cap=logit_cap,
        embeddings_initializer=_normal(init_stddev),
        name="embedding",
        dtype=dtype,
    )

    tokens = keras.Input((None,), dtype="int32", name="tokens")
    extra = _packing_inputs(packed)
    x = _embed(
        embedding(tokens),
        place,
        scale=embedding_scale,
        norm=embedding_norm,
        dropout=dropout,
        positions=extra.get("positions"),
        dtype=dtype,
    )
    x, last = _stack(
        x, num_layers, make_block, place, "block", **extra, use_causal_mask=True
    )
    x = _final_norm(x, final_norm, last, "final_norm", dtype)
    logits = embedding(x, reverse=True)
    inputs = _inputs(tokens=tokens, **extra)
    model = _model(inputs, logits, name, dtype, LanguageModel)
    _refuse_leaks(model, "tokens", vocab_size, pad_id, max_length)
    return model


def encoder(
    vocab_size,
    dim,
    num_layers,
    num_heads=None,
    *,
    output="features",
    num_classes=None,
    pooling="mean",
    pooler=None,
    pooled_dropout=None,
    # The block
    hidden_dim=None,
    num_kv_heads=None,
    head_dim=None,
    window=None,
    activation="silu",
    gated=True,
    use_bias=False,
    norm="rms",
    norm_position="pre",
    block=None,
    # Embeddings and head
    position="rotary",
    max_length=None,
    pad_id=None,
    num_segments=None,
    token_types=False,
    embedding_scale=None,
    embedding_norm=None,
    final_norm="same",
    transform=None,
    tie_embeddings=True,
    output_bias=False,
    logit_cap=None,
    # Training and inputs
    dropout=0.0,
    init_stddev=0.02,
    remat=False,
    packed=False,
    name="encoder",
    dtype=None,
):
    """Builds an encoder-only model, as BERT is: every token sees every token.

    Tokens `(B, T)` to features, to logits over tokens (fill in the blank), or
    to logits over classes.

    Args:
        vocab_size: Number of tokens, V.
        dim: Number of features, D.
        num_layers: Number of blocks.
        num_heads: Number of heads. Not with `block`.

        output: `"features"`, `(B, T, D)`; `"tokens"`, logits `(B, T, V)`; or
            `"classes"`, logits `(B, num_classes)`.
        num_classes: Number of classes, for `output="classes"`.
        pooling: How features become one vector for `"classes"` or a `pooler`:
            `"mean"` over real tokens, or `"first"` token, as in BERT.
        pooler: Optional activation of a dense layer on the pooled vector
            (BERT: `"tanh"`). With `output="features"` the model then returns a
            dict of `features` and `pooled`, `(B, D)`.
        pooled_dropout: Share dropped from the pooled vector before the classes
            while training. Default: `dropout`.

        hidden_dim: Width of the feed-forward layer. Default: 4 D, or 8 D / 3
            rounded up to a multiple of 8 if `gated`, which has as many weights.
        num_kv_heads: Number of key and value heads. Default: `num_heads`.
        head_dim: Size of a head. Default: D / `num_heads`.
        window: Optional width of sliding-window attention, in tokens.
        activation: Activation of the feed-forward layer.
        gated: Whether the feed-forward layer is gated.
        use_bias: Whether projections have biases.
        norm: `"rms"`, `"layer"`, `None`, or a Keras layer as a template.
        norm_position: `"pre"`, `"post"` or `"sandwich"`.
        block: A function of the layer index that returns a fresh
            `TransformerBlock`, in place of all options of this group.

        position: As in `decoder`.
        max_length: Number of positions if `position="learned"`.
        pad_id: Optional token that is padding; it is masked everywhere.
        num_segments: Optional number of token types.
        token_types: Whether the model takes `token_types`, `(B, T)`. Otherwise
            every token is of type 0.
        embedding_scale: Optional number that multiplies embeddings, or
            `"sqrt"`.
        embedding_norm: Norm of the embeddings, like `norm`. Default: none.
        final_norm: Norm behind the last block, like `norm`. `"same"` is that of
            the blocks, and none if those are in post position.
        transform: Optional activation of a dense layer and a norm before the
            logits over tokens (BERT: `"gelu"`).
        tie_embeddings: Whether logits over tokens use the embedding table.
        output_bias: Whether logits over tokens have a bias.
        logit_cap: Optional bound of the logits over tokens.

        dropout: Share dropped from embeddings, attention weights and branches
            while training.
        init_stddev: Standard deviation of the initial kernels, as in `decoder`.
        remat: As in `decoder`.
        packed: Whether the model also takes `positions` and `segment_ids`.
            Not with `output="classes"` or a `pooler`.
        name: Name of the model.
        dtype: Dtype policy of all layers. Default: the global one.

    Returns:
        A `keras.Model` with the input `tokens`.

    Raises:
        ValueError: For options that are out of range or contradict each other.

    Example:

    >>> model = keras_tx.encoder(
    ...     96, 32, 2, 4, output="classes", num_classes=3, pad_id=0
    ... )
    >>> model(keras.ops.ones((1, 10), dtype="int32")).shape
    (1, 3)
    """
    checks.choice("output", output, ("features", "tokens", "classes"))
    checks.choice("pooling", pooling, ("mean", "first"))
    _check_encoder_options(
        output,
        num_classes,
        pooler,
        pooled_dropout,
        transform,
        output_bias,
        logit_cap,
        packed,
        token_types,
        num_segments,
    )
    make_block = _block_maker(
        block,
        dim=dim,
        num_layers=num_layers,
        dropout=dropout,
        init_stddev=init_stddev,
        remat=remat,
        dtype=dtype,
        num_heads=num_heads,
        hidden_dim=hidden_dim,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
        activation=activation,
        gated=gated,
        use_bias=use_bias,
        norm=norm,
        norm_position=norm_position,
    )
    place = _Placement(position, max_length, num_heads, bidirectional=True, dtype=dtype)
    embedding = TokenEmbedding(
        vocab_size,
        dim,
        pad_id=pad_id,
        # An unused second table would have no gradient.
        tie_weights=tie_embeddings or output != "tokens",
        use_bias=output_bias,
        soft_cap=logit_cap,
        embeddings_initializer=_normal(init_stddev),
        name="embedding",
        dtype=dtype,
    )

    tokens = keras.Input((None,), dtype="int32", name="tokens")
    extra = _packing_inputs(packed)
    types = (
        keras.Input((None,), dtype="int32", name="token_types") if token_types else None
    )
    x = embedding(tokens)
    segment = None
    if num_segments is not None:
        segment = LearnedSegment(num_segments, name="segment", dtype=dtype)
    x = _embed(
        x,
        place,
        scale=embedding_scale,
        norm=embedding_norm,
        dropout=dropout,
        positions=extra.get("positions"),
        segment=segment,
        token_types=types,
        dtype=dtype,
    )
    x, last = _stack(x, num_layers, make_block, place, "block", **extra)
    x = _final_norm(x, final_norm, last, "final_norm", dtype)
    inputs = _inputs(tokens=tokens, token_types=types, **extra)

    if output == "tokens":
        if transform is not None:
            x = _dense(dim, init_stddev, "transform", dtype, transform)(x)
            norm = NormTemplate("layer") if last.norm.config is None else last.norm
            x = norm.make("transform_norm", dtype)(x)
        logits = embedding(x, reverse=True)
        return _model(inputs, logits, name, dtype, LanguageModel)

    if output == "features" and pooler is None:
        return _model(inputs, x, name, dtype)
    pooled = Pooling(pooling, name="pooling", dtype=dtype)(x)
    if pooler is not None:
        pooled = _dense(dim, init_stddev, "pooler", dtype, pooler)(pooled)
    if output == "features":
        return _model(inputs, {"features": x, "pooled": pooled}, name, dtype)
    pooled_dropout = dropout if pooled_dropout is None else pooled_dropout
    if pooled_dropout:
        pooled = keras.layers.Dropout(
            pooled_dropout, name="pooled_dropout", dtype=dtype
        )(pooled)
    # Logits are in float32 under every half-precision policy.
    wide = "float64" if pooled.dtype == "float64" else "float32"
    logits = _dense(num_classes, init_stddev, "classes", wide)(pooled)
    return _model(inputs, logits, name, dtype)


def encoder_decoder(
    vocab_size,
    dim,
    num_layers,
    num_heads=None,
    *,
    num_encoder_layers=None,
    target_vocab_size=None,
    # The blocks
    hidden_dim=None,
    num_kv_heads=None,
    head_dim=None,
    activation="silu",
    gated=True,
    use_bias=False,
    norm="rms",
    norm_position="pre",
    encoder_block=None,
    decoder_block=None,
    # Embeddings and head
    position="rotary",
    max_length=None,
    pad_id=None,
    mask_target=True,
    embedding_scale=None,
    embedding_norm=None,
    final_norm="same",
    share_embeddings=None,
    tie_embeddings=True,
    output_scale=None,
    output_bias=False,
    logit_cap=None,
    # Training
    dropout=0.0,
    init_stddev=0.02,
    remat=False,
    name="encoder_decoder",
    dtype=None,
):
    """Builds the transformer of 2017: an encoder, and a decoder that asks it.

    Source `(B, S)` and target `(B, T)` tokens to the logits of each next target
    token, `(B, T, V)`. Every source token sees every source token; no target
    token sees a later one; each block of the decoder cross-attends to the
    encoder's features.

    Args:
        vocab_size: Number of source tokens, and of target tokens unless
            `target_vocab_size` says otherwise.
        dim: Number of features, D.
        num_layers: Number of decoder blocks.
        num_heads: Number of heads. Not with blocks of your own.
        num_encoder_layers: Number of encoder blocks. Default: `num_layers`.
        target_vocab_size: Number of target tokens. Default: `vocab_size`.

        hidden_dim: Width of the feed-forward layer. Default: 4 D, or 8 D / 3
            rounded up to a multiple of 8 if `gated`, which has as many weights.
        num_kv_heads: Number of key and value heads. Default: `num_heads`.
        head_dim: Size of a head. Default: D / `num_heads`.
        activation: Activation of the feed-forward layer.
        gated: Whether the feed-forward layer is gated.
        use_bias: Whether projections have biases.
        norm: `"rms"`, `"layer"`, `None`, or a Keras layer as a template.
        norm_position: `"pre"`, `"post"` or `"sandwich"`.
        encoder_block: A function of the layer index that returns a fresh
            `TransformerBlock`; with `decoder_block` in place of all options of
            this group.
        decoder_block: Likewise, with `cross_attention`.

        position: As in `decoder`; relative biases are one for the encoder and
            one for the decoder. Cross-attention has none.
        max_length: Number of positions if `position="learned"`.
        pad_id: Optional token that is padding, in source and target.
        mask_target: Whether padding in the target is masked. T5 starts its
            targets with the padding token, which must then be seen; later
            padding is unseen by what comes before it in any case, but counts
            in the loss unless `sample_weight` says otherwise.
        embedding_scale: Optional number that multiplies embeddings, or
            `"sqrt"`.
        embedding_norm: Norm of the embeddings, like `norm`. Default: none.
        final_norm: Norm behind each stack, like `norm`. `"same"` is that of the
            blocks, and none if those are in post position.
        share_embeddings: Whether source and target use one table. Default:
            whether their vocabularies are one.
        tie_embeddings: Whether logits use the target's embedding table.
        output_scale: Optional number that multiplies features before the
            logits; T5 has D ** -0.5.
        output_bias: Whether logits have a bias.
        logit_cap: Optional bound of the logits.

        dropout: Share dropped from embeddings, attention weights and branches
            while training.
        init_stddev: Standard deviation of the initial kernels, as in `decoder`.
        remat: As in `decoder`.
        name: Name of the model.
        dtype: Dtype policy of all layers. Default: the global one.

    Returns:
        A `LanguageModel`, a `keras.Model`, with the inputs `source` and `target`.

    Raises:
        ValueError: For options that are out of range or contradict each other.

    Example:

    >>> model = keras_tx.encoder_decoder(96, 32, 2, 4, pad_id=0)
    >>> source = keras.ops.ones((1, 7), dtype="int32")
    >>> target = keras.ops.ones((1, 5), dtype="int32")
    >>> model({"source": source, "target": target}).shape
    (1, 5, 96)
    """
    if (encoder_block is None) != (decoder_block is None):
        raise ValueError(
            "`encoder_block` and `decoder_block` come together, or not at all. "
            f"Received: encoder_block={encoder_block}, "
            f"decoder_block={decoder_block}."
        )
    if not checks.boolean("mask_target", mask_target) and pad_id is None:
        raise ValueError(
            "`mask_target=False` says that padding in the target is seen, and "
            "there is no `pad_id`. State one, or leave `mask_target` alone."
        )
    num_encoder_layers = (
        num_layers if num_encoder_layers is None else num_encoder_layers
    )
    target_vocab_size = vocab_size if target_vocab_size is None else target_vocab_size
    if share_embeddings is None:
        share_embeddings = vocab_size == target_vocab_size
    if share_embeddings and vocab_size != target_vocab_size:
        raise ValueError(
            "`share_embeddings` needs one vocabulary. Received: "
            f"vocab_size={vocab_size}, target_vocab_size={target_vocab_size}."
        )
    options = {
        "dim": dim,
        "dropout": dropout,
        "init_stddev": init_stddev,
        "remat": remat,
        "dtype": dtype,
        "num_heads": num_heads,
        "hidden_dim": hidden_dim,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "activation": activation,
        "gated": gated,
        "use_bias": use_bias,
        "norm": norm,
        "norm_position": norm_position,
    }
    make_encoder_block = _block_maker(
        encoder_block, num_layers=num_encoder_layers, **options
    )
    make_decoder_block = _block_maker(
        decoder_block, num_layers=num_layers, cross=True, **options
    )

    def embed(layer, tokens, place, prefix):
        return _embed(
            layer(tokens),
            place,
            scale=embedding_scale,
            norm=embedding_norm,
            dropout=dropout,
            prefix=prefix,
            dtype=dtype,
        )

    def embedding(name, size, head):
        return TokenEmbedding(
            size,
            dim,
            pad_id=pad_id,
            tie_weights=tie_embeddings or not head,
            use_bias=output_bias and head,
            soft_cap=logit_cap if head else None,
            embeddings_initializer=_normal(init_stddev),
            name=name,
            dtype=dtype,
        )

    source = keras.Input((None,), dtype="int32", name="source")
    target = keras.Input((None,), dtype="int32", name="target")
    if share_embeddings:
        source_embedding = target_embedding = embedding("embedding", vocab_size, True)
    else:
        source_embedding = embedding("source_embedding", vocab_size, False)
        target_embedding = embedding("target_embedding", target_vocab_size, True)

    place = _Placement(position, max_length, num_heads, bidirectional=True, dtype=dtype)
    x = embed(source_embedding, source, place, "encoder_")
    x, last = _stack(x, num_encoder_layers, make_encoder_block, place, "encoder_block")
    context = _final_norm(x, final_norm, last, "encoder_final_norm", dtype)

    place = _Placement(
        position, max_length, num_heads, bidirectional=False, dtype=dtype
    )
    x = embed(target_embedding, target, place, "decoder_")
    if not mask_target:
        x = Unmask(name="decoder_unmask", dtype=dtype)(x)
    x, last = _stack(
        x,
        num_layers,
        make_decoder_block,
        place,
        "decoder_block",
        context=context,
        use_causal_mask=True,
    )
    x = _final_norm(x, final_norm, last, "decoder_final_norm", dtype)
    if output_scale is not None:
        x = keras.layers.Rescaling(output_scale, name="output_scale", dtype=dtype)(x)
    logits = target_embedding(x, reverse=True)
    inputs = {"source": source, "target": target}
    model = _model(inputs, logits, name, dtype, LanguageModel)
    _refuse_leaks(model, "target", target_vocab_size, pad_id, max_length)
    return model


@register
class LanguageModel(Functional):  # or Keras would change its base on first use
    """A `keras.Model` whose logits may be put off while it trains.

    What `decoder`, `encoder_decoder` and `encoder(output="tokens")` return, and
    what to make of layers of your own in place of `keras.Model` if it is to train
    with `ChunkedCrossentropy`, which never holds the logits of all tokens. Their
    head must be a `TokenEmbedding`. In all else it is a `keras.Model`.

    Args:
        inputs: As for `keras.Model`.
        outputs: Logits, `(B, T, V)`.
        name: Optional name.

    Example:

    >>> tokens = keras.Input((None,), dtype="int32")
    >>> embedding = keras_tx.TokenEmbedding(vocab_size=96, dim=16)
    >>> x = keras_tx.TransformerBlock(2, 32, causal=True)(embedding(tokens))
    >>> model = keras_tx.LanguageModel(tokens, embedding(x, reverse=True))
    >>> model.compile("adamw", keras_tx.ChunkedCrossentropy())
    """

    def make_train_function(self, force=False):
        # TensorFlow traces a step again if it made variables while tracing it, and
        # Keras leaves those of the optimizer to that moment.
        if self.trainable_variables and not getattr(self.optimizer, "built", True):
            self.optimizer.build(self.trainable_variables)
        return super().make_train_function(force)

    def train_step(self, *state_and_data):
        with self._logits_put_off():
            return super().train_step(*state_and_data)

    def test_step(self, *state_and_data):
        with self._logits_put_off():
            return super().test_step(*state_and_data)

    def _logits_put_off(self):
        chunked = isinstance(self.loss, losses.ChunkedCrossentropy)
        if chunked and self._compile_metrics is None:
            return losses.PutOff()
        return contextlib.nullcontext()

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        step = losses.put_off()
        with contextlib.nullcontext() if step is None else step.returned(y_pred):
            return super().compute_loss(x, y, y_pred, sample_weight, training=training)


# ----------------------------------------------------------------------------
# Pieces of the figures
# ----------------------------------------------------------------------------


def _embed(
    x,
    place,
    *,
    scale,
    norm,
    dropout,
    positions=None,
    segment=None,
    token_types=None,
    prefix="",
    dtype=None,
):
    """Scale, token types, position, norm and dropout of embeddings."""
    if scale is not None:
        scale = math.sqrt(x.shape[-1]) if scale == "sqrt" else scale
        scale = checks.positive_number("embedding_scale", scale)
        x = keras.layers.Rescaling(scale, name=f"{prefix}embedding_scale", dtype=dtype)(
            x
        )
    if segment is not None:
        x = segment(x) if token_types is None else segment(x, token_types=token_types)
    if place.kind == "embeddings":
        position = place.fresh(f"{prefix}position")
        x = position(x) if positions is None else position(x, positions=positions)
    norm = NormTemplate(norm).make(f"{prefix}embedding_norm", dtype)
    if norm is not None:
        x = norm(x)
    if dropout:
        x = keras.layers.Dropout(
            dropout, name=f"{prefix}embedding_dropout", dtype=dtype
        )(x)
    return x


def _stack(x, num_layers, make_block, place, prefix, **call):
    """The blocks, one after the other, with one relative bias for all.

    Returns features and the last block, which tells what norm goes behind it.
    """
    if place.kind == "shared bias":
        name = prefix.removesuffix("block") + "position"
        positions = call.get("positions")
        kwargs = {} if positions is None else {"positions": positions}
        call["bias"] = place.fresh(name)(x, **kwargs)
    for index in range(num_layers):
        block = make_block(index, place, f"{prefix}_{index}")
        x = block(x, **call)
    return x, block


def _final_norm(x, final_norm, block, name, dtype):
    """The norm behind a stack; post-norm blocks end in one already."""
    if isinstance(final_norm, str) and final_norm == "same":
        final_norm = None if block.norm_position == "post" else block.norm
    layer = NormTemplate(final_norm).make(name, dtype)
    return x if layer is None else layer(x)


def _dense(units, stddev, name, dtype, activation=None):
    return keras.layers.Dense(
        units,
        activation=get_activation(activation),
        kernel_initializer=_normal(stddev),
        name=name,
        dtype=dtype,
    )


def _normal(stddev):
    return keras.initializers.RandomNormal(
        stddev=checks.positive_number("init_stddev", stddev)
    )


# Layers of which is known that no token of theirs sees a later one in a decoder.
WITHOUT_LEAKS = (
    AlibiPosition,
    FeedForward,
    LearnedPosition,
    MultiHead,
    RelativePosition,
    RotaryPosition,
    ScaledAttention,
    SinusoidalPosition,
    TokenEmbedding,
    TransformerBlock,
    keras.layers.Activation,
    keras.layers.Dense,
    keras.layers.Dropout,
    keras.layers.InputLayer,
    keras.layers.Rescaling,
    keras.Sequential,
)
PROJECTIONS = ("rd,dnh->rnh", "rnh,nhd->rd")  # those of `MultiHead`


def _refuse_leaks(model, name, vocab_size, pad_id, max_length):
    """Tries out a decoder that holds layers of the user's own.

    Blocks are told to be causal; what else mixes tokens, a convolution as
    `feed_forward` or a norm over time, cannot be told. So the last token is
    changed, and nothing before it may change.
    """
    unknown = sorted(
        {
            f"{layer.name} ({type(layer).__name__})"
            for layer in model._flatten_layers(include_self=False)
            if not _works_within_tokens(layer)
        }
    )
    ids = [token for token in range(min(3, vocab_size)) if token != pad_id]
    if not unknown or len(ids) < 2:
        return
    length = min(8, max_length or 8)
    tokens = np.full((2, length), ids[0], "int32")
    tokens[1, -1] = ids[1]
    row = {
        "source": np.full((1, length), ids[0], "int32"),
        "positions": np.arange(length, dtype="int32")[None],
        "segment_ids": np.zeros((1, length), "int32"),
    }
    before, after = (
        checks.known_value(
            model(
                {x.name: row.get(x.name, tokens[i : i + 1]) for x in model.inputs}
                if len(model.inputs) > 1
                else tokens[i : i + 1]
            )
        )
        for i in range(2)
    )
    if before is None or after is None:  # built while something traces it
        return
    if not np.array_equal(before[:, :-1], after[:, :-1]):
        raise ValueError(
            "The future leaks: a change of the last of "
            f"{length} `{name}` changed the logits before it. What mixes tokens "
            f"is among these layers: {', '.join(unknown)}. A decoder needs "
            'layers that work within each token, or look back only (`padding="'
            'causal"` in a convolution, `axis=-1` in a norm).'
        )


def _works_within_tokens(layer):
    """Whether a layer is known not to mix tokens, or to obey when causal."""
    if type(layer) in (*WITHOUT_LEAKS, Unmask):
        return True
    if type(layer) is keras.layers.EinsumDense:
        return layer.equation in PROJECTIONS
    norms = (keras.layers.LayerNormalization, keras.layers.RMSNormalization, RMSNorm)
    return type(layer) in norms and layer.axis in (-1, [-1], (-1,))


@register
class Unmask(keras.layers.Layer):
    """Takes the mask off features, so that padding counts as a token."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True  # or Keras warns of a lost mask

    def call(self, x):
        return ops.copy(x)  # the mask hangs on the tensor itself

    def compute_mask(self, x, previous_mask=None):
        return None

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)


@register
class Pooling(keras.layers.Layer):
    """Turns the features of a text into one vector: their mean, or the first.

    Padding, whatever stands in it, counts in no mean, and a text of nothing but
    padding has a mean of 0.

    Args:
        kind: `"mean"` or `"first"`.
    """

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = checks.choice("kind", kind, ("mean", "first"))
        self.supports_masking = True

    def call(self, x):
        if self.kind == "first":
            return x[:, 0]  # (B, T, D) -> (B, D)
        # In float32: float16 cannot count beyond 2,048.
        wide = x if self.compute_dtype == "float64" else ops.cast(x, "float32")
        mask = masks.implicit(x)
        if mask is None:
            return ops.cast(ops.mean(wide, axis=1), self.compute_dtype)
        mask = ops.expand_dims(ops.cast(mask, "bool"), -1)
        total = ops.sum(ops.where(mask, wide, 0.0), axis=1)
        count = ops.sum(ops.cast(mask, wide.dtype), axis=1)
        return ops.cast(total / ops.maximum(count, 1.0), self.compute_dtype)

    def compute_mask(self, x, previous_mask=None):
        return None

    def compute_output_shape(self, x_shape):
        return (x_shape[0], x_shape[2])

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


def _packing_inputs(packed):
    if not checks.boolean("packed", packed):
        return {}
    return {
        name: keras.Input((None,), dtype="int32", name=name)
        for name in ("positions", "segment_ids")
    }


def _inputs(**inputs):
    """One tensor where there is one input, so that arrays go straight in."""
    given = {name: x for name, x in inputs.items() if x is not None}
    return given if len(given) > 1 else next(iter(given.values()))


def _model(inputs, outputs, name, dtype, model_class=keras.Model):
    """Makes the model that a builder returns."""
    model = model_class(inputs, outputs, name=name)
    if dtype is not None:
        # `compile` asks the model, not its layers, whether to scale the loss.
        model.dtype_policy = dtype
    leave_to_parts(model)
    return model


def _check_encoder_options(
    output,
    num_classes,
    pooler,
    pooled_dropout,
    transform,
    output_bias,
    logit_cap,
    packed,
    token_types,
    num_segments,
):
    if (output == "classes") != (num_classes is not None):
        raise ValueError(
            '`num_classes` belongs to output="classes", and is needed there. '
            f"Received: output={output!r}, num_classes={num_classes!r}."
        )
    checks.positive_integer("num_classes", num_classes, optional=True)
    if pooled_dropout is not None:
        checks.rate("pooled_dropout", pooled_dropout)
        if output != "classes":
            raise ValueError(
                '`pooled_dropout` belongs to output="classes". Received: '
                f"output={output!r}, pooled_dropout={pooled_dropout!r}."
            )
    checks.boolean("token_types", token_types)
    if token_types and num_segments is None:
        raise ValueError(
            "`token_types=True` adds an input for token types; state how many "
            "there are with `num_segments`."
        )
    if output != "tokens":
        for name, value in (
            ("transform", transform),
            ("output_bias", output_bias),
            ("logit_cap", logit_cap),
        ):
            if value not in (None, False):
                raise ValueError(
                    f'`{name}` belongs to output="tokens". Received: '
                    f"output={output!r}, {name}={value!r}."
                )
    pools = output == "classes" or pooler is not None
    if output == "tokens" and pooler is not None:
        raise ValueError(
            '`pooler` belongs to output="classes" or "features". Received: '
            f'output="tokens", pooler={pooler!r}.'
        )
    if packed and pools:
        raise ValueError(
            "`packed=True` puts several texts into one row, which cannot become "
            'one vector. Choose output="features" or "tokens" without a pooler.'
        )


class _Placement:
    """Where position goes: embeddings, heads, or a bias shared by all blocks.

    Args:
        position: As in `decoder`.
        max_length: Number of learned positions.
        num_heads: Number of heads that a named bias serves.
        bidirectional: Whether this stack sees later tokens.
        dtype: Dtype policy, or `None` for the layer's own.
    """

    def __init__(self, position, max_length, num_heads, *, bidirectional, dtype):
        self.dtype = dtype
        if isinstance(position, str):
            checks.choice("position", position, POSITIONS)
            if position in ("relative", "alibi") and num_heads is None:
                raise ValueError(
                    f'position="{position}" biases every head and needs '
                    "`num_heads`. With blocks of your own, pass the layer: "
                    "`RelativePosition(num_heads)`."
                )
        if (position == "learned") != (max_length is not None):
            raise ValueError(
                '`max_length` belongs to position="learned", and is needed '
                f"there. Received: position={position!r}, "
                f"max_length={max_length!r}."
            )
        if position == "rotary":
            position = RotaryPosition()
        elif position == "sinusoidal":
            position = SinusoidalPosition()
        elif position == "learned":
            position = LearnedPosition(max_length)
        elif position == "relative":
            position = RelativePosition(num_heads, bidirectional=bidirectional)
        elif position == "alibi":
            position = AlibiPosition(num_heads)
        elif position is not None and not isinstance(position, keras.layers.Layer):
            raise ValueError(
                f"`position` must be one of {', '.join(map(repr, POSITIONS))}, "
                f"None, or a layer. Received: position={position!r}."
            )
        self.template = position
        if position is None:
            self.kind = None
        elif isinstance(position, RelativePosition):
            self.kind = "shared bias"
            # One template serves both stacks of an encoder-decoder.
            self.template = replicate(position, bidirectional=bidirectional)
        elif hasattr(position, "rotate") or hasattr(position, "bias"):
            self.kind = "heads"
        else:
            self.kind = "embeddings"

    def fresh(self, name):
        """Returns a copy of the layer of its own."""
        layer = replicate(self.template, name=name)
        if self.dtype is not None:
            layer.dtype_policy = self.dtype
        return layer


def _block_maker(block, *, num_layers, remat, dtype, cross=False, **options):
    """Returns a function of index, placement and name that makes a block."""
    checks.boolean("remat", remat)
    checks.positive_integer("num_layers", num_layers)
    checks.positive_integer("dim", options["dim"])
    checks.rate("dropout", options["dropout"])
    if block is None:
        if options["num_heads"] is None:
            raise ValueError(
                "`num_heads` is needed to make blocks. State it, or pass blocks "
                "of your own."
            )
        options = {**options, "num_layers": num_layers, "remat": remat, "cross": cross}
        return lambda index, place, name: _default_block(
            place, name, dtype=dtype, **options
        )
    given = {
        name: options[name]
        for name, default in BLOCK_OPTIONS.items()
        if name in options and options[name] is not default and options[name] != default
    }
    if given:
        raise ValueError(
            "Blocks of your own decide their options themselves. Received both "
            f"a block and {given}. Move these into the function that makes it."
        )
    if not callable(block) or isinstance(block, keras.layers.Layer):
        raise ValueError(
            "A block is given as a function of the layer index that returns a "
            f"fresh `TransformerBlock`. Received: {block!r}."
        )
    return lambda index, place, name: _own_block(
        block(index), place, name, remat, dtype
    )


def _own_block(block, place, name, remat, dtype):
    """A copy of a block of the user's, so that one returned twice is two."""
    if not isinstance(block, TransformerBlock):
        raise ValueError(
            "The function for blocks must return a `TransformerBlock`. Received: "
            f"{block!r}."
        )
    overrides = {"name": name, **({"remat": True} if remat else {})}
    if dtype is not None:
        overrides["dtype"] = dtype
    if place.kind == "heads":
        attention = child_config(block.attention)
        if attention["config"].get("position", "none") is None:
            attention["config"]["position"] = child_config(place.fresh("position"))
            overrides["attention"] = attention
    return replicate(block, **overrides)


def _default_block(
    place,
    name,
    *,
    dim,
    num_layers,
    num_heads,
    dropout,
    init_stddev,
    remat,
    dtype,
    cross,
    hidden_dim,
    num_kv_heads,
    head_dim,
    activation,
    gated,
    use_bias,
    norm,
    norm_position,
    window=None,
):
    """The block of the builders, with GPT-2's initial values."""
    stddev = checks.positive_number("init_stddev", init_stddev)
    into_residual = stddev / math.sqrt(2 * num_layers)
    if hidden_dim is None:
        # A gate makes three kernels of two: 8/3 instead of 4 is as many weights.
        hidden_dim = -(-8 * dim // 3 // 8) * 8 if gated else 4 * dim

    def heads(position=None, window=None):
        return MultiHead(
            num_heads,
            head_dim,
            num_kv_heads=num_kv_heads,
            attention=ScaledAttention(window=window, dropout=dropout),
            position=position,
            use_bias=use_bias,
            kernel_initializer=_normal(stddev),
            merge_initializer=_normal(into_residual),
        )

    position = place.fresh("position") if place.kind == "heads" else None
    return TransformerBlock(
        heads(position, window),
        FeedForward(
            hidden_dim,
            activation,
            gated=gated,
            use_bias=use_bias,
            kernel_initializer=_normal(stddev),
            narrow_initializer=_normal(into_residual),
        ),
        cross_attention=heads() if cross else None,
        norm=norm,
        norm_position=norm_position,
        dropout=dropout,
        remat=remat,
        name=name,
        dtype=dtype,
    )
