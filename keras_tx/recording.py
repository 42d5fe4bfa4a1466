"""A scope in which layers note what passes through them, to be looked at later.

While a scope is open in this thread (`with recording.Scope() as scope`), each
attention notes its queries, keys and weights, and each block what it was given
and what it returned. Attention then computes its weights where it would have
done without. Outside every scope nothing changes; see `keras_tx.inspection`.
"""

import contextvars
import dataclasses
from typing import Any

_current: contextvars.ContextVar = contextvars.ContextVar(
    "keras_tx_recording_scope", default=None
)


def scope():
    """Returns the scope that is open in this thread, or `None`."""
    return _current.get()


@dataclasses.dataclass(frozen=True)
class Attended:
    """What one call of an attention saw.

    Args:
        layer: The `MultiHead`, or a `ScaledAttention` of its own.
        query: Heads, `(B, T, N, H)`.
        key: Heads, `(B, S, K, H)`.
        mixed: Heads, `(B, T, N, H)`, the weighted sums of values.
        weights: `(B, N, T, S)`.
        mask: The `Mask`.
    """

    layer: Any
    query: Any
    key: Any
    mixed: Any
    weights: Any
    mask: Any


@dataclasses.dataclass(frozen=True)
class Passed:
    """What one call of a block was given and returned.

    Args:
        layer: The `TransformerBlock`.
        x: What it was given, `(B, T, D)`.
        y: What it returned, `(B, T, D)`.
        mask: Its implicit mask, `(B, T)`, or `None`.
    """

    layer: Any
    x: Any
    y: Any
    mask: Any


class Scope:
    """Collects notes, in the order in which calls end."""

    def __init__(self):
        self.notes = []
        self._token = None

    def __enter__(self):
        self._token = _current.set(self)
        return self

    def __exit__(self, kind, error, traceback):
        _current.reset(self._token)

    def note(self, note):
        """Keeps an `Attended` or a `Passed`."""
        self.notes.append(note)
