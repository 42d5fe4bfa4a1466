"""The example that fills in blanks, made small."""

import json

import numpy as np
import pytest
import scripts


@pytest.fixture(scope="module")
def example():
    return scripts.load("examples/masked_lm.py")


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
        "--batch 16 --steps 60 --learning-rate 0.02".split()
    )


def test_everything_promised_is_there(example, result, out, text):
    scripts.check_results(example, result, out, "guesses.png")
    characters = json.loads((out / "characters.json").read_text(encoding="utf-8"))
    assert characters == sorted(set(text.read_text(encoding="utf-8")))


def test_it_learns_more_than_which_characters_are_frequent(result):
    assert result["top_1"]["encoder"] > result["top_1"]["unigram"]
    for guess in result["top_1"]:
        assert 0 <= result["top_1"][guess] <= result["top_5"][guess] <= 1


def test_asked_again_it_fills_in_what_is_blank_only(example, result, out, capsys):
    filled = example.main(["--out", str(out), "--ask", "na_ve ca_"])
    assert len(filled) == len("na_ve ca_")
    for before, after in zip("na_ve ca_", filled, strict=True):
        assert before in ("_", after)
    assert capsys.readouterr().out.startswith(filled + "\n(")


class Uniform:
    """Gives the same logits everywhere, the blank's above all others."""

    def __init__(self, logits):
        self.logits = np.array(logits, "float32")

    def predict_on_batch(self, rows):
        return np.broadcast_to(self.logits, (*rows.shape, len(self.logits)))


def test_the_blank_is_never_a_guess(example):
    found = example.chances(Uniform([1, 3, 2, 99]), np.zeros((5, 6), "int32"), 3, 4)
    assert found.shape == (5, 6, 3)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-5)
    assert (found.argmax(axis=-1) == 1).all()


def test_hidden_characters_are_all_hidden_and_always_the_same(example):
    ids = np.random.default_rng(0).integers(5, size=1000).astype("int32")
    inputs, places, hidden = example.hide(ids, 900, window=8, mask_id=5)
    again = example.hide(ids, 900, window=8, mask_id=5)[0]
    np.testing.assert_array_equal(inputs, again)
    assert places.min() == 900 and places.max() == 995
    assert (inputs[hidden] == 5).all()
    np.testing.assert_array_equal(inputs[~hidden], ids[places][~hidden])
    assert 0.05 < hidden.mean() < 0.25


def test_training_hides_what_it_asks_for(example):
    ids = np.arange(500, dtype="int32")
    batches = example.masked_windows(ids, 500, window=9, batch=7, seed=0)
    for _ in range(3):
        inputs, targets, weights = next(batches)
        assert inputs.shape == targets.shape == weights.shape == (7, 9)
        assert (np.diff(targets) == 1).all()  # a piece of the text
        np.testing.assert_array_equal(inputs[weights == 0], targets[weights == 0])
        assert (inputs[weights == 1] != targets[weights == 1]).mean() > 0.5


def test_training_never_sees_what_is_held_out(example):
    ids = np.arange(30, dtype="int32")
    batches = example.masked_windows(ids, 30, window=5, batch=50, seed=0)
    seen = np.concatenate([next(batches)[1].ravel() for _ in range(20)])
    assert set(seen) == set(range(30))


def test_counting_guesses_are_those_of_slow_counting(example):
    ids = np.random.default_rng(1).integers(4, size=130).astype("int32")
    first, places = 110, np.array([110, 115, 128, 129])
    found = example.counting_guesses(ids, first, places, 4)
    for row, place in enumerate(places):
        left, right = ids[place - 1], ids[min(place + 1, len(ids) - 1)]
        behind, between = np.zeros(4), np.zeros(4)
        for i in range(1, first):
            behind[ids[i]] += ids[i - 1] == left
            if i + 1 < first:
                between[ids[i]] += ids[i - 1] == left and ids[i + 1] == right
        unigram = np.bincount(ids[:first], minlength=4) / first
        smooth = behind + unigram
        np.testing.assert_allclose(found["unigram"][row], unigram)
        np.testing.assert_allclose(found["bigram"][row], smooth)
        np.testing.assert_allclose(
            found["neighbours"][row], between + smooth / smooth.sum()
        )


def test_top_counts_first_and_five_first(example):
    scores = np.array([[6, 5, 4, 3, 2, 1, 0]] * 4)
    assert example.top(scores, np.array([0, 1, 4, 6])) == (0.25, 0.75)


def test_bad_texts_end_in_one_line(example, tmp_path, capsys):
    def line(content, *more):
        path = tmp_path / "bad.txt"
        path.write_bytes(content)
        out = tmp_path / "out"
        return scripts.last_line(example, capsys, "--text", path, "--out", out, *more)

    assert "is empty" in line(b"")
    assert "100 characters, too few for windows of 64" in line(b"x" * 100)
    assert "not UTF-8: byte 3 is 0xff" in line(b"abc\xff" * 500)


def test_bad_questions_end_in_one_line(example, result, out, tmp_path, capsys):
    def line(folder, text):
        return scripts.last_line(example, capsys, "--out", folder, "--ask", text)

    assert "no model in" in line(tmp_path, "c_t")
    assert "has no _ to fill in" in line(out, "cat")
    assert "has no _ to fill in" in line(out, "")
    assert "never seen: ['Z']" in line(out, "Z_")


@pytest.mark.parametrize(
    "option", ["--steps=0", "--window=1", "--learning-rate=-1", "--color=red"]
)
def test_bad_options_end_in_one_line(example, text, tmp_path, capsys, option):
    line = scripts.last_line(example, capsys, "--text", text, "--out", tmp_path, option)
    assert option.split("=")[0] in line


def test_heads_that_do_not_divide_end_in_one_line(example, text, tmp_path, capsys):
    options = ["--text", text, "--out", tmp_path, "--window", "12"]
    line = scripts.last_line(example, capsys, *options, "--heads=3", "--dim=16")
    assert "do not divide" in line


def test_unwritable_output_ends_in_one_line(example, text, tmp_path, capsys):
    scripts.check_unwritable(
        example, tmp_path, capsys, "--text", text, "--window", "12"
    )


def test_missing_packages_are_named(example, text, tmp_path, capsys, monkeypatch):
    scripts.check_missing(
        example, tmp_path, capsys, monkeypatch, "matplotlib", "--text", text
    )
