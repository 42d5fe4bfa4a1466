"""Faults that are still there in the libraries installed beside this one.

    python benchmarks/peers.py                 # writes benchmarks/PEERS.md
    KERAS_BACKEND=jax python benchmarks/peers.py

Each line of the table is a fault that people reported (`tests/cases.py` says where),
or one that turned up in writing this package: what the layer of Keras or KerasHub
gives, and what the one of keras_tx gives, for the same input. A fault that a newer
version has mended says so; a library that is not installed is left out.
"""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
import tempfile
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import keras
import numpy as np
from keras import ops

import keras_tx as tx

HERE = pathlib.Path(__file__).resolve().parent
CHECKS = []


def check(case, peer, what):
    """Registers a function that returns what is there and here, and two verdicts.

    Args:
        case: Identifier in `tests/cases.py`, or "new".
        peer: Name of the library that it shows a fault of.
        what: The situation, in a few words.

    The function returns `(there, fault_is_there, here, right_is_here)`.
    """

    def add(function):
        CHECKS.append((case, peer, what, function))
        return function

    return add


def numpy(x):
    return ops.convert_to_numpy(ops.cast(x, "float32"))


def normal(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def outcome(function, *arguments, **keywords):
    """Returns what a function gives, or the exception that it raises."""
    try:
        return function(*arguments, **keywords)
    except Exception as error:
        return error


def said(result):
    """Says what a call ended in."""
    if isinstance(result, Exception):
        return f"{type(result).__name__}"
    return "no error"


def largest(x, y):
    return float(np.abs(numpy(x) - numpy(y)).max())


# ----------------------------------------------------------------------------
# Keras
# ----------------------------------------------------------------------------


@check("case-07", "keras", "NaN in a slot that is masked: real rows that are finite")
def nan_in_padding():
    x, mask = normal(1, 4, 8), np.array([[[1, 1, 1, 0]]], bool)
    x[0, 3] = np.nan
    theirs = numpy(keras.layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask))
    ours = numpy(tx.MultiHead(2)(x, attention_mask=mask))
    there, here = (int(np.isfinite(y[0, :3]).all(-1).sum()) for y in (theirs, ours))
    return f"{there} of 3", there < 3, f"{here} of 3", here == 3


@check("case-09", "keras", "implicit mask behind a norm and a residual written x + y")
def residual_and_norm():
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens)
    y = x + keras.layers.RMSNormalization()(x)
    there = getattr(y, "_keras_mask", None) is not None
    z = tx.TransformerBlock(2, 8, norm="rms")(tx.TokenEmbedding(9, 8, pad_id=0)(tokens))
    here = getattr(z, "_keras_mask", None) is not None
    word = {True: "kept", False: "lost"}
    return word[there], not there, word[here], here


@check(
    "case-17",
    "keras",
    "mask (B, S) where B = T: difference from the same mask as (B, 1, S)",
)
def rank_two_mask():
    x = normal(4, 4, 8)
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]], bool)
    theirs, ours = keras.layers.MultiHeadAttention(2, 4), tx.MultiHead(2)
    there = largest(
        theirs(x, x, attention_mask=mask), theirs(x, x, attention_mask=mask[:, None])
    )
    here = largest(ours(x, attention_mask=mask), ours(x, attention_mask=mask[:, None]))
    return f"{there:.2g}", there > 1e-3, f"{here:.2g}", here == 0


@check(
    "case-18",
    "keras",
    "additive mask 0, 0, -1e9, -1e9: weight of the two that are blocked",
)
def additive_mask():
    x, mask = normal(1, 4, 8), np.array([[[0, 0, -1e9, -1e9]] * 4], "float32")
    theirs = keras.layers.MultiHeadAttention(2, 4)
    _, weights = theirs(x, x, attention_mask=mask, return_attention_scores=True)
    there = float(numpy(weights)[..., 2:].sum(-1).min())
    refused = outcome(tx.MultiHead(2), x, attention_mask=mask)
    named = "bias=" in str(refused)
    _, weights = tx.MultiHead(2)(x, bias=mask, return_attention_scores=True)
    here = float(numpy(weights)[..., 2:].sum(-1).max())
    return (
        f"{there:.2g}",
        there > 0.5,
        f"{said(refused)} that names `bias=`, which gives {here:.2g}",
        named and here == 0,
    )


@check(
    "case-44", "keras", "mixed_float16, products beyond 65,504: outputs that are finite"
)
def large_products():
    x = normal(1, 6, 64) * 60
    shares = []
    for layer in (
        keras.layers.MultiHeadAttention(2, 32, dtype="mixed_float16"),
        tx.MultiHead(2, dtype="mixed_float16"),
    ):
        layer(x, x)
        for weight in layer.weights:
            if len(weight.shape) > 2:
                weight.assign(ops.cast(weight, "float32") * 4)
        shares.append(float(np.isfinite(numpy(layer(x, x))).mean()))
    there, here = shares
    return f"{there:.0%}", there < 1, f"{here:.0%}", here == 1


@check("case-56", "keras", "21 features in 8 heads without a head size")
def heads_that_do_not_divide():
    # Keras asks for a head size, and sizes grow with the number of heads.
    counts = []
    for heads in (1, 4):
        layer = keras.layers.MultiHeadAttention(heads, 16)
        layer(normal(1, 3, 16), normal(1, 3, 16))
        counts.append(layer.count_params())
    ours = []
    for heads in (1, 4):
        layer = tx.MultiHead(heads)
        layer(normal(1, 3, 16))
        ours.append(layer.count_params())
    refused = outcome(tx.MultiHead(8), normal(1, 3, 21))
    return (
        f"`key_dim` is a must; of 16, weights grow from {counts[0]} to {counts[1]} "
        "with 4 heads",
        counts[0] != counts[1],
        f"{said(refused)}; {ours[0]} weights of 16 features, whatever the heads",
        isinstance(refused, ValueError) and ours[0] == ours[1],
    )


@check(
    "new",
    "keras",
    "a query that may see nothing: change of the output when scores are asked for",
)
def dead_row():
    x, mask = normal(1, 4, 8), np.ones((1, 4, 4), bool)
    mask[0, 0] = False
    found = []
    for layer in (keras.layers.MultiHeadAttention(2, 4), tx.MultiHead(2)):
        call = {"attention_mask": mask}
        alone = layer(x, x, **call)
        with_scores = layer(x, x, **call, return_attention_scores=True)[0]
        found.append(largest(alone, with_scores))
    there, here = found
    return f"{there:.2g}", there > 1e-4, f"{here:.2g}", here == 0


def fit_in_scope(attention):
    inputs = keras.Input((None, 8))
    with keras.RematScope(mode="full"):
        y = attention()(inputs, inputs, use_causal_mask=True)
    model = keras.Model(inputs, y)
    model.compile("sgd", "mse")
    x = normal(4, 6, 8)
    return model.fit(x, x, verbose=0).history["loss"][0]


@check("new", "keras", "training causal attention made in `keras.RematScope`")
def remat():
    there = outcome(fit_in_scope, lambda: keras.layers.MultiHeadAttention(2, 4))
    here = outcome(fit_in_scope, lambda: tx.MultiHead(2))
    return (
        said(there),
        isinstance(there, Exception),
        said(here),
        not isinstance(here, Exception) and np.isfinite(here),
    )


@check("new", "keras", "`None` by place for the mask of the values")
def none_by_place():
    x = normal(2, 4, 8)
    there = outcome(
        lambda: keras.layers.MultiHeadAttention(2, 4)(x, x, None, None, None)
    )
    here = outcome(lambda: tx.MultiHead(2)(x, x, None, None, None))
    return (
        said(there),
        isinstance(there, Exception),
        said(here),
        not isinstance(here, Exception),
    )


# ----------------------------------------------------------------------------
# KerasHub
# ----------------------------------------------------------------------------


@check("case-48", "keras_hub", "sinusoids of 4,096 positions in float16: largest error")
def sinusoids():
    import keras_hub

    x = np.zeros((1, 4096, 64), "float32")
    frequencies = 10_000.0 ** (-np.arange(0, 64, 2) / 64)
    angles = np.arange(4096)[:, None] * frequencies
    exact = np.stack([np.sin(angles), np.cos(angles)], -1).reshape(4096, 64)
    theirs = keras_hub.layers.SinePositionEncoding(dtype="float16")(x)
    there = float(np.abs(numpy(theirs)[0] - exact).max())
    here = float(
        np.abs(numpy(tx.SinusoidalPosition(dtype="float16")(x))[0] - exact).max()
    )
    return f"{there:.2g}", there > 1e-2, f"{here:.2g}", here <= 1e-3


@check("case-54", "keras_hub", "9 tokens for 8 learned positions")
def beyond_the_table():
    import keras_hub

    x = normal(1, 9, 4)
    there = outcome(keras_hub.layers.PositionEmbedding(8), x)
    here = outcome(tx.LearnedPosition(8), x)
    clear = isinstance(here, ValueError) and "8 positions" in str(here)
    fault = not (
        isinstance(there, ValueError) and "9" in str(there) and "8" in str(there)
    )
    return said(there), fault, f"{said(here)} that names both lengths", clear


def gpt2():
    import keras_hub

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=23,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        max_sequence_length=16,
        dropout=0.0,
    )
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)


def small_decoder():
    return tx.decoder(
        23, 16, 1, 2, position="learned", max_length=16, pad_id=0, init_stddev=0.5
    )


@check(
    "case-65",
    "keras_hub",
    "a prompt behind two tokens of padding: the next token's logits move by",
)
def left_padding():
    tokens, padded = np.array([[5, 7, 11]]), np.array([[0, 0, 5, 7, 11]])
    model = gpt2()

    def last(x):
        inputs = {"token_ids": x, "padding_mask": x != 0}
        return model(inputs)[:, -1]

    there = largest(last(tokens), last(padded))
    ours = small_decoder()
    alone, behind = (
        tx.generate(ours, x, 4, compile=False)[0, -4:].tolist()
        for x in (tokens, padded)
    )
    same = alone == behind
    return f"{there:.2g}", there > 1e-4, "the same text" if same else "other text", same


@check("case-69", "keras_hub", "5 tokens asked for behind 3 given ones, as ids")
def number_of_tokens():
    model = gpt2()
    model.compile(sampler="greedy", run_eagerly=keras.backend.backend() != "jax")
    prompt = np.zeros((1, 12), "int32")
    prompt[0, :3] = 5, 7, 11
    inputs = {"token_ids": prompt, "padding_mask": np.arange(12)[None] < 3}
    found = model.generate(inputs, max_length=8, stop_token_ids=None)
    there = int(np.asarray(found["padding_mask"]).sum()) - 3
    here = tx.generate(small_decoder(), prompt[:, :3], 5, compile=False).shape[1] - 3
    return f"{there}", there != 5, f"{here}", here == 5


@check("case-71", "keras_hub", "temperature 0")
def temperature_zero():
    import keras_hub

    logits = ops.convert_to_tensor(normal(1, 23))
    sampler = keras_hub.samplers.RandomSampler(temperature=0.0)
    theirs = numpy(sampler.compute_probabilities(logits))
    model = small_decoder()
    greedy, cold = (
        tx.generate(model, [5, 7], 4, sampler=sampler, compile=False)
        for sampler in (tx.Greedy(), 0.0)
    )
    there = int(np.isnan(theirs).sum())
    return (
        f"{there} of 23 probabilities are NaN",
        there > 0,
        "greedy" if greedy == cold else "not greedy",
        greedy == cold,
    )


@check("case-71", "keras_hub", "the 99 likeliest of 23 tokens")
def top_k_beyond():
    import keras_hub

    probabilities = ops.softmax(ops.convert_to_tensor(normal(1, 23)))
    there = outcome(
        lambda: keras_hub.samplers.TopKSampler(k=99).get_next_token(probabilities)
    )
    here = outcome(
        tx.generate, small_decoder(), [5], 2, sampler=tx.TopK(99), seed=0, compile=False
    )
    return (
        said(there),
        isinstance(there, Exception) and not isinstance(there, ValueError),
        said(here),
        not isinstance(here, Exception),
    )


@check("case-37", "keras_hub", "an activation that is a lambda, saved and loaded")
def lambdas():
    import keras_hub

    def save_and_load(layer):
        inputs = keras.Input((None, 8))
        model = keras.Model(inputs, layer(inputs))
        with tempfile.TemporaryDirectory() as folder:
            stage = "saving"
            try:
                model.save(f"{folder}/x.keras")
                stage = "loading"
                keras.saving.load_model(f"{folder}/x.keras")
            except Exception as error:
                return stage, error
        return "nothing", None

    theirs = keras_hub.layers.TransformerEncoder(8, 2, activation=lambda x: x)
    stage, there = save_and_load(theirs)
    our_stage, here = save_and_load(tx.FeedForward(8, activation=lambda x: x))
    return (
        f"{said(there)} on {stage}" if there else "loads",
        stage == "loading",
        f"{said(here)} on {our_stage}, before there is a file",
        our_stage == "saving" and "lambda" in str(here),
    )


# ----------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------


def run():
    """Returns the lines of the table, and whether ours is right in all of them."""
    lines = ["| case | situation | peer | there | here |", "|---|---|---|---|---|"]
    good = True
    for case, peer, what, function in CHECKS:
        if importlib.util.find_spec(peer) is None:
            print(f"{peer} is not installed: {what} is left out.", file=sys.stderr)
            continue
        keras.utils.set_random_seed(0)
        there, fault, here, right = function()
        if not fault:
            there += " (mended)"
        if not right:
            here += " (WRONG)"
        good = good and right
        lines.append(f"| {case} | {what} | {peer} | {there} | {here} |")
        print(lines[-1], flush=True)
    return lines, good


def main():
    warnings.filterwarnings("ignore")
    lines, good = run()
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("keras", "keras-hub", keras.backend.backend())
        if importlib.util.find_spec(name.replace("-", "_"))
    ]
    text = [
        "# Faults that are still there elsewhere",
        "",
        f"`python benchmarks/peers.py`, Python {platform.python_version()}, "
        f"{', '.join(versions)}. Where each was reported, and the tests that keep it "
        "away from here: `tests/cases.py`; *new* turned up in writing this package.",
        "",
        *lines,
        "",
    ]
    (HERE / "PEERS.md").write_text("\n".join(text), encoding="utf-8")
    return not good


if __name__ == "__main__":
    sys.exit(main())
