"""Prompts, sources and stop tokens: what arrived, and the way back."""

import numpy as np
from keras import ops

from keras_tx import checks
from keras_tx.generation import sizes


class Prompts:
    """Prompts as rows without padding, and the way back.

    Args:
        prompts: As in `generate`.
        pad_id: Optional padding token of arrays.
        num_sources: Optional number of rows that one flat prompt serves.
        may_be_empty: Whether rows without tokens will do, behind a prefix.
    """

    def __init__(self, prompts, pad_id, num_sources, *, may_be_empty=False):
        self.pad_id = pad_id
        self.may_be_empty = may_be_empty
        self.lists = isinstance(prompts, (list, tuple))
        self.left = False
        if self.lists:
            self.flat, rows = self._from_lists(prompts)
        else:
            self.flat, rows = self._from_array(prompts)
        if num_sources is not None and self.flat and num_sources >= 1:
            rows = rows * num_sources
            self.flat = self.flat and num_sources == 1
        if num_sources is not None and len(rows) != num_sources:
            raise ValueError(
                "`prompts` and `source` must have as many rows, or one flat prompt "
                f"serves all. Received: {len(rows)} prompts, {num_sources} sources."
            )
        self.rows = rows

    def _from_lists(self, prompts):
        if not prompts and not self.may_be_empty:
            raise _empty("no rows")
        flat = all(np.ndim(x) == 0 for x in prompts)
        rows = [np.asarray(_numpy_of(row)) for row in ([prompts] if flat else prompts)]
        for index, row in enumerate(rows):
            if row.ndim != 1 and row.size:
                raise ValueError(
                    "`prompts` must be a list of tokens or a list of such lists. "
                    f"Received: row {index} of shape {row.shape}."
                )
            self._check(index, row)
        return flat, [row.astype("int32") for row in rows]

    def _from_array(self, prompts):
        array = np.asarray(_numpy_of(prompts))
        if array.ndim not in (1, 2):
            raise ValueError(
                "`prompts` must be tokens (time,) or (batch, time). Received: an "
                f"array of shape {array.shape}."
            )
        flat = array.ndim == 1
        array = array[None] if flat else array
        if not len(array):
            raise _empty("no rows")
        for index, row in enumerate(array):
            self._check(index, row)
        rows = list(array.astype("int32"))
        if self.pad_id is not None:
            self.left = any(
                row[:1] == self.pad_id and row[-1:] != self.pad_id for row in rows
            )
            rows = [self._strip(index, row) for index, row in enumerate(rows)]
        self.width = array.shape[1]
        return flat, rows

    def _check(self, index, row):
        if not row.size:
            if self.may_be_empty:
                return
            raise _empty(f"row {index} of length 0")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                "`prompts` must hold tokens, which are integers. Received: row "
                f"{index} of dtype {row.dtype}. Encode text with the tokenizer that "
                "the model was trained with."
            )

    def _strip(self, index, row):
        real = np.nonzero(row != self.pad_id)[0]
        if not len(real):
            if self.may_be_empty:
                return row[:0]
            raise _empty(f"row {index} with nothing but padding, {self.pad_id}")
        return row[real[0] : real[-1] + 1]

    def put_back(self, new):
        """Returns prompts and new tokens in the form that prompts came in."""
        texts = [
            [*row.tolist(), *more] for row, more in zip(self.rows, new, strict=True)
        ]
        if self.lists:
            return texts[0] if self.flat else texts
        width = max(map(len, texts)) if any(new) else self.width
        array = np.zeros((len(texts), width), "int32")
        for index, text in enumerate(texts):
            fill = (text or [0])[-1] if self.pad_id is None else self.pad_id
            array[index] = fill
            if self.left:
                array[index, width - len(text) :] = text
            else:
                array[index, : len(text)] = text
        return array[0] if self.flat else array


def _numpy_of(x):
    return x if isinstance(x, (list, tuple, np.ndarray)) else ops.convert_to_numpy(x)


def _empty(what):
    return ValueError(
        f"`prompts` must hold at least one token a row. Received: {what}. Begin "
        "with a start token, for example the tokenizer's <bos>."
    )


def standardize_source(source, plan, pad_id):
    """Returns the source as arrays, ragged lists padded, lengths bucketed."""
    if isinstance(source, dict):
        if plan.kind == "split" and set(source) != set(plan.source_names):
            raise ValueError(
                f"`source` must have the entries {sorted(plan.source_names)}. "
                f"Received: {sorted(source)}."
            )
        return {name: _source_array(x, plan, pad_id) for name, x in source.items()}
    if plan.kind == "split" and len(plan.source_names) != 1:
        raise ValueError(
            f"The model has the source inputs {sorted(plan.source_names)}. Pass "
            "`source=` as a dict of arrays by name."
        )
    return _source_array(source, plan, pad_id)


def _source_array(x, plan, pad_id):
    if isinstance(x, (list, tuple)):
        rows = [np.asarray(row) for row in x]
        if rows and rows[0].ndim == 0:
            rows = [np.asarray(x)]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1 and pad_id is None:
            raise ValueError(
                "Sources of different lengths need a padding token that the model "
                "masks. Make the model with `pad_id=`, or encode them one by "
                f"one. Received: lengths {sorted(lengths)}."
            )
        width = max(lengths, default=0)
        rows = [
            np.pad(row, (0, width - len(row)), constant_values=pad_id or 0)
            for row in rows
        ]
        x = np.stack(rows) if rows else np.zeros((0, 0), "int32")
    x = np.asarray(ops.convert_to_numpy(x))
    if x.size == 0:
        raise ValueError(f"`source` is empty. Received: an array of shape {x.shape}.")
    if not np.issubdtype(x.dtype, np.integer):
        return x.astype("float32") if x.dtype == np.float64 else x
    x = x.astype("int32")
    x = x[None] if x.ndim == 1 else x
    if x.ndim == 2 and pad_id is not None and plan.pad_id == pad_id:
        # The model masks padding, so that a bucket changes nothing.
        width = sizes.power_of_two(x.shape[1], 16)
        if plan.source_limit is not None:
            width = max(min(width, plan.source_limit), x.shape[1])
        x = np.pad(x, [(0, 0), (0, width - x.shape[1])], constant_values=pad_id)
    return x


def check_stops(stop_tokens, vocab_size):
    """Returns stop tokens as a tuple of ints, each within the vocabulary."""
    if isinstance(stop_tokens, (int, np.integer)):
        stop_tokens = (stop_tokens,)
    stops = tuple(checks.integer("stop_tokens", token) for token in stop_tokens)
    if any(not 0 <= token < vocab_size for token in stops):
        raise ValueError(
            f"`stop_tokens` must lie in 0 to {vocab_size - 1}, the {vocab_size} "
            f"tokens that the model can say. Received: stop_tokens={stops}."
        )
    return stops


def pad_stops(stops):
    """Stop tokens in a length that many calls share; no token is -1."""
    size = -(-max(len(stops), 1) // 8) * 8
    return np.array(list(stops) + [-1] * (size - len(stops)), "int32")


def until_stop(row, stops):
    """Returns a list of tokens up to its first stop token, which is part of it."""
    for index, token in enumerate(row):
        if token in stops:
            return row[: index + 1]
    return row
