"""What the example learns, over seeds: writes benchmarks/CHAR_LM.md.

    python benchmarks/char_lm.py                      # both presets, three seeds
    python benchmarks/char_lm.py --seeds 0 --presets default
    python benchmarks/char_lm.py --found FOLDER       # only tables what ran there

Runs `examples/train_char_lm.py --preset P --seed S --out FOLDER/PS`, one process
after another, and tables the `result.json` of each. The protocol stands in the
example. A run whose result is in FOLDER already is not repeated.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
SCRIPT = HERE.parent / "examples" / "train_char_lm.py"


def run(preset, seed, folder, again):
    """Returns the result of one training, from its own process."""
    out = folder / f"{preset}{seed}"
    if again and not (out / "result.json").exists():
        command = [sys.executable, SCRIPT, "--preset", preset, "--seed", str(seed)]
        subprocess.run([*command, "--out", out], check=True)
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def mean_and_deviation(values):
    mean = statistics.mean(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{mean:.4f} ± {deviation:.4f}"


def table(found):
    """Returns the page on the results of each preset, a list per preset."""
    one = next(iter(found.values()))[0]
    seen = {
        (r["text_sha256"], r["python"], r["keras"], r["backend"])
        for results in found.values()
        for r in results
    }
    if len(seen) > 1:
        sys.exit(f"These runs differ in more than preset and seed: {sorted(seen)}.")
    lines = [
        "# What the example learns",
        "",
        "`python benchmarks/char_lm.py`. Python "
        f"{one['python']}, keras {one['keras']} on {one['backend']}; "
        f"{one['text']}, {one['text_characters']:,} characters, SHA-256 "
        f"`{one['text_sha256']}`. Cross-entropy in nats per character over all "
        f"{one['held_out_characters']:,} characters of the held-out tenth; how it is "
        "counted stands in `examples/train_char_lm.py`.",
        "",
        "| preset | parameters | steps | seed | loss | bits per character | "
        "loss with half a window of context | reloaded logits differ by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for preset, results in found.items():
        for r in results:
            lines.append(
                f"| {preset} | {r['parameters']:,} | {r['options']['steps']:,} | "
                f"{r['seed']} | {r['loss']:.4f} | {r['bits_per_character']:.4f} | "
                f"{r['loss_with_context']:.4f} | {r['reload_difference']} |"
            )
        columns = ("loss", "bits_per_character", "loss_with_context")
        means = " | ".join(mean_and_deviation([r[c] for r in results]) for c in columns)
        lines.append(f"| **{preset}, mean ± sd** | | | | {means} | |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["nanogpt", "default"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=pathlib.Path, default=HERE.parent / "runs")
    parser.add_argument("--found", type=pathlib.Path, help="run nothing, table these")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "CHAR_LM.md")
    options = parser.parse_args()
    folder = options.found or options.folder
    found = {
        preset: [run(preset, seed, folder, not options.found) for seed in options.seeds]
        for preset in options.presets
    }
    text = table(found)
    print(text)
    options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
