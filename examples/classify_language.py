"""Tells fourteen languages apart by their characters, on the names of emoji.

    python examples/classify_language.py                       # train, measure, draw
    python examples/classify_language.py --ask "dank je wel"   # then ask the model
    python examples/classify_language.py --languages en de fr --epochs 10
    KERAS_BACKEND=jax python examples/classify_language.py     # or torch

One story, top to bottom: read how the package emoji names each emoji in fourteen
languages, hold out a fifth of the emoji, cut names into runs of characters, train
encoders of these to tell of which language a name is, let them vote with a count,
measure all on the emoji held out, beside a logistic regression, draw which languages
are taken for which, save, and load again.

What is held out. Many emoji differ in skin tone alone, and their names in the words
for it. So names count once for each base emoji and language: skin tones are stripped,
and the name is that of the emoji without one, where there is such a one. A random
fifth of the base emoji, the seed says which, is held out in all languages, so that no
name that is measured has a sibling in training. Some names are the same in several
languages, as those of many countries; nobody can tell these apart, and they count like
any other. All are in small letters: in the package, capitals tell English and Russian
from the rest, which is a habit of who wrote the files. Nothing is chosen by a look at
the emoji held out.

What the encoders see. A run of up to four characters within a word that several names
hold is a token. A name is the set of its runs, which overlap, so that they tell their
order themselves: the encoders need no position. While training, each name shows a few
of its runs, others each time, so that none is learnt by heart. A few small encoders,
alike but for the random numbers that they start with, each give an opinion.

What counts add. An encoder can learn nothing lasting of a run that it meets once, and
most runs of up to six characters stand in one name only. A count can: how often each
language has each run (naive Bayes). So a count has an opinion too, which weighs as much
as that of each encoder. The count is a layer of the model like the others. The answer
is what encoders and count come to together, and is right more often than any of them.
"""

import argparse
import collections
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
TOKEN_RUN, COUNTED_RUN = 4, 6  # characters of the longest run, for encoders and count
HELD_BY = 4  # names, at least, if a run is to be a token
# What a run counts that a language never had; chosen on a fifth of the emoji that seed
# 0 trains on.
NEVER = 0.03
SHOWN = 0.4  # share of the runs of a name that training shows
# Tokens: padding, then for characters that are no token the neighbourhoods of 256
# characters in Unicode where they are, then the runs.
PAD, NEIGHBOURHOODS = 0, 512
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
    add("--encoders", **count, default=3, help="that give an opinion")
    add("--layers", **count, default=1, help="blocks of each encoder")
    add("--heads", **count, default=4, help="heads of each block")
    add("--dim", **count, default=64, help="features of a run of characters")

    add = parser.add_argument_group("training").add_argument
    add("--length", type=at_least(4), metavar="N", default=32, help="most runs shown")
    add("--epochs", **count, default=8, help="times that each name is seen")
    add("--batch", **count, default=128, help="names in a step")
    add("--learning-rate", type=above_zero, metavar="X", default=3e-3, help="its peak")
    add("--dropout", type=share, metavar="X", default=0.3, help="before classes")
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
            # Only English and Russian have capitals, in emoji, not as languages.
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


def runs_of(text, longest):
    """Returns the runs of characters in the words of a text, each where it stands."""
    # A space on both sides tells starts and ends of words. No run holds two words,
    # for which words stand side by side is learnt by heart and not met again.
    words = [f" {word} " for word in text.split()]
    return [
        word[start : start + length]
        for word in words
        for start in range(len(word))
        for length in range(1, min(longest, len(word) - start) + 1)
        if word[start : start + length] != " "
    ]


def number_runs(texts, longest, held_by):
    """Returns `{run: token}` of the runs that enough texts hold."""
    counts = collections.Counter()
    for text in texts:
        counts.update(set(runs_of(text, longest)))
    known = sorted(run for run, count in counts.items() if count >= held_by)
    return {run: 1 + NEIGHBOURHOODS + index for index, run in enumerate(known)}


def opinion_of_counts(texts, answers, tokens_of, num_languages):
    """Returns what each token says for each language, `(tokens, languages)`.

    It is log p(token | language); padding and neighbourhoods say nothing.
    """
    table = np.zeros((1 + NEIGHBOURHOODS + len(tokens_of), num_languages))
    for text, answer in zip(texts, answers, strict=True):
        for run in runs_of(text, COUNTED_RUN):
            table[tokens_of[run], answer] += 1
    table[1 + NEIGHBOURHOODS :] += NEVER
    table[1 + NEIGHBOURHOODS :] = np.log(
        table[1 + NEIGHBOURHOODS :] / table.sum(axis=0, keepdims=True)
    )
    return table.astype("float32")


def read(texts, tokens_of, longest, rng=None, length=None):
    """Returns the tokens of texts `(B, T)`, with padding behind the shorter ones.

    A run that is no token is left out; a single character that is none becomes its
    neighbourhood, for a rare one is Chinese or Korean all the same.

    Args:
        texts: The texts.
        tokens_of: The token of each run.
        longest: Characters of the longest run.
        rng: Generator that chooses the runs to show, in training. Without it, all.
        length: T, if not that of the longest text. At most so many runs are shown.
    """
    found = []
    for text in texts:
        tokens = []
        for run in runs_of(text, longest):
            if run in tokens_of:
                tokens.append(tokens_of[run])
            elif len(run) == 1:
                tokens.append(1 + ord(run) // 256 % NEIGHBOURHOODS)
        if rng is not None:
            shown = max(1, round(SHOWN * len(tokens)))
            tokens = rng.permutation(tokens)[: min(shown, length)]
        found.append(tokens[:length])
    rows = np.full((len(found), length or max(map(len, found))), PAD, "int32")
    for row, tokens in zip(rows, found, strict=True):
        row[: len(tokens)] = tokens
    return rows


def some_words(name, rng):
    """Returns a run of the words of a name, at least one of them."""
    words = name.split(" ")
    if len(words) == 1:
        return name
    first, behind = sorted(rng.choice(len(words) + 1, 2, replace=False))
    return " ".join(words[first:behind])


def batches(names, answers, tokens_of, options):
    """Yields tokens, and for each encoder the language as a one-hot row, endlessly.

    Half of the names come in part, which is as much in their language.
    """
    rng = np.random.default_rng(options.seed)
    one_hot = np.eye(len(options.languages), dtype="float32")[answers]
    one_hot = np.repeat(one_hot[:, None], options.encoders, axis=1)
    while True:
        order = rng.permutation(len(names))
        for at in range(0, len(order) - options.batch + 1, options.batch):
            pick = order[at : at + options.batch]
            texts = [
                some_words(names[i], rng) if rng.random() < 0.5 else names[i]
                for i in pick
            ]
            rows = read(texts, tokens_of, TOKEN_RUN, rng, options.length)
            yield rows, one_hot[pick]


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options, num_tokens):
    """Returns the encoders: tokens `(B, T)` to logits `(B, encoders, languages)`.

    They share nothing but what they read.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    opinions = [
        tx.encoder(
            num_tokens,
            options.dim,
            options.layers,
            options.heads,
            output="classes",
            num_classes=len(options.languages),
            position=None,
            pad_id=PAD,
            # Runs that are not shown are dropout enough within.
            pooled_dropout=options.dropout,
            # Narrow kernels want larger values than GPT-2's 0.02 to start with.
            init_stddev=0.05,
            name=f"encoder_{index}",
        )(tokens)
        for index in range(options.encoders)
    ]
    return keras.Model(tokens, keras.ops.stack(opinions, axis=1), name="encoders")


def with_count(encoders, table):
    """Returns a model of what encoders and the count read to all their opinions.

    Its inputs are tokens `(B, T)` for the encoders and `(B, R)` for the count, its
    output logits `(B, encoders + 1, languages)`, with those of the count behind.
    """
    tokens = keras.Input((None,), dtype="int32", name="tokens")
    counted = keras.Input((None,), dtype="int32", name="counted")
    count = keras.layers.Embedding(*table.shape, trainable=False, name="count")
    says = keras.ops.sum(count(counted), axis=1, keepdims=True)
    count.set_weights([table])
    both = keras.ops.concatenate([encoders(tokens), says], axis=1)
    return keras.Model([tokens, counted], both, name="language")


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
    optimizer.exclude_from_weight_decay(var_names=["scale"])
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


def opinions(model, texts, tokens_of, counted_of):
    """Returns the logarithms of the chances that each opinion gives, `(B, N, L)`."""
    rows = read(texts, tokens_of, TOKEN_RUN), read(texts, counted_of, COUNTED_RUN)
    logits = model.predict(rows, batch_size=64, verbose=0).astype("float64")
    logits -= logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def agree(logs):
    """Returns the chances that several opinions come to, `(B, L)`.

    All weigh the same, as logarithms: what one of them excludes is unlikely.
    """
    total = logs.mean(axis=1)
    total = np.exp(total - total.max(axis=-1, keepdims=True))
    return total / total.sum(axis=-1, keepdims=True)


def counting_baseline(trained_on, held_out):
    """Returns the accuracy of a logistic regression on runs of characters.

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
    texts = [text.strip().lower() for text in options.ask]
    found = agree(opinions(model, texts, kept["tokens_of"], kept["counted_of"]))
    for text, row in zip(options.ask, found, strict=True):
        best = np.argsort(-row)[:3]
        words = ", ".join(f"{LANGUAGES[languages[i]]} {row[i]:.0%}" for i in best)
        print(f"{text}: {words}")
    return [languages[i] for i in found.argmax(axis=-1)]


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
    tokens_of = number_runs(texts, TOKEN_RUN, HELD_BY)
    keras.utils.set_random_seed(options.seed)
    try:
        encoders = build(options, 1 + NEIGHBOURHOODS + len(tokens_of))
    except ValueError as error:
        stop(str(error).rstrip("."))
    steps_per_epoch = len(texts) // options.batch
    compile_for_training(encoders, options, steps_per_epoch * options.epochs)
    print(
        f"{len(tokens_of):,} runs of characters; {encoders.count_params():,} "
        f"parameters in {options.encoders} encoders, keras {keras.__version__} on "
        f"{keras.backend.backend()}"
    )

    # Training.
    started, worked = time.perf_counter(), time.process_time()
    history = encoders.fit(
        batches(texts, answers, tokens_of, options),
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

    # A count joins in.
    counted_of = number_runs(texts, COUNTED_RUN, 1)
    table = opinion_of_counts(texts, answers, counted_of, len(languages))
    model = with_count(encoders, table)

    # Saved, and back.
    model.save(out / "model.keras")
    kept = {
        "languages": languages,
        "tokens_of": tokens_of,
        "counted_of": counted_of,
    }
    (out / "languages.json").write_text(json.dumps(kept), encoding="utf-8")
    loaded = keras.models.load_model(out / "model.keras")
    some, again = (
        opinions(each, unseen[:512], tokens_of, counted_of) for each in (model, loaded)
    )
    difference = float(np.max(np.abs(some - again)))
    print(f"largest difference of the reloaded model's opinions: {difference}")

    # What it learnt, on emoji that it has not seen.
    logs = opinions(loaded, unseen, tokens_of, counted_of)
    guesses = agree(logs).argmax(axis=-1)
    accuracy = float(np.mean(guesses == unseen_answers))
    *of_each, of_count = np.mean(
        logs.argmax(axis=-1) == unseen_answers[:, None], axis=0
    ).tolist()
    together = agree(logs[:, :-1]).argmax(axis=-1)
    of_encoders = float(np.mean(together == unseen_answers))
    baseline = counting_baseline(trained_on, held_out)
    mixed_up = confusion(unseen_answers, guesses, len(languages))
    print(
        f"accuracy {accuracy:.4f} on {len(unseen):,} names of unseen emoji; a logistic "
        f"regression on runs of characters has {baseline:.4f}; by themselves, the "
        f"count has {of_count:.4f}, the encoders "
        f"{', '.join(f'{share:.4f}' for share in of_each)} and together "
        f"{of_encoders:.4f}; {seconds:.0f} s of training"
    )
    draw(
        mixed_up,
        languages,
        out / "confusion.png",
        f"accuracy {accuracy:.3f} on {len(unseen):,} names of unseen emoji, seed "
        f"{options.seed}, {keras.backend.backend()}",
    )

    result = {
        "example": "classify_language",
        "seed": options.seed,
        "accuracy": accuracy,
        "accuracy_of_each": of_each,
        "accuracy_of_encoders": of_encoders,
        "accuracy_of_count": of_count,
        "baseline": baseline,
        "held_out": len(unseen),
        "confusion": mixed_up.tolist(),
        "reload_difference": difference,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "parameters": encoders.count_params(),
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
