"""Tells handwritten digits apart, with transformer blocks in a model of one's own.

    python examples/classify_digits.py                    # the default model
    python examples/classify_digits.py --patch 4 --layers 3 --epochs 50
    KERAS_BACKEND=jax python examples/classify_digits.py  # or torch, same command

One story, top to bottom: cut small images into patches, make each a token, put two
blocks into an ordinary functional model, train it, measure it on images that it has
not seen, compare it with a support vector machine, draw where it looks, save, and
load again.

How accuracy is measured. scikit-learn has 1,797 images of 8 by 8 pixels. The first
1,400 are trained on, the other 397 are not, in the order of the file, in which no
image of a writer is next to its twin by chance. The model is that of the last epoch:
nothing is chosen by a look at the held-out images. It sees each of these some times,
moved and turned by half of what training does, and answers with the mean of what it
takes them for; what one look at the image as it is comes to is told beside it. The
support vector machine gets the same images, as they are.
"""

import argparse
import ctypes
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

SIDE = 8  # pixels
TRAINED_ON = 1400  # images
WHITE = 16  # the largest value of a pixel
LOOKS = 16  # at each image that is measured


# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="classify_digits.py",
        description="Trains transformer blocks on patches of scikit-learn's digits, "
        "measures them on the last 397 images, saves them, and draws where they "
        "look. The backend is chosen by KERAS_BACKEND (tensorflow, jax or torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    add("--out", metavar="FOLDER", default="runs/digits", help="where results go")

    add = parser.add_argument_group("size").add_argument
    add("--patch", type=int, choices=[1, 2, 4], default=2, help="pixels a side")
    add("--layers", **count, default=2, help="blocks")
    add("--heads", **count, default=4, help="heads of each block")
    add("--dim", **count, default=64, help="features of a patch")

    add = parser.add_argument_group("training").add_argument
    add("--epochs", **count, default=100, help="times that each image is seen")
    add("--batch", **count, default=70, help="images in a step")
    add("--learning-rate", type=above_zero, metavar="X", default=2e-3, help="its peak")
    add("--dropout", type=share, metavar="X", default=0.1, help="of each branch")
    add("--seed", type=at_least(0), metavar="N", default=0, help="of all chance")
    return parser.parse_args(arguments)


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


def share(text):
    """Parses a number from 0 to just below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return number


def stop(problem):
    """Ends the program with one line and a non-zero exit."""
    sys.exit(f"classify_digits.py: {problem}.")


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


def need(*packages):
    """Asks for what only examples need, before anything takes long."""
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            stop(f"{package} is missing: pip install 'keras-tx[examples]'")


# ----------------------------------------------------------------------------
# The images
# ----------------------------------------------------------------------------


def read_images():
    """Returns images `(1797, 8, 8)` from 0 to 1, and the digits on them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    return (digits.images / WHITE).astype("float32"), digits.target


def vary(images, rng, shift=0.4, turn=0.12, stretch=0.08):
    """Returns each image moved, turned and stretched a little, anew each time.

    Every pixel of the result is read from somewhere in the image, between four of
    its pixels, which are mixed by how near they are.

    Args:
        images: `(B, 8, 8)`.
        rng: A NumPy generator.
        shift: Standard deviation of the way moved, in pixels.
        turn: Standard deviation of the angle, in radians.
        stretch: Standard deviation of the logarithm of the size.
    """
    count = len(images)
    angle, down, right = (
        rng.normal(0, deviation, (count, 1, 1)) for deviation in (turn, shift, shift)
    )
    taller, wider = np.exp(rng.normal(0, stretch, (2, count, 1, 1)))
    middle = (SIDE - 1) / 2
    y, x = np.meshgrid(*2 * [np.arange(SIDE) - middle], indexing="ij")
    from_y = taller * (np.cos(angle) * y - np.sin(angle) * x) + middle + down
    from_x = wider * (np.sin(angle) * y + np.cos(angle) * x) + middle + right

    margin = 2 * SIDE  # black, so that every place has four pixels around it
    padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin)))
    row, column = np.floor(from_y).astype(int), np.floor(from_x).astype(int)
    below, beside = from_y - row, from_x - column
    image = np.arange(count)[:, None, None]

    def pixel(rows_on, columns_on):
        rows = np.clip(row + rows_on + margin, 0, padded.shape[1] - 1)
        columns = np.clip(column + columns_on + margin, 0, padded.shape[2] - 1)
        return padded[image, rows, columns]

    above = (1 - beside) * pixel(0, 0) + beside * pixel(0, 1)
    under = (1 - beside) * pixel(1, 0) + beside * pixel(1, 1)
    return ((1 - below) * above + below * under).astype("float32")


def batches(images, digits, batch, seed):
    """Yields images and digits as one-hot rows, without an end.

    Half of the images are varied; the others stay as sharp as those held out are.
    """
    rng = np.random.default_rng(seed)
    one_hot = np.eye(10, dtype="float32")[digits]
    while True:
        order = rng.permutation(len(images))
        for at in range(0, len(order) - batch + 1, batch):
            pick = order[at : at + batch]
            varied = rng.random((batch, 1, 1)) < 0.5
            yield np.where(varied, vary(images[pick], rng), images[pick]), one_hot[pick]


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options):
    """Returns a model of images `(B, 8, 8)` to logits `(B, 10)`.

    All of it is Keras, but for the position and the blocks.
    """
    across = SIDE // options.patch
    images = keras.Input((SIDE, SIDE), name="images")
    x = keras.layers.Reshape((SIDE, SIDE, 1))(images)
    # Each patch is seen with a margin of half a patch around it.
    x = keras.layers.Conv2D(
        options.dim, 2 * options.patch, options.patch, padding="same", name="patches"
    )(x)
    x = keras.layers.Reshape((across * across, options.dim))(x)  # rows, one by one
    x = tx.LearnedPosition(across * across, name="position")(x)
    for index in range(options.layers):
        x = tx.TransformerBlock(
            attention=options.heads,
            feed_forward=2 * options.dim,
            dropout=options.dropout,
            name=f"block_{index}",
        )(x)
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pooling")(x)
    logits = keras.layers.Dense(10, name="digits")(x)
    return keras.Model(images, logits, name="digits")


def compile_for_training(model, options, steps):
    """AdamW under a short warm-up and a cosine decay, on softened targets."""
    warmup = max(1, steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(1, steps - warmup),
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.05, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    model.compile(
        optimizer,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=["accuracy"],
        # On TensorFlow, XLA takes ten times as long on a CPU for the random numbers
        # of dropout. On torch it would mean `torch.compile`, which needs a C++
        # compiler.
        jit_compile=keras.backend.backend() == "jax",
    )


# ----------------------------------------------------------------------------
# What it learnt
# ----------------------------------------------------------------------------


def looked_at_again(model, images, looks=LOOKS):
    """Returns the mean chances `(B, 10)` of some looks, half as varied as training."""
    rng = np.random.default_rng(0)
    total = np.zeros((len(images), 10))
    for _ in range(looks):
        varied = vary(images, rng, shift=0.2, turn=0.06, stretch=0.04)
        logits = model.predict(varied, batch_size=len(images), verbose=0)
        logits = logits.astype("float64") - logits.max(axis=-1, keepdims=True)
        total += np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return total / looks


def support_vector_machine(images, digits):
    """Returns the accuracy of scikit-learn's, with the option of its own example."""
    from sklearn.svm import SVC

    rows = WHITE * images.reshape(len(images), -1)
    machine = SVC(gamma=0.001).fit(rows[:TRAINED_ON], digits[:TRAINED_ON])
    return float(machine.score(rows[TRAINED_ON:], digits[TRAINED_ON:]))


def draw(images, digits, guesses, weights, path, title):
    """Draws one image of each digit, and how much each of its patches is looked at.

    Args:
        images: `(B, 8, 8)`.
        digits: What they are.
        guesses: What the model takes them for.
        weights: For each block `(B, N, T, T)`.
        path: Where the picture goes.
        title: What stands above it.
    """
    from matplotlib.figure import Figure

    rows = 1 + len(weights)
    figure = Figure(figsize=(10, 0.95 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, len(images), squeeze=False)
    # What a patch receives: the mean over heads and over the patches that look.
    received = [w.mean(axis=(1, 2)) * w.shape[-1] for w in weights]  # (B, T)
    highest = max(r.max() for r in received)
    for column, image in enumerate(images):
        axes[0, column].imshow(image, cmap="gray_r")
        wrong = "" if guesses[column] == digits[column] else f", not {digits[column]}"
        axes[0, column].set_title(f"{guesses[column]}{wrong}", fontsize="medium")
        for row, of_block in enumerate(received, 1):
            across = math.isqrt(of_block.shape[-1])
            shown = axes[row, column].imshow(
                of_block[column].reshape(across, across),
                cmap="viridis",
                vmin=0,
                vmax=highest,
                extent=(-0.5, SIDE - 0.5, SIDE - 0.5, -0.5),
            )
            # The digit as an outline, so that places can be found again.
            axes[row, column].contour(image, [0.5], colors="white", linewidths=1)
    for row, of_row in enumerate(axes):
        name = "taken for" if row == 0 else f"looked at\nby block {row}"
        of_row[0].set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        for cell in of_row:
            cell.set_xticks([])
            cell.set_yticks([])
    bar = figure.colorbar(shown, ax=axes[1:], shrink=0.9, pad=0.01)
    bar.set_label("attention received,\n1 if all were alike", fontsize="small")
    figure.suptitle(title, fontsize="medium")
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
    if options.batch > TRAINED_ON:
        stop(f"--batch {options.batch} is more than the {TRAINED_ON} images there are")
    need("sklearn", "matplotlib")
    out = writable_folder(options.out)
    import sklearn

    images, digits = read_images()
    unseen, answers = images[TRAINED_ON:], digits[TRAINED_ON:]
    print(
        f"scikit-learn {sklearn.__version__}: {TRAINED_ON} images to train on, "
        f"{len(unseen)} held out"
    )

    # The model.
    keras.utils.set_random_seed(options.seed)
    try:
        model = build(options)
    except ValueError as error:
        stop(str(error).rstrip("."))
    steps_per_epoch = TRAINED_ON // options.batch
    compile_for_training(model, options, steps_per_epoch * options.epochs)
    print(
        f"{model.count_params():,} parameters in {options.layers} layers, keras "
        f"{keras.__version__} on {keras.backend.backend()}"
    )

    # Training, on images that are never twice the same.
    started, worked = time.perf_counter(), time.process_time()
    history = model.fit(
        batches(images[:TRAINED_ON], digits[:TRAINED_ON], options.batch, options.seed),
        steps_per_epoch=steps_per_epoch,
        epochs=options.epochs,
        shuffle=False,  # the images come in random order already
        verbose=2,
    ).history
    seconds = time.perf_counter() - started
    # Of all cores together, and of nobody else: what else runs doesn't count.
    processor_seconds = time.process_time() - worked
    if not math.isfinite(history["loss"][-1]):
        stop("the loss is not a number any more; lower the --learning-rate")

    # Saved, and back.
    model.save(out / "model.keras")
    loaded = keras.models.load_model(out / "model.keras")
    logits = loaded.predict(unseen, batch_size=len(unseen), verbose=0)
    before = model.predict(unseen, batch_size=len(unseen), verbose=0)
    difference = float(np.max(np.abs(before - logits)))
    print(f"largest difference of the reloaded model's logits: {difference}")

    # What it learnt, on images that it has not seen.
    at_once = float(np.mean(logits.argmax(axis=-1) == answers))
    guesses = looked_at_again(loaded, unseen).argmax(axis=-1)
    accuracy = float(np.mean(guesses == answers))
    baseline = support_vector_machine(images, digits)
    print(
        f"accuracy {accuracy:.4f}, {np.sum(guesses != answers)} mistakes in "
        f"{len(unseen)} unseen images; at one look {at_once:.4f}; a support vector "
        f"machine has {baseline:.4f}; {seconds:.0f} s of training"
    )

    # Where it looks: one unseen image of each digit.
    chosen = [int(np.flatnonzero(answers == digit)[0]) for digit in range(10)]
    weights = list(tx.attention_maps(loaded, unseen[chosen]).values())
    draw(
        unseen[chosen],
        answers[chosen],
        guesses[chosen],
        weights,
        out / "attention.png",
        f"accuracy {accuracy:.3f} on {len(unseen)} unseen images, "
        f"{model.count_params():,} parameters, seed {options.seed}, "
        f"{keras.backend.backend()}",
    )

    result = {
        "example": "classify_digits",
        "seed": options.seed,
        "accuracy": accuracy,
        "accuracy_at_one_look": at_once,
        "baseline": baseline,
        "held_out": len(unseen),
        "reload_difference": difference,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "parameters": model.count_params(),
        "data": f"scikit-learn {sklearn.__version__}",
        "python": platform.python_version(),
        "keras": keras.__version__,
        "keras_tx": tx.__version__,
        "backend": keras.backend.backend(),
        "options": vars(options),
        "history": history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"model.keras, attention.png, result.json in {out}")
    return result


if __name__ == "__main__":
    main()
