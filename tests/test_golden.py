"""Files of every version load for ever, on every backend."""

import gzip
import json
import zipfile

import keras
import numpy as np
import pytest
from make_golden import CASES, FOLDER, call, digests, losses_of_two_steps

from keras_tx import serialization

VERSIONS = {
    folder.name: json.loads((folder / "expected.json").read_text())
    for folder in sorted(FOLDER.iterdir())
}
FILES = [
    (version, case) for version, about in VERSIONS.items() for case in about["cases"]
]


def stored(version, case):
    """Returns inputs, outputs and what else is expected of a case."""
    with np.load(FOLDER / version / f"{case}.npz") as arrays:
        inputs, outputs = (
            {
                name.removeprefix(kind): arrays[name]
                for name in arrays.files
                if name.startswith(kind)
            }
            for kind in ("inputs/", "outputs/")
        )
    return inputs, outputs, VERSIONS[version]["cases"][case]


def assert_as_expected(model, version, case):
    inputs, outputs, expected = stored(version, case)
    assert [v.path for v in model.weights] == expected["paths"]
    assert digests(model) == expected["weights"]
    # Backends and machines round differently, and half precision much more.
    half = any("16" in policy for policy in expected["policies"])
    tolerance = 3e-2 if half else 1e-5
    results = call(model, inputs)
    assert results.keys() == outputs.keys()
    for name, y in outputs.items():
        scale = max(1.0, np.abs(y).max())
        np.testing.assert_allclose(results[name], y, atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize(("version", "case"), FILES)
def test_a_model_file_of_every_version_loads(version, case):
    model = keras.saving.load_model(FOLDER / version / f"{case}.keras")
    assert_as_expected(model, version, case)
    inputs, _, expected = stored(version, case)
    if "losses" in expected:
        losses = losses_of_two_steps(model, inputs)
        np.testing.assert_allclose(losses, expected["losses"], rtol=1e-5)


@pytest.mark.parametrize(("version", "case"), FILES)
def test_a_weights_file_of_every_version_loads_into_todays_model(
    version, case, tmp_path
):
    packed = (FOLDER / version / f"{case}.weights.h5.gz").read_bytes()
    (tmp_path / "model.weights.h5").write_bytes(gzip.decompress(packed))
    model = CASES[case]()
    model.load_weights(tmp_path / "model.weights.h5")
    assert_as_expected(model, version, case)


def test_every_format_has_golden_files():
    formats = {about["format"] for about in VERSIONS.values()}
    assert formats == set(range(1, serialization.FORMAT + 1))


def test_golden_files_hold_every_class_that_files_may_name():
    registered = {
        name.removeprefix("keras_tx>")
        for name, item in keras.saving.get_custom_objects().items()
        if name.startswith("keras_tx>") and isinstance(item, type)
    }
    named = set()

    def walk(item):
        if isinstance(item, dict):
            named.add(item.get("class_name"))
            item = item.values()
        elif not isinstance(item, list):
            return
        for part in item:
            walk(part)

    for file in FOLDER.rglob("*.keras"):
        with zipfile.ZipFile(file) as stored:
            walk(json.loads(stored.read("config.json")))
    assert registered <= named, registered - named


def test_golden_files_stay_small():
    total = sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file())
    assert total < 750_000 * len(VERSIONS)


def test_golden_files_are_never_written_anew(monkeypatch):
    import make_golden

    monkeypatch.setattr(make_golden.tx, "__version__", f"{next(iter(VERSIONS))}.9")
    with pytest.raises(SystemExit, match="there already"):
        make_golden.main()
