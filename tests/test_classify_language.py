"""The example that tells languages apart, made small."""

import json

import numpy as np
import pytest
import scripts

LANGUAGES = ["de", "ko", "ru"]


@pytest.fixture(scope="module")
def example():
    return scripts.load("examples/classify_language.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("made") / "by" / "example"


@pytest.fixture(scope="module")
def result(example, out):
    return example.main(
        f"--out {out} --languages {' '.join(LANGUAGES)} --layers 1 --heads 2 "
        "--dim 16 --length 12 --epochs 2 --batch 200 --learning-rate 0.02".split()
    )


def test_everything_promised_is_there(example, result, out):
    scripts.check_results(example, result, out, "confusion.png")
    kept = json.loads((out / "languages.json").read_text(encoding="utf-8"))
    assert kept["languages"] == LANGUAGES
    assert kept["length"] == 12


def test_it_learns_three_scripts(result):
    assert result["accuracy"] > 0.8
    assert result["baseline"] > 0.9
    table = np.array(result["confusion"])
    assert table.sum() == result["held_out"]
    assert np.trace(table) / table.sum() == pytest.approx(result["accuracy"])


def test_asked_again_it_answers(example, result, out, capsys):
    texts = ["Größe", "привет " * 9]
    assert example.main(["--out", str(out), "--ask", *texts]) == ["de", "ru"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("Größe: German ")
    assert "Russian" in second


def test_no_emoji_is_both_trained_on_and_held_out(example):
    names = {f"e{i}": {"de": f"{i} d", "en": f"{i} e"} for i in range(51)}
    sides = example.split(names, seed=5)
    trained_on, held_out = ({name.split()[0] for name, _ in side} for side in sides)
    assert not trained_on & held_out
    assert (len(trained_on), len(held_out)) == (41, 10)
    for side in sides:
        assert all(name.endswith(language[0]) for name, language in side)
        languages = [language for _, language in side]
        assert languages.count("de") == languages.count("en")
    assert example.split(names, seed=6)[1] != sides[1]


def test_a_base_emoji_has_one_name_a_language(example):
    names = example.read_names(["en", "fr"])
    assert all(of_base.keys() == {"en", "fr"} for of_base in names.values())
    # Nothing is left of a skin tone, in emoji or, where there is one without, name.
    assert not any(base != base.translate(example.SKIN_TONES) for base in names)
    assert names["👍"] == {"en": "thumbs up", "fr": "pouce vers le haut"}
    assert "❤" in names and "❤\ufe0f" not in names


def test_a_run_has_its_bucket_wherever_it_stands(example):
    rows = example.read(["banana", "an", "☃"], 9)
    assert rows.shape == (3, 9, 1 + example.LONGEST_RUN)
    banana = rows[0]  # " banana " and a place of padding
    assert banana[2, 1] == banana[4, 1] == banana[6, 1]  # a
    assert banana[3, 2] == banana[5, 2] == rows[1, 2, 2]  # an
    assert banana[4, 3] == banana[6, 3]  # ana
    assert banana[2, 1] != banana[3, 1] and banana[2, 2] != banana[4, 2]
    assert (banana[8:] == 0).all() and (rows[1, 4:] == 0).all()
    assert (rows[:, :3] > 0).all()
    assert rows.max() < example.BUCKETS


def test_characters_of_one_script_are_in_one_neighbourhood(example):
    rows = example.read(["abж", "한글", "汉"], 5)[..., 0]
    assert rows[0, 0] == rows[0, 1] == rows[0, 2]  # space, a, b
    assert len({rows[0, 1], rows[0, 3], rows[1, 1], rows[2, 1]}) == 4


def test_buckets_are_filled_alike(example):
    words = [chr(0x4E00 + i) + chr(0x4E00 + j) for i in range(70) for j in range(70)]
    rows = example.read(words, 4)
    counts = np.bincount(rows[:, 2, 2], minlength=example.BUCKETS)[1:]
    assert counts.sum() == 4900
    assert counts.max() < 10


def test_a_text_is_cut_at_the_length_and_padding_changes_nothing(example):
    options = example.parse(["--layers=1", "--heads=2", "--dim=8"])
    model = example.build(options)
    short, long = (
        model.predict_on_batch(example.read(["größe"], length)) for length in (7, 15)
    )
    assert short.shape == (1, 14)
    np.testing.assert_allclose(short, long, atol=1e-5)
    cut = example.read(["größe"], 4)
    np.testing.assert_array_equal(cut, example.read(["größe"], 9)[:, :4])


def test_parts_of_a_name_are_runs_of_its_words(example):
    rng = np.random.default_rng(0)
    parts = {example.some_words("one two three", rng) for _ in range(200)}
    assert parts == {"one", "two", "three", "one two", "two three", "one two three"}
    assert example.some_words("word", rng) == "word"


def test_confusion_counts_rows_as_what_is(example):
    table = example.confusion(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 0]), 3)
    np.testing.assert_array_equal(table, [[1, 1, 0], [0, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    "option",
    ["--epochs=0", "--length=3", "--dropout=1.0", "--languages=xx", "--color=red"],
)
def test_bad_options_end_in_one_line(example, tmp_path, capsys, option):
    line = scripts.last_line(example, capsys, "--out", tmp_path, option)
    assert option.split("=")[0] in line


def test_what_cannot_be_done_ends_in_one_line(example, result, out, tmp_path, capsys):
    def line(*options):
        return scripts.last_line(example, capsys, *options)

    assert "no model in" in line("--out", tmp_path, "--ask", "hello")
    assert "empty text" in line("--out", out, "--ask", " ")
    assert "empty text" in line("--out", out, "--ask", "")
    assert "has no letter" in line("--out", out, "--ask", "☃☃ 12")
    assert "two at least" in line("--out", tmp_path, "--languages", "de", "de")
    options = ["--out", tmp_path, "--languages", "de", "en"]
    assert "do not divide" in line(*options, "--heads=3", "--dim=16")
    assert "more than the" in line(*options, "--batch=90000")


def test_unwritable_output_ends_in_one_line(example, tmp_path, capsys):
    scripts.check_unwritable(example, tmp_path, capsys)


@pytest.mark.parametrize("package", ["emoji", "sklearn", "matplotlib"])
def test_missing_packages_are_named(example, tmp_path, capsys, monkeypatch, package):
    scripts.check_missing(example, tmp_path, capsys, monkeypatch, package)
