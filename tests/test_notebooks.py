"""The notebooks run from top to bottom, and keep what they showed."""

import ast
import base64
import json
import pathlib
import re
import sys

import keras
import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))
# What a cell may print, and what it must not: paths of whoever ran it, progress.
FOREIGN = re.compile(
    r"(?:^|[\s'\"(=])/(?:home|root|tmp|usr|opt|var|Users|mnt|work)/"
    r"|[A-Z]:\\|site-packages|Epoch \d+/\d+|\x08|━"
)
MOST_CELLS = 25
# What they show of the models they train is looked at, not asserted.
ONE_EPOCH = {"06_your_own_model.ipynb"}
MOST_BYTES = 1_500_000


def cells(name, kind="code"):
    notebook = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def pictures(cell):
    found = [output.get("data", {}) for output in cell["outputs"]]
    return [data["image/png"] for data in found if "image/png" in data]


def execute(name):
    """Runs the code of a notebook as a kernel would, in this process."""
    namespace = {"__name__": "__main__"}
    for index, cell in enumerate(cells(name)):
        place = f"notebooks/{name}, code cell {index + 1}"
        exec(compile(source(cell), place, "exec"), namespace)


# They take gradients with TensorFlow's tape, so that they are of that backend.
if keras.backend.backend() == "tensorflow":

    @pytest.mark.parametrize("name", NAMES)
    def test_every_notebook_runs_from_top_to_bottom(
        name, tmp_path, monkeypatch, capsys
    ):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", sys.path.copy())
        if name in ONE_EPOCH:
            fit = keras.Model.fit

            def once(model, *args, **options):
                return fit(model, *args, **{**options, "epochs": 1})

            monkeypatch.setattr(keras.Model, "fit", once)
        try:
            with matplotlib.rc_context():
                execute(name)
        finally:
            pyplot.close("all")


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_import_the_layers_and_define_none(name):
    tree = ast.parse("\n".join(map(source, cells(name))))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert "keras_tx" in imported
    assert not [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_kept_as_one_run_left_them(name):
    code = cells(name)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [o for o in outputs if o["output_type"] == "error"]
    assert not [o for o in outputs if o.get("name") == "stderr"], "a warning was kept"
    assert any(map(pictures, code)), "a notebook without a picture"


@pytest.mark.parametrize("name", NAMES)
def test_outputs_say_nothing_of_the_machine(name):
    for cell in cells(name):
        for output in cell["outputs"]:
            shown = [output.get("text", [])]
            shown += [
                text
                for kind, text in output.get("data", {}).items()
                if kind.startswith("text/")
            ]
            for text in shown:
                found = FOREIGN.search("".join(text))
                assert not found, f"{source(cell)[:80]!r} printed {found[0]!r}"


@pytest.mark.parametrize("name", NAMES)
def test_links_within_the_repository_lead_somewhere(name):
    prose = "\n".join(map(source, cells(name, "markdown")))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        assert "://" in link or (FOLDER / link).exists(), link


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_can_be_read_in_one_sitting(name):
    assert len(cells(name)) + len(cells(name, "markdown")) <= MOST_CELLS
    assert (FOLDER / name).stat().st_size <= MOST_BYTES
    lines = [len(source(cell).splitlines()) for cell in cells(name)]
    assert max(lines) <= 50


def test_pictures_of_the_readme_are_those_of_the_notebooks():
    named = {
        tag.removeprefix("picture:"): cell
        for name in NAMES
        for cell in cells(name)
        for tag in cell["metadata"].get("tags", [])
        if tag.startswith("picture:")
    }
    files = {path.stem: path for path in (FOLDER / "figures").glob("*.png")}
    assert sorted(named) == sorted(files)
    for name, cell in named.items():
        (picture,) = pictures(cell)
        assert files[name].read_bytes() == base64.b64decode("".join(picture))
        assert files[name].stat().st_size < 150_000
