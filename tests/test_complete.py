"""The terminal session of examples/complete.py."""

import importlib.util
import json
import pathlib

import keras

import keras_tx as tx

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "complete.py"


def load():
    spec = importlib.util.spec_from_file_location("complete", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_session_streams_from_a_saved_model_until_an_empty_line(tmp_path):
    complete = load()
    alphabet = list("abcdef ")
    tx.decoder(len(alphabet), 16, 1, 2).save(tmp_path / "model.keras")
    (tmp_path / "alphabet.json").write_text(json.dumps(alphabet))
    options = complete.parse(
        [
            str(tmp_path / "model.keras"),
            "--alphabet",
            str(tmp_path / "alphabet.json"),
            "--length",
            "5",
            "--seed",
            "3",
        ]
    )
    model = keras.saving.load_model(options.model)
    lines, shown = iter(["abc", "a?b", "??", ""]), []
    complete.session(
        model,
        complete.read_alphabet(options),
        options,
        read=lambda prompt: next(lines),
        write=shown.append,
    )
    first, second, third = "".join(shown).split("\n", 1)[0], shown, shown[-1]
    assert first.startswith("abc") and len(first) == 8
    assert set(first) <= set(alphabet)
    assert any("unknown to the model: '?'" in text for text in second)
    assert "unknown" in third  # nothing was left to go on from


def test_the_alphabet_may_come_from_the_text(tmp_path):
    complete = load()
    (tmp_path / "text.txt").write_text("banana", "utf-8")
    options = complete.parse(["m.keras", "--text", str(tmp_path / "text.txt")])
    assert complete.read_alphabet(options) == ["a", "b", "n"]
