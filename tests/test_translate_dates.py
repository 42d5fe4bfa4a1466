"""The example that reads dates, made small."""

import datetime
import json

import numpy as np
import pytest
import scripts

LOCALES = ["de", "en_US", "fi"]


@pytest.fixture(scope="module")
def example():
    return scripts.load("examples/translate_dates.py")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("made") / "by" / "example"


@pytest.fixture(scope="module")
def result(example, out):
    return example.main(
        f"--out {out} --locales {' '.join(LOCALES)} --encoder-layers 1 --heads 2 "
        "--dim 16 --steps 40 --batch 32 --test 30 --learning-rate 0.01".split()
    )


@pytest.fixture(scope="module")
def alphabet(example):
    return example.Alphabet.of(LOCALES)


def test_everything_promised_is_there(example, result, out):
    scripts.check_results(example, result, out, "attention.png")
    kept = json.loads((out / "alphabet.json").read_text(encoding="utf-8"))
    assert kept["locales"] == LOCALES
    assert {"ä", "M", "7", "."} <= set(kept["characters"])


def test_it_learns(result):
    losses = result["history"]["loss"]
    assert losses[-1] < np.log(11)
    for share in ("exact", "exact_untold", "exact_unseen_locales", "exact_impossible"):
        assert 0 <= result[share] <= 1


def test_asked_again_it_answers_every_text_in_words(example, result, out, capsys):
    texts = ["", "   ", "never", "1" * 60, "3. März 2021", "☃ 3/4"]
    answers = example.main(["--out", str(out), "--ask", *texts])
    assert len(answers) == len(texts)
    assert capsys.readouterr().out.splitlines() == answers
    assert answers[0] == answers[1] and "empty" in answers[0]
    assert "no digit" in answers[2]
    assert "at most 39" in answers[3]
    assert "3. März 2021" in answers[4]


def test_impossible_dates_are_answered_in_words(example):
    def words(iso, chance=0.9):
        return example.in_words("what was written", iso, chance)

    assert words("2021-03-04").startswith("2021-03-04  “what was written” (90%)")
    assert "reads as 2021-02-30, and there is no such day" in words("2021-02-30")
    assert "no such day" in words("2023-02-29") and "no such" not in words("2024-02-29")
    for wild in ("0000-00-00", "2021-13-01", "2021-1--01", "20210-3-04", "2?21-03-04"):
        assert "does not read as a date" in words(wild)
    assert "guess (30%)" in words("2021-03-04", 0.3)


def test_dates_are_written_as_babel_writes_them(example):
    from babel.dates import format_date

    for form in example.FORMATS:
        for locale in ("de", "ru", "ja", "en_US"):
            date = datetime.date(2021, 3, 4)
            expected = format_date(date, form, locale)
            written = example.write_date(2021, 3, 4, locale, form)
            assert written == example.clean(expected)
            assert "\u202f" not in written
    assert example.write_date(2023, 2, 30, "de", "long") == "30. Februar 2023"


def test_impossible_days_are_those_that_a_month_lacks(example):
    rng = np.random.default_rng(0)
    days = {example.impossible_day(2023, 2, rng) for _ in range(60)}
    assert days == {29, 30, 31}
    assert {example.impossible_day(2024, 2, rng) for _ in range(60)} == {30, 31}
    assert example.impossible_day(2024, 4, rng) == 31
    assert example.impossible_day(2024, 5, rng) is None


def test_no_day_is_both_trained_on_and_held_out(example):
    trained_on, held_out = (set(map(tuple, days)) for days in example.split_days(3))
    assert not trained_on & held_out
    assert len(trained_on) + len(held_out) == 36_525
    assert len(held_out) == 3_652


def test_rows_start_with_their_locale(example, alphabet):
    rows = alphabet.read(["3/4/21", "3/4/21", "☃"], ["en_US", None, "zz"])
    assert rows.shape == (3, example.LENGTH)
    assert rows[0, 0] == alphabet.of_locale["en_US"]
    assert rows[1, 0] == rows[2, 0] == example.ANYWHERE
    np.testing.assert_array_equal(rows[0, 1:], rows[1, 1:])
    assert rows[2, 1] == example.UNKNOWN
    assert (rows[:2, 7:] == example.PAD).all()


def test_targets_are_the_answer_shifted_by_one(example, alphabet):
    days = np.array([[2021, 3, 14]])
    inputs, answer = next(example.batches(alphabet, days, 8, seed=0))
    assert inputs["target"].shape == answer.shape == (8, 10)
    assert (inputs["target"][:, 0] == example.START).all()
    np.testing.assert_array_equal(inputs["target"][:, 1:], answer[:, :-1])
    assert {example.iso_text(row) for row in answer} <= {"2021-03-14"}


def test_smudged_characters_are_letters(example, alphabet):
    days = example.split_days(0)[0]
    source = batches = next(example.batches(alphabet, days, 300, seed=1))[0]["source"]
    assert (batches == example.UNKNOWN).any()
    digits = [alphabet.of_character[c] for c in "0123456789"]
    locales = [*alphabet.of_locale.values(), example.ANYWHERE]
    assert np.isin(source[:, 0], locales).all()
    # A date in any of these formats and locales has three digits at least.
    assert (np.isin(source, digits).sum(axis=1) >= 3).all()


def test_the_certainty_is_the_product_of_its_characters(example, alphabet):
    options = example.parse(["--encoder-layers=1", "--heads=2", "--dim=8"])
    model = example.build(options, alphabet)
    source = alphabet.read(["3/4/21"], [None])
    iso = "2021-03-04"
    ids = example.iso_ids([iso])
    inputs = {"source": source, "target": ids[:, :-1]}
    logits = model.predict_on_batch(inputs).astype("float64")
    chances = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.prod([chances[0, t, i] for t, i in enumerate(ids[0, 1:])])
    (found,) = example.certainty(model, source, [iso])
    assert found == pytest.approx(expected, rel=1e-4)


def test_cross_attention_is_that_of_the_model(example, alphabet):
    options = example.parse(
        ["--encoder-layers=1", "--decoder-layers=2", "--heads=2", "--dim=8"]
    )
    model = example.build(options, alphabet)
    source = alphabet.read(["3. März 2021", "1.1.50"], ["de", None])
    weights = example.cross_attention(model, source, ["2021-03-03", "1950-01-01"])
    assert weights.shape == (2, 2, 10, example.LENGTH)
    np.testing.assert_allclose(weights.sum(axis=-1), 1, rtol=1e-5)
    # Padding of the source is not attended to.
    assert weights[0, :, :, 13:].max() == 0 and weights[1, :, :, 7:].max() == 0


@pytest.mark.parametrize(
    "option", ["--steps=0", "--learning-rate=nan", "--dim=x", "--color=red"]
)
def test_bad_options_end_in_one_line(example, tmp_path, capsys, option):
    line = scripts.last_line(example, capsys, "--out", tmp_path, option)
    assert option.split("=")[0] in line


def test_what_cannot_be_done_ends_in_one_line(example, result, out, tmp_path, capsys):
    def line(*options):
        return scripts.last_line(example, capsys, *options)

    assert "no model in" in line("--out", tmp_path, "--ask", "1.1.2000")
    unknown = line("--out", out, "--ask", "1.1.2000", "--locale", "zz")
    assert (
        "--locale zz is not one that was learnt" in unknown and "de en_US fi" in unknown
    )
    assert "there is no --ask" in line("--out", tmp_path, "--locale", "de")
    strange = line("--out", tmp_path, "--locales", "de", "atlantis")
    assert "atlantis is no locale of Babel" in strange
    assert "do not divide" in line(
        "--out", tmp_path, "--heads=3", "--dim=16", "--locales", "de"
    )


def test_unwritable_output_ends_in_one_line(example, tmp_path, capsys):
    scripts.check_unwritable(example, tmp_path, capsys)


@pytest.mark.parametrize("package", ["babel", "matplotlib"])
def test_missing_packages_are_named(example, tmp_path, capsys, monkeypatch, package):
    scripts.check_missing(example, tmp_path, capsys, monkeypatch, package)
