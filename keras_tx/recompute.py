"""What work in parts needs of a backend: an order, and a gradient of one's own.

Parts that a gradient makes again instead of keeping hold little memory only if
they run one after the other.
"""

import keras


def after(previous, *tensors):
    """Returns `tensors`, not to be used before all of `previous` exist.

    Blocks don't depend on each other, so that a graph would compute them all at
    once and hold the scores of all.
    """
    if not previous:
        return tensors
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.control_dependencies(previous):
            return tuple(tf.identity(x) for x in tensors)
    if keras.backend.backend() == "jax":
        # XLA drops its optimization barriers before it schedules, but not a sum:
        # of 0, unless the last block begins with one not-a-number out of millions.
        import jax

        first = jax.numpy.reshape(previous[0], (-1,))[:1].sum().astype("float32")
        rare = jax.lax.bitcast_convert_type(first, "int32") == 0x7FC12345
        return tuple(
            x + rare.astype(x.dtype) if len(x.shape) == 5 else x for x in tensors
        )
    return tensors


def unknown_zero(x):
    """Returns an integer 0 that no compiler knows to be 0.

    TensorFlow would compute the triangle of causality of every block beforehand
    and keep them all: a gigabyte at 16,384 tokens.
    """
    if keras.backend.backend() != "tensorflow":
        return 0
    import tensorflow as tf

    one = tf.cast(tf.reduce_sum(tf.reshape(x, (-1,))[:1]), tf.float32)
    return tf.bitwise.bitwise_and(tf.bitcast(one, tf.int32), 0)


def with_gradient(forward, backward, tensors, constants):
    """Returns `forward(tensors, constants)`, with a gradient of one's own.

    `backward(tensors, constants, result, upstream)` returns those of `tensors`.
    `keras.ops.custom_gradient` has no place for the constants: JAX needs to know
    them, torch would keep them, and a boolean has no gradient to return.
    """
    count = len(tensors)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        @tf.custom_gradient
        def run(*tensors):
            result = forward(tensors, constants)
            return result, lambda up: backward(tensors, constants, result, up)

        return run(*tensors)
    if keras.backend.backend() == "jax":
        import jax

        @jax.custom_vjp
        def run(tensors, constants):
            return forward(tensors, constants)

        def run_forward(tensors, constants):
            result = forward(tensors, constants)
            return result, (tensors, constants, result)

        def run_backward(kept, upstream):
            return tuple(backward(*kept, upstream)), None

        run.defvjp(run_forward, run_backward)
        return run(tuple(tensors), tuple(constants))
    import torch

    class Run(torch.autograd.Function):
        """The two as torch wants them."""

        @staticmethod
        def forward(ctx, *inputs):
            result = forward(inputs[:count], inputs[count:])
            ctx.save_for_backward(*inputs, result)
            return result

        @staticmethod
        def backward(ctx, upstream):
            *inputs, result = ctx.saved_tensors
            found = backward(inputs[:count], inputs[count:], result, upstream)
            return (*found, *(None for _ in constants))

    return Run.apply(*tensors, *constants)
