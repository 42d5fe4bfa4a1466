"""The layers once more, in float64 NumPy, slow and plain, to compare against.

Letters: B rows, T queries, S keys, N heads, K key heads, H head size, D features.
"""

import math

import numpy as np

# ----------------------------------------------------------------------------
# Who may attend to whom
# ----------------------------------------------------------------------------


def allowed(
    shape,
    *,
    causal=False,
    window=None,
    query_mask=None,
    key_masks=(),
    attention_mask=None,
    segment_ids=None,
):
    """Returns booleans `(B, N, T, S)`; every given mask must agree."""
    result = np.zeros(shape, bool)
    num_queries, num_keys = shape[2:]
    if attention_mask is not None:
        if attention_mask.ndim == 2:  # over keys
            attention_mask = attention_mask[:, None, None, :]
        elif attention_mask.ndim == 3:  # over pairs
            attention_mask = attention_mask[:, None, :, :]
        attention_mask = np.broadcast_to(attention_mask, shape)
    for b, n, t, j in np.ndindex(shape):
        i = t + num_keys - num_queries if causal else t
        answers = [mask[b, j] for mask in key_masks]
        if query_mask is not None:
            answers.append(query_mask[b, t])
        if attention_mask is not None:
            answers.append(attention_mask[b, n, t, j])
        if segment_ids is not None:
            answers.append(segment_ids[b, t] == segment_ids[b, j])
        if causal:
            answers.append(j <= i)
        if window is not None:
            answers.append(i - window < j if causal else abs(i - j) < window)
        result[b, n, t, j] = all(answers)
    return result


# ----------------------------------------------------------------------------
# Attention
# ----------------------------------------------------------------------------


def attention(query, key, value, allow, *, scale=None, soft_cap=None, bias=0.0):
    """One query at a time, over the keys that it may see, and no others.

    Args:
        query: `(B, T, N, H)`.
        key: `(B, S, K, H)`.
        value: `(B, S, K, H')`.
        allow: Boolean `(B, N, T, S)`.
        scale: Default: 1/√H.
        soft_cap: Optional bound of the scores.
        bias: Scores to add, broadcastable to `(B, N, T, S)`; -inf masks.

    Returns:
        The mixed values `(B, T, N, H')` and the weights `(B, N, T, S)`.
    """
    batch, num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads = key.shape[1:3]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    bias = np.broadcast_to(bias, (batch, num_heads, num_queries, num_keys))
    weights = np.zeros((batch, num_heads, num_queries, num_keys))
    mixed = np.zeros((batch, num_queries, num_heads, value.shape[-1]))
    for b, n, t in np.ndindex(batch, num_heads, num_queries):
        seen = np.flatnonzero(allow[b, n, t] & (bias[b, n, t] != -np.inf))
        if seen.size == 0:
            continue  # nothing to attend to: zero weights
        k = n // (num_heads // num_kv_heads)  # neighbours share a key head
        scores = scale * (key[b, seen, k] @ query[b, t, n])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        scores = scores + bias[b, n, t, seen]
        parts = np.exp(scores - scores.max())
        weights[b, n, t, seen] = parts / parts.sum()
        mixed[b, t, n] = weights[b, n, t, seen] @ value[b, seen, k]
    return mixed, weights


def multi_head(w, query, value, key, allow, *, turn=None, head_norm=None, **options):
    """Projections, attention over heads, and their merge.

    Args:
        w: Weights by path: `query/kernel`, `query/bias`, `query_norm/scale`…
        query: `(B, T, D)`.
        value: `(B, S, D')`.
        key: `(B, S, D'')`.
        allow: Boolean `(B, N, T, S)`.
        turn: Optional pair of functions that rotate query and key heads.
        head_norm: Optional kind of norm of query and key heads.
        **options: What `attention` takes.

    Returns:
        The outputs `(B, T, D)` and the weights `(B, N, T, S)`.
    """

    def project(name, x):
        kernel, bias = w[f"{name}/kernel"], w.get(f"{name}/bias", 0.0)
        return np.einsum("btd,dnh->btnh", x, kernel) + bias

    heads = project("query", query)
    key_heads = project("key", key)
    if head_norm is not None:
        heads = norm(head_norm, part(w, "query_norm"), heads)
        key_heads = norm(head_norm, part(w, "key_norm"), key_heads)
    if turn is not None:
        heads, key_heads = turn[0](heads), turn[1](key_heads)
    mixed, weights = attention(
        heads, key_heads, project("value", value), allow, **options
    )
    y = np.einsum("btnh,nhd->btd", mixed, w["merge/kernel"])
    return y + w.get("merge/bias", 0.0), weights


# ----------------------------------------------------------------------------
# The block
# ----------------------------------------------------------------------------


def block(w, x, branches, *, kind="layer", norm_position="pre", residual="serial"):
    """A transformer block.

    Args:
        w: Weights by path: `attention_norm/gamma`, `feed_forward/widen/kernel`…
        x: `(B, T, D)`.
        branches: Functions by name, in order: `attention`, optionally
            `cross_attention`, and `feed_forward`.
        kind: Kind of norm, or `None`.
        norm_position: `"pre"`, `"post"` or `"sandwich"`.
        residual: `"serial"`, `"parallel"` or `"none"`.
    """

    def normed(name, x):
        return norm(kind, part(w, f"{name}_norm"), x)

    def branch(name, x):
        if norm_position == "post":
            return branches[name](x)
        y = branches[name](normed(name, x))
        return normed(f"{name}_output", y) if norm_position == "sandwich" else y

    if residual == "parallel":
        return x + sum(branch(name, x) for name in branches)
    for name in branches:
        y = branch(name, x)
        x = y if residual == "none" else x + y
        x = normed(name, x) if norm_position == "post" else x
    return x


def feed_forward(w, x, activation, gated=False):
    """Widen, bend, narrow."""
    hidden = x @ w["widen/kernel"] + w.get("widen/bias", 0.0)
    if gated:
        hidden = hidden * activation(x @ w["gate/kernel"] + w.get("gate/bias", 0.0))
    else:
        hidden = activation(hidden)
    return hidden @ w["narrow/kernel"] + w.get("narrow/bias", 0.0)


def norm(kind, w, x, epsilon=1e-5):
    """`"layer"`, `"rms"` or `None`, over the last axis."""
    if kind is None:
        return x
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon)
    return x * w["gamma"] + w["beta"] if kind == "layer" else x * w["scale"]


def gelu(x):
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def gelu_tanh(x):
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def silu(x):
    return x / (1 + np.exp(-x))


def relu(x):
    return np.maximum(x, 0.0)


ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu, "relu": relu}

# ----------------------------------------------------------------------------
# Positions
# ----------------------------------------------------------------------------


def frequencies(dim, base=10_000):
    """Radians per token of each pair of features, `(ceil(D / 2),)`."""
    return base ** (-2.0 * np.arange((dim + 1) // 2) / dim)


def sinusoid(positions, dim, base=10_000, layout="interleaved"):
    """Sines and cosines of positions `(...)`, as `(..., D)`."""
    angle = np.asarray(positions, float)[..., None] * frequencies(dim, base)
    sin, cos = np.sin(angle), np.cos(angle)
    if layout == "half":
        return np.concatenate([sin, cos], -1)[..., :dim]
    return np.stack([sin, cos], -1).reshape(*angle.shape[:-1], -1)[..., :dim]


def rotate(heads, positions, *, rotary_dim=None, layout="half", omega=None):
    """Turns pairs of features of heads `(B, T, N, H)` as complex numbers.

    Args:
        heads: `(B, T, N, H)`.
        positions: `(T,)` or `(B, T)`.
        rotary_dim: Number of features that turn. Default: H.
        layout: `"half"` or `"interleaved"`.
        omega: Radians per token of each pair. Default: those of base 10,000.
    """
    rotary_dim = heads.shape[-1] if rotary_dim is None else rotary_dim
    omega = frequencies(rotary_dim) if omega is None else omega
    turning, still = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if layout == "half":
        real, imaginary = np.split(turning, 2, -1)
    else:
        real, imaginary = turning[..., 0::2], turning[..., 1::2]
    angle = np.asarray(positions, float)[..., None, None] * omega
    z = (real + 1j * imaginary) * np.exp(1j * angle)
    if layout == "half":
        turned = np.concatenate([z.real, z.imag], -1)
    else:
        turned = np.stack([z.real, z.imag], -1).reshape(turning.shape)
    return np.concatenate([turned, still], -1)


def relative_bucket(distance, num_buckets=32, max_distance=128, bidirectional=True):
    """T5's bucket of one distance (key minus query position)."""
    bucket = 0
    if bidirectional:
        num_buckets //= 2
        bucket = num_buckets if distance > 0 else 0
        far = abs(distance)
    else:
        far = max(-distance, 0)
    exact = num_buckets // 2  # so many buckets hold one distance each
    if far < exact:
        return bucket + far
    # In float32, as published: at an edge the rounding decides the bucket.
    ratio = np.log(np.float32(far) / np.float32(exact))
    ratio = ratio / np.float32(math.log(max_distance / exact))
    far = exact + int(ratio * np.float32(num_buckets - exact))
    return bucket + min(far, num_buckets - 1)


def relative_bias(table, query_positions, key_positions, **options):
    """T5's bias `(..., N, T, S)` from a table `(buckets, N)`."""
    distance = key_positions[..., None, :] - query_positions[..., :, None]
    bucket = np.vectorize(lambda d: relative_bucket(int(d), **options))(distance)
    return np.moveaxis(table[bucket], -1, -3)


def alibi_slopes(num_heads):
    """The slopes of ALiBi, by the paper's rule for any number of heads."""
    if math.log2(num_heads).is_integer():
        return [2 ** (-8 * (n + 1) / num_heads) for n in range(num_heads)]
    power = 2 ** math.floor(math.log2(num_heads))
    more = alibi_slopes(2 * power)[0::2]
    return alibi_slopes(power) + more[: num_heads - power]


def alibi_bias(num_heads, query_positions, key_positions):
    """ALiBi's bias `(..., N, T, S)`."""
    distance = np.abs(key_positions[..., None, :] - query_positions[..., :, None])
    slopes = np.array(alibi_slopes(num_heads))[:, None, None]
    return -slopes * distance[..., None, :, :]


# ----------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------


def part(w, name):
    """Returns the weights beneath `name`, without that name."""
    return {
        path.removeprefix(f"{name}/"): value
        for path, value in w.items()
        if path.startswith(f"{name}/")
    }
