"""What the examples have in common, and the script that measures them."""

import ast
import json

import pytest
import scripts

EXAMPLES = sorted((scripts.ROOT / "examples").glob("*.py"))
BENCHMARK = scripts.load("benchmarks/examples.py")
# A script can be copied on its own, so what several need stands in each.
COPIED = (
    "at_least",
    "above_zero",
    "keep_freed_memory",
    "need",
    "share",
    "writable_folder",
)


def functions(path):
    """Returns `{name: source}` of a file's functions."""
    text = path.read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(text, node)
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("name", COPIED)
def test_what_is_copied_is_alike(name):
    copies = {functions(path)[name] for path in EXAMPLES if name in functions(path)}
    assert len(copies) == 1


@pytest.mark.parametrize("name", ["train_char_lm", *BENCHMARK.EXAMPLES])
def test_a_script_stands_alone(name):
    path = scripts.ROOT / "examples" / f"{name}.py"
    others = {other.stem for other in EXAMPLES} | {"scripts"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module not in others
        if isinstance(node, ast.Import):
            assert not {alias.name for alias in node.names} & others


def result_of(name, seed, shift=0.0):
    """Returns what an example would leave, with round numbers."""
    result = {
        "example": name,
        "seed": seed,
        "seconds": 99.0 + seed,
        "processor_seconds": 60.0 + seed,
        "parameters": 1234,
        "held_out": 397,
        "reload_difference": 0.0,
        "data": "a package 1.2",
        "python": "3.11.7",
        "keras": "3.15.1",
        "keras_tx": "0.1.0",
        "backend": "tensorflow",
        "accuracy": 0.97 + shift,
        "accuracy_of_each": [0.8, 0.9],
        "accuracy_of_encoders": 0.95,
        "accuracy_of_count": 0.7,
        "accuracy_at_one_look": 0.6,
        "exact": 0.99 + shift,
        "exact_untold": 0.9,
        "exact_unseen_locales": 0.6,
        "exact_impossible": 0.8,
        "baseline": 0.965,
        "top_1": {"encoder": 0.8, "bigram": 0.3, "unigram": 0.2, "neighbours": 0.5},
        "top_5": {"encoder": 0.9, "bigram": 0.6, "unigram": 0.4, "neighbours": 0.7},
        "options": {},
    }
    return json.loads(json.dumps(result))


@pytest.fixture
def folder(tmp_path):
    for name in BENCHMARK.EXAMPLES:
        for seed, shift in enumerate((-0.01, 0.0, 0.01)):
            out = tmp_path / f"{name}_{BENCHMARK.backend()}_{seed}"
            out.mkdir()
            result = result_of(name, seed, shift)
            (out / "result.json").write_text(json.dumps(result), encoding="utf-8")
    return tmp_path


def test_tables_tell_mean_and_deviation_over_seeds(folder, tmp_path):
    page, readme = tmp_path / "EXAMPLES.md", tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results:examples -->\nstale\n<!-- /results -->\nafter\n"
        "<!-- results:other -->\nkept\n<!-- /results -->\n"
    )
    BENCHMARK.main(
        ["--found", str(folder), "--out", str(page), "--readme", str(readme)]
    )
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- results:examples -->\n|")
    assert "stale" not in text and "kept" in text and "\nafter\n" in text
    for name in BENCHMARK.EXAMPLES:
        assert f"`examples/{name}.py`" in text
        assert name in page.read_text(encoding="utf-8")
    assert "0.970 ± 0.010" in text and "0.965" in text
    assert "| 3 | 61 s |" in text
    assert "Keras 3.15.1" in text


def test_results_under_other_conditions_are_not_averaged(folder):
    path = folder / f"classify_digits_{BENCHMARK.backend()}_1" / "result.json"
    result = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(result | {"keras": "3.12.0"}), encoding="utf-8")
    with pytest.raises(SystemExit) as ending:
        BENCHMARK.main(["--found", str(folder), "--out", str(folder / "page.md")])
    assert "differ in more than their seed" in str(ending.value)


def test_what_was_not_run_is_left_out(folder, tmp_path):
    for name in list(BENCHMARK.EXAMPLES)[1:]:
        for seed in range(3):
            (folder / f"{name}_{BENCHMARK.backend()}_{seed}" / "result.json").unlink()
    (folder / f"classify_digits_{BENCHMARK.backend()}_1" / "result.json").unlink()
    page = tmp_path / "page.md"
    BENCHMARK.main(["--found", str(folder), "--out", str(page)])
    text = page.read_text(encoding="utf-8")
    assert "| 2 | 61 s |" in text and "masked_lm" not in text
    with pytest.raises(SystemExit) as ending:
        BENCHMARK.main(["--found", str(tmp_path / "none"), "--out", str(page)])
    assert "There are no results" in str(ending.value)


def test_what_was_not_run_again_stays_as_it_was(folder, tmp_path):
    page, readme = tmp_path / "page.md", tmp_path / "README.md"
    readme.write_text("<!-- results:examples -->\n<!-- /results -->\n")
    command = ["--found", str(folder), "--out", str(page), "--readme", str(readme)]
    BENCHMARK.main(command)
    before = page.read_text(encoding="utf-8"), readme.read_text(encoding="utf-8")
    BENCHMARK.main([*command, "--examples", "masked_lm"])
    assert before == (
        page.read_text(encoding="utf-8"),
        readme.read_text(encoding="utf-8"),
    )
    BENCHMARK.main([*command, "--examples", "masked_lm", "--seeds", "1"])
    changed = page.read_text(encoding="utf-8")
    assert changed.count("| 3 | 61 s |") == 3 and changed.count("| 1 | 61 s |") == 1


def test_every_example_in_the_table_is_there():
    for name in BENCHMARK.EXAMPLES:
        assert (scripts.ROOT / "examples" / f"{name}.py").exists()


@pytest.mark.parametrize("name", ["train_char_lm", *BENCHMARK.EXAMPLES])
def test_help_is_given(name, capsys):
    with pytest.raises(SystemExit) as ending:
        scripts.load(f"examples/{name}.py").main(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {name}.py" in shown
    assert "--out FOLDER" in shown and "(default: " in shown
