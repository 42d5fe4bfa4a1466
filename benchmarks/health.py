"""What `AttentionHealth` costs: writes its share of training into benchmarks/HEALTH.md.

    python benchmarks/health.py
    KERAS_BACKEND=jax python benchmarks/health.py --steps 500

Trains the default model of `examples/train_char_lm.py` on its text with the callback
at its default frequency, after every epoch, and times what lies inside the callback
and what lies outside. The first epoch, which compiles, is left out. A look costs the
same however long an epoch is, so that the last column says from how many steps an
epoch on the share stays under 5 %.
"""

import argparse
import importlib.util
import os
import pathlib
import platform
import statistics
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx as tx

HERE = pathlib.Path(__file__).resolve().parent


def example():
    path = HERE.parent / "examples" / "train_char_lm.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Timed(tx.AttentionHealth):
    """Notes how long each look took."""

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.seconds = []

    def on_epoch_end(self, epoch, logs=None):
        start = time.perf_counter()
        super().on_epoch_end(epoch, logs)
        self.seconds.append(time.perf_counter() - start)


class Ends(keras.callbacks.Callback):
    """Notes when epochs begin and their last steps end; stands before others."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self.start)


def measure(steps, epochs, rows):
    """Returns seconds of the epochs' steps, and of the looks behind them."""
    script = example()
    options = script.parse(["--steps", str(steps * epochs)])
    script.keep_freed_memory()
    text, _ = script.read_text(None)
    number = {character: i for i, character in enumerate(sorted(set(text)))}
    ids = np.array([number[character] for character in text], "int32")
    keras.utils.set_random_seed(0)
    model = script.build(options, len(number))
    script.compile_for_training(model, options)
    sample = script.windows(ids, np.arange(rows) * 1000, options.window)
    ends, health = Ends(), Timed(sample)
    model.fit(
        script.random_windows(ids, options.window, options.batch, 0),
        steps_per_epoch=steps,
        epochs=epochs,
        callbacks=[ends, health],
        verbose=0,
    )
    return ends.seconds[1:], health.seconds[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000, help="steps of an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4, help="rows of the sample")
    parser.add_argument("--out", type=pathlib.Path, help="default: HEALTH.md here")
    options = parser.parse_args()
    trained, looked = measure(options.steps, options.epochs, options.rows)
    step = statistics.median(trained) / options.steps
    look = statistics.median(looked)
    page = "\n".join(
        [
            "# What `AttentionHealth` costs",
            "",
            f"`python benchmarks/health.py --steps {options.steps} --rows "
            f"{options.rows}`, {keras.backend.backend()}, Keras {keras.__version__}, "
            f"Python {platform.python_version()}, {os.cpu_count()} CPU cores.",
            "",
            "| a step | a look (lowest to highest) | share of an epoch of "
            f"{options.steps:,} steps | under 5 % from |",
            "|---|---|---|---|",
            f"| {1e3 * step:.1f} ms | {1e3 * look:.0f} ms ({1e3 * min(looked):.0f} to "
            f"{1e3 * max(looked):.0f}) | {look / (look + step * options.steps):.1%} | "
            f"{19 * look / step:,.0f} steps an epoch |",
            "",
        ]
    )
    (options.out or HERE / "HEALTH.md").write_text(page, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main()
