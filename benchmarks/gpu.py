"""What this package does on a GPU, on JAX and torch, in less than four minutes.

    python benchmarks/gpu.py                   # writes benchmarks/GPU.md
    python benchmarks/gpu.py --tiny --backends torch    # does it run, on any machine

Each backend in a process of its own, one after the other, and in each:

- `paths`: every implementation of attention in bfloat16, outputs against NumPy in
  float64 and gradients against written-out scores in float32.
- `fit`: `model.fit` in mixed_bfloat16, saved, and reloaded by a process that sees no
  GPU: its logits may differ by 3 % of their spread.
- `step`: a training step of a decoder of GPT-2's size (12 layers, 768 features, 12
  heads, 50,304 tokens) over 1,024 and 8,192 tokens a row, in tokens a second and as
  share of the rate of a bfloat16 product of matrices that the device was measured
  to reach. Beside it, plain torch modules of the same shape, with
  `scaled_dot_product_attention`, autocast and `torch.compile`.
- `decode`: tokens a second of `generate`, for one text and for sixteen.

What would begin after `--seconds` is left out, and said to be. Times are medians of
steps, the first two, which compile, left out.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BOUND = 0.03  # of the logits' spread, between a GPU and a CPU in bfloat16

FULL = {
    "vocab_size": 50_304,
    "dim": 768,
    "layers": 12,
    "heads": 12,
    "rows": ((16, 1024), (2, 8192)),
    "matrix": 8192,
    "steps": 10,
    "new_tokens": 128,
    "fit_steps": 200,
}
TINY = {
    "vocab_size": 40,
    "dim": 16,
    "layers": 1,
    "heads": 2,
    "rows": ((2, 12),),
    "matrix": 64,
    "steps": 1,
    "new_tokens": 3,
    "fit_steps": 12,
}


def timed(step, number):
    """Returns the median seconds of a step that ends when its work is done."""
    seconds = []
    for _ in range(number + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


# ----------------------------------------------------------------------------
# Measurements, each a function of the sizes
# ----------------------------------------------------------------------------


def rate(sizes):
    """Operations a second of a bfloat16 product of matrices."""
    from keras import ops

    size = sizes["matrix"]
    matrix = ops.cast(ops.ones((size, size)), "bfloat16")

    def products():
        found = matrix
        for _ in range(10):
            found = ops.matmul(found, matrix)
        ops.convert_to_numpy(ops.cast(found[:1, :1], "float32"))

    return {"operations": 10 * 2 * size**3 / timed(products, 5)}


def softmax_of_scores(query, key, value, window, soft_cap, bias):
    """Causal attention in NumPy, all of it written out."""
    import numpy as np

    length, groups = query.shape[1], query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, groups, axis=2) for x in (key, value))
    scores = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = scores + bias
    behind = np.arange(length)[:, None] - np.arange(length)
    seen = (behind >= 0) & (behind < (window or length))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def slope(function, x):
    """Returns the gradient of a scalar function, as NumPy in float32."""
    import keras
    from keras import ops

    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        found = jax.jit(jax.grad(function))(x)
    elif backend == "torch":
        import torch

        x = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(function(x), x)
    else:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            total = function(x)
        found = tape.gradient(total, x)
    return ops.convert_to_numpy(ops.cast(found, "float32"))


def paths(sizes):
    """Largest differences of every implementation, relative to the largest value."""
    import keras
    import numpy as np
    from keras import ops

    if keras.backend.backend() == "jax":
        import jax

        # Or float32 would not be: a GPU rounds to 10 bits by itself.
        jax.config.update("jax_default_matmul_precision", "highest")
    length = 24 if sizes is TINY else 1024
    rng = np.random.default_rng(0)

    def heads(number):
        x = ops.convert_to_tensor(rng.normal(size=(2, length, number, 64)), "float32")
        return ops.cast(x, "bfloat16")

    cases = {
        "causal": (8, {}, None),
        "grouped": (2, {}, None),
        "window": (8, {"window": length // 4}, None),
        "soft cap": (8, {"soft_cap": 2.0}, None),
        "bias": (2, {}, rng.normal(size=(1, 8, length, length)).astype("float32")),
    }
    found = {}
    for name, (key_heads, options, bias) in cases.items():
        inputs = [heads(8), heads(key_heads), heads(key_heads)]
        for implementation, differences in path(inputs, options, bias).items():
            found[f"{implementation}, {name}"] = differences
    if keras.backend.backend() == "jax":
        jax.config.update("jax_default_matmul_precision", None)
    return {"differences": found}


def path(inputs, options, bias):
    """Returns differences of output and gradient, by implementation."""
    import numpy as np
    from keras import ops

    import keras_tx as tx

    plain = not options and bias is None and inputs[0].shape == inputs[1].shape
    expected = softmax_of_scores(
        *(
            ops.convert_to_numpy(ops.cast(x, "float32")).astype("float64")
            for x in inputs
        ),
        options.get("window"),
        options.get("soft_cap"),
        0.0 if bias is None else bias,
    )

    def attend(implementation, dtype, query):
        layer = tx.ScaledAttention(
            causal=True, implementation=implementation, dtype=dtype, **options
        )
        key, value = (ops.cast(x, dtype) for x in inputs[1:])
        output = layer(ops.cast(query, dtype), key=key, value=value, bias=bias)
        return ops.cast(output, "float32")

    def of_query(implementation, dtype):
        return slope(
            lambda query: ops.sum(ops.sin(attend(implementation, dtype, query))),
            ops.cast(inputs[0], dtype),
        )

    exact = of_query("dense", "float32")
    found = {}
    for implementation in ("dense", "blockwise", *(["fused"] if plain else [])):
        output = ops.convert_to_numpy(attend(implementation, "bfloat16", inputs[0]))
        own = of_query(implementation, "bfloat16")
        found[implementation] = [
            float(np.abs(one - other).max() / np.abs(other).max())
            for one, other in ((output, expected), (own, exact))
        ]
    return found


def cycles(sizes, rows, length):
    """Tokens that go round by steps of three: what comes next is certain."""
    import numpy as np

    starts = np.random.default_rng(0).integers(sizes["vocab_size"], size=(rows, 1))
    ids = (starts + 3 * np.arange(length + 1)) % min(sizes["vocab_size"], 64)
    return ids[:, :-1].astype("int32"), ids[:, 1:].astype("int32")


def fit(sizes):
    """Trains in mixed_bfloat16, saves, and reloads without the GPU."""
    import keras
    import numpy as np

    import keras_tx as tx

    keras.utils.set_random_seed(0)
    model = tx.decoder(
        sizes["vocab_size"], sizes["dim"] // 2, 2, 2, dtype="mixed_bfloat16"
    )
    model.compile(keras.optimizers.AdamW(1e-3), tx.ChunkedCrossentropy())
    batch = 4
    x, y = cycles(sizes, batch * sizes["fit_steps"], 12)
    losses = [
        model.fit(x, y, batch_size=batch, shuffle=False, verbose=0).history["loss"][0]
        for _ in range(2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        model.save(pathlib.Path(folder, "model.keras"))
        np.save(pathlib.Path(folder, "logits.npy"), model.predict(x[:4], verbose=0))
        np.save(pathlib.Path(folder, "tokens.npy"), x[:4])
        hidden = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
        found = in_a_process(["--reload", folder], **hidden)
    return {"losses": losses, "finite": bool(np.isfinite(losses).all()), **found[-1]}


def reload(folder):
    """Returns by how much logits differ from saved ones, of their spread."""
    import keras
    import numpy as np

    import keras_tx  # noqa: F401

    model = keras.models.load_model(pathlib.Path(folder, "model.keras"))
    saved = np.load(pathlib.Path(folder, "logits.npy"))
    own = model.predict(np.load(pathlib.Path(folder, "tokens.npy")), verbose=0)
    return {"reloaded differs by": float(np.abs(own - saved).max() / saved.std())}


def gpt2(sizes, length):
    """GPT-2's shape in mixed_bfloat16."""
    import keras_tx as tx

    return tx.decoder(
        sizes["vocab_size"],
        sizes["dim"],
        sizes["layers"],
        sizes["heads"],
        activation="gelu_tanh",
        gated=False,
        use_bias=True,
        norm="layer",
        position="learned",
        max_length=length,
        dtype="mixed_bfloat16",
    )


def operations(sizes, rows, length):
    """Those of a training step's products: forward, and twice that backward."""
    layers, dim = sizes["layers"], sizes["dim"]
    weights = layers * 12 * dim**2 + sizes["vocab_size"] * dim
    # Of the scores only the half that causality leaves, twice: made and mixed.
    return rows * length * (6 * weights + 6 * layers * dim * length)


def step(sizes, rows, length):
    """A training step as `fit` takes it."""
    import keras

    import keras_tx as tx

    model = gpt2(sizes, length)
    model.compile(keras.optimizers.AdamW(1e-4), tx.ChunkedCrossentropy())
    x, y = cycles(sizes, rows, length)
    seconds = timed(lambda: float(model.train_on_batch(x, y)), sizes["steps"])
    return {
        "tokens": rows * length / seconds,
        "operations": operations(sizes, rows, length) / seconds,
    }


def torch_step(sizes, rows, length):
    """The same in plain torch modules."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    dim, heads = sizes["dim"], sizes["heads"]
    device = "cuda" if torch.cuda.is_available() else "cpu"

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = nn.LayerNorm(dim)
            self.query_key_value = nn.Linear(dim, 3 * dim)
            self.merge = nn.Linear(dim, dim)
            self.feed_forward_norm = nn.LayerNorm(dim)
            self.widen = nn.Linear(dim, 4 * dim)
            self.narrow = nn.Linear(4 * dim, dim)

        def forward(self, x):
            query, key, value = (
                part.view(rows, length, heads, dim // heads).transpose(1, 2)
                for part in self.query_key_value(self.attention_norm(x)).split(dim, 2)
            )
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            x = x + self.merge(mixed.transpose(1, 2).reshape(rows, length, dim))
            hidden = F.gelu(self.widen(self.feed_forward_norm(x)), approximate="tanh")
            return x + self.narrow(hidden)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(sizes["vocab_size"], dim)
            self.position = nn.Embedding(length, dim)
            self.blocks = nn.Sequential(*(Block() for _ in range(sizes["layers"])))
            self.final_norm = nn.LayerNorm(dim)

        def forward(self, tokens, labels):
            x = self.blocks(self.embedding(tokens) + self.position.weight)
            logits = self.final_norm(x) @ self.embedding.weight.T
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    model = Decoder().to(device)
    fused = {"fused": True} if device == "cuda" else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **fused)
    run = torch.compile(model) if sizes is FULL else model
    x, y = (
        torch.from_numpy(ids).long().to(device) for ids in cycles(sizes, rows, length)
    )

    def take():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = run(x, y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        loss.item()

    seconds = timed(take, sizes["steps"])
    return {
        "tokens": rows * length / seconds,
        "operations": operations(sizes, rows, length) / seconds,
    }


def decode(sizes, rows):
    """Tokens a second of `generate`, all rows together."""
    import keras_tx as tx

    length = 32 if sizes is TINY else 1024
    model, new = gpt2(sizes, length), sizes["new_tokens"]
    prompt, _ = cycles(sizes, rows, length // 4)
    seconds = timed(
        lambda: tx.generate(model, prompt, max_new_tokens=new, check=False), 1
    )
    return {"tokens": rows * new / seconds}


# ----------------------------------------------------------------------------
# Processes and the page
# ----------------------------------------------------------------------------


def plan(sizes, backend):
    """Returns what to measure on a backend: name, function and arguments."""
    found = [("rate", rate, ()), ("paths", paths, ()), ("fit", fit, ())]
    for rows, length in sizes["rows"]:
        what = f"{rows} x {length} tokens"
        found.append((f"step, {what}", step, (rows, length)))
        if backend == "torch":
            found.append((f"plain torch, {what}", torch_step, (rows, length)))
    return found + [(f"decode, {rows} rows", decode, (rows,)) for rows in (1, 16)]


def measure(sizes, deadline):
    """Prints a line of JSON for each measurement on this backend."""
    import keras

    for name, function, arguments in plan(sizes, keras.backend.backend()):
        start = time.time()
        if start > deadline:
            found = {"left out": "no time was left"}
        else:
            try:
                found = function(sizes, *arguments)
            except Exception as error:  # the others are worth having
                found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        found["name"], found["took"] = name, round(time.time() - start, 1)
        print(json.dumps(found), flush=True)


def in_a_process(arguments, timeout=None, **environment):
    """Returns the lines of JSON that this file prints, and how it ended if badly."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            env={**os.environ, **environment},
            capture_output=True,
            timeout=timeout,
        )
        printed, code, said = done.stdout, done.returncode, done.stderr[-500:].decode()
    except subprocess.TimeoutExpired as error:
        printed, code, said = error.stdout or b"", 1, "it took too long"
    lines = [line for line in printed.decode().splitlines() if line.startswith("{")]
    found = [json.loads(line) for line in lines]
    return [*found, {"name": "process", "failed": said}] if code else found


def cells(found, best):
    """Returns a measurement in words."""
    for word in ("failed", "left out"):
        if word in found:
            return f"{word}: {found[word]}"
    if found["name"] == "rate":
        return f"{found['operations'] / 1e12:.3g} TFLOP/s"
    if found["name"] == "paths":
        return "; ".join(
            f"{name}: {output:.1e}, gradient {slope:.1e}"
            for name, (output, slope) in found["differences"].items()
        )
    if found["name"] == "fit":
        losses = " to ".join(f"{loss:.3f}" for loss in found["losses"])
        differs = found["reloaded differs by"]
        verdict = "within" if differs <= BOUND else "BEYOND"
        return f"losses {losses}; reloaded on a CPU {differs:.1e}, {verdict} {BOUND}"
    text = f"{found['tokens']:,.0f} tokens/s"
    if "operations" in found and best:
        text += f", {found['operations'] / best:.0%} of the matrix rate"
    return text


def device():
    try:
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def versions(backends):
    from importlib import metadata

    names = dict.fromkeys(["keras", *backends, "numpy"])
    found = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {found}, {device() or 'no GPU'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, to see it run")
    parser.add_argument("--backends", nargs="+", default=["jax", "torch"])
    parser.add_argument("--seconds", type=float, default=220, help="of all together")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "GPU.md")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--reload", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = TINY if options.tiny else FULL
    if options.reload:
        print(json.dumps(reload(options.reload)))
        return
    if options.deadline:
        measure(sizes, options.deadline)
        return
    start, rows = time.time(), []
    for index, backend in enumerate(options.backends):
        # Each has its share, and what those before it left.
        share = options.seconds * (index + 1) / len(options.backends)
        arguments = ["--deadline", str(start + share)]
        arguments += ["--tiny"] if options.tiny else []
        left = start + share + 10 - time.time()
        lines = in_a_process(arguments, timeout=left, KERAS_BACKEND=backend)
        best = next((x.get("operations") for x in lines if x["name"] == "rate"), None)
        for found in lines:
            took = found.get("took", "")
            rows.append(
                f"| {backend} | {found['name']} | {cells(found, best)} | {took} |"
            )
            print(rows[-1], flush=True)
    text = [
        "# On a GPU",
        "",
        f"`python benchmarks/gpu.py{' --tiny' if options.tiny else ''}`, "
        f"{versions(options.backends)}. What is measured and how stands in that file; "
        "differences of `paths` are relative to the largest value.",
        "",
        "| backend | | | seconds |",
        "|---|---|---|---|",
        *rows,
        "",
    ]
    options.out.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    main()
