"""Every example in a docstring runs and prints what it says, on every backend."""

import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re

import keras
import numpy as np
import pytest

import keras_tx

# A shape prints as `TensorShape([2, 10])` on TensorFlow, `torch.Size([2, 10])`
# on torch, and `(2, 10)` on JAX and in our docstrings.
SHAPE = re.compile(r"(?:TensorShape\(|torch\.Size\()\[([^\]]*)\]\)")


def as_tuples(text):
    """Returns `text` with the shapes of every backend printed as tuples."""

    def as_tuple(match):
        sizes = match[1]
        return f"({sizes},)" if sizes and "," not in sizes else f"({sizes})"

    return SHAPE.sub(as_tuple, text)


class ShapesAsTuples(doctest.OutputChecker):
    def check_output(self, want, got, flags):
        return super().check_output(want, as_tuples(got), flags)


def module_names():
    found = pkgutil.walk_packages(keras_tx.__path__, prefix="keras_tx.")
    return [module.name for module in found]


def run_examples(owner, name, namespace):
    """Runs the examples of an object and its methods; returns how many ran."""
    finder = doctest.DocTestFinder()
    runner = doctest.DocTestRunner(
        ShapesAsTuples(), optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False
    )
    report = []
    for test in finder.find(owner, name, globs=namespace):
        runner.run(test, out=report.append)
    results = runner.summarize(verbose=False)
    assert not results.failed, "".join(report)
    return results.attempted


def public_objects():
    return [name for name in keras_tx.__all__ if name != "__version__"]


@pytest.fixture(autouse=True)
def files_of_examples_go_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", public_objects())
def test_every_public_object_has_an_example_that_runs(name):
    ran = run_examples(
        getattr(keras_tx, name), name, {"keras": keras, "keras_tx": keras_tx, "np": np}
    )
    assert ran, (
        f"The docstring of keras_tx.{name} has no example. Add one under "
        "`Example:`, with `>>>`; it may use keras, keras_tx, np "
        "and write into the current folder."
    )


@pytest.mark.parametrize("name", module_names())
def test_examples_of_helpers_run(name):
    module = importlib.import_module(name)
    public = {id(getattr(keras_tx, name)) for name in public_objects()}
    namespace = {**vars(module), "keras": keras, "keras_tx": keras_tx, "np": np}
    for helper, value in vars(module).items():
        ours = getattr(value, "__module__", None) == name
        if ours and id(value) not in public and inspect.getdoc(value):
            run_examples(value, f"{name}.{helper}", dict(namespace))


@pytest.mark.parametrize("name", ["keras_tx", *module_names()])
def test_everything_public_in_a_module_says_what_it_is(name):
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    for helper, value in vars(module).items():
        ours = getattr(value, "__module__", None) == name
        if ours and callable(value) and not helper.startswith("_"):
            assert value.__doc__, f"{name}.{helper} has no docstring"


@pytest.mark.parametrize(
    "printed",
    [
        "(TensorShape([1, 3, 16]), TensorShape([5]), TensorShape([]))",
        "(torch.Size([1, 3, 16]), torch.Size([5]), torch.Size([]))",
        "((1, 3, 16), (5,), ())",
    ],
)
def test_shapes_of_every_backend_read_alike(printed):
    assert as_tuples(printed) == "((1, 3, 16), (5,), ())"


def test_a_wrong_example_is_caught():
    def wrong():
        """Says that one and one make three.

        >>> 1 + 1
        3
        """

    with pytest.raises(AssertionError, match="Expected:"):
        run_examples(wrong, "wrong", {})


def test_the_tests_see_every_file():
    files = pathlib.Path(keras_tx.__file__).parent.rglob("*.py")
    stems = {file.stem for file in files if file.stem != "__init__"}
    assert stems <= {part for name in module_names() for part in name.split(".")}
