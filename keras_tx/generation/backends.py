"""What differs between backends: compilation and gradients."""

import keras

from keras_tx.generation.record import Recorder


def compile_function(function, model, variables, donate):
    """Compiles a function of tensors in which the model's weights take part."""
    if keras.backend.backend() == "torch":
        recorder = Recorder(variables)

        def run_recording(*args):
            with recorder.open():
                return function(*args)

        return run_recording
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(
            function, jit_compile=bool(model.supports_jit), autograph=False
        )
    import jax

    # Weights are arguments: as constants they would be copied, and go stale.
    def stateless(values, *args):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return function(*args)

    jitted = jax.jit(stateless, donate_argnums=tuple(index + 1 for index in donate))

    def run(*args):
        return jitted([variable.value for variable in variables], *args)

    return run


def without_gradients(function):
    """Returns the function, run without recording for gradients."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        pause = tf.init_scope  # pauses tapes
    elif backend == "torch":
        import torch

        pause = torch.no_grad
    else:
        return function

    def run(*args):
        with pause():
            return function(*args)

    return run
