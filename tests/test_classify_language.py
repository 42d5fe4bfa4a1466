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
        f"--out {out} --languages {' '.join(LANGUAGES)} --encoders 2 --heads 2 "
        "--dim 16 --length 12 --epochs 2 --batch 200 --learning-rate 0.02".split()
    )


def test_everything_promised_is_there(example, result, out):
    scripts.check_results(example, result, out, "confusion.png")
    kept = json.loads((out / "languages.json").read_text(encoding="utf-8"))
    assert kept["languages"] == LANGUAGES
    assert {"ß", "ck", " д"} <= set(kept["tokens_of"])


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


def test_runs_are_all_of_one_to_four_characters(example):
    runs = example.runs_of("abab", 4)
    text = " abab "
    assert len(runs) == 4 + 5 + 4 + 3
    assert all(run in text and 1 <= len(run) <= 4 for run in runs)
    assert runs.count("ab") == 2 and runs.count("bab ") == 1 and " " not in runs


def test_no_run_holds_parts_of_two_words(example):
    assert example.runs_of("ab  c", 6) == example.runs_of("ab", 6) + [
        " c",
        " c ",
        *"c",
        "c ",
    ]


def test_tokens_are_the_runs_that_enough_names_hold(example):
    tokens_of = example.number_runs(["ab"] * 3 + ["abab", "cc"], 4, 4)
    first = 1 + example.NEIGHBOURHOODS
    assert sorted(tokens_of.values()) == list(range(first, first + len(tokens_of)))
    assert {"a", "b", "ab", " a", "b ", " ab"} <= set(tokens_of)
    # Two in one name count once, and three names are too few.
    assert not {"c", "ba", " ab "} & set(tokens_of)


def test_all_runs_of_a_text_are_read_and_unknown_characters_by_neighbourhood(example):
    tokens_of = {" a": 600, "a": 601, "an": 602, "한": 603}
    rows = example.read(["an", "x", "글"], tokens_of, 4)
    assert rows.shape == (3, 4)
    known = [600, 601, 602]
    assert sorted(rows[0].tolist()) == sorted([*known, rows[0][rows[0] < 600][0]])
    near = [row[(row > 0) & (row < 600)].tolist() for row in rows]
    assert near[0] == near[1] and near[2] != near[0]  # n, x; and a syllable of Korea
    assert (rows[1, 1:] == example.PAD).all()


def test_training_shows_other_runs_each_time(example):
    tokens_of = example.number_runs(["some name"] * 4, 4, 4)
    rng = np.random.default_rng(0)
    everything = example.read(["some name"], tokens_of, 4)[0]
    rows = [
        example.read(["some name"], tokens_of, 4, rng, length)[0]
        for length in (30, 30, 7)
    ]
    assert [np.count_nonzero(row) for row in rows] == [
        round(example.SHOWN * len(everything))
    ] * 2 + [7]
    assert set(rows[0]) != set(rows[1])
    assert set(rows[0]) | set(rows[1]) <= {example.PAD, *everything}


def test_padding_and_the_order_of_runs_change_nothing(example):
    options = example.parse(["--encoders=2", "--heads=2", "--dim=8"])
    model = example.build(options, 20)
    rows = np.array([[3, 5, 7, 11]], "int32")
    others = np.array([[11, 3, 7, 5, 0, 0]], "int32")
    found, again = (model.predict_on_batch(each) for each in (rows, others))
    assert found.shape == (1, 2, 14)
    np.testing.assert_allclose(found, again, atol=1e-6)
    assert np.abs(found[:, 0] - found[:, 1]).max() > 1e-3  # two opinions


def test_the_count_is_naive_bayes(example):
    texts, answers = ["ab", "ab", "ba", "c"], [0, 0, 1, 1]
    tokens_of = example.number_runs(texts, 6, 1)
    table = example.opinion_of_counts(texts, answers, tokens_of, 2)
    # " ab " has 8 runs that are more than a space, " c " has 4.
    counts = np.array([8 + 8, 8 + 4]) + example.NEVER * len(tokens_of)
    often, never = table[tokens_of["ab"]]
    assert often == pytest.approx(np.log((2 + example.NEVER) / counts[0]))
    assert never == pytest.approx(np.log(example.NEVER / counts[1]))
    assert (table[: 1 + example.NEIGHBOURHOODS] == 0).all()


def test_opinions_of_encoders_and_count_add_up(example):
    options = example.parse(["--encoders=2", "--heads=2", "--dim=8"])
    texts, answers = ["ab", "bcd", "a d"], [3, 1, 0]
    numbers = [example.number_runs(texts, longest, 1) for longest in (4, 6)]
    table = example.opinion_of_counts(texts, answers, numbers[1], 14)
    encoders = example.build(options, 1 + example.NEIGHBOURHOODS + len(numbers[0]))
    model = example.with_count(encoders, table)
    found = np.exp(example.opinions(model, texts, *numbers))
    assert found.shape == (3, 3, 14)
    np.testing.assert_allclose(found.sum(axis=-1), 1, rtol=1e-6)
    rows = example.read(texts, numbers[0], 4)
    powers = np.exp(encoders.predict_on_batch(rows).astype("float64"))
    np.testing.assert_allclose(
        found[:, :2], powers / powers.sum(axis=-1, keepdims=True), rtol=1e-5
    )
    says = np.exp(table[example.read(texts, numbers[1], 6)].sum(axis=1))
    np.testing.assert_allclose(
        found[:, 2], says / says.sum(axis=-1, keepdims=True), rtol=1e-4
    )
    total = np.prod(found, axis=1) ** (1 / 3)
    np.testing.assert_allclose(
        example.agree(np.log(found)),
        total / total.sum(axis=-1, keepdims=True),
        rtol=1e-6,
    )


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
