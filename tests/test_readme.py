"""The README: its code runs, its names are the public ones, its links lead on."""

import pathlib
import re

import pytest

import keras_tx

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.M | re.S)


def between(start, end):
    """Returns the text between two HTML comments."""
    return README.split(f"<!-- {start} -->")[1].split(f"<!-- {end} -->")[0]


def anchors():
    """Returns the anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", README, re.M)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in headings
    }


def test_python_blocks_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for index, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, block {index}", "exec"), namespace)
    # It has learnt its two sentences.
    printed = capsys.readouterr().out
    assert "the cat sat on the mat. the dog sat on the log.\n" in printed


def test_the_first_block_is_about_fifteen_lines():
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 16


def test_names_are_the_public_ones():
    table = between("names", "/names")
    first_cells = re.findall(r"^\|([^|]*)\|", table, re.M)
    names = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == keras_tx.__all__


@pytest.mark.parametrize("name", ["main", "tests"])
def test_a_command_is_one_line_in_a_block_of_its_own(name):
    marker = f"<!-- command: {name} -->\n```bash\n"
    assert README.count(marker) == 1
    command, _, rest = README.split(marker)[1].partition("\n")
    assert rest.startswith("```\n")
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install ")


def test_links_within_the_repository_lead_somewhere():
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    links += re.findall(r'src="([^"]+)"', README)
    inner = [link for link in links if "://" not in link]
    assert inner
    for link in inner:
        path, _, anchor = link.partition("#")
        assert (ROOT / path).exists(), link
        assert not anchor or (not path and anchor in anchors()), link


def test_the_tree_is_the_one_on_disk():
    tree = between("tree", "/tree").replace("```", "").strip()
    folder, listed = "", set()
    for line in tree.splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            name = folder + name
        elif name.endswith("/"):
            folder = name
        listed.add(name)
        assert (ROOT / name).exists(), f"{name} is in the tree of README.md only"
    package = ROOT / "keras_tx"
    parts = {
        f"keras_tx/{path.name}{'/' if path.is_dir() else ''}"
        for path in package.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    missing = parts - listed - {"keras_tx/__init__.py"}
    assert not missing, f"{sorted(missing)} should be in the tree of README.md"


def test_places_for_measured_results_are_closed():
    opened = re.findall(r"<!-- (results:\w+) -->", README)
    assert opened
    assert README.count("<!-- /results -->") == len(opened)
