"""Tokens to features and back, and token types."""

import keras
from keras import ops

from keras_tx import checks, losses
from keras_tx.remat import Rematerialized
from keras_tx.serialization import fresh_initializer, register


@register
class TokenEmbedding(Rematerialized, keras.layers.ReversibleEmbedding):
    """Embeds tokens, and turns features back into logits over tokens.

    A `keras.layers.ReversibleEmbedding` that keeps the mask on the way out, has
    any token as padding, computes logits in float32 and may add a bias to
    them. One table serves both ways unless untied. See
    [Press and Wolf, 2017](https://arxiv.org/abs/1608.05859).

    Args:
        vocab_size: Number of tokens, V.
        dim: Number of features, D.
        pad_id: Optional token that is padding; it is masked from there on.
        tie_weights: Whether logits use the embedding table. Otherwise they
            have a kernel of their own, `(D, V)`.
        use_bias: Whether logits have a bias, `(V,)`.
        soft_cap: Optional bound of the logits: `cap * tanh(logits / cap)`.
        embeddings_initializer: Initializer of the table(s). Default: normal
            with a standard deviation of 0.02.

    Call arguments:
        inputs: Integer tokens, `(B, T)`, or with `reverse` features `(B, T, D)`.
        reverse: Whether to compute logits.

    Output shape:
        `(B, T, D)` in the compute dtype, or with `reverse` logits `(B, T, V)`
        in float32.

    Raises:
        ValueError: For tokens that are no integers.

    Example:

    >>> embedding = keras_tx.TokenEmbedding(vocab_size=96, dim=16, pad_id=0)
    >>> x = embedding(keras.ops.array([[5, 7, 0]]))
    >>> x.shape, embedding(x, reverse=True).shape
    ((1, 3, 16), (1, 3, 96))
    """

    def __init__(
        self,
        vocab_size,
        dim,
        *,
        pad_id=None,
        tie_weights=True,
        use_bias=False,
        soft_cap=None,
        embeddings_initializer=None,
        **kwargs,
    ):
        if embeddings_initializer is None:
            embeddings_initializer = keras.initializers.RandomNormal(stddev=0.02)
        super().__init__(
            checks.positive_integer("vocab_size", vocab_size),
            checks.positive_integer("dim", dim),
            tie_weights=checks.boolean("tie_weights", tie_weights),
            embeddings_initializer=embeddings_initializer,
            **kwargs,
        )
        self.pad_id = checks.integer("pad_id", pad_id, optional=True)
        if self.pad_id is not None and not 0 <= self.pad_id < self.vocab_size:
            raise ValueError(
                f"`pad_id` must be one of the {self.vocab_size} tokens, 0 to "
                f"{self.vocab_size - 1}. Received: pad_id={pad_id}."
            )
        self.use_bias = checks.boolean("use_bias", use_bias)
        self.soft_cap = checks.positive_number("soft_cap", soft_cap, optional=True)
        # Keras' constructor ties masking to token 0; here any token may pad,
        # and the mask of features passes on their way back to tokens.
        self.supports_masking = True

    @property
    def vocab_size(self):
        """Number of tokens."""
        return self.input_dim

    @property
    def dim(self):
        """Number of features."""
        return self.output_dim

    def build(self, input_shape=None):
        if self.built:
            return
        super().build(input_shape)
        if self.use_bias:
            self.bias = self.add_weight(
                name="bias",
                shape=(self.vocab_size,),
                initializer="zeros",
                # Added in float32, inside and outside an autocast scope: which
                # of the two it is depends on how the model was made.
                autocast=False,
            )

    def add_weight(self, *args, initializer=None, name=None, **kwargs):
        # Keras gives both tables one initializer, and so the same numbers.
        if initializer is not None:
            initializer = fresh_initializer(initializer, f"{self.path}/{name}")
        return super().add_weight(*args, initializer=initializer, name=name, **kwargs)

    def call(self, inputs, reverse=False):
        if reverse:
            return self._logits(inputs)
        tokens = checks.integers("tokens", inputs, "one id a token")
        self._check_ids(tokens)
        rows = ops.take(self.embeddings, tokens, axis=0)
        return ops.cast(rows, self.compute_dtype)

    def _logits(self, x):
        checks.floats("features", x)
        checks.features("features", x, self.dim, self)
        x = ops.cast(x, self.compute_dtype)
        step = losses.put_off()
        if step is not None:
            return step.features(self, x)
        return self.head().logits(x)

    def head(self):
        """Returns what turns features into logits, a `keras_tx.losses.Head`."""
        table = self.embeddings if self.tie_weights else self.reverse_embeddings
        return losses.Head(
            ops.convert_to_tensor(table),
            tied=self.tie_weights,
            bias=ops.convert_to_tensor(self.bias) if self.use_bias else None,
            soft_cap=self.soft_cap,
            # By name: a tied head would compute in whatever autocast scope it
            # happens to be called.
            dtype=self.compute_dtype,
        )

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if losses.put_off() is not None:
            return layer_call  # what it returns must come out as it is
        return super().rematerialized_call(layer_call, *args, **kwargs)

    def _check_ids(self, tokens):
        # Only where values lie on the host: a device would have to be waited
        # for, and compiled code has no values.
        values = checks.known_value(tokens)
        if values is None or values.size == 0:
            return
        low, high = values.min(), values.max()
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"Tokens must lie in 0 to {self.vocab_size - 1}, the "
                f"{self.vocab_size} tokens of this embedding. Received ids from "
                f"{low} to {high}. Check the tokenizer, or raise `vocab_size`."
            )

    def compute_mask(self, inputs, previous_mask=None):
        if not checks.is_integer_dtype(inputs):
            return previous_mask  # features on their way back
        if self.pad_id is None:
            return previous_mask
        mask = ops.not_equal(inputs, self.pad_id)
        if previous_mask is not None:
            mask = ops.logical_and(mask, previous_mask)
        return mask

    def compute_output_spec(self, inputs, reverse=False):
        if reverse:
            dtype = "float64" if self.compute_dtype == "float64" else "float32"
            return keras.KerasTensor((*inputs.shape[:-1], self.vocab_size), dtype)
        checks.integers("tokens", inputs, "one id a token")
        return keras.KerasTensor((*inputs.shape, self.dim), self.compute_dtype)

    def compute_output_shape(self, input_shape, reverse=False):
        if reverse:
            return (*input_shape[:-1], self.vocab_size)
        return (*input_shape, self.dim)

    @property
    def variable_serialization_spec(self):
        spec = {
            mode: list(names)
            for mode, names in super().variable_serialization_spec.items()
        }
        if self.use_bias:
            for names in spec.values():
                names.append("bias")
        return spec

    def get_config(self):
        config = super().get_config()
        for name in (
            "input_dim",
            "output_dim",
            "mask_zero",
            "reverse_dtype",
            "logit_soft_cap",
        ):
            config.pop(name, None)
        # Not every Keras knows this one; nothing is lost where it is empty.
        if config.get("quantization_config") is None:
            config.pop("quantization_config", None)
        return {
            **config,
            "vocab_size": self.vocab_size,
            "dim": self.dim,
            "pad_id": self.pad_id,
            "tie_weights": self.tie_weights,
            "use_bias": self.use_bias,
            "soft_cap": self.soft_cap,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


@register
class LearnedSegment(keras.layers.Layer):
    """Adds one learned vector per token type to embeddings.

    BERT tells its two sentences apart this way. See
    [Devlin et al., 2019](https://arxiv.org/abs/1810.04805).

    Args:
        num_segments: Number of token types.
        embeddings_initializer: Initializer of the table. Default: normal with
            a standard deviation of 0.02.

    Call arguments:
        x: Embeddings, `(B, T, D)`.
        token_types: Optional integers, `(B, T)`. Default: type 0 throughout.

    Output shape:
        Same as `x`.

    Raises:
        ValueError: If token types are no integers.

    Example:

    >>> x = keras.ops.zeros((1, 3, 8))
    >>> types = keras.ops.array([[0, 0, 1]])
    >>> keras_tx.LearnedSegment(2)(x, token_types=types).shape
    (1, 3, 8)
    """

    def __init__(self, num_segments, *, embeddings_initializer=None, **kwargs):
        super().__init__(**kwargs)
        self.num_segments = checks.positive_integer("num_segments", num_segments)
        self.embeddings_initializer = keras.initializers.get(
            keras.initializers.RandomNormal(stddev=0.02)
            if embeddings_initializer is None
            else embeddings_initializer
        )
        self.supports_masking = True

    def build(self, x_shape):
        if len(x_shape) != 3 or x_shape[-1] is None:
            raise ValueError(
                "`LearnedSegment` adds token types to embeddings of shape "
                "(batch, time, dim) with a known dim. Received inputs of shape "
                f"{tuple(x_shape)}."
            )
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.num_segments, x_shape[-1]),
            initializer=fresh_initializer(
                self.embeddings_initializer, f"{self.path}/embeddings"
            ),
        )

    def call(self, x, token_types=None):
        checks.floats("x", x)
        checks.features("x", x, self.embeddings.shape[-1], self)
        if token_types is None:
            rows = ops.convert_to_tensor(self.embeddings)[0]  # (D,)
        else:
            token_types = checks.integers(
                "token_types", token_types, "one type a token"
            )
            checks.rank("token_types", token_types, (2,), "(batch, time)")
            remedy = "Each token has one type: (batch, time)."
            checks.size("token_types", token_types, 1, (x.shape[1],), "types", remedy)
            checks.size("token_types", token_types, 0, (1, x.shape[0]), "rows", remedy)
            self._check_values(token_types)
            rows = ops.take(self.embeddings, token_types, axis=0)
        return x + ops.cast(rows, x.dtype)

    def _check_values(self, token_types):
        values = checks.known_value(token_types)
        if values is None or values.size == 0:
            return
        if values.min() < 0 or values.max() >= self.num_segments:
            raise ValueError(
                f"`token_types` must lie in 0 to {self.num_segments - 1}. "
                f"Received types from {values.min()} to {values.max()}. Raise "
                "`num_segments`, or check the tokenizer."
            )

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "num_segments": self.num_segments,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }
