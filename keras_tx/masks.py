"""Masks: who may attend to whom.

`True` attends. Rank 2 is `(B, S)`, over keys, always; rank 3 is `(B, T, S)`;
rank 4 is `(B, 1 or N, T, S)`. All masks combine by AND.
"""

import dataclasses
import functools
from typing import Any

import keras
from keras import ops
from keras.src.backend import get_keras_mask, set_keras_mask

from keras_tx import checks

LAYOUTS = (
    "Masks over keys are (B, S); masks over pairs are (B, T, S) or (B, 1 or N, T, S)"
)


@dataclasses.dataclass(frozen=True)
class Mask:
    """All masks of one attention, not yet multiplied out.

    Kept apart so that a kernel may build only the block that it works on.

    Args:
        causal: Whether query i sees keys up to S - T + i only.
        window: Optional width: causal sees i - w < j <= i, otherwise
            |i - j| < w.
        queries: Optional boolean `(B, T)`, the queries that attend at all.
        keys: Tuple of boolean `(B, S)`, the keys that may be seen.
        pairs: Tuple of boolean `(B, 1 or N, T, S)`.
        segments: Optional integers `(B, T)`; T and S are then the same.
        same_length: Whether T and S are known to be the same.
    """

    causal: bool = False
    window: int | None = None
    queries: Any = None
    keys: tuple = ()
    pairs: tuple = ()
    segments: Any = None
    same_length: bool = False

    def may_leave_queries_without_keys(self):
        """Whether some query may attend to nothing, or some key go unseen.

        Where T and S are the same, causality, windows and segments let every
        query see at least itself.
        """
        if self.keys or self.pairs or self.queries is not None:
            return True
        banded = self.causal or self.window is not None
        return banded and not self.same_length

    def seen_keys(self, allowed):
        """Returns the keys that some query sees, boolean `(1 or B, 1 or S)`.

        Args:
            allowed: What `dense` returned.
        """
        if self.queries is not None:
            queries = self.queries[:, None, :, None]
            allowed = queries if allowed is None else ops.logical_and(allowed, queries)
        return ops.any(allowed, axis=(1, 2))

    def keys_that_may_be_seen(self):
        """Returns the keys that masks leave, boolean `(1 or B, S)`, or `None`.

        Causality, windows and segments apart, which need no `(T, S)`.
        """
        parts = list(self.keys)
        parts += [ops.any(pairs, axis=(1, 2)) for pairs in self.pairs]
        return all_of(parts)

    def band(self, block, num_queries, num_keys, zero=0):
        """Returns causality and window of one block, boolean `(q, s)`.

        Args:
            block: `(first query, queries, first key, keys)`.
            num_queries: T, of all blocks.
            num_keys: S, of all blocks.
            zero: An integer 0, or a tensor of it.
        """
        start, size, low, width = block
        offset = num_keys - num_queries if self.causal else 0
        shift = start + offset - low + zero
        return band(size, width, self.causal, self.window, shift)

    def dense(self, num_queries, num_keys):
        """Returns one boolean `(1 or B, 1 or N, T, S)`, or `None` for all.

        The mask of `queries` is not part of it: it applies to rows of the
        result, at far less cost.
        """
        parts = list(self.pairs)
        parts += [keys[:, None, None, :] for keys in self.keys]
        if self.causal or self.window is not None:
            parts.append(
                band(num_queries, num_keys, self.causal, self.window)[None, None]
            )
        if self.segments is not None:
            same = self.segments[:, :, None] == self.segments[:, None, :]
            parts.append(same[:, None])
        return all_of(parts)


def all_of(parts):
    """Returns where all of some booleans hold, or `None` for none at all."""
    return functools.reduce(ops.logical_and, parts) if parts else None


def band(num_queries, num_keys, causal, window=None, offset=None):
    """Returns the boolean `(T, S)` mask of causality and window.

    Causal is bottom-right: with T queries and S keys the last query sees the
    last key, and query i stands at S - T + i, or at `offset` + i if that is given.

    Example:

    >>> keras.ops.convert_to_numpy(band(2, 3, True)).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    if offset is None:
        offset = num_keys - num_queries if causal else 0
    i = ops.expand_dims(ops.arange(num_queries, dtype="int32") + offset, 1)
    j = ops.expand_dims(ops.arange(num_keys, dtype="int32"), 0)
    if causal and window is None:
        return j <= i
    if causal:
        return ops.logical_and(j <= i, j > i - window)
    return ops.abs(i - j) < window


def as_boolean(name, mask):
    """Returns `mask` as booleans; floats are refused."""
    dtype = keras.backend.standardize_dtype(mask.dtype)
    if dtype == "bool":
        return mask
    if keras.backend.is_int_dtype(dtype):
        return ops.cast(mask, "bool")
    raise ValueError(
        f"`{name}` must be boolean or integer, where True attends. Received: "
        f"{name}.dtype={dtype}. Scores to add, such as 0 and -1e9, go into "
        "`bias=`; a float mask of 0 and 1 wants `keras.ops.cast(mask, 'bool')`."
    )


def over_keys(name, mask, batch, num_keys):
    """Returns a mask over keys as boolean `(B, S)`."""
    mask = checks.tensor(name, mask)
    checks.rank(name, mask, (2,), "(batch, keys)")
    _check_axis(name, mask, -1, num_keys, "keys")
    _check_axis(name, mask, 0, batch, "rows")
    return as_boolean(name, mask)


def over_queries(name, mask, batch, num_queries):
    """Returns a mask over queries as boolean `(B, T)`."""
    mask = checks.tensor(name, mask)
    checks.rank(name, mask, (2,), "(batch, queries)")
    _check_axis(name, mask, -1, num_queries, "queries")
    _check_axis(name, mask, 0, batch, "rows")
    return as_boolean(name, mask)


def over_pairs(name, mask, batch, num_heads, num_queries, num_keys):
    """Returns a mask of any rank as `(keys (B, S), pairs (B, 1|N, T, S))`.

    One of the two is `None`. Lengths are checked where they are known.
    """
    mask = checks.tensor(name, mask)
    if len(mask.shape) == 2:
        return over_keys(name, mask, batch, num_keys), None
    if len(mask.shape) not in (3, 4):
        raise ValueError(
            f"`{name}` has {len(mask.shape)} axes. {LAYOUTS}. Received: "
            f"{name}.shape={tuple(mask.shape)}."
        )
    _check_axis(name, mask, -1, num_keys, "keys")
    _check_axis(name, mask, -2, num_queries, "queries")
    _check_axis(name, mask, 0, batch, "rows")
    if len(mask.shape) == 3:
        return None, as_boolean(name, mask)[:, None]
    _check_axis(name, mask, 1, num_heads, "heads")
    return None, as_boolean(name, mask)


def _check_axis(name, mask, axis, expected, what):
    # Keys apart, one row of a mask may serve all: NumPy's broadcasting.
    allowed = (expected,) if what == "keys" else (1, expected)
    remedy = f"{LAYOUTS}."
    if what == "rows" and len(mask.shape) == 2:
        remedy += " A mask (T, S) for all rows is `mask[None]`."
    checks.size(name, mask, axis, allowed, what, remedy)


def implicit(x):
    """Returns the mask that Keras attached to `x`, or `None`."""
    # No plain attribute: a tracer of JAX takes none, and Keras keeps a table.
    return get_keras_mask(x)


def attach(x, mask):
    """Attaches an implicit mask to `x`, in place, as Keras does."""
    set_keras_mask(x, mask)
