"""What the examples reach, over seeds: writes EXAMPLES.md and the README's table.

    python benchmarks/examples.py                        # all of them, three seeds
    python benchmarks/examples.py --examples masked_lm --seeds 0
    python benchmarks/examples.py --found FOLDER         # only tables what ran there
    python benchmarks/examples.py --readme README.md     # into the README too

Runs `examples/NAME.py --seed S --out FOLDER/NAME_BACKEND_S`, one process after
another, and tables the `result.json` of each. How a result is measured stands at the
top of each example. A run whose result is in FOLDER already is not repeated. What the
files tell of examples that did not run stays there. The backend is chosen by
KERAS_BACKEND.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
MARKERS = "<!-- results:examples -->", "<!-- /results -->"

# For each example what it does, its data and their licence, and what is told of a
# result: a name, how to get at it, and whether it is what the example is about. What
# is called "baseline ..." is not the model's.
EXAMPLES = {
    "classify_digits": (
        "tell handwritten digits apart",
        "scikit-learn's digits (CC BY 4.0)",
        {
            "accuracy": lambda r: r["accuracy"],
            "at one look": lambda r: r["accuracy_at_one_look"],
            "baseline support vector machine": lambda r: r["baseline"],
        },
    ),
    "classify_language": (
        "tell 14 languages apart",
        "names in `emoji` (BSD-3-Clause, from Unicode CLDR)",
        {
            "accuracy": lambda r: r["accuracy"],
            "of each of its encoders": lambda r: statistics.mean(r["accuracy_of_each"]),
            "of all its encoders": lambda r: r["accuracy_of_encoders"],
            "of its count": lambda r: r["accuracy_of_count"],
            "baseline logistic regression on runs of 1 to 4 characters": (
                lambda r: r["baseline"]
            ),
        },
    ),
    "translate_dates": (
        "read dates of 25 locales",
        "written by `Babel` (BSD-3-Clause, from Unicode CLDR)",
        {
            "exact": lambda r: r["exact"],
            "exact, locale not told": lambda r: r["exact_untold"],
            "exact, unseen locales": lambda r: r["exact_unseen_locales"],
            "impossible days copied": lambda r: r["exact_impossible"],
        },
    ),
    "masked_lm": (
        "fill in hidden characters",
        "`pydoc_data.topics` (PSF)",
        {
            "top-1": lambda r: r["top_1"]["encoder"],
            "top-5": lambda r: r["top_5"]["encoder"],
            "baseline bigram, top-1": lambda r: r["top_1"]["bigram"],
            "baseline bigram, top-5": lambda r: r["top_5"]["bigram"],
            "baseline unigram, top-1": lambda r: r["top_1"]["unigram"],
            "baseline unigram, top-5": lambda r: r["top_5"]["unigram"],
            "baseline both neighbours, top-1": lambda r: r["top_1"]["neighbours"],
            "baseline both neighbours, top-5": lambda r: r["top_5"]["neighbours"],
        },
    ),
}


def backend():
    """Returns the backend that the examples will run on."""
    return os.environ.get("KERAS_BACKEND", "tensorflow")


def place(name, seed, folder):
    """Returns where a run leaves its results."""
    return folder / f"{name}_{backend()}_{seed}"


def read_text(path):
    return path.read_text(encoding="utf-8") if path.exists() else ""


def read(name, seed, folder):
    """Returns the result of an earlier run, or `None`."""
    path = place(name, seed, folder) / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def run(name, seed, folder):
    """Returns the result of one training, from its own process."""
    if read(name, seed, folder) is None:
        script = HERE.parent / "examples" / f"{name}.py"
        out = place(name, seed, folder)
        command = [sys.executable, script, "--seed", str(seed), "--out", out]
        subprocess.run(command, check=True)
    return read(name, seed, folder)


def check_alike(results):
    """Means are over seeds and what follows from them, nothing else."""
    keys = ("example", "data", "python", "keras", "backend", "held_out")
    seen = {
        tuple(r[key] for key in keys)
        + tuple(
            sorted(
                (key, str(value))
                for key, value in r["options"].items()
                if key not in ("seed", "out")
            )
        )
        for r in results
    }
    if len(seen) > 1:
        sys.exit(f"These runs differ in more than their seed: {sorted(seen)}.")


def over_seeds(values):
    """Returns the mean and the standard deviation in words."""
    mean = f"{statistics.mean(values):.3f}"
    if len(set(values)) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values):.3f}"


def duration(results):
    """Returns the processor time of training, in the median.

    The clock on the wall would tell as much of what else the machine did.
    """
    return f"{statistics.median(r['processor_seconds'] for r in results):.0f} s"


def told(name, results, baseline):
    """Returns what is measured in words: of the baselines, or of the model."""
    words = []
    for measure, get in EXAMPLES[name][2].items():
        if measure.startswith("baseline ") == baseline:
            what = measure.removeprefix("baseline ")
            words.append(f"{what} {over_seeds([get(r) for r in results])}")
    return "; ".join(words) or "none"


def conditions(found):
    """Returns under what all of it was measured."""
    one = next(iter(found.values()))[0]
    return (
        f"Keras {one['keras']}, Python {one['python']}, {os.cpu_count()} CPU cores; "
        "mean ± standard deviation over the seeds, and the median processor time of "
        "training with its compilation, all cores added up."
    )


def row(name, results):
    task, data, _ = EXAMPLES[name]
    return (
        f"| `examples/{name}.py` | {task} | {data} | {told(name, results, True)} | "
        f"{told(name, results, False)} | {len(results)} | {duration(results)} | "
        f"{results[0]['backend']} |"
    )


def table(found, before=""):
    """Returns the README's table.

    Args:
        found: `{name: results}`.
        before: Text with the table of before, whose other rows stay.
    """
    rows = {
        name: line
        for name in EXAMPLES
        for line in before.splitlines()
        if line.startswith(f"| `examples/{name}.py` |")
    }
    rows |= {name: row(name, results) for name, results in found.items()}
    lines = [
        "| example | task | data and licence | baseline | result | seeds | processor "
        "time | backend |",
        "|---" * 8 + "|",
        *(rows[name] for name in EXAMPLES if name in rows),
    ]
    return "\n".join([*lines, "", conditions(found)])


def numbers_of(results):
    """Returns how many parameters, which may follow from what a seed holds out."""
    counts = sorted({r["parameters"] for r in results})
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))


def page(found, before=""):
    """Returns EXAMPLES.md: the same, and every run."""
    sections = {
        part.partition("\n")[0]: f"## {part.strip()}"
        for part in before.split("\n## ")[1:]
    }
    sections |= {name: section(name, results) for name, results in found.items()}
    intro = (
        "# What the examples reach\n\n`python benchmarks/examples.py`. How a result is "
        "measured stands at the top of each example."
    )
    parts = [intro, table(found, before)]
    parts += [sections[name] for name in EXAMPLES if name in sections]
    return "\n\n".join(parts) + "\n"


def section(name, results):
    """Returns all runs of an example."""
    measures = EXAMPLES[name][2]
    lines = [
        f"## {name}",
        "",
        f"{numbers_of(results)} parameters, {results[0]['held_out']:,} "
        f"examples held out; {results[0]['data']}.",
        "",
        "| seed | "
        + " | ".join(m.removeprefix("baseline ") for m in measures)
        + " | training | reloaded logits differ by |",
        "|---" * (len(measures) + 3) + "|",
    ]
    for r in results:
        cells = " | ".join(f"{get(r):.4f}" for get in measures.values())
        lines.append(
            f"| {r['seed']} | {cells} | {r['processor_seconds']:.0f} s | "
            f"{r['reload_difference']} |"
        )
    return "\n".join(lines)


def write_readme(path, found):
    """Puts the table between its markers."""
    readme = path.read_text(encoding="utf-8")
    before, start, rest = readme.partition(MARKERS[0])
    now, end, after = rest.partition(MARKERS[1])
    if not start or not end:
        sys.exit(f"{path} has no place for results: {' '.join(MARKERS)}.")
    text = f"{before}{start}\n{table(found, now)}\n{end}{after}"
    path.write_text(text, encoding="utf-8")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--examples", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--folder", type=pathlib.Path, default=HERE.parent / "runs" / "examples")
    add("--found", type=pathlib.Path, help="run nothing, table these")
    add("--out", type=pathlib.Path, default=HERE / "EXAMPLES.md")
    add("--readme", type=pathlib.Path, help="whose table to write too")
    options = parser.parse_args(arguments)
    found = {}
    for name in options.examples:
        if options.found is None:
            results = [run(name, seed, options.folder) for seed in options.seeds]
        else:
            results = [read(name, seed, options.found) for seed in options.seeds]
        results = [result for result in results if result is not None]
        if results:
            check_alike(results)
            found[name] = results
    if not found:
        sys.exit(f"There are no results of {backend()} in {options.found}.")
    text = page(found, read_text(options.out))
    print(text)
    options.out.write_text(text, encoding="utf-8")
    if options.readme:
        write_readme(options.readme, found)


if __name__ == "__main__":
    main()
