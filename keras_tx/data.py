"""Token arrays into training examples: shifted, masked, packed.

Pure functions of arrays. `next_token` and `mask_tokens` also take TensorFlow
tensors, so that they work inside `tf.data.Dataset.map` under every backend.
"""

import math

import numpy as np

from keras_tx import checks

# ----------------------------------------------------------------------------
# Next token
# ----------------------------------------------------------------------------


def next_token(tokens, *, pad_id=None, segment_ids=None, positions=None):
    """Turns rows of T + 1 tokens into inputs and the tokens that follow.

    The shift is made here and only here: give whole rows, not shifted ones. A
    model that were trained on unshifted targets would learn to copy.

    Args:
        tokens: Integers, `(..., T + 1)`, at least two on the last axis.
        pad_id: Optional token that is padding; it is never a target that
            counts.
        segment_ids: Optional integers like `tokens` (see `pack`); a target in
            another segment than its input, or in segment 0, does not count.
        positions: Optional integers like `tokens` (see `pack`), passed on.

    Returns:
        Tuple `(inputs, targets, sample_weight)` for `fit`, each `(..., T)`.
        Without `pad_id` and `segment_ids` every target counts, and the tuple is
        `(inputs, targets)`. With weights, give the loss
        `reduction="mean_with_sample_weight"`: the mean over the targets that
        count. Keras' default divides by all places, so that padding lowers it.
        With `segment_ids`, `inputs` is a dict of `tokens`, `segment_ids` and,
        where given, `positions`, as packed models take.

    Raises:
        ValueError: If `tokens` are no integers or too few.

    Example:

    >>> keras_tx.next_token(np.array([[5, 6, 7, 0]]), pad_id=0)
    (array([[5, 6, 7]]), array([[6, 7, 0]]), array([[1., 1., 0.]], dtype=float32))
    """
    tokens = _integers("tokens", tokens)
    if tokens.shape[-1] is not None and tokens.shape[-1] < 2:
        raise ValueError(
            "`next_token` needs at least two tokens a row, an input and the one "
            f"that follows. Received: tokens.shape={tuple(tokens.shape)}."
        )
    inputs, targets = tokens[..., :-1], tokens[..., 1:]
    counts = None
    if pad_id is not None:
        counts = targets != checks.integer("pad_id", pad_id)
    if segment_ids is not None:
        segment_ids = _integers("segment_ids", segment_ids)
        before, after = segment_ids[..., :-1], segment_ids[..., 1:]
        same = (before == after) & (after != 0)
        counts = same if counts is None else counts & same
        inputs = {"tokens": inputs, "segment_ids": before}
        if positions is not None:
            inputs["positions"] = _integers("positions", positions)[..., :-1]
    elif positions is not None:
        raise ValueError(
            "`positions` come with `segment_ids`, as `pack` returns them. "
            "Received positions alone."
        )
    if counts is None:
        return inputs, targets
    return inputs, targets, _as_float(counts)


# ----------------------------------------------------------------------------
# Fill in the blank
# ----------------------------------------------------------------------------


def mask_tokens(
    tokens,
    mask_id,
    vocab_size,
    *,
    rate=0.15,
    keep=(),
    seed=None,
):
    """Hides some tokens and asks for them, as BERT is trained.

    Of the chosen tokens 8 in 10 become `mask_id`, 1 in 10 a random token, and
    1 in 10 stay. Only chosen tokens count in the loss: a model that copies what
    it sees would learn nothing of the hidden ones. See
    [Devlin et al., 2019](https://arxiv.org/abs/1810.04805), 3.1.

    Args:
        tokens: Integers, `(..., T)`.
        mask_id: The token that hides another.
        vocab_size: Number of tokens; random ones are drawn below it.
        rate: Share of tokens to choose.
        keep: Tokens that are never chosen, such as padding and separators.
        seed: Optional integer, or a `numpy.random.Generator`, that makes the
            choice reproducible. Inside `tf.data`, an integer gives every batch
            the same choice of places; leave it out to choose anew.

    Returns:
        Tuple `(inputs, targets, sample_weight)` for `fit`, each `(..., T)`;
        weights are 1 at chosen tokens and 0 elsewhere. Give the loss
        `reduction="mean_with_sample_weight"`, the mean over chosen tokens.

    Raises:
        ValueError: For tokens that are no integers and values out of range.

    Example:

    >>> inputs, targets, weights = keras_tx.mask_tokens(
    ...     np.arange(20)[None], mask_id=99, vocab_size=100, seed=1
    ... )
    >>> bool((targets == np.arange(20)).all()), weights.shape
    (True, (1, 20))
    """
    tokens = _integers("tokens", tokens)
    vocab_size = checks.positive_integer("vocab_size", vocab_size)
    mask_id = checks.integer("mask_id", mask_id)
    if not 0 <= mask_id < vocab_size:
        raise ValueError(
            f"`mask_id` must be one of the {vocab_size} tokens. Received: "
            f"mask_id={mask_id}, vocab_size={vocab_size}."
        )
    rate = checks.rate("rate", rate)
    if rate == 0:
        raise ValueError(
            "`rate` is the share of tokens to hide and must be above 0, or "
            "nothing is asked. Received: rate=0."
        )
    chance, fate, other = _uniforms(tokens, 3, seed)
    chosen = chance < rate
    for token in keep:
        chosen = chosen & (tokens != checks.integer("keep", token))
    hidden = chosen & (fate < 0.8)
    swapped = chosen & (fate >= 0.9)
    random_tokens = _as_integers(other * vocab_size, tokens)
    inputs = _where(swapped, random_tokens, tokens)
    inputs = _where(hidden, tokens * 0 + mask_id, inputs)
    return inputs, tokens, _as_float(chosen)


# ----------------------------------------------------------------------------
# Packing
# ----------------------------------------------------------------------------


def pack(documents, length, *, pad_id=0):
    """Puts several texts into each row, unseen by each other.

    Short texts in rows of their own waste most of a batch on padding. Here each
    goes into the first row with room for it, longest first; one that is longer
    than a row is cut into rows. A model built with `packed=True` keeps them
    apart by `segment_ids`, and starts each at position 0.

    Args:
        documents: List of lists (or 1-D arrays) of integer tokens.
        length: Tokens a row.
        pad_id: Token that fills the rest of a row.

    Returns:
        Dict of int32 arrays, each `(rows, length)`: `tokens`, `positions`, and
        `segment_ids`, which are 1, 2, ... within a row and 0 for padding. Feed
        it to the model, or hand its entries to `next_token` first.

    Raises:
        ValueError: If there is nothing to pack, or a document is empty or no
            list of integers.

    Example:

    >>> packed = keras_tx.pack([[5, 6, 7], [8, 9], [1]], length=4)
    >>> packed["tokens"]
    array([[5, 6, 7, 1],
           [8, 9, 0, 0]], dtype=int32)
    >>> packed["segment_ids"]
    array([[1, 1, 1, 2],
           [1, 1, 0, 0]], dtype=int32)
    """
    length = checks.positive_integer("length", length)
    pad_id = checks.integer("pad_id", pad_id)
    pieces = []
    for index, document in enumerate(documents):
        document = np.asarray(document)
        if document.ndim != 1 or not len(document) or document.dtype.kind not in "iu":
            raise ValueError(
                "`pack` takes documents that are lists of integer tokens, with "
                f"at least one each. Received at index {index}: an array of "
                f"shape {document.shape} and dtype {document.dtype}."
            )
        pieces += [document[i : i + length] for i in range(0, len(document), length)]
    if not pieces:
        raise ValueError("`pack` received no documents. Pass at least one.")
    pieces.sort(key=len, reverse=True)  # stable, so that equal lengths keep order

    rows, room = [], []
    first_with_room = {}  # smallest row index to try, by length of the piece
    for piece in pieces:
        size = len(piece)
        row = first_with_room.get(size, 0)
        while row < len(rows) and room[row] < size:
            row += 1
        first_with_room[size] = row
        if row == len(rows):
            rows.append([])
            room.append(length)
        rows[row].append(piece)
        room[row] -= size

    shape = (len(rows), length)
    packed = {
        "tokens": np.full(shape, pad_id, "int32"),
        "positions": np.zeros(shape, "int32"),
        "segment_ids": np.zeros(shape, "int32"),
    }
    for row, pieces_of_row in enumerate(rows):
        start = 0
        for number, piece in enumerate(pieces_of_row, 1):
            place = slice(start, start + len(piece))
            packed["tokens"][row, place] = piece
            packed["positions"][row, place] = np.arange(len(piece))
            packed["segment_ids"][row, place] = number
            start += len(piece)
    return packed


# ----------------------------------------------------------------------------
# NumPy arrays and TensorFlow tensors alike
# ----------------------------------------------------------------------------


def _is_tensorflow(x):
    """Whether `x` is a TensorFlow tensor, without importing TensorFlow."""
    return type(x).__module__.partition(".")[0] == "tensorflow"


def _tensorflow():
    import tensorflow

    return tensorflow


def _integers(name, x):
    """Returns `x` as an array or TensorFlow tensor of integers."""
    if _is_tensorflow(x):
        integer = x.dtype.is_integer
    else:
        x = np.asarray(x)
        integer = x.dtype.kind in "iu"
    if not integer or len(x.shape) < 1:
        raise ValueError(
            f"`{name}` must be an array of integers with time on the last axis. "
            f"Received: shape {tuple(x.shape)}, dtype {x.dtype}."
        )
    return x


def _as_float(x):
    return (
        _tensorflow().cast(x, "float32") if _is_tensorflow(x) else x.astype("float32")
    )


def _as_integers(x, like):
    if _is_tensorflow(x):
        return _tensorflow().cast(x, like.dtype)
    return x.astype(like.dtype)


def _where(condition, x, y):
    where = _tensorflow().where if _is_tensorflow(y) else np.where
    return where(condition, x, y)


def _uniforms(like, count, seed):
    """Returns `count` arrays of numbers in [0, 1), shaped like `like`."""
    if _is_tensorflow(like):
        tf = _tensorflow()
        shape = tf.concat([[count], tf.shape(like)], axis=0)
        if seed is None:
            return tf.unstack(tf.random.uniform(shape), num=count)
        seed = checks.integer("seed", seed)
        return tf.unstack(tf.random.stateless_uniform(shape, (seed, 0)), num=count)
    if not isinstance(seed, np.random.Generator):
        seed = np.random.default_rng(checks.integer("seed", seed, optional=True))
    return seed.random((count, math.prod(like.shape))).reshape(count, *like.shape)
