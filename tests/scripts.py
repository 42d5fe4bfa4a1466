"""How tests get at the scripts in examples/ and benchmarks/."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def load(path):
    """Returns a script, by its path in the repository, as a module."""
    path = ROOT / path
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def last_line(example, capsys, *arguments):
    """Runs `main`, which must fail, and returns the one line that it ends with."""
    with pytest.raises(SystemExit) as ending:
        example.main([str(argument) for argument in arguments])
    code = ending.value.code
    assert code not in (0, None)
    # A string is what Python prints before it exits with 1; the parser of the
    # command line prints its usage and one line, and exits with 2.
    line = code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]
    assert line.startswith(f"{example.__name__}.py: ")
    assert "\n" not in line
    assert not line.endswith("..")
    return line


def run(path, *arguments, cwd):
    """Runs a script in a process of its own, where the package is found."""
    search = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, ROOT / path, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))},
        capture_output=True,
        text=True,
    )


def check_results(example, result, out, picture):
    """Asserts what every example leaves, besides what it says."""
    written = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(result))
    assert written["example"] == example.__name__
    for key in (
        "seed",
        "seconds",
        "parameters",
        "data",
        "keras",
        "keras_tx",
        "backend",
    ):
        assert written[key] not in ("", None), key
    assert (out / picture).read_bytes().startswith(b"\x89PNG")
    # Saved, loaded, and not a bit of difference.
    assert (out / "model.keras").exists()
    assert result["reload_difference"] == 0.0


def check_unwritable(example, tmp_path, capsys, *arguments):
    """Asserts that a folder which takes no files is named before the work."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        line = last_line(example, capsys, *arguments, "--out", out)
        assert f"cannot write to --out {out}" in line


def check_missing(example, tmp_path, capsys, monkeypatch, package, *arguments):
    """Asserts that a package which is not there is named, with the extra."""
    monkeypatch.setitem(sys.modules, package, None)
    line = last_line(example, capsys, *arguments, "--out", tmp_path)
    assert f"{package} is missing" in line
    assert "keras-tx[examples]" in line
