"""What users may rely on changes only on purpose."""

import difflib

import pytest
import update_public_api

import keras_tx


def test_public_api_is_the_one_written_down():
    written = update_public_api.SNAPSHOT.read_text(encoding="utf-8")
    actual = update_public_api.describe()
    diff = difflib.unified_diff(
        written.splitlines(),
        actual.splitlines(),
        "tests/public_api.txt",
        "keras_tx",
        lineterm="",
        n=8,
    )
    if actual != written:
        pytest.fail(
            "The public API is not the one written down:\n\n"
            + "\n".join(diff)
            + "\n\nIf users should see this change, run `python "
            "tests/update_public_api.py`, commit tests/public_api.txt, and say in "
            "CHANGELOG.md what it does to their code and their files. If not, "
            "undo it.",
            pytrace=False,
        )


def test_public_names_are_sorted_and_exist():
    assert keras_tx.__all__ == sorted(set(keras_tx.__all__))
    for name in keras_tx.__all__:
        assert hasattr(keras_tx, name), name


def test_nothing_public_is_missing_from_the_list():
    # Names that `import *` would not give, yet that users could come to rely on.
    extra = {
        name
        for name, value in vars(keras_tx).items()
        if not name.startswith("_")
        and getattr(value, "__module__", "").startswith("keras_tx.")
    }
    assert extra - {"require_backend"} <= set(keras_tx.__all__)


def test_a_changed_default_changes_the_text():
    def before(x, *, width=4):
        return x, width

    def after(x, *, width=5):
        return x, width

    before, after = (
        update_public_api.signature(function, bound=False)
        for function in (before, after)
    )
    assert before != after
    assert before == "(\n        x,\n        *,\n        width=4,\n    )"
