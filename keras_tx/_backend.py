"""Says which line installs a backend, before Keras fails without one."""

import importlib.util
import json
import os
import pathlib

PACKAGES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}


def chosen_backend():
    """Returns the backend that Keras will use: environment, then its file."""
    name = os.environ.get("KERAS_BACKEND")
    if name:
        return name
    home = os.environ.get("KERAS_HOME") or pathlib.Path.home() / ".keras"
    try:
        config = json.loads((pathlib.Path(home) / "keras.json").read_text())
    except (OSError, ValueError):
        return "tensorflow"
    return config.get("backend", "tensorflow")


def require_backend():
    """Raises `ImportError` with the line to type where the backend is missing."""
    name = chosen_backend()
    package = PACKAGES.get(name)
    if package is None:
        raise ImportError(
            f"keras_tx runs on the Keras backends {', '.join(PACKAGES)}. The "
            f"chosen one is {name!r}. Set the environment variable "
            "KERAS_BACKEND to one of these before the import."
        )
    if importlib.util.find_spec(package) is not None:
        return
    others = [
        other
        for other, needed in PACKAGES.items()
        if importlib.util.find_spec(needed) is not None
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
