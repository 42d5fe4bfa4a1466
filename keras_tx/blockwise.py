"""Attention block by block, in memory linear in the number of tokens.

Shapes as in `keras_tx.kernels`, and the same results.
"""

import math

import keras
from keras import ops

from keras_tx import kernels, masks
from keras_tx.recompute import after, unknown_zero, with_gradient

# Queries that are worked on at once. Their scores, B N x 256 x S, are all that
# ever exists of the scores.
BLOCK = 256


def blockwise(
    query,
    key,
    value,
    mask,
    *,
    scale,
    soft_cap=None,
    bias=None,
    dropout=None,
):
    """Attention in memory linear in the number of tokens.

    Some queries at a time attend to the keys that causality and window leave
    them, one block behind the other. Weights are not kept for the gradient but
    made again, as in FlashAttention
    ([Dao et al., 2022](https://arxiv.org/abs/2205.14135)). T must be known.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, H)`.
        mask: A `Mask`.
        scale: Number that multiplies the dot products.
        soft_cap: Optional bound of the scores.
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`.
        dropout: Optional tuple `(rate, seed)`, the seed a tensor.

    Returns:
        The mixed values `(B, T, N, H)` in `value`'s dtype.
    """
    batch, length, num_heads, head_dim = kernels.sizes(query)
    num_keys, num_kv_heads = kernels.sizes(key)[1:3]
    groups = num_heads // num_kv_heads
    dtype = value.dtype
    seen = mask.keys_that_may_be_seen()
    if seen is not None:
        # 0 x NaN is NaN still: what no query sees is zeroed before it is mixed.
        key = ops.where(seen[:, :, None, None], key, 0.0)
        value = ops.where(seen[:, :, None, None], value, 0.0)
    # Scaled in float32 at least, as the scores of `dense` are.
    query = ops.cast(
        query, "float64" if kernels.dtype_name(value) == "float64" else "float32"
    )
    # (B, T, N, H) -> (B, K, G, T, H): a key head and the queries that share it.
    query = ops.reshape(query * scale, (batch, length, num_kv_heads, groups, head_dim))
    query = ops.transpose(query, (0, 2, 3, 1, 4))
    key = ops.transpose(key, (0, 2, 1, 3))
    value = ops.transpose(value, (0, 2, 1, 3))
    if bias is not None:
        while len(bias.shape) < 4:
            bias = bias[None]
        bias = kernels.group_heads(bias, num_kv_heads, groups)
    work = _Blocks(mask, num_kv_heads, groups, length, num_keys, soft_cap, dropout)
    mixed = work(query, key, value, bias)
    mixed = ops.transpose(mixed, (0, 3, 1, 2, 4))
    mixed = ops.reshape(mixed, (batch, length, num_heads, value.shape[-1]))
    if mask.queries is not None:
        mixed = ops.where(mask.queries[:, :, None, None], mixed, 0.0)
    return ops.cast(mixed, dtype)


class _Blocks:
    """What `blockwise` does with heads that are laid out, and its gradient.

    Queries are `(B, K, G, T, H)`, scaled; keys and values `(B, K, S, H)`; a bias
    `(1 or B, 1 or K, 1 or G, 1 or T, 1 or S)`.
    """

    def __init__(self, mask, num_kv_heads, groups, length, num_keys, soft_cap, dropout):
        self.mask = mask
        self.num_kv_heads = num_kv_heads
        self.groups = groups
        self.length = length
        self.num_keys = num_keys
        self.soft_cap = soft_cap
        self.dropout = dropout

    def __call__(self, query, key, value, bias):
        tensors = [query, key, value] if bias is None else [query, key, value, bias]
        return with_gradient(self.forward, self.backward, tensors, self.constants())

    def constants(self):
        """Tensors that the gradient needs, and that have none."""
        mask = self.mask
        found = [*mask.keys, *mask.pairs]
        found += [] if mask.segments is None else [mask.segments]
        return found + ([] if self.dropout is None else [self.dropout[1]])

    def plan(self):
        """Returns `(first query, queries, first key, keys)` of each block."""
        offset = self.num_keys - self.length if self.mask.causal else 0
        found = []
        for start in range(0, self.length, BLOCK):
            size = min(BLOCK, self.length - start)
            low, high = 0, self.num_keys
            if self.mask.causal:
                high = start + size + offset
            elif self.mask.window is not None:
                high = start + size - 1 + self.mask.window
            if self.mask.window is not None:
                low = start + offset - self.mask.window + 1
            high = max(1, min(high, self.num_keys))
            low = min(max(0, low), high - 1)
            found.append((start, size, low, high - low))
        return found

    def weights(self, block, query, key, bias, constants):
        """Returns weights, scores before the cap's slope, and what was dropped."""
        start, size, low, width = block
        keys = ops.cast(key[:, :, low : low + width], query.dtype)
        queries = query[:, :, :, start : start + size]
        shape = (*kernels.sizes(queries)[:4], width)
        flat = _flat(queries)
        scores = ops.reshape(
            kernels.einsum_float32("bkqh,bksh->bkqs", flat, keys), shape
        )
        slope = None
        if self.soft_cap is not None:
            bent = ops.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * bent, 1.0 - ops.square(bent)
        allowed = self.allowed(block, constants, unknown_zero(query))
        maybe_empty = self.mask.may_leave_queries_without_keys()
        if bias is not None:
            part = ops.cast(_cut(bias, block), scores.dtype)
            scores = scores + part
            possible = ops.not_equal(part, -math.inf)
            allowed = (
                possible if allowed is None else ops.logical_and(allowed, possible)
            )
            maybe_empty = True
        weights = kernels.masked_softmax(scores, allowed, maybe_empty)
        kept = None
        if self.dropout is not None:
            rate, seed = self.dropout[0], constants[-1]
            kept = _kept(ops.shape(weights), rate, seed, start // BLOCK)
            kept = ops.cast(kept, weights.dtype) / (1.0 - rate)
        return weights, slope, kept

    def allowed(self, block, constants, zero):
        """Returns the mask of a block, `(1|B, 1|K, 1|G, q, s)`, or `None`."""
        start, size, low, width = block
        mask, parts = self.mask, []
        constants = list(constants)
        for _ in mask.keys:
            parts.append(constants.pop(0)[:, None, None, None, low : low + width])
        for _ in mask.pairs:
            pairs = kernels.group_heads(
                constants.pop(0), self.num_kv_heads, self.groups
            )
            parts.append(_cut(pairs, block))
        if mask.segments is not None:
            ids = constants.pop(0)
            same = ids[:, start : start + size, None] == ids[:, None, low : low + width]
            parts.append(same[:, None, None])
        if mask.causal or mask.window is not None:
            parts.append(mask.band(block, self.length, self.num_keys, zero))
        return masks.all_of(parts)

    def forward(self, tensors, constants):
        query, key, value, *bias = tensors
        bias = bias[0] if bias else None
        outputs = []
        for block in self.plan():
            query_, key_, value_ = after(outputs[-1:], query, key, value)
            weights, _, kept = self.weights(block, query_, key_, bias, constants)
            if kept is not None:
                weights = weights * kept
            _, _, low, width = block
            outputs.append(_times(weights, value_[:, :, low : low + width]))
        return outputs[0] if len(outputs) == 1 else ops.concatenate(outputs, axis=3)

    def backward(self, tensors, constants, mixed, upstream):
        query, key, value, *bias = tensors
        bias = bias[0] if bias else None
        # How a softmax bends: each score's gradient less their weighted mean,
        # which is the mean of upstream times output.
        upstream = ops.cast(upstream, mixed.dtype)
        mean = ops.sum(upstream * mixed, axis=-1, keepdims=True)
        of_query, of_bias = [], None
        of_key = _Sum(key, mixed.dtype)
        of_value = _Sum(value, mixed.dtype)
        if bias is not None:
            of_bias = ops.zeros(kernels.sizes(bias), mixed.dtype)
        previous = []
        for block in self.plan():
            start, size, low, width = block
            query_, key_, value_, up = after(previous, query, key, value, upstream)
            weights, slope, kept = self.weights(block, query_, key_, bias, constants)
            up = up[:, :, :, start : start + size]
            values = ops.cast(value_[:, :, low : low + width], mixed.dtype)
            of_weights = kernels.einsum_float32("bkqh,bksh->bkqs", _flat(up), values)
            of_weights = ops.reshape(of_weights, ops.shape(weights))
            dropped = weights
            if kept is not None:
                of_weights, dropped = of_weights * kept, weights * kept
            part = kernels.einsum_float32("bkqs,bkqh->bksh", _flat(dropped), _flat(up))
            of_value.add(low, part)
            of_scores = weights * (of_weights - mean[:, :, :, start : start + size])
            if bias is not None:
                of_bias = of_bias + _uncut(of_scores, bias, block)
            if slope is not None:
                of_scores = of_scores * slope
            keys = ops.cast(key_[:, :, low : low + width], mixed.dtype)
            of_query.append(_times(of_scores, keys))
            queries = ops.cast(query_[:, :, :, start : start + size], mixed.dtype)
            part = kernels.einsum_float32(
                "bkqs,bkqh->bksh", _flat(of_scores), _flat(queries)
            )
            of_key.add(low, part)
            previous = [of_key.total, of_value.total, of_query[-1]]
        of_query = of_query[0] if len(of_query) == 1 else ops.concatenate(of_query, 3)
        found = [of_query, of_key.total, of_value.total]
        found += [] if bias is None else [of_bias]
        return [ops.cast(g, x.dtype) for g, x in zip(found, tensors, strict=True)]


class _Sum:
    """Gradients of `(B, K, S, H)`, added up slots by slots."""

    def __init__(self, like, dtype):
        self.total = ops.zeros(kernels.sizes(like), dtype)
        self.num_slots = like.shape[2]

    def add(self, low, part):
        behind = self.num_slots - low - part.shape[2]
        if keras.backend.backend() == "torch":
            # In place: nobody else has seen this tensor.
            self.total[:, :, low : low + part.shape[2]] += part
        else:
            self.total = self.total + ops.pad(
                part, ((0, 0), (0, 0), (low, behind), (0, 0))
            )


def _flat(x):
    """Merges what shares a key head: `(B, K, G, q, s)` -> `(B, K, G q, s)`."""
    batch, heads, groups, length, last = kernels.sizes(x)
    return ops.reshape(x, (batch, heads, groups * length, last))


def _times(weights, x):
    """Weighted sums: `(B, K, G, q, s)`, `(B, K, s, H)` -> `(B, K, G, q, H)`."""
    shape = (*kernels.sizes(weights)[:-1], x.shape[-1])
    x = ops.cast(x, weights.dtype)
    return ops.reshape(
        kernels.einsum_float32("bkqs,bksh->bkqh", _flat(weights), x), shape
    )


def _cut(x, block):
    """Returns the last two axes of a block, where they aren't 1."""
    start, size, low, width = block
    if x.shape[-2] != 1:
        x = x[..., start : start + size, :]
    if x.shape[-1] != 1:
        x = x[..., low : low + width]
    return x


def _uncut(x, like, block):
    """Sums a block to where it came from in `like`, zeros around it."""
    start, size, low, width = block
    axes = [axis for axis in range(5) if like.shape[axis] == 1]
    if axes:
        x = ops.sum(x, axis=axes, keepdims=True)
    before, behind = [0] * 5, [0] * 5
    if like.shape[3] != 1:
        before[3], behind[3] = start, like.shape[3] - start - size
    if like.shape[4] != 1:
        before[4], behind[4] = low, like.shape[4] - low - width
    return ops.pad(x, list(zip(before, behind, strict=True)))


def _kept(shape, rate, seed, index):
    """Returns which weights of a block stay, the same for the same seed."""
    mixing = ops.convert_to_tensor([0, index], dtype=seed.dtype)
    return keras.random.uniform(shape, seed=_Drawn(seed + mixing)) >= rate


class _Drawn(keras.random.SeedGenerator):
    """A seed that was drawn before: Keras takes no tensor for a seed."""

    def __init__(self, seed):
        self.drawn = seed

    def next(self, ordered=True):
        return self.drawn
