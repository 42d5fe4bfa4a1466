"""How long a training step takes, against a plain torch loop, in one table.

    python benchmarks/train_step.py              # writes benchmarks/TRAIN_STEP.md
    KERAS_BACKEND=jax python benchmarks/train_step.py --rounds 3

The model is nanoGPT's CPU preset, as `examples/train_char_lm.py` has it: 4 layers,
4 heads, 128 features, windows of 64, batches of 12. `fit` is `model.fit` with the
example's own model, optimizer, batches, progress bar and settings, among them that
the C library keeps memory which a step frees; the torch loop runs without and with
it. The torch loop is the same model in plain torch modules, its attention
`scaled_dot_product_attention`, its projections of queries, keys and values one
matrix, with AdamW and clipping. Both draw a fresh batch in each step.

Each contestant runs in a process of its own, one after another, round after round,
for the speed of a machine drifts. A process's time is the median of its steps, the
first ones, which compile, left out. A ratio is torch's time over the contestant's
in the same round: above 1 means faster than torch. CPU time, summed over threads,
says how much work a step is where other programs take turns on the cores; `--threads
1` makes it comparable, for threads that wait for each other count as busy.
"""

import argparse
import itertools
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
WARM_UP = 20
WINDOW, BATCH, DIM, HEADS, LAYERS = 64, 12, 128, 4, 4


def text_as_ids():
    """Returns the text of the example as integers, and the number of characters."""
    from pydoc_data.topics import topics

    import numpy as np

    text = "\n".join(topics[name] for name in sorted(topics))
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    return np.array([number[c] for c in text], dtype="int32"), len(characters)


def now():
    """Returns seconds of wall and of CPU."""
    return time.perf_counter(), time.process_time()


# ----------------------------------------------------------------------------
# The contestants: each returns the clock, wall and CPU, after every step
# ----------------------------------------------------------------------------


def torch_loop(steps):
    """nanoGPT in plain torch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention_norm = nn.LayerNorm(DIM)
            self.query_key_value = nn.Linear(DIM, 3 * DIM)
            self.merge = nn.Linear(DIM, DIM)
            self.feed_forward_norm = nn.LayerNorm(DIM)
            self.widen = nn.Linear(DIM, 4 * DIM)
            self.narrow = nn.Linear(4 * DIM, DIM)

        def forward(self, x):
            batch, length, _ = x.shape
            query, key, value = (
                heads.view(batch, length, HEADS, DIM // HEADS).transpose(1, 2)
                for heads in self.query_key_value(self.attention_norm(x)).split(DIM, 2)
            )
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
            mixed = mixed.transpose(1, 2).contiguous().view(batch, length, DIM)
            x = x + self.merge(mixed)
            hidden = F.gelu(self.widen(self.feed_forward_norm(x)), approximate="tanh")
            return x + self.narrow(hidden)

    class Decoder(nn.Module):
        def __init__(self, vocab_size):
            super().__init__()
            self.embedding = nn.Embedding(vocab_size, DIM)
            self.position = nn.Embedding(WINDOW, DIM)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.final_norm = nn.LayerNorm(DIM)
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens):
            x = self.embedding(tokens) + self.position.weight
            for block in self.blocks:
                x = block(x)
            return self.final_norm(x) @ self.embedding.weight.T

    ids, vocab_size = text_as_ids()
    ids = torch.from_numpy(ids.astype("int64"))
    model = Decoder(vocab_size)
    print(sum(p.numel() for p in model.parameters()), "parameters")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.99),
    )
    clock = [now()]
    for _ in range(WARM_UP + steps):
        starts = torch.randint(len(ids) - WINDOW, (BATCH,))
        rows = torch.stack([ids[start : start + WINDOW + 1] for start in starts])
        logits = model(rows[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, vocab_size), rows[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        clock.append(now())
    return clock


def fit(steps, **compiled):
    """`model.fit` as the example calls it."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import keras
    import train_char_lm as example

    clock = []
    note = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: clock.append(now()),
        on_train_batch_end=lambda batch, logs: clock.append(now()),
    )

    example.keep_freed_memory()
    options = example.parse(["--preset", "nanogpt"])
    ids, vocab_size = text_as_ids()
    model = example.build(options, vocab_size)
    print(model.count_params(), "parameters")
    example.compile_for_training(model, options)
    if compiled:
        model.compile(model.optimizer, model.loss, **compiled)
    model.fit(
        example.random_windows(ids, WINDOW, BATCH, seed=0),
        steps_per_epoch=WARM_UP + steps,
        shuffle=False,
        callbacks=[note],
    )
    return clock


def torch_loop_that_keeps_memory(steps):
    """The torch loop with the example's setting of the C library."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import train_char_lm as example

    example.keep_freed_memory()
    return torch_loop(steps)


CONTESTANTS = {
    "torch loop": torch_loop,
    "torch loop, freed memory kept": torch_loop_that_keeps_memory,
    "fit": fit,
    "fit, jit_compile='auto'": lambda steps: fit(steps, jit_compile="auto"),
}


# ----------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------


def in_its_own_process(contestant, steps, threads):
    """Returns the median milliseconds of a step, wall and CPU."""
    command = [sys.executable, __file__, "--measure", contestant, "--steps", str(steps)]
    names = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
    limits = dict.fromkeys(names, str(threads)) if threads else {}
    done = subprocess.run(
        command, env={**os.environ, **limits}, capture_output=True, text=True
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("[[")]
    if done.returncode or not lines:
        sys.exit(f"{contestant} failed: {done.stderr.strip()[-500:]}")
    clock = json.loads(lines[-1])[WARM_UP:]
    wall = statistics.median(b[0] - a[0] for a, b in itertools.pairwise(clock))
    # CPU clocks may tick coarsely, so the mean.
    cpu = (clock[-1][1] - clock[0][1]) / (len(clock) - 1)
    return 1000 * wall, 1000 * cpu


def spread(values, digits):
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def versions():
    from importlib import metadata

    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    names = dict.fromkeys(["keras", backend, "torch", "numpy"])
    found = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    return f"Python {platform.python_version()}, {found}, {os.cpu_count()} CPU cores"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="processes of each")
    parser.add_argument("--steps", type=int, default=200, help="steps of a process")
    parser.add_argument("--threads", type=int, help="threads of each (default: all)")
    parser.add_argument("--out", default=HERE / "TRAIN_STEP.md", help="the table")
    parser.add_argument("--measure", choices=CONTESTANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(CONTESTANTS[options.measure](options.steps)))
        return
    found = {name: [] for name in CONTESTANTS}
    for index in range(options.rounds):
        for name in CONTESTANTS:
            times = in_its_own_process(name, options.steps, options.threads)
            found[name].append(times)
            print(
                f"round {index}: {name:30} {times[0]:7.1f} ms, CPU {times[1]:7.1f} ms",
                flush=True,
            )
    table = [
        "| | ms a step | times torch's speed | CPU ms a step | torch's over it |",
        "|---|---|---|---|---|",
    ]
    for name, times in found.items():
        cells = [name]
        for which in (0, 1):
            torch = [pair[which] for pair in found["torch loop"]]
            own = [pair[which] for pair in times]
            ratios = [a / b for a, b in zip(torch, own, strict=True)]
            cells += [spread(own, 1), spread(ratios, 2)]
        table.append(f"| {' | '.join(cells)} |")
    text = "\n".join(
        [
            "# A training step",
            "",
            f"`python benchmarks/train_step.py`, {versions()}, "
            f"{options.threads or 'all'} threads; {options.rounds} rounds of "
            f"{options.steps} steps: median (lowest to highest). What is measured "
            "and how stands in that file.",
            "",
            *table,
            "",
        ]
    )
    print(text)
    pathlib.Path(options.out).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
