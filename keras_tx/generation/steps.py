"""What is compiled: reading prompts, and the loops over tokens."""

from keras import ops

from keras_tx import cache, sampling


def read_first(plan, capacity, tokens, starts, memory):
    """The first piece of the prompts, which makes the entries."""
    scope = cache.Scope(
        tokens, column=0, starts=starts, capacity=capacity, strict=plan.strict
    )
    plan.forward(tokens, memory, scope)
    plan.owners = scope.owners
    return scope.entries


def read_more(plan, capacity, entries, tokens, column, starts, memory):
    """A further piece of the prompts."""
    return _step(plan, capacity, entries, tokens, column, starts, memory)[1]


def _step(plan, capacity, entries, tokens, column, starts, memory):
    """One forward pass behind others; returns logits `(B, T, V)` and entries."""
    scope = cache.Scope(
        tokens,
        column=column,
        starts=starts,
        capacity=capacity,
        entries=entries,
        owners=plan.owners,
        strict=plan.strict,
    )
    logits = plan.forward(tokens, memory, scope)
    return logits, scope.entries


def loop(
    plan,
    capacity,
    samplers,
    state,
    limit,
    starts,
    keys,
    stops,
    numbers,
    origin,
    memory,
):
    """Token after token, from the state's column up to `limit`."""
    samplers = sampling.with_numbers(samplers, numbers)
    columns = ops.arange(capacity + 1, dtype="int32")[None, :]

    def unfinished(tokens, column, entries, ended, stuck):
        return ops.logical_and(column < limit, ops.logical_not(ops.all(ended)))

    def body(tokens, column, entries, ended, stuck):
        last = _column_of(tokens, column)
        logits, entries = _step(plan, capacity, entries, last, column, starts, memory)
        known = ops.logical_and(columns >= starts[:, None], columns <= column)
        history = sampling.History(tokens, known, column, column - origin)
        chosen, none = sampling.choose(samplers, logits[:, -1], history, keys)
        chosen = ops.where(ended, 0, chosen)
        tokens = cache.write(tokens, chosen[:, None], column + 1, axis=1)
        stuck = ops.logical_or(stuck, ops.logical_and(none, ops.logical_not(ended)))
        stops_here = ops.any(chosen[:, None] == stops[None, :], axis=-1)
        ended = ops.logical_or(ended, ops.logical_or(stops_here, stuck))
        return tokens, column + 1, entries, ended, stuck

    return _while(unfinished, body, state)


def beam_loop(plan, capacity, beam, state, limit, starts, stops, memory):
    """Like `loop`, with the beams of a row side by side in the batch."""

    def unfinished(tokens, column, entries, ended, scores, lengths):
        return ops.logical_and(column < limit, ops.logical_not(ops.all(ended)))

    def body(tokens, column, entries, ended, scores, lengths):
        batch, num_beams = ended.shape
        last = _column_of(tokens, column)
        logits, entries = _step(plan, capacity, entries, last, column, starts, memory)
        gains = ops.log_softmax(ops.cast(logits[:, -1], "float32"), axis=-1)
        vocab_size = gains.shape[-1]
        gains = ops.reshape(gains, (batch, num_beams, vocab_size))
        # A frozen beam has one continuation, itself, under token 0.
        itself = ops.where(ops.arange(vocab_size) == 0, 0.0, sampling.RULED_OUT)
        gains = ops.where(ended[:, :, None], itself, gains)
        totals = ops.maximum(scores[:, :, None] + gains, sampling.RULED_OUT)
        grown = lengths + ops.cast(ops.logical_not(ended), "float32")
        ranks = totals / ops.maximum(grown, 1.0)[:, :, None] ** beam.length_penalty
        # Ruled out stays so, whatever its length.
        ranks = ops.where(totals > sampling.RULED_OUT / 2, ranks, sampling.RULED_OUT)
        flat = ops.reshape(ranks, (batch, num_beams * vocab_size))
        _, best = ops.top_k(flat, num_beams)  # (B, beams)
        best = ops.cast(best, "int32")
        parent = ops.floor_divide(best, vocab_size)
        chosen = best - parent * vocab_size
        totals = ops.reshape(totals, (batch, num_beams * vocab_size))
        scores = ops.take_along_axis(totals, best, axis=1)
        lengths = ops.take_along_axis(grown, parent, axis=1)
        ended = ops.take_along_axis(ops.cast(ended, "int32"), parent, axis=1) > 0
        rows = ops.arange(batch, dtype="int32")[:, None] * num_beams + parent
        rows = ops.reshape(rows, (-1,))
        tokens = ops.take(tokens, rows, axis=0)
        entries = [
            {
                # All beams of a row have the same context.
                name: x if name.startswith("memory") else ops.take(x, rows, axis=0)
                for name, x in entry.items()
            }
            for entry in entries
        ]
        chosen = ops.where(ended, 0, chosen)
        tokens = cache.write(tokens, ops.reshape(chosen, (-1, 1)), column + 1, axis=1)
        stopped = ops.any(chosen[:, :, None] == stops, axis=-1)
        ended = ops.logical_or(ended, stopped)
        return tokens, column + 1, entries, ended, scores, lengths

    return _while(unfinished, body, state)


def _column_of(tokens, column):
    """Returns column `column` of a buffer, `(B, 1)`."""
    if isinstance(column, int):
        return tokens[:, column : column + 1]
    return ops.slice(tokens, (0, column), (tokens.shape[0], 1))


def _while(condition, body, state):
    """A loop inside compiled code, or a Python loop where the column is known."""
    if isinstance(state[1], int):
        while bool(condition(*state)):
            state = body(*state)
        return state
    return ops.while_loop(condition, body, state)
