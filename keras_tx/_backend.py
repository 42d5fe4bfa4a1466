"""Says which line installs a backend, before Keras fails without one."""

import importlib.util
import json
import os
import sys

# The name of a backend is also that of its package and of our extra.
BACKENDS = ("tensorflow", "jax", "torch")


def chosen_backend():
    """Returns the backend that Keras uses, or will use once it is imported."""
    # Keras chooses once, on import; what the environment says later is void.
    if "keras" in sys.modules:
        return sys.modules["keras"].config.backend()
    name = os.environ.get("KERAS_BACKEND")
    if name:
        return name
    home = os.environ.get("KERAS_HOME") or os.path.join("~", ".keras")
    try:
        with open(os.path.expanduser(os.path.join(home, "keras.json"))) as file:
            return json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError, AttributeError):
        return "tensorflow"


def require_backend():
    """Raises `ImportError` with the line to type where the backend is missing."""
    name = chosen_backend()
    if name not in BACKENDS:
        raise ImportError(
            f"keras_tx runs on the Keras backends {', '.join(BACKENDS)}. The "
            f"chosen one is {name!r}. Set the environment variable "
            "KERAS_BACKEND to one of these before the import."
        )
    if importlib.util.find_spec(name) is not None:
        return
    others = [
        other for other in BACKENDS if importlib.util.find_spec(other) is not None
    ]
    switch = (
        f" Installed already: {', '.join(others)}; to use it, set "
        f"KERAS_BACKEND={others[0]}."
        if others
        else ""
    )
    raise ImportError(
        f"keras_tx needs the {name} backend of Keras, which is not installed. "
        f'Install it with: pip install "keras-tx[{name}]".{switch}'
    )
