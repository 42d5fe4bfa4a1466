"""Text from any model composed of these layers.

A prompt is read in one pass, or in a few if it is long; then one token follows
another, each by a step that attends to what `keras_tx.cache` kept. On TensorFlow
and JAX both are compiled, and the loop over tokens lies inside the compiled
code; it stops when it has enough or every row has reached a stop token.

`prompts` says what arrived, `plan` how the model runs step by step, `first_use`
whether it may, `graph` where a functional model is cut, `steps` what is compiled,
by `backends`, in the sizes of `sizes`; a `job` is one call, a `prefix` what an
earlier one has read.
"""

import numpy as np

from keras_tx.generation.job import Job
from keras_tx.generation.prefix import Prefix

__all__ = ["generate", "prefill", "stream"]


def generate(
    model,
    prompts,
    max_new_tokens,
    *,
    source=None,
    sampler="greedy",
    stop_tokens=(),
    seed=None,
    pad_id="auto",
    target=None,
    output=None,
    prefix=None,
    draft=None,
    draft_tokens=4,
    cache_dtype=None,
    compile=True,
    check=True,
):
    """Continues prompts with a model composed of these layers.

    The model may be functional, Sequential or subclassed, from a builder, from
    a file or the user's own; it needs no method for generation. Each row gets
    the tokens that it would get alone. The weights are those of the moment.

    Args:
        model: A causal model of tokens `(B, T)` to logits `(B, T, V)`, or an
            encoder-decoder: functional, or subclassed with the methods
            `encode(source)`, which returns what the decoder needs of it, and
            `decode(target, encoded)`, which returns logits.
        prompts: Tokens to continue: a list of integers, a list of such lists,
            of any lengths, or an array `(T,)` or `(B, T)`. Padding to the left
            and to the right of an array's rows is set aside, and generation
            goes on behind each row's own last token.
        max_new_tokens: How many tokens to add at most. With 0, prompts come
            back as they are.
        source: What an encoder-decoder encodes, once: an array, lists, or a
            dict of arrays by input name. One flat prompt then serves all rows.
        sampler: `"greedy"`; a temperature; a sampler such as `TopP(0.9)`; a
            list of these, which compose from left to right; or `Beam(4)`.
        stop_tokens: Tokens behind which a row ends; the token is part of it.
        seed: Integer that makes draws reproducible: the same seed gives the
            same text on every call, on every backend and in any batch.
            Default: a new one each time, from Python's `random`.
        pad_id: The padding token of arrays and sources. `"auto"` asks the
            model's embedding; `None` says that there is none.
        target: Name of the input that is continued. Default: `"target"` or
            `"tokens"`, or the only one.
        output: Name or index of the output that holds the logits, where there
            are several. Default: `"logits"` of a dict, the first of a list.
        prefix: What `prefill` returned: tokens in front of every prompt that
            were read before. They are no part of what comes back, and a prompt
            may be empty behind them.
        draft: Optional smaller model of the same tokens, which guesses what
            comes. The text is that of `model` alone, whatever the sampler, and
            sooner there if most guesses stand: `model` looks at several tokens
            in one pass. It helps most for few rows, which wait for each other.
            See [Leviathan et al., 2022](https://arxiv.org/abs/2211.17192).
        draft_tokens: How many tokens it guesses at a time.
        cache_dtype: Dtype in which keys and values are kept: `"float32"`,
            `"bfloat16"`, `"float16"`, or `"int8"` with a scale for each vector.
            Smaller ones save memory and change the logits a little. Default:
            that in which they are computed.
        compile: Whether steps are compiled. Without, they run one by one, and
            functions of samplers may be any Python.
        check: Whether the first use of a model compares its cached logits with
            those of a full forward pass, and refuses a model that differs.

    Returns:
        Lists for lists, an int32 array for an array: prompts and what follows.
        An array is as wide as its longest row; a row that stopped earlier is
        filled with `pad_id`, or with its stop token where there is none.

    Raises:
        ValueError: For prompts that are empty or hold what is no token, texts
            beyond a learned position's length, options out of range, and models
            that cannot be read token by token, with the layer's name.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> text = keras_tx.generate(model, [[5, 7, 11], [3]], max_new_tokens=4)
    >>> [len(row) for row in text]
    [7, 5]
    """
    job = Job(
        model,
        prompts,
        max_new_tokens,
        source=source,
        sampler=sampler,
        stop_tokens=stop_tokens,
        seed=seed,
        pad_id=pad_id,
        target=target,
        output=output,
        prefix=prefix,
        draft=draft,
        draft_tokens=draft_tokens,
        cache_dtype=cache_dtype,
        compile=compile,
        check=check,
    )
    if job.max_new_tokens == 0:
        return job.prompts.put_back([[] for _ in job.rows])
    if job.beam is not None:
        return job.prompts.put_back(job.beam_search())
    job.start()
    job.advance(job.max_new_tokens)
    return job.prompts.put_back(job.new_tokens())


def prefill(
    model,
    prompt,
    *,
    source=None,
    pad_id="auto",
    target=None,
    output=None,
    cache_dtype=None,
    compile=True,
    check=True,
):
    """Reads a prompt once, for many continuations.

    `generate(model, prompts, n, prefix=prefix)` gives the text that it would
    give for the prefix and each prompt together, seeds included, and reads the
    prefix no more. It costs the memory of its keys and values, and holds what
    the weights were when it was read: after training, read it again.

    Args:
        model: As in `generate`.
        prompt: The tokens in front: a list of integers or an array `(T,)`.
        source: As in `generate`, one row.
        pad_id: As in `generate`.
        target: As in `generate`.
        output: As in `generate`.
        cache_dtype: As in `generate`, where it then holds too.
        compile: As in `generate`.
        check: As in `generate`.

    Returns:
        A prefix, to be passed to `generate` and `stream` as `prefix=`.

    Raises:
        ValueError: As in `generate`, and for more than one prompt.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> prefix = keras_tx.prefill(model, [5, 7, 11])
    >>> text = keras_tx.generate(model, [[2], [], [3, 4]], 6, prefix=prefix)
    >>> [len(row) for row in text]
    [7, 6, 8]
    """
    job = Job(
        model,
        prompt,
        0,
        source=source,
        pad_id=pad_id,
        target=target,
        output=output,
        cache_dtype=cache_dtype,
        compile=compile,
        check=check,
    )
    if len(job.rows) != 1:
        raise ValueError(
            "`prefill` reads one prompt. Received: "
            f"{len(job.rows)} rows. Read each by itself."
        )
    tokens = job.rows[0]
    entries, capacity, offset = job.read_prefix()
    return Prefix(
        tokens=tokens,
        plan=job.plan,
        has_source=source is not None,
        target=target,
        output=output,
        memory=job.memory,
        entries=entries,
        windows=job.plan.windows,
        capacity=capacity,
        cache_dtype=cache_dtype,
        offset=offset,
    )


def stream(model, prompts, max_new_tokens, **options):
    """Yields tokens as they come; takes what `generate` takes.

    The tokens are those of `generate`. Arguments are checked at once, before
    the first token is asked for. It may be left half-way.

    Args:
        model: As in `generate`.
        prompts: As in `generate`.
        max_new_tokens: As in `generate`.
        **options: As in `generate`, but for `Beam`, which knows its text only
            at the end.

    Yields:
        For one flat prompt its next token, an `int`. Otherwise an int32 array
        `(B,)`, with -1 in rows that have ended.

    Raises:
        ValueError: As in `generate`.

    Example:

    >>> model = keras_tx.decoder(vocab_size=96, dim=32, num_layers=2, num_heads=4)
    >>> len([token for token in keras_tx.stream(model, [5, 7, 11], 4)])
    4
    """
    job = Job(model, prompts, max_new_tokens, **options)
    if job.beam is not None:
        raise ValueError(
            "`stream` cannot show a beam search, which decides at the end. Call "
            "`generate`, or choose a sampler."
        )
    return _stream(job)


def _stream(job):
    if job.max_new_tokens == 0:
        return
    job.start()
    ended = np.zeros(len(job.rows), bool)
    count = 0
    while count < job.max_new_tokens:
        job.advance(min(count + 1 + job.ahead, job.max_new_tokens))
        for tokens in job.columns_from(count):
            yield int(tokens[0]) if job.prompts.flat else np.where(ended, -1, tokens)
            ended = ended | np.isin(tokens, job.stops)
            count += 1
            if ended.all():
                return
