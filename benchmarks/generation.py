"""How fast text comes, against the generators that there are, in one table.

    python benchmarks/generation.py                  # all that is installed
    python benchmarks/generation.py --quick          # the small model only
    KERAS_BACKEND=jax python benchmarks/generation.py --out FILE
    python benchmarks/generation.py --memory         # what calls leave behind

Each contestant runs in a process of its own, one after another, on weights of
the same shapes: greedy, prompt 16, to the full length, no stop token. "first" is
the first call, compilation included; "next" is the median of the calls behind it, of
six seconds for each: a process gets faster for a second or two, which three short
calls would not outlast.
Of several `--rounds` it tells the median, and of ratios, which compare what ran in
the same round, the lowest and highest too. Ratios above 1 mean that keras_tx is
faster. `bound` is the share of the least possible time: reading each weight once
per step at the bandwidth of a matrix-vector product, measured here. The two models
agree in their sizes, not in their values: speed does not depend on them.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time

PROMPT = 16
CASES = {
    # name: layers, dim, heads, vocabulary, length, batch
    "small, batch 1": (4, 256, 4, 1024, 512, 1),
    "small, batch 16": (4, 256, 4, 1024, 512, 16),
    "GPT-2, batch 1": (12, 768, 12, 50257, 256, 1),
}
SECONDS, CALLS = 6, 3  # behind the first call: at least so long, and so many


def prompts(batch, vocab_size):
    import numpy as np

    return np.random.default_rng(0).integers(1, vocab_size, (batch, PROMPT), "int32")


def gpt2(layers, dim, heads, vocab_size, length):
    """GPT-2's shape in keras_tx."""
    import keras_tx as tx

    return tx.decoder(
        vocab_size,
        dim,
        layers,
        heads,
        gated=False,
        activation="gelu",
        use_bias=True,
        norm="layer",
        position="learned",
        max_length=length,
    )


def ours(layers, dim, heads, vocab_size, length, batch):
    """GPT-2 in keras_tx."""
    import keras_tx as tx

    model = gpt2(layers, dim, heads, vocab_size, length)
    tokens = prompts(batch, vocab_size)
    return lambda: tx.generate(model, tokens, length - PROMPT)


def keras_hub(layers, dim, heads, vocab_size, length, batch):
    """GPT-2 in KerasHub, compiled."""
    import keras_hub
    import numpy as np

    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=vocab_size,
        num_layers=layers,
        num_heads=heads,
        hidden_dim=dim,
        intermediate_dim=4 * dim,
        max_sequence_length=length,
        dropout=0.0,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)
    model.compile(sampler="greedy", jit_compile=True)
    tokens = np.zeros((batch, length), "int32")
    tokens[:, :PROMPT] = prompts(batch, vocab_size)
    inputs = {
        "token_ids": tokens,
        "padding_mask": (np.arange(length) < PROMPT)[None].repeat(batch, 0),
    }
    return lambda: model.generate(inputs, stop_token_ids=None)


def hugging_face(layers, dim, heads, vocab_size, length, batch):
    """GPT-2 in transformers, on torch."""
    import torch
    import transformers

    config = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=length,
        n_embd=dim,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.tensor(prompts(batch, vocab_size), dtype=torch.int64)

    def run():
        with torch.no_grad():
            return model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=length - PROMPT,
                min_new_tokens=length - PROMPT,
                do_sample=False,
                pad_token_id=0,
            )

    return run


def bandwidth(layers, dim, heads, vocab_size, length, batch):
    """Seconds to read all weights once per step, as matrix-vector products."""
    import numpy as np

    rows = 12 * layers * dim + vocab_size
    matrix = np.ones((rows, dim), "float32")
    vector = np.ones(dim, "float32")
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        matrix @ vector
        best = min(best, time.perf_counter() - start)
    return best * (length - PROMPT)


CONTESTANTS = {"keras_tx": ours, "KerasHub": keras_hub, "Hugging Face": hugging_face}


def measure(contestant, case):
    """Runs in a process of its own; prints seconds of the first and of later calls."""
    sizes = CASES[case]
    if contestant == "bound":
        print(json.dumps({"next": bandwidth(*sizes)}))
        return
    run = CONTESTANTS[contestant](*sizes)
    start = time.perf_counter()
    run()
    first = time.perf_counter() - start
    taken = []
    while len(taken) < CALLS or sum(taken) < SECONDS:
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    print(json.dumps({"first": first, "next": statistics.median(taken)}))


# ----------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------


def held():
    """Megabytes that this process has in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak_of(run):
    """Calls a function; returns the most that was held meanwhile."""
    done, most = threading.Event(), [held()]

    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        done.set()
        watcher.join()
    return most[0]


def memory_of_weights():
    """What a model and two calls hold, at GPT-2's size."""
    import keras_tx as tx

    layers, dim, heads, vocab_size, *_ = CASES["GPT-2, batch 1"]
    # What the backend needs for itself: a model of the same layers, but narrow.
    ours(layers, 4 * heads, heads, 64, 64, 1)()
    before = held()
    model = gpt2(layers, dim, heads, vocab_size, 64)
    weights = 4 * model.count_params() / 1e6
    gc.collect()
    built = held()

    def run():
        tx.generate(model, prompts(1, vocab_size), 48)

    first = peak_of(run)
    gc.collect()
    after = held()
    second = peak_of(run)
    print(f"weights {weights:.0f} MB; this process, in multiples of them:")
    rows = {
        "built": built - before,
        "most in the first call, which compiles": first - before,
        "behind it": after - before,
        "most in the second call": second - before,
    }
    for name, megabytes in rows.items():
        print(f"  {name:40}{megabytes / weights:6.2f}", flush=True)


def memory_of_calls(calls=500):
    """What a process holds behind many calls that differ."""
    import numpy as np

    import keras_tx as tx

    model = tx.decoder(64, 64, 2, 4)
    rng = np.random.default_rng(0)
    marks = {}
    for call in range(1, calls + 1):
        prompt = rng.integers(0, 64, rng.integers(1, 60)).tolist()
        tx.generate(
            model,
            prompt,
            int(rng.integers(1, 40)),
            sampler=float(rng.uniform(0.5, 1.5)),
            stop_tokens=int(rng.integers(64)),
        )
        if call % (calls // 5) == 0:
            gc.collect()
            marks[call] = held()
    line = ", ".join(f"{size:.1f} MB after {call}" for call, size in marks.items())
    print(f"calls of a small model: {line}")


def in_its_own_process(contestant, case):
    command = [sys.executable, __file__, "--measure", contestant, "--case", case]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"  {contestant}: not measured: {done.stderr.strip()[-300:]}")
        return None
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the small model only")
    parser.add_argument("--case", choices=CASES, help="one case only")
    parser.add_argument(
        "--rounds", type=int, default=1, help="of all contestants, one after another"
    )
    parser.add_argument("--memory", action="store_true", help="memory, not time")
    parser.add_argument("--out", help="a file that gets the table too")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.case)
        return
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    lines = []

    def say(line):
        print(line, flush=True)
        lines.append(line)
        if options.out:
            page = ["# How fast text comes", "", "As `benchmarks/generation.py` says."]
            page += ["", "```", *lines, "```", ""]
            with open(options.out, "w", encoding="utf-8") as file:
                file.write("\n".join(page))

    if options.memory:
        print(f"backend {backend}")
        memory_of_calls()
        memory_of_weights()
        return
    say(f"backend {backend}, {os.cpu_count()} CPU cores, greedy, prompt {PROMPT}")
    say(f"{'':18}{'':14}{'first s':>9}{'next s':>9}{'tokens/s':>10}   ratio")
    for case, (*_, length, batch) in CASES.items():
        if (options.quick and "GPT-2" in case) or (options.case or case) != case:
            continue
        names = [*CONTESTANTS, *(["bound"] if batch == 1 else [])]
        rounds = [
            {name: in_its_own_process(name, case) for name in names}
            for _ in range(options.rounds)
        ]
        for name in names:
            done = [found for found in rounds if found[name] and found["keras_tx"]]
            if done:
                say(f"{case:18}{name:14}{row(name, done, batch * (length - PROMPT))}")


def row(name, rounds, tokens):
    """Returns what the table says of a contestant, over rounds that have it."""
    ratios = sorted(found[name]["next"] / found["keras_tx"]["next"] for found in rounds)
    ratio = f"{statistics.median(ratios):8.2f}"
    if len(ratios) > 1:
        ratio += f" ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    following = statistics.median(found[name]["next"] for found in rounds)
    if name == "bound":
        return f"{'':9}{following:9.3f}{'':10}{ratio}"
    first = statistics.median(found[name]["first"] for found in rounds)
    return f"{first:9.2f}{following:9.3f}{tokens / following:10.0f}{ratio}"


if __name__ == "__main__":
    main()
