"""Trains a small language model on the characters of one text, and lets it write.

    python examples/train_char_lm.py                      # the default model
    python examples/train_char_lm.py --preset nanogpt     # nanoGPT's CPU preset
    python examples/train_char_lm.py --text novel.txt --steps 5000 --dim 256
    KERAS_BACKEND=jax python examples/train_char_lm.py    # or torch, same command

One story, top to bottom: read a text, hold out its last tenth, train a decoder to
predict each next character, measure it on what was held out, draw the loss, save,
load again, and write.

How the loss is measured. Every character of the held-out tenth is predicted once,
and the mean of -log p over all of them is the cross-entropy; nothing is sampled,
so that the same model always gets the same number. The held-out part is cut into
windows one behind the other. The first character of a window is predicted from
one character of context, the last from a whole window. Where the tenth doesn't
divide into windows, the last one ends with the text and only characters that are
not counted yet count. A second number, "with context", moves by half a window at
a time and counts the second halves, so that every character is predicted from at
least half a window.
"""

import argparse
import ctypes
import hashlib
import json
import math
import os
import pathlib
import platform
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors only

import keras
import numpy as np

import keras_tx as tx

# What a preset decides, and options may change. `model` are arguments of
# `keras_tx.decoder`.
PRESETS = {
    "default": {
        "layers": 5,
        "heads": 4,
        "dim": 112,
        "position": "rotary",
        "learning_rate": 4e-3,
        # Narrow kernels want larger values than GPT-2's 0.02 to start with.
        "model": {"init_stddev": 0.05},
    },
    # https://github.com/karpathy/nanoGPT, "I only have a macbook", with the
    # biases of GPT-2 and its approximate GELU.
    "nanogpt": {
        "layers": 4,
        "heads": 4,
        "dim": 128,
        "position": "learned",
        "learning_rate": 1e-3,
        "model": {
            "activation": "gelu_tanh",
            "gated": False,
            "use_bias": True,
            "norm": "layer",
            # 0.02, its own, suits 768 features; at 128 it starts too small.
            "init_stddev": 0.07,
        },
    },
}


# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options; those not given come from the preset."""
    parser = argparse.ArgumentParser(
        prog="train_char_lm.py",
        description="Trains a small language model on the characters of one text, "
        "measures it on the last tenth, saves it, and lets it write. The backend "
        "is chosen by KERAS_BACKEND (tensorflow, jax or torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    unset = argparse.SUPPRESS  # left to the preset, and without "(default: ...)"
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    add("--preset", choices=PRESETS, default="default", help="model and its training")
    add(
        "--text",
        metavar="FILE",
        default=unset,
        help="a UTF-8 file; without it, the language reference of this Python",
    )
    add("--out", metavar="FOLDER", default="runs/char_lm", help="where results go")

    add = parser.add_argument_group("size, otherwise the preset's").add_argument
    add("--layers", **count, default=unset, help="blocks")
    add("--heads", **count, default=unset, help="heads of each block")
    add("--dim", **count, default=unset, help="features of a character")
    add(
        "--position",
        choices=["rotary", "learned", "sinusoidal", "relative", "alibi", "none"],
        default=unset,
        help="how the model knows order",
    )

    add = parser.add_argument_group("training").add_argument
    add("--window", type=at_least(2), metavar="N", default=64, help="characters seen")
    add("--batch", **count, default=12, help="windows in a step")
    add("--steps", **count, default=2000, help="updates of the weights")
    add(
        "--learning-rate",
        type=above_zero,
        metavar="X",
        default=unset,
        help="its peak, otherwise the preset's",
    )
    add(
        "--seed",
        type=at_least(0),
        metavar="N",
        default=0,
        help="of weights, windows and what is written",
    )
    add(
        "--precision",
        choices=["float32", "mixed_bfloat16", "mixed_float16"],
        default="float32",
        help="dtype policy; the mixed ones pay on a GPU",
    )
    add("--validate-every", **count, default=100, help="steps between validations")
    add("--tensorboard", action="store_true", default=unset, help="log to FOLDER/logs")

    add = parser.add_argument_group("writing").add_argument
    add("--write", type=at_least(0), metavar="N", default=300, help="characters")
    add(
        "--temperature",
        type=above_zero,
        metavar="X",
        default=0.8,
        help="below 1 is more careful",
    )

    given = vars(parser.parse_args(arguments))
    preset = {k: v for k, v in PRESETS[given["preset"]].items() if k != "model"}
    without = {"text": None, "tensorboard": False}
    return argparse.Namespace(**{**without, **preset, **given})


def at_least(lowest):
    """Returns a parser of integers from `lowest` on."""

    def integer(text):
        number = int(text)
        if number < lowest:
            raise argparse.ArgumentTypeError(f"{number} is below {lowest}")
        return number

    return integer


def above_zero(text):
    """Parses a number above zero."""
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return number


def stop(problem):
    """Ends the program with one line and a non-zero exit."""
    sys.exit(f"train_char_lm.py: {problem}.")


def need_enough(text, name, window):
    """The held-out tenth must fill a window, and so must what is trained on."""
    needed = 10 * (window + 1)
    if not text:
        stop(f"{name} is empty")
    if len(text) < needed:
        stop(
            f"{name} has {len(text)} characters, too few for windows of {window}: "
            f"a tenth is held out and must fill one, which takes {needed}. Use a "
            "longer text or a smaller --window"
        )


def writable_folder(path):
    """Makes the output folder, and finds out now whether it takes files."""
    out = pathlib.Path(path)
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".probe"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        stop(f"cannot write to --out {out}: {error.strerror}")
    return out


def need_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        stop("the loss curve needs matplotlib: pip install 'keras-tx[plots]'")


def tensorboard_callback(folder):
    """The callback, or one line on what it lacks."""
    try:
        import tensorboard  # noqa: F401
        import tensorflow  # noqa: F401
    except ImportError as error:
        stop(f"--tensorboard needs {error.name}: pip install tensorflow tensorboard")
    return keras.callbacks.TensorBoard(folder)


def title(options, model):
    return (
        f"{options.preset}, {model.count_params():,} parameters, seed {options.seed}, "
        f"{keras.backend.backend()}"
    )


# ----------------------------------------------------------------------------
# The text
# ----------------------------------------------------------------------------


def read_text(path):
    """Returns a text and its name: a file, or the language reference of Python."""
    if path is None:
        # Ships with CPython, in slightly different words with each version.
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics)), "pydoc_data.topics"
    try:
        return pathlib.Path(path).read_bytes().decode("utf-8"), str(path)
    except OSError as error:
        stop(f"cannot read --text {path}: {error.strerror}")
    except UnicodeDecodeError as error:
        stop(
            f"--text {path} is not UTF-8: byte {error.start} is "
            f"0x{error.object[error.start]:02x}. Convert it, for instance with iconv"
        )


def windows(ids, starts, window):
    """Returns inputs and targets, `(B, T)` each: targets are one character on."""
    rows = ids[np.asarray(starts)[:, None] + np.arange(window + 1)]
    return rows[:, :-1], rows[:, 1:]


def random_windows(ids, window, batch, seed):
    """Yields batches of windows from anywhere in the text, without an end."""
    rng = np.random.default_rng(seed)
    while True:
        yield windows(ids, rng.integers(len(ids) - window, size=batch), window)


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options, vocab_size):
    """Returns a decoder, not yet compiled."""
    return tx.decoder(
        vocab_size,
        options.dim,
        options.layers,
        options.heads,
        position=None if options.position == "none" else options.position,
        max_length=options.window if options.position == "learned" else None,
        **PRESETS[options.preset]["model"],
    )


def compile_for_training(model, options):
    """AdamW under warm-up, cosine decay and clipping, as in nanoGPT."""
    warmup = max(1, min(100, options.steps // 10))
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(1, options.steps - warmup),
        alpha=0.1,
    )
    optimizer = keras.optimizers.AdamW(
        schedule, beta_2=0.99, weight_decay=0.1, global_clipnorm=1.0
    )
    # Decay pulls matrices and tables towards zero; a bias or the scale of a norm
    # has no reason to go there.
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma", "scale"])
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Keras turns XLA off for TensorFlow on a machine without a GPU, where it
        # makes this step more than twice as fast. On torch it would mean
        # `torch.compile`, which needs a C++ compiler.
        jit_compile=keras.backend.backend() != "torch",
    )


class StepTimer(keras.callbacks.Callback):
    """Notes how long each step took, compilation and validation left out."""

    def __init__(self):
        super().__init__()
        self.seconds = []
        self.last = None

    def on_epoch_begin(self, epoch, logs=None):
        self.last = None

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self.last is not None:
            self.seconds.append(now - self.last)
        self.last = now

    def median(self):
        return float(np.median(self.seconds)) if self.seconds else math.nan


# ----------------------------------------------------------------------------
# What it learnt
# ----------------------------------------------------------------------------


def cross_entropy(model, ids, first, window, stride, batch=64):
    """Returns the mean of -log p over `ids[first:]`, in nats per character.

    A window moves by `stride` characters at a time and counts the last `stride`
    of its predictions, so that every character is counted once and has at least
    `window - stride + 1` characters of context.
    """
    counted = np.arange(first, len(ids), stride)
    ends = np.minimum(counted + stride, len(ids))
    total = 0.0
    for at in range(0, len(ends), batch):
        ending = ends[at : at + batch]
        fresh = ending - counted[at : at + batch]
        # Rows are repeated to fill the last batch: another shape would be
        # compiled anew.
        filled = np.resize(ending, batch)
        inputs, targets = windows(ids, filled - window - 1, window)
        logits = np.asarray(model.predict_on_batch(inputs), "float64")
        logits -= logits.max(axis=-1, keepdims=True)
        picked = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        loss = np.log(np.exp(logits).sum(axis=-1)) - picked  # (B, T)
        for row, count in zip(loss, fresh, strict=False):
            total += row[window - count :].sum()
    return total / (len(ids) - first)


def write(model, prompt, count, window, temperature, seed):
    """Returns `count` sampled ids behind those of `prompt`.

    The model never saw more than a window, and what it says further on is worth
    less; with learned positions it has none there. So it fills a window, and then
    goes on from the second half of it.
    """
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        known = ids[-(window // 2) :]
        left = len(prompt) + count - len(ids)
        new = min(window - len(known), left)
        text = tx.generate(model, known, new, sampler=temperature, seed=seed)
        ids += text[len(known) :]
    return ids[len(prompt) :]


def draw(history, steps_per_epoch, final, path, title):
    """Draws training and validation loss over steps."""
    from matplotlib.figure import Figure

    steps = steps_per_epoch * np.arange(1, len(history["loss"]) + 1)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, history["loss"], label="training, mean since the last point")
    axes.plot(steps, history["val_loss"], label="held out", marker="o", markersize=3)
    axes.axhline(final, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate(
        f"{final:.3f}",
        (1, final),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4),
        textcoords="offset points",
        horizontalalignment="right",
        verticalalignment="top",
    )
    axes.set_xlabel("steps")
    axes.set_ylabel("cross-entropy, nats per character")
    axes.set_title(title, fontsize="medium")
    axes.set_xlim(left=0)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


# ----------------------------------------------------------------------------
# The story
# ----------------------------------------------------------------------------


def keep_freed_memory():
    """Lets the C library keep what a step frees, for the next step.

    XLA takes the activations of a step as one block of some 40 MB and frees it
    behind the step. glibc returns a block of that size to the kernel, which hands
    it out anew page by page, zeroed: a third of a step on a CPU. Elsewhere than
    under glibc this does nothing.
    """
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    for option, value in (
        (-1, 2**30),  # M_TRIM_THRESHOLD: what may lie free at the end of the heap
        (-2, 2**26),  # M_TOP_PAD: by how much more than asked the heap grows
        (-4, 0),  # M_MMAP_MAX: how many blocks may live outside the heap
    ):
        set_option(option, value)


def main(arguments=None):
    options = parse(arguments)
    keep_freed_memory()
    text, name = read_text(options.text)
    need_enough(text, name, options.window)
    out = writable_folder(options.out)
    need_matplotlib()
    callbacks = [] if not options.tensorboard else [tensorboard_callback(out / "logs")]

    # The text, as numbers. The last tenth is not trained on.
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], dtype="int32")
    first = int(0.9 * len(ids))
    sha = hashlib.sha256(text.encode("utf-8")).hexdigest()
    source = (
        f"{name}, Python {platform.python_version()}, {len(text):,} characters "
        f"({len(characters)} different), SHA-256 {sha}"
    )
    print(source)

    # The model.
    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy(options.precision)
    try:
        model = build(options, len(characters))
    except ValueError as error:
        stop(str(error))
    compile_for_training(model, options)
    print(
        f"{model.count_params():,} parameters in {options.layers} layers, keras "
        f"{keras.__version__} on {keras.backend.backend()}, {options.precision}"
    )

    # Training. An epoch is what lies between two looks at the held-out part.
    epochs = max(1, options.steps // options.validate_every)
    steps_per_epoch = options.steps // epochs
    # Of a long text an even selection, and in batches of one size, for another
    # would be compiled anew; all of the held-out part is measured at the end.
    starts = np.arange(first - 1, len(ids) - options.window, options.window)
    starts = starts[:: math.ceil(len(starts) / 1000)]
    batches = math.ceil(len(starts) / 64)
    per_batch = len(starts) // batches
    starts = starts[: batches * per_batch]
    timer = StepTimer()
    best = out / "best.weights.h5"
    best.unlink(missing_ok=True)  # an earlier run's
    history = model.fit(
        random_windows(ids[:first], options.window, options.batch, options.seed),
        steps_per_epoch=steps_per_epoch,
        epochs=epochs,
        validation_data=windows(ids, starts, options.window),
        validation_batch_size=per_batch,
        shuffle=False,  # the windows come in random order already
        callbacks=[
            keras.callbacks.ModelCheckpoint(
                best, save_best_only=True, save_weights_only=True
            ),
            timer,
            *callbacks,
        ],
    ).history
    if not best.exists():
        stop("the loss is not a number any more; lower the --learning-rate")
    model.load_weights(best)

    # Saved, and back.
    model.save(out / "model.keras")
    (out / "characters.json").write_text(json.dumps(characters), encoding="utf-8")
    loaded = keras.models.load_model(out / "model.keras")
    characters = json.loads((out / "characters.json").read_text(encoding="utf-8"))
    some, _ = windows(ids, starts[:per_batch], options.window)
    difference = float(
        np.max(np.abs(model.predict_on_batch(some) - loaded.predict_on_batch(some)))
    )
    print(f"largest difference of the reloaded model's logits: {difference}")

    # What it learnt, on every held-out character.
    measure = (loaded, ids, first, options.window)
    loss = cross_entropy(*measure, stride=options.window, batch=per_batch)
    with_context = cross_entropy(
        *measure, stride=max(1, options.window // 2), batch=per_batch
    )
    print(
        f"held-out loss {loss:.4f} nats, {loss / math.log(2):.4f} bits per "
        f"character; with context {with_context:.4f} nats, "
        f"{with_context / math.log(2):.4f} bits; {len(ids) - first:,} characters of "
        f"{source}"
    )
    print(f"{1000 * timer.median():.1f} ms a step")
    draw(history, steps_per_epoch, loss, out / "loss.png", title(options, model))

    # And it writes, from the start of a line.
    prompt = [number.get("\n", 0)]
    new = write(
        loaded, prompt, options.write, options.window, options.temperature, options.seed
    )
    sample = "".join(characters[index] for index in new)
    print(f"\n{sample}\n")
    (out / "sample.txt").write_text(sample, encoding="utf-8")

    result = {
        "preset": options.preset,
        "seed": options.seed,
        "loss": loss,
        "bits_per_character": loss / math.log(2),
        "loss_with_context": with_context,
        "reload_difference": difference,
        "milliseconds_per_step": 1000 * timer.median(),
        "parameters": model.count_params(),
        "held_out_characters": len(ids) - first,
        "text": name,
        "text_characters": len(text),
        "text_sha256": sha,
        "python": platform.python_version(),
        "keras": keras.__version__,
        "keras_tx": tx.__version__,
        "backend": keras.backend.backend(),
        "options": vars(options),
        "history": history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"model.keras, characters.json, loss.png, result.json in {out}")
    return result


if __name__ == "__main__":
    main()
