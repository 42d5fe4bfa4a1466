"""Attention without weights, and attention with heads."""

import math

import keras
from keras import ops

from keras_tx import blockwise, cache, checks, kernels, masks, reading, recording
from keras_tx.norms import NormTemplate
from keras_tx.positions import check_positions, default_positions
from keras_tx.remat import Rematerialized
from keras_tx.serialization import (
    adopt,
    child_dtype,
    deserialize_children,
    dtype_config,
    fresh_initializer,
    fresh_seed,
    keep_frozen,
    register,
    serialize_children,
)

IMPLEMENTATIONS = ("auto", "dense", "fused", "blockwise")


@register
class ScaledAttention(Rematerialized, keras.layers.Layer):
    """Softmax of scaled dot products, times values. No weights.

    Every token looks at every token at once: `softmax(q kᵀ · scale) v`. Called
    with `query` alone it is raw self-attention, where a token is its own query,
    key and value. Dot products of size-H vectors spread like √H and would
    saturate the softmax, hence the default scale of 1/√H. See
    [Vaswani et al., 2017](https://arxiv.org/abs/1706.03762), 3.2.1.

    Scores and softmax are computed in float32 whatever the dtype. A query that
    may attend to nothing gets zero weights.

    Args:
        scale: Number that multiplies the dot products. `None` is 1/√H; `1.0`
            switches scaling off.
        causal: Whether query i sees keys up to S - T + i only.
        window: Optional width in tokens. Causal: i - w < j <= i. Otherwise:
            |i - j| < w.
        soft_cap: Optional bound: scores become `cap * tanh(score / cap)`,
            before bias and mask.
        dropout: Share of the weights to drop while training.
        implementation: `"auto"`, `"dense"`, `"fused"` or `"blockwise"`; they
            give the same. *dense* holds all scores at once, *blockwise* those of
            256 queries at a time and makes them again for the gradient, *fused*
            is the kernel of the backend. A wish: where it is not to be had it
            falls back, and warns. What `"auto"` takes stands in
            `keras_tx.kernels.choose`.
        seed: Optional integer that makes dropout reproducible.

    Call arguments:
        query: `(B, T, H)`, or heads `(B, T, N, H)`.
        key: Optional `(B, S, H)` or `(B, S, K, H)`, by keyword. N must be a
            multiple of K; neighbouring query heads share a key head.
            Default: `query`.
        value: Optional, shaped like `key` but for its last axis, by keyword.
            Default: `key`.
        query_mask: Optional boolean or integer `(B, T)`; other queries attend
            to nothing.
        key_mask: Optional `(B, S)`; `True` may be attended to.
        value_mask: Another name for `key_mask`; both apply.
        attention_mask: Optional `(B, S)`, over keys, `(B, T, S)` or
            `(B, 1 or N, T, S)`.
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`.
        segment_ids: Optional integers `(B, T)`; tokens attend within their
            segment. Self-attention only.
        use_causal_mask: Whether to be causal in this call.
        return_attention_scores: Whether to return the weights too.
        training: Whether dropout is on.

    Output shape:
        Like `query` with the last axis of `value`. With
        `return_attention_scores`, a tuple of it and the weights, `(B, T, S)` or
        `(B, N, T, S)`.

    Raises:
        ValueError: For shapes that do not fit and for float masks.

    Example:

    >>> x = keras.ops.array([[[0.0, 0.0, 1.0], [0.7, 0.8, 0.0]]])
    >>> keras_tx.ScaledAttention()(x).shape
    (1, 2, 3)
    """

    def __init__(
        self,
        scale=None,
        *,
        causal=False,
        window=None,
        soft_cap=None,
        dropout=0.0,
        implementation="auto",
        seed=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.scale = checks.positive_number("scale", scale, optional=True)
        self.causal = checks.boolean("causal", causal)
        self.window = checks.positive_integer("window", window, optional=True)
        self.soft_cap = checks.positive_number("soft_cap", soft_cap, optional=True)
        self.dropout = checks.rate("dropout", dropout)
        self.implementation = checks.choice(
            "implementation", implementation, IMPLEMENTATIONS
        )
        self.seed = checks.integer("seed", seed, optional=True)
        self.supports_masking = True

    def build(self, query_shape=None, key_shape=None, value_shape=None):
        if self.dropout:
            self.seed_generator = keras.random.SeedGenerator(
                fresh_seed(self.seed, self.path)
            )

    def __call__(self, query, *args, key=None, value=None, **kwargs):
        # Keras casts each argument on its own, so that one tensor given twice
        # would become two, and no longer be self-attention.
        if value is key:
            value = None
        if key is query and value is None:
            key = None
        return super().__call__(query, *args, key=key, value=value, **kwargs)

    def call(
        self,
        query,
        *,
        key=None,
        value=None,
        query_mask=None,
        key_mask=None,
        value_mask=None,
        attention_mask=None,
        bias=None,
        segment_ids=None,
        use_causal_mask=False,
        return_attention_scores=False,
        training=None,
    ):
        mask, bias = self._mask_and_bias(
            query,
            key=key,
            value=value,
            query_mask=query_mask,
            key_mask=key_mask,
            value_mask=value_mask,
            attention_mask=attention_mask,
            bias=bias,
            segment_ids=segment_ids,
            use_causal_mask=use_causal_mask,
        )
        key = query if key is None else key
        value = key if value is None else value
        single = len(query.shape) == 3
        if single:
            query, key, value = (ops.expand_dims(x, 2) for x in (query, key, value))
        recorder = recording.scope()
        result = self.attend(
            query,
            key,
            value,
            mask,
            bias=bias,
            return_attention_scores=return_attention_scores or recorder is not None,
            training=training,
        )
        if recorder is not None:
            recorder.note(recording.Attended(self, query, key, *result, mask))
            result = result if return_attention_scores else result[0]
        if not single:
            return result
        if return_attention_scores:
            return ops.squeeze(result[0], 2), ops.squeeze(result[1], 1)
        return ops.squeeze(result, 2)

    def attend(
        self,
        query,
        key,
        value,
        mask,
        *,
        bias=None,
        return_attention_scores=False,
        training=None,
    ):
        """Attends over heads under a `Mask`; what `call` and `MultiHead` share."""
        drop = None
        if training and self.dropout:

            def drop(weights):
                return keras.random.dropout(
                    weights, self.dropout, seed=self.seed_generator
                )

        scale = self.scale or 1 / math.sqrt(query.shape[-1])
        scope = cache.scope()
        if scope is not None and mask.causal:
            held = scope.hold(self, key, value, mask)
            if isinstance(held, cache.Held):
                mixed, weights = reading.attend(
                    query,
                    held,
                    queries=mask.queries,
                    scale=scale,
                    soft_cap=self.soft_cap,
                    bias=blockwise.whole(bias),
                    return_weights=return_attention_scores,
                )
                if return_attention_scores:
                    return mixed, ops.cast(weights, self.compute_dtype)
                return mixed
            mask = held
        chosen = kernels.choose(
            self.implementation,
            query,
            key,
            value,
            mask,
            plain=self.soft_cap is None and bias is None and drop is None,
        )
        options = {"scale": scale, "soft_cap": self.soft_cap}
        if chosen == "fused":
            mixed = kernels.fused(query, key, value, mask, scale=scale)
        elif chosen == "blockwise":
            dropout = drop and (self.dropout, self.seed_generator.next())
            mixed = blockwise.blockwise(
                query, key, value, mask, bias=bias, dropout=dropout, **options
            )
        else:
            mixed, weights = kernels.dense(
                query,
                key,
                value,
                mask,
                bias=blockwise.whole(bias),
                drop=drop,
                **options,
            )
        if not return_attention_scores:
            return mixed
        if chosen != "dense":
            # Asking for scores doesn't change the output, in no bit.
            weights, _ = kernels.weights(
                query, key, mask, bias=blockwise.whole(bias), **options
            )
        return mixed, ops.cast(weights, self.compute_dtype)

    def _mask_and_bias(
        self,
        query,
        *,
        key,
        value,
        query_mask,
        key_mask,
        value_mask,
        attention_mask,
        bias,
        segment_ids,
        use_causal_mask,
    ):
        """Checks inputs and gathers all masks, the implicit ones included."""
        layout = "(batch, time, features) or (batch, time, heads, features)"
        checks.rank("query", query, (3, 4), layout)
        if key is None and value is not None:
            raise ValueError(
                "`value` came without `key`. Pass `key=`, or neither for raw "
                "self-attention."
            )
        own_key = query if key is None else key
        own_value = own_key if value is None else value
        for name, x in (("key", own_key), ("value", own_value)):
            checks.rank(name, x, (len(query.shape),), layout + ", as `query`")
        for name, x in (("query", query), ("key", own_key), ("value", own_value)):
            checks.floats(name, x)
        if own_key.shape[-1] != query.shape[-1]:
            raise ValueError(
                "`query` and `key` are compared feature by feature, so their "
                f"last axes must agree. Received: query.shape="
                f"{tuple(query.shape)}, key.shape={tuple(own_key.shape)}."
            )
        if own_key.shape[1:-1] != own_value.shape[1:-1]:
            raise ValueError(
                "`key` and `value` must agree but for their last axis. Received: "
                f"key.shape={tuple(own_key.shape)}, "
                f"value.shape={tuple(own_value.shape)}."
            )
        num_heads = query.shape[2] if len(query.shape) == 4 else 1
        if len(query.shape) == 4 and num_heads % own_key.shape[2]:
            raise ValueError(
                "The heads of `query` must be a multiple of those of `key`, so "
                "that every key head serves equally many. Received: "
                f"query.shape={tuple(query.shape)}, "
                f"key.shape={tuple(own_key.shape)}."
            )
        mask = gather_mask(
            query,
            key=key,
            value=value,
            query_mask=query_mask,
            key_mask=key_mask,
            value_mask=value_mask,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            num_heads=num_heads,
            causal=self.causal or use_causal_mask,
            window=self.window,
        )
        return mask, check_bias(bias, query, num_heads, own_key)

    def compute_output_shape(self, query_shape, key_shape=None, value_shape=None):
        return (*query_shape[:-1], (value_shape or key_shape or query_shape)[-1])

    def compute_output_spec(
        self,
        query,
        *,
        key=None,
        value=None,
        query_mask=None,
        key_mask=None,
        value_mask=None,
        attention_mask=None,
        bias=None,
        segment_ids=None,
        use_causal_mask=False,
        return_attention_scores=False,
        training=None,
    ):
        self._mask_and_bias(
            query,
            key=key,
            value=value,
            query_mask=query_mask,
            key_mask=key_mask,
            value_mask=value_mask,
            attention_mask=attention_mask,
            bias=bias,
            segment_ids=segment_ids,
            use_causal_mask=use_causal_mask,
        )
        key = query if key is None else key
        value = key if value is None else value
        output = keras.KerasTensor(
            (*query.shape[:-1], value.shape[-1]), dtype=self.compute_dtype
        )
        if not return_attention_scores:
            return output
        heads = query.shape[2:-1]
        weights = (query.shape[0], *heads, query.shape[1], key.shape[1])
        return output, keras.KerasTensor(weights, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "dropout": self.dropout,
            "implementation": self.implementation,
            "seed": self.seed,
        }


def gather_mask(
    query,
    *,
    key,
    value,
    query_mask,
    key_mask,
    value_mask,
    attention_mask,
    segment_ids,
    num_heads,
    causal,
    window,
):
    """Returns the `Mask` of one attention; an explicit one replaces none.

    Args:
        query: Features or heads, `(B, T, ...)`, with its implicit mask.
        key: Optional, `(B, S, ...)`, likewise.
        value: Optional, `(B, S, ...)`, likewise. Without both, the queries are
            attended to, and their implicit mask is one over keys too.
        query_mask: Optional `(B, T)`.
        key_mask: Optional `(B, S)`.
        value_mask: Optional `(B, S)`.
        attention_mask: Optional, of any rank.
        segment_ids: Optional integers `(B, T)`.
        num_heads: Number of query heads.
        causal: Whether later keys are hidden.
        window: Optional width.
    """
    alone = key is None and value is None
    same_length = alone or (
        (value is None or value is query) and (key is None or key is query)
    )
    memory = next((x for x in (key, value) if x is not None), query)
    batch, num_queries, num_keys = query.shape[0], query.shape[1], memory.shape[1]
    remedy = "Rows and keys must agree: (batch, keys, ...)."
    for name, x in (("key", key), ("value", value)):
        if x is not None:
            checks.size(name, x, 0, (batch,), "rows", remedy)
            checks.size(name, x, 1, (num_keys,), "keys", remedy)
    same_length = same_length or (num_queries is not None and num_queries == num_keys)

    over_queries = [
        masks.over_queries("query_mask", mask, batch, num_queries)
        for mask in _distinct(query_mask, masks.implicit(query))
    ]
    queries = None
    for mask in over_queries:
        queries = mask if queries is None else ops.logical_and(queries, mask)

    sources = (query,) if alone else (key, value)
    keys = [
        masks.over_keys(
            "value_mask" if mask is value_mask else "key_mask", mask, batch, num_keys
        )
        for mask in _distinct(key_mask, value_mask, *map(masks.implicit, sources))
    ]
    pairs = []
    if attention_mask is not None:
        of_keys, of_pairs = masks.over_pairs(
            "attention_mask", attention_mask, batch, num_heads, num_queries, num_keys
        )
        keys += [] if of_keys is None else [of_keys]
        pairs += [] if of_pairs is None else [of_pairs]
    if segment_ids is not None:
        segment_ids = checks.integers("segment_ids", segment_ids, "one segment a token")
        checks.rank("segment_ids", segment_ids, (2,), "(batch, time)")
        remedy = "Each token has one segment: (batch, time)."
        checks.size("segment_ids", segment_ids, 1, (num_queries,), "segments", remedy)
        checks.size("segment_ids", segment_ids, 0, (1, batch), "rows", remedy)
        if not same_length:
            raise ValueError(
                "`segment_ids` belong to self-attention, where queries and keys "
                f"are the same tokens. Received {num_queries} queries and "
                f"{num_keys} keys. Pass an `attention_mask` instead."
            )
    return masks.Mask(
        causal=bool(causal),
        window=window,
        queries=queries,
        keys=tuple(keys),
        pairs=tuple(pairs),
        segments=segment_ids,
        same_length=same_length,
    )


def check_bias(bias, query, num_heads, key):
    """Returns `bias` as a tensor of floats that fits `(B, N, T, S)`, or `None`."""
    bias = checks.tensor("bias", bias)
    if bias is None:
        return None
    layout = "broadcastable to (batch, heads, queries, keys)"
    if not keras.backend.is_float_dtype(bias.dtype):
        raise ValueError(
            "`bias` holds scores to add, as floats. Received: bias.dtype="
            f"{keras.backend.standardize_dtype(bias.dtype)}. A mask, where True "
            "attends, goes into `attention_mask=`."
        )
    checks.rank("bias", bias, range(5), layout)
    sizes = {
        -1: ("keys", key.shape[1]),
        -2: ("queries", query.shape[1]),
        -3: ("heads", num_heads),
        -4: ("rows", query.shape[0]),
    }
    scope = cache.scope()
    for axis, (what, expected) in sizes.items():
        if -axis <= len(bias.shape):
            remedy = f"It must be {layout}."
            allowed = (1, expected)
            if what == "keys" and scope is not None:
                allowed = (1, expected, scope.capacity)
            checks.size("bias", bias, axis, allowed, what, remedy)
    return bias


def _distinct(*candidates):
    """Returns the masks that are given, each object once."""
    found = []
    for mask in candidates:
        if mask is not None and not any(mask is other for other in found):
            found.append(mask)
    return found


@register
class MultiHead(Rematerialized, keras.layers.Layer):
    """Several attentions side by side, each with learned queries, keys, values.

    One vector cannot say at once what a token looks for, what it answers to and
    what it hands on; three projections give each role its own. One head asks
    one question, so N heads of size D/N ask N at the same cost, and `merge`
    mixes their answers. See [Vaswani et al., 2017](
    https://arxiv.org/abs/1706.03762), 3.2.2. With fewer key heads than query
    heads it is grouped-query attention ([Ainslie et al., 2023](
    https://arxiv.org/abs/2305.13245)), with one, multi-query attention.

    A drop-in for `keras.layers.MultiHeadAttention`, except that masks of rank 2
    are over keys, float masks are refused, causal is bottom-right, and a query
    that may see no key gets zero weights. Keras' layer gives that one other
    weights if the scores are asked for than if they are not.

    Args:
        num_heads: Number of query heads, N.
        head_dim: Size of a head, H. Default: D/N, and N must divide D.
        num_kv_heads: Number of key and value heads, K, a divisor of N.
            Default: N.
        causal: Whether later tokens are hidden.
        attention: A `ScaledAttention` that holds scale, window, soft cap and
            dropout. Default: a fresh one.
        position: A layer that rotates heads (`RotaryPosition`) or biases scores
            (`RelativePosition`, `AlibiPosition`), or `None`.
        query_key_norm: Norm of each query and key head before rotation:
            `"rms"`, `"layer"`, `None`, or a Keras layer as a template.
        use_bias: Biases in all projections (`True`), in none (`False`), or in
            query, key and value only (`"qkv"`).
        kernel_initializer: Initializer of the kernels.
        merge_initializer: Initializer of the kernel of `merge`. Default:
            `kernel_initializer`.

    Call arguments:
        query: `(B, T, D)`. Alone, it attends to itself.
        value: Optional `(B, S, D')`, what is attended to.
        key: Optional `(B, S, D'')`, what queries are compared with. Default:
            `value`.
        query_mask: Optional `(B, T)`; other queries attend to nothing.
        value_mask: Optional `(B, S)`; `True` may be attended to.
        key_mask: Optional `(B, S)`, likewise; both apply.
        attention_mask: Optional `(B, S)`, over keys, `(B, T, S)` or
            `(B, 1 or N, T, S)`.
        bias: Optional scores to add, broadcastable to `(B, N, T, S)`.
        positions: Optional integers of the queries, `(T,)` or `(B, T)`; in
            self-attention those of the keys too. Default: keys are at
            0 .. S - 1; queries at 0 .. T - 1, or at S - T .. S - 1 if causal.
        segment_ids: Optional integers `(B, T)`; tokens attend within their
            segment.
        return_attention_scores: Whether to return the weights too.
        use_causal_mask: Whether to be causal in this call.
        training: Whether dropout is on.

    Output shape:
        `(B, T, D)`; with `return_attention_scores`, a tuple of it and the
        weights `(B, N, T, S)`.

    Raises:
        ValueError: For heads that do not divide, shapes that do not fit, and
            float masks.

    Example:

    >>> x = keras.random.normal((2, 10, 64))
    >>> attention = keras_tx.MultiHead(
    ...     8, num_kv_heads=2, position=keras_tx.RotaryPosition(), causal=True
    ... )
    >>> attention(x).shape
    (2, 10, 64)
    """

    def __init__(
        self,
        num_heads,
        head_dim=None,
        *,
        num_kv_heads=None,
        causal=False,
        attention=None,
        position=None,
        query_key_norm=None,
        use_bias=True,
        kernel_initializer="glorot_uniform",
        merge_initializer=None,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.num_heads = checks.positive_integer("num_heads", num_heads)
        self.head_dim = checks.positive_integer("head_dim", head_dim, optional=True)
        self.num_kv_heads = (
            checks.positive_integer("num_kv_heads", num_kv_heads, optional=True)
            or self.num_heads
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "`num_heads` must be a multiple of `num_kv_heads`, so that every "
                "key head serves equally many query heads. Received: "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}."
            )
        self.causal = checks.boolean("causal", causal)
        if attention is None:
            attention = ScaledAttention(dtype=self.dtype_policy)
        if not callable(getattr(attention, "attend", None)):
            raise ValueError(
                "`attention` must be a `ScaledAttention`, which holds scale, "
                f"window, soft cap and dropout. Received: attention={attention!r}."
            )
        self.attention = adopt(self, "attention", attention)
        self._check_position(position)
        self.position = adopt(self, "position", position)
        self.query_key_norm = NormTemplate(query_key_norm)
        self.use_bias = (
            use_bias
            if use_bias == "qkv"
            else checks.choice("use_bias", use_bias, (True, False, "qkv"))
        )
        self.kernel_initializer = keras.initializers.get(kernel_initializer)
        self.merge_initializer = keras.initializers.get(merge_initializer)
        self._num_features = {}  # of each input, once built
        self.supports_masking = True

    def _check_position(self, position):
        if position is None:
            return
        if not any(
            callable(getattr(position, protocol, None))
            for protocol in ("rotate", "bias")
        ):
            raise ValueError(
                "`position` of `MultiHead` must rotate heads (`RotaryPosition`) "
                "or bias scores (`RelativePosition`, `AlibiPosition`). Received: "
                f"position={position!r}. `SinusoidalPosition` and "
                "`LearnedPosition` are added to embeddings, before the block."
            )
        num_heads = getattr(position, "num_heads", self.num_heads)
        if num_heads != self.num_heads:
            raise ValueError(
                f"`position` biases {num_heads} heads where `MultiHead` has "
                f"{self.num_heads}. Make both the same."
            )

    def build(self, query_shape, value_shape=None, key_shape=None):
        value_shape = value_shape or query_shape
        key_shape = key_shape or value_shape
        for name, shape in (
            ("query", query_shape),
            ("value", value_shape),
            ("key", key_shape),
        ):
            if len(shape) != 3 or shape[-1] is None:
                raise ValueError(
                    f"`{name}` of `MultiHead` must be (batch, time, features) "
                    f"with known features. Received: shape {tuple(shape)}."
                )
        dim = query_shape[-1]
        if self.head_dim is None and dim % self.num_heads:
            raise ValueError(
                f"{dim} features do not divide into {self.num_heads} heads. "
                "Choose a number of heads that divides the features, or state "
                f"`head_dim`. Received: num_heads={self.num_heads}, query shape "
                f"{tuple(query_shape)}."
            )
        head_dim = self.head_dim or dim // self.num_heads
        biased = self.use_bias is not False
        self.query = self._project("query", self.num_heads, head_dim, biased)
        self.key = self._project("key", self.num_kv_heads, head_dim, biased)
        self.value = self._project("value", self.num_kv_heads, head_dim, biased)
        merge_initializer = self.merge_initializer or self.kernel_initializer
        self.merge = keras.layers.EinsumDense(
            "rnh,nhd->rd",
            (dim,),
            bias_axes="d" if self.use_bias is True else None,
            kernel_initializer=fresh_initializer(
                merge_initializer, f"{self.path}/merge"
            ),
            dtype=child_dtype(self, "merge"),
            name="merge",
        )
        for projection in (self.query, self.key, self.value, self.merge):
            projection.supports_masking = True  # or Keras warns of a lost mask
        # They work on rows of tokens; see `kernels.rowwise`.
        self.query.build((None, query_shape[-1]))
        self.key.build((None, key_shape[-1]))
        self.value.build((None, value_shape[-1]))
        self._num_features = {
            "query": dim,
            "key": key_shape[-1],
            "value": value_shape[-1],
        }
        heads = (*query_shape[:2], self.num_heads, head_dim)
        key_heads = (*key_shape[:2], self.num_kv_heads, head_dim)
        self.merge.build((None, *heads[2:]))
        self.query_norm = self.query_key_norm.make("query_norm", self.dtype_policy)
        self.key_norm = self.query_key_norm.make("key_norm", self.dtype_policy)
        if self.query_norm is not None:
            self.query_norm.build(heads)
            self.key_norm.build(key_heads)
        self.attention.build(heads, key_heads, key_heads)
        if self.position is not None and not self.position.built:
            self.position.build(heads)
        keep_frozen(self)

    def _project(self, name, num_heads, head_dim, biased):
        return keras.layers.EinsumDense(
            "rd,dnh->rnh",
            (num_heads, head_dim),
            bias_axes="nh" if biased else None,
            kernel_initializer=fresh_initializer(
                self.kernel_initializer, f"{self.path}/{name}"
            ),
            dtype=child_dtype(self, name),
            name=name,
        )

    def __call__(self, query, value=None, key=None, *args, **kwargs):
        # Keras casts each argument on its own, so that one tensor given twice
        # would become two, and no longer be self-attention.
        if key is value:
            key = None
        if value is query and key is None:
            value = None
        # By name and only if given: a subclass may have left them out of `call`.
        args = (query, value, key, *args)
        given = checks.given_by_name(MultiHead.call, args, skip=1)
        return super().__call__(query, **given, **kwargs)

    def call(
        self,
        query,
        value=None,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        segment_ids=None,
        return_attention_scores=False,
        use_causal_mask=False,
        training=None,
    ):
        mask, bias = self._mask_and_bias(
            query,
            value,
            key,
            query_mask,
            value_mask,
            key_mask,
            attention_mask,
            bias,
            segment_ids,
            use_causal_mask,
        )
        memory = query if value is None else value
        query_positions, key_positions = self._positions(query, memory, positions, mask)
        scope = cache.scope()
        two_sided = memory is not query or (key is not None and key is not query)
        query_heads = kernels.rowwise(self.query, query)  # (B, T, D) -> (B, T, N, H)
        if self.query_norm is not None:
            query_heads = self.query_norm(query_heads)
        rotates = hasattr(self.position, "rotate")
        if rotates:
            query_heads = self.position.rotate(query_heads, query_positions)

        def project():
            source = memory if key is None else key
            key_heads = kernels.rowwise(self.key, source)  # (B, S, D) -> (B, S, K, H)
            if self.key_norm is not None:
                key_heads = self.key_norm(key_heads)
            if rotates:
                key_heads = self.position.rotate(key_heads, key_positions)
            return key_heads, kernels.rowwise(self.value, memory)

        if scope is None:
            key_heads, value_heads = project()
        elif two_sided:
            key_heads, value_heads = scope.recall(self, mask, project)
            mask = scope.cross_window(mask, key_heads.shape[1])
        else:
            if not mask.causal:
                scope.refuse_two_way(self)
            key_heads, value_heads = project()
            key_positions = scope.key_positions
        if hasattr(self.position, "bias"):
            bias = blockwise.PositionBias(
                self.position, query_positions, key_positions, added=bias
            )
            if type(self.attention).attend is not ScaledAttention.attend:
                bias = bias.whole()  # a user's own knows tensors
        recorder = recording.scope()
        result = self.attention.attend(
            query_heads,
            key_heads,
            value_heads,
            mask,
            bias=bias,
            return_attention_scores=return_attention_scores or recorder is not None,
            training=training,
        )
        if recorder is not None:
            seen = (query_heads, key_heads, *result, mask)
            recorder.note(recording.Attended(self, *seen))
            result = result if return_attention_scores else result[0]
        if return_attention_scores:
            mixed, weights = result
            return kernels.rowwise(self.merge, mixed), weights
        return kernels.rowwise(self.merge, result)  # (B, T, N, H) -> (B, T, D)

    def _mask_and_bias(
        self,
        query,
        value,
        key,
        query_mask,
        value_mask,
        key_mask,
        attention_mask,
        bias,
        segment_ids,
        use_causal_mask,
    ):
        """Checks inputs and gathers all masks, the implicit ones included."""
        memory = query if value is None else value
        keys = memory if key is None else key
        for name, x in (("query", query), ("value", memory), ("key", keys)):
            checks.rank(
                name,
                x,
                (3,),
                "(batch, time, features)",
                "Make one axis of all that attend to each other, such as the rows and "
                "columns of an image, and put other axes into the batch, with "
                "`keras.ops.reshape`; `ScaledAttention` is attention without heads.",
            )
            checks.floats(name, x)
            checks.features(name, x, self._num_features.get(name), self)
        if value is None and key is not None:
            raise ValueError(
                "`key` came without `value`. Pass `value=` too, or neither for "
                "self-attention."
            )
        mask = gather_mask(
            query,
            key=key,
            value=value,
            query_mask=query_mask,
            key_mask=key_mask,
            value_mask=value_mask,
            attention_mask=attention_mask,
            segment_ids=segment_ids,
            num_heads=self.num_heads,
            causal=self.causal or self.attention.causal or use_causal_mask,
            window=self.attention.window,
        )
        return mask, check_bias(bias, query, self.num_heads, keys)

    def _positions(self, query, memory, positions, mask):
        """Returns the positions of queries and keys, `(T,)` or `(B, T)`."""
        if positions is not None:
            positions = check_positions(positions, query)
        if self.position is None:
            return None, None
        query_positions = default_positions(query, positions)
        if memory is query:
            return query_positions, query_positions
        key_positions = ops.arange(ops.shape(memory)[1], dtype="int32")
        if positions is not None:
            return query_positions, key_positions
        if mask.causal:
            query_positions += ops.shape(memory)[1] - ops.shape(query)[1]
        return query_positions, key_positions

    def compute_output_shape(self, query_shape, value_shape=None, key_shape=None):
        return tuple(query_shape)

    def compute_output_spec(
        self,
        query,
        value=None,
        key=None,
        query_mask=None,
        value_mask=None,
        key_mask=None,
        attention_mask=None,
        bias=None,
        positions=None,
        segment_ids=None,
        return_attention_scores=False,
        use_causal_mask=False,
        training=None,
    ):
        self._mask_and_bias(
            query,
            value,
            key,
            query_mask,
            value_mask,
            key_mask,
            attention_mask,
            bias,
            segment_ids,
            use_causal_mask,
        )
        if positions is not None:
            check_positions(positions, query)
        output = keras.KerasTensor(query.shape, dtype=self.compute_dtype)
        if not return_attention_scores:
            return output
        memory = query if value is None else value
        weights = (query.shape[0], self.num_heads, query.shape[1], memory.shape[1])
        return output, keras.KerasTensor(weights, dtype=self.compute_dtype)

    def get_config(self):
        return {
            **super().get_config(),
            "dtype": dtype_config(self),
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "num_kv_heads": self.num_kv_heads,
            "causal": self.causal,
            **serialize_children(self, "attention", "position"),
            "query_key_norm": self.query_key_norm.config,
            "use_bias": self.use_bias,
            "kernel_initializer": keras.initializers.serialize(self.kernel_initializer),
            "merge_initializer": keras.initializers.serialize(self.merge_initializer)
            if self.merge_initializer is not None
            else None,
        }

    @classmethod
    def from_config(cls, config):
        return cls(
            **deserialize_children(config, "attention", "position", "query_key_norm")
        )
