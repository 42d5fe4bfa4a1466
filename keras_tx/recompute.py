"""What work in parts needs of a backend: an order, and a gradient of one's own.

Parts that a gradient makes again instead of keeping hold little memory only if
they run one after the other.
"""

import keras
from keras import ops


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

    `keras.ops.custom_gradient` has no place for the constants: JAX needs to know
    them, torch would keep them, and a boolean has no gradient to return.

    Args:
        forward: Function of both structures that returns a tensor.
        backward: Function of both, of that tensor and of its gradient. Returns
            those of `tensors`, in its structure; they are cast.
        tensors: Structure of tensors, differentiated for.
        constants: Structure of tensors that have no gradient.
    """
    inputs = keras.tree.flatten(tensors)

    def pack(found):
        return keras.tree.pack_sequence_as(tensors, list(found))

    def slopes(*arguments):
        found = keras.tree.flatten(backward(*arguments))
        return [ops.cast(g, x.dtype) for g, x in zip(found, inputs, strict=True)]

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        @tf.custom_gradient
        def run(*inputs):
            tensors = pack(inputs)
            result = forward(tensors, constants)
            return result, lambda up: slopes(tensors, constants, result, up)

        # Values: TensorFlow wants gradients of variables handed over by name.
        return run(*(tf.convert_to_tensor(x) for x in inputs))
    if backend == "jax":
        import jax

        @jax.custom_vjp
        def run(inputs, constants):
            return forward(pack(inputs), constants)

        def run_forward(inputs, constants):
            result = run(inputs, constants)
            return result, (inputs, constants, result)

        def run_backward(kept, upstream):
            inputs, constants, result = kept
            return slopes(pack(inputs), constants, result, upstream), None

        run.defvjp(run_forward, run_backward)
        return run(inputs, constants)
    import torch

    kept_back = keras.tree.flatten(constants)
    count = len(inputs)

    class Run(torch.autograd.Function):
        """The two as torch wants them."""

        @staticmethod
        def forward(ctx, *flat):
            given = keras.tree.pack_sequence_as(constants, list(flat[count:]))
            result = forward(pack(flat[:count]), given)
            ctx.save_for_backward(*flat, result)
            return result

        @staticmethod
        def backward(ctx, upstream):
            *flat, result = ctx.saved_tensors
            given = keras.tree.pack_sequence_as(constants, list(flat[count:]))
            found = slopes(pack(flat[:count]), given, result, upstream)
            return (*found, *(None for _ in kept_back))

    return Run.apply(*inputs, *kept_back)


def pull_back(function, tensors, upstream):
    """Returns the gradients of `function(*tensors)`, as the backend finds them.

    For within a `backward` of `with_gradient`.

    Args:
        function: Function that returns a tensor.
        tensors: List of tensors to differentiate for.
        upstream: Gradient of what `function` returns, which broadcasts to it.
    """
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(tensors)
            total = tf.reduce_sum(function(*tensors) * tf.stop_gradient(upstream))
        found = tape.gradient(total, tensors, unconnected_gradients="zero")
        return [tf.convert_to_tensor(g) for g in found]
    if backend == "jax":
        import jax

        return list(
            jax.grad(
                lambda tensors: (function(*tensors) * upstream).sum(),
            )(list(tensors))
        )
    import torch

    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in tensors]
        total = (function(*inputs) * upstream).sum()
    found = torch.autograd.grad(total, inputs, allow_unused=True)
    return [
        torch.zeros_like(x) if g is None else g
        for g, x in zip(found, inputs, strict=True)
    ]


def in_turn(count, body, state):
    """Returns `state` after `state = body(index, *state)`, `count` times over.

    Not to be differentiated through: for within `with_gradient`.

    Args:
        count: Integer, or a tensor of it.
        body: Function of an index and of all of `state`, which returns the like.
        state: Tuple of tensors, whose shapes stay.
    """
    backend = keras.backend.backend()
    if isinstance(count, int) and count == 1:
        return tuple(body(0, *state))
    if backend == "torch":
        for index in range(count):
            state = tuple(body(index, *state))
        return state
    if backend == "jax":
        import jax

        return jax.lax.fori_loop(
            0, count, lambda index, state: tuple(body(index, *state)), tuple(state)
        )
    import tensorflow as tf

    # One at a time: TensorFlow would begin ten at once, as far as they go.
    _, *state = tf.while_loop(
        lambda index, *_: index < count,
        lambda index, *state: (index + 1, *body(index, *state)),
        (tf.constant(0), *state),
        parallel_iterations=1,
    )
    return tuple(state)
