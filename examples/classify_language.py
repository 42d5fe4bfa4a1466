"""Tells fourteen languages apart by their characters, on the names of emoji.

    python examples/classify_language.py                       # train, measure, draw
    python examples/classify_language.py --ask "dank je wel"   # then ask the model
    python examples/classify_language.py --languages en de fr --epochs 10
    KERAS_BACKEND=jax python examples/classify_language.py     # or torch

One story, top to bottom: read how the package emoji names each emoji in fourteen
languages, hold out a fifth of the emoji, make an encoder of embeddings of one's own
and of blocks, train it to tell of which language a name is, measure it on the emoji
held out, beside a logistic regression on the same runs of characters, draw which
languages it takes for which, save, and load again.

What is held out. Many emoji differ in skin tone alone, and their names in the words
for it. So names count once for each base emoji and language: skin tones are stripped,
and the name is that of the emoji without one, where there is such a one. A random
fifth of the base emoji, the seed says which, is held out in all languages, so that no
name that is measured has a sibling in training. Some names are the same in several
languages, as those of many countries; nobody can tell these apart, and they count like
any other. Nothing is chosen by a look at the emoji held out.
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

LANGUAGES = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fa": "Persian",
    "fr": "French",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "pt": "Portuguese",
    "ru": "Russian",
    "tr": "Turkish",
    "zh": "Chinese",
}
LONGEST_RUN = 4  # characters
BUCKETS = 2**13  # of runs of one length; bucket 0 is padding
ILLEGIBLE = 0.2  # share of the runs that training hides
SKIN_TONES = dict.fromkeys(range(0x1F3FB, 0x1F400))
VARIATION = {0xFE0F: None}  # asks for a picture in colour; the emoji is the same


# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="classify_language.py",
        description="Trains an encoder to tell of which language a name is, measures "
        "it on names of emoji that it has not seen, saves it, and draws what it "
        "mixes up. The backend is chosen by KERAS_BACKEND (tensorflow, jax or torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    unset = argparse.SUPPRESS
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    add("--out", metavar="FOLDER", default="runs/language", help="where results go")
    add(
        "--languages",
        nargs="+",
        choices=LANGUAGES,
        metavar="CODE",
        default=unset,
        help="to tell apart; without it, all of " + " ".join(LANGUAGES),
    )

    add = parser.add_argument_group("asking, without training").add_argument
    add(
        "--ask",
        nargs="+",
        metavar="TEXT",
        default=unset,
        help="texts, with the model that an earlier run left in --out",
    )

    add = parser.add_argument_group("size").add_argument
    add("--layers", **count, default=2, help="blocks")
    add("--heads", **count, default=4, help="heads of each block")
    add("--dim", **count, default=64, help="features of a character")

    add = parser.add_argument_group("training").add_argument
    add("--length", type=at_least(4), metavar="N", default=24, help="characters seen")
    add("--epochs", **count, default=10, help="times that each name is seen")
    add("--batch", **count, default=128, help="names in a step")
    add("--learning-rate", type=above_zero, metavar="X", default=3e-3, help="its peak")
    add("--dropout", type=share, metavar="X", default=0.2, help="of each branch")
    add("--seed", type=at_least(0), metavar="N", default=0, help="of all chance")
    without = {"languages": list(LANGUAGES), "ask": None}
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


def share(text):
    """Parses a number from 0 to just below 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to below 1")
    return number


def stop(problem):
    """Ends the program with one line and a non-zero exit."""
    sys.exit(f"classify_language.py: {problem}.")


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
# The names
# ----------------------------------------------------------------------------


def read_names(languages):
    """Returns `{base emoji: {language: name}}`."""
    import importlib.resources

    folder = importlib.resources.files("emoji") / "unicode_codes"
    names = {}
    for language in languages:
        file = "emoji.json" if language == "en" else f"emoji_{language}.json"
        entries = json.loads((folder / file).read_text(encoding="utf-8"))
        if language == "en":
            entries = {emoji: entry["en"] for emoji, entry in entries.items()}
        # Emoji without a skin tone first, so that their names are taken.
        for emoji in sorted(entries, key=lambda e: e.translate(SKIN_TONES) != e):
            base = emoji.translate(SKIN_TONES | VARIATION)
            # English alone has capitals, in emoji, not as a language.
            name = entries[emoji].strip(":").replace("_", " ").lower()
            names.setdefault(base, {}).setdefault(language, name)
    return names


def split(names, seed):
    """Returns `(trained on, held out)`, each a list of `(name, language)`.

    The fifth of the base emoji that is held out is held out in all languages.
    """
    order = np.random.default_rng(seed).permutation(sorted(names))
    fifth = len(order) // 5
    return tuple(
        [(name, language) for base in bases for language, name in names[base].items()]
        for bases in (order[fifth:].tolist(), order[:fifth].tolist())
    )


def read(texts, length):
    """Returns for each character of a text the runs of characters that end with it.

    There are too many runs for a table of all, and nobody knows those of new texts.
    So a hash puts each run into one of a few thousand buckets, which it shares with a
    few others; what the others mean is smoothed out by its neighbours. The first
    bucket is that of the 256 characters around a character in Unicode: a rare one is
    Chinese or Korean all the same.

    Returns:
        Buckets `(B, length, 1 + LONGEST_RUN)`, 0 behind the end of a text.
    """
    codes = np.zeros((len(texts), length + LONGEST_RUN - 1), "uint64")
    for row, text in zip(codes, texts, strict=True):
        # A space on both sides tells starts and ends of words.
        numbers = [ord(character) for character in f" {text} "[:length]]
        row[LONGEST_RUN - 1 :][: len(numbers)] = numbers
    own = codes[:, LONGEST_RUN - 1 :]
    rows = np.zeros((len(texts), length, 1 + LONGEST_RUN), "int32")
    rows[..., 0] = 1 + own // 256 % (BUCKETS - 1)
    key = np.zeros((len(texts), length), "uint64")
    for back in range(LONGEST_RUN):
        start = LONGEST_RUN - 1 - back
        key = key * np.uint64(1_000_003) + codes[:, start : start + length]
        # The highest bits of a product with a large odd number are the most mixed.
        mixed = key * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
        rows[..., 1 + back] = 1 + mixed % (BUCKETS - 1)
    rows[own == 0] = 0
    return rows


def some_words(name, rng):
    """Returns a run of the words of a name, or a piece of its only one."""
    words = name.split(" ")
    if len(words) == 1:
        return name
    first, behind = sorted(rng.choice(len(words) + 1, 2, replace=False))
    return " ".join(words[first:behind])


def batches(names, answers, batch, length, seed):
    """Yields runs and languages as one-hot rows, without an end.

    Half of the names come in part, which is as much in their language, and some runs
    are illegible, so that the model doesn't learn the names by heart.
    """
    rng = np.random.default_rng(seed)
    one_hot = np.eye(answers.max() + 1, dtype="float32")[answers]
    while True:
        order = rng.permutation(len(names))
        for at in range(0, len(order) - batch + 1, batch):
            pick = order[at : at + batch]
            texts = [
                some_words(names[i], rng) if rng.random() < 0.5 else names[i]
                for i in pick
            ]
            rows = read(texts, length)
            rows[rng.random(rows.shape) < ILLEGIBLE] = 0
            yield rows, one_hot[pick]


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options):
    """Returns a model of runs `(B, T, 5)` to logits `(B, languages)`.

    Each character starts as the sum of what the runs that end with it say, a table
    for each length; blocks let characters see one another; their mean is told apart.
    All of it is Keras, but for the blocks.
    """
    tables = ["surroundings", *(f"runs_of_{n + 1}" for n in range(LONGEST_RUN))]
    runs = keras.Input((None, len(tables)), dtype="int32", name="runs")
    x = keras.layers.Add(name="characters")(
        [
            keras.layers.Embedding(BUCKETS, options.dim, mask_zero=True, name=name)(
                runs[..., column]
            )
            for column, name in enumerate(tables)
        ]
    )
    x = keras.layers.Dropout(options.dropout, name="characters_dropout")(x)
    for index in range(options.layers):
        x = tx.TransformerBlock(
            attention=tx.MultiHead(options.heads, position=tx.RotaryPosition()),
            feed_forward=2 * options.dim,
            dropout=options.dropout,
            name=f"block_{index}",
        )(x)
    x = keras.layers.LayerNormalization(epsilon=1e-5, name="final_norm")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pooling")(x)  # of characters only
    x = keras.layers.Dropout(options.dropout, name="pooled_dropout")(x)
    logits = keras.layers.Dense(len(options.languages), name="languages")(x)
    return keras.Model(runs, logits, name="language")


def compile_for_training(model, options, steps):
    """AdamW under warm-up, cosine decay and clipping, on softened targets."""
    warmup = max(1, steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(1, steps - warmup),
    )
    optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.1, global_clipnorm=1.0)
    optimizer.exclude_from_weight_decay(var_names=["bias", "beta", "gamma"])
    model.compile(
        optimizer,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=["accuracy"],
        # Keras turns XLA off for TensorFlow on a machine without a GPU, where it
        # makes a step faster. On torch it would mean `torch.compile`, which needs a
        # C++ compiler.
        jit_compile=keras.backend.backend() != "torch",
    )


# ----------------------------------------------------------------------------
# What it learnt
# ----------------------------------------------------------------------------


def counting_baseline(trained_on, held_out):
    """Returns the accuracy of a logistic regression on counts of characters.

    Runs of one to four characters, weighed by how few names hold them.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    model = make_pipeline(
        TfidfVectorizer(analyzer="char", ngram_range=(1, 4), sublinear_tf=True),
        LogisticRegression(C=10, max_iter=1000),
    )
    model.fit(*zip(*trained_on, strict=True))
    return float(model.score(*zip(*held_out, strict=True)))


def confusion(answers, guesses, count):
    """Returns how often each language (row) is taken for each (column)."""
    table = np.zeros((count, count), int)
    np.add.at(table, (answers, guesses), 1)
    return table


def answer(options):
    """Answers `--ask` with the model of an earlier run."""
    out = pathlib.Path(options.out)
    if not (out / "model.keras").exists():
        stop(f"there is no model in --out {out} to ask; run this without --ask first")
    kept = json.loads((out / "languages.json").read_text(encoding="utf-8"))
    languages = kept["languages"]
    for text in options.ask:
        if not text.strip():
            stop("--ask holds an empty text, which is of no language")
        if not any(character.isalpha() for character in text):
            stop(f"--ask {text!r} has no letter, and is of no language")
    model = keras.models.load_model(out / "model.keras")
    length = max(kept["length"], *(len(text) + 2 for text in options.ask))
    texts = [text.strip().lower() for text in options.ask]
    logits = np.asarray(model.predict_on_batch(read(texts, length)))
    chances = np.exp(logits - logits.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    for text, row in zip(options.ask, chances, strict=True):
        best = np.argsort(-row)[:3]
        words = ", ".join(f"{LANGUAGES[languages[i]]} {row[i]:.0%}" for i in best)
        print(f"{text}: {words}")
    return [languages[i] for i in chances.argmax(axis=-1)]


def draw(table, languages, path, title):
    """Draws which language is taken for which.

    Args:
        table: How often each language (row) is taken for each (column).
        languages: Their codes.
        path: Where the picture goes.
        title: What stands above it.
    """
    from matplotlib.figure import Figure

    shares = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    size = 2.2 + 0.42 * len(languages)
    figure = Figure(figsize=(size + 1, size), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, of_row in enumerate(table):
        for column, count in enumerate(of_row):
            if count:
                axes.text(
                    column,
                    row,
                    count,
                    ha="center",
                    va="center",
                    fontsize="small",
                    color="white" if shares[row, column] > 0.5 else "black",
                )
    names = [LANGUAGES[language] for language in languages]
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("taken for")
    axes.set_ylabel("is")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02)
    bar.set_label("share of a language's names")
    axes.set_title(title, fontsize="medium")
    figure.savefig(path, dpi=130)


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
    languages = options.languages = sorted(set(options.languages))
    if len(languages) < 2:
        stop("--languages needs two at least to tell apart")
    need("emoji", "sklearn", "matplotlib")
    out = writable_folder(options.out)
    import emoji

    # Names, and the languages that they are in.
    names = read_names(languages)
    trained_on, held_out = split(names, options.seed)
    texts = [name for name, _ in trained_on]
    answers = np.array([languages.index(language) for _, language in trained_on])
    unseen = [name for name, _ in held_out]
    unseen_answers = np.array([languages.index(language) for _, language in held_out])
    if options.batch > len(texts):
        stop(f"--batch {options.batch} is more than the {len(texts)} names there are")
    print(
        f"emoji {emoji.__version__}: {len(names):,} base emoji in {len(languages)} "
        f"languages, {len(texts):,} names to train on, {len(unseen):,} held out"
    )

    # The model.
    keras.utils.set_random_seed(options.seed)
    try:
        model = build(options)
    except ValueError as error:
        stop(str(error).rstrip("."))
    steps_per_epoch = len(texts) // options.batch
    compile_for_training(model, options, steps_per_epoch * options.epochs)
    print(
        f"{model.count_params():,} parameters in {options.layers} layers, keras "
        f"{keras.__version__} on {keras.backend.backend()}"
    )

    # Training.
    started, worked = time.perf_counter(), time.process_time()
    history = model.fit(
        batches(texts, answers, options.batch, options.length, options.seed),
        steps_per_epoch=steps_per_epoch,
        epochs=options.epochs,
        shuffle=False,  # the names come in random order already
        verbose=2,
    ).history
    seconds = time.perf_counter() - started
    # Of all cores together, and of nobody else: what else runs doesn't count.
    processor_seconds = time.process_time() - worked
    if not math.isfinite(history["loss"][-1]):
        stop("the loss is not a number any more; lower the --learning-rate")

    # Saved, and back.
    model.save(out / "model.keras")
    kept = {
        "languages": languages,
        "length": options.length,
    }
    (out / "languages.json").write_text(json.dumps(kept), encoding="utf-8")
    loaded = keras.models.load_model(out / "model.keras")
    length = max(len(name) for name in unseen) + 2
    rows = read(unseen, length)
    logits = loaded.predict(rows, batch_size=512, verbose=0)
    before = model.predict(rows, batch_size=512, verbose=0)
    difference = float(np.max(np.abs(before - logits)))
    print(f"largest difference of the reloaded model's logits: {difference}")

    # What it learnt, on emoji that it has not seen.
    guesses = logits.argmax(axis=-1)
    accuracy = float(np.mean(guesses == unseen_answers))
    baseline = counting_baseline(trained_on, held_out)
    table = confusion(unseen_answers, guesses, len(languages))
    print(
        f"accuracy {accuracy:.4f} on {len(unseen):,} names of unseen emoji; a logistic "
        f"regression on counts of characters has {baseline:.4f}; {seconds:.0f} s of "
        "training"
    )
    draw(
        table,
        languages,
        out / "confusion.png",
        f"accuracy {accuracy:.3f} on {len(unseen):,} names of unseen emoji, seed "
        f"{options.seed}, {keras.backend.backend()}",
    )

    result = {
        "example": "classify_language",
        "seed": options.seed,
        "accuracy": accuracy,
        "baseline": baseline,
        "held_out": len(unseen),
        "confusion": table.tolist(),
        "reload_difference": difference,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "parameters": model.count_params(),
        "data": f"emoji {emoji.__version__}",
        "python": platform.python_version(),
        "keras": keras.__version__,
        "keras_tx": tx.__version__,
        "backend": keras.backend.backend(),
        "options": vars(options),
        "history": history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"model.keras, languages.json, confusion.png, result.json in {out}")
    return result


if __name__ == "__main__":
    main()
