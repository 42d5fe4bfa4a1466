"""Positions: waves, tables, rotations and biases against published formulas."""

import math

import keras
import numpy as np
import pytest
import reference
from keras import ops
from numeric import assert_near, normal, randomize, to_numpy, weights_of

import keras_tx as tx

DTYPES = ("float32", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16")
# Rounding of a number up to 1 to each dtype, which a right value may show.
ROUNDING = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FAR = np.array([0, 1, 127, 128, 257, 1857, 4095, 8191, 8192, 65_535, 100_000])


def rounding(dtype):
    return ROUNDING[dtype.removeprefix("mixed_")]


def waves(layer, positions, dim):
    """What a sinusoidal layer adds, as float64 `(T, D)`."""
    zeros = np.zeros((1, len(positions), dim), "float32")
    return to_numpy(layer(zeros, positions=np.asarray(positions)))[0]


# ----------------------------------------------------------------------------
# Sinusoids
# ----------------------------------------------------------------------------


def test_sinusoid_has_the_numbers_of_the_paper():
    one = [0.84147, 0.54030, 0.09983, 0.99500, 0.0099998, 0.99995, 0.001, 0.9999995]
    far = [-0.70258, -0.71161, -0.99697, 0.07782, -0.98644, 0.16412, 0.14013, -0.99013]
    layer = tx.SinusoidalPosition()
    np.testing.assert_allclose(waves(layer, [1], 8)[0], one, atol=5e-6)
    np.testing.assert_allclose(waves(layer, [3001], 8)[0], far, atol=2e-5)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("dim", [8, 7, 2, 1])
def test_sinusoid_equals_the_formula_in_both_layouts_and_odd_sizes(layout, dim):
    positions = np.arange(40)
    layer = tx.SinusoidalPosition(500, layout=layout)
    expected = reference.sinusoid(positions, dim, 500, layout)
    np.testing.assert_allclose(waves(layer, positions, dim), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinusoid_is_right_at_position_100_000_in_every_dtype(dtype):
    got = waves(tx.SinusoidalPosition(dtype=dtype), FAR, 64)
    error = np.abs(got - reference.sinusoid(FAR, 64)).max()
    assert error <= 1e-4 + rounding(dtype)


def test_sinusoid_counts_from_0_and_takes_positions_of_each_row():
    x = normal(2, 5, 8)
    layer = tx.SinusoidalPosition()
    counted = to_numpy(layer(x))
    given = to_numpy(layer(x, positions=np.arange(5)))
    np.testing.assert_array_equal(counted, given)
    rows = np.array([[3, 4, 5, 0, 1], [-2, -1, 0, 1, 2]])
    expected = x + reference.sinusoid(rows, 8)
    np.testing.assert_allclose(to_numpy(layer(x, positions=rows)), expected, atol=1e-5)


def test_a_shift_is_one_linear_map_of_the_sinusoid_wherever_it_starts():
    layer, shift, dim = tx.SinusoidalPosition(), 13, 8
    map_of_shift = np.zeros((dim, dim))
    for pair, omega in enumerate(reference.frequencies(dim)):
        cos, sin = math.cos(shift * omega), math.sin(shift * omega)
        here = slice(2 * pair, 2 * pair + 2)
        map_of_shift[here, here] = [[cos, sin], [-sin, cos]]  # on (sin, cos)
    starts = np.array([0, 1, 50, 3000, 99_000])
    moved = waves(layer, starts, dim) @ map_of_shift.T
    np.testing.assert_allclose(moved, waves(layer, starts + shift, dim), atol=1e-4)


# ----------------------------------------------------------------------------
# Learned positions
# ----------------------------------------------------------------------------


def test_learned_position_adds_its_rows():
    x = normal(2, 5, 8)
    layer = tx.LearnedPosition(9)
    layer(x)
    randomize(layer)
    table = weights_of(layer)["embeddings"]
    assert_near(layer(x), x + table[:5])
    rows = np.array([[8, 0, 3, 3, 1], [2, 1, 0, 7, 6]])
    assert_near(layer(x, positions=rows), x + table[rows])


def test_rows_do_not_depend_on_what_length_came_before():
    heads, features = normal(1, 17, 2, 8), normal(1, 17, 8)
    for layer, x in (
        (tx.RotaryPosition(), heads),
        (tx.SinusoidalPosition(), features),
        (tx.LearnedPosition(17), features),
    ):
        first = to_numpy(layer(x[:, :8]))
        longest = to_numpy(layer(x))
        again = to_numpy(layer(x[:, :8]))
        np.testing.assert_array_equal(first, again)
        np.testing.assert_allclose(first, longest[:, :8], atol=1e-6)


def test_positions_beyond_a_learned_table_never_pass_for_right():
    inputs = {
        "x": keras.Input((None, 4)),
        "positions": keras.Input((None,), dtype="int32"),
    }
    y = tx.LearnedPosition(6)(inputs["x"], positions=inputs["positions"])
    model = keras.Model(inputs, y)
    batch = {"x": normal(2, 3, 4), "positions": np.array([[0, 5, 6], [-1, 2, 100]])}
    if keras.backend.backend() == "torch":  # never compiled here: values are known
        with pytest.raises(ValueError, match="from -1 to 100"):
            model.predict(batch, verbose=0)
    else:
        y = model.predict(batch, verbose=0)
        unknown = [[False, False, True], [True, False, True]]
        assert np.isnan(y).all(-1).tolist() == unknown
        assert np.isnan(y).any(-1).tolist() == unknown


# ----------------------------------------------------------------------------
# Rotations
# ----------------------------------------------------------------------------


def test_rotary_has_the_numbers_of_both_layouts():
    x = np.array([1.0, 2, 3, 4], "float32").reshape(1, 1, 1, 4)
    expected = {
        "half": [-1.984111, 1.959901, 2.462378, 4.019800],
        "interleaved": [-1.142640, 1.922076, 2.959851, 4.029800],
    }
    for layout, numbers in expected.items():
        y = tx.RotaryPosition(layout=layout)(x, positions=np.array([1]))
        np.testing.assert_allclose(to_numpy(y).ravel(), numbers, atol=2e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [None, 2, 6])
def test_rotary_equals_the_reference_also_where_only_a_part_turns(layout, rotary_dim):
    heads = normal(2, 5, 3, 8)
    layer = tx.RotaryPosition(rotary_dim=rotary_dim, layout=layout)
    for positions in (np.arange(5), np.array([[3, 4, 0, 1, 2], [-7, 90, 5, 5, 6]])):
        expected = reference.rotate(
            heads, positions, rotary_dim=rotary_dim, layout=layout
        )
        assert_near(layer(heads, positions=positions), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_is_right_at_position_100_000_in_every_dtype(dtype):
    # Turning (1, 0) gives cosine and sine of the angle themselves.
    heads = np.zeros((1, len(FAR), 1, 32), "float32")
    heads[..., :16] = 1.0
    y = to_numpy(tx.RotaryPosition(dtype=dtype)(heads, positions=FAR))
    error = np.abs(y - reference.rotate(heads, FAR)).max()
    assert error <= 1e-4 + rounding(dtype)
    # The angle 1044.27, which rounds to 1045 in float16.
    assert y[0, 5, 0, 1] == pytest.approx(0.30669, abs=2e-5 + rounding(dtype))


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotary_scores_depend_only_on_distance(layout, dtype):
    query, key = normal(1, 1, 1, 16), normal(1, 1, 1, 16, seed=1)
    rotary = tx.RotaryPosition(layout=layout, dtype=dtype)

    def score(i, j):
        turned = (
            to_numpy(rotary(x, positions=np.array([p])))
            for x, p in ((query, i), (key, j))
        )
        return float(np.prod(list(turned), axis=0).sum())

    for i, j in ((5, 2), (0, 63)):
        near = score(i, j)
        size = float(np.linalg.norm(query) * np.linalg.norm(key))
        tolerance = size * (1e-4 + rounding(dtype))
        for far in (1, 100, 100_000):
            assert score(i + far, j + far) == pytest.approx(near, abs=tolerance)
        assert abs(score(i, j) - score(i + 9, j)) > 0.1


def test_rotary_keeps_lengths():
    heads = normal(2, 5, 3, 8)
    turned = to_numpy(tx.RotaryPosition()(heads, positions=np.arange(5) * 999))
    np.testing.assert_allclose(
        np.linalg.norm(turned, axis=-1), np.linalg.norm(heads, axis=-1), rtol=1e-5
    )


# ----------------------------------------------------------------------------
# Rotary scalings, one pair of features at a time, as the papers write them
# ----------------------------------------------------------------------------

BASE, DIM, LENGTH = 10_000.0, 64, 4096


def linear(omega, factor):
    """Position m is read at m / s (Chen et al., 2023)."""
    return omega / factor


def ntk(pair, factor):
    """The base grows by s^(d / (d - 2)) (Peng et al., 2023, 3.1)."""
    return (BASE * factor ** (DIM / (DIM - 2))) ** (-2 * pair / DIM)


def yarn(pair, omega, factor, fast=32, slow=1):
    """A ramp over pairs from where `fast` turns fit to where `slow` do."""
    ends = [
        DIM * math.log(LENGTH / (2 * math.pi * turns)) / (2 * math.log(BASE))
        for turns in (fast, slow)
    ]
    start, end = math.floor(ends[0]), math.ceil(ends[1])
    share = min(max((pair - start) / (end - start), 0), 1)
    return share * omega / factor + (1 - share) * omega


def llama3(omega, factor, low=1, high=4, length=8192):
    """Long waves divided, short ones kept, those between blended."""
    wavelength = 2 * math.pi / omega
    if wavelength < length / high:
        return omega
    if wavelength > length / low:
        return omega / factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * omega / factor + smooth * omega


OMEGAS = [BASE ** (-2 * pair / DIM) for pair in range(DIM // 2)]
SCALINGS = {
    "linear": (tx.LinearScaling(4.0), [linear(o, 4) for o in OMEGAS]),
    "ntk": (tx.NtkScaling(4.0), [ntk(pair, 4) for pair in range(DIM // 2)]),
    "yarn": (
        tx.YarnScaling(4.0, original_max_length=LENGTH),
        [yarn(pair, o, 4) for pair, o in enumerate(OMEGAS)],
    ),
    "llama3": (tx.Llama3Scaling(8.0), [llama3(o, 8) for o in OMEGAS]),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scaling_equals_the_published_formula(name):
    scaling, expected = SCALINGS[name]
    layer = tx.RotaryPosition(BASE, scaling=scaling)
    np.testing.assert_allclose(layer.frequencies(DIM), expected, rtol=1e-12)
    # And it is what heads are turned by, far out too.
    heads, positions = normal(1, 3, 2, DIM), np.array([1, 5000, 100_000])
    turned = reference.rotate(heads, positions, omega=np.array(expected))
    y = to_numpy(layer(heads, positions=positions)) / scaling.magnitude
    np.testing.assert_allclose(y, turned, atol=5e-4)


def test_ntk_keeps_the_fastest_pair_and_divides_the_slowest():
    frequencies = tx.RotaryPosition(scaling=tx.NtkScaling(4.0)).frequencies(DIM)
    assert frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(OMEGAS[-1] / 4)


def test_yarn_raises_heads_by_the_papers_magnitude():
    heads = normal(1, 1, 1, DIM)
    layer = tx.RotaryPosition(scaling=tx.YarnScaling(8.0, original_max_length=LENGTH))
    y = to_numpy(layer(heads, positions=np.array([0])))
    np.testing.assert_allclose(y, heads * (0.1 * math.log(8) + 1), rtol=1e-6)
    still = tx.YarnScaling(8.0, original_max_length=LENGTH, magnitude=1.0)
    y = to_numpy(tx.RotaryPosition(scaling=still)(heads, positions=np.array([0])))
    np.testing.assert_allclose(y, heads, rtol=1e-6)


IN_TRANSFORMERS = {
    "linear": (tx.LinearScaling(4.0), {"factor": 4.0}),
    "yarn": (
        tx.YarnScaling(4.0, original_max_length=LENGTH),
        {"factor": 4.0, "original_max_position_embeddings": LENGTH},
    ),
    "yarn untruncated": (
        tx.YarnScaling(
            16.0, original_max_length=512, beta_fast=20, beta_slow=2, truncate=False
        ),
        {
            "factor": 16.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 20,
            "beta_slow": 2,
            "truncate": False,
        },
    ),
    "llama3": (
        tx.Llama3Scaling(32.0, original_max_length=8192),
        {
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_scaling_equals_transformers(name, base):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    functions = pytest.importorskip("transformers.modeling_rope_utils")
    scaling, options = IN_TRANSFORMERS[name]
    kind = name.split()[0]
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM,
        num_attention_heads=4,
        head_dim=DIM,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": kind, "rope_theta": base, **options},
    )
    expected, magnitude = functions.ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = tx.RotaryPosition(base, scaling=scaling).frequencies(DIM)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=2e-6)
    assert scaling.magnitude == pytest.approx(magnitude)


# ----------------------------------------------------------------------------
# Biases
# ----------------------------------------------------------------------------

BUCKETS = [
    {"bidirectional": True},
    {"bidirectional": False},
    {"bidirectional": True, "num_buckets": 8, "max_distance": 16},
    {"bidirectional": False, "num_buckets": 6, "max_distance": 50},
    {"bidirectional": False, "num_buckets": 2, "max_distance": 2},
]
DISTANCES = np.arange(-300, 301)


def buckets_of(layer, distances):
    """Which rows of the table a layer reads for distances, from its bias."""
    layer.build()
    table = np.arange(layer.num_buckets, dtype="float32")[:, None]
    layer.embeddings.assign(np.tile(table, (1, layer.num_heads)))
    bias = layer.bias(np.array([300]), distances + 300)  # (N, 1, S)
    return to_numpy(bias)[0, 0]


@pytest.mark.parametrize("options", BUCKETS, ids=str)
def test_relative_buckets_are_those_of_t5(options):
    got = buckets_of(tx.RelativePosition(2, **options), DISTANCES)
    expected = [reference.relative_bucket(int(d), **options) for d in DISTANCES]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("options", BUCKETS[:4], ids=str)
def test_relative_buckets_are_those_of_transformers(options):
    torch = pytest.importorskip("torch")
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    got = buckets_of(tx.RelativePosition(2, **options), DISTANCES)
    expected = t5.T5Attention._relative_position_bucket(
        torch.tensor(DISTANCES), **options
    )
    np.testing.assert_array_equal(got, expected.numpy())


def test_alibi_slopes_are_those_of_the_paper():
    def bias_per_token(num_heads):
        bias = tx.AlibiPosition(num_heads).bias(np.array([0]), np.array([1]))
        return -to_numpy(bias).ravel()

    eight = [2.0**-n for n in range(1, 9)]
    np.testing.assert_allclose(bias_per_token(8), eight, rtol=1e-6)
    # No power of two: those of the power below, then every second of the next.
    six = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    np.testing.assert_allclose(bias_per_token(6), six, rtol=1e-6)
    twelve = [*eight, 2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5]
    np.testing.assert_allclose(bias_per_token(12), twelve, rtol=1e-6)
    for num_heads in range(1, 20):
        expected = reference.alibi_slopes(num_heads)
        np.testing.assert_allclose(bias_per_token(num_heads), expected, rtol=1e-6)


@pytest.mark.parametrize("layer", [tx.AlibiPosition, tx.RelativePosition])
def test_a_bias_answers_for_any_block_of_queries_and_keys(layer):
    layer = layer(3)
    layer.build()
    query, key = np.arange(2, 9), np.arange(12)
    whole = to_numpy(layer.bias(query, key))
    assert whole.shape == (3, 7, 12)
    block = to_numpy(layer.bias(query[2:5], key[4:11]))
    np.testing.assert_array_equal(block, whole[:, 2:5, 4:11])
    rows = to_numpy(layer.bias(np.stack([query, query + 1]), np.stack([key, key])))
    assert rows.shape == (2, 3, 7, 12)
    np.testing.assert_array_equal(rows[0], whole)


def test_biases_equal_the_reference():
    query, key = np.array([[5, 6, 40], [0, 1, 2]]), np.array([[0, 9, 41, 7]] * 2)
    alibi = to_numpy(tx.AlibiPosition(6).bias(query, key))
    assert_near(alibi, reference.alibi_bias(6, query, key))
    relative = tx.RelativePosition(6, num_buckets=8, max_distance=20)
    relative.build()
    expected = reference.relative_bias(
        weights_of(relative)["embeddings"], query, key, num_buckets=8, max_distance=20
    )
    assert_near(relative.bias(query, key), expected)


@pytest.mark.parametrize("make", [tx.AlibiPosition, tx.RelativePosition])
def test_one_bias_handed_to_a_layer_equals_a_layer_of_its_own(make):
    x, positions = normal(2, 5, 12), np.array([[0, 1, 2, 3, 4], [9, 8, 7, 30, 5]])
    inside = tx.MultiHead(3, position=make(3))
    inside(x)
    randomize(inside)
    outside, shared = tx.MultiHead(3), make(3)
    outside(x), shared(x)
    table = [v for v in inside.weights if "position" in v.path]
    rest = [v for v in inside.weights if "position" not in v.path]
    outside.set_weights(rest), shared.set_weights(table)
    for call in ({}, {"positions": positions}):
        expected = to_numpy(inside(x, **call))
        assert_near(outside(x, bias=shared(x, **call)), expected)


def test_queries_of_a_causal_layer_stand_behind_the_keys():
    # The last query is the last token: a shorter query sees what the full did.
    x = normal(1, 7, 12)
    for position in (tx.RotaryPosition(), tx.AlibiPosition(3), tx.RelativePosition(3)):
        layer = tx.MultiHead(3, causal=True, position=position)
        full = to_numpy(layer(x))
        last = to_numpy(layer(x[:, 4:], x))
        np.testing.assert_allclose(last, full[:, 4:], atol=2e-6)


def test_positions_of_any_integer_dtype_are_the_same_positions():
    x, heads = normal(2, 3, 8), normal(2, 3, 2, 8)
    rows = np.array([[0, 5, 127], [3, 2, 1]])
    learned = tx.LearnedPosition(300)
    for dtype in ("int8", "uint8", "int16", "uint16", "int64", "uint32"):
        for layer, inputs in (
            (tx.SinusoidalPosition(), x),
            (learned, x),
            (tx.RotaryPosition(), heads),
        ):
            expected = to_numpy(layer(inputs, positions=rows.astype("int32")))
            got = to_numpy(layer(inputs, positions=rows.astype(dtype)))
            np.testing.assert_array_equal(got, expected)
        listed = to_numpy(learned(x, positions=rows.tolist()))
        np.testing.assert_array_equal(listed, to_numpy(learned(x, positions=rows)))


def test_a_position_of_ones_own_needs_only_a_method():
    class Recency(keras.layers.Layer):
        def bias(self, query_positions, key_positions):
            age = query_positions[..., :, None] - key_positions[..., None, :]
            return -0.5 * ops.cast(age, "float32")[..., None, :, :]

    x = normal(2, 5, 12)
    layer = tx.MultiHead(3, position=Recency())
    _, weights = layer(x, return_attention_scores=True)
    age = np.arange(5)[:, None] - np.arange(5)[None]
    _, expected = reference.multi_head(
        weights_of(layer), x, x, x, np.ones((2, 3, 5, 5), bool), bias=-0.5 * age
    )
    assert_near(weights, expected)
