"""What attention costs, in time and memory, against its peers, in one table.

    python benchmarks/attention.py                     # writes benchmarks/RESULTS.md
    python benchmarks/attention.py --only step window  # some of its tables
    KERAS_BACKEND=torch python benchmarks/attention.py --only layer

Tables (sizes are batch, length, features, layers, heads, vocabulary):

- `short`: a training step of a decoder, at 16 texts of 256 tokens, against a stack of
  KerasHub's `TransformerDecoder`.
- `step`: the same at one text of 4,096 and of 8,192 tokens.
- `long`: 16,384 tokens, which a stack of KerasHub's can't hold here, with blocks
  kept and made again (`remat`).
- `loss`: a training step of an embedding and a head of 256 features and 50,257
  tokens over a text of 4,096, with `ChunkedCrossentropy` and Keras' own loss.
- `window`: a window of 256 at 8,192 and 16,384 tokens.
- `layer`: attention alone, forward and backward, against a layer that calls
  `keras.ops.dot_product_attention`, at 256, 1,024 and 4,096 tokens.

Each measurement runs in a process of its own, one after another, round after round,
because the speed of a machine drifts. Time is the median of the steps of a process,
the first two left out; memory is by how much the peak of the process exceeds what it
held when the model was built. A ratio compares what ran in the same round. In
`loss` and `short` XLA is tried on and off for both sides, and each
is taken at its faster one; longer texts run without, as Keras chooses by itself on a
CPU.
"""

import argparse
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# ----------------------------------------------------------------------------
# The contestants, each in its own process
# ----------------------------------------------------------------------------


def resident():
    """Returns the bytes that this process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measured(step, steps):
    """Returns median seconds of `step` and by how much memory grew."""
    before = resident()
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {"seconds": statistics.median(seconds[2:]), "bytes": peak() - before}


def keras_tx_decoder(sizes, **options):
    import keras

    import keras_tx as tx

    _, length, dim, layers, heads, vocab_size = sizes
    window = options.pop("window", None)
    implementation = options.pop("implementation", "auto")
    remat = options.pop("remat", False)

    def block():
        attention = tx.MultiHead(
            heads,
            causal=True,
            attention=tx.ScaledAttention(window=window, implementation=implementation),
        )
        return tx.TransformerBlock(
            attention,
            tx.FeedForward(4 * dim, activation="gelu_tanh"),
            causal=True,
            remat=remat,
        )

    tokens = keras.Input((length,), dtype="int32")
    embedding = tx.TokenEmbedding(vocab_size, dim)
    x = embedding(tokens)
    x = tx.LearnedPosition(length)(x)
    for _ in range(layers):
        x = block()(x)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(vocab_size)(x))


def keras_hub_decoder(sizes):
    import keras
    import keras_hub

    _, length, dim, layers, heads, vocab_size = sizes
    tokens = keras.Input((length,), dtype="int32")
    x = keras_hub.layers.TokenAndPositionEmbedding(vocab_size, length, dim)(tokens)
    for _ in range(layers):
        x = keras_hub.layers.TransformerDecoder(
            4 * dim, heads, activation=gelu_tanh, normalize_first=True
        )(x)
    x = keras.layers.LayerNormalization()(x)
    return keras.Model(tokens, keras.layers.Dense(vocab_size)(x))


def gelu_tanh(x):
    import keras

    return keras.activations.gelu(x, approximate=True)


def train(model, sizes, steps, jit):
    """A step as `fit` takes it."""
    import keras
    import numpy as np

    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit,
    )
    rng = np.random.default_rng(0)
    ids = rng.integers(sizes[-1], size=sizes[:2]).astype("int32")
    return measured(lambda: model.train_on_batch(ids, ids), steps)


def step(who, sizes, jit, steps=5, **options):
    build = keras_tx_decoder if who == "keras_tx" else keras_hub_decoder
    return train(build(sizes, **options), sizes, steps, jit)


def layer(who, length):
    """Attention over 4 heads of 64 features, forward and backward."""
    import keras
    import numpy as np
    from keras import ops

    import keras_tx as tx

    rng = np.random.default_rng(0)
    heads = [
        ops.convert_to_tensor(rng.normal(size=(1, length, 4, 64)).astype("float32"))
        for _ in range(3)
    ]

    class Peer(keras.layers.Layer):
        """A layer too, for outside compiled code the call of one takes its time."""

        def call(self, query, key=None, value=None):
            return ops.dot_product_attention(query, key, value, is_causal=True)

    attention = tx.ScaledAttention(causal=True) if who == "keras_tx" else Peer()

    def function(query, key, value):
        return attention(query, key=key, value=value)

    backend = keras.backend.backend()
    if backend == "torch":
        for x in heads:
            x.requires_grad_(True)

        def run():
            function(*heads).sum().backward()

    elif backend == "jax":
        import jax

        both = jax.jit(
            jax.grad(lambda *heads: function(*heads).sum(), argnums=(0, 1, 2))
        )

        def run():
            jax.block_until_ready(both(*heads))

    else:
        import tensorflow as tf

        @tf.function
        def both(*heads):
            with tf.GradientTape() as tape:
                tape.watch(heads)
                total = tf.reduce_sum(function(*heads))
            return tape.gradient(total, heads)

        def run():
            both(*heads)

    return measured(run, 100 if length < 4096 else 10)


def loss(who, jit, sizes=(1, 4096), dim=256, vocab_size=50_257, steps=3):
    """A head, and the loss of what it gives."""
    import keras
    import numpy as np

    import keras_tx as tx

    tokens = keras.Input((sizes[1],), dtype="int32")
    embedding = tx.TokenEmbedding(vocab_size, dim)
    model = tx.LanguageModel(tokens, embedding(embedding(tokens), reverse=True))
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chosen = plain if who == "keras" else tx.ChunkedCrossentropy()
    model.compile("sgd", chosen, jit_compile=jit)
    ids = np.random.default_rng(0).integers(vocab_size, size=sizes).astype("int32")
    return measured(lambda: model.train_on_batch(ids, ids), steps)


def matrix_rate():
    """Returns the floating point operations a second of a product of matrices."""
    import numpy as np
    from keras import ops

    a = ops.convert_to_tensor(np.ones((2048, 2048), "float32"))
    taken = measured(lambda: ops.convert_to_numpy(ops.matmul(a, a)), 8)
    return {"seconds": 2 * 2048**3 / taken["seconds"], "bytes": 0}


FUNCTIONS = {"step": step, "layer": layer, "loss": loss, "matrix_rate": matrix_rate}

# ----------------------------------------------------------------------------
# The tables
# ----------------------------------------------------------------------------


def in_its_own_process(name, *arguments, **options):
    command = [sys.executable, __file__, "--measure"]
    command.append(json.dumps([name, arguments, options]))
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"sec')]
    if done.returncode or not lines:
        sys.exit(f"{command[-1]} failed: {done.stderr.strip()[-500:]}")
    print(command[-1], lines[-1], flush=True)
    return json.loads(lines[-1])


def spread(values, digits=2):
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(name, ours, theirs=None):
    """Returns a row of seconds, GB and, where there is a peer, ratios."""
    seconds, sizes = ([r[k] for r in ours] for k in ("seconds", "bytes"))
    cells = [name, spread(seconds, 3), spread([b / 1e9 for b in sizes])]
    if theirs is None:
        return f"| {' | '.join([*cells, '', '', '', ''])} |"
    cells += [
        spread([r["seconds"] for r in theirs], 3),
        spread([r["bytes"] / 1e9 for r in theirs]),
    ]
    pairs = list(zip(ours, theirs, strict=True))
    cells.append(spread([b["seconds"] / a["seconds"] for a, b in pairs]))
    cells.append(spread([a["bytes"] / max(b["bytes"], 1) for a, b in pairs]))
    return f"| {' | '.join(cells)} |"


HEADER = [
    "| | seconds | GB | peer's seconds | peer's GB | times its speed | of its memory |",
    "|---|---|---|---|---|---|---|",
]


def faster(*candidates):
    """Of results with different settings, those of the faster setting."""
    return min(
        candidates, key=lambda found: statistics.median(r["seconds"] for r in found)
    )


def step_row(rounds, sizes, jits, steps):
    found = {}
    for _ in range(rounds):
        for jit in jits:
            for who in ("keras_tx", "keras_hub"):
                found.setdefault((who, jit), []).append(
                    in_its_own_process("step", who, sizes, jit, steps)
                )
    ours, theirs = (
        faster(*(found[who, jit] for jit in jits)) for who in ("keras_tx", "keras_hub")
    )
    return row(",".join(map(str, sizes)), ours, theirs)


def short_table(rounds):
    return [
        "## A training step of short texts, against KerasHub's `TransformerDecoder`",
        "",
        *HEADER,
        step_row(rounds, (16, 256, 256, 4, 4, 128), (False, True), 12),
    ]


def step_table(rounds):
    return [
        "## A training step of a long text, against KerasHub's `TransformerDecoder`",
        "",
        *HEADER,
        step_row(rounds, (1, 4096, 256, 4, 4, 128), (False,), 5),
        step_row(rounds, (1, 8192, 256, 4, 4, 128), (False,), 3),
    ]


def long_table(rounds):
    sizes = (1, 16384, 256, 4, 4, 128)
    found = {"": [], ", remat": []}
    for _ in range(rounds):
        for name, results in found.items():
            remat = {"remat": True} if name else {}
            results.append(
                in_its_own_process("step", "keras_tx", sizes, False, steps=2, **remat)
            )
    name = ",".join(map(str, sizes))
    lines = [row(name + which, results) for which, results in found.items()]
    return ["## 16,384 tokens", "", *HEADER, *lines]


def loss_table(rounds):
    # JAX compiles always, torch never.
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    jits = (False, True) if backend == "tensorflow" else ("auto",)
    found = {}
    for _ in range(rounds):
        for who in ("keras_tx", "keras"):
            for jit in jits:
                found.setdefault((who, jit), []).append(
                    in_its_own_process("loss", who, jit)
                )
    ours, theirs = (
        faster(*(found[who, jit] for jit in jits)) for who in ("keras_tx", "keras")
    )
    return [
        "## The loss of a large vocabulary, against "
        "`keras.losses.SparseCategoricalCrossentropy`",
        "",
        *HEADER,
        row("4,096 x 50,257 logits", ours, theirs),
    ]


def window_table(rounds):
    found = {}
    for _ in range(rounds):
        for length in (8192, 16384):
            sizes = (1, length, 256, 4, 4, 128)
            found.setdefault(length, []).append(
                in_its_own_process("step", "keras_tx", sizes, False, window=256)
            )
    ratios = [
        b["seconds"] / a["seconds"]
        for a, b in zip(found[8192], found[16384], strict=True)
    ]
    return [
        "## A window of 256",
        "",
        *HEADER,
        *(row(f"1,{length},256,4,4,128", results) for length, results in found.items()),
        "",
        f"Twice the length takes {spread(ratios)} times as long.",
    ]


def layer_table(rounds):
    lines = []
    for length in (256, 1024, 4096):
        found = {}
        for _ in range(rounds):
            for who in ("keras_tx", "keras"):
                found.setdefault(who, []).append(
                    in_its_own_process("layer", who, length)
                )
        lines.append(row(f"{length} tokens", found["keras_tx"], found["keras"]))
    return [
        "## Attention alone, against a layer of `keras.ops.dot_product_attention`",
        "",
        *HEADER,
        *lines,
    ]


TABLES = {
    "short": short_table,
    "step": step_table,
    "long": long_table,
    "window": window_table,
    "layer": layer_table,
    "loss": loss_table,
}


def versions():
    from importlib import metadata

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    names = dict.fromkeys(["keras", "keras-hub", backend, "numpy"])
    found = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {found}, {os.cpu_count()} CPU cores"


def put(page, section):
    """Returns the page with a section in place of the one of the same title."""
    title, *lines = section
    kept = {
        rest.partition("\n")[0]: rest.partition("\n")[2].strip()
        for rest in page.split("\n## ")[1:]
    }
    kept[title.removeprefix("## ")] = "\n".join(lines).strip()
    intro = (
        "# What attention costs\n\nWritten by `python benchmarks/attention.py`, table "
        "by table; median (lowest to highest) of the rounds. What is measured and how "
        "stands in that file."
    )
    return (
        "\n\n".join([intro, *(f"## {t}\n\n{body}" for t, body in kept.items())]) + "\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="processes of each")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--out", type=pathlib.Path, help="default: by backend")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, arguments, keywords = json.loads(options.measure)
        print(json.dumps(FUNCTIONS[name](*arguments, **keywords)))
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    default = "RESULTS.md" if backend == "tensorflow" else f"RESULTS_{backend}.md"
    path = options.out or HERE / default
    for name in options.only:
        rate = in_its_own_process("matrix_rate")["seconds"]
        title, *lines = TABLES[name](options.rounds)
        conditions = (
            f"`--only {name} --rounds {options.rounds}`: {versions()}, "
            f"{rate / 1e9:.0f} GFLOP/s in a product of 2,048 x 2,048 matrices."
        )
        # Behind each table: what was measured stays, whatever comes.
        page = path.read_text(encoding="utf-8") if path.exists() else ""
        page = put(page, [title, "", conditions, *lines])
        path.write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
