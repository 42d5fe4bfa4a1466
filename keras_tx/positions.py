"""Position: added to embeddings, turned into heads, or added to scores.

Two protocols let users write their own for `MultiHead(position=...)`:

- `rotate(heads, positions)` turns queries and keys, `(B, T, N, H)`;
- `bias(query_positions, key_positions)` adds to scores, `(N, T, S)` or
  `(B, N, T, S)`. It answers for any block of queries and keys.
"""

import math

import keras
import numpy as np
from keras import ops

from keras_tx import cache, checks
from keras_tx.serialization import deserialize_children, fresh_initializer, register

# ----------------------------------------------------------------------------
# Angles
# ----------------------------------------------------------------------------

# A position is split into digits; see `angles`.
_LOW_DIGIT = 128
_DIGIT = 32
_NUM_DIGITS = 4


def wave_frequencies(num_pairs, max_wavelength, dim):
    """Returns `max_wavelength ** (-2 i / dim)` in float64, `(num_pairs,)`."""
    return float(max_wavelength) ** (-2.0 * np.arange(num_pairs) / dim)


def angles(positions, frequencies):
    """Returns `positions * frequencies` in radians, right at any distance.

    The product in float32 would be off by 6e-3 radians at position 100,000,
    for a frequency rounded to float32 has a relative error of 6e-8. So a
    position is split into digits, each times a step that was computed in
    float64 and reduced to half a turn, which keeps every term small. The
    lowest digit (positions below 128) is the plain product.

    Args:
        positions: Integers, `(...)`, of any sign.
        frequencies: float64 NumPy array, `(F,)`, in radians per token.

    Returns:
        float32 tensor, `(..., F)`, equal to the product up to whole turns.
    """
    rest = ops.expand_dims(ops.cast(positions, "int32"), -1)
    total = None
    unit = 1
    for index in range(_NUM_DIGITS):
        base = _LOW_DIGIT if index == 0 else _DIGIT
        last = index == _NUM_DIGITS - 1
        digit = rest if last else ops.mod(rest, base)
        step = frequencies * unit
        if index > 0:
            step = step - 2 * math.pi * np.round(step / (2 * math.pi))
        term = ops.cast(digit, "float32") * ops.convert_to_tensor(
            step.astype("float32")
        )
        total = term if total is None else total + term
        rest = ops.floor_divide(rest - digit, base)
        unit *= base
    return total


def default_positions(x, positions):
    """Returns integer positions `(T,)` or `(B, T)` for `x`, `(B, T, ...)`."""
    if positions is None:
        scope = cache.scope()
        if scope is not None and scope.covers(x):
            return scope.positions
        return ops.arange(ops.shape(x)[1], dtype="int32")
    return check_positions(positions, x)


def check_positions(positions, x):
    """Returns `positions` as a tensor of integers that fit `x`, `(B, T, ...)`."""
    positions = checks.integers("positions", positions, "one position a token")
    checks.rank("positions", positions, (1, 2), "(time,) or (batch, time)")
    remedy = "Each token has one position: (time,) or (batch, time)."
    checks.size("positions", positions, -1, (x.shape[1],), "positions", remedy)
    if len(positions.shape) == 2:
        checks.size("positions", positions, 0, (1, x.shape[0]), "rows", remedy)
    return positions


# ----------------------------------------------------------------------------
# Added to embeddings
# ----------------------------------------------------------------------------


@register
class SinusoidalPosition(keras.layers.Layer):
    """Adds sines and cosines of the position to embeddings.

    Attention knows no order. Each position gets a fingerprint of waves whose
    lengths grow from 2 pi to `max_wavelength` times that, and a shift by k
    tokens is one fixed linear map of it, the same everywhere. No weights, any
    length. See [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), 3.5.

    Args:
        max_wavelength: Ratio of the longest wave to the shortest.
        layout: `"interleaved"`, sin and cos in turn, as in the paper, or
            `"half"`, all sines before all cosines. An odd D ends in a sine.

    Call arguments:
        x: Embeddings, `(B, T, D)`.
        positions: Optional integers, `(T,)` or `(B, T)`.
            Default: `0, 1, ..., T - 1`.

    Output shape:
        Same as `x`.

    Raises:
        ValueError: If `x` is not `(B, T, D)` or positions are no integers.

    Example:

    >>> x = keras.ops.zeros((2, 10, 8))
    >>> keras_tx.SinusoidalPosition()(x).shape
    (2, 10, 8)
    """

    def __init__(self, max_wavelength=10_000, *, layout="interleaved", **kwargs):
        super().__init__(**kwargs)
        self.max_wavelength = checks.positive_number("max_wavelength", max_wavelength)
        self.layout = checks.choice("layout", layout, ("interleaved", "half"))
        self.supports_masking = True

    def build(self, x_shape):
        _check_embeddings(self, x_shape)

    def call(self, x, positions=None):
        checks.floats("x", x)
        positions = default_positions(x, positions)
        dim = x.shape[-1]
        waves = self.encode(positions, dim)
        return x + ops.cast(waves, x.dtype)

    def encode(self, positions, dim):
        """Returns the float32 encoding of integer positions, `(..., D)`."""
        num_pairs = (dim + 1) // 2
        angle = angles(positions, wave_frequencies(num_pairs, self.max_wavelength, dim))
        sin, cos = ops.sin(angle), ops.cos(angle)
        if self.layout == "half":
            return ops.concatenate([sin, cos], axis=-1)[..., :dim]
        pairs = ops.stack([sin, cos], axis=-1)  # (..., D / 2, 2)
        shape = (*ops.shape(angle)[:-1], 2 * num_pairs)
        return ops.reshape(pairs, shape)[..., :dim]

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "layout": self.layout,
        }


@register
class LearnedPosition(keras.layers.Layer):
    """Adds one learned vector per position to embeddings.

    As in GPT-2 and BERT. It knows `max_length` positions and no more; beyond
    them there is nothing to look up.

    Args:
        max_length: Number of positions.
        embeddings_initializer: Initializer of the table. Default: normal with
            a standard deviation of 0.02.

    Call arguments:
        x: Embeddings, `(B, T, D)` with T at most `max_length`.
        positions: Optional integers, `(T,)` or `(B, T)`, below `max_length`.
            Default: `0, 1, ..., T - 1`.

    Output shape:
        Same as `x`.

    Raises:
        ValueError: If T exceeds `max_length`, or a position does where values
            are known. Where they are not, inside a compiled step, such rows
            become NaN rather than silently wrong.

    Example:

    >>> x = keras.ops.zeros((2, 10, 8))
    >>> keras_tx.LearnedPosition(max_length=16)(x).shape
    (2, 10, 8)
    """

    def __init__(self, max_length, *, embeddings_initializer=None, **kwargs):
        super().__init__(**kwargs)
        self.max_length = checks.positive_integer("max_length", max_length)
        self.embeddings_initializer = keras.initializers.get(
            keras.initializers.RandomNormal(stddev=0.02)
            if embeddings_initializer is None
            else embeddings_initializer
        )
        self.supports_masking = True

    def build(self, x_shape):
        _check_embeddings(self, x_shape)
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.max_length, x_shape[-1]),
            initializer=fresh_initializer(
                self.embeddings_initializer, f"{self.path}/embeddings"
            ),
        )

    def call(self, x, positions=None):
        checks.floats("x", x)
        checks.features("x", x, self.embeddings.shape[-1], self)
        if positions is None:
            if cache.scope() is None:
                self._check_length(x.shape[1])
            positions = default_positions(x, positions)
        else:
            positions = default_positions(x, positions)
            self._check_values(positions)
        # A compiled lookup fails, clamps or wraps, by backend and device; a row
        # that is not there must show everywhere.
        last = self.max_length - 1
        rows = ops.take(self.embeddings, ops.clip(positions, 0, last), axis=0)
        known = ops.logical_and(positions >= 0, positions <= last)
        rows = ops.where(ops.expand_dims(known, -1), rows, float("nan"))
        return x + ops.cast(rows, x.dtype)

    def _check_length(self, length):
        if checks.while_tracing_shapes() or not isinstance(length, int):
            return
        if length > self.max_length:
            raise ValueError(
                f"`LearnedPosition` has {self.max_length} positions and "
                f"received {length} tokens. Shorten the input, or build the "
                f"model with `max_length={length}` or more; sinusoidal and "
                "rotary positions have no limit."
            )

    def _check_values(self, positions):
        values = checks.known_value(positions)
        if values is None or values.size == 0:
            return
        if values.min() < 0 or values.max() >= self.max_length:
            raise ValueError(
                f"`positions` must lie in 0 to {self.max_length - 1}, the "
                f"{self.max_length} positions of this `LearnedPosition`. "
                f"Received positions from {values.min()} to {values.max()}."
            )

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "max_length": self.max_length,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


def _check_embeddings(layer, shape):
    if len(shape) != 3 or shape[-1] is None:
        raise ValueError(
            f"`{type(layer).__name__}` adds position to embeddings of shape "
            "(batch, time, dim) with a known dim. Received inputs of shape "
            f"{tuple(shape)}."
        )


# ----------------------------------------------------------------------------
# Turned into queries and keys
# ----------------------------------------------------------------------------


class _Scaling:
    """Config, equality and serialisation of the rotary scalings."""

    fields: tuple[str, ...] = ()

    def get_config(self):
        return {name: getattr(self, name) for name in self.fields}

    @classmethod
    def from_config(cls, config):
        return cls(**config)

    def __eq__(self, other):
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self):
        return hash((type(self), *self.get_config().values()))

    def __repr__(self):
        values = ", ".join(f"{k}={v!r}" for k, v in self.get_config().items())
        return f"{type(self).__name__}({values})"

    def frequencies(self, frequencies, max_wavelength, rotary_dim):
        """Returns the scaled frequencies, float64, from the plain ones."""
        raise NotImplementedError

    @property
    def magnitude(self):
        """What multiplies the rotated heads."""
        return 1.0


@register
class LinearScaling(_Scaling):
    """Divides every rotary frequency by `factor`: position interpolation.

    A model trained to length L then reads `factor` times L tokens at the
    angles that it knows. See [Chen et al., 2023](
    https://arxiv.org/abs/2306.15595).

    Args:
        factor: How many times longer the context becomes, at least 1.

    Example:

    >>> keras_tx.RotaryPosition(scaling=keras_tx.LinearScaling(4.0)).scaling
    LinearScaling(factor=4.0)
    """

    fields = ("factor",)

    def __init__(self, factor):
        self.factor = checks.positive_number("factor", factor)

    def frequencies(self, frequencies, max_wavelength, rotary_dim):
        return frequencies / self.factor


@register
class NtkScaling(_Scaling):
    """Stretches slow rotary frequencies by `factor` and leaves the fastest.

    Raises the base to `base * factor ** (d / (d - 2))`, so that nearby tokens
    stay as distinct as they were. The "NTK-aware" rule of bloc97, as described
    in [Peng et al., 2023](https://arxiv.org/abs/2309.00071), 3.1.

    Args:
        factor: How many times longer the context becomes, at least 1.

    Example:

    >>> keras_tx.RotaryPosition(scaling=keras_tx.NtkScaling(4.0)).scaling
    NtkScaling(factor=4.0)
    """

    fields = ("factor",)

    def __init__(self, factor):
        self.factor = checks.positive_number("factor", factor)

    def frequencies(self, frequencies, max_wavelength, rotary_dim):
        if rotary_dim <= 2:
            raise ValueError(
                "`NtkScaling` needs at least two pairs of rotated features. "
                f"Received: rotary_dim={rotary_dim}."
            )
        base = max_wavelength * self.factor ** (rotary_dim / (rotary_dim - 2))
        return wave_frequencies(rotary_dim // 2, base, rotary_dim)


@register
class YarnScaling(_Scaling):
    """Divides slow frequencies, keeps fast ones, blends between: YaRN.

    Pairs that turn more than `beta_fast` times within `original_max_length`
    stay, those that turn less than `beta_slow` times are divided by `factor`,
    and heads are scaled by `0.1 ln(factor) + 1`. See [Peng et al., 2023](
    https://arxiv.org/abs/2309.00071).

    Args:
        factor: How many times longer the context becomes, at least 1.
        original_max_length: Length in tokens that the model was trained to.
        beta_fast: Turns above which a pair stays.
        beta_slow: Turns below which a pair is divided by `factor`.
        magnitude: What multiplies rotated heads. Default:
            `0.1 ln(factor) + 1`, the paper's.
        truncate: Whether the ends of the blend are rounded to whole pairs.

    Example:

    >>> scaling = keras_tx.YarnScaling(4.0, original_max_length=4096)
    >>> round(scaling.magnitude, 4)
    1.1386
    """

    fields = (
        "factor",
        "original_max_length",
        "beta_fast",
        "beta_slow",
        "magnitude",
        "truncate",
    )

    def __init__(
        self,
        factor,
        original_max_length,
        *,
        beta_fast=32.0,
        beta_slow=1.0,
        magnitude=None,
        truncate=True,
    ):
        self.factor = checks.positive_number("factor", factor)
        self.original_max_length = checks.positive_integer(
            "original_max_length", original_max_length
        )
        self.beta_fast = checks.positive_number("beta_fast", beta_fast)
        self.beta_slow = checks.positive_number("beta_slow", beta_slow)
        self._magnitude = checks.positive_number("magnitude", magnitude, optional=True)
        self.truncate = checks.boolean("truncate", truncate)

    @property
    def magnitude(self):
        if self._magnitude is not None:
            return self._magnitude
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, frequencies, max_wavelength, rotary_dim):
        def pair_that_turns(times):
            wavelength = self.original_max_length / (times * 2 * math.pi)
            return rotary_dim * math.log(wavelength) / (2 * math.log(max_wavelength))

        low = pair_that_turns(self.beta_fast)
        high = pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # no division by zero
        pairs = np.arange(rotary_dim // 2)
        slow = np.clip((pairs - low) / (high - low), 0, 1)
        return frequencies / self.factor * slow + frequencies * (1 - slow)


@register
class Llama3Scaling(_Scaling):
    """The frequency rule of Llama 3.1: long waves divided, short waves kept.

    Waves longer than `original_max_length / low_frequency_factor` are divided
    by `factor`, those shorter than `original_max_length /
    high_frequency_factor` stay, and those between are blended. See [Grattafiori
    et al., 2024](https://arxiv.org/abs/2407.21783).

    Args:
        factor: How many times longer the context becomes.
        low_frequency_factor: Sets the length above which waves are divided.
        high_frequency_factor: Sets the length below which waves stay.
        original_max_length: Length in tokens that the model was trained to.

    Example:

    >>> scaling = keras_tx.Llama3Scaling(8.0)
    >>> keras_tx.RotaryPosition(500_000, scaling=scaling).max_wavelength
    500000.0
    """

    fields = (
        "factor",
        "low_frequency_factor",
        "high_frequency_factor",
        "original_max_length",
    )

    def __init__(
        self,
        factor,
        *,
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_max_length=8192,
    ):
        self.factor = checks.positive_number("factor", factor)
        self.low_frequency_factor = checks.positive_number(
            "low_frequency_factor", low_frequency_factor
        )
        self.high_frequency_factor = checks.positive_number(
            "high_frequency_factor", high_frequency_factor
        )
        self.original_max_length = checks.positive_integer(
            "original_max_length", original_max_length
        )
        if self.low_frequency_factor >= self.high_frequency_factor:
            raise ValueError(
                "`low_frequency_factor` must lie below `high_frequency_factor`. "
                f"Received: low_frequency_factor={low_frequency_factor}, "
                f"high_frequency_factor={high_frequency_factor}."
            )

    def frequencies(self, frequencies, max_wavelength, rotary_dim):
        turns = self.original_max_length * frequencies / (2 * math.pi)
        keep = (turns - self.low_frequency_factor) / (
            self.high_frequency_factor - self.low_frequency_factor
        )
        keep = np.clip(keep, 0, 1)
        return keep * frequencies + (1 - keep) * frequencies / self.factor


def rotate_pairs(x, angle, layout, magnitude=1.0):
    """Rotates pairs of features by `angle`.

    Args:
        x: Features, `(..., H)`.
        angle: Radians, float32, broadcastable to `(..., H / 2)`.
        layout: `"half"` pairs features (i, i + H / 2), `"interleaved"` pairs
            (2 i, 2 i + 1).
        magnitude: Number that multiplies the result.

    Returns:
        Tensor shaped and typed like `x`.
    """
    # In float32: bfloat16 keeps 8 significant bits, so that positions beyond
    # 256 would collide.
    wide = (
        x
        if keras.backend.standardize_dtype(x.dtype) == "float64"
        else ops.cast(x, "float32")
    )
    cos = ops.cast(ops.cos(angle) * magnitude, wide.dtype)
    sin = ops.cast(ops.sin(angle) * magnitude, wide.dtype)
    if layout == "half":
        first, second = ops.split(wide, 2, axis=-1)
    else:
        pairs = ops.reshape(wide, (*ops.shape(wide)[:-1], x.shape[-1] // 2, 2))
        first, second = pairs[..., 0], pairs[..., 1]
    turned = (first * cos - second * sin, second * cos + first * sin)
    if layout == "half":
        rotated = ops.concatenate(turned, axis=-1)
    else:
        rotated = ops.reshape(ops.stack(turned, axis=-1), ops.shape(x))
    return ops.cast(rotated, x.dtype)


@register
class RotaryPosition(keras.layers.Layer):
    """Encodes position by rotating query and key heads.

    The dot product of two rotated heads depends only on the distance between
    their positions, so that attention sees relative order without weights. See
    [Su et al., 2021](https://arxiv.org/abs/2104.09864). Goes into
    `MultiHead(position=...)`, or rotates heads by itself. Angles are computed
    in float32 and right to 1e-4 at position 100,000, whatever the dtype.

    Args:
        max_wavelength: Base of the frequencies, "theta" in Llama's config.
        rotary_dim: Number of features that rotate, even; the rest pass.
            Default: all.
        layout: `"half"` pairs features (i, i + H / 2), as Llama's weights on
            Hugging Face do; `"interleaved"` pairs (2 i, 2 i + 1), as the paper
            and GPT-J do.
        scaling: Optional `LinearScaling`, `NtkScaling`, `YarnScaling` or
            `Llama3Scaling`.

    Call arguments:
        x: Heads, `(B, T, N, H)`.
        positions: Optional integers, `(T,)` or `(B, T)`.
            Default: `0, 1, ..., T - 1`.

    Output shape:
        Same as `x`.

    Raises:
        ValueError: If the number of rotated features is odd or exceeds H.

    Example:

    >>> heads = keras.random.normal((2, 10, 8, 64))
    >>> keras_tx.RotaryPosition()(heads).shape
    (2, 10, 8, 64)
    """

    def __init__(
        self,
        max_wavelength=10_000,
        *,
        rotary_dim=None,
        layout="half",
        scaling=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.max_wavelength = checks.positive_number("max_wavelength", max_wavelength)
        self.rotary_dim = checks.positive_integer(
            "rotary_dim", rotary_dim, optional=True
        )
        if self.rotary_dim is not None and self.rotary_dim % 2:
            raise ValueError(
                "`RotaryPosition` rotates pairs of features, so `rotary_dim` "
                f"must be even. Received: rotary_dim={rotary_dim}."
            )
        self.layout = checks.choice("layout", layout, ("half", "interleaved"))
        if scaling is not None and not callable(getattr(scaling, "frequencies", None)):
            raise ValueError(
                "`scaling` must be LinearScaling, NtkScaling, YarnScaling, "
                f"Llama3Scaling or None. Received: scaling={scaling!r}."
            )
        self.scaling = scaling

    def build(self, x_shape):
        self._check_heads(x_shape)

    def _check_heads(self, x_shape):
        if len(x_shape) != 4:
            raise ValueError(
                "`RotaryPosition` rotates heads of shape (batch, time, heads, "
                f"head_dim). Received inputs of shape {tuple(x_shape)}. Pass it "
                "to `MultiHead(position=...)`, or reshape to one head."
            )
        head_dim = x_shape[-1]
        rotary_dim = self.rotary_dim or head_dim
        if rotary_dim % 2:
            raise ValueError(
                "`RotaryPosition` rotates pairs of features, so the last axis "
                f"must be even. Received inputs of shape {tuple(x_shape)}. "
                "Choose an even `head_dim`, or an even `rotary_dim` below it."
            )
        if rotary_dim > head_dim:
            raise ValueError(
                f"`rotary_dim` must be at most the head size. Received: "
                f"rotary_dim={rotary_dim}, head size {head_dim}."
            )

    def frequencies(self, rotary_dim):
        """Returns radians per token of each pair, float64, `(rotary_dim / 2,)`."""
        plain = wave_frequencies(rotary_dim // 2, self.max_wavelength, rotary_dim)
        if self.scaling is None:
            return plain
        return self.scaling.frequencies(plain, self.max_wavelength, rotary_dim)

    def call(self, x, positions=None):
        return self.rotate(x, default_positions(x, positions))

    def rotate(self, heads, positions):
        """Rotates heads `(B, T, N, H)` to `positions`, `(T,)` or `(B, T)`."""
        self._check_heads(heads.shape)  # again: heads may differ from the built ones
        checks.floats("heads", heads)
        head_dim = heads.shape[-1]
        rotary_dim = self.rotary_dim or head_dim
        angle = angles(positions, self.frequencies(rotary_dim))
        angle = ops.expand_dims(angle, -2)  # one head axis
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        if rotary_dim == head_dim:
            return rotate_pairs(heads, angle, self.layout, magnitude)
        turned = rotate_pairs(heads[..., :rotary_dim], angle, self.layout, magnitude)
        return ops.concatenate([turned, heads[..., rotary_dim:]], axis=-1)

    def compute_output_shape(self, x_shape):
        return tuple(x_shape)

    def get_config(self):
        return {
            **super().get_config(),
            "max_wavelength": self.max_wavelength,
            "rotary_dim": self.rotary_dim,
            "layout": self.layout,
            "scaling": keras.saving.serialize_keras_object(self.scaling),
        }

    @classmethod
    def from_config(cls, config):
        return cls(**deserialize_children(config, "scaling"))


# ----------------------------------------------------------------------------
# Added to scores
# ----------------------------------------------------------------------------


class _ScoreBias(keras.layers.Layer):
    """What `RelativePosition` and `AlibiPosition` share: called on features."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True  # reads lengths only, so nothing is lost

    def compute_mask(self, x, previous_mask=None):
        return None

    def call(self, x, positions=None):
        scope = cache.scope()
        seen = positions if scope is None else scope.key_positions
        positions = default_positions(x, positions)
        seen = positions if seen is None else seen
        bias = ops.cast(self.bias(positions, seen), self.compute_dtype)
        return bias if len(bias.shape) == 4 else bias[None]

    def build(self, x_shape=None):
        pass

    def compute_output_shape(self, x_shape):
        return (1, self.num_heads, x_shape[1], x_shape[1])

    def compute_output_spec(self, x, positions=None):
        if positions is not None:
            positions = check_positions(positions, x)
        batch = None
        if positions is not None and len(positions.shape) == 2:
            batch = positions.shape[0]
        elif positions is None or len(positions.shape) == 1:
            batch = 1
        shape = (batch, self.num_heads, x.shape[1], x.shape[1])
        return keras.KerasTensor(shape, dtype=self.compute_dtype)


def distances(query_positions, key_positions):
    """Returns key minus query position, `(T, S)` or `(B, T, S)`, int32."""
    return ops.cast(ops.expand_dims(key_positions, -2), "int32") - ops.cast(
        ops.expand_dims(query_positions, -1), "int32"
    )


@register
class RelativePosition(_ScoreBias):
    """Adds a learned bias to scores by bucketed distance, as in T5.

    Near distances have a bucket each, farther ones share buckets that widen
    logarithmically up to `max_distance`. See [Raffel et al., 2020](
    https://arxiv.org/abs/1910.10683). In `MultiHead(position=...)` each layer
    has a table of its own; called on features it gives one bias to hand to
    every block as `bias=`, as T5 does.

    Args:
        num_heads: Number of query heads.
        num_buckets: Number of buckets, even if `bidirectional`.
        max_distance: Distance in tokens from which all share the last bucket.
        bidirectional: Whether later keys have buckets of their own; otherwise
            they share the bucket of distance 0.
        embeddings_initializer: Initializer of the table. Default: normal with
            a standard deviation of 0.02.

    Call arguments:
        x: Features, `(B, T, D)`, of which only the length counts.
        positions: Optional integers, `(T,)` or `(B, T)`.

    Output shape:
        `(1, N, T, T)`, or `(B, N, T, T)` with positions `(B, T)`.

    Raises:
        ValueError: If the buckets cannot cover the distance.

    Example:

    >>> x = keras.ops.zeros((2, 10, 64))
    >>> keras_tx.RelativePosition(num_heads=4)(x).shape
    (1, 4, 10, 10)
    """

    def __init__(
        self,
        num_heads,
        *,
        num_buckets=32,
        max_distance=128,
        bidirectional=True,
        embeddings_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = checks.positive_integer("num_heads", num_heads)
        self.num_buckets = checks.positive_integer("num_buckets", num_buckets)
        self.max_distance = checks.positive_integer("max_distance", max_distance)
        self.bidirectional = checks.boolean("bidirectional", bidirectional)
        self.embeddings_initializer = keras.initializers.get(
            keras.initializers.RandomNormal(stddev=0.02)
            if embeddings_initializer is None
            else embeddings_initializer
        )
        one_way = self.num_buckets // (2 if self.bidirectional else 1)
        if (self.bidirectional and self.num_buckets % 2) or one_way < 2:
            raise ValueError(
                "`num_buckets` must be at least 2, or an even number of at "
                "least 4 if `bidirectional`. Received: "
                f"num_buckets={num_buckets}, bidirectional={bidirectional}."
            )
        if self.max_distance <= one_way // 2:
            raise ValueError(
                "`max_distance` must exceed the number of buckets that hold "
                f"one distance each, here {one_way // 2}. Received: "
                f"max_distance={max_distance}."
            )

    def build(self, x_shape=None):
        self.embeddings = self.add_weight(
            name="embeddings",
            shape=(self.num_buckets, self.num_heads),
            initializer=fresh_initializer(
                self.embeddings_initializer, f"{self.path}/embeddings"
            ),
        )

    def buckets(self):
        """Returns the bucket of each distance -max..max, NumPy `(2 max + 1,)`."""
        one_way = self.num_buckets // (2 if self.bidirectional else 1)
        exact = one_way // 2
        n = np.arange(self.max_distance + 1)
        # float32, as in the published models, whose bucket edges depend on it.
        ratio = np.log(np.maximum(n, 1).astype("float32") / np.float32(exact))
        ratio = ratio / np.float32(math.log(self.max_distance / exact))
        far = exact + (ratio * np.float32(one_way - exact)).astype("int32")
        bucket = np.where(n < exact, n, np.minimum(far, one_way - 1))
        past = bucket[::-1]  # distance -max..0
        future = bucket[1:] + one_way if self.bidirectional else 0 * bucket[1:]
        return np.concatenate([past, future]).astype("int32")

    def bias(self, query_positions, key_positions):
        """Returns the bias `(N, T, S)`, or `(B, N, T, S)`, in float32."""
        by_distance = ops.take(
            ops.convert_to_tensor(self.embeddings), self.buckets(), axis=0
        )
        distance = distances(query_positions, key_positions)
        distance = ops.clip(distance, -self.max_distance, self.max_distance)
        bias = ops.take(by_distance, distance + self.max_distance, axis=0)
        return ops.moveaxis(bias, -1, -3)  # (..., T, S, N) -> (..., N, T, S)

    def get_config(self):
        return {
            **super().get_config(),
            "num_heads": self.num_heads,
            "num_buckets": self.num_buckets,
            "max_distance": self.max_distance,
            "bidirectional": self.bidirectional,
            "embeddings_initializer": keras.initializers.serialize(
                self.embeddings_initializer
            ),
        }


@register
class AlibiPosition(_ScoreBias):
    """Lowers scores linearly with distance, with one slope per head.

    No weights, and a model trained on short texts reads longer ones. See
    [Press et al., 2022](https://arxiv.org/abs/2108.12409). Slopes are
    `2 ** (-8 (n + 1) / N)`, and the paper's rule where N is no power of two.

    Args:
        num_heads: Number of query heads.

    Call arguments:
        x: Features, `(B, T, D)`, of which only the length counts.
        positions: Optional integers, `(T,)` or `(B, T)`.

    Output shape:
        `(1, N, T, T)`, or `(B, N, T, T)` with positions `(B, T)`.

    Example:

    >>> x = keras.ops.zeros((2, 10, 64))
    >>> keras_tx.AlibiPosition(num_heads=4)(x).shape
    (1, 4, 10, 10)
    """

    def __init__(self, num_heads, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = checks.positive_integer("num_heads", num_heads)

    def slopes(self):
        """Returns the slope of each head, NumPy `(N,)`."""

        def of_power(n):
            return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

        power = 2 ** math.floor(math.log2(self.num_heads))
        between = of_power(2 * power)[::2][: self.num_heads - power]
        return np.concatenate([of_power(power), between])

    def bias(self, query_positions, key_positions):
        """Returns the bias `(N, T, S)`, or `(B, N, T, S)`, in float32."""
        distance = ops.abs(distances(query_positions, key_positions))
        slopes = ops.convert_to_tensor(-self.slopes().astype("float32")[:, None, None])
        return slopes * ops.expand_dims(ops.cast(distance, "float32"), -3)

    def get_config(self):
        return {**super().get_config(), "num_heads": self.num_heads}
