"""Samplers: from logits to the next token.

A sampler is a function of logits and history that returns logits: it rules
tokens out, or makes them more or less likely. Samplers compose from left to
right, and one token is chosen at the end: the likeliest, or, if a sampler of
the chain draws, one at random.

Randomness is a hash, not a stream: of the seed, the row's prompt, how many rows
before it hold the same prompt, the step and the token. So one seed gives one
text, on every call, on every backend and in any batch.
"""

import copy
import dataclasses
import hashlib
import math
import numbers
from typing import Any

import keras
import numpy as np
from keras import ops

from keras_tx import checks

# Stands for "ruled out"; far above the least float32, so that what follows may
# still scale it.
RULED_OUT = -1e30


@dataclasses.dataclass(frozen=True)
class History:
    """What a sampler may know beside the logits.

    Args:
        tokens: Integers `(B, L)`, a buffer of the prompt and what followed.
        known: Boolean `(B, L)`, which of them are there yet.
        last: Index of the last token, the same in every row, a scalar.
        step: How many tokens were generated before, a scalar.
    """

    tokens: Any
    known: Any
    last: Any
    step: Any

    def counts(self, vocab_size):
        """Returns how often each token occurs in each row, float32 `(B, V)`."""
        batch, length = self.tokens.shape
        if keras.backend.backend() == "torch":
            # Keras' `scatter` reads the places, which no record of a step may.
            ids = ops.cast(ops.clip(self.tokens, 0, vocab_size - 1), "int64")
            zeros = ops.zeros((batch, vocab_size), dtype="float32")
            return zeros.scatter_add(1, ids, ops.cast(self.known, "float32"))
        rows = ops.repeat(ops.arange(batch, dtype="int32"), length)
        ids = ops.reshape(ops.clip(self.tokens, 0, vocab_size - 1), (-1,))
        known = ops.reshape(ops.cast(self.known, "float32"), (-1,))
        where = ops.stack([rows, ops.cast(ids, "int32")], axis=-1)
        return ops.scatter(where, known, (batch, vocab_size))


class Sampler:
    """A step on the way from logits to a token; subclass it for your own.

    Attributes:
        draws: Whether the token is then drawn at random.
        numbers: Names of numeric attributes. They enter compiled code as
            arguments, so that another value needs no other code.

    Call arguments:
        logits: float32 `(B, V)`.
        history: A `History`.

    Returns:
        Logits, `(B, V)`.

    Example:

    >>> class Favour(keras_tx.Sampler):
    ...     def __init__(self, token, by):
    ...         self.token, self.by = token, by
    ...
    ...     def __call__(self, logits, history):
    ...         chosen = keras.ops.arange(logits.shape[-1]) == self.token
    ...         return keras.ops.where(chosen, logits + self.by, logits)
    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> keras_tx.generate(model, [5, 7], 2, sampler=Favour(9, by=100.0))
    [5, 7, 9, 9]
    """

    draws = False
    numbers: tuple[str, ...] = ()

    def __call__(self, logits, history):
        return logits

    def key(self):
        """Returns what compiled code depends on, hashable."""
        fixed = {k: v for k, v in vars(self).items() if k not in self.numbers}
        return (type(self), *sorted((k, _hashable(v)) for k, v in fixed.items()))

    def __repr__(self):
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if not name.startswith("_")
        )
        return f"{type(self).__name__}({given})"


def _hashable(value):
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


class Greedy(Sampler):
    """Takes the likeliest token, whatever came before in the chain.

    The string `"greedy"` is short for it.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> len(keras_tx.generate(model, [5, 7], 3, sampler=keras_tx.Greedy()))
    5
    """


class Temperature(Sampler):
    """Draws in proportion to `exp(logits / temperature)`.

    Below 1 likely tokens become likelier, above 1 all become more alike; 0
    takes the likeliest. A number is short for it.

    Args:
        temperature: Number from 0 on.

    Raises:
        ValueError: If `temperature` is negative or not finite.

    Example:

    >>> keras_tx.Temperature(0.8)
    Temperature(temperature=0.8)
    """

    numbers = ("temperature",)

    def __init__(self, temperature=1.0):
        self.temperature = _number(
            "temperature", temperature, low=0, remedy="0 takes the likeliest token."
        )
        self._greedy = self.temperature < 1e-30  # float32 could not divide by it

    @property
    def draws(self):
        return not self._greedy

    def __call__(self, logits, history):
        if self._greedy:
            return logits
        # The greatest becomes 0: no temperature is so low that an overflow
        # reaches it.
        peak = ops.max(logits, axis=-1, keepdims=True)
        scaled = (logits - peak) / self.temperature
        return ops.where(logits > RULED_OUT / 2, scaled, RULED_OUT)


class TopK(Sampler):
    """Draws among the `k` likeliest tokens.

    See [Fan et al., 2018](https://arxiv.org/abs/1805.04833).

    Args:
        k: How many tokens stay. More than there are means all; 1 is greedy.

    Raises:
        ValueError: If `k` is no positive integer.

    Example:

    >>> keras_tx.TopK(50)
    TopK(k=50)
    """

    def __init__(self, k):
        self.k = checks.positive_integer("k", k)

    @property
    def draws(self):
        return self.k > 1

    def __call__(self, logits, history):
        if self.k >= logits.shape[-1]:
            return logits
        best, _ = ops.top_k(logits, self.k)
        return ops.where(logits >= best[:, -1:], logits, RULED_OUT)


class TopP(Sampler):
    """Draws among the likeliest tokens that hold a share `p` of probability.

    The smallest set of likeliest tokens whose probabilities sum to at least
    `p`: few where the model is sure, many where it is not. See
    [Holtzman et al., 2020](https://arxiv.org/abs/1904.09751).

    Args:
        p: Share above 0 and up to 1, which keeps all.

    Raises:
        ValueError: If `p` is outside (0, 1].

    Example:

    >>> keras_tx.TopP(0.9)
    TopP(p=0.9)
    """

    draws = True
    numbers = ("p",)

    def __init__(self, p):
        self.p = _share("p", p)

    def __call__(self, logits, history):
        logits = ops.maximum(logits, RULED_OUT)
        peak = ops.max(logits, axis=-1, keepdims=True)
        scaled = logits - peak
        weights = ops.exp(scaled)
        wanted = self.p * ops.sum(weights, axis=-1, keepdims=True)
        # The cut lies between `low`, which keeps enough, and `high`, which does
        # not. Halving is exact to float32 and costs far less than sorting a
        # vocabulary; exp(-104) is 0.
        low = ops.full_like(peak, -104.0)
        high = ops.full_like(peak, 1e-3)

        def halve(index, bounds):
            low, high = bounds
            middle = (low + high) / 2
            kept = ops.where(scaled >= middle, weights, 0.0)
            enough = ops.sum(kept, axis=-1, keepdims=True) >= wanted
            return ops.where(enough, middle, low), ops.where(enough, high, middle)

        low, high = ops.fori_loop(0, 32, halve, (low, high))
        keep = ops.logical_or(scaled >= low, ops.cast(self.p, "float32") >= 1.0)
        return ops.where(keep, logits, RULED_OUT)


class MinP(Sampler):
    """Draws among tokens at least `p` times as likely as the likeliest.

    See [Nguyen et al., 2024](https://arxiv.org/abs/2407.01082).

    Args:
        p: Share above 0 and up to 1, which is greedy but for ties.

    Raises:
        ValueError: If `p` is outside (0, 1].

    Example:

    >>> keras_tx.MinP(0.05)
    MinP(p=0.05)
    """

    draws = True
    numbers = ("p",)

    def __init__(self, p):
        self.p = _share("p", p)

    def __call__(self, logits, history):
        peak = ops.max(logits, axis=-1, keepdims=True)
        cut = peak + ops.log(ops.cast(self.p, "float32"))
        return ops.where(logits >= cut, logits, RULED_OUT)


class RepetitionPenalty(Sampler):
    """Makes tokens less likely that occurred before, the prompt included.

    Divides positive logits by `penalty` and multiplies negative ones by it. See
    [Keskar et al., 2019](https://arxiv.org/abs/1909.05858).

    Args:
        penalty: Number above 0; 1 changes nothing, 1.2 is usual.

    Raises:
        ValueError: If `penalty` is not above 0.

    Example:

    >>> sampler = [keras_tx.RepetitionPenalty(1.2), keras_tx.Temperature(0.8)]
    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> len(keras_tx.generate(model, [5, 7], 3, sampler=sampler, seed=1))
    5
    """

    numbers = ("penalty",)

    def __init__(self, penalty):
        self.penalty = checks.positive_number("penalty", penalty)

    def __call__(self, logits, history):
        seen = history.counts(logits.shape[-1]) > 0
        lowered = ops.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return ops.where(seen, ops.maximum(lowered, RULED_OUT), logits)


class PresencePenalty(Sampler):
    """Subtracts from the logits of tokens that occurred before.

    Args:
        presence: Subtracted once from each token that occurred.
        frequency: Subtracted once per occurrence.

    Raises:
        ValueError: If a penalty is not finite.

    Example:

    >>> keras_tx.PresencePenalty(0.5, frequency=0.1)
    PresencePenalty(presence=0.5, frequency=0.1)
    """

    numbers = ("presence", "frequency")

    def __init__(self, presence, *, frequency=0.0):
        self.presence = _number("presence", presence)
        self.frequency = _number("frequency", frequency)

    def __call__(self, logits, history):
        counts = history.counts(logits.shape[-1])
        seen = ops.cast(counts > 0, "float32")
        return logits - self.presence * seen - self.frequency * counts


class NoRepeatNGrams(Sampler):
    """Rules out any token that would repeat `n` tokens in a row.

    Args:
        n: Length of the runs that may occur once only, the prompt included. 1
            lets no token occur twice.

    Raises:
        ValueError: If `n` is no positive integer.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> text = keras_tx.generate(model, [5], 9, sampler=keras_tx.NoRepeatNGrams(1))
    >>> len(set(text))
    10
    """

    def __init__(self, n):
        self.n = checks.positive_integer("n", n)

    def __call__(self, logits, history):
        tokens, known = history.tokens, history.known
        length = tokens.shape[1]
        # Position j ends a run that equals the newest n - 1 tokens.
        match = known
        for back in range(1, self.n):
            newest = ops.take(
                tokens, ops.maximum(history.last - (back - 1), 0), axis=1
            )[:, None]
            before = ops.pad(tokens, [(0, 0), (back, 0)])[:, :length]
            there = ops.pad(known, [(0, 0), (back, 0)])[:, :length]
            match = ops.logical_and(match, ops.logical_and(before == newest, there))
        vocab_size = logits.shape[-1]
        banned = dataclasses.replace(history, known=match).counts(vocab_size) > 0
        return ops.where(banned, RULED_OUT, logits)


class Constrain(Sampler):
    """Chooses among the tokens that a function allows.

    Args:
        allowed: Function of a `History` that returns a boolean mask, `(B, V)`
            or `(V,)`; `True` may be chosen. It is compiled with the step, so it
            is written in `keras.ops`; with `generate(..., compile=False)` any
            Python will do.

    Raises:
        ValueError: If `allowed` is no function. `generate` raises one if it
            allows nothing.

    Example:

    >>> even = keras_tx.Constrain(lambda history: keras.ops.arange(96) % 2 == 0)
    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> text = keras_tx.generate(model, [5], 4, sampler=[even, 1.0], seed=3)
    >>> all(token % 2 == 0 for token in text[1:])
    True
    """

    def __init__(self, allowed):
        if not callable(allowed):
            raise ValueError(
                "`allowed` must be a function of a `History` that returns a mask "
                f"of tokens, (B, V) or (V,). Received: allowed={allowed!r}."
            )
        self.allowed = allowed

    def __call__(self, logits, history):
        mask = ops.cast(self.allowed(history), "bool")
        return ops.where(mask, logits, RULED_OUT)


class Beam:
    """Looks for the likeliest whole text with several candidates at once.

    A decoding strategy of its own, in the place of a sampler. Keeps the
    `num_beams` best texts, each ranked by the sum of its log-probabilities
    divided by `length ** length_penalty`, over the new tokens; a beam that
    reached a stop token is frozen. The best beam is returned.

    Args:
        num_beams: How many candidates are kept. 1 is greedy.
        length_penalty: Exponent of the length; 0 compares plain sums, which
            favours short texts.

    Raises:
        ValueError: If `num_beams` is no positive integer.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=1, num_heads=4)
    >>> len(keras_tx.generate(model, [5, 7], 3, sampler=keras_tx.Beam(2)))
    5
    """

    def __init__(self, num_beams, *, length_penalty=1.0):
        self.num_beams = checks.positive_integer("num_beams", num_beams)
        self.length_penalty = _number("length_penalty", length_penalty)

    def __repr__(self):
        return f"Beam(num_beams={self.num_beams}, length_penalty={self.length_penalty})"


# ----------------------------------------------------------------------------
# Chains
# ----------------------------------------------------------------------------


def chain(sampler):
    """Turns `"greedy"`, a number, a sampler or a list of these into a tuple."""
    if isinstance(sampler, (list, tuple)):
        return tuple(step for part in sampler for step in chain(part))
    if isinstance(sampler, str) and sampler == "greedy":
        return (Greedy(),)
    if isinstance(sampler, numbers.Real) and not isinstance(sampler, bool):
        return (Temperature(sampler),)
    if isinstance(sampler, Sampler):
        return (sampler,)
    raise ValueError(
        'A sampler is "greedy", a number (a temperature), a sampler such as '
        "`TopP(0.9)`, or a list of these, which compose from left to right; "
        f"`Beam` stands alone. Received: sampler={sampler!r}."
    )


def draws(samplers):
    """Whether a chain ends in a draw."""
    settled = any(
        isinstance(s, Greedy) or (isinstance(s, TopK) and s.k == 1) or is_cold(s)
        for s in samplers
    )
    return not settled and any(s.draws for s in samplers)


def is_cold(sampler):
    """Whether a sampler is a temperature of 0."""
    return isinstance(sampler, Temperature) and not sampler.draws


def numbers_of(samplers):
    """Returns the numeric attributes of a chain, float32 `(P,)`."""
    found = [getattr(s, name) for s in samplers for name in s.numbers]
    return np.array(found or [0.0], "float32")


def with_numbers(samplers, values):
    """Returns the chain with its numeric attributes taken from a tensor."""
    copies, index = [], 0
    for sampler in samplers:
        sampler = copy.copy(sampler)
        for name in sampler.numbers:
            setattr(sampler, name, values[index])
            index += 1
        copies.append(sampler)
    return tuple(copies)


def choose(samplers, logits, history, keys):
    """Returns the next token of each row and whether there was none to choose.

    Args:
        samplers: A chain.
        logits: `(B, V)`.
        history: A `History`.
        keys: Integers `(B, 2)`, from `row_keys`.

    Returns:
        Tuple of int32 `(B,)` below V and boolean `(B,)`.
    """
    logits = ops.cast(logits, "float32")
    for sampler in samplers:
        logits = sampler(logits, history)
    # NaN compares false, so it counts as none too.
    best = ops.max(logits, axis=-1)
    stuck = ops.logical_not(best > RULED_OUT / 2)
    if draws(samplers):
        logits = logits + gumbel(keys, history.step, logits.shape[-1])
    return ops.cast(ops.argmax(logits, axis=-1), "int32"), stuck


# ----------------------------------------------------------------------------
# Noise
# ----------------------------------------------------------------------------


def row_keys(seed, rows):
    """Returns two int32 of noise per row, NumPy `(B, 2)`.

    Args:
        seed: Integer.
        rows: List of the rows' prompts, arrays of integers. Rows with the same
            prompt get different keys, by how many came before.
    """
    keys = np.zeros((len(rows), 2), "int32")
    before: dict[bytes, int] = {}
    for index, row in enumerate(rows):
        text = np.asarray(row, "<i8").tobytes()
        count = before.get(text, 0)
        before[text] = count + 1
        digest = hashlib.blake2b(
            text + f"/{seed}/{count}".encode(), digest_size=8
        ).digest()
        keys[index] = np.frombuffer(digest, "<i4")
    return keys


def _signed(value):
    """A 32-bit constant as the int32 with the same bits."""
    return value - (1 << 32) if value >= 1 << 31 else value


def _mix(bits):
    """Murmur3's finalizer on int32: every bit depends on every bit.

    Products wrap around alike on all backends, and a shift to the right, which
    copies the sign, is cut back to one that does not.
    """
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, None)):
        bits = ops.bitwise_xor(bits, _shift_right(bits, shift))
        if factor is not None:
            bits = bits * _signed(factor)
    return bits


def _shift_right(bits, by):
    kept = ops.convert_to_tensor((1 << (32 - by)) - 1, "int32")
    by = ops.convert_to_tensor(by, "int32")
    return ops.bitwise_and(ops.right_shift(bits, by), kept)


def uniform(keys, step, size):
    """Returns noise in (0, 1), float32 `(B, size)`, a function of its inputs.

    Args:
        keys: int32 `(B, 2)`.
        step: Integer or scalar.
        size: Number of values per row.
    """
    keys = ops.cast(keys, "int32")
    step = ops.cast(step, "int32")
    row = _mix(keys[:, :1] + step * _signed(0x9E3779B9))
    row = _mix(ops.bitwise_xor(row, keys[:, 1:]))
    ids = ops.arange(size, dtype="int32")[None, :] * _signed(0x9E3779B1)
    bits = _mix(ops.bitwise_xor(_mix(row + ids), row))
    # 23 bits and a half: never 0, never 1.
    return (ops.cast(_shift_right(bits, 9), "float32") + 0.5) * 2.0**-23


def gumbel(keys, step, size):
    """Returns Gumbel noise `(B, size)`; argmax of logits plus it is a draw."""
    return -ops.log(-ops.log(uniform(keys, step, size)))


# ----------------------------------------------------------------------------
# Arguments
# ----------------------------------------------------------------------------


def _number(name, value, *, low=None, remedy=""):
    if (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (low is None or value >= low)
    ):
        return float(value)
    least = "" if low is None else f" of at least {low}"
    raise ValueError(
        f"`{name}` must be a finite number{least}. {remedy} Received: {name}={value!r}."
    )


def _share(name, value):
    if (
        isinstance(value, numbers.Real)
        and not isinstance(value, bool)
        and 0 < value <= 1
    ):
        return float(value)
    raise ValueError(
        f"`{name}` is a share of probability, above 0 and at most 1. "
        f"Received: {name}={value!r}."
    )
