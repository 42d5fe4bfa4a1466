"""Takes one piece at a time out of a language model, and measures what is lost.

    python examples/ablations.py               # the core grid, five seeds
    python examples/ablations.py --long        # the long grid, three seeds
    python examples/ablations.py --list        # what there is to run
    python examples/ablations.py --cells "position" --seeds 2     # a part of it
    python examples/ablations.py --quick       # seconds, to see that it runs

A cell of the grid is what differs from one base model, `BASE`: a character language
model of six pre-norm blocks, as many as in the model of 2017. All cells train with
`model.fit` on the same text for the same number of steps of the same size. Run k of
every cell sees the same windows, and starts from the same weights where the layers
are the same. Nothing clips gradients, for that would hide what is looked for.

Every finished run is a line of FOLDER/results.csv at once, and a run that is there is
not repeated: interrupt it, and start it again. A loss that is not a number any more
ends a run and is its result. Behind the last run the table and figures are made.

How the loss is measured. The last tenth of the text is cut into windows one behind the
other, every third is kept, and every character of these is predicted once, with nothing
sampled. The mean of -log p is the cross-entropy in nats. Two guesses that count
characters stand beside it: "unigram" knows how frequent each character is, "bigram" how
frequent behind the one before. What is no better than a unigram has learnt nothing of
order or context.
"""

import argparse
import csv
import ctypes
import hashlib
import io
import math
import os
import pathlib
import platform
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # errors only

import keras
import numpy as np

import keras_tx as tx

# The base model: the block of the essay. Every cell is what differs from it.
BASE = {
    "layers": 6,
    "heads": 4,
    "head_dim": None,  # dim / heads
    "norm": "pre",  # or post, sandwich, none
    "residual": "serial",  # or parallel, none
    "scaled": True,  # logits divided by the square root of head_dim
    "feed_forward": True,
    "position": "sinusoidal",  # or none, learned, rotary, alibi
    "rate": 3e-3,  # of learning, at its peak
    "warmup": True,  # whether it rises slowly
    "test_to": None,  # windows to measure on, besides those of training
}
# What no cell changes. The budget of a run is steps times batch windows.
SIZE = {"dim": 48, "window": 64, "batch": 8, "steps": 300, "every": 10}
QUICK_SIZE = {"dim": 16, "window": 16, "batch": 4, "steps": 12, "every": 4}
QUICK_LAYERS = 1
WARMUP = 0.2  # of all steps
KEPT = 3  # one held-out window in so many is measured

NORMS = ("pre", "post", "none")
RATES = (1e-3, 3e-3, 1e-2)
LARGE_HEAD = {"heads": 1, "head_dim": 128}

CORE = [
    *(
        {"norm": norm, "rate": rate, "warmup": warmup}
        for norm in NORMS
        for rate in RATES
        for warmup in (True, False)
    ),
    {"residual": "none"},
    {**LARGE_HEAD, "scaled": True},
    {**LARGE_HEAD, "scaled": False},
    {"position": "none"},
    {"position": "learned"},
    {"position": "rotary"},
]
LONG = [
    *({"position": p, "test_to": 512} for p in ("sinusoidal", "rotary", "alibi")),
    {"position": "none", "test_to": 512},
    {"feed_forward": False},
    {"residual": "parallel"},
    *(
        {"norm": "sandwich", "rate": r, "warmup": w}
        for r in RATES
        for w in (True, False)
    ),
    *({"heads": heads} for heads in (1, 2, 8)),
    *({"layers": layers} for layers in (2, 12, 24)),
    *({"layers": layers, "residual": "none"} for layers in (1, 2, 12)),
    *(
        {"layers": layers, "norm": "post", "rate": 1e-3, "warmup": warmup}
        for layers in (2, 12, 24)
        for warmup in (True, False)
    ),
    *({"layers": layers, "norm": "none"} for layers in (2, 12, 24)),
]
QUICK = [{}, {"norm": "post", "warmup": False}, {"rate": 1e6}, {"residual": "none"}]

COLUMNS = (
    "cell",
    "seed",
    "loss",  # held out, nats; nan where it diverged
    "diverged_at",  # step, or empty
    "longer",  # window:loss on all that is held out, up to `test_to`
    "curve",  # training loss, mean of each `every` steps
    "unigram",  # losses of guesses on the same characters
    "bigram",
    "parameters",
    "step_ms",  # median
    "seconds",  # of the run, with what it had to compile
    "cpu_seconds",
    "conditions",  # must be alike in a file
)
MARKERS = "<!-- results:ablations -->", "<!-- /results -->"


# ----------------------------------------------------------------------------
# The grid
# ----------------------------------------------------------------------------


def complete(differences):
    """Returns the whole configuration of a cell."""
    return {**BASE, **differences}


def name(differences):
    """Returns the name of a cell: what differs from the base model."""
    return (
        " ".join(
            f"{key}={format_value(value)}"
            for key, value in differences.items()
            if value != BASE[key]
        )
        or "base"
    )


def format_value(value):
    return ("off", "on")[value] if isinstance(value, bool) else f"{value}"


def architecture(config):
    """Returns what a compiled model depends on; cells that agree share one."""
    return tuple(
        (key, value)
        for key, value in config.items()
        if key not in ("rate", "warmup", "test_to")
    )


def distinct(cells):
    """Returns `{name: differences}`, the base model first if it is among them."""
    found = {name(differences): differences for differences in cells}
    return dict(sorted(found.items(), key=lambda item: item[0] != "base"))


# ----------------------------------------------------------------------------
# The command line
# ----------------------------------------------------------------------------


def parse(arguments):
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="ablations.py",
        description="Takes one piece at a time out of a language model, and measures "
        "what is lost. The backend is chosen by KERAS_BACKEND (tensorflow, jax or "
        "torch).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    unset = argparse.SUPPRESS
    count = {"type": at_least(1), "metavar": "N"}

    add = parser.add_argument
    grid = parser.add_mutually_exclusive_group()
    grid.add_argument("--long", action="store_true", help="the long grid too")
    grid.add_argument("--quick", action="store_true", help="tiny, to see that it runs")
    add(
        "--cells", nargs="+", metavar="WORDS", default=unset, help="only cells so named"
    )
    add("--seeds", **count, default=unset, help="runs of a cell: 5, of the long grid 3")
    add("--steps", **count, default=unset, help="updates of the weights in a run")
    add(
        "--text",
        metavar="FILE",
        default=unset,
        help="a UTF-8 file; without it, the language reference of this Python",
    )
    add("--out", metavar="FOLDER", default="runs/ablations", help="where results go")
    add("--readme", metavar="FILE", default=unset, help="whose table to write too")
    add("--list", action="store_true", help="say what there is to run, and stop")
    add("--found", action="store_true", help="run nothing, table what is in --out")
    without = dict.fromkeys(("cells", "seeds", "steps", "text", "readme"))
    return argparse.Namespace(**{**without, **vars(parser.parse_args(arguments))})


def at_least(lowest):
    """Returns a parser of integers from `lowest` on."""

    def integer(text):
        number = int(text)
        if number < lowest:
            raise argparse.ArgumentTypeError(f"{number} is below {lowest}")
        return number

    return integer


def stop(problem):
    """Ends the program with one line and a non-zero exit."""
    sys.exit(f"ablations.py: {problem}.")


def need_matplotlib():
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        stop("the figures need matplotlib: pip install 'keras-tx[plots]'")


def need_enough(text, name, window):
    """The held-out tenth must fill a window, and so must what is trained on."""
    needed = 10 * (window + 1)
    if not text:
        stop(f"{name} is empty")
    if len(text) < needed:
        stop(
            f"{name} has {len(text)} characters, too few for windows of {window}: "
            f"a tenth is held out and must fill one, which takes {needed}"
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


def chosen(options):
    """Returns `[(name, differences, number of seeds)]`."""
    if options.quick:
        grids = [(QUICK, 1)]
    else:
        grids = [(CORE, 5)] + ([(LONG, 3)] if options.long else [])
    found = [
        (cell, differences, options.seeds or seeds)
        for cells, seeds in grids
        for cell, differences in distinct(cells).items()
    ]
    if options.cells is not None:
        found = [c for c in found if any(words in c[0] for words in options.cells)]
    if not found:
        stop(f"no cell is named like --cells {' '.join(options.cells)}; see --list")
    return found


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


def held_out(ids, first, window, batch, step=1):
    """Returns inputs and targets of whole batches of what was not trained on, of
    every window or of one in `step`."""
    starts = np.arange(first - 1, len(ids) - window, window)[::step]
    batch = min(batch, len(starts))
    return windows(ids, starts[: len(starts) // batch * batch], window)


def guesses(ids, first, num_characters):
    """Returns the loss of two guesses that count, with one added to every count."""
    v = num_characters
    before, after = ids[first - 1 : -1], ids[first:]
    single = np.bincount(ids[:first], minlength=v) + 1.0
    pairs = np.bincount(ids[: first - 1] * v + ids[1:first], minlength=v * v) + 1.0
    pairs = pairs.reshape(v, v)
    return {
        "unigram": float(-np.log(single / single.sum())[after].mean()),
        "bigram": float(
            -np.log(pairs / pairs.sum(axis=1, keepdims=True))[before, after].mean()
        ),
    }


# ----------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------


def build(config, size, vocab_size):
    """Returns the decoder of a configuration, not yet compiled."""
    dim, heads = size["dim"], config["heads"]
    head_dim = config["head_dim"] or dim // heads

    def normal(fan_in):
        # Keeps the variance of what goes in. So queries and keys start with a
        # variance of 1, which is what the root of head_dim reckons with.
        return keras.initializers.RandomNormal(stddev=fan_in**-0.5)

    def block(index):
        return tx.TransformerBlock(
            tx.MultiHead(
                heads,
                head_dim,
                attention=tx.ScaledAttention(scale=None if config["scaled"] else 1.0),
                use_bias=False,
                kernel_initializer=normal(dim),
                merge_initializer=normal(heads * head_dim),
            ),
            tx.FeedForward(
                4 * dim,
                kernel_initializer=normal(dim),
                narrow_initializer=normal(4 * dim),
            )
            if config["feed_forward"]
            # Adds nothing to a residual; without one, hands on what it gets.
            else keras.layers.Rescaling(float(config["residual"] == "none")),
            norm=None if config["norm"] == "none" else "layer",
            norm_position="pre" if config["norm"] == "none" else config["norm"],
            residual=config["residual"],
        )

    position = config["position"]
    own = {"none": None, "alibi": tx.AlibiPosition(heads)}
    return tx.decoder(
        vocab_size,
        dim,
        config["layers"],
        block=block,
        position=own.get(position, position),
        max_length=size["window"] if position == "learned" else None,
        # As in 2017: features of variance 1, like the sinusoids beside them.
        init_stddev=dim**-0.5,
        embedding_scale="sqrt",
    )


def learning_rate(step, steps, peak, warmup):
    """Returns the rate of a step: up in a line, if at all, then down in one."""
    rising = round(WARMUP * steps)
    if warmup and step < rising:
        return peak * (step + 1) / rising
    return peak * (steps - step) / (steps - rising if warmup else steps)


class Watch(keras.callbacks.Callback):
    """Sets the learning rate of each step, and notes how long the step took."""

    def __init__(self, steps, config):
        super().__init__()
        self.steps, self.config = steps, config
        self.step, self.last, self.milliseconds = 0, None, []

    def on_train_batch_begin(self, batch, logs=None):
        # A plain variable rather than a schedule, so that cells which differ in
        # it share what is compiled. JAX keeps it elsewhere while it trains.
        getattr(self.model, "jax_state_sync", lambda: None)()
        self.model.optimizer.learning_rate = learning_rate(
            self.step, self.steps, self.config["rate"], self.config["warmup"]
        )

    def on_train_batch_end(self, batch, logs=None):
        now = time.perf_counter()
        if self.last is not None:
            self.milliseconds.append(1000 * (now - self.last))
        self.last = now
        self.step += 1


class Trainer:
    """Trains cells, one run at a time, and compiles what they share once."""

    def __init__(self, ids, first, vocab_size, size):
        self.ids, self.first, self.vocab_size = ids, first, vocab_size
        self.size = size
        self.models = {}

    def fresh(self, config, seed):
        """Returns a model with the first weights of a seed, compiled before if
        there was one."""
        keras.utils.set_random_seed(seed)
        new = build(config, self.size, self.vocab_size)
        model = self.models.setdefault(architecture(config), new)
        if model is new:
            model.compile(
                keras.optimizers.Adam(beta_2=0.98, epsilon=1e-9),  # as in 2017
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                # Keras turns XLA off for TensorFlow on a machine without a GPU,
                # where it makes this step faster. On torch it would mean
                # `torch.compile`, which needs a C++ compiler.
                jit_compile=keras.backend.backend() != "torch",
            )
            model.optimizer.build(model.trainable_variables)
        else:
            model.set_weights(new.get_weights())
            for variable in model.optimizer.variables:
                variable.assign(keras.ops.zeros(variable.shape, variable.dtype))
        return model

    def run(self, config, seed):
        """Returns the result of one training, in the columns of the file."""
        began, cpu_began = time.perf_counter(), time.process_time()
        size, steps, every = self.size, self.size["steps"], self.size["every"]
        model = self.fresh(config, seed)
        watch = Watch(steps, config)
        history = model.fit(
            random_windows(self.ids[: self.first], size["window"], size["batch"], seed),
            steps_per_epoch=every,
            epochs=steps // every,
            shuffle=False,  # the windows come in random order already
            callbacks=[watch, keras.callbacks.TerminateOnNaN()],
            verbose=0,
        ).history
        window = size["window"]
        loss = self.measure(model, window, step=KEPT)
        diverged = watch.step < steps or not math.isfinite(loss)
        longer = {}
        while window <= (config["test_to"] or 0):
            # All of them, so that every length is measured on the same characters.
            longer[window] = self.measure(model, window)
            window *= 2
        return {
            "loss": math.nan if diverged else loss,
            "diverged_at": watch.step if diverged else "",
            "longer": " ".join(f"{w}:{value:.4f}" for w, value in longer.items()),
            "curve": " ".join(f"{value:.3f}" for value in history["loss"]),
            "parameters": model.count_params(),
            "step_ms": f"{np.median(watch.milliseconds):.1f}",
            "seconds": f"{time.perf_counter() - began:.1f}",
            "cpu_seconds": f"{time.process_time() - cpu_began:.1f}",
        }

    def measure(self, model, window, step=1):
        """Returns the held-out loss, in nats a character."""
        # As many characters in a batch, whatever the window.
        batch = max(1, 8 * self.size["batch"] * self.size["window"] // window)
        x, y = held_out(self.ids, self.first, window, batch, step)
        return float(model.evaluate(x, y, batch_size=batch, verbose=0))


# ----------------------------------------------------------------------------
# The file of results
# ----------------------------------------------------------------------------


def describe(size, base, text, text_name):
    """Returns under what runs are comparable."""
    sha = hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
    return (
        f"{size['steps']} steps of {size['batch']} windows of {size['window']}; dim "
        f"{size['dim']}; base "
        + " ".join(f"{key}={format_value(value)}" for key, value in base.items())
        + f"; {text_name}, {len(text)} characters, SHA-256 {sha}; "
        f"{keras.backend.backend()}, Keras {keras.__version__}, Python "
        f"{platform.python_version()}"
    )


def read(path):
    """Returns the finished runs, as dicts of numbers and strings, in order."""
    text = path.read_text(encoding="utf-8")
    # A line that was being written when the power went has no end.
    rows = list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    for row in rows:
        row["seed"] = int(row["seed"])
        for key in ("loss", "unigram", "bigram", "step_ms", "seconds", "cpu_seconds"):
            row[key] = float(row[key])
        row["curve"] = [float(value) for value in row["curve"].split()]
        row["longer"] = {
            int(window): float(loss)
            for window, loss in (pair.split(":") for pair in row["longer"].split())
        }
    return rows


def resume(path, conditions):
    """Returns the cells and seeds that are in the file, which then takes more."""
    if not path.exists():
        path.write_text(",".join(COLUMNS) + "\n", encoding="utf-8")
    text = path.read_text(encoding="utf-8")
    if text.splitlines()[:1] != [",".join(COLUMNS)]:
        stop(f"{path} is not a file of results; choose another --out")
    if not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
    rows = read(path)
    for row in rows:
        if row["conditions"] != conditions:
            stop(
                f"{path} holds runs under other conditions ({row['conditions']}) than "
                f"now ({conditions}); choose another --out"
            )
    return {(row["cell"], row["seed"]) for row in rows}


def append(path, row):
    """Adds a run at once, so that nothing finished is lost."""
    line = io.StringIO()
    csv.DictWriter(line, COLUMNS, lineterminator="\n").writerow(row)
    with path.open("a", encoding="utf-8") as file:
        file.write(line.getvalue())


# ----------------------------------------------------------------------------
# The table
# ----------------------------------------------------------------------------


def by_cell(rows):
    """Returns `{cell: its runs}`."""
    found = {}
    for row in rows:
        found.setdefault(row["cell"], []).append(row)
    return found


def losses(runs):
    """Returns the held-out losses of the runs that did not diverge."""
    return [run["loss"] for run in runs if not math.isnan(run["loss"])]


def spread(values):
    """Returns the standard deviation over seeds; of one it is not known."""
    return statistics.stdev(values) if len(values) > 1 else math.nan


def outcome(runs, window=None, most=0):
    """Returns mean and deviation in words, and how many diverged.

    Where there are fewer runs than `most`, it says how many.
    """
    if not runs:
        return ""
    values = losses(runs)
    if window is not None:
        values = [run["longer"][window] for run in runs if window in run["longer"]]
    told = []
    if values:
        mean = statistics.mean(values)
        digits = 3 if mean < 10 else 1 if mean < 100 else 0
        told.append(f"{mean:.{digits}f}")
        if len(values) > 1:
            told[0] += f" ± {spread(values):.{digits}f}"
        if mean > runs[0]["unigram"] - 0.05:
            told[0] += " †"
    lost = sum(math.isnan(run["loss"]) for run in runs)
    if lost:
        told.append(f"{lost} of {len(runs)} diverged")
    if len(runs) < most:
        told.append(f"{len(runs)} run{'s' * (len(runs) > 1)}")
    return ", ".join(told)


def against_base(cells, cell):
    """Returns the mean difference from the base model, seed by seed."""
    base = {run["seed"]: run["loss"] for run in cells.get("base", ())}
    found = [
        run["loss"] - base[run["seed"]]
        for run in cells[cell]
        if not math.isnan(run["loss"] - base.get(run["seed"], math.nan))
    ]
    if not found:
        return ""
    told = f"{statistics.mean(found):+.3f}"
    return told if len(found) == 1 else f"{told} ± {spread(found):.3f}"


def norm_cell(norm, rate, warmup):
    return name({"norm": norm, "rate": rate, "warmup": warmup})


def table(rows):
    """Returns the tables of what was found."""
    cells = by_cell(rows)
    lines, shown = [], set()
    most = max(map(len, cells.values()))
    norms = ("pre", "post", "sandwich", "none")
    grid = {
        (norm, warmup): [norm_cell(norm, rate, warmup) for rate in RATES]
        for norm in norms
        for warmup in (True, False)
    }
    grid = {key: names for key, names in grid.items() if set(names) & set(cells)}
    if grid:
        body = [["norm", "warm-up", *(f"rate {rate:g}" for rate in RATES)]]
        for (norm, warmup), names in grid.items():
            found = [outcome(cells.get(cell, []), most=most) for cell in names]
            body.append([norm, format_value(warmup), *found])
            shown |= set(names) - {"base"}
        lines += [*aligned(body), ""]
    rest = [cell for cell in cells if cell not in shown and not is_longer(cells[cell])]
    if rest:
        body = [["what differs", "loss", "against the base"]]
        for cell in rest:
            difference = "" if cell == "base" else against_base(cells, cell)
            body.append([cell, outcome(cells[cell], most=most), difference])
        lines += [*aligned(body), ""]
    longer = [cell for cell in cells if is_longer(cells[cell])]
    if longer:
        tested = sorted({w for c in longer for run in cells[c] for w in run["longer"]})
        body = [[f"trained at {SIZE['window']}", *(f"at {w}" for w in tested)]]
        body += [[c, *(outcome(cells[c], w, most) for w in tested)] for c in longer]
        lines += [*aligned(body), ""]
    return "\n".join([*lines, conditions_in_words(rows)])


def aligned(body):
    """Returns the lines of a table in Markdown, its first row being the header."""
    widths = [max(map(len, column)) for column in zip(*body, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in body]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return [lines[0], rule, *lines[1:]]


def is_longer(runs):
    return any(run["longer"] for run in runs)


def conditions_in_words(rows):
    """Returns what the numbers are, and under what they were measured."""
    seeds = {len(runs) for runs in by_cell(rows).values()}
    few = ", or as many as stand beside them" if len(seeds) > 1 else ""
    minutes = sum(row["cpu_seconds"] for row in rows) / 60
    return (
        "Held-out cross-entropy in nats per character, mean ± standard deviation over "
        f"{max(seeds)} seeds{few}; † is no better than how frequent each "
        f"character is ({rows[0]['unigram']:.3f}; behind the one before, "
        f"{rows[0]['bigram']:.3f}). {len(rows)} runs took {minutes:.0f} minutes of CPU "
        f"time, what they compiled included. {rows[0]['conditions']}."
    )


def write_readme(path, text):
    """Puts a table between its markers."""
    path = pathlib.Path(path)
    try:
        readme = path.read_text(encoding="utf-8")
    except OSError as error:
        stop(f"cannot read --readme {path}: {error.strerror}")
    before, start, rest = readme.partition(MARKERS[0])
    _, end, after = rest.partition(MARKERS[1])
    if not start or not end:
        stop(f"{path} has no place for results: {' '.join(MARKERS)}")
    path.write_text(f"{before}{start}\n{text}\n{end}{after}", encoding="utf-8")


# ----------------------------------------------------------------------------
# The figures
# ----------------------------------------------------------------------------

# Told apart by the colour-blind too, and in grey by their markers.
LOOKS = {
    "pre": ("#0072B2", "o"),
    "post": ("#D55E00", "s"),
    "sandwich": ("#CC79A7", "D"),
    "none": ("#009E73", "^"),
}


def new_figure(width, height):
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def mark_guesses(axes, rows, along):
    """Draws what a unigram and a bigram reach."""
    for guess, place in (("unigram", 0.25), ("bigram", 0.75)):
        value = rows[0][guess]
        if along == "y":
            axes.axhline(value, color="grey", linewidth=0.8, linestyle=":")
            axes.annotate(
                guess,
                (place, value),
                xycoords=("axes fraction", "data"),
                xytext=(0, 2),
                textcoords="offset points",
                horizontalalignment="center",
                color="grey",
                fontsize="small",
            )
        else:
            axes.axvline(value, color="grey", linewidth=0.8, linestyle=":")
            axes.annotate(
                guess,
                (value, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 2),
                textcoords="offset points",
                horizontalalignment="center",
                color="grey",
                fontsize="small",
            )


def off_scale(rows):
    """Returns the loss above which a figure tells a number and draws a cross."""
    return rows[0]["unigram"] + 0.4


def in_short(runs):
    """Returns the mean of many runs, and how many of them diverged."""
    values = losses(runs)
    lost = f"{len(runs) - len(values)}/{len(runs)} nan"
    if not values:
        return lost
    mean = statistics.mean(values)
    mean = f"{mean:.{1 if mean < 100 else 0}f}"
    return mean if len(values) == len(runs) else f"{mean}, {lost}"


def draw_norms(rows):
    """Returns the loss over the learning rate, for each norm and warm-up."""
    cells = by_cell(rows)
    figure = new_figure(8, 3.8)
    both = figure.subplots(1, 2, sharey=True)
    top = off_scale(rows)
    drawn = {}
    for axes, warmup in zip(both, (True, False), strict=True):
        for shift, (norm, (color, marker)) in enumerate(LOOKS.items()):
            x, y, error, above = [], [], [], []
            for rate in RATES:
                runs = cells.get(norm_cell(norm, rate, warmup), [])
                values = losses(runs)
                at = rate * 1.04 ** (shift - 1)  # side by side
                if values and statistics.mean(values) < top:
                    x.append(at)
                    y.append(statistics.mean(values))
                    error.append(spread(values) if len(values) > 1 else 0)
                elif runs:
                    above.append((at, in_short(runs)))
                if x and x[-1] == at and len(values) < len(runs):
                    above.append((at, in_short(runs)))
            if x:
                drawn[norm] = axes.errorbar(
                    x, y, error, color=color, marker=marker, markersize=5, capsize=3
                )
            # Too high to be drawn: a cross and a number, one line for each norm.
            for at, words in above:
                cross = axes.plot(at, top + 0.12 * shift, "x", color=color)
                drawn.setdefault(norm, cross[0])
                axes.annotate(
                    words,
                    (at, top + 0.12 * shift),
                    xytext=(6, 0),
                    textcoords="offset points",
                    verticalalignment="center",
                    fontsize="small",
                    color=color,
                )
        mark_guesses(axes, rows, "y")
        axes.set_xscale("log")
        axes.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
        axes.minorticks_off()
        axes.set_xlim(RATES[0] / 1.6, RATES[-1] * 1.6)
        axes.set_xlabel("peak of the learning rate")
        axes.set_title(f"{'with' if warmup else 'without'} warm-up", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    both[0].set_ylabel("held-out loss, nats per character")
    words = {"pre": "pre-norm", "post": "post-norm", "none": "no norm"}
    figure.legend(
        drawn.values(),
        [words.get(norm, norm) for norm in drawn],
        loc="outside lower center",
        ncols=4,
        frameon=False,
    )
    return figure


def draw_pieces(rows):
    """Returns the loss of every cell but those about norms, each run a dot."""
    cells = by_cell(rows)
    about_norms = {
        norm_cell(n, r, w) for n in LOOKS for r in RATES for w in (True, False)
    }
    shown = [
        cell
        for cell in cells
        if cell == "base" or not (cell in about_norms or is_longer(cells[cell]))
    ]
    figure = new_figure(8, 1.1 + 0.3 * len(shown))
    axes = figure.add_subplot()
    for place, cell in enumerate(reversed(shown)):
        values = losses(cells[cell])
        color = "#0072B2" if cell == "base" else "black"
        if values and statistics.mean(values) < off_scale(rows):
            axes.errorbar(
                statistics.mean(values),
                place,
                xerr=spread(values) if len(values) > 1 else 0,
                color=color,
                marker="|",
                markersize=12,
                capsize=3,
            )
            axes.plot(values, [place] * len(values), "o", color=color, alpha=0.35)
            if len(values) == len(cells[cell]):
                continue
        axes.annotate(
            in_short(cells[cell]),
            (1, place),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize="small",
        )
    mark_guesses(axes, rows, "x")
    axes.set_ylim(-0.6, len(shown) - 0.4)
    axes.set_yticks(range(len(shown)), [words_of(cell) for cell in reversed(shown)])
    axes.set_xlabel(
        "held-out loss, nats per character; beside the frame: off the scale"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def words_of(cell):
    """Returns the name of a cell as a person would say it."""
    return {
        "base": "the base model",
        "residual=none": "no residual",
        "residual=parallel": "parallel residual",
        "feed_forward=off": "no feed-forward",
        "heads=1 head_dim=128": "one head of 128",
        "heads=1 head_dim=128 scaled=off": "one head of 128, no √d",
        "position=none": "no position",
    }.get(cell, cell.replace("=", " ").replace("_", "-"))


def draw_curves(rows, shown):
    """Returns training losses over steps: mean over seeds, and their range.

    Args:
        rows: What `read` returns.
        shown: `{cell: (label, colour)}`.
    """
    cells = by_cell(rows)
    figure = new_figure(8, 4)
    axes = figure.add_subplot()
    lowest = 5.0
    for cell, (label, color) in shown.items():
        curves = [run["curve"] for run in cells.get(cell, ())]
        if not curves:
            continue
        longest = max(map(len, curves))
        curves = np.array([c + [math.nan] * (longest - len(c)) for c in curves])
        steps = per_point(rows) * np.arange(1, longest + 1)
        mean, low, high = (f(curves, axis=0) for f in (np.mean, np.min, np.max))
        lowest = min(lowest, np.nanmin(low))
        if np.nanmin(mean) > 5:
            label += " (above the frame)"
        axes.plot(steps, mean, color=color, label=label, linewidth=1.5)
        axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_xlim(left=0)
    # What explodes stays above the frame.
    axes.set_ylim(lowest - 0.1, 5)
    axes.set_xlabel("steps")
    axes.set_ylabel("training loss, nats per character")
    axes.legend(frameon=False, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def per_point(rows):
    """Returns the number of steps that a point of a curve stands for."""
    steps = int(rows[0]["conditions"].split()[0])
    return steps // max(len(row["curve"]) for row in rows)


CURVES = {
    "base": ("the base model", "#0072B2"),
    "norm=post": ("post-norm, with warm-up", "#E69F00"),
    "norm=post warmup=off": ("post-norm, without", "#D55E00"),
    "norm=none": ("no norm", "#009E73"),
    "residual=none": ("no residual", "#CC79A7"),
    "heads=1 head_dim=128 scaled=off": ("one head of 128, no √d", "black"),
    "position=none": ("no position", "#56B4E9"),
}


def write_results(out, rows, readme):
    """Writes the table and the figures."""
    (out / "table.md").write_text(table(rows) + "\n", encoding="utf-8")
    draw_norms(rows).savefig(out / "norms.png", dpi=120)
    draw_pieces(rows).savefig(out / "pieces.png", dpi=120)
    draw_curves(rows, CURVES).savefig(out / "curves.png", dpi=120)
    if readme:
        write_readme(readme, table(rows))


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
    cells = chosen(options)
    out = writable_folder(options.out)
    path = out / "results.csv"
    need_matplotlib()
    if options.found:
        if not path.exists() or not read(path):
            stop(f"there are no results in --out {out}")
        rows = read(path)
        write_results(out, rows, options.readme)
        print(table(rows))
        return rows

    size = QUICK_SIZE if options.quick else SIZE
    if options.steps is not None:
        size = {**size, "steps": options.steps, "every": min(10, options.steps)}
    if size["steps"] % size["every"]:
        stop(f"--steps {size['steps']} is not a multiple of {size['every']}")
    base = {**BASE, "layers": QUICK_LAYERS} if options.quick else BASE
    text, text_name = read_text(options.text)
    configs = {cell: {**base, **differences} for cell, differences, _ in cells}
    longest = max(config["test_to"] or size["window"] for config in configs.values())
    need_enough(text, text_name, longest)

    # The text, as numbers. The last tenth is not trained on.
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    ids = np.array([number[character] for character in text], dtype="int32")
    first = int(0.9 * len(ids))

    conditions = describe(size, base, text, text_name)
    done = resume(path, conditions)
    # All cells with one seed, then with the next: what is there tells something
    # wherever it is interrupted.
    runs = [
        (cell, seed)
        for seed in range(max(seeds for _, _, seeds in cells))
        for cell, _, seeds in cells
        if seed < seeds
    ]
    left = [run for run in runs if run not in done]
    print(conditions)
    print(f"{len(runs)} runs of {len(configs)} cells; {len(left)} are left to run")
    if options.list:
        for cell in configs:
            finished = sum(run in done for run in runs if run[0] == cell)
            print(f"  {cell}: {finished} of {sum(run[0] == cell for run in runs)}")
        return read(path)

    keep_freed_memory()
    trainer = Trainer(ids, first, len(characters), size)
    counted = {
        key: f"{value:.4f}"
        for key, value in guesses(ids, first, len(characters)).items()
    }
    spent = 0.0
    for index, (cell, seed) in enumerate(left, start=1):
        result = trainer.run(configs[cell], seed)
        result |= {"cell": cell, "seed": seed, "conditions": conditions, **counted}
        append(path, result)
        spent += float(result["seconds"])
        told = f"{result['loss']:.3f} nats"
        if result["diverged_at"] != "":
            told = f"diverged at step {result['diverged_at']}"
        print(
            f"{index}/{len(left)} {cell}, seed {seed}: {told}, {result['seconds']} s; "
            f"{spent / index * (len(left) - index) / 60:.0f} min left",
            flush=True,
        )
    rows = read(path)
    write_results(out, rows, options.readme)
    print(table(rows))
    print(f"results.csv, table.md, norms.png, pieces.png, curves.png in {out}")
    return rows


if __name__ == "__main__":
    main()
