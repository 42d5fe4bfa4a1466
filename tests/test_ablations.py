"""The ablation study, made small: its grid, its file, its tables and figures."""

import math

import keras
import numpy as np
import pytest
import scripts


@pytest.fixture(scope="module")
def study():
    study = scripts.load("examples/ablations.py")
    make, made = study.Trainer, []

    def trainer(*arguments):
        """Makes one for all tests, so that models are compiled once."""
        if not made:
            made.append(make(*arguments))
        return made[0]

    study.Trainer = trainer
    return study


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = np.random.default_rng(0).choice(["naïve", "cat", "on", "mats\n"], 500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("made") / "by" / "study"


@pytest.fixture(scope="module")
def rows(study, text, out):
    """A base model, and one whose rate is far too high, from one compilation."""
    return study.main(
        f"--quick --cells base rate --seeds 2 --text {text} --out {out}".split()
    )


def made_up(study, cells=None, seeds=3):
    """Returns rows as `read` does: each cell's loss falls with its place."""
    cells = study.distinct(study.CORE + study.LONG) if cells is None else cells
    return [
        {
            "cell": cell,
            "seed": seed,
            "loss": math.nan if cell == "norm=none" and seed else 2 + 0.1 * seed,
            "longer": {64: 2.0, 128: 2.5, 256: 3.5}
            if differences.get("test_to")
            else {},
            "curve": [4.0, 3.0, 2.0][: 1 if cell == "norm=none" and seed else 3],
            "unigram": 3.1,
            "bigram": 2.4,
            "cpu_seconds": 20.0,
            "conditions": "30 steps of 4 windows",
        }
        for cell, differences in cells.items()
        for seed in range(seeds)
    ]


def test_the_core_grid_is_the_one_that_was_promised(study):
    cells = study.distinct(study.CORE)
    norms = {
        study.norm_cell(norm, rate, warmup)
        for norm in ("pre", "post", "none")
        for rate in study.RATES
        for warmup in (True, False)
    }
    assert len(norms) == 18 and len(study.RATES) == 3
    assert norms <= set(cells)
    assert next(iter(cells)) == "base"
    assert "residual=none" in cells
    scaled = [cell for cell in cells if "head_dim=128" in cell]
    assert [cell for cell in scaled if "scaled=off" in cell] != scaled
    positions = {
        study.complete(differences)["position"] for differences in cells.values()
    }
    assert positions == {"none", "sinusoidal", "learned", "rotary"}


def test_a_name_tells_all_that_differs(study):
    every = study.CORE + study.LONG
    configs = {tuple(study.complete(cell).items()) for cell in every}
    assert len(study.distinct(every)) == len(configs)
    assert study.name(dict(study.BASE)) == "base"


@pytest.mark.parametrize("place", range(24))
def test_differences_are_of_what_the_base_model_has(study, place):
    cells = [*study.CORE, *study.LONG]
    for cell in cells[place::24]:
        assert set(cell) <= set(study.BASE)


@pytest.mark.parametrize(
    "differences",
    [
        {"norm": "none", "residual": "parallel", "feed_forward": False},
        {"norm": "sandwich", "position": "alibi", "heads": 2},
        {"norm": "post", "position": "learned", "residual": "none"},
        {"position": "rotary", "heads": 1, "head_dim": 6, "scaled": False},
    ],
)
def test_a_model_is_what_its_configuration_says(study, differences):
    config = study.complete(differences) | {"layers": 1}
    size = {"dim": 8, "window": 5}
    model = study.build(config, size, vocab_size=7)
    block = model.get_layer("block_0")
    assert block.residual == config["residual"]
    assert block.attention.num_heads == config["heads"]
    assert block.attention.head_dim == (config["head_dim"] or 8 // config["heads"])
    assert block.attention.attention.scale == (None if config["scaled"] else 1.0)
    kernels = [w for w in block.weights if w.path.endswith("kernel")]
    assert len(kernels) == (6 if config["feed_forward"] else 4)
    norms = {"none": 0, "pre": 2, "post": 2, "sandwich": 4}[config["norm"]]
    assert len([w for w in block.weights if w.path.endswith("gamma")]) == norms
    before, after = (
        keras.ops.convert_to_numpy(model(np.array([[1, 2, 3, 4, n]]))) for n in (5, 6)
    )
    np.testing.assert_array_equal(before[:, :4], after[:, :4])  # causal


def test_queries_and_keys_start_with_a_variance_of_one(study):
    config = study.complete({"heads": 1, "head_dim": 96, "layers": 1})
    block = study.build(config, {"dim": 32, "window": 5}, 7).get_layer("block_0")
    x = np.random.default_rng(0).normal(size=(200, 32))
    for projection in (block.attention.query, block.attention.key):
        kernel = keras.ops.convert_to_numpy(projection.kernel).reshape(32, 96)
        assert np.var(x @ kernel) == pytest.approx(1, rel=0.1)


def test_the_rate_rises_and_falls_or_falls_only(study):
    with_warmup, without = (
        [study.learning_rate(step, 20, 2.0, warmup) for step in range(20)]
        for warmup in (True, False)
    )
    assert with_warmup[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert without[0] == 2.0
    for rates in (with_warmup[3:], without):
        assert (np.diff(rates) <= 1e-12).all()
    assert 0 < with_warmup[-1] < 0.2 and 0 < without[-1] < 0.2


def test_guesses_count_what_was_trained_on(study):
    ids = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    found = study.guesses(ids, 8, 3)
    assert found["unigram"] == pytest.approx(-np.log(5 / 11))
    # After 0 came 1 four times; after 1 came 0 three times; each plus one of three.
    assert found["bigram"] == pytest.approx(-(np.log(4 / 6) + np.log(5 / 7)) / 2)


def test_a_run_ends_in_a_loss_or_in_the_step_where_it_diverged(rows):
    assert [row["cell"] for row in rows] == ["base", "rate=1000000.0"] * 2
    for row in rows[::2]:
        assert 0 < row["loss"] < 10
        assert row["diverged_at"] == ""
        assert len(row["curve"]) == 3
    for row in rows[1::2]:
        assert math.isnan(row["loss"]) or row["loss"] > 10


def test_seeds_differ(rows):
    assert rows[0]["loss"] != rows[2]["loss"]


def test_a_run_does_not_depend_on_the_runs_before_it(study, rows, text, out, tmp_path):
    # These come behind a run that diverged, with the same compiled model.
    again = study.main(
        f"--quick --cells base --seeds 2 --text {text} --out {tmp_path}".split()
    )
    for row, before in zip(again, rows[::2], strict=True):
        assert row["loss"] == pytest.approx(before["loss"], rel=1e-5)
        assert row["curve"] == before["curve"]


def test_what_was_run_is_not_run_again(study, rows, text, out, monkeypatch, capsys):
    path = out / "results.csv"
    whole = path.read_text(encoding="utf-8")
    # The power went while the last line was being written.
    path.write_text(whole[:-9], encoding="utf-8")
    asked = []

    class Trainer:
        def __init__(self, *arguments):
            pass

        def run(self, config, seed):
            asked.append((config["rate"], seed))
            return dict(rows[-1], curve="9.0", longer="", diverged_at=7)

    monkeypatch.setattr(study, "Trainer", Trainer)
    command = f"--quick --cells base rate --seeds 2 --text {text} --out {out}".split()
    study.main([*command, "--list"])
    assert "1 are left to run" in capsys.readouterr().out and asked == []
    found = study.main(command)
    assert asked == [(1e6, 1)]
    assert [(r["cell"], r["seed"]) for r in found] == [
        (r["cell"], r["seed"]) for r in rows
    ]
    path.write_text(whole, encoding="utf-8")


def test_runs_under_other_conditions_are_not_mixed(study, rows, text, out, capsys):
    command = ("--quick", "--text", text, "--out", out)
    line = scripts.last_line(study, capsys, *command, "--steps", 20)
    assert "holds runs under other conditions" in line


def test_everything_promised_is_there(study, rows, out):
    for picture in ("norms.png", "pieces.png", "curves.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert (out / "table.md").read_text(encoding="utf-8") == study.table(rows) + "\n"


def test_the_table_tells_mean_deviation_and_what_diverged(study):
    lines = [
        " ".join(line.split()) for line in study.table(made_up(study)).splitlines()
    ]
    assert "| pre | on | 2.100 ± 0.100 | 2.100 ± 0.100 | 2.100 ± 0.100 |" in lines
    (line,) = [line for line in lines if line.startswith("| none | on |")]
    assert "| 2.000, 2 of 3 diverged |" in line
    assert "| residual=none | 2.100 ± 0.100 | +0.000 ± 0.000 |" in lines
    assert "| trained at 64 | at 64 | at 128 | at 256 |" in lines
    (line,) = [line for line in lines if line.startswith("| position=alibi")]
    assert line.endswith("| 2.000 ± 0.000 | 2.500 ± 0.000 | 3.500 ± 0.000 † |")
    # Every cell stands in it once.
    told = sum(line.count("±") + line.count("2.000") for line in lines)
    assert told > len(study.distinct(study.CORE + study.LONG))


def test_figures_take_any_part_of_the_grid(study):
    for cells in ({"base": {}}, {"residual=none": {}}, None):
        rows = made_up(study, cells)
        for draw in (study.draw_norms, study.draw_pieces):
            assert draw(rows).axes
        assert study.draw_curves(rows, study.CURVES).axes


def test_the_readme_gets_the_table_between_its_markers(study, rows, out, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "before\n<!-- results:ablations -->\nstale\n<!-- /results -->\nafter\n"
        "<!-- results:other -->\nkept\n<!-- /results -->\n"
    )
    study.main(["--out", str(out), "--found", "--readme", str(readme)])
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- results:ablations -->\n|")
    assert "stale" not in text and "kept" in text and "\nafter\n" in text


def test_bad_input_is_named_in_one_line(study, text, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.csv").write_text("a,b\n1,2\n")
    quick = ("--quick", "--text", text)
    for arguments, words in (
        ((*quick, "--out", tmp_path / "file"), "cannot write to --out"),
        ((*quick, "--out", tmp_path / "other"), "is not a file of results"),
        ((*quick, "--cells", "nothing"), "no cell is named like --cells nothing"),
        (("--quick", "--text", tmp_path / "short.txt"), "too few for windows"),
        (("--quick", "--text", tmp_path / "none"), "cannot read --text"),
        (("--found", "--out", tmp_path / "new"), "there are no results"),
        (("--quick", "--long"), "not allowed with argument"),
        ((*quick, "--steps", 0), "0 is below 1"),
        ((*quick, "--steps", 15), "not a multiple of 10"),
    ):
        if "--out" not in arguments:
            arguments = (*arguments, "--out", tmp_path / "out")
        assert words in scripts.last_line(study, capsys, *arguments)


def test_help_is_given(study, capsys):
    with pytest.raises(SystemExit) as ending:
        study.main(["--help"])
    assert ending.value.code == 0
    shown = capsys.readouterr().out
    assert "usage: ablations.py" in shown
    assert "--out FOLDER" in shown and "(default: " in shown
