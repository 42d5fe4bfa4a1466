"""The house: imports point one way, and importing it asks for no extra."""

import ast
import pathlib
import subprocess
import sys

import pytest

import keras_tx

PACKAGE = pathlib.Path(keras_tx.__file__).parent

# A module may import from the rows above its own. The last row's modules, and
# those of any row, never import one another.
HOUSE = [
    ["_version", "_backend"],
    ["checks"],
    ["serialization"],
    ["masks", "cache", "recording", "data", "sampling"],
    ["norms", "kernels", "positions", "recompute", "remat"],
    ["blockwise", "losses", "reading"],
    ["attention", "embeddings", "feed_forward"],
    ["blocks"],
    ["models"],
    ["generation", "pretrained", "inspection"],
]
ROWS = {module: row for row, modules in enumerate(HOUSE) for module in modules}


def modules():
    """Returns `(file, module)` for every file; a folder counts as one module."""
    files = sorted(PACKAGE.rglob("*.py"))
    return [
        (file, file.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        for file in files
        if file != PACKAGE / "__init__.py"
    ]


def house_imports(source, package):
    """Returns the modules of the house that a file imports, wherever it does.

    Args:
        source: Text of the file.
        package: Dotted name of the package that the file lies in.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Each level beyond the first climbs one package.
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(above if node.level else []), node.module or ""])
            base = base.strip(".")
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "keras_tx":
                found.add(parts[1] if len(parts) > 1 else "__init__")
    return found


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=PACKAGE.parent,
    )


def test_every_module_has_a_row():
    unknown = sorted({module for _, module in modules()} - set(ROWS))
    assert not unknown, (
        f"{unknown} are not in the table of tests/test_house.py. Give each the "
        "highest row whose modules it does not need."
    )


@pytest.mark.parametrize(
    "file", [file for file, _ in modules()], ids=lambda f: str(f.relative_to(PACKAGE))
)
def test_imports_point_up_the_house(file):
    module = dict(modules())[file]
    folder = ".".join(file.relative_to(PACKAGE.parent).parts[:-1])
    for imported in house_imports(file.read_text(encoding="utf-8"), folder):
        if imported == module and file.parent != PACKAGE:
            continue  # a folder's files are one module
        assert imported in ROWS, f"{file.name} imports {imported}, which has no row"
        assert ROWS[imported] < ROWS[module], (
            f"{file.name} imports {imported}, which is not above it. See the "
            "table of tests/test_house.py."
        )


def test_every_way_to_import_is_seen():
    source = (
        "import keras_tx.blocks\n"
        "from keras_tx import masks\n"
        "from keras_tx.models import decoder\n"
        "def f():\n    from . import names\n    from ..norms import RMSNorm\n"
        "import keras, keras_tx\n"
    )
    assert house_imports(source, "keras_tx.pretrained") == {
        "__init__",
        "blocks",
        "masks",
        "models",
        "norms",
        "pretrained",
    }


def test_importing_needs_only_keras_and_its_backend():
    done = run(
        "import sys, keras\n"
        "before = set(sys.modules)\n"
        "import keras_tx\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - set(sys.stdlib_module_names)))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "['keras_tx']"


@pytest.mark.parametrize("name", ["tensorflow", "jax", "torch"])
def test_a_missing_backend_is_answered_with_the_line_that_installs_it(name):
    done = run(
        "import os, sys\n"
        f"os.environ['KERAS_BACKEND'] = {name!r}\n"
        "for backend in ('tensorflow', 'jax', 'torch'):\n"
        "    sys.modules[backend] = None  # as if it were not installed\n"
        "import keras_tx"
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: keras_tx needs the {name} backend")
    assert f'pip install "keras-tx[{name}]"' in last
    assert "Installed already" not in last


def test_a_backend_that_is_installed_is_offered_for_a_missing_one():
    other = keras_tx._backend.chosen_backend()
    missing = "jax" if other != "jax" else "torch"
    done = run(
        "import os, sys\n"
        f"os.environ['KERAS_BACKEND'] = {missing!r}\n"
        f"sys.modules[{missing!r}] = None\n"
        "import keras_tx"
    )
    last = done.stderr.strip().splitlines()[-1]
    assert f'pip install "keras-tx[{missing}]"' in last
    assert other in last.split("Installed already: ")[1]


def test_a_backend_that_is_not_ours_is_refused_by_name():
    done = run("import os; os.environ['KERAS_BACKEND'] = 'numpy'; import keras_tx")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: keras_tx runs on the Keras backends")
    assert "'numpy'" in last and "tensorflow, jax, torch" in last


def test_keras_file_of_settings_is_read(tmp_path):
    (tmp_path / "keras.json").write_text('{"backend": "jax"}')
    done = run(
        "import os, sys\n"
        "os.environ.pop('KERAS_BACKEND', None)\n"
        f"os.environ['KERAS_HOME'] = {str(tmp_path)!r}\n"
        "sys.modules['jax'] = None\n"
        "import keras_tx"
    )
    assert 'pip install "keras-tx[jax]"' in done.stderr


def test_the_backend_that_keras_runs_on_outranks_the_environment(monkeypatch):
    running = keras_tx._backend.chosen_backend()
    monkeypatch.setenv("KERAS_BACKEND", "numpy")
    assert keras_tx._backend.chosen_backend() == running
