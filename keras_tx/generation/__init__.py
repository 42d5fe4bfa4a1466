"""Text from any model composed of these layers.

A prompt is read in one pass, or in a few if it is long; then one token follows
another, each by a step that attends to what `keras_tx.cache` kept. On TensorFlow
and JAX both are compiled, and the loop over tokens lies inside the compiled
code; it stops when it has enough or every row has reached a stop token.

`prompts` says what arrived, `plan` how the model runs step by step, `first_use`
whether it may, `graph` where a functional model is cut, `steps` what is compiled,
by `backends`, in the sizes of `sizes`; a `job` is one call.
"""

import numpy as np

from keras_tx.generation.job import Job

__all__ = ["generate", "stream"]


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
    for count in range(1, job.max_new_tokens + 1):
        ended = job.ended()
        if ended.all():
            return
        job.advance(count)
        tokens = np.where(ended, -1, job.newest())
        yield int(tokens[0]) if job.prompts.flat else tokens
