"""Cross-entropy over many tokens of a large vocabulary, some logits at a time.

The logits of a batch, B T V, are often the largest tensor of a training step: of
4,096 tokens and a vocabulary of 50,257 they are 0.8 GB, and the loss and its
gradient hold them several times over. Here they are made of some tokens at a time,
and made again for the gradient.

A loss sees what a model returned and nothing else. So a model that is compiled with
`ChunkedCrossentropy` puts its logits off: within a training step the head returns
the features that it was given, and the loss makes the logits of them.
"""

import contextlib
import contextvars
import dataclasses
import warnings
from typing import Any

import keras
from keras import ops

from keras_tx import checks, kernels, masks
from keras_tx.recompute import in_turn, with_gradient
from keras_tx.serialization import register

# Logits that exist at once where `chunk_size` is not given: 16 MB in float32.
LOGITS_AT_ONCE = 2**22


@dataclasses.dataclass(frozen=True)
class Head:
    """What turns features into logits.

    Args:
        kernel: `(V, D)`, as of an embedding, or `(D, V)`.
        tied: Whether the kernel is `(V, D)`.
        bias: Optional, `(V,)`.
        soft_cap: Optional bound of the logits: `cap * tanh(logits / cap)`.
        dtype: The dtype of features and kernel as they are multiplied; logits are
            float32 at least.
    """

    kernel: Any
    tied: bool = True
    bias: Any = None
    soft_cap: float | None = None
    dtype: str = "float32"

    @property
    def vocab_size(self):
        return self.kernel.shape[0 if self.tied else 1]

    def logits(self, features):
        """Returns logits `(..., V)` of features `(..., D)`."""
        kernel, features = (ops.cast(x, self.dtype) for x in (self.kernel, features))
        equation = "nd,vd->nv" if self.tied else "nd,dv->nv"
        logits = kernels.project(features, kernel, equation)
        if self.bias is not None:
            logits = logits + ops.cast(self.bias, logits.dtype)
        if self.soft_cap is not None:
            logits = self.soft_cap * ops.tanh(logits / self.soft_cap)
        return logits

    def gradients(self, features, of_logits, logits):
        """Returns the gradients of rows `(n, D)`, of the kernel, and of a bias.

        Args:
            features: Rows, `(n, D)`.
            of_logits: Gradient of the logits, `(n, V)`.
            logits: `(n, V)`, as `logits` returned them.
        """
        if self.soft_cap is not None:
            of_logits = of_logits * (1.0 - ops.square(logits / self.soft_cap))
        of_bias = [] if self.bias is None else [ops.sum(of_logits, axis=0)]
        kernel, features = (ops.cast(x, self.dtype) for x in (self.kernel, features))
        if keras.backend.backend() == "jax":
            of_logits = ops.cast(of_logits, self.dtype)
        else:
            # Without mixed products the cast would only lose bits.
            kernel, features = (
                ops.cast(x, of_logits.dtype) for x in (kernel, features)
            )
        multiply = kernels.einsum_float32
        if self.tied:
            of_features = multiply("nv,vd->nd", of_logits, kernel)
            of_kernel = multiply("nv,nd->vd", of_logits, features)
        else:
            of_features = multiply("nv,dv->nd", of_logits, kernel)
            of_kernel = multiply("nd,nv->dv", features, of_logits)
        return of_features, of_kernel, *of_bias


def crossentropy(features, labels, head, chunk_size=None):
    """Returns `-log softmax(logits)[label]` of each token, `(...)`, in float32.

    Labels outside of the vocabulary have a loss that is not a number.

    Args:
        features: `(..., D)`.
        labels: Integers, `(...)`.
        head: A `Head`.
        chunk_size: Optional number of tokens whose logits exist at once. Default:
            as many as make 4 million logits.
    """
    chunk_size = chunk_size or max(1, LOGITS_AT_ONCE // head.vocab_size)
    sizes = kernels.sizes(features)[:-1]
    rows = ops.reshape(features, (-1, features.shape[-1]))
    labels = ops.reshape(labels, (-1,))
    count = kernels.sizes(rows)[0]
    largest = max if isinstance(count, int) else ops.maximum
    num_chunks = largest(1, -(-count // chunk_size))
    # Even chunks, so that little is computed for nothing.
    size = -(-count // num_chunks)
    behind = num_chunks * size - count
    rows = ops.pad(rows, ((0, behind), (0, 0)))
    labels = ops.pad(labels, ((0, behind),))
    tensors = [rows, head.kernel] + ([] if head.bias is None else [head.bias])
    work = _Chunks(head, num_chunks, size)
    losses = with_gradient(work.forward, work.backward, tensors, [labels])
    return ops.reshape(losses[:count], sizes)


class _Chunks:
    """What `crossentropy` does with rows that divide into chunks."""

    def __init__(self, head, num_chunks, size):
        self.head = head
        self.num_chunks = num_chunks
        self.size = size

    def cut(self, x, index):
        """Returns the rows of a chunk."""
        if isinstance(index, int):
            return x[index * self.size : (index + 1) * self.size]
        starts = [index * self.size] + [0] * (len(x.shape) - 1)
        return ops.slice(x, starts, [self.size, *x.shape[1:]])

    def put(self, x, index, part):
        """Returns `x` with the rows of a chunk in their place."""
        starts = [index * self.size] + [0] * (len(x.shape) - 1)
        return ops.slice_update(x, starts, ops.cast(part, x.dtype))

    def given(self, tensors):
        """Returns the rows, and the head with its tensors."""
        rows, kernel, *bias = tensors
        bias = bias[0] if bias else None
        # Cast once and not in every chunk.
        kernel = ops.cast(kernel, self.head.dtype)
        return rows, dataclasses.replace(self.head, kernel=kernel, bias=bias)

    def forward(self, tensors, constants):
        rows, head = self.given(tensors)
        (labels,) = constants

        def body(index, losses):
            logits = head.logits(self.cut(rows, index))
            label, known = self.labels(labels, index)
            logits = logits - ops.max(logits, axis=-1, keepdims=True)
            total = ops.log(ops.sum(ops.exp(logits), axis=-1))
            own = ops.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
            return (
                self.put(losses, index, ops.where(known, total - own, float("nan"))),
            )

        wide = "float64" if kernels.dtype_name(rows) == "float64" else "float32"
        losses = ops.zeros((self.num_chunks * self.size,), dtype=wide)
        return in_turn(self.num_chunks, body, (losses,))[0]

    def backward(self, tensors, constants, losses, upstream):
        rows, head = self.given(tensors)
        (labels,) = constants

        def body(index, of_rows, *of_head):
            features = self.cut(rows, index)
            logits = head.logits(features)
            label, known = self.labels(labels, index)
            up = ops.where(known, self.cut(upstream, index), float("nan"))[:, None]
            own = ops.arange(head.vocab_size, dtype="int32") == label[:, None]
            weights = kernels.softmax(logits)
            of_logits = ops.where(own, weights - 1.0, weights) * up
            part, *parts = head.gradients(features, of_logits, logits)
            pairs = zip(of_head, parts, strict=True)
            sums = [total + ops.cast(x, total.dtype) for total, x in pairs]
            return self.put(of_rows, index, part), *sums

        state = [ops.zeros(kernels.sizes(x), losses.dtype) for x in tensors]
        found = in_turn(self.num_chunks, body, tuple(state))
        return [ops.cast(g, x.dtype) for g, x in zip(found, tensors, strict=True)]

    def labels(self, labels, index):
        """Returns the labels of a chunk, and whether each is one."""
        labels = self.cut(labels, index)
        known = ops.logical_and(labels >= 0, labels < self.head.vocab_size)
        return ops.where(known, labels, 0), known


# ----------------------------------------------------------------------------
# Logits put off
# ----------------------------------------------------------------------------

_current: contextvars.ContextVar = contextvars.ContextVar(
    "keras_tx_put_off", default=None
)


def put_off():
    """Returns the `PutOff` of the training step in this thread, or `None`."""
    return _current.get()


class PutOff:
    """One step in which heads return the features that they were given."""

    def __init__(self):
        self.given = []  # pairs of a layer and the features that it returned
        self.layer = None  # the one whose features the loss now gets

    def __enter__(self):
        self._token = _current.set(self)
        return self

    def __exit__(self, kind, error, traceback):
        _current.reset(self._token)

    def features(self, layer, x):
        """Notes that `layer` returns `x` instead of its logits."""
        self.given.append((layer, x))
        return x

    @contextlib.contextmanager
    def returned(self, outputs):
        """Tells the loss inside whose features a model returned."""
        outputs = keras.tree.flatten(outputs)
        if self.given:
            layers = [layer for layer, x in self.given if x is outputs[0]]
            if not layers or len(outputs) > 1:
                names = ", ".join(f"'{layer.name}'" for layer, _ in self.given)
                raise ValueError(
                    "`ChunkedCrossentropy` needs a model whose one output is the "
                    "logits as their head returned them; this one does something "
                    f"with those of {names}, or returns more. Make a model "
                    "that returns the logits alone for training, or compile with "
                    "`keras.losses.SparseCategoricalCrossentropy(from_logits=True)`."
                )
            self.layer = layers[-1]
        try:
            yield
        finally:
            self.layer = None


@register
class ChunkedCrossentropy(keras.losses.Loss):
    """Cross-entropy of tokens that never holds the logits of all of them.

    The same numbers and gradients as
    `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, masks and sample
    weights included, in the memory of a few hundred tokens' logits, for a second
    product with the head in the gradient. Worth it from vocabularies of some
    thousand tokens.

    Compile a `keras_tx.LanguageModel` with it, which `decoder`, `encoder_decoder`
    and `encoder(output="tokens")` return: in `fit` and `evaluate` it hands over
    features in place of logits. Called, in `predict` and in `generate` the model
    returns logits as ever, and its file is the same. Metrics need logits: a model
    that is compiled with some computes them after all, and warns.

    Args:
        ignore_class: Optional label that counts in no loss, such as -100.
        chunk_size: Optional number of tokens whose logits exist at once. Default:
            as many as make 4 million logits.
        reduction: As in every loss of Keras.
        name: Name of the loss.
        dtype: Dtype of the loss. Default: float32.

    Call arguments:
        y_true: Integers, `(B, T)`. Labels outside of the vocabulary have a loss
            that is not a number.
        y_pred: What the model returned.
        sample_weight: Optional, `(B, T)` or `(B,)`.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> model.compile("adamw", keras_tx.ChunkedCrossentropy())
    >>> tokens = keras.ops.ones((4, 10), dtype="int32")
    >>> history = model.fit(tokens, tokens, verbose=0)
    """

    def __init__(
        self,
        ignore_class=None,
        chunk_size=None,
        reduction="sum_over_batch_size",
        name="chunked_crossentropy",
        dtype=None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        self.ignore_class = checks.integer("ignore_class", ignore_class, optional=True)
        self.chunk_size = checks.positive_integer(
            "chunk_size", chunk_size, optional=True
        )

    def call(self, y_true, y_pred):
        if len(y_true.shape) == len(y_pred.shape) and y_true.shape[-1] == 1:
            y_true = ops.squeeze(y_true, axis=-1)
        if len(y_true.shape) != len(y_pred.shape) - 1:
            raise ValueError(
                "Each token has one label, an integer: (batch, time). Received: "
                f"y_true.shape={tuple(y_true.shape)} for y_pred.shape="
                f"{tuple(y_pred.shape)}."
            )
        layer = getattr(put_off(), "layer", None)
        if layer is None:
            if not checks.while_tracing_shapes():
                warnings.warn(
                    "`ChunkedCrossentropy` was given logits, so that no memory is "
                    "spared. It is in `fit` and `evaluate` of a "
                    "`keras_tx.LanguageModel` (in place of `keras.Model`) whose "
                    "head is a `TokenEmbedding`, if it is compiled without metrics, "
                    "which need logits.",
                    stacklevel=2,
                )
            return keras.losses.sparse_categorical_crossentropy(
                y_true, y_pred, from_logits=True, ignore_class=self.ignore_class
            )
        labels = ops.cast(y_true, "int32")
        valid = None
        if self.ignore_class is not None:
            valid = ops.not_equal(labels, self.ignore_class)
            labels = ops.where(valid, labels, 0)
        losses = crossentropy(y_pred, labels, layer.head(), self.chunk_size)
        if valid is not None:
            losses = ops.where(valid, losses, 0.0)
            masks.attach(losses, valid)
        return losses

    def get_config(self):
        return {
            **super().get_config(),
            "ignore_class": self.ignore_class,
            "chunk_size": self.chunk_size,
        }
