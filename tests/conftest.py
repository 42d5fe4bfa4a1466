"""What every test shares: the backend named, and the same numbers every time."""

import gc
import importlib
import os
import subprocess
import sys

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
    backend = keras.backend.backend()
    if not hasattr(config, "cache"):
        return  # `-p no:cacheprovider`: nothing can be kept
    if backend in XLA_PROBES and "XLA_FLAGS" not in os.environ:
        compile_in_a_hurry(config, backend)
    if backend == "jax":
        keep_what_is_compiled(str(config.cache.mkdir("jax")))


# Compiling takes longer than all that the tests compute. It takes a third to half of
# the time where XLA writes its code itself rather than by way of MLIR, and leaves
# out LLVM's expensive passes. JAX compiles every operation for every shape, so that
# there LLVM optimizes nothing at all; on TensorFlow a trained step would then take
# two and a half times as long.
FEW_PASSES = (
    "--xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false "
    "--xla_backend_optimization_level="
)
HURRY = {"tensorflow": f"{FEW_PASSES}1", "jax": f"{FEW_PASSES}0"}
XLA_PROBES = {
    "tensorflow": "import tensorflow as tf; tf.function(tf.abs, jit_compile=True)(1.0)",
    "jax": "import jax.numpy; jax.numpy.ones(1) + 1",
}


def compile_in_a_hurry(config, backend):
    """Sets XLA's flags for this process and those that it starts.

    XLA ends a process that names a flag which it does not know, so another one is
    asked, once for each version.
    """
    package = importlib.import_module({"jax": "jaxlib"}.get(backend, backend))
    flags = HURRY[backend]
    key = f"xla/{backend}-{package.__version__}{flags}"
    known = config.cache.get(key, None)
    if known is None:
        probe = [sys.executable, "-c", XLA_PROBES[backend]]
        env = {**os.environ, "XLA_FLAGS": flags}
        known = subprocess.run(probe, env=env, capture_output=True).returncode == 0
        config.cache.set(key, known)
    os.environ["XLA_FLAGS"] = flags if known else ""


def keep_what_is_compiled(folder):
    """Keeps it for other workers, child processes and runs on JAX."""
    settings = {
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


@pytest.fixture(scope="module", autouse=True)
def nothing_old_in_the_garbage():
    """What is there before a module's tests is not searched for garbage again.

    Keras collects garbage for each layer that it quantizes, and a million objects
    of backends and of tests that are done take a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def process():
    """A process that loads what this one saves, started when first needed."""
    from contract import FreshProcess

    process = FreshProcess("user_layers")
    yield process
    process.stop()
