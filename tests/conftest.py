"""What every test shares: the backend named, and the same numbers every time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest

try:
    import hypothesis
except ImportError:  # the smoke tests do without
    hypothesis = None

if hypothesis is not None:
    # Chosen with `pytest --hypothesis-profile=thorough`.
    hypothesis.settings.register_profile(
        "quick",
        # JAX compiles every operation for every new shape.
        max_examples=20 if keras.backend.backend() == "jax" else 50,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.register_profile(
        "thorough",
        parent=hypothesis.settings.get_profile("quick"),
        max_examples=2_500,  # of each test: ten thousand of all
        derandomize=False,
        print_blob=True,
    )
    hypothesis.settings.load_profile("quick")


def pytest_addoption(parser):
    parser.addoption(
        "--whole-grid",
        action="store_true",
        help="every combination of what generation reads in pieces",
    )


def pytest_configure(config):
    if keras.backend.backend() == "jax":
        compile_little(str(config.cache.mkdir("jax")))


def compile_little(folder):
    """Compiles in a hurry, and keeps it for other workers, child processes and runs.

    Outside a compiled step JAX compiles every operation for every shape, which
    takes longer than all that the tests compute. Without most of LLVM's passes it
    takes two thirds of the time; what XLA makes of a program before stays as it is.
    """
    settings = {
        "jax_disable_most_optimizations": True,
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    import jax

    for name, value in settings.items():
        os.environ.setdefault(name.upper(), str(value))
        jax.config.update(name, value)


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """Weights and data follow from the test, not from the order of tests."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def process():
    """A process that loads what this one saves, started when first needed."""
    from contract import FreshProcess

    process = FreshProcess("user_layers")
    yield process
    process.stop()
