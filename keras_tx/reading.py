"""Attention to what a cache holds, of which only the first part may be filled.

Shapes: queries `(B, T, N, H)`, keys and values `(B, K, S, H)`, with S slots. Query
head n uses key head `n // (N / K)`. Inside, the heads that share a key head stand
together: `(B, K, G, T, ...)`.
"""

import math

import keras
from keras import ops

from keras_tx import cache, kernels

# So many rows, of no more queries each, read all slots, or blocks of `cache.BLOCK` of
# them where few are filled; more queries always read blocks.
FEW_ROWS = 4

# A block is copied to be read, which takes as long as to read so many blocks where
# they lie.
COST_OF_COPY = 8


def attend(
    query,
    held,
    *,
    queries=None,
    scale,
    soft_cap=None,
    bias=None,
    return_weights=False,
):
    """Attention to what a cache holds; see `keras_tx.cache`.

    Args:
        query: `(B, T, N, H)`.
        held: A `cache.Held`: keys and values `(B, K, S, H)`.
        queries: Optional boolean `(B, T)`, the queries that attend at all.
        scale: Number that multiplies the dot products.
        soft_cap: Optional bound of the scores.
        bias: Optional scores to add, broadcastable to `(B, N, T, C)`.
        return_weights: Whether the weights are wanted too.

    Returns:
        Tuple of the mixed values `(B, T, N, H)` in the query's dtype and the
        weights `(B, N, T, S)`, or `None` where they are not wanted.
    """
    reading = _Reading(query, held, queries, scale, soft_cap, bias)
    if not return_weights:
        return reading.of_filled(), None
    mixed, weights = reading.at_once(reading.slots)
    batch, length, num_heads, _ = kernels.sizes(query)
    return mixed, ops.reshape(weights, (batch, num_heads, length, reading.slots))


class _Reading:
    """Some queries and all that they may read, in several ways; see `attend`."""

    def __init__(self, query, held, queries, scale, soft_cap, bias):
        batch, length, num_heads, head_dim = kernels.sizes(query)
        num_kv_heads, self.slots = held.key.shape[1:3]
        groups = num_heads // num_kv_heads
        self.rows = (batch, num_kv_heads, groups, length)
        self.held, self.scale, self.soft_cap = held, scale, soft_cap
        # (B, T, N, H) -> (B, K, G T, H): one product for all that share a key head.
        grouped = ops.reshape(query, (batch, length, num_kv_heads, groups, head_dim))
        grouped = ops.transpose(grouped, (0, 2, 3, 1, 4))
        self.query = ops.reshape(
            grouped, (batch, num_kv_heads, groups * length, head_dim)
        )
        allowed = held.allowed
        if queries is not None:
            allowed = ops.logical_and(allowed, queries[:, :, None])
        self.allowed = allowed[:, None, None]  # (B, 1, 1, T, S)
        bias = held.gather_bias(bias)
        if bias is not None:
            bias = ops.cast(bias, "float32")
            while len(bias.shape) < 4:
                bias = bias[None]
            bias = kernels.group_heads(bias, num_kv_heads, groups)
        self.bias = bias

    # What to read

    def of_filled(self):
        """Returns the mixed values, `(B, T, N, H)`, and reads what pays."""
        batch, _, _, length = self.rows
        slots, filled = self.slots, self.held.filled
        if isinstance(filled, int):
            return self.at_once(min(filled, slots))[0]
        static = all(isinstance(x, int) for x in (batch, length, slots))
        # A record of torch has no branches, and reads what `generation.steps` left
        # of it.
        if static and keras.backend.backend() != "torch":
            if batch <= FEW_ROWS and slots % cache.BLOCK == 0:
                return self.of_few_rows()
            if length > 1 and slots > 2 * cache.BLOCK:
                return self.of_eighths()
        # To read part of a tensor is to copy it, which one token is not worth. Of
        # many rows `generation.steps` hands over no more than a quarter that is not
        # filled.
        return self.at_once(slots)[0]

    def of_few_rows(self):
        """All slots where many are filled, block by block where few are."""
        filled, length = self.held.filled, self.rows[-1]

        def whole():
            return self.at_once(self.slots)[0]

        def nothing():
            return self.restore(self.zeros(self.held.value.shape[-1]))

        # A branch, even one that is never taken, also keeps XLA from fusing a product
        # with the write before it, which would then copy all slots for one token.
        if self.slots <= 2 * cache.BLOCK:
            return ops.cond(filled > 0, whole, nothing)
        if length > FEW_ROWS or not self.is_as_computed():
            return self.in_blocks()
        return ops.cond(filled * COST_OF_COPY < self.slots, self.in_blocks, whole)

    def of_eighths(self):
        """No more than an eighth of the slots above what is filled."""
        ends = sorted({-(-self.slots * part // 8) for part in range(1, 9)})
        branches = [lambda size=size: self.at_once(size)[0] for size in ends]
        index = sum(ops.cast(self.held.filled > size, "int32") for size in ends[:-1])
        return ops.switch(index, branches)

    # How to read

    def at_once(self, size):
        """Returns the mixed values and the weights of the first slots."""
        key, value, allowed, bias = self.part(0, size)
        scores, allowed = self.scores(key, allowed, bias)
        weights = ops.where(allowed, kernels.softmax(scores), 0.0)
        return self.restore(self.mix(weights, value)), weights

    def in_blocks(self):
        """Softmax block by block, with a running maximum and sum."""
        size = cache.BLOCK

        def body(index, peak, total, mixed):
            key, value, allowed, bias = self.part(index * size, size)
            scores, allowed = self.scores(key, allowed, bias)
            top = ops.maximum(peak, ops.max(scores, axis=-1, keepdims=True))
            weights = ops.where(allowed, ops.exp(scores - top), 0.0)
            fade = ops.exp(peak - top)
            total = total * fade + ops.sum(weights, axis=-1, keepdims=True)
            return index + 1, top, total, mixed * fade + self.mix(weights, value)

        start = (
            ops.zeros((), dtype="int32"),
            self.zeros(1) + kernels.MASKED_SCORE,
            self.zeros(1),
            self.zeros(self.held.value.shape[-1]),
        )
        _, _, total, mixed = ops.while_loop(
            lambda index, *_: index * size < self.held.filled, body, start
        )
        # A query that sees nothing has the sum 0 and the mix 0.
        return self.restore(mixed / ops.where(total > 0, total, 1.0))

    def part(self, start, size):
        """Keys, values, masks and biases of some slots."""

        def cut(x, axis):
            if x is None or size == self.slots or x.shape[axis] == 1:
                return x
            if isinstance(start, int):
                return x[(slice(None),) * axis + (slice(start, start + size),)]
            starts = [0] * len(x.shape)
            starts[axis] = start
            shape = list(x.shape)
            shape[axis] = size
            return ops.slice(x, starts, shape)

        held = self.held
        key = self.as_computed(cut(held.key, 2), cut(held.key_scale, 2))
        value = self.as_computed(cut(held.value, 2), cut(held.value_scale, 2))
        return key, value, cut(self.allowed, 4), cut(self.bias, 4)

    # Pieces

    def is_as_computed(self):
        """Whether keys and values are kept in the dtype that they are computed in."""
        return kernels.dtype_name(self.held.key) == kernels.dtype_name(self.query)

    def as_computed(self, x, scale):
        """Keys or values as they were before they were kept in another dtype."""
        if scale is not None:
            x = ops.cast(x, "float32") * scale
        same = kernels.dtype_name(x) == kernels.dtype_name(self.query)
        return x if same else ops.cast(x, self.query.dtype)

    def scores(self, key, allowed, bias):
        """Scores `(B, K, G, T, S)`, and where they count."""
        num_queries, head_dim = self.query.shape[2:]
        # Keras transposes the second of two operands, so that has to be the smaller.
        if num_queries is not None and num_queries < head_dim:
            result = kernels.einsum_float32("bksh,bkqh->bksq", key, self.query)
            result = ops.swapaxes(result, 2, 3)
        else:
            result = kernels.einsum_float32("bkqh,bksh->bkqs", self.query, key)
        result = ops.reshape(result, (*self.rows, key.shape[2])) * self.scale
        if self.soft_cap is not None:
            result = self.soft_cap * ops.tanh(result / self.soft_cap)
        if bias is not None:
            result = result + bias
            allowed = ops.logical_and(allowed, ops.not_equal(bias, -math.inf))
        return ops.where(allowed, result, kernels.MASKED_SCORE), allowed

    def mix(self, weights, value):
        """The weighted sums of values, `(B, K, G, T, H)`."""
        batch, num_kv_heads, groups, length = self.rows
        shape = (batch, num_kv_heads, groups * length, value.shape[2])
        weights = ops.reshape(weights, shape)
        if keras.backend.backend() == "jax":
            weights = ops.cast(weights, value.dtype)
        else:
            value = ops.cast(value, weights.dtype)
        mixed = kernels.einsum_float32("bkqs,bksh->bkqh", weights, value)
        return ops.reshape(mixed, (*self.rows, value.shape[-1]))

    def zeros(self, width):
        """Sums to begin with, `(B, K, G, T, width)`."""
        is_double = kernels.dtype_name(self.query) == "float64"
        return ops.zeros((*self.rows, width), "float64" if is_double else "float32")

    def restore(self, mixed):
        """`(B, K, G, T, H)` as `(B, T, N, H)`, in the query's dtype."""
        batch, num_kv_heads, groups, length = self.rows
        mixed = ops.transpose(mixed, (0, 3, 1, 2, 4))
        shape = (batch, length, num_kv_heads * groups, mixed.shape[-1])
        return ops.cast(ops.reshape(mixed, shape), self.query.dtype)
