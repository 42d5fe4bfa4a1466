"""The block that every transformer repeats."""

import contextlib
import numbers

import keras
from keras import ops

from keras_tx import checks, masks, recording
from keras_tx.attention import MultiHead
from keras_tx.feed_forward import FeedForward
from keras_tx.norms import NormTemplate
from keras_tx.remat import Rematerialized
from keras_tx.serialization import (
    adopt,
    deserialize_children,
    dtype_config,
    fresh_seed,
    keep_frozen,
    register,
    serialize_children,
)


@register
class TransformerBlock(Rematerialized, keras.layers.Layer):
    """Attention across tokens, then a feed-forward layer within each.

    Each branch adds to what it was given (`x + f(x)`, He et al., 2016), so
    that gradients reach the first layer of a deep stack, and normalizes, so
    that activations do not drift. The same block makes an encoder, a decoder
    (`causal`), and with `cross_attention` the decoder of an encoder-decoder.
    See [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), and
    [Xiong et al., 2020](https://arxiv.org/abs/2002.04745) on where the norm
    goes.

    Args:
        attention: A `MultiHead`, or a number of heads for a fresh one.
        feed_forward: A `FeedForward` or any layer that keeps the shape, or a
            hidden size for a fresh `FeedForward`.
        cross_attention: Optional `MultiHead`, or a number of heads, that
            attends to `context`, between the two.
        causal: Whether later tokens are hidden.
        norm: `"layer"` or `"rms"`, both with an epsilon of 1e-5, `None`, or a
            Keras layer as a template, copied per place.
        norm_position: `"pre"`, x + f(norm(x)), stable at depth; `"post"`,
            norm(x + f(x)), as in 2017 and BERT; `"sandwich"`,
            x + norm(f(norm(x))), as in Gemma 2.
        residual: `"serial"`; `"parallel"`, where attention and feed-forward
            read the same input, as in GPT-NeoX; or `"none"`, to see what it
            saves us from.
        dropout: Share of each branch's features to drop while training.
        remat: Whether to compute the block again for the gradient, instead of
            keeping what lies between its input and its output: the memory of a
            deep stack for a second forward pass. As in a
            `keras.RematScope(mode="full")`, and saved.
        seed: Optional integer that makes dropout reproducible.

    Call arguments:
        x: Features, `(B, T, D)`.
        context: Features to cross-attend to, `(B, S, D')`.
        attention_mask: Optional `(B, T)`, over keys, `(B, T, T)` or
            `(B, 1 or N, T, T)`, for self-attention.
        context_mask: Optional `(B, S)`, `(B, T, S)` or `(B, 1 or N, T, S)`,
            for cross-attention.
        bias: Optional scores to add in self-attention, broadcastable to
            `(B, N, T, T)`.
        positions: Optional integers, `(T,)` or `(B, T)`.
        segment_ids: Optional integers `(B, T)`; tokens attend within their
            segment.
        use_causal_mask: Whether to be causal in this call.
        return_attention_scores: Whether to return the weights too.
        training: Whether dropout is on.

    Output shape:
        Same as `x`. With `return_attention_scores`, a tuple of it, the weights
        `(B, N, T, T)` and, with cross-attention, those over the context
        `(B, N, T, S)`.

    Raises:
        ValueError: For combinations without a meaning, layers that are in
            another slot, and a context that is missing or has no use.

    Example:

    >>> x = keras.random.normal((2, 10, 64))
    >>> block = keras_tx.TransformerBlock(attention=4, feed_forward=256)
    >>> block(x).shape
    (2, 10, 64)
    """

    def __init__(
        self,
        attention,
        feed_forward,
        *,
        cross_attention=None,
        causal=False,
        norm="layer",
        norm_position="pre",
        residual="serial",
        dropout=0.0,
        remat=False,
        seed=None,
        **kwargs,
    ):
        self.remat = checks.boolean("remat", remat)
        with keras.RematScope("full") if remat else contextlib.nullcontext():
            super().__init__(**kwargs)
        self.causal = checks.boolean("causal", causal)
        self.norm = NormTemplate(norm)
        self.norm_position = checks.choice(
            "norm_position", norm_position, ("pre", "post", "sandwich")
        )
        self.residual = checks.choice(
            "residual", residual, ("serial", "parallel", "none")
        )
        self.dropout = checks.rate("dropout", dropout)
        self.seed = checks.integer("seed", seed, optional=True)
        if norm is None and norm_position != "pre":
            raise ValueError(
                f'norm_position="{norm_position}" places a norm, and `norm` is '
                'None. Choose a norm, or leave `norm_position` at "pre".'
            )
        if residual == "parallel" and norm_position == "post":
            raise ValueError(
                'residual="parallel" adds both branches at once, so that there '
                'is no place after each for norm_position="post". Choose "pre" '
                'or "sandwich".'
            )
        if residual == "parallel" and cross_attention is not None:
            raise ValueError(
                'residual="parallel" has no place for `cross_attention`, which '
                "asks with what self-attention found. Choose "
                'residual="serial".'
            )
        self.attention = adopt(self, "attention", self._heads("attention", attention))
        self.cross_attention = adopt(
            self, "cross_attention", self._heads("cross_attention", cross_attention)
        )
        if isinstance(feed_forward, numbers.Integral):
            feed_forward = FeedForward(
                checks.positive_integer("feed_forward", feed_forward)
            )
        if feed_forward is None:
            raise ValueError(
                "`feed_forward` must be a layer or a hidden size. Received: None."
            )
        self.feed_forward = adopt(self, "feed_forward", feed_forward)
        # The block hands the mask on; Keras would warn that it is lost.
        self.feed_forward.supports_masking = True
        self._num_features = None  # of `x`, once built
        self.supports_masking = True

    def _heads(self, slot, attention):
        if attention is None and slot == "cross_attention":
            return None
        if isinstance(attention, numbers.Integral):
            return MultiHead(checks.positive_integer(slot, attention))
        if not isinstance(attention, keras.layers.Layer):
            raise ValueError(
                f"`{slot}` must be a `MultiHead` or a number of heads. "
                f"Received: {slot}={attention!r}."
            )
        return attention

    @property
    def branches(self):
        """Names of the branches, in order."""
        if self.cross_attention is None:
            return ("attention", "feed_forward")
        return ("attention", "cross_attention", "feed_forward")

    def build(self, x_shape, context_shape=None):
        if len(x_shape) != 3 or x_shape[-1] is None:
            raise ValueError(
                "`TransformerBlock` works on features of shape (batch, time, "
                f"dim) with a known dim. Received inputs of shape "
                f"{tuple(x_shape)}."
            )
        self._check_context(context_shape)
        if context_shape is not None and len(context_shape) != 3:
            raise ValueError(
                "`context` must have the shape (batch, time, dim). Received: "
                f"context.shape={tuple(context_shape)}."
            )
        self._num_features = x_shape[-1]
        for branch in self.branches:
            before = "" if self.norm_position != "post" else None
            after = {"pre": None, "post": "", "sandwich": "_output"}
            self._build_norm(branch, before, x_shape)
            self._build_norm(branch, after[self.norm_position], x_shape)
            child = getattr(self, branch)
            if branch == "cross_attention":
                child.build(x_shape, context_shape)
            else:
                child.build(x_shape)
            if self.dropout:
                drop = keras.layers.Dropout(
                    self.dropout,
                    seed=fresh_seed(self.seed, f"{self.path}/{branch}"),
                    dtype=self.dtype_policy,
                    name=f"{branch}_dropout",
                )
                setattr(self, drop.name, drop)
        keep_frozen(self)

    def _build_norm(self, branch, infix, x_shape):
        """Makes `attention_norm`, or `attention_output_norm` behind a branch."""
        if infix is None:
            return
        norm = self.norm.make(f"{branch}{infix}_norm", self.dtype_policy)
        if norm is not None:
            setattr(self, norm.name, norm)
            norm.build(x_shape)

    def _check_inputs(self, x, context):
        self._check_context(context)
        checks.rank("x", x, (3,), "(batch, time, dim)")
        checks.floats("x", x)
        checks.features("x", x, self._num_features, self)

    def _check_context(self, context):
        if self.cross_attention is not None and context is None:
            raise ValueError(
                "This `TransformerBlock` has `cross_attention` and received no "
                "`context` to attend to. Call it with `block(x, context=...)`."
            )
        if self.cross_attention is None and context is not None:
            raise ValueError(
                "This `TransformerBlock` received a `context` and has no "
                "`cross_attention` to attend to it. Make it with "
                "`TransformerBlock(..., cross_attention=num_heads)`."
            )

    def __call__(self, x, *args, **kwargs):
        given = checks.given_by_name(TransformerBlock.call, (x, *args), skip=1)
        return super().__call__(x, **given, **kwargs)

    def call(
        self,
        x,
        context=None,
        attention_mask=None,
        context_mask=None,
        bias=None,
        positions=None,
        segment_ids=None,
        use_causal_mask=False,
        return_attention_scores=False,
        training=None,
    ):
        self._check_inputs(x, context)
        implicit = masks.implicit(x)
        found = {}

        def attend(x):
            result = self.attention(
                x,
                # Norms of other makers drop the mask on the way here.
                query_mask=implicit,
                key_mask=implicit,
                attention_mask=attention_mask,
                bias=bias,
                positions=positions,
                segment_ids=segment_ids,
                use_causal_mask=self.causal or use_causal_mask,
                return_attention_scores=return_attention_scores,
                training=training,
            )
            return self._keep_scores(result, found, "attention")

        def cross_attend(x):
            result = self.cross_attention(
                x,
                context,
                query_mask=implicit,
                attention_mask=context_mask,
                return_attention_scores=return_attention_scores,
                training=training,
            )
            return self._keep_scores(result, found, "cross_attention")

        if self.residual == "parallel":
            y = (
                x
                + self._branch("attention", attend, x, training)
                + self._branch("feed_forward", self.feed_forward, x, training)
            )
        else:
            y = self._step("attention", attend, x, training)
            if self.cross_attention is not None:
                y = self._step("cross_attention", cross_attend, y, training)
            y = self._step("feed_forward", self.feed_forward, y, training)
        recorder = recording.scope()
        if recorder is not None:
            recorder.note(recording.Passed(self, x, y, implicit))
        if return_attention_scores:
            return (y, *(found[name] for name in self.branches[:-1]))
        return y

    @staticmethod
    def _keep_scores(result, found, name):
        if isinstance(result, tuple):
            result, found[name] = result
        return result

    def _step(self, name, function, x, training):
        """One branch, its residual and, in post position, its norm."""
        y = self._branch(name, function, x, training)
        if self.residual != "none":
            y = x + y
        if self.norm_position == "post":
            y = self._norm(name, y)
        return y

    def _branch(self, name, function, x, training):
        """What a branch adds: norm, function, norm, dropout."""
        if self.norm_position != "post":
            x = self._norm(name, x)
        y = function(x)
        if self.norm_position == "sandwich":
            y = self._norm(f"{name}_output", y)
        y = ops.cast(y, self.compute_dtype)
        if self.dropout:
            y = getattr(self, f"{name}_dropout")(y, training=training)
        return y

    def _norm(self, name, x):
        if self.norm.config is None:
            return x
        return getattr(self, f"{name}_norm")(x)

    def compute_output_shape(self, x_shape, context_shape=None):
        return tuple(x_shape)

    def compute_output_spec(
        self,
        x,
        context=None,
        attention_mask=None,
        context_mask=None,
        bias=None,
        positions=None,
        segment_ids=None,
        use_causal_mask=False,
        return_attention_scores=False,
        training=None,
    ):
        self._check_inputs(x, context)
        output = keras.KerasTensor(x.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        outputs = [output]
        for name, memory in (("attention", x), ("cross_attention", context)):
            if name in self.branches:
                heads = getattr(self, name).num_heads
                shape = (x.shape[0], heads, x.shape[1], memory.shape[1])
                outputs.append(keras.KerasTensor(shape, dtype=self.compute_dtype))
        return tuple(outputs)

    def get_config(self):
        return {
            **super().get_config(),
            "dtype": dtype_config(self),
            **serialize_children(self, "attention", "feed_forward", "cross_attention"),
            "causal": self.causal,
            "norm": self.norm.config,
            "norm_position": self.norm_position,
            "residual": self.residual,
            "dropout": self.dropout,
            "remat": self.remat,
            "seed": self.seed,
        }

    @classmethod
    def from_config(cls, config):
        return cls(
            **deserialize_children(
                config, "attention", "feed_forward", "cross_attention", "norm"
            )
        )
