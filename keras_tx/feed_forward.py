"""The layer that processes within one token, and its activations."""

import math

import keras
from keras import ops

from keras_tx import checks, kernels
from keras_tx.serialization import (
    child_dtype,
    dtype_config,
    fresh_initializer,
    fresh_seed,
    keep_frozen,
    register,
)


@register
def gelu_tanh(x):
    """The tanh approximation of GELU, as in GPT-2, T5 1.1 and Gemma.

    It differs from the exact `"gelu"` by up to 4.7e-4, so that checkpoints need
    the one they were trained with. See [Hendrycks and Gimpel, 2016](
    https://arxiv.org/abs/1606.08415).

    Example:

    >>> round(float(keras_tx.gelu_tanh(keras.ops.array(1.0))), 4)
    0.8412
    """
    return _gelu(x, approximate=True)


def _gelu(x, approximate):
    """GELU; on TensorFlow in less time and memory than its own.

    TensorFlow keeps six tensors as wide as the hidden layer for the gradient, and
    takes the cube by a general power. Here the gradient has `x` alone and makes
    the rest again.
    """
    x = ops.convert_to_tensor(x)
    if keras.backend.backend() != "tensorflow" or isinstance(x, keras.KerasTensor):
        return keras.activations.gelu(x, approximate=approximate)
    import tensorflow as tf

    def chance_and_slope(x, want_slope):
        """Returns the share of `x` that passes, and its derivative times `x`."""
        if approximate:
            square = x * x
            bend = 2 * math.sqrt(2 / math.pi)
            chance = tf.sigmoid(x * (bend + 0.044715 * bend * square))
            if not want_slope:
                return chance, None
            inner = bend + 3 * 0.044715 * bend * square
            return chance, x * chance * (1 - chance) * inner
        chance = 0.5 + 0.5 * tf.math.erf(x * math.sqrt(0.5))
        if not want_slope:
            return chance, None
        return chance, x * tf.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))

    @tf.custom_gradient
    def run(x):
        def gradient(upstream):
            # The square of a half-precision number overflows from 256 on.
            wide = x if x.dtype == tf.float64 else tf.cast(x, tf.float32)
            chance, slope = chance_and_slope(wide, True)
            return upstream * tf.cast(chance + slope, x.dtype)

        return x * chance_and_slope(x, False)[0], gradient

    return run(x)


def get_activation(activation):
    """Returns a function from a name, a function, or `None` for none."""
    if activation == "gelu_tanh":
        return gelu_tanh
    try:
        return keras.activations.get(activation)
    except ValueError as error:
        raise ValueError(
            "`activation` must be the name of a Keras activation, "
            f'"gelu_tanh", a function, or None. Received: {activation!r}.'
        ) from error


def activation_config(activation):
    """Returns what `get_activation` turns back into `activation`."""
    if activation is gelu_tanh:
        return "gelu_tanh"
    if getattr(activation, "__name__", "") == "<lambda>":
        raise ValueError(
            "A lambda cannot be saved as an activation, for it would not load "
            "again. Write a named function and register it with "
            "`@keras.saving.register_keras_serializable()`."
        )
    return keras.activations.serialize(activation)


@register
class FeedForward(keras.layers.Layer):
    """Widens each token to `hidden_dim`, bends it, and narrows it again.

    Attention mixes across tokens; this is where each is processed by itself.
    With `gated`, one widening is bent and multiplies the other, as in SwiGLU
    ([Shazeer, 2020](https://arxiv.org/abs/2002.05202)). See
    [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), 3.3.

    Args:
        hidden_dim: Width between the two projections, usually 4 D, or 8 D / 3
            if gated.
        activation: Name or function. `"gelu"` is exact, `"gelu_tanh"` is the
            approximation.
        gated: Whether a second projection, `gate`, is bent and multiplies the
            first.
        use_bias: Whether the projections have biases.
        dropout: Share of the hidden features to drop while training.
        kernel_initializer: Initializer of the kernels.
        narrow_initializer: Initializer of the kernel of `narrow`. Default:
            `kernel_initializer`.
        seed: Optional integer that makes dropout reproducible.

    Call arguments:
        x: Features, `(..., D)`.
        training: Whether dropout is on.

    Output shape:
        Same as `x`.

    Example:

    >>> x = keras.random.normal((2, 10, 64))
    >>> keras_tx.FeedForward(172, activation="silu", gated=True)(x).shape
    (2, 10, 64)
    """

    def __init__(
        self,
        hidden_dim,
        activation="gelu",
        *,
        gated=False,
        use_bias=True,
        dropout=0.0,
        kernel_initializer="glorot_uniform",
        narrow_initializer=None,
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.hidden_dim = checks.positive_integer("hidden_dim", hidden_dim)
        self.activation = get_activation(activation)
        self.gated = checks.boolean("gated", gated)
        self.use_bias = checks.boolean("use_bias", use_bias)
        self.dropout = checks.rate("dropout", dropout)
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.narrow_initializer = keras.initializers.get(narrow_initializer)
        self.seed = checks.integer("seed", seed, optional=True)
        self.supports_masking = True

    def build(self, x_shape):
        if len(x_shape) < 2 or x_shape[-1] is None:
            raise ValueError(
                "`FeedForward` needs features of a known size on the last axis. "
                f"Received inputs of shape {tuple(x_shape)}."
            )
        self._num_features = x_shape[-1]
        hidden_shape = (*x_shape[:-1], self.hidden_dim)
        self.widen = self._dense("widen", self.hidden_dim, self.kernel_initializer)
        self.widen.build(x_shape)
        if self.gated:
            self.gate = self._dense("gate", self.hidden_dim, self.kernel_initializer)
            self.gate.build(x_shape)
        self.narrow = self._dense(
            "narrow", x_shape[-1], self.narrow_initializer or self.kernel_initializer
        )
        self.narrow.build(hidden_shape)
        if self.dropout:
            self.drop = keras.layers.Dropout(
                self.dropout,
                seed=fresh_seed(self.seed, self.path),
                dtype=self.dtype_policy,
                name="drop",
            )
        keep_frozen(self)

    def _dense(self, name, units, initializer):
        return keras.layers.Dense(
            units,
            use_bias=self.use_bias,
            kernel_initializer=fresh_initializer(initializer, f"{self.path}/{name}"),
            dtype=child_dtype(self, name),
            name=name,
        )

    def call(self, x, training=None):
        checks.floats("x", x)
        checks.features("x", x, self._num_features, self)
        hidden = kernels.apply(self.widen, x)  # (..., D) -> (..., hidden)
        bent = self._bend(kernels.apply(self.gate, x) if self.gated else hidden)
        hidden = bent * hidden if self.gated else bent
        if self.dropout:
            hidden = self.drop(hidden, training=training)
        return kernels.apply(self.narrow, hidden)  # (..., hidden) -> (..., D)

    def _bend(self, x):
        if self.activation is keras.activations.gelu:
            return _gelu(x, approximate=False)
        return self.activation(x)

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "dtype": dtype_config(self),
            "hidden_dim": self.hidden_dim,
            "activation": activation_config(self.activation),
            "gated": self.gated,
            "use_bias": self.use_bias,
            "dropout": self.dropout,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "narrow_initializer": None
            if self.narrow_initializer is None
            else keras.initializers.serialize(self.narrow_initializer),
            "seed": self.seed,
        }
