"""What every test shares: the backend named, and the same numbers every time."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import pytest


def pytest_report_header():
    return f"keras {keras.__version__} on {keras.backend.backend()}"


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """Weights and data follow from the test, not from the order of tests."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy("float32")
    yield
    keras.config.set_dtype_policy("float32")
