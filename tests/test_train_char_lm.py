"""The example that trains, saves, reloads and writes, made small."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "examples/train_char_lm.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_char_lm", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    words = np.random.default_rng(0).choice(["naïve", "cat", "on", "mats\n"], 500)
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(words), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("made") / "by" / "example"


@pytest.fixture(scope="module")
def result(example, text, out):
    return example.main(
        f"--text {text} --out {out} --layers 1 --heads 2 --dim 16 --window 12 "
        "--batch 8 --steps 31 --validate-every 10 --learning-rate 0.02 "
        "--write 20".split()
    )


def test_everything_promised_is_there(result, out, text):
    assert json.loads((out / "result.json").read_text(encoding="utf-8")) == json.loads(
        json.dumps(result, default=str)
    )
    characters = json.loads((out / "characters.json").read_text(encoding="utf-8"))
    assert characters == sorted(set(text.read_text(encoding="utf-8")))
    sample = (out / "sample.txt").read_text(encoding="utf-8")
    assert len(sample) == 20
    assert set(sample) <= set(characters)
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "best.weights.h5").exists()


def test_the_reloaded_model_gives_exactly_the_same_logits(result):
    assert result["reload_difference"] == 0.0


def test_the_loss_falls(result):
    losses = result["history"]["loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert result["loss"] < np.log(len(set("naïve cat on mats\n")))
    assert result["bits_per_character"] == pytest.approx(result["loss"] / np.log(2))


def test_the_saved_model_has_the_best_loss_of_the_run(result, out, example, text):
    # Validation sees whole windows of one size, the last number every character.
    assert result["loss"] == pytest.approx(min(result["history"]["val_loss"]), rel=0.05)


def test_more_context_is_no_worse_than_less(result):
    assert result["loss_with_context"] < result["loss"] + 0.05


def test_the_learning_rate_schedule_reloads(result, out):
    optimizer = keras.models.load_model(out / "model.keras").optimizer
    schedule = optimizer.get_config()["learning_rate"]
    assert schedule["class_name"] == "CosineDecay"
    assert schedule["config"]["warmup_target"] == 0.02
    assert int(optimizer.iterations) == 30


class Bigrams:
    """A model whose predictions depend on the previous character only."""

    def __init__(self, num_characters):
        self.logits = np.random.default_rng(1).normal(size=(num_characters,) * 2)

    def predict_on_batch(self, tokens):
        return self.logits[tokens].astype("float32")


@pytest.mark.parametrize("length", [103, 104, 144, 145])
@pytest.mark.parametrize("stride", [1, 4, 8])
def test_every_held_out_character_counts_once(example, length, stride):
    ids = np.random.default_rng(2).integers(5, size=length).astype("int32")
    model = Bigrams(5)
    chances = np.exp(model.logits)
    chances /= chances.sum(axis=-1, keepdims=True)
    expected = -np.log(chances[ids[89:-1], ids[90:]]).mean()
    found = example.cross_entropy(model, ids, 90, window=8, stride=stride, batch=3)
    assert found == pytest.approx(expected, rel=1e-6)


def test_targets_are_one_character_on(example):
    inputs, targets = example.windows(np.arange(20), [3, 7], 4)
    np.testing.assert_array_equal(inputs, [[3, 4, 5, 6], [7, 8, 9, 10]])
    np.testing.assert_array_equal(targets, inputs + 1)


def test_training_never_sees_what_is_held_out(example):
    batches = example.random_windows(np.arange(30), window=5, batch=50, seed=0)
    seen = np.concatenate([next(batches)[1].ravel() for _ in range(20)])
    assert set(seen) == set(range(1, 30))


def test_the_same_seed_draws_the_same_windows(example):
    one, two, other = (
        next(example.random_windows(np.arange(99), 5, 7, seed))[0] for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(one, two)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("preset", ["default", "nanogpt"])
def test_presets_are_within_the_size_of_nanogpt(example, preset):
    model = example.build(example.parse(["--preset", preset]), vocab_size=103)
    assert model.count_params() <= 828_000


@pytest.mark.parametrize(
    "position", ["rotary", "learned", "sinusoidal", "relative", "alibi", "none"]
)
def test_every_kind_of_position_makes_a_model(example, position):
    options = example.parse(
        ["--position", position, "--layers=1", "--heads=2", "--dim=8", "--window=6"]
    )
    assert example.build(options, 7)(np.zeros((1, 6), "int32")).shape == (1, 6, 7)


def fails(example, capsys, *arguments):
    """Runs `main`, and returns the one line that it ends with."""
    with pytest.raises(SystemExit) as ending:
        example.main([str(argument) for argument in arguments])
    code = ending.value.code
    assert code not in (0, None)
    # A string is what Python prints before it exits with 1; the parser of the
    # command line prints its usage and one line, and exits with 2.
    line = code if isinstance(code, str) else capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("train_char_lm.py: ")
    assert "\n" not in line
    return line


def test_bad_texts_end_in_one_line(example, tmp_path, capsys):
    def line(content, *more):
        path = tmp_path / "bad.txt"
        path.write_bytes(content)
        return fails(example, capsys, "--text", path, "--out", tmp_path / "out", *more)

    assert "is empty" in line(b"")
    assert "100 characters, too few for windows of 64" in line(b"x" * 100)
    assert "99 characters, too few for windows of 9" in line(b"y" * 99, "--window", 9)
    assert "not UTF-8: byte 3 is 0xff" in line(b"abc\xff" * 500)


def test_missing_files_end_in_one_line(example, tmp_path, capsys):
    missing = fails(example, capsys, "--text", tmp_path / "none.txt")
    assert "No such file" in missing
    assert "Is a directory" in fails(example, capsys, "--text", tmp_path)


def test_unwritable_output_ends_in_one_line(example, text, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        line = fails(example, capsys, "--text", text, "--out", out)
        assert line.startswith(f"train_char_lm.py: cannot write to --out {out}")


@pytest.mark.parametrize(
    "option", ["--steps=0", "--window=1", "--learning-rate=-1", "--dim=x", "--color=1"]
)
def test_bad_options_end_in_one_line(example, text, tmp_path, capsys, option):
    line = fails(example, capsys, "--text", text, "--out", tmp_path, option)
    assert option.split("=")[0] in line


def test_heads_that_do_not_divide_end_in_one_line(example, text, tmp_path, capsys):
    options = ["--text", text, "--out", tmp_path, "--window", "12"]
    assert "do not divide" in fails(example, capsys, *options, "--heads=3", "--dim=16")


def test_missing_matplotlib_names_the_extra(
    example, text, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    options = ["--text", text, "--out", tmp_path, "--window", "12"]
    assert "keras-tx[plots]" in fails(example, capsys, *options)


def test_missing_tensorboard_is_named(example, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    options = ["--text", text, "--out", tmp_path, "--window", "12", "--tensorboard"]
    assert "needs tensorboard" in fails(example, capsys, *options)


def child_environment():
    """Lets a process find the package where it is not installed."""
    search = [str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, search))}


def test_the_command_ends_in_one_line_and_a_non_zero_exit(tmp_path):
    (tmp_path / "empty.txt").write_text("")
    done = subprocess.run(
        [sys.executable, SCRIPT, "--text", "empty.txt"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == "train_char_lm.py: empty.txt is empty."
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
