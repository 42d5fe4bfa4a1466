"""Fills in the blanks of a text: an encoder that sees what is on both sides.

    python examples/masked_lm.py                             # train, measure, draw
    python examples/masked_lm.py --ask "the l_st st_tement"  # then ask the model
    python examples/masked_lm.py --text novel.txt --steps 3000
    KERAS_BACKEND=jax python examples/masked_lm.py           # or torch, same command

One story, top to bottom: read a text, hold out its last tenth, hide some characters
and train an encoder to say which they were, measure it on what was held out against
two guesses that count characters, draw its guesses along a line, save, and load
again.

How it is measured. The held-out tenth is cut into windows one behind the other, and
about 15 characters in 100 are hidden in each, the same ones in every run. Top-1 is
the share of the hidden characters that the model names first, top-5 the share among
its first five. The guesses are measured on the same characters: "unigram" names the
most frequent characters of the part that was trained on, "bigram" those most frequent
behind the character to the left, "neighbours" those most frequent between the
characters to the left and to the right. All of them are told the true neighbours,
even where these are hidden from the model.
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

BLANK = "_"  # how --ask writes a hidden character
RATE = 0.15  # share of characters to hide
MEASURED = 20_000  # seed of the characters that are hidden when measuring
# Of guesses that are wrong and right, on a light and on a dark ground.
COLORS = ("tab:red", "orange"), ("black", "white")

# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="masked_lm.py",
        description="Trains an encoder to fill in hidden characters of one text, "
        "measures it on the last tenth, saves it, and draws its guesses. The backend "
        "is chosen by KERAS_BACKEND (tensorflow, jax or torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    unset = argparse.SUPPRESS
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    add(
        "--text",
        metavar="FILE",
        default=unset,
        help="a UTF-8 file; without it, the language reference of this Python",
    )
    add("--out", metavar="FOLDER", default="runs/masked_lm", help="where results go")

    add = parser.add_argument_group("asking, without training").add_argument
    add(
        "--ask",
        metavar="TEXT",
        default=unset,
        help=f"a text to fill in, with {BLANK} for each blank, with the model that "
        "an earlier run left in --out",
    )

    add = parser.add_argument_group("size").add_argument
    add("--layers", **count, default=3, help="blocks")
    add("--heads", **count, default=4, help="heads of each block")
    add("--dim", **count, default=112, help="features of a character")

    add = parser.add_argument_group("training").add_argument
    add("--window", type=at_least(2), metavar="N", default=64, help="characters seen")
    add("--batch", **count, default=32, help="windows in a step")
    add("--steps", **count, default=1500, help="updates of the weights")
    add("--learning-rate", type=above_zero, metavar="X", default=4e-3, help="its peak")
    add("--seed", type=at_least(0), metavar="N", default=0, help="of all chance")
    without = {"text": None, "ask": None}
    return argparse.Namespace(**{**without, **vars(parser.parse_args(arguments))})


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
    sys.exit(f"masked_lm.py: {problem}.")


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


def need(*packages):
    """Asks for what only examples need, before anything takes long."""
    for package in packages:
        try:
            __import__(package)
        except ImportError:
            stop(f"{package} is missing: pip install 'keras-tx[examples]'")


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


def masked_windows(ids, mask_id, window, batch, seed):
    """Yields what `fit` takes, from anywhere in the text, without an end."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(len(ids) - window + 1, size=batch)
        rows = ids[starts[:, None] + np.arange(window)]
        yield tx.mask_tokens(rows, mask_id, mask_id + 1, rate=RATE, seed=rng)


def hide(ids, first, window, mask_id):
    """Returns windows of `ids[first:]` with blanks, and where these are in `ids`.

    Returns:
        Inputs `(B, window)`; the places of their characters in `ids`, likewise; and
        whether each is hidden, likewise.
    """
    starts = np.arange(first, len(ids) - window + 1, window)
    places = starts[:, None] + np.arange(window)
    rows = ids[places]
    _, _, chosen = tx.mask_tokens(rows, mask_id, mask_id + 1, rate=RATE, seed=MEASURED)
    # In training some chosen characters are shown or swapped; here none is.
    return np.where(chosen > 0, mask_id, rows).astype("int32"), places, chosen > 0


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options, num_characters):
    """Returns an encoder with a token more than there are characters: the blank."""
    return tx.encoder(
        num_characters + 1,
        options.dim,
        options.layers,
        options.heads,
        output="tokens",
        # Narrow kernels want larger values than GPT-2's 0.02 to start with.
        init_stddev=0.05,
    )


def compile_for_training(model, options):
    """AdamW under warm-up, cosine decay and clipping."""
    warmup = max(1, min(100, options.steps // 10))
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(1, options.steps - warmup),
        alpha=0.05,
    )
    optimizer = keras.optimizers.AdamW(
        schedule, beta_2=0.99, weight_decay=0.1, global_clipnorm=1.0
    )
    optimizer.exclude_from_weight_decay(var_names=["scale"])
    model.compile(
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # Keras turns XLA off for TensorFlow on a machine without a GPU, where it
        # makes a step faster. On torch it would mean `torch.compile`, which needs a
        # C++ compiler.
        jit_compile=keras.backend.backend() != "torch",
    )


def chances(model, inputs, mask_id, batch=64):
    """Returns the chance of each character at each place, `(B, T, V)`."""
    found = []
    for at in range(0, len(inputs), batch):
        # Rows are repeated to fill the last batch: another shape would be compiled.
        rows = np.resize(inputs[at : at + batch], (batch, inputs.shape[1]))
        logits = np.asarray(model.predict_on_batch(rows), "float32")[..., :mask_id]
        logits = logits[: len(inputs) - at]
        powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
        found.append(powers / powers.sum(axis=-1, keepdims=True))
    return np.concatenate(found)


# ----------------------------------------------------------------------------
# What it learnt
# ----------------------------------------------------------------------------


def top(scores, answers):
    """Returns the share of answers with the highest score, and among five highest."""
    five = np.argsort(-scores, axis=-1, kind="stable")[:, :5] == answers[:, None]
    return float(five[:, 0].mean()), float(five.any(axis=-1).mean())


def counting_guesses(ids, first, places, num_characters):
    """Returns for each way to guess by counting its scores at places, `(P, V)`.

    Counts of what was not seen are broken by counts of what is known less: a
    character between two others by the one to the left, and that by itself.
    """
    trained_on, v = ids[:first], num_characters
    unigram = np.bincount(trained_on, minlength=v) / first
    pairs = np.bincount(trained_on[:-1] * v + trained_on[1:], minlength=v * v)
    bigram = pairs.reshape(v, v) + unigram
    left, right = ids[places - 1], ids[np.minimum(places + 1, len(ids) - 1)]

    # Of triples there are too many for a table; those with the same ends are sorted
    # next to one another.
    ends = trained_on[:-2].astype("int64") * v + trained_on[2:]
    order = np.argsort(ends, kind="stable")
    ends, middles = ends[order], trained_on[1:-1][order]
    asked = left.astype("int64") * v + right
    starts, stops = (np.searchsorted(ends, asked, side) for side in ("left", "right"))
    between = np.stack(
        [
            np.bincount(middles[a:b], minlength=v)
            for a, b in zip(starts, stops, strict=True)
        ]
    )
    behind = bigram[left] / bigram[left].sum(axis=-1, keepdims=True)
    return {
        "unigram": np.broadcast_to(unigram, (len(places), v)),
        "bigram": bigram[left],
        "neighbours": between + behind,
    }


def fill(model, number, text, window):
    """Returns a text with its blanks filled in, and the chance of each filling.

    All blanks are filled at once, by the likeliest character of each.
    """
    characters = list(number)
    mask_id = len(characters)
    row = np.array([[mask_id if c == BLANK else number[c] for c in text]], "int32")
    found = chances(model, row, mask_id, batch=1)[0]
    filled, sure = list(text), []
    for place in np.flatnonzero(row[0] == mask_id):
        best = found[place].argmax()
        filled[place] = characters[best]
        sure.append(float(found[place, best]))
    return "".join(filled), sure


def answer(options):
    """Answers `--ask` with the model of an earlier run."""
    out = pathlib.Path(options.out)
    if not (out / "model.keras").exists():
        stop(f"there is no model in --out {out} to ask; run this without --ask first")
    characters = json.loads((out / "characters.json").read_text(encoding="utf-8"))
    number = {character: index for index, character in enumerate(characters)}
    text = options.ask
    if BLANK not in text:
        stop(f"--ask has no {BLANK} to fill in")
    unknown = sorted(set(text) - set(characters) - {BLANK})
    if unknown:
        stop(f"--ask has characters that the model has never seen: {unknown}")
    filled, sure = fill(keras.models.load_model(out / "model.keras"), number, text, 0)
    print(f"{filled}\n({', '.join(f'{chance:.0%}' for chance in sure)})")
    return filled


def draw(line, found, characters, path, title):
    """Draws a line of text and below each character the five best guesses at it.

    Args:
        line: Ids of the line, each hidden in turn.
        found: The chance of each character at each place, `(T, V)`.
        characters: The character of each id.
        path: Where the picture goes.
        title: What stands above it.
    """
    from matplotlib.figure import Figure

    shown = {"\n": "↵", " ": "␣"}
    best = np.argsort(-found, axis=-1)[:, :5]  # (T, 5)
    shades = np.take_along_axis(found, best, axis=-1).T
    figure = Figure(figsize=(0.26 * len(line) + 1.2, 3.2), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shades, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    for place, truth in enumerate(line):
        for rank, guess in enumerate(best[place]):
            character = characters[guess]
            right, dark = guess == truth, shades[rank, place] > 0.5
            axes.text(
                place,
                rank,
                shown.get(character, character),
                ha="center",
                va="center",
                family="monospace",
                weight="bold" if right else "normal",
                # Right ones stand out, and all can be read on light and on dark.
                color=COLORS[bool(right)][int(dark)],
                alpha=1 if right or shades[rank, place] > 0.05 else 0.35,
            )
    axes.set_xticks(
        range(len(line)),
        [shown.get(characters[i], characters[i]) for i in line],
        family="monospace",
        weight="bold",
    )
    axes.xaxis.tick_top()
    axes.set_yticks(range(5), ["1st guess", "2nd", "3rd", "4th", "5th"])
    axes.set_xlabel("above: the text; black or white: right; red or orange: wrong")
    axes.tick_params(length=0)
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_label("chance given")
    axes.set_title(title, fontsize="medium")
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
    if options.ask is not None:
        return answer(options)
    keep_freed_memory()
    text, name = read_text(options.text)
    need_enough(text, name, options.window)
    need("matplotlib")
    out = writable_folder(options.out)

    # The text, as numbers. The last tenth is not trained on.
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], dtype="int32")
    first = int(0.9 * len(ids))
    mask_id = len(characters)
    sha = hashlib.sha256(text.encode("utf-8")).hexdigest()
    source = (
        f"{name}, Python {platform.python_version()}, {len(text):,} characters "
        f"({len(characters)} different), SHA-256 {sha}"
    )
    print(source)

    # The model.
    keras.utils.set_random_seed(options.seed)
    try:
        model = build(options, len(characters))
    except ValueError as error:
        stop(str(error).rstrip("."))
    compile_for_training(model, options)
    print(
        f"{model.count_params():,} parameters in {options.layers} layers, keras "
        f"{keras.__version__} on {keras.backend.backend()}"
    )

    # Training. Only hidden characters count.
    started, worked = time.perf_counter(), time.process_time()
    epochs = max(1, options.steps // 100)
    history = model.fit(
        masked_windows(
            ids[:first], mask_id, options.window, options.batch, options.seed
        ),
        steps_per_epoch=options.steps // epochs,
        epochs=epochs,
        shuffle=False,  # the windows come in random order already
        verbose=2,
    ).history
    seconds = time.perf_counter() - started
    # Of all cores together, and of nobody else: what else runs doesn't count.
    processor_seconds = time.process_time() - worked
    if not math.isfinite(history["loss"][-1]):
        stop("the loss is not a number any more; lower the --learning-rate")

    # Saved, and back.
    model.save(out / "model.keras")
    (out / "characters.json").write_text(json.dumps(characters), encoding="utf-8")
    loaded = keras.models.load_model(out / "model.keras")
    characters = json.loads((out / "characters.json").read_text(encoding="utf-8"))
    inputs, places, hidden = hide(ids, first, options.window, mask_id)
    some = np.resize(inputs, (64, options.window))
    difference = float(
        np.max(np.abs(model.predict_on_batch(some) - loaded.predict_on_batch(some)))
    )
    print(f"largest difference of the reloaded model's logits: {difference}")

    # What it learnt, on the blanks of the held-out tenth, and what counting knows.
    answers = ids[places[hidden]]
    shares = {"encoder": top(chances(loaded, inputs, mask_id)[hidden], answers)}
    guesses = counting_guesses(ids, first, places[hidden], len(characters))
    shares |= {guess: top(scores, answers) for guess, scores in guesses.items()}
    for guess, (one, five) in shares.items():
        print(f"{guess:>11}: top-1 {one:.4f}, top-5 {five:.4f}")
    print(
        f"{len(answers):,} blanks in the held-out tenth of {source}; {seconds:.0f} s "
        "of training"
    )

    # A line of the held-out tenth, each of whose characters is hidden in turn.
    width = min(options.window, 44)
    start = first + (len(ids) - first) // 3
    start = min(start, len(ids) - options.window)
    row = ids[start : start + options.window]
    each = np.repeat(row[None], width, axis=0)
    offset = (options.window - width) // 2
    line = np.arange(width)
    each[line, offset + line] = mask_id
    found = chances(loaded, each, mask_id)[line, offset + line]
    draw(
        row[offset : offset + width],
        found,
        characters,
        out / "guesses.png",
        f"unseen text, one character hidden at a time; top-1 {shares['encoder'][0]:.3f}"
        f" with 15 % hidden, bigram {shares['bigram'][0]:.3f}; seed {options.seed}, "
        f"{keras.backend.backend()}",
    )

    result = {
        "example": "masked_lm",
        "seed": options.seed,
        "top_1": {guess: one for guess, (one, _) in shares.items()},
        "top_5": {guess: five for guess, (_, five) in shares.items()},
        "held_out": len(answers),
        "reload_difference": difference,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "parameters": model.count_params(),
        "text": name,
        "text_characters": len(text),
        "text_sha256": sha,
        "data": f"{name} of Python {platform.python_version()}",
        "python": platform.python_version(),
        "keras": keras.__version__,
        "keras_tx": tx.__version__,
        "backend": keras.backend.backend(),
        "options": vars(options),
        "history": history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"model.keras, characters.json, guesses.png, result.json in {out}")
    return result


if __name__ == "__main__":
    main()
