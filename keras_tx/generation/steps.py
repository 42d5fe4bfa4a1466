"""What is compiled: reading prompts, and the loops over tokens."""

import functools

import keras
from keras import ops

from keras_tx import cache, kernels, reading, sampling
from keras_tx.generation import record


def read_first(plan, capacity, kept, tokens, starts, memory):
    """The first piece of the prompts, which makes the entries."""
    scope = cache.Scope(
        tokens,
        column=0,
        starts=starts,
        capacity=capacity,
        strict=plan.strict,
        kept=kept,
        num_positions=plan.max_length,
    )
    plan.forward(tokens, memory, scope)
    plan.owners, plan.windows = scope.owners, scope.windows
    return scope.entries


def read_more(plan, capacity, kept, entries, tokens, column, starts, memory):
    """A further piece of the prompts."""
    return _step(plan, capacity, kept, entries, tokens, column, starts, memory)[1]


def spread_prefix(windows, capacity, kept, entries, column, starts, offset):
    """What a batch holds that begins with a prefix; see `cache.spread`."""
    return cache.spread(entries, windows, capacity, kept, column, starts, offset)


def _step(plan, capacity, kept, entries, tokens, column, starts, memory, reach=None):
    """One forward pass behind others; returns logits `(B, T, V)` and entries."""
    scope = cache.Scope(
        tokens,
        column=column,
        starts=starts,
        capacity=capacity,
        entries=entries,
        owners=plan.owners,
        strict=plan.strict,
        kept=kept,
        num_positions=plan.max_length,
        reach=reach,
    )
    logits = plan.forward(tokens, memory, scope)
    return logits, scope.entries


def loop(
    plan,
    capacity,
    kept,
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
    columns = ops.arange(capacity + 1, dtype="int32")[None, :]

    def unfinished(tokens, column, entries, ended, stuck):
        return ops.logical_and(column < limit, ops.logical_not(ops.all(ended)))

    def step(reach, state, fixed):
        tokens, column, entries, ended, stuck = state
        starts, keys, stops, numbers, origin, memory = fixed
        last = _columns_of(tokens, column, 1)
        logits, entries = _step(
            plan, capacity, kept, entries, last, column, starts, memory, reach
        )
        known = ops.logical_and(columns >= starts[:, None], columns <= column)
        history = sampling.History(tokens, known, column, column - origin)
        chosen, none = sampling.choose(
            sampling.with_numbers(samplers, numbers), logits[:, -1], history, keys
        )
        chosen = ops.where(ended, 0, chosen)
        tokens = cache.write(tokens, chosen[:, None], column + 1, axis=1)
        stuck = ops.logical_or(stuck, ops.logical_and(none, ops.logical_not(ended)))
        stops_here = ops.any(chosen[:, None] == stops[None, :], axis=-1)
        ended = ops.logical_or(ended, ops.logical_or(stops_here, stuck))
        return tokens, column + 1, entries, ended, stuck

    fixed = (starts, keys, stops, numbers, origin, memory)
    return _while_growing(plan, unfinished, step, state, fixed, capacity, limit)


def draft_loop(
    plan,
    draft,
    capacity,
    kept,
    samplers,
    state,
    limit,
    starts,
    keys,
    stops,
    numbers,
    origin,
):
    """Like `loop`, in leaps: a small model guesses, the large one looks at all at once.

    Both choose by the same samplers with the same noise. A guess stands if the
    large model, in its place, chooses the same; behind the first that does not,
    its own choice is taken. So the text is that of the large model alone.
    """
    samplers = sampling.with_numbers(samplers, numbers)
    ahead = kept.slack
    columns = ops.arange(capacity + 1, dtype="int32")[None, :]

    def choose(tokens, logits, column):
        known = ops.logical_and(columns >= starts[:, None], columns <= column)
        history = sampling.History(tokens, known, column, column - origin)
        return sampling.choose(samplers, logits, history, keys)

    def unfinished(tokens, column, entries, ended, stuck):
        return ops.logical_and(column < limit, ops.logical_not(ops.all(ended)))

    def body(tokens, column, entries, ended, stuck):
        own, guessing = entries
        for index in range(ahead):
            # It has not read the token before the last one if all its guesses
            # stood.
            fresh = 2 if index == 0 else 1
            begin = column + index + 1 - fresh
            part = _columns_of(tokens, begin, fresh)
            logits, guessing = _step(
                draft, capacity, kept, guessing, part, begin, starts, ()
            )
            guess, _ = choose(tokens, logits[:, -1], column + index)
            tokens = cache.write(tokens, guess[:, None], column + index + 1, axis=1)
        part = _columns_of(tokens, column, ahead + 1)
        logits, own = _step(plan, capacity, kept, own, part, column, starts, ())
        choices = [
            choose(tokens, logits[:, index], column + index)
            for index in range(ahead + 1)
        ]
        chosen = ops.stack([token for token, _ in choices], axis=1)  # (B, ahead + 1)
        stands = ops.cast(chosen[:, :-1] == part[:, 1:], "int32")
        stands = ops.sum(ops.cumprod(stands, axis=1), axis=1)
        stands = ops.min(ops.where(ended, ahead, stands))
        count = ops.minimum(ops.cast(stands, "int32"), limit - column - 1) + 1
        for index, (token, none) in enumerate(choices):
            going = ops.logical_and(index < count, ops.logical_not(ended))
            stuck = ops.logical_or(stuck, ops.logical_and(none, going))
            stops_here = ops.any(token[:, None] == stops[None, :], axis=-1)
            ending = ops.logical_and(going, ops.logical_or(stops_here, none))
            ended = ops.logical_or(ended, ending)
        tokens = cache.write(tokens, chosen, column + 1, axis=1)
        count = int(count) if isinstance(column, int) else count
        return tokens, column + count, (own, guessing), ended, stuck

    return _while(unfinished, body, state)


def beam_loop(plan, capacity, kept, beam, state, limit, starts, stops, memory):
    """Like `loop`, with the beams of a row side by side in the batch."""

    def unfinished(tokens, column, entries, ended, scores, lengths):
        return ops.logical_and(column < limit, ops.logical_not(ops.all(ended)))

    def step(reach, state, fixed):
        tokens, column, entries, ended, scores, lengths = state
        starts, stops, memory = fixed
        batch, num_beams = ended.shape
        last = _columns_of(tokens, column, 1)
        logits, entries = _step(
            plan, capacity, kept, entries, last, column, starts, memory, reach
        )
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

    fixed = (starts, stops, memory)
    return _while_growing(plan, unfinished, step, state, fixed, capacity, limit)


def _columns_of(tokens, column, count):
    """Returns `count` columns of a buffer from `column` on, `(B, count)`."""
    if isinstance(column, int):
        return tokens[:, column : column + count]
    if keras.backend.backend() == "torch":
        # A slice would read the column, which no record may.
        return ops.take(tokens, column + ops.arange(count, dtype="int32"), axis=1)
    return ops.slice(tokens, (0, column), (tokens.shape[0], count))


def _while_growing(plan, condition, step, state, fixed, capacity, limit):
    """Step after step, each of which reads no more of what is held than is filled.

    Few rows see to that themselves; see `keras_tx.reading`. For many rows there is a
    loop for each quarter of the capacity, over entries of that size, and on torch
    one for each half.

    Args:
        plan: The `Plan`.
        condition: Function of the state that says whether to go on.
        step: Function of the number of columns to read, of the state and of
            `fixed`. Returns the next state.
        state: Tuple of tokens, column, entries and more.
        fixed: Tuple of what stays.
        capacity: Number of columns of the entries.
        limit: The column to stop at.
    """

    def body(reach):
        return lambda *state: step(reach, state, fixed)

    num_rows = state[0].shape[0]
    recorder = record.recorder()
    if isinstance(state[1], int) and recorder is None:
        return _while(condition, body(capacity), state)
    # To write a step down takes as long as many steps.
    parts = 4 if recorder is None else 2
    part = -(-capacity // (parts * cache.BLOCK)) * cache.BLOCK
    reaches = [*range(part, capacity, part), capacity]
    reaches = reaches if capacity > 2 * cache.BLOCK else [capacity]
    few = num_rows <= reading.FEW_ROWS or len(reaches) == 1
    if recorder is None and few:
        with kernels.matrices_before(plan.parts if num_rows == 1 else ()):
            return _while(condition, body(capacity), state)
    for reach in reaches:
        tokens, column, entries, *rest = state
        state = (tokens, column, cache.cut(entries, capacity, reach), *rest)
        if recorder is not None:
            end = min(limit, reach)
            state = _while_recorded(
                plan, recorder, condition, step, state, fixed, reach, end
            )
        else:
            end = ops.minimum(limit, reach)

            def goes_on(tokens, column, *rest, end=end):
                return ops.logical_and(column < end, condition(tokens, column, *rest))

            state = _while(goes_on, body(reach), state)
        tokens, column, parts, *rest = state
        entries = cache.put_back(entries, parts, capacity)
        state = (tokens, column, entries, *rest)
    return state


def _while_recorded(plan, recorder, condition, step, state, fixed, reach, end):
    """`_while` on torch up to the column `end`, by the record of a step."""
    tokens, column, *rest = state
    run = functools.partial(step, reach)
    state = (tokens, ops.convert_to_tensor(column, dtype="int32"), *rest)
    layers = plan.parts if tokens.shape[0] == 1 else ()
    with kernels.matrices_before(layers):
        while column < end and bool(condition(tokens, column, *state[2:])):
            state = recorder(("step", reach), run, state, fixed)
            column += 1
    tokens, _, *rest = state
    return tokens, column, *rest


def _while(condition, body, state):
    """A loop inside compiled code, or a Python loop where the column is known."""
    if isinstance(state[1], int):
        while bool(condition(*state)):
            state = body(*state)
        return state
    return ops.while_loop(condition, body, state)
