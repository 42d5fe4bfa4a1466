"""Looking at attention: its weights, its health while it trains, and pictures.

All of it runs the model once, eagerly and without dropout, inside a scope in
which its layers note what passes through them; see `keras_tx.recording`.
"""

import collections
import math
import re
import warnings

import keras
import numpy as np
from keras import ops

from keras_tx import checks, recording, remat

# A query is saturated that puts more than this weight on one of several keys.
SATURATED = 0.99

# A head is dead that adds less than this share of what the strongest head of
# its layer adds.
DEAD = 1e-3


# ----------------------------------------------------------------------------
# Maps
# ----------------------------------------------------------------------------


def attention_maps(model, inputs):
    """Returns the attention weights of every layer of a model.

    Works for any Keras model of these layers, functional, Sequential, subclassed
    or reloaded, with encoders, decoders and cross-attention, and on a
    `ScaledAttention`, `MultiHead` or `TransformerBlock` alone. The model and what
    it returns stay as they are; it runs once, without dropout.

    Args:
        model: A `keras.Model` or layer.
        inputs: What the model is called with: an array or lists of tokens, a
            dict of these by input name, or a tuple of arrays.

    Returns:
        Dict of NumPy arrays `(B, N, T, S)` in float32, by the path of the layer,
        such as `"block_0/attention"` or `"decoder_block_1/cross_attention"`, in
        the order of calls. A path that comes again, of a layer that is called
        twice, has `:2` behind it, then `:3`. A `ScaledAttention` without heads
        counts as one head.

    Raises:
        ValueError: If the model has no attention of keras_tx, or runs inside a
            compiled function of its own.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> maps = keras_tx.attention_maps(model, [[5, 7, 11]])
    >>> {path: weights.shape for path, weights in maps.items()}
    {'block_0/attention': (1, 4, 3, 3), 'block_1/attention': (1, 4, 3, 3)}
    """
    notes = _notes(model, _standardize(inputs))
    return {
        path: _numpy(note.weights).astype("float32")
        for path, note in _keyed(notes, recording.Attended).items()
    }


def _notes(model, inputs):
    """Runs a model and returns what its layers noted."""
    if not isinstance(model, keras.layers.Layer):
        raise ValueError(
            f"`model` must be a Keras model or layer. Received: {model!r}."
        )

    def run():
        if isinstance(inputs, tuple):
            return model(*inputs, training=False)
        return model(inputs, training=False)

    if not model.built:
        run()  # what builds it must not be noted
    # Rematerialisation would run layers in a trace of its own.
    parts = list(model._flatten_layers())
    with remat.without(parts), recording.Scope() as scope:
        run()
    if not any(isinstance(note, recording.Attended) for note in scope.notes):
        raise ValueError(
            f"'{model.name}' called no `MultiHead` or `ScaledAttention` of "
            "keras_tx, so there are no weights to show. Other attention layers "
            "return theirs with `return_attention_scores=True`."
        )
    return scope.notes


def _keyed(notes, kind):
    """Returns the notes of a kind by path, a number behind those that repeat."""
    found, counts = {}, collections.Counter()
    for note in notes:
        if isinstance(note, kind):
            path = note.layer.path
            counts[path] += 1
            number = counts[path]
            found[path if number == 1 else f"{path}:{number}"] = note
    return found


def _standardize(inputs):
    """Returns inputs as arrays: lists of numbers are one array, not a structure."""
    if inputs is None:
        return None
    if isinstance(inputs, dict):
        return {name: _standardize(x) for name, x in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        leaves = keras.tree.flatten(inputs)
        if any(hasattr(leaf, "shape") and len(leaf.shape) for leaf in leaves):
            return type(inputs)(_standardize(x) for x in inputs)
    if ops.is_tensor(inputs):
        return inputs
    array = np.asarray(inputs)
    return array.astype("int32") if array.dtype == np.int64 else array


def _numpy(x):
    try:
        return np.asarray(ops.convert_to_numpy(x))
    except Exception as error:
        raise ValueError(
            "The model runs inside a compiled function of its own (such as a "
            "`tf.function` or `jax.jit` around a layer), out of which its attention "
            "weights cannot be read. Call it without."
        ) from error


# ----------------------------------------------------------------------------
# Health
# ----------------------------------------------------------------------------


class AttentionHealth(keras.callbacks.Callback):
    """Logs what attention does while a model trains, and warns of known failures.

    After an epoch the model sees `sample` once, without dropout. For every head
    of every attention layer these numbers go into `history`, under names such as
    `"block_0/attention/head_2/entropy"`:

    - `entropy`: of the weights, as a share of the largest possible; 1 looks at
      all keys alike, 0 at one;
    - `saturated`: share of the queries that put more than 0.99 of their weight
      on one of several keys. The softmax then passes hardly any gradient;
    - `logit_scale`: how far scores spread over the keys of a query (standard
      deviation), before the softmax;
    - `rank_one`: distance of the mixed values from being the same at every
      token, `‖X - mean‖ / ‖X‖`; 0 has lost the tokens
      ([Dong et al., 2021](https://arxiv.org/abs/2103.03404));
    - `dead`: 1.0 where the head adds less than a thousandth of what the
      strongest head of its layer adds.

    and for every `TransformerBlock`, such as `"block_0/norm"`:

    - `rank_one`: the same distance, of what the block returns;
    - `norm`: root mean square of the features that it returns;
    - `gradient`: norm of the loss's gradient by the weights of the block, if
      `sample` has targets.

    It warns once of each failure: saturation, collapse to rank one, a residual
    stream that explodes, gradients that vanish on the way to the first block.

    Args:
        sample: A few rows as `fit` gets them: `x`, `(x, y)` or
            `(x, y, sample_weight)`. They cost as much as a step or two.
        every: After how many epochs it looks. Epochs between get NaN.
        log_dir: Optional folder in which to write all numbers for TensorBoard
            (needs TensorFlow and `tensorboard`), on any backend.
        warn: Whether to warn. `findings` has the words either way.

    Raises:
        ValueError: For a model without attention of keras_tx.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    >>> model.compile("adam", loss)
    >>> x, y = keras_tx.next_token(np.arange(72).reshape(8, 9))
    >>> health = keras_tx.AttentionHealth((x[:2], y[:2]))
    >>> history = model.fit(x, y, verbose=0, callbacks=[health]).history
    >>> len(history["block_1/attention/head_3/entropy"])
    1
    """

    def __init__(self, sample, *, every=1, log_dir=None, warn=True):
        super().__init__()
        x, y, weight = keras.utils.unpack_x_y_sample_weight(sample)
        self.x = _standardize(x)
        self.y = _standardize(y)
        self.sample_weight = _standardize(weight)
        self.every = checks.positive_integer("every", every)
        self.log_dir = log_dir
        self.warn = checks.boolean("warn", warn)
        self.history = {}
        self.findings = {}
        self._epochs = 0
        self._writer = None

    def look(self):
        """Returns `{name: number}` of the model as it is now.

        Outside `fit`, tell it which with `set_model(model)` first. Adds to
        `findings`, `{failure: sentence}`, and does not warn.
        """
        notes = _notes(self.model, self.x)
        numbers, layers, stacks = {}, {}, {}
        for path, note in _keyed(notes, recording.Attended).items():
            layers[path] = found = _attention_numbers(note)
            for name, values in found.items():
                for head, value in enumerate(values):
                    numbers[f"{path}/head_{head}/{name}"] = float(value)
        gradients = self._gradient_norms()
        for path, note in _keyed(notes, recording.Passed).items():
            x, y = _numpy(note.x), _numpy(note.y)
            valid = None if note.mask is None else _numpy(note.mask)
            found = {"rank_one": _distance(y, valid), "norm": _norm(y, valid)}
            if gradients is not None:
                found["gradient"] = _norm_below(gradients, note.layer)
            numbers |= {f"{path}/{name}": value for name, value in found.items()}
            given = {"rank_one": _distance(x, valid), "norm": _norm(x, valid)}
            stem = re.sub(r"\d+$", "", path)
            stacks.setdefault(stem, {})[path] = {**found, "given": given}
        for kind, sentence in _failures(layers, stacks):
            self.findings.setdefault(kind, sentence)
        return numbers

    def on_train_begin(self, logs=None):
        self.history, self.findings = {}, {}
        self._epochs = 0
        if self.log_dir is not None:
            self._writer = _summary().create_file_writer(str(self.log_dir))

    def on_epoch_end(self, epoch, logs=None):
        known = set(self.findings)
        due = (epoch + 1) % self.every == 0
        numbers = self.look() if due else {}
        for name in numbers:
            self.history.setdefault(name, [math.nan] * self._epochs)
        for name, values in self.history.items():
            values.append(numbers.get(name, math.nan))
        self._epochs += 1
        if isinstance(getattr(self.model, "history", None), keras.callbacks.History):
            self.model.history.history.update(self.history)
        if self._writer is not None and due:
            with self._writer.as_default():
                for name, value in numbers.items():
                    _summary().scalar(name, value, step=epoch)
            self._writer.flush()
        if self.warn:
            for kind, sentence in self.findings.items():
                if kind not in known:
                    message = f"After epoch {epoch + 1}: {sentence}"
                    warnings.warn(message, stacklevel=2)

    def on_train_end(self, logs=None):
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _gradient_norms(self):
        """Returns `{id(variable): squared norm}` of the loss's gradient."""
        if self.y is None or not self.model.compiled:
            return None
        variables = self.model.trainable_variables
        gradients = self._gradients_of(variables)
        return {
            id(variable): float(np.sum(np.square(_numpy(gradient).astype("float64"))))
            for variable, gradient in zip(variables, gradients, strict=True)
            if gradient is not None
        }

    def _loss(self):
        predicted = self.model(self.x, training=False)
        return self.model.compute_loss(
            self.x, self.y, predicted, self.sample_weight, training=False
        )

    def _gradients_of(self, variables):
        backend = keras.backend.backend()
        if backend == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self._loss()
            found = tape.gradient(loss, [variable.value for variable in variables])
            return [None if x is None else tf.convert_to_tensor(x) for x in found]
        if backend == "torch":
            import torch

            with torch.enable_grad():
                loss = self._loss()
            values = [variable.value for variable in variables]
            return [
                None if x is None else x.detach()
                for x in torch.autograd.grad(loss, values, allow_unused=True)
            ]
        import jax

        # Not compiled, for that would take as long as the training step's does.
        def loss_of(values):
            known = zip(variables, values, strict=True)
            with keras.StatelessScope(state_mapping=known):
                return self._loss()

        return jax.grad(loss_of)([variable.value for variable in variables])


def _summary():
    """Returns what writes for TensorBoard, or says which line installs it."""
    try:
        import tensorboard  # noqa: F401  TensorFlow asks for it at the first number
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "`log_dir` of `AttentionHealth` writes for TensorBoard with TensorFlow. "
            'Install both with: pip install "keras-tx[tensorflow]" tensorboard'
        ) from error
    return tf.summary


def _attention_numbers(note):
    """Returns `{name: numbers (N,)}` of one attention."""
    weights = _numpy(note.weights).astype("float64")
    mixed = _numpy(note.mixed).astype("float64")
    num_queries, num_keys = weights.shape[2:]
    allowed = note.mask.dense(num_queries, num_keys)
    allowed = np.ones((1, 1, 1, 1), bool) if allowed is None else _numpy(allowed)
    allowed = np.broadcast_to(allowed, weights.shape)
    if note.mask.queries is not None:
        allowed = allowed & _numpy(note.mask.queries)[:, None, :, None]
    count = allowed.sum(-1)  # (B, N, T)
    chooses = count > 1

    def mean(of_queries):
        total = np.sum(of_queries, axis=(0, 2), where=chooses)
        return total / np.maximum(np.sum(chooses, axis=(0, 2)), 1)

    logs = np.log(np.where(weights > 0, weights, 1.0))
    entropy = -np.sum(weights * logs, axis=-1) / np.log(np.maximum(count, 2))
    scores = np.where(allowed, _scores(note), 0.0)
    center = scores.sum(-1) / np.maximum(count, 1)
    spread = np.where(allowed, scores - center[..., None], 0.0)
    variance = np.square(spread).sum(-1) / np.maximum(count, 1)
    heads = range(weights.shape[1])
    found = {
        "entropy": mean(entropy),
        "saturated": mean(weights.max(-1) > SATURATED),
        "logit_scale": np.sqrt(mean(variance)),
        "rank_one": np.array(
            [_distance(mixed[:, :, head], count[:, head] > 0) for head in heads]
        ),
    }
    if hasattr(note.layer, "merge"):
        kernel = _numpy(note.layer.merge.kernel).astype("float64")  # (N, H, D)
        added = np.einsum("btnh,nhd->btnd", mixed, kernel)
        power = np.square(added).mean(axis=(0, 1, 3))
        found["dead"] = (power <= DEAD**2 * power.max()).astype("float64")
    return found


def _scores(note):
    """Returns the scores `(B, N, T, S)`, without what `bias` added."""
    query = _numpy(note.query).astype("float64")
    key = _numpy(note.key).astype("float64")
    of_scores = getattr(note.layer, "attention", note.layer)
    scale = getattr(of_scores, "scale", None) or 1 / math.sqrt(query.shape[-1])
    soft_cap = getattr(of_scores, "soft_cap", None)
    batch, length, num_heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = np.einsum("btkgh,bskh->bkgts", grouped, key) * scale
    scores = scores.reshape(batch, num_heads, length, -1)
    return scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)


def _distance(x, valid):
    """Returns how far rows are from being one row, `‖X - mean‖ / ‖X‖`.

    Args:
        x: `(B, T, D)`.
        valid: Boolean `(B, T)`, the tokens that count, or `None`.

    Returns:
        The mean over the examples with two tokens or more; NaN without any.
    """
    x = x.astype("float64")
    valid = np.ones(x.shape[:2], bool) if valid is None else valid
    found = []
    for rows, counts in zip(x, valid, strict=True):
        rows = rows[counts]
        if len(rows) > 1:
            norm = np.linalg.norm(rows)
            away = np.linalg.norm(rows - rows.mean(0))
            found.append(away / norm if norm else 0.0)
    return float(np.mean(found)) if found else math.nan


def _norm(x, valid):
    """Returns the root mean square of the features of tokens that count."""
    x = x.astype("float64")
    return float(np.sqrt(np.mean(np.square(x if valid is None else x[valid]))))


def _norm_below(gradients, layer):
    """Returns the norm of the gradient by all weights of a layer."""
    return math.sqrt(sum(gradients.get(id(v), 0.0) for v in layer.trainable_variables))


# ----------------------------------------------------------------------------
# Failures
# ----------------------------------------------------------------------------

# Set so that sound models, before, while and after they train, stay clear of
# them; tests/test_inspection.py plants each failure.
SATURATED_QUERIES, SATURATED_SCALE = 0.5, 4.0
COLLAPSED, SPREAD = 0.05, 0.2
EXPLODED = 1e3
VANISHED = 1e-3


def _failures(layers, stacks):
    """Yields `(kind, sentence)` for each failure that numbers show.

    Args:
        layers: `{path: {name: numbers (N,)}}` of attention.
        stacks: `{stem: {path: numbers}}` of blocks, in order.
    """
    for path, found in layers.items():
        saturated, scale = found["saturated"].mean(), found["logit_scale"].mean()
        if saturated > SATURATED_QUERIES and scale > SATURATED_SCALE:
            yield (
                "saturation",
                f"attention in '{path}' is saturated: {saturated:.0%} of its queries "
                f"put more than {SATURATED} of their weight on one key, and scores "
                f"spread by {scale:.1f}. Hardly any gradient passes such a softmax. "
                "Divide dot products by √d (leave `scale` at None), normalize queries "
                'and keys (`query_key_norm="rms"`), or lower the learning rate.',
            )
            break
    for blocks in stacks.values():
        first = next(iter(blocks.values()))["given"]
        for path, found in blocks.items():
            if first["rank_one"] > SPREAD and found["rank_one"] < COLLAPSED:
                yield (
                    "collapse",
                    f"tokens become one vector: behind '{path}' they differ by "
                    f"{found['rank_one']:.2g} of their norm, where the first block "
                    f"was given {first['rank_one']:.2g}. Attention only averages; "
                    'keep the residual (`residual="serial"`), and if it is on, lower '
                    "the learning rate or warm it up.",
                )
                break
        norms = [found["norm"] for found in blocks.values()]
        worst = next((n for n in norms if not math.isfinite(n)), max(norms))
        if not worst <= EXPLODED * max(first["norm"], 1e-3):
            yield (
                "explosion",
                f"the residual stream explodes: features of {first['norm']:.2g} "
                f"(root mean square) become {worst:.2g}. Normalize what each branch "
                'is given (`norm_position="pre"`), or lower the learning rate.',
            )
        steps = {p: f["gradient"] for p, f in blocks.items() if "gradient" in f}
        if steps and min(steps.values()) < VANISHED * max(steps.values()):
            weakest = min(steps, key=steps.get)
            yield (
                "vanishing gradient",
                f"gradients vanish with depth: that of '{weakest}' is "
                f"{steps[weakest]:.1e}, the largest {max(steps.values()):.1e}. "
                "Normalize before each branch "
                '(`norm_position="pre"`), keep the residual, or warm the learning '
                "rate up.",
            )


# ----------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------

# Beyond this many tokens their labels would cover one another.
MOST_LABELS = 32


def plot_attention(maps, tokens=None, *, context=None, example=0):
    """Draws attention weights as heat maps, a row a layer and a column a head.

    Queries run down, keys to the right, and a row of weights adds up to 1. Needs
    matplotlib, which the extra `plots` installs.

    Args:
        maps: What `attention_maps` returned, or a part of it; or the weights of
            one layer, `(B, N, T, S)`, `(N, T, S)` or `(T, S)`.
        tokens: Optional labels of the queries, and of the keys where these are
            the same tokens.
        context: Optional labels of the keys, in cross-attention.
        example: Which row of the batch.

    Returns:
        A `matplotlib.figure.Figure`; `savefig` writes it.

    Raises:
        ValueError: For weights of other shapes and labels of another number.
        ImportError: If matplotlib is missing.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> maps = keras_tx.attention_maps(model, [[5, 7, 11]])
    >>> figure = keras_tx.plot_attention(maps, tokens=["a", "b", "c"])
    >>> figure.savefig("attention.png")
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "`plot_attention` draws with matplotlib. Install it with: "
            'pip install "keras-tx[plots]"'
        ) from error
    if not isinstance(maps, dict):
        maps = {"": maps}
    layers = {path: _heads_of(weights, example) for path, weights in maps.items()}
    if not layers:
        raise ValueError("`maps` holds no layer to draw.")
    num_columns = max(len(heads) for heads in layers.values())
    lone = len(layers) == num_columns == 1
    size = 5.0 if lone else max(1.8, min(3.6, 14 / num_columns))
    figure = Figure(
        figsize=(size * num_columns + 1.0, size * len(layers) + 0.4),
        layout="constrained",
    )
    axes = figure.subplots(len(layers), num_columns, squeeze=False)
    top = max(float(heads.max()) for heads in layers.values())
    image = None
    for row, (path, heads) in zip(axes, layers.items(), strict=True):
        for head, panel in enumerate(row):
            if head >= len(heads):
                panel.set_axis_off()
                continue
            image = panel.imshow(heads[head], cmap="Blues", vmin=0.0, vmax=top)
            if len(heads) > 1:
                panel.set_title(f"head {head}", fontsize=8)
            keys = context if context is not None else tokens
            if heads.shape[1] != heads.shape[2] and context is None:
                keys = None
            _label(panel.xaxis, "context" if context is not None else "tokens", keys)
            _label(panel.yaxis, "tokens", tokens, shown=head == 0)
            # As large as its row of points has room for.
            room = 72 * size / (1.4 * max(heads.shape[1:]))
            panel.tick_params(labelsize=max(5.0, min(9.0, room)))
        row[0].set_ylabel(path, fontsize=8)
    figure.colorbar(image, ax=axes, label="weight", shrink=0.8)
    return figure


def _heads_of(weights, example):
    """Returns the weights of one example, `(N, T, S)`."""
    weights = np.asarray(weights, "float32")
    if weights.ndim == 2:
        weights = weights[None]
    if weights.ndim == 4:
        if not -len(weights) <= example < len(weights):
            raise ValueError(
                f"`example` names a row of the batch, of which there are "
                f"{len(weights)}. Received: example={example}."
            )
        weights = weights[example]
    if weights.ndim != 3:
        raise ValueError(
            "Attention weights are (B, N, T, S), (N, T, S) or (T, S). Received: "
            f"shape {weights.shape}."
        )
    return weights


def _label(axis, name, labels, shown=True):
    """Puts a label to each token, where there is room."""
    size = round(abs(np.diff(axis.get_view_interval())[0]))
    if labels is not None and len(labels) != size:
        raise ValueError(
            f"`{name}` must have a label for each of {size} tokens. Received: "
            f"{len(labels)} labels."
        )
    if labels is not None and size <= MOST_LABELS:
        # A dollar sign would start a formula.
        plain = [str(label).replace("$", r"\$") for label in labels]
        axis.set_ticks(range(size), plain if shown else [""] * size)
        if axis.axis_name == "x" and max(map(len, plain)) > 1:
            axis.set_tick_params(rotation=90)
