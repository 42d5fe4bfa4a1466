"""Rematerialisation: layers that are computed again on the way back.

It saves the memory of what lies between a layer's input and its output, for a
second forward pass. `keras.RematScope` hands `call` with all its arguments to what
the backend has for it, and that is made for pure functions of tensors: JAX traces
flags such as `training`, TensorFlow takes no keywords while it compiles, tensors
come in without the implicit masks attached to them, and dropout would drop other
features the second time.
"""

import contextlib
import threading

import keras
from keras import ops
from keras.src.backend.common.remat import get_current_remat_mode
from keras.src.backend.common.stateless_scope import (
    get_stateless_scope,
    in_stateless_scope,
)

from keras_tx import masks


class Rematerialized:
    """What makes a layer of masks and flags fit for `keras.RematScope`.

    Only features, of which there are gradients, go through the backend's
    function. Children are computed again with their parent and not once more.
    """

    def rematerialized_call(self, layer_call, *args, **kwargs):
        if self._remat_mode is None or self._remat_mode.mode == "activations":
            return super().rematerialized_call(layer_call, *args, **kwargs)
        leaves = keras.tree.flatten((args, kwargs))
        places = [place for place, x in enumerate(leaves) if _is_features(x)]
        parts = self._flatten_layers()
        seeds = []

        def of_features(*features):
            filled = list(leaves)
            for place, x in zip(places, features, strict=True):
                mask = masks.implicit(leaves[place])
                if x is not leaves[place] and mask is not None:
                    masks.attach(x, mask)
                filled[place] = x
            new_args, new_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            with without(parts), _same_draws(self, seeds):
                return layer_call(*new_args, **new_kwargs)

        again = super().rematerialized_call(of_features, *args, **kwargs)
        # The scope does not mean this layer, or there is nothing to keep.
        if again is of_features or not places:
            return layer_call
        if kwargs.get("training"):
            for generator in (g for layer in parts for g in layer._seed_generators):
                seeds.append((generator.state, generator.next()))
        return lambda *args, **kwargs: again(*(leaves[place] for place in places))


def _is_features(x):
    return ops.is_tensor(x) and keras.backend.is_float_dtype(x.dtype)


_lock = threading.Lock()
_switched_off: dict[int, list] = {}  # by id: the layer's mode, and how many want it off


@contextlib.contextmanager
def without(layers):
    """Switches rematerialisation off in some layers for a while.

    So it is in operations that are made meanwhile, whatever scope is open. Threads
    may do so at once: the last one to leave brings the mode of the layers back.
    """
    scope = contextlib.nullcontext()
    if get_current_remat_mode() is not None:
        scope = keras.RematScope(mode=None)
    layers = list(layers)
    with _lock:
        for layer in layers:
            entry = _switched_off.setdefault(id(layer), [layer._remat_mode, 0])
            entry[1] += 1
            layer._remat_mode = None
    try:
        with scope:
            yield
    finally:
        with _lock:
            for layer in layers:
                entry = _switched_off[id(layer)]
                entry[1] -= 1
                if entry[1] == 0:
                    layer._remat_mode = entry[0]
                    del _switched_off[id(layer)]


@contextlib.contextmanager
def _same_draws(layer, seeds):
    """Draws from the same seeds each time, and lets no state out.

    Args:
        layer: The layer that is computed inside.
        seeds: Pairs of the state of a seed generator and its value.
    """
    if not seeds:
        yield
        return
    outer = get_stateless_scope().state_mapping if in_stateless_scope() else {}
    held = {**outer, **{id(state): value for state, value in seeds}}
    with keras.StatelessScope() as scope:
        scope.state_mapping = dict(held)
        yield
    own = {id(state) for state, _ in seeds}
    for variable in layer.variables:
        value = scope.get_current_value(variable)
        if id(variable) not in own and value is not held.get(id(variable)):
            raise ValueError(
                f"'{variable.path}' is updated by the forward pass, which "
                f"`keras.RematScope` computes twice. Leave '{layer.name}' out of "
                'the scope, for example with `mode="list_of_layers"`.'
            )


def leave_to_parts(model):
    """Rematerialises the parts of a builder's model that are fit for it, only.

    A model that is computed again as a whole saves nothing, and layers of Keras
    that take `training` fail on JAX and on TensorFlow.
    """
    for layer in (model, *model.layers):
        if not isinstance(layer, Rematerialized):
            layer._remat_mode = None
