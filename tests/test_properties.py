"""Whole kinds at once: random layers, masks and inputs against the reference.

A few random examples of each run with every test run, always the same ones;

    pytest tests/test_properties.py --hypothesis-profile=thorough

draws ten thousand in all, and others every time.
"""

import dataclasses
import functools
from collections.abc import Callable

import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import ops
from numeric import TOLERANCE, gradients, randomize, to_numpy, weights_of

import keras_tx as tx
from keras_tx import masks

# Few sizes, none the same for two axes, and B = T and a length of 1 among them.
DIM, MEMORY_DIM = 8, 6
ROWS, QUERIES, KEYS = (1, 3), (1, 3, 4), (1, 5)

DTYPES = ("float32", "float32", "mixed_float16", "mixed_bfloat16", "float16")


def tolerance(policy):
    # Several roundings one after the other.
    return TOLERANCE[policy] * (1 if policy == "float32" else 4)


@st.composite
def random_masks(draw, batch, num_heads, num_queries, num_keys, alone):
    """Draws call arguments of masks, and what the reference makes of them."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    share = draw(st.sampled_from([0.3, 0.7, 0.95]))
    call, meant = {}, {"key_masks": []}

    def random(*shape):
        mask = rng.random(shape) < share
        kind = draw(st.sampled_from(["bool", "int32", "uint8"]))
        return mask, mask.astype(kind)

    if draw(st.booleans()):
        meant["query_mask"], call["query_mask"] = random(batch, num_queries)
    for name in ("value_mask", "key_mask"):
        if draw(st.booleans()):
            mask, call[name] = random(batch, num_keys)
            meant["key_masks"].append(mask)
    shape = draw(
        st.sampled_from(
            [
                None,
                (batch, num_keys),
                (batch, num_queries, num_keys),
                (1, num_queries, num_keys),
                (batch, 1, num_keys),
                (batch, 1, num_queries, num_keys),
                (1, num_heads, num_queries, num_keys),
                (batch, num_heads, num_queries, num_keys),
            ]
        )
    )
    if shape is not None:
        meant["attention_mask"], call["attention_mask"] = random(*shape)
    if alone and draw(st.booleans()):
        segments = rng.integers(0, 3, (batch, num_queries))
        meant["segment_ids"] = call["segment_ids"] = segments
    implicit = None
    if draw(st.booleans()):
        implicit, _ = random(batch, num_queries)
        both = meant.get("query_mask", True) & implicit
        meant["query_mask"] = both
        if alone:
            meant["key_masks"].append(implicit)
    return call, meant, implicit


@st.composite
def random_position(draw, num_heads):
    """Draws a kind of position, and a function that makes its layer, or none."""
    kind = draw(st.sampled_from(["none", "rotary", "alibi", "relative"]))
    if kind == "rotary":
        wavelength = draw(st.sampled_from([100, 10_000]))
        options = {
            "rotary_dim": draw(st.sampled_from([None, 2])),
            "layout": draw(st.sampled_from(["half", "interleaved"])),
        }
        return kind, lambda: tx.RotaryPosition(wavelength, **options)
    if kind == "alibi":
        return kind, lambda: tx.AlibiPosition(num_heads)
    if kind == "relative":
        options = {
            "num_buckets": 8,
            "max_distance": 20,
            "bidirectional": draw(st.booleans()),
        }
        return kind, lambda: tx.RelativePosition(num_heads, **options)
    return kind, lambda: None


@st.composite
def attentions(draw, dtypes=DTYPES):
    """Draws a `MultiHead`, its inputs, and what the reference computes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = draw(st.sampled_from(dtypes))
    batch, num_queries = draw(st.sampled_from(ROWS)), draw(st.sampled_from(QUERIES))
    alone = draw(st.booleans())
    num_keys = num_queries if alone else draw(st.sampled_from(KEYS))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 3]))
    head_dim = draw(st.sampled_from([2, 4]))
    scale = draw(st.sampled_from([None, 1.0, 0.3]))
    soft_cap = draw(st.sampled_from([None, 0.8]))
    window = draw(st.sampled_from([None, 1, 2, 4]))
    causal = draw(st.sampled_from([None, "layer", "attention", "call"]))
    head_norm = draw(st.sampled_from([None, "rms", "layer"]))
    kind, make_position = draw(random_position(num_heads))
    use_bias = draw(st.sampled_from([True, False, "qkv"]))
    call, meant, implicit = draw(
        random_masks(batch, num_heads, num_queries, num_keys, alone)
    )
    meant.update(causal=causal is not None, window=window)
    if causal == "call":
        call["use_causal_mask"] = True

    def make():
        return tx.MultiHead(
            num_heads,
            head_dim,
            num_kv_heads=num_kv_heads,
            causal=causal == "layer",
            attention=tx.ScaledAttention(
                scale, soft_cap=soft_cap, window=window, causal=causal == "attention"
            ),
            position=make_position(),
            query_key_norm=head_norm,
            use_bias=use_bias,
            dtype=policy,
        )

    # What both dtypes hold exactly, so that they differ in arithmetic only.
    x, memory = (
        (rng.normal(0, 0.5, shape)).astype("float16").astype("float32")
        for shape in ((batch, num_queries, DIM), (batch, num_keys, MEMORY_DIM))
    )
    if policy.endswith("bfloat16"):
        x, memory = (np.round(one * 64) / 64 for one in (x, memory))
    inputs = (x,) if alone else (x, memory)

    offset = num_keys - num_queries if causal and not alone else 0
    query_positions = np.arange(num_queries) + offset
    key_positions = np.arange(num_keys)
    if draw(st.booleans()):
        shape = draw(st.sampled_from([(num_queries,), (batch, num_queries)]))
        call["positions"] = query_positions = rng.integers(-5, 2000, shape)
        if alone:
            key_positions = query_positions

    shape = (batch, num_heads, num_queries, num_keys)
    bias = np.zeros(shape)
    rank = draw(st.sampled_from([None, 0, 2, 3, 4]))
    if rank is not None:
        given = rng.integers(-8, 8, shape[4 - rank :]) / 4
        if draw(st.booleans()):
            given = np.where(rng.random(given.shape) < 0.3, -np.inf, given)
        call["bias"] = np.asarray(given, "float32")
        bias = bias + given
    return Attention(
        kind=f"{num_heads=}, {num_kv_heads=}, {head_dim=}, {causal=}, {window=}, "
        f"{use_bias=}, position={kind!r}",
        make=make,
        inputs=inputs,
        call=call,
        meant=meant,
        implicit=implicit,
        policy=policy,
        shape=shape,
        bias=bias,
        positions=(query_positions, key_positions),
        options={"scale": scale, "soft_cap": soft_cap, "head_norm": head_norm},
    )


@dataclasses.dataclass
class Attention:
    """A drawn attention; see `attentions`."""

    kind: str
    make: Callable
    inputs: tuple
    call: dict
    meant: dict
    implicit: np.ndarray | None
    policy: str
    shape: tuple
    bias: np.ndarray
    positions: tuple
    options: dict

    @functools.cached_property
    def layer(self):
        """The layer, built, every weight random."""
        layer = self.make()
        layer(*self.inputs)
        randomize(layer, spread=0.4)
        return layer

    @functools.cached_property
    def allow(self):
        return reference.allowed(self.shape, **self.meant)

    def run(self, *inputs, **more):
        """Calls the layer, on other inputs if given."""
        inputs = [ops.convert_to_tensor(x) for x in inputs or self.inputs]
        if self.implicit is not None:
            inputs[0] = inputs[0] + 0  # a tensor of its own
            masks.attach(inputs[0], ops.convert_to_tensor(self.implicit))
        return self.layer(*inputs, **self.call, **more)

    def expected(self):
        """What the reference computes: outputs and weights."""
        w, layer, bias = weights_of(self.layer), self.layer, self.bias
        position, turn, where = layer.position, None, self.positions
        if isinstance(position, tx.RotaryPosition):
            dim = position.rotary_dim or layer.head_dim
            turn = [
                lambda heads, positions=positions: reference.rotate(
                    heads,
                    positions,
                    rotary_dim=dim,
                    layout=position.layout,
                    omega=reference.frequencies(dim, position.max_wavelength),
                )
                for positions in where
            ]
        elif isinstance(position, tx.AlibiPosition):
            bias = bias + reference.alibi_bias(layer.num_heads, *where)
        elif isinstance(position, tx.RelativePosition):
            bias = bias + reference.relative_bias(
                w["position/embeddings"],
                *where,
                num_buckets=position.num_buckets,
                max_distance=position.max_distance,
                bidirectional=position.bidirectional,
            )
        x, memory = self.inputs[0], self.inputs[-1]
        return reference.multi_head(
            w,
            x.astype("float64"),
            memory.astype("float64"),
            memory.astype("float64"),
            self.allow,
            turn=turn,
            bias=bias,
            **self.options,
        )


def assert_close(actual, expected, policy):
    assert actual.shape == expected.shape
    assert np.isfinite(actual).all()
    size = max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance(policy) * size)


@given(attentions())
def test_attention_equals_the_reference_whatever_the_masks(attention):
    y, weights = to_numpy(attention.run(return_attention_scores=True))
    expected_y, expected_weights = attention.expected()
    assert_close(weights, expected_weights, attention.policy)
    assert_close(y, expected_y, attention.policy)
    # Not nearly, but exactly zero where nothing may be attended to.
    assert (weights[expected_weights == 0] == 0).all()
    # And asking for the weights changes nothing.
    np.testing.assert_array_equal(to_numpy(attention.run()), y)


@given(attentions(), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_rubbish_in_slots_that_no_query_sees_reaches_no_other_row(attention, rubbish):
    unseen = ~attention.allow.any((1, 2))  # (B, S)
    clean = to_numpy(attention.run())
    dirty = [x.copy() for x in attention.inputs]
    dirty[-1][unseen] = rubbish
    y = to_numpy(attention.run(*dirty))
    # In self-attention a slot has an output of its own, which may be rubbish.
    others = np.ones(y.shape[:2], bool) if len(dirty) > 1 else ~unseen
    np.testing.assert_array_equal(y[others], clean[others])


@settings(max_examples=max(5, settings().max_examples // 5))
@given(attentions())
def test_gradients_are_finite_and_none_reaches_what_no_query_sees(attention):
    def loss(*inputs):
        return ops.sum(ops.square(ops.cast(attention.run(*inputs), "float32")))

    of_inputs, of_weights = gradients(attention.layer, loss, *attention.inputs)
    for gradient in (*of_inputs, *of_weights.values()):
        assert np.isfinite(gradient).all()
    if len(of_inputs) > 1:
        unseen = ~attention.allow.any((1, 2))
        assert (of_inputs[-1][unseen] == 0).all()


# ----------------------------------------------------------------------------
# The block
# ----------------------------------------------------------------------------


@st.composite
def blocks(draw, dtypes=DTYPES):
    """Draws a block and what it is called with."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    policy = draw(st.sampled_from(dtypes))
    batch, num_queries = draw(st.sampled_from(ROWS)), draw(st.sampled_from(QUERIES))
    norm = draw(st.sampled_from(["layer", "rms", None]))
    norm_position = draw(st.sampled_from(["pre", "post", "sandwich"]))
    residual = draw(st.sampled_from(["serial", "parallel", "none"]))
    crossing = draw(st.booleans()) and residual != "parallel"
    if norm is None:
        norm_position = "pre"
    if residual == "parallel" and norm_position == "post":
        norm_position = "sandwich"
    num_heads = draw(st.sampled_from([1, 2]))
    activation = draw(st.sampled_from(sorted(reference.ACTIVATIONS)))
    gated, causal = draw(st.booleans()), draw(st.booleans())
    use_bias = draw(st.booleans())

    @functools.cache
    def make():
        block = tx.TransformerBlock(
            num_heads,
            tx.FeedForward(10, activation, gated=gated, use_bias=use_bias),
            cross_attention=num_heads if crossing else None,
            causal=causal,
            norm=norm,
            norm_position=norm_position,
            residual=residual,
            dtype=policy,
        )
        block(*inputs)
        randomize(block, spread=0.3)
        return block

    call, meant, implicit = draw(
        random_masks(batch, num_heads, num_queries, num_queries, True)
    )
    # What a block takes: its own mask, and that of its input.
    call = {n: m for n, m in call.items() if n in ("attention_mask", "segment_ids")}
    meant = {n: m for n, m in meant.items() if n in call}
    if implicit is not None:
        meant.update(query_mask=implicit, key_masks=[implicit])
    meant["causal"] = causal
    shape = (batch, num_heads, num_queries, num_queries)
    allows = {"attention": reference.allowed(shape, **meant)}
    x = np.round(rng.normal(0, 0.5, (batch, num_queries, DIM)) * 64) / 64
    inputs = [x.astype("float32")]
    if crossing:
        num_keys = draw(st.sampled_from(KEYS))
        memory = np.round(rng.normal(0, 0.5, (batch, num_keys, MEMORY_DIM)) * 64) / 64
        inputs.append(memory.astype("float32"))
        key_mask = rng.random((batch, num_keys)) < 0.7
        call["context_mask"] = key_mask
        allows["cross_attention"] = reference.allowed(
            (batch, num_heads, num_queries, num_keys),
            query_mask=implicit,
            key_masks=[key_mask],
        )

    def run(*others, **more):
        tensors = [ops.convert_to_tensor(x) for x in others or inputs]
        if implicit is not None:
            tensors[0] = tensors[0] + 0
            masks.attach(tensors[0], ops.convert_to_tensor(implicit))
        return make()(*tensors, **call, **more)

    def expected():
        w = weights_of(make())

        def attend(name, memory=None):
            def function(x):
                other = x if memory is None else memory
                part = reference.part(w, name)
                return reference.multi_head(part, x, other, other, allows[name])[0]

            return function

        branches = {"attention": attend("attention")}
        if crossing:
            branches["cross_attention"] = attend("cross_attention", inputs[1])
        branches["feed_forward"] = lambda x: reference.feed_forward(
            reference.part(w, "feed_forward"),
            x,
            reference.ACTIVATIONS[activation],
            gated,
        )
        return reference.block(
            w,
            inputs[0].astype("float64"),
            branches,
            kind=norm,
            norm_position=norm_position,
            residual=residual,
        )

    return run, expected, policy, implicit, inputs


@given(blocks(dtypes=("float32", "float32", "float32", "mixed_bfloat16", "float16")))
def test_block_equals_the_reference_whatever_its_shape(drawn):
    run, expected, policy, _, _ = drawn
    y = to_numpy(run())
    assert_close(y, expected(), policy)
    with_scores = to_numpy(run(return_attention_scores=True))
    np.testing.assert_array_equal(with_scores[0], y)


@given(blocks(), st.sampled_from([np.nan, np.inf]))
def test_rubbish_in_padding_reaches_no_real_row_of_a_block(drawn, rubbish):
    run, _, _, implicit, inputs = drawn
    if implicit is None:
        return
    clean, dirty = to_numpy(run()), inputs[0].copy()
    dirty[~implicit] = rubbish
    y = to_numpy(run(dirty, *inputs[1:]))
    np.testing.assert_array_equal(y[implicit], clean[implicit])
