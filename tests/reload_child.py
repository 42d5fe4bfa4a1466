"""Loads saved models in a process that never built them, one request a line.

`contract.FreshProcess` starts it. A request is a line of JSON on the standard
input, the answer a line of JSON on the standard output; arrays travel in `.npz`
files. One process serves many files, for the import costs seconds.
"""

import importlib
import json
import os
import sys
import traceback

# What libraries print must not end up between the answers.
answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

import contract  # noqa: E402
import keras  # noqa: E402
import numpy as np  # noqa: E402

import keras_tx  # noqa: E402, F401


def serve(request):
    """Loads what a request names and returns what it has become."""
    for module in request["modules"]:
        importlib.import_module(module)
    keras.config.set_dtype_policy(request["policy"])
    keras.backend.clear_session()  # as if each file had a process of its own
    with np.load(request["inputs"]) as stored:
        inputs = {name: stored[name] for name in request["names"]}
    model = keras.saving.load_model(request["file"])
    found = contract.describe(model, inputs)
    if request["weights_file"]:
        twin = type(model).from_config(model.get_config())
        contract.call(twin, inputs)  # a subclassed model is built by a call
        twin.load_weights(request["weights_file"])
        found["again"] = contract.describe(twin, inputs)
    if request["steps"]:
        found["losses"], found["optimizer"] = contract.train(
            model, inputs, request["steps"]
        )
    arrays, rest = contract.split_arrays(found)
    np.savez(request["answer"], **arrays)
    return rest


for line in sys.stdin:
    try:
        answer = {"found": serve(json.loads(line))}
    except Exception:
        answer = {"error": traceback.format_exc()}
    answers.write(json.dumps(answer) + "\n")
