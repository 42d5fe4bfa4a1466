"""Trains a character language model, saves it, loads it again and lets it write.

The text is the language reference that ships with CPython, or any UTF-8 file:

    python examples/train_char_lm.py
    python examples/train_char_lm.py --text my_book.txt --steps 5000

Everything lands in one folder: the model, its characters, the loss curve. Needs
keras_tx with its extra `examples`, and any Keras backend; a GPU is used if the
backend sees one.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import platform
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import keras_tx as tx

# The sizes of nanoGPT's preset for a CPU, to compare with, and ours, which has
# no more parameters. Both see the same number of characters.
PRESETS = {
    "default": {
        "layers": 5,
        "dim": 112,
        "heads": 4,
        "position": "rotary",
        "learning_rate": 4e-3,
        "final_rate": 1e-4,
        "weight_decay": 0.1,
    },
    "nanogpt": {
        "layers": 4,
        "dim": 128,
        "heads": 4,
        "position": "learned",
        "learning_rate": 1e-3,
        "final_rate": 1e-4,
        "weight_decay": 0.1,
    },
}
NUM_REPORTS = 10  # how often a run is validated


class Complaint(Exception):
    """What is wrong with the input, in one line."""


# ----------------------------------------------------------------------------
# Text
# ----------------------------------------------------------------------------


def read_text(path):
    """Returns the text of a file, or the language reference of CPython."""
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    try:
        text = pathlib.Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise Complaint(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Complaint(
            f"{path} is not UTF-8: byte {error.start} cannot be decoded"
        ) from None
    if not text:
        raise Complaint(f"{path} is empty")
    return text


def encode(text, window):
    """Returns the characters, and ids of the training and the held-out part."""
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], "int32")
    split = len(ids) - len(ids) // 10
    train, held_out = ids[:split], ids[split:]
    if len(held_out) < window + 1:
        raise Complaint(
            f"the text has {len(text)} characters; a tenth is held out and must "
            f"fill a window of {window} and one more: give a longer text, or a "
            "smaller --window"
        )
    return characters, train, held_out


class RandomWindows(keras.utils.PyDataset):
    """Batches of windows that start anywhere, other ones in every epoch."""

    def __init__(self, ids, window, batch, steps, seed):
        super().__init__()
        self.ids, self.window, self.batch = ids, window, batch
        self.steps, self.seed, self.epoch = steps, seed, 0

    def __len__(self):
        return self.steps

    def __getitem__(self, index):
        rng = np.random.default_rng((self.seed, self.epoch, index))
        starts = rng.integers(0, len(self.ids) - self.window, self.batch)
        return tx.next_token(self.ids[starts[:, None] + np.arange(self.window + 1)])

    def on_epoch_end(self):
        self.epoch += 1


def whole_windows(ids, window):
    """Returns windows side by side: each character but the first is a target once.

    The last window is filled up with targets of weight 0.
    """
    rows = math.ceil((len(ids) - 1) / window)
    padded = np.zeros(rows * window + 1, "int32")
    padded[: len(ids)] = ids
    inputs = padded[:-1].reshape(rows, window)
    targets = padded[1:].reshape(rows, window)
    counts = (np.arange(rows * window) < len(ids) - 1).reshape(rows, window)
    return inputs, targets, counts


# ----------------------------------------------------------------------------
# Model
# ----------------------------------------------------------------------------


def build(args, vocab_size):
    """The model of a preset, with the sizes of the command line."""
    nanogpt = args.preset == "nanogpt"
    return tx.decoder(
        vocab_size,
        args.dim,
        args.layers,
        args.heads,
        norm="layer" if nanogpt else "rms",
        activation="gelu_tanh" if nanogpt else "silu",
        gated=not nanogpt,
        use_bias=nanogpt,
        position=None if args.position == "none" else args.position,
        max_length=args.window if args.position == "learned" else None,
        dropout=args.dropout,
        init_stddev=0.02 if nanogpt else 0.05,
    )


def compile_model(model, args):
    """AdamW with warm-up and cosine decay; decay of weights on matrices only."""
    warmup = min(100, args.steps // 10)
    schedule = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(1, args.steps - warmup),
        alpha=args.final_rate / args.learning_rate,
        warmup_target=args.learning_rate,
        warmup_steps=warmup,
    )
    optimizer = keras.optimizers.AdamW(
        schedule,
        beta_2=0.99,
        weight_decay=args.weight_decay,
        global_clipnorm=1.0,
    )
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "scale"])
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Several steps in one call of TensorFlow, with no Python between them.
        steps_per_execution=10,
    )


def cross_entropy(model, ids, window):
    """Returns nats per character over all of `ids`, each predicted once."""
    inputs, targets, counts = whole_windows(ids, window)
    total = 0.0
    for start in range(0, len(inputs), 64):
        part = slice(start, start + 64)
        logits = model.predict_on_batch(inputs[part]).astype("float64")
        logits -= logits.max(-1, keepdims=True)
        log_likelihood = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = np.take_along_axis(log_likelihood, targets[part][..., None], -1)
        total -= (chosen[..., 0] * counts[part]).sum()
    return total / counts.sum()


def write(model, characters, start, length, window, temperature, seed):
    """Returns `length` characters drawn one by one after `start`."""
    rng = np.random.default_rng(seed)
    ids = [characters.index(character) for character in start]
    for _ in range(length):
        recent = ids[-window:]
        # Always one window, so that one program serves every step: what stands
        # behind the last character cannot be seen by it.
        row = np.zeros((1, window), "int32")
        row[0, : len(recent)] = recent
        logits = model.predict_on_batch(row)[0, len(recent) - 1] / temperature
        chances = np.exp(logits.astype("float64") - logits.max())
        ids.append(int(rng.choice(len(chances), p=chances / chances.sum())))
    return "".join(characters[index] for index in ids)


# ----------------------------------------------------------------------------
# Story
# ----------------------------------------------------------------------------


def draw_losses(history, steps, path, title):
    """Draws training and validation loss against steps."""
    try:
        import matplotlib
    except ImportError:
        raise Complaint(
            'the loss curve needs matplotlib: pip install "keras-tx[examples]"'
        ) from None
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    at = np.linspace(0, steps, len(history["loss"]) + 1)[1:]
    axes.plot(at, history["loss"], label="training", color="#4878a8")
    axes.plot(at, history["val_loss"], label="held out", color="#d1605e", marker="o")
    best = int(np.argmin(history["val_loss"]))
    axes.annotate(
        f"{history['val_loss'][best]:.3f}",
        (at[best], history["val_loss"][best]),
        textcoords="offset points",
        xytext=(0, 10),
        ha="center",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("cross-entropy (nats per character)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def train(args):
    """Runs the whole story; returns what was measured."""
    text = read_text(args.text)
    characters, train_ids, held_out = encode(text, args.window)
    out = pathlib.Path(args.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "characters.json").write_text(json.dumps(characters))
    except OSError as error:
        raise Complaint(f"cannot write to {out}: {error.strerror}") from None
    facts = {
        "python": platform.python_version(),
        "keras": keras.__version__,
        "backend": keras.backend.backend(),
        "characters": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "preset": args.preset,
        "seed": args.seed,
    }
    print(
        f"Text: {facts['characters']:,} characters, {len(characters)} different, "
        f"SHA-256 {facts['sha256'][:16]}…, Python {facts['python']}, "
        f"keras {facts['keras']} on {facts['backend']}"
    )

    keras.utils.set_random_seed(args.seed)
    if args.mixed:
        keras.config.set_dtype_policy(f"mixed_{args.mixed}")
    model = build(args, len(characters))
    compile_model(model, args)
    print(
        f"Model: {args.layers} layers, {args.heads} heads, {args.dim} features, "
        f"window {args.window}, {model.count_params():,} parameters"
    )

    epochs = min(NUM_REPORTS, args.steps)
    steps_per_epoch = args.steps // epochs
    inputs, targets, counts = whole_windows(held_out, args.window)
    full = counts.all(axis=1)
    best = out / "model.keras"
    callbacks = [keras.callbacks.ModelCheckpoint(best, save_best_only=True)]
    if args.tensorboard:
        callbacks.append(keras.callbacks.TensorBoard(out / "logs"))
    started = time.perf_counter()
    history = model.fit(
        RandomWindows(train_ids, args.window, args.batch, steps_per_epoch, args.seed),
        epochs=epochs,
        validation_data=(inputs[full], targets[full]),
        validation_batch_size=64,
        callbacks=callbacks,
        verbose=args.verbose,
    ).history
    seconds = time.perf_counter() - started

    model = keras.models.load_model(best)
    loss = cross_entropy(model, held_out, args.window)
    facts |= {
        "parameters": model.count_params(),
        "steps": epochs * steps_per_epoch,
        "seconds": round(seconds, 1),
        "loss": round(float(loss), 4),
        "bits_per_character": round(float(loss) / math.log(2), 4),
    }
    (out / "result.json").write_text(json.dumps(facts, indent=2) + "\n")
    draw_losses(
        history,
        facts["steps"],
        out / "loss.png",
        f"{facts['parameters']:,} parameters, {args.preset} preset, seed {args.seed}",
    )
    print(
        f"\nHeld out: {loss:.4f} nats, {loss / math.log(2):.4f} bits per character, "
        f"over all {len(held_out) - 1:,} characters, in windows side by side "
        f"(Python {facts['python']}, {facts['characters']:,} characters, SHA-256 "
        f"{facts['sha256'][:16]}…; {seconds:.0f} s)"
    )

    again = keras.models.load_model(best)
    sample = inputs[:8]
    gap = np.abs(model.predict_on_batch(sample) - again.predict_on_batch(sample)).max()
    print(f"Saved and loaded again: the logits differ by {gap:.1f}")
    if gap != 0:
        raise Complaint("the reloaded model gives other logits")

    start = "\n" if "\n" in characters else characters[0]
    written = write(
        again,
        json.loads((out / "characters.json").read_text()),
        start,
        args.length,
        args.window,
        args.temperature,
        args.seed,
    )
    print(f"\n{args.length} characters by the model:\n{written}\n")
    print(f"In {out}: model.keras, characters.json, loss.png, result.json")
    return facts


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--text", help="UTF-8 file; without it the language reference of CPython")
    add("--out", default="runs/char_lm", help="folder for model and pictures")
    add("--preset", choices=PRESETS, default="default", help="sizes and rates")
    add("--layers", type=int, help="number of blocks")
    add("--heads", type=int, help="heads in each block")
    add("--dim", type=int, help="features of a token")
    add("--window", type=int, default=64, help="characters that the model sees")
    add("--batch", type=int, default=12, help="windows in a step")
    add("--steps", type=int, default=2000, help="steps of training")
    add(
        "--position",
        choices=["rotary", "sinusoidal", "learned", "relative", "alibi", "none"],
        help="how tokens know their order",
    )
    add("--learning-rate", type=float, help="highest learning rate")
    add("--final-rate", type=float, help="learning rate at the end")
    add("--weight-decay", type=float, help="decay of matrices")
    add("--dropout", type=float, default=0.0, help="share dropped while training")
    add("--mixed", choices=["float16", "bfloat16"], help="compute in half precision")
    add("--seed", type=int, default=0, help="of weights, windows and writing")
    add("--length", type=int, default=300, help="characters to write")
    add("--temperature", type=float, default=0.8, help="how bold the writing is")
    add("--tensorboard", action="store_true", help="log for TensorBoard")
    add("--verbose", type=int, default=1, help="progress: 0 none, 1 bar, 2 lines")
    args = parser.parse_args(argv)
    for name, value in PRESETS[args.preset].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("layers", "heads", "dim", "window", "batch", "steps", "length"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1")
    for name in ("learning_rate", "final_rate", "temperature"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0")
    if args.dim % args.heads:
        parser.error(f"--heads {args.heads} must divide --dim {args.dim}")
    if not 0 <= args.dropout < 1:
        parser.error("--dropout must lie in [0, 1)")
    return args


def main(argv=None):
    """Returns the exit status."""
    try:
        train(parse(argv))
    except Complaint as complaint:
        print(f"train_char_lm: {complaint}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
