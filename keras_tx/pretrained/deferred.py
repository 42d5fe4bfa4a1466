"""Models without values: shapes first, weights straight from the file after.

A model that is initialized and then loaded exists twice where it matters: the
largest table is drawn, then read, then copied. Keras already knows variables
that have a shape and no value yet, for the sake of shape inference; here they
are checked against the file's header and then filled by it.
"""

import keras
from keras.src.backend.common import global_state

_PENDING = "uninitialized_variables"


def build_without_values(build):
    """Calls `build()`, whose variables get shapes and no values.

    Args:
        build: A function without arguments that returns a model.

    Returns:
        The model, and all variables that wait for a value, seeds of dropout
        included. Nothing has been allocated for them.
    """
    before = list(global_state.get_global_attribute(_PENDING, []) or [])
    try:
        with keras.StatelessScope(initialize_variables=False):
            model = build()
        pending = list(global_state.get_global_attribute(_PENDING, []) or [])
    finally:
        # Keras would initialize them at the end of any later scope, even those
        # of a model that was refused.
        global_state.set_global_attribute(_PENDING, before)
    known = {id(variable) for variable in before}
    return model, [variable for variable in pending if id(variable) not in known]


def fill(pending, readers):
    """Gives every variable its value, one after the other.

    Args:
        pending: Variables without values, in the order of their making.
        readers: `{id(variable): function that returns its array}`. The rest
            start as their own initializers say.
    """
    for variable in pending:
        reader = readers.get(id(variable))
        if reader is not None:
            variable._initializer = lambda shape, dtype=None, read=reader: read()
        variable._deferred_initialize()
