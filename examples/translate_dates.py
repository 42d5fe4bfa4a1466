"""Reads dates as people write them around the world, and writes them as ISO 8601.

    python examples/translate_dates.py                         # train, measure, draw
    python examples/translate_dates.py --ask "3. März 2021"    # then ask the model
    python examples/translate_dates.py --ask 3/4/21 --locale en_US
    KERAS_BACKEND=jax python examples/translate_dates.py       # or torch

One story, top to bottom: let the package Babel write dates in many locales, train an
encoder-decoder to read them, let it write the dates that it has not seen, token by
token, count those that are right in all ten characters, draw which characters of the
input each character of the output asked for, save, and load again.

What it is given. Days from 1950 to 2049, in four formats from short to full, as the
locale has them, behind one token that names the locale, for 3/4/21 is in March in one
place and in April in another. Three rows in ten don't say which locale it is. One row
in thirty holds a day that its month doesn't have, 30 February, which is to be copied
as it stands, so that whoever asks can be told that there is no such day.

How it is measured. A tenth of the days is held out in every locale and format.
"Exact" is the share of dates, of days held out, that come out right to the last
character, by greedy decoding. Beside it stands the same share with the locale not
told, and for locales of which no date was trained on.
"""

import argparse
import ctypes
import datetime
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

# Locales of Babel that are learnt, and others that are only measured.
# fmt: off
SEEN = [
    "cs", "da", "de", "el", "en_GB", "en_US", "es", "fi", "fr", "hr", "hu", "id", "it",
    "ja", "ko", "nl", "pl", "pt", "ro", "ru", "sv", "tr", "uk", "vi", "zh",
]
# fmt: on
UNSEEN = ["af", "bg", "ca", "en_CA", "es_MX", "fr_CH", "gl", "nb", "pt_PT", "sk"]
FORMATS = ("short", "medium", "long", "full")
FIRST_YEAR, LAST_YEAR = 1950, 2049  # so that two digits say which year

# Source tokens: these, then one for each locale, then characters.
PAD, UNKNOWN, ANYWHERE = range(3)
LENGTH = 40  # source tokens in a row

# Target tokens: padding, the start, then these characters.
START = 1
WRITES = "0123456789-"
ISO_LENGTH = len("2021-03-04")


# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="translate_dates.py",
        description="Trains an encoder-decoder to read dates in many locales and to "
        "write them as ISO 8601, measures it on days that it has not seen, saves "
        "it, and draws what it attends to. The backend is chosen by KERAS_BACKEND "
        "(tensorflow, jax or torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    unset = argparse.SUPPRESS
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    add("--out", metavar="FOLDER", default="runs/dates", help="where results go")
    add(
        "--locales",
        nargs="+",
        metavar="NAME",
        default=unset,
        help=f"to learn; without it, the {len(SEEN)} in this file",
    )

    add = parser.add_argument_group("asking, without training").add_argument
    add(
        "--ask",
        nargs="+",
        metavar="DATE",
        default=unset,
        help="dates to read, with the model that an earlier run left in --out",
    )
    add("--locale", metavar="NAME", default=unset, help="in which they are written")

    add = parser.add_argument_group("size").add_argument
    add("--encoder-layers", **count, default=2, help="blocks that read")
    add("--decoder-layers", **count, default=1, help="blocks that write")
    add("--heads", **count, default=4, help="heads of each block")
    add("--dim", **count, default=96, help="features of a token")

    add = parser.add_argument_group("training").add_argument
    add("--steps", **count, default=1200, help="updates of the weights")
    add("--batch", **count, default=64, help="dates in a step")
    add("--learning-rate", type=above_zero, metavar="X", default=3e-3, help="its peak")
    add("--test", **count, default=2000, help="dates in each measure")
    add("--seed", type=at_least(0), metavar="N", default=0, help="of all chance")
    without = {"locales": SEEN, "ask": None, "locale": None}
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
    sys.exit(f"translate_dates.py: {problem}.")


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


def need_locales(names):
    import babel

    for name in names:
        try:
            babel.Locale.parse(name)
        except (ValueError, babel.UnknownLocaleError):
            stop(f"--locales {name} is no locale of Babel, such as de or en_GB")


# ----------------------------------------------------------------------------
# Dates, as people write them
# ----------------------------------------------------------------------------


class Said(datetime.date):
    """A date that may name a day which its month doesn't have, for Babel to write."""

    def __new__(cls, year, month, day):
        date = super().__new__(cls, year, month, min(day, 28))
        date.said = day
        return date

    @property
    def day(self):
        return self.said


def write_date(year, month, day, locale, form):
    """Returns a date as the people of a locale write it."""
    from babel.dates import format_date

    text = format_date(Said(year, month, day), form, locale)
    # Narrow and unbreakable spaces are spaces, and marks of direction are not
    # written by hand.
    return clean(text)


def clean(text):
    """Returns a text with plain spaces, and without marks of direction."""
    return " ".join(text.replace("\u200e", "").replace("\u200f", "").split())


def split_days(seed):
    """Returns `(trained on, held out)`, each `(year, month, day)` a row."""
    first = datetime.date(FIRST_YEAR, 1, 1).toordinal()
    last = datetime.date(LAST_YEAR, 12, 31).toordinal()
    dates = map(datetime.date.fromordinal, range(first, last + 1))
    days = np.array([(date.year, date.month, date.day) for date in dates])
    order = np.random.default_rng(seed).permutation(len(days))
    tenth = len(days) // 10
    return days[order[tenth:]], days[order[:tenth]]


def impossible_day(year, month, rng):
    """Returns a day that the month doesn't have, or `None` where it has all 31."""
    days = [day for day in (29, 30, 31) if not is_date(year, month, day)]
    return int(rng.choice(days)) if days else None


def is_date(year, month, day):
    try:
        datetime.date(year, month, day)
    except ValueError:
        return False
    return True


class Alphabet:
    """Dates in and out of token ids.

    Args:
        locales: Names of the locales that have a token.
        characters: The characters that have one.
    """

    def __init__(self, locales, characters):
        self.locales = list(locales)
        self.characters = "".join(characters)
        first = ANYWHERE + 1
        self.of_locale = {name: first + i for i, name in enumerate(self.locales)}
        first += len(self.locales)
        self.of_character = {c: first + i for i, c in enumerate(self.characters)}
        self.size = first + len(self.characters)

    @classmethod
    def of(cls, locales):
        """Collects the characters of a year of days in every locale and format."""
        year = [datetime.date.fromordinal(738_000 + day) for day in range(365)]
        seen = set("0123456789")
        for locale in locales:
            for form in FORMATS:
                for date in year:
                    seen |= set(
                        write_date(date.year, date.month, date.day, locale, form)
                    )
        return cls(locales, sorted(seen))

    def read(self, texts, locales):
        """Returns source tokens `(B, LENGTH)`; an unnamed locale is `None`."""
        rows = np.full((len(texts), LENGTH), PAD, "int32")
        for row, text, locale in zip(rows, texts, locales, strict=True):
            row[0] = self.of_locale.get(locale, ANYWHERE)
            ids = [self.of_character.get(c, UNKNOWN) for c in text[: LENGTH - 1]]
            row[1 : len(ids) + 1] = ids
        return rows


def iso_ids(isos):
    """Returns target tokens `(B, 11)`: the start, then ten characters each."""
    return np.array(
        [[START] + [START + 1 + WRITES.index(c) for c in iso] for iso in isos], "int32"
    )


def iso_text(ids):
    """Returns the characters of target tokens; what is none becomes "?"."""
    return "".join(
        WRITES[i - START - 1] if START < i < START + 1 + len(WRITES) else "?"
        for i in ids
    )


def draw_dates(days, locales, count, rng, impossible=0.0):
    """Returns `count` texts, their ISO 8601, and their locales."""
    texts, isos, places = [], [], []
    while len(texts) < count:
        year, month, day = days[rng.integers(len(days))].tolist()
        if rng.random() < impossible:
            day = impossible_day(year, month, rng)
            if day is None:
                continue
        locale = locales[rng.integers(len(locales))]
        form = FORMATS[rng.integers(len(FORMATS))]
        texts.append(write_date(year, month, day, locale, form))
        isos.append(f"{year:04d}-{month:02d}-{day:02d}")
        places.append(locale)
    return texts, isos, places


def batches(alphabet, days, batch, seed):
    """Yields what `fit` takes, without an end: every date is new."""
    rng = np.random.default_rng(seed)
    while True:
        texts, isos, places = draw_dates(
            days, alphabet.locales, batch, rng, impossible=1 / 30
        )
        source = alphabet.read(
            texts, [place if rng.random() < 0.7 else None for place in places]
        )
        # Now and then a letter is illegible, as letters of other locales will be.
        letters = source >= alphabet.of_character["9"] + 1
        source[letters & (rng.random(source.shape) < 0.01)] = UNKNOWN
        target, answer = tx.next_token(iso_ids(isos))
        yield {"source": source, "target": target}, answer


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(options, alphabet):
    """Returns an encoder-decoder, not yet compiled."""
    return tx.encoder_decoder(
        alphabet.size,
        options.dim,
        options.decoder_layers,
        options.heads,
        num_encoder_layers=options.encoder_layers,
        target_vocab_size=START + 1 + len(WRITES),
        share_embeddings=False,
        pad_id=PAD,
        # Narrow kernels want larger values than GPT-2's 0.02 to start with.
        init_stddev=0.05,
    )


def compile_for_training(model, options):
    """AdamW under warm-up, cosine decay and clipping."""
    warmup = max(1, options.steps // 20)
    schedule = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(1, options.steps - warmup),
    )
    optimizer = keras.optimizers.AdamW(
        schedule, beta_2=0.99, weight_decay=0.01, global_clipnorm=1.0
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


def translate(model, source, batch):
    """Returns ISO 8601 for source tokens, by greedy decoding.

    Always `batch` rows at a time: another shape would be compiled anew.
    """
    isos = []
    for at in range(0, len(source), batch):
        rows = np.resize(source[at : at + batch], (batch, source.shape[1]))
        prompts = np.full((batch, 1), START, "int32")
        written = tx.generate(model, prompts, max_new_tokens=ISO_LENGTH, source=rows)
        isos += [iso_text(row[1:]) for row in written]
    return isos[: len(source)]


def certainty(model, source, isos):
    """Returns the chance that the model gives to each answer as a whole."""
    target, answer = tx.next_token(iso_ids(isos))
    logits = model.predict_on_batch({"source": source, "target": target})
    logits = np.asarray(logits, "float64")
    logits -= logits.max(axis=-1, keepdims=True)
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    picked = np.take_along_axis(chances, answer[..., None], axis=-1)[..., 0]
    return picked.prod(axis=-1)


def cross_attention(model, source, isos):
    """Returns what the last block asked of the source, `(B, N, 10, S)`."""
    maps = tx.attention_maps(model, {"source": source, "target": iso_ids(isos)[:, :-1]})
    return [w for path, w in maps.items() if path.endswith("cross_attention")][-1]


# ----------------------------------------------------------------------------
# What it learnt
# ----------------------------------------------------------------------------


def measure(model, alphabet, dates, batch):
    """Returns which dates come out exact, and what the model writes."""
    texts, isos, places = dates
    written = translate(model, alphabet.read(texts, places), batch)
    return np.array([a == b for a, b in zip(written, isos, strict=True)]), written


def in_words(text, iso, chance):
    """Returns what to answer to somebody who asked for a date."""
    year, month, day = (int(part) if part.isdigit() else 0 for part in split_iso(iso))
    if not is_date(year, month, 1):
        return f"“{text}” does not read as a date"
    if not is_date(year, month, day):
        return f"“{text}” reads as {iso}, and there is no such day"
    if chance < 0.5:
        return f"“{text}” might be {iso}, but that is a guess ({chance:.0%})"
    return f"{iso}  “{text}” ({chance:.0%})"


def split_iso(iso):
    """Returns year, month and day of ten characters, whatever they are."""
    return (iso[:4], iso[5:7], iso[8:]) if iso[4] == iso[7] == "-" else ("", "", "")


def why_not(text):
    """Returns why a text is no date that one could read, or `None`."""
    if not text:
        return "the text is empty; write a date, such as 3. März 2021"
    if not any(c.isdigit() for c in text):
        return f"“{text}” has no digit, and a date has a day and a year"
    if len(text) > LENGTH - 1:
        return f"“{text}” has {len(text)} characters; a date has at most {LENGTH - 1}"
    return None


def answer(options):
    """Answers `--ask` with the model of an earlier run."""
    out = pathlib.Path(options.out)
    if not (out / "model.keras").exists():
        stop(f"there is no model in --out {out} to ask; run this without --ask first")
    kept = json.loads((out / "alphabet.json").read_text(encoding="utf-8"))
    alphabet = Alphabet(kept["locales"], kept["characters"])
    if options.locale is not None and options.locale not in alphabet.of_locale:
        known = " ".join(alphabet.locales)
        stop(f"--locale {options.locale} is not one that was learnt: {known}")
    texts = [clean(text) for text in options.ask]
    model = keras.models.load_model(out / "model.keras")
    answers = []
    for text in texts:
        problem = why_not(text)
        if problem is None:
            source = alphabet.read([text], [options.locale])
            (iso,) = translate(model, source, batch=1)
            chance = 0.0
            if "?" not in iso:
                (chance,) = certainty(model, source, [iso])
            answers.append(in_words(text, iso, chance))
        else:
            answers.append(problem)
        print(answers[-1])
    return answers


def draw(texts, isos, weights, path, title):
    """Draws which characters of a date each character of ISO 8601 asked for.

    Args:
        texts: The dates, six of them.
        isos: What the model wrote.
        weights: Mean over heads, `(B, 10, S)`, the locale's token first.
        path: Where the picture goes.
        title: What stands above it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8.4), layout="constrained")
    axes = figure.subplots(3, 2).ravel()
    for cell, text, iso, of_text in zip(axes, texts, isos, weights, strict=True):
        shown = of_text[:, : len(text) + 1]
        image = cell.imshow(shown, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        cell.set_xticks(range(len(text) + 1), ["⌂", *text])
        cell.set_yticks(range(ISO_LENGTH), iso)
        cell.tick_params(length=0)
        cell.set_title(f"{text}  →  {iso}", fontsize="medium")
        for behind in (4, 7):  # year, month, day
            cell.axhline(behind - 0.5, color="grey", linewidth=0.5)
            cell.axhline(behind + 0.5, color="grey", linewidth=0.5)
    axes[0].set_ylabel("written, from top to bottom")
    axes[-2].set_xlabel("read; ⌂ is the locale")
    bar = figure.colorbar(image, ax=axes.tolist(), shrink=0.5, pad=0.01)
    bar.set_label("cross-attention, mean over heads")
    figure.suptitle(title, fontsize="medium")
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
    if options.locale is not None:
        stop("--locale says where the dates of --ask are written; there is no --ask")
    keep_freed_memory()
    need("babel", "matplotlib")
    need_locales(options.locales)
    out = writable_folder(options.out)
    import babel

    # Days, and the characters that they are written with.
    trained_on, held_out = split_days(options.seed)
    alphabet = Alphabet.of(options.locales)
    print(
        f"Babel {babel.__version__}: {len(alphabet.locales)} locales, "
        f"{len(alphabet.characters)} characters, {len(trained_on):,} days to train "
        f"on, {len(held_out):,} held out"
    )

    # The model.
    keras.utils.set_random_seed(options.seed)
    try:
        model = build(options, alphabet)
    except ValueError as error:
        stop(str(error).rstrip("."))
    compile_for_training(model, options)
    print(
        f"{model.count_params():,} parameters, {options.encoder_layers} layers read "
        f"and {options.decoder_layers} write, keras {keras.__version__} on "
        f"{keras.backend.backend()}"
    )

    # Training. No date is seen twice but by chance.
    started, worked = time.perf_counter(), time.process_time()
    epochs = max(1, options.steps // 100)
    history = model.fit(
        batches(alphabet, trained_on, options.batch, options.seed),
        steps_per_epoch=options.steps // epochs,
        epochs=epochs,
        shuffle=False,  # the dates come in random order already
        verbose=2,
    ).history
    seconds = time.perf_counter() - started
    # Of all cores together, and of nobody else: what else runs doesn't count.
    processor_seconds = time.process_time() - worked
    if not math.isfinite(history["loss"][-1]):
        stop("the loss is not a number any more; lower the --learning-rate")

    # Saved, and back.
    model.save(out / "model.keras")
    kept = {"locales": alphabet.locales, "characters": alphabet.characters}
    (out / "alphabet.json").write_text(json.dumps(kept), encoding="utf-8")
    loaded = keras.models.load_model(out / "model.keras")
    rng = np.random.default_rng(options.seed + 1)
    texts, isos, places = draw_dates(held_out, alphabet.locales, options.test, rng)
    some = {
        "source": alphabet.read(texts[:64], places[:64]),
        "target": iso_ids(isos[:64])[:, :-1],
    }
    difference = float(
        np.max(np.abs(model.predict_on_batch(some) - loaded.predict_on_batch(some)))
    )
    print(f"largest difference of the reloaded model's logits: {difference}")

    # What it learnt, on days that it has not seen.
    batch = min(500, options.test)
    right, written = measure(loaded, alphabet, (texts, isos, places), batch)
    exact = float(right.mean())
    for i in np.flatnonzero(~right)[:8]:
        print(f"  {places[i]}: {texts[i]} is {isos[i]}, not {written[i]}")
    nowhere = [None] * len(texts)
    right, _ = measure(loaded, alphabet, (texts, isos, nowhere), batch)
    untold = float(right.mean())
    # Locales that the alphabet doesn't have cannot be told.
    dates = draw_dates(held_out, UNSEEN, options.test, rng)
    right, _ = measure(loaded, alphabet, dates, batch)
    unseen_locales = float(right.mean())
    places = np.array(dates[-1])
    elsewhere = {n: float(right[places == n].mean()) for n in UNSEEN if n in places}
    dates = draw_dates(
        held_out, alphabet.locales, max(1, options.test // 10), rng, impossible=1.0
    )
    right, _ = measure(loaded, alphabet, dates, batch)
    impossible = float(right.mean())
    print(
        f"exact {exact:.2%} of {len(texts):,} dates on unseen days; locale not told "
        f"{untold:.2%}; unseen locales {unseen_locales:.2%} ("
        + ", ".join(f"{name} {value:.0%}" for name, value in elsewhere.items())
        + f"); days that do not exist {impossible:.2%} copied; {seconds:.0f} s of "
        "training"
    )

    # What each character asked for, in scripts that the font has.
    shown = [
        (2021, 3, 14, "de", "full"),
        (1987, 10, 26, "en_US", "long"),
        (2009, 8, 31, "fr", "full"),
        (1958, 12, 7, "ru", "long"),
        (2034, 6, 25, "el", "full"),
        (1999, 1, 2, "hu", "medium"),
    ]
    texts = [write_date(*date) for date in shown]
    locales = [locale for *_, locale, _ in shown]
    source = alphabet.read(texts, locales)
    isos = translate(loaded, source, batch)
    # A model that has not learnt yet may write what is no character.
    weights = cross_attention(loaded, source, [iso.replace("?", "-") for iso in isos])
    draw(
        texts,
        isos,
        weights.mean(axis=1),
        out / "attention.png",
        f"exact {exact:.1%} on unseen days, {model.count_params():,} parameters, "
        f"seed {options.seed}, {keras.backend.backend()}",
    )

    result = {
        "example": "translate_dates",
        "seed": options.seed,
        "exact": exact,
        "exact_untold": untold,
        "exact_unseen_locales": unseen_locales,
        "exact_by_unseen_locale": elsewhere,
        "exact_impossible": impossible,
        "held_out": options.test,
        "reload_difference": difference,
        "seconds": seconds,
        "processor_seconds": processor_seconds,
        "parameters": model.count_params(),
        "data": f"Babel {babel.__version__}",
        "python": platform.python_version(),
        "keras": keras.__version__,
        "keras_tx": tx.__version__,
        "backend": keras.backend.backend(),
        "options": vars(options),
        "history": history,
    }
    (out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(f"model.keras, alphabet.json, attention.png, result.json in {out}")
    return result


if __name__ == "__main__":
    main()
