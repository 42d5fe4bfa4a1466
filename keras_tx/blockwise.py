"""Attention block by block, in memory linear in the number of tokens.

Shapes as in `keras_tx.kernels`, and the same results.
"""

import dataclasses
import math
from typing import Any

import keras
from keras import ops

from keras_tx import kernels, masks
from keras_tx.recompute import after, pull_back, unknown_zero, with_gradient

# Queries that are worked on at once. Their scores, B N x 256 x S, are all that
# ever exists of the scores.
BLOCK = 256


@dataclasses.dataclass(frozen=True)
class PositionBias:
    """The bias of a position layer, not yet made.

    Kept apart so that only the block that is worked on need exist.

    Args:
        position: A layer with `bias(query_positions, key_positions)`.
        query_positions: Integers, `(T,)` or `(B, T)`.
        key_positions: Integers, `(S,)` or `(B, S)`.
        added: Optional scores to add to it, broadcastable to `(B, N, T, S)`.
    """

    position: Any
    query_positions: Any
    key_positions: Any
    added: Any = None

    def whole(self):
        """Returns all of it, `(N, T, S)` or `(B, N, T, S)`."""
        bias = self.position.bias(self.query_positions, self.key_positions)
        if self.added is None:
            return bias
        names = {kernels.dtype_name(x) for x in (self.added, bias)}
        wide = "float64" if "float64" in names else "float32"
        return ops.cast(self.added, wide) + ops.cast(bias, wide)

    def weights(self):
        """Returns the values of the position layer's variables, by gradient or not.

        As they are here and now: an autocast scope is no longer open where
        gradients are made.
        """
        layer = self.position
        return [
            [ops.convert_to_tensor(v.value) for v in variables]
            for variables in (layer.trainable_variables, layer.non_trainable_variables)
        ]

    def part(self, block, query_positions, key_positions, trainable, others):
        """Returns the bias of a block, `(1 or B, N, q, s)`, of given weights."""
        start, size, low, width = block
        layer = self.position
        variables = [*layer.trainable_variables, *layer.non_trainable_variables]
        mapping = list(zip(variables, [*trainable, *others], strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            bias = layer.bias(
                query_positions[..., start : start + size],
                key_positions[..., low : low + width],
            )
        return bias if len(bias.shape) == 4 else bias[None]


def whole(bias):
    """Returns a bias as one tensor, or `None` for `None`."""
    return bias.whole() if isinstance(bias, PositionBias) else bias


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
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`, or a
            `PositionBias`.
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
    by_position = bias if isinstance(bias, PositionBias) else None
    bias = bias if by_position is None else by_position.added
    if bias is not None:
        while len(bias.shape) < 4:
            bias = bias[None]
        bias = kernels.group_heads(bias, num_kv_heads, groups)
    work = _Blocks(
        mask, num_kv_heads, groups, length, num_keys, soft_cap, dropout, by_position
    )
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

    def __init__(
        self,
        mask,
        num_kv_heads,
        groups,
        length,
        num_keys,
        soft_cap=None,
        dropout=None,
        position=None,
    ):
        self.mask = mask
        self.num_kv_heads = num_kv_heads
        self.groups = groups
        self.length = length
        self.num_keys = num_keys
        self.soft_cap = soft_cap
        self.dropout = dropout
        self.position = position

    def __call__(self, query, key, value, bias):
        mask, position = self.mask, self.position
        tensors = {"query": query, "key": key, "value": value}
        if bias is not None:
            tensors["bias"] = bias
        # What has no gradient.
        constants = {
            "keys": list(mask.keys),
            "pairs": list(mask.pairs),
            "segments": [] if mask.segments is None else [mask.segments],
            "seed": [] if self.dropout is None else [self.dropout[1]],
        }
        if position is not None:
            tensors["of_position"], constants["of_position"] = position.weights()
            constants["positions"] = [position.query_positions, position.key_positions]
        return with_gradient(self.forward, self.backward, tensors, constants)

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

    def weights(self, block, query, key, tensors, constants):
        """Returns weights, the slope of the soft cap, and what dropout keeps."""
        start, size, low, width = block
        keys = ops.cast(key[:, :, low : low + width], query.dtype)
        queries = query[:, :, :, start : start + size]
        shape = (*kernels.sizes(queries)[:4], width)
        scores = kernels.einsum_float32("bkqh,bksh->bkqs", _flat(queries), keys)
        scores = ops.reshape(scores, shape)
        slope = None
        if self.soft_cap is not None:
            bent = ops.tanh(scores / self.soft_cap)
            scores, slope = self.soft_cap * bent, 1.0 - ops.square(bent)
        parts = [self.allowed(block, constants, unknown_zero(query))]
        maybe_empty = self.mask.may_leave_queries_without_keys()
        for bias in self.biases(block, tensors, constants):
            bias = ops.cast(bias, scores.dtype)
            scores = scores + bias
            parts.append(ops.not_equal(bias, -math.inf))
            maybe_empty = True
        allowed = masks.all_of([part for part in parts if part is not None])
        weights = kernels.masked_softmax(scores, allowed, maybe_empty)
        kept = None
        if self.dropout is not None:
            rate, (seed,) = self.dropout[0], constants["seed"]
            kept = _kept(ops.shape(weights), rate, seed, start // BLOCK)
            kept = ops.cast(kept, weights.dtype) / (1.0 - rate)
        return weights, slope, kept

    def biases(self, block, tensors, constants):
        """Returns what is added to the scores of a block, split by heads."""
        found = [_cut(tensors["bias"], block)] if "bias" in tensors else []
        if self.position is not None:
            found.append(self.by_position(block, tensors["of_position"], constants))
        return found

    def by_position(self, block, weights, constants):
        """Returns the bias by position of a block, `(1|B, K, G, q, s)`."""
        others, positions = constants["of_position"], constants["positions"]
        bias = self.position.part(block, *positions, weights, others)
        return kernels.group_heads(bias, self.num_kv_heads, self.groups)

    def allowed(self, block, constants, zero):
        """Returns the mask of a block, `(1|B, 1|K, 1|G, q, s)`, or `None`."""
        start, size, low, width = block
        parts = []
        for keys in constants["keys"]:
            parts.append(keys[:, None, None, None, low : low + width])
        for pairs in constants["pairs"]:
            pairs = kernels.group_heads(pairs, self.num_kv_heads, self.groups)
            parts.append(_cut(pairs, block))
        for ids in constants["segments"]:
            same = ids[:, start : start + size, None] == ids[:, None, low : low + width]
            parts.append(same[:, None, None])
        if self.mask.causal or self.mask.window is not None:
            parts.append(self.mask.band(block, self.length, self.num_keys, zero))
        return masks.all_of(parts)

    def forward(self, tensors, constants):
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        outputs = []
        for block in self.plan():
            query_, key_, value_ = after(outputs[-1:], query, key, value)
            weights, _, kept = self.weights(block, query_, key_, tensors, constants)
            if kept is not None:
                weights = weights * kept
            _, _, low, width = block
            outputs.append(_times(weights, value_[:, :, low : low + width]))
        return _join(outputs)

    def backward(self, tensors, constants, mixed, upstream):
        query, key, value = (tensors[name] for name in ("query", "key", "value"))
        # How a softmax bends: each score's gradient less their weighted mean,
        # which is the mean of upstream times output.
        upstream = ops.cast(upstream, mixed.dtype)
        mean = ops.sum(upstream * mixed, axis=-1, keepdims=True)
        of_key = _Sum(key, mixed.dtype)
        of_value = _Sum(value, mixed.dtype)
        of_query, of_bias, of_position, previous = [], [], [], []
        for block in self.plan():
            start, size, low, width = block
            query_, key_, value_, up = after(previous, query, key, value, upstream)
            weights, slope, kept = self.weights(block, query_, key_, tensors, constants)
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
            if "bias" in tensors:
                of_bias.append(_uncut(of_scores, tensors["bias"], block))
            if tensors.get("of_position"):
                part = self.of_position(block, tensors, constants, of_scores)
                of_position = _added(of_position, part)
            if slope is not None:
                of_scores = of_scores * slope
            keys = ops.cast(key_[:, :, low : low + width], mixed.dtype)
            of_query.append(_times(of_scores, keys))
            queries = ops.cast(query_[:, :, :, start : start + size], mixed.dtype)
            part = kernels.einsum_float32(
                "bkqs,bkqh->bksh", _flat(of_scores), _flat(queries)
            )
            of_key.add(low, part)
            previous = [of_key.rest, of_value.rest, of_query[-1], *of_position]
        found = {
            "query": _join(of_query),
            "key": of_key.total(),
            "value": of_value.total(),
        }
        if "bias" in tensors:
            every_query = tensors["bias"].shape[3] == 1
            found["bias"] = sum(of_bias) if every_query else _join(of_bias)
        if "of_position" in tensors:
            found["of_position"] = of_position
        return found

    def of_position(self, block, tensors, constants, of_scores):
        """Returns the gradients of the position layer's weights from one block."""

        def bias(*weights):
            return self.by_position(block, weights, constants)

        return pull_back(bias, tensors["of_position"], of_scores)


def _join(blocks):
    return blocks[0] if len(blocks) == 1 else ops.concatenate(blocks, axis=3)


def _added(totals, parts):
    if not totals:
        return parts
    return [x + y for x, y in zip(totals, parts, strict=True)]


class _Sum:
    """Gradients of keys or values, `(B, K, S, H)`, added up block by block.

    No block begins before the one in front of it, so that keys which a block has
    left behind are done with. Only the others are touched again: of a window, no
    more than its width.
    """

    def __init__(self, like, dtype):
        self.shape = kernels.sizes(like)
        self.dtype = dtype
        self.done = []
        self.first, self.rest = 0, self.zeros(0)
        self.in_place = keras.backend.backend() == "torch"
        if self.in_place:
            # Nobody else has seen this tensor.
            self.rest = self.zeros(self.shape[2])

    def zeros(self, count):
        batch, heads, _, size = self.shape
        return ops.zeros((batch, heads, count, size), self.dtype)

    def add(self, low, part):
        """Adds the gradients of the keys from `low` on."""
        part = ops.cast(part, self.dtype)
        if self.in_place:
            self.rest[:, :, low : low + part.shape[2]] += part
            return
        held = self.rest.shape[2]
        passed = min(low - self.first, held)
        gap = low - self.first - passed
        if passed:
            self.done.append(self.rest[:, :, :passed])
        if gap:
            self.done.append(self.zeros(gap))
        self.first, shared = low, held - passed
        if shared:
            both = self.rest[:, :, passed:] + part[:, :, :shared]
            part = ops.concatenate([both, part[:, :, shared:]], axis=2)
        self.rest = part

    def total(self):
        """Returns all of them, zeros for keys that no block had."""
        behind = self.shape[2] - self.first - self.rest.shape[2]
        parts = [*self.done, self.rest] + ([self.zeros(behind)] if behind else [])
        return parts[0] if len(parts) == 1 else ops.concatenate(parts, axis=2)


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
    """Sums a block to what of `like` it was cut from, zeros around its keys."""
    _, _, low, width = block
    axes = [axis for axis in range(5) if like.shape[axis] == 1]
    if axes:
        x = ops.sum(x, axis=axes, keepdims=True)
    if like.shape[4] == 1:
        return x
    behind = like.shape[4] - low - width
    return ops.pad(x, [(0, 0)] * 4 + [(low, behind)])


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
