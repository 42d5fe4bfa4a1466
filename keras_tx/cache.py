"""What attention keeps between steps of generation, and the scope that finds it.

A model need not be written for generation. While a scope is open in this thread
(`with cache.Scope(...)`), each causal self-attention writes its new keys and
values into the next entry and attends to what the entry holds; cross-attention
projects its context once; position layers read where the tokens stand. Outside
every scope nothing changes. A scope spans one forward pass.

Columns and positions: a batch is left-padded, so that all rows share one
column, the place in the cache, and row b begins at column `starts[b]`. The
position of a token in its row is `column - starts[b]`.

Entries are dicts of tensors, numbered by the order of calls in one forward
pass, so that a layer that is called twice has two. They go into a compiled step
and come out of it explicitly.
"""

import contextvars
import dataclasses
from typing import Any

import keras
import numpy as np
from keras import ops

# Rings and capacities are multiples of it; see `keras_tx.reading`.
BLOCK = 64

_current: contextvars.ContextVar = contextvars.ContextVar(
    "keras_tx_cache_scope", default=None
)


def scope():
    """Returns the scope that is open in this thread, or `None`."""
    return _current.get()


@dataclasses.dataclass(frozen=True)
class Held:
    """Keys and values that an attention may see, and the columns they are of.

    Args:
        key: `(B, K, S, H)`.
        value: `(B, K, S, H)`.
        allowed: Boolean `(B, T, S)`.
        columns: Optional integers `(S,)`, the column of each slot. `None`
            where slot and column are the same.
        filled: Number of leading slots worth reading, an integer or a scalar.
        key_scale: Optional factors of the keys, `(B, K, S, 1)`.
        value_scale: Optional factors of the values.
    """

    key: Any
    value: Any
    allowed: Any
    columns: Any
    filled: Any
    key_scale: Any = None
    value_scale: Any = None

    def gather_bias(self, bias):
        """Returns a bias over columns `(..., C)` as one over slots `(..., S)`."""
        if bias is None or self.columns is None or bias.shape[-1] == 1:
            return bias
        return ops.take(bias, ops.maximum(self.columns, 0), axis=-1)


@dataclasses.dataclass(frozen=True)
class Kept:
    """How much of the past is kept, and how.

    Args:
        rings: Whether a window bounds what is kept; `spread` wants all of it.
        slack: How many of the newest columns may be taken back, and written
            once more by a later pass.
        dtype: Dtype of keys and values, `"int8"` with a scale for each; `None`
            is that in which they are computed.
    """

    rings: bool = True
    slack: int = 0
    dtype: str | None = None

    def num_slots(self, capacity, window):
        """Slots of an entry: the capacity, or a ring that a window bounds.

        What is taken back has overwritten what stood a ring before; that must
        have left the window.
        """
        if window is None or not self.rings:
            return capacity
        return min(capacity, -(-(window + self.slack) // BLOCK) * BLOCK)

    def compress(self, name, x):
        """Returns what is kept of keys or values, by name."""
        if self.dtype is None:
            return {name: x}
        if self.dtype != "int8":
            return {name: ops.cast(x, self.dtype)}
        x = ops.cast(x, "float32")
        scale = ops.max(ops.abs(x), axis=-1, keepdims=True) / 127.0  # (B, K, T, 1)
        steps = ops.round(x / ops.where(scale > 0, scale, 1.0))
        return {name: ops.cast(steps, "int8"), f"{name}_scale": scale}


class Scope:
    """One forward pass over some columns of a batch.

    Args:
        tokens: The tokens of this pass, `(B, T)` with a static T.
        column: Column of the first of them, an integer or a scalar tensor; 0
            in the first pass.
        starts: Integers `(B,)`, the column at which each row begins.
        capacity: Number of columns that there will be.
        entries: What the pass before left, or `None` in the first pass, which
            makes the entries.
        owners: The `owners` of the first pass.
        strict: Whether self-attention that is not causal is refused.
        kept: A `Kept`, the same in all passes.
        num_positions: Optional number of positions that the model knows. Tokens
            further on, which will be taken back, stand at the last one.
        reach: Number of leading columns that entries without a ring hold in this
            pass, which sees no later ones. Default: `capacity`.

    After the pass, `entries` holds what to hand to the next one, `owners` the
    layers that made them and `windows` theirs.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> tokens = keras.ops.ones((1, 3), dtype="int32")
    >>> model(tokens).shape  # built before the scope opens
    (1, 3, 96)
    >>> starts = keras.ops.zeros((1,), dtype="int32")
    >>> first = Scope(tokens, column=0, starts=starts, capacity=64)
    >>> with first:
    ...     logits = model(tokens)
    >>> len(first.entries)
    2
    """

    def __init__(
        self,
        tokens,
        *,
        column,
        starts,
        capacity,
        entries=None,
        owners=None,
        strict=True,
        kept=Kept(),
        num_positions=None,
        reach=None,
    ):
        self.anchor = tokens
        self.length = int(tokens.shape[1])
        self.column = column
        self.starts = ops.cast(starts, "int32")
        self.capacity = capacity
        self.first = entries is None
        self.strict = strict
        self.kept = kept
        self.num_positions = num_positions
        self.reach = capacity if reach is None else reach
        self.entries = []
        self.owners = []
        self.windows = []
        self._before = entries
        self._before_owners = owners
        self._token = None

    def __enter__(self):
        if scope() is not None:
            raise ValueError(
                "A cache scope is open in this thread already. A scope spans "
                "one forward pass; close it before the next one opens."
            )
        self._token = _current.set(self)
        return self

    def __exit__(self, kind, error, traceback):
        _current.reset(self._token)
        if kind is None and not self.first and len(self.entries) != len(self._before):
            raise ValueError(
                f"The prompt went through {len(self._before)} attentions and this "
                f"step through {len(self.entries)}. A model that generates calls "
                "the same layers in the same order at every step."
            )

    # Where the tokens stand

    @property
    def positions(self):
        """Positions of this pass's tokens in their rows, `(B, T)`; pads at 0."""
        columns = self.column + ops.arange(self.length, dtype="int32")
        positions = ops.maximum(columns[None, :] - self.starts[:, None], 0)
        if self.num_positions is not None:
            positions = ops.minimum(positions, self.num_positions - 1)
        return positions

    @property
    def key_positions(self):
        """Positions that a bias answers for, `(B, T)` at first, then `(B, C)`."""
        if self.first:
            return self.positions
        columns = ops.arange(self.reach, dtype="int32")
        return ops.maximum(columns[None, :] - self.starts[:, None], 0)

    def covers(self, x):
        """Whether `x`, `(B, T, ...)`, has the length of this pass."""
        return x.shape[1] == self.length

    def valid(self):
        """Whether each column of this pass belongs to its row, `(B, T)`."""
        columns = self.column + ops.arange(self.length, dtype="int32")
        return columns[None, :] >= self.starts[:, None]

    # Self-attention

    def hold(self, owner, key, value, mask):
        """Writes the pass's keys and values; returns what they may see.

        Args:
            owner: The layer that attends.
            key: Heads, `(B, T, K, H)`, rotated.
            value: Heads, `(B, T, K, H)`.
            mask: The `Mask` of this pass, causal.

        Returns:
            A `Held`; or, in the first pass, a `Mask`: all there is to see are
            the keys that the caller has in hand.
        """
        self._check(owner, key)
        if mask.pairs:
            raise ValueError(
                f"'{owner.path}' received an `attention_mask` over pairs of "
                "tokens, which says nothing of the tokens before this step. "
                "For generation, let `causal`, `window`, `segment_ids` or a mask "
                "over keys, (B, T), express it."
            )
        valid = self.valid()
        for keys in mask.keys:
            valid = ops.logical_and(valid, keys)
        # A NaN in a column that no query may see would pass through 0 x NaN.
        real = valid[:, :, None, None]
        new = {
            **self.kept.compress("key", _heads_first(ops.where(real, key, 0.0))),
            **self.kept.compress("value", _heads_first(ops.where(real, value, 0.0))),
        }
        if mask.keys:
            new["valid"] = valid
        if mask.segments is not None:
            new["segments"] = ops.cast(mask.segments, "int32")
        self.windows.append(mask.window)
        size = self.kept.num_slots(self.capacity, mask.window)
        ring = size < self.capacity
        if not ring:
            size = self.reach
        if self.first:
            self._keep(owner, {k: _start(x, size, _axis(k)) for k, x in new.items()})
            return dataclasses.replace(mask, keys=(*mask.keys, self.valid()))

        before = self._take(owner, new)
        if not ring:
            entry = {
                k: write(before[k], x, self.column, _axis(k)) for k, x in new.items()
            }
            self._keep(owner, entry)
            seen, columns = entry, ops.arange(size, dtype="int32")
            filled = self.column + self.length
        elif self.length == 1:
            slot = self.column % size
            entry = {k: write(before[k], x, slot, _axis(k)) for k, x in new.items()}
            self._keep(owner, entry)
            seen, columns = entry, _ring_columns(self.column, size)
            filled = _minimum(self.column + 1, size)
        else:
            # Early queries of the pass still see what its later keys overwrite.
            old = _ring_columns(self.column - 1, size)
            this = self.column + ops.arange(self.length, dtype="int32")
            seen = {
                k: ops.concatenate([before[k], x], axis=_axis(k))
                for k, x in new.items()
            }
            columns = ops.concatenate([old, this])
            filled = size + self.length
            last = _ring_columns(self.column + self.length - 1, size)
            slots = ops.where(
                last >= self.column,
                size + last - self.column,
                ops.arange(size, dtype="int32"),
            )
            self._keep(
                owner, {k: ops.take(x, slots, axis=_axis(k)) for k, x in seen.items()}
            )
        queries = self.column + ops.arange(self.length, dtype="int32")
        allowed = ops.logical_and(
            columns[None, :] <= queries[:, None], columns[None, :] >= 0
        )
        if mask.window is not None:
            allowed = ops.logical_and(
                allowed, columns[None, :] > queries[:, None] - mask.window
            )
        if "valid" in seen:
            allowed = ops.logical_and(allowed[None], seen["valid"][:, None, :])
        else:
            own = columns[None, :] >= self.starts[:, None]
            allowed = ops.logical_and(allowed[None], own[:, None, :])
        if "segments" in seen:
            same = new["segments"][:, :, None] == seen["segments"][:, None, :]
            allowed = ops.logical_and(allowed, same)
        return Held(
            seen["key"],
            seen["value"],
            allowed,
            columns if ring else None,
            filled,
            seen.get("key_scale"),
            seen.get("value_scale"),
        )

    def refuse_two_way(self, owner):
        """Refuses self-attention in which tokens see later ones."""
        self._check(owner, None)
        if self.strict:
            raise ValueError(
                f"'{owner.path}' lets tokens attend to later ones, so that its "
                "answers change with every new token and cannot be kept. Give it "
                "`causal=True` or call it with `use_causal_mask=True`. An encoder "
                "runs once, outside generation: build an encoder-decoder as a "
                "functional model, or give a subclassed one the methods `encode` "
                "and `decode`, and pass `source=`."
            )

    # Cross-attention

    def recall(self, owner, mask, project):
        """Returns a context's keys and values, projected once.

        Args:
            owner: The layer that attends.
            mask: Its `Mask`.
            project: Function that returns `(key, value)` heads.
        """
        self._check(owner, None)
        if mask.causal:
            raise ValueError(
                f"'{owner.path}' attends causally to something other than its "
                "queries, whose length grows while that of the context does not. "
                "Leave causality off for cross-attention."
            )
        if mask.pairs:
            raise ValueError(
                f"'{owner.path}' received a mask over pairs of target and context "
                "tokens, which says nothing of the targets to come. Pass a mask "
                "over the context alone, (B, S)."
            )
        self.windows.append(None)
        if self.first:
            key, value = project()
            self._keep(owner, {"memory_key": key, "memory_value": value})
        else:
            entry = self._take(owner, ("memory_key", "memory_value"))
            self._keep(owner, entry)
        entry = self.entries[-1]
        return entry["memory_key"], entry["memory_value"]

    def cross_window(self, mask, num_keys):
        """Returns `mask` with a window measured from the true positions."""
        if mask.window is None:
            return mask
        keys = ops.arange(num_keys, dtype="int32")
        near = ops.abs(self.positions[:, :, None] - keys) < mask.window
        return dataclasses.replace(
            mask, window=None, pairs=(*mask.pairs, near[:, None])
        )

    # Bookkeeping

    def _keep(self, owner, entry):
        self.entries.append(entry)
        self.owners.append(id(owner))

    def _take(self, owner, names):
        index = len(self.entries)
        if (
            index >= len(self._before)
            or (self._before_owners and self._before_owners[index] != id(owner))
            or set(self._before[index]) != set(names)
        ):
            raise ValueError(
                f"'{owner.path}' is called where the prompt's pass called another "
                "layer, or called it with other masks. A model that generates "
                "calls the same layers in the same order at every step."
            )
        return self._before[index]

    def _check(self, owner, x):
        """Refuses tensors of an inner trace, which could not leave it."""
        inner = x is not None and _trace_of(x) is not _trace_of(self.anchor)
        if inner:
            raise ValueError(
                f"'{owner.path}' runs inside a transform of its own (such as "
                "`jax.checkpoint`, `jax.vmap` or a `tf.function` around the "
                "layer), out of which its keys and values cannot be kept. "
                "Generate from a model without it; its weights are the same."
            )


def spread(entries, windows, capacity, kept, column, starts, offset):
    """Returns what a batch holds whose rows all begin with the same tokens.

    Args:
        entries: Those of one row, which were kept without rings.
        windows: The windows of the layers that made them, an entry each.
        capacity: Number of columns that there will be.
        kept: As in `Scope`.
        column: The first column that is not held. No row's end of the common
            tokens lies before it.
        starts: Integers `(B,)`, the column at which each row begins.
        offset: Column at which the one row began.
    """
    batch = starts.shape[0]
    found = []
    for entry, window in zip(entries, windows, strict=True):
        if "memory_key" in entry:
            found.append({k: ops.repeat(x, batch, axis=0) for k, x in entry.items()})
            continue
        size = kept.num_slots(capacity, window)
        columns = ops.arange(size, dtype="int32")
        if size < capacity:
            columns = _ring_columns(column - 1, size)
        positions = columns[None, :] - starts[:, None]  # (B, S), in each row
        held = ops.logical_and(positions >= 0, columns[None, :] < column)
        last = entry["key"].shape[2] - 1
        index = ops.clip(positions + offset, 0, last)
        rows = {}
        for name, x in entry.items():
            x = ops.take(x[0], index, axis=_axis(name) - 1)
            if _axis(name) == 2:
                x = ops.transpose(x, (1, 0, 2, 3))  # (K, B, S, H) -> (B, K, S, H)
                x = ops.where(held[:, None, :, None], x, ops.zeros_like(x))
            else:
                x = ops.where(held, x, ops.zeros_like(x))
            rows[name] = x
        found.append(rows)
    return found


def cut(entries, capacity, reach):
    """Returns entries that hold the first `reach` columns; rings as they are."""
    return [
        {
            name: x[(slice(None),) * _axis(name) + (slice(0, reach),)]
            if _grows(name, x, capacity)
            else x
            for name, x in entry.items()
        }
        for entry in entries
    ]


def put_back(entries, parts, capacity):
    """Returns `entries` with what `cut` made of them, and a loop has written."""
    return [
        {
            name: write(x, part[name], 0, _axis(name))
            if _grows(name, x, capacity)
            else part[name]
            for name, x in entry.items()
        }
        for entry, part in zip(entries, parts, strict=True)
    ]


def _grows(name, x, capacity):
    return not name.startswith("memory") and x.shape[_axis(name)] == capacity


def _trace_of(x):
    """Returns what identifies the trace that made `x`, or `None` if none did."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        try:
            return x.graph
        except AttributeError:
            return None
    if backend == "jax":
        return getattr(x, "_trace", None)
    return None


def _axis(name):
    """The axis of columns."""
    return 1 if name in ("valid", "segments") else 2


def _heads_first(x):
    """Heads `(B, T, K, H)` as `(B, K, T, H)`, in which one head lies together."""
    return ops.transpose(x, (0, 2, 1, 3))


def _minimum(x, y):
    if isinstance(x, int):
        return min(x, y)
    return ops.minimum(x, y)


def _ring_columns(last, size):
    """The column that each slot of a ring holds; negative where none yet."""
    slots = ops.arange(size, dtype="int32")
    return last - ops.mod(last - slots, size)


def _start(x, size, axis):
    """The first columns, 0 to T - 1, in an entry of `size` slots."""
    length = x.shape[axis]
    if length <= size:
        padding = [(0, 0)] * len(x.shape)
        padding[axis] = (0, size - length)
        return ops.pad(x, padding)
    slots = np.arange(size)
    last = length - 1
    return ops.take(x, last - (last - slots) % size, axis=axis)


def write(held, new, column, axis):
    """Returns `held` with `new` from `column` on."""
    if keras.backend.backend() == "torch":
        # In place: the functional update would copy all that is held.
        if not isinstance(column, int):
            columns = column.long() + ops.arange(new.shape[axis], dtype="int64")
            return held.index_copy_(axis, columns, new.to(held.dtype))
        end = column + new.shape[axis]
        if axis == 1:
            held[:, column:end] = new
        else:
            held[:, :, column:end] = new
        return held
    starts = [0] * len(held.shape)
    starts[axis] = column
    return ops.slice_update(held, starts, ops.cast(new, held.dtype))
