"""Cross-entropy over many tokens of a large vocabulary, some logits at a time.

The logits of a batch, B T V, are often the largest tensor of a training step: of
4,096 tokens and a vocabulary of 50,257 they are 0.8 GB, and the loss and its
gradient hold them several times over. Here they are made for some entries of the
vocabulary at a time, and made again for the gradient, so that each entry's share of
the table gets its gradient once and in place.

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

# Logits that exist at once where `chunk_size` is not given: 16 MB in float32. With
# fewer entries at once the products become small, and passes over the rows many.
LOGITS_AT_ONCE = 2**22
FEWEST_AT_ONCE = 1024


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
        chunk_size: Optional number of vocabulary entries whose logits exist at
            once. Default: as many as make 4 million logits, 1,024 at least.
    """
    sizes = kernels.sizes(features)[:-1]
    rows = ops.reshape(features, (-1, features.shape[-1]))
    labels = ops.reshape(labels, (-1,))
    if chunk_size is None:
        count = rows.shape[0] or LOGITS_AT_ONCE
        chunk_size = max(FEWEST_AT_ONCE, LOGITS_AT_ONCE // count)
    num_chunks = -(-head.vocab_size // chunk_size)
    # Even chunks, so that little is computed twice.
    work = _Chunks(head, num_chunks, -(-head.vocab_size // num_chunks))
    tensors = [rows, head.kernel] + ([] if head.bias is None else [head.bias])
    losses = with_gradient(work.forward, work.backward, tensors, [labels])[0]
    return ops.reshape(losses, sizes)


class _Chunks:
    """What `crossentropy` does with a vocabulary that is worked on in chunks.

    The entries of the last chunk are the last of the vocabulary, so that its first
    ones may have been in the chunk before.
    """

    def __init__(self, head, num_chunks, size):
        self.head = head
        self.num_chunks = num_chunks
        self.size = size

    def start(self, index):
        """Returns the first entry of a chunk."""
        last = self.head.vocab_size - self.size
        if isinstance(index, int):
            return min(index * self.size, last)
        return ops.minimum(index * self.size, last)

    def entries(self, index):
        """Returns the entries of a chunk, `(size,)`."""
        return self.start(index) + ops.arange(self.size, dtype="int32")

    def new(self, index):
        """Returns which entries of a chunk were in none before, `(size,)`."""
        return self.entries(index) >= index * self.size

    def axis(self, x):
        """Returns the axis of the vocabulary in a kernel or bias."""
        return 0 if self.head.tied else len(x.shape) - 1

    def cut(self, x, index):
        """Returns what of a kernel or bias belongs to a chunk."""
        starts, sizes = [0] * len(x.shape), list(x.shape)
        starts[self.axis(x)], sizes[self.axis(x)] = self.start(index), self.size
        return ops.slice(x, starts, sizes)

    def put(self, x, index, part):
        """Returns the gradient of a kernel or bias with that of a chunk in it."""
        start, part = self.start(index), ops.cast(part, x.dtype)
        if keras.backend.backend() == "torch":
            # In place: nobody else has seen this tensor.
            x.narrow(self.axis(x), start, self.size).copy_(part)
            return x
        starts = [0] * len(x.shape)
        starts[self.axis(x)] = start
        return ops.slice_update(x, starts, part)

    def part(self, index, kernel, bias=None):
        """Returns the head of a chunk."""
        bias = None if bias is None else self.cut(bias, index)
        return dataclasses.replace(self.head, kernel=self.cut(kernel, index), bias=bias)

    def own(self, labels, index):
        """Returns which logit of a chunk is its token's own, `(n, size)`."""
        return self.entries(index) == labels[:, None]

    def forward(self, tensors, constants):
        """Returns the loss of each row and the log of its sum, `(2, n)`."""
        rows, *of_head = tensors
        (labels,) = constants

        def body(index, highest, total, own):
            logits = self.part(index, *of_head).logits(rows)
            new = self.new(index)
            mine = ops.logical_and(self.own(labels, index), new)
            own = own + ops.sum(ops.where(mine, logits, 0.0), axis=-1)
            logits = ops.where(new, logits, -float("inf"))
            before = highest
            highest = ops.maximum(before, ops.max(logits, axis=-1))
            part = ops.sum(ops.exp(logits - highest[:, None]), axis=-1)
            return highest, total * ops.exp(before - highest) + part, own

        wide = "float64" if kernels.dtype_name(rows) == "float64" else "float32"
        zeros = ops.zeros(kernels.sizes(rows)[:1], dtype=wide)
        # Not -inf, which a chunk whose logits are all -inf would be compared with.
        state = (zeros + kernels.MASKED_SCORE, zeros, zeros)
        highest, total, own = in_turn(self.num_chunks, body, state)
        total = highest + ops.log(total)
        losses = ops.where(self.known(labels), total - own, float("nan"))
        return ops.stack([losses, total])

    def backward(self, tensors, constants, losses, upstream):
        rows, *of_head = tensors
        (labels,) = constants
        total = losses[1][:, None]
        upstream = ops.where(self.known(labels), upstream[0], float("nan"))[:, None]

        def body(index, of_rows, *found):
            head = self.part(index, *of_head)
            logits = head.logits(rows)
            weights = ops.exp(logits - total)
            own = self.own(labels, index)
            of_logits = ops.where(own, weights - 1.0, weights) * upstream
            # Entries that were in the chunk before have given to the rows.
            new = ops.expand_dims(self.new(index), 1 - self.axis(head.kernel))
            head = dataclasses.replace(head, kernel=ops.where(new, head.kernel, 0.0))
            part, *parts = head.gradients(rows, of_logits, logits)
            pairs = zip(found, parts, strict=True)
            return of_rows + part, *(self.put(x, index, share) for x, share in pairs)

        state = [ops.zeros(kernels.sizes(x), losses.dtype) for x in tensors]
        return in_turn(self.num_chunks, body, tuple(state))

    def known(self, labels):
        """Returns which labels are in the vocabulary."""
        return ops.logical_and(labels >= 0, labels < self.head.vocab_size)


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
    """Cross-entropy of tokens that never holds the logits of a whole vocabulary.

    The same numbers and gradients as
    `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, masks and sample
    weights included, in the memory of the logits of a thousand entries, for a second
    product with the head in the gradient. Worth it from vocabularies of some
    thousand tokens.

    Compile a `keras_tx.LanguageModel` with it, which `decoder`, `encoder_decoder`
    and `encoder(output="tokens")` return: in `fit` and `evaluate` it hands over
    features in place of logits. Called, in `predict` and in `generate` the model
    returns logits as ever, and its file is the same. Metrics need logits: a model
    that is compiled with some computes them after all, and warns.

    Args:
        ignore_class: Optional label that counts in no loss, such as -100.
        chunk_size: Optional number of vocabulary entries whose logits exist at
            once. Default: as many as make 4 million logits, 1,024 at least.
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
