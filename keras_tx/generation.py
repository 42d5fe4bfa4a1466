"""Text from any model composed of these layers.

A prompt is read in one pass, or in a few if it is long; then one token follows
another, each by a step that attends to what `keras_tx.cache` kept. On TensorFlow
and JAX both are compiled, and the loop over tokens lies inside the compiled
code; it stops when it has enough or every row has reached a stop token.

Inside, rows are left-padded to a bucket, so that prompts and outputs of many
lengths share a few compiled functions. Row b has its first token at column
`starts[b]`, all but the last token of the prompts fill the columns below
`origin`, and the last one stands at `origin`, where the loop begins.
"""

import collections
import contextlib
import functools
import random
import threading

import keras
import numpy as np
from keras import ops

from keras_tx import cache, checks, masks, remat, sampling
from keras_tx.embeddings import TokenEmbedding
from keras_tx.positions import LearnedPosition

# A longer prompt is read in pieces of this many tokens, so that the memory of
# the pass does not grow with the square of its length.
PROMPT_CHUNK = 512

# Compiled functions kept per model; the one that was not used for longest goes.
MAX_FUNCTIONS = 24

# Cached logits may differ from those of a full forward pass by this share of
# their spread. Sound models stay below 1e-5 in float32; a layer that mixes
# positions out of sight of the cache is off by half of it or more.
TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
TOLERANCE_HALF = 0.2

# Inputs that follow from the tokens, beside the tokens themselves.
TOKEN_INPUTS = ("target", "tokens")
OTHER_INPUTS = ("positions", "segment_ids", "token_types")

# Layers of Keras that mix positions without a cache.
MIXERS = (
    keras.layers.RNN,
    keras.layers.Bidirectional,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.AveragePooling1D,
    keras.layers.MaxPooling1D,
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.Conv1DTranspose,
    keras.layers.UpSampling1D,
    keras.layers.ZeroPadding1D,
    keras.layers.Cropping1D,
)
# These mix positions unless their kernel spans one.
CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.SeparableConv1D,
    keras.layers.DepthwiseConv1D,
)


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
    job = _Job(
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
    job = _Job(model, prompts, max_new_tokens, **options)
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


# ----------------------------------------------------------------------------
# One call
# ----------------------------------------------------------------------------


class _Job:
    """One call of `generate` or `stream`: checked arguments, then the state."""

    def __init__(
        self,
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
        self.max_new_tokens = checks.integer("max_new_tokens", max_new_tokens)
        if self.max_new_tokens < 0:
            raise ValueError(
                "`max_new_tokens` counts tokens to add, so it must be at least "
                f"0. Received: max_new_tokens={max_new_tokens}."
            )
        self.compile = checks.boolean("compile", compile)
        self.beam = sampler if isinstance(sampler, sampling.Beam) else None
        self.samplers = () if self.beam else sampling.chain(sampler)
        seed = checks.integer("seed", seed, optional=True)
        self.seed = random.getrandbits(31) if seed is None else seed

        self.plan = plan = _plan_of(model, source is not None, target, output)
        pad_id = plan.pad_id if pad_id == "auto" else pad_id
        self.pad_id = checks.integer("pad_id", pad_id, optional=True)
        self.source = None
        num_sources = None
        if source is not None:
            self.source = _standardize_source(source, plan, self.pad_id)
            num_sources = len(keras.tree.flatten(self.source)[0])
        self.prompts = _Prompts(prompts, self.pad_id, num_sources)
        self.rows = self.prompts.rows
        plan.check_tokens("prompts", self.rows)
        longest = max(len(row) for row in self.rows)
        if plan.max_length is not None and (
            longest + self.max_new_tokens > plan.max_length
        ):
            raise ValueError(
                f"The model's `LearnedPosition` has {plan.max_length} positions. "
                f"Received: a prompt of {longest} tokens and max_new_tokens="
                f"{self.max_new_tokens}, together "
                f"{longest + self.max_new_tokens}. Ask for at most "
                f"{max(plan.max_length - longest, 0)}, or shorten the prompt."
            )
        plan.prepare(self.source, check)
        self.stops = _check_stops(stop_tokens, plan.vocab_size)

    # Greedy and drawn text

    def start(self):
        """Encodes the source and reads the prompts but for their last tokens."""
        self._lay_out(repeats=1)
        self.state = (
            self._tokens,
            self.origin if self._eager else self._tensor(self.origin),
            self._read_prompts(),
            self._tensor(np.zeros(len(self.rows), "bool")),
            self._tensor(np.zeros(len(self.rows), "bool")),
        )
        keys = sampling.row_keys(self.seed, self.rows)
        self._fixed = (
            self._starts,
            self._tensor(keys),
            self._tensor(_pad_stops(self.stops)),
            self._tensor(sampling.numbers_of(self.samplers)),
            self._tensor(self.origin),
            self.memory,
        )

    def advance(self, count):
        """Generates until there are `count` new tokens or all rows have ended."""
        key = (
            "loop",
            self._shape,
            tuple(sampler.key() for sampler in self.samplers),
        )
        loop = self.plan.function(
            key,
            functools.partial(_loop, self.plan, self.capacity, self.samplers),
            self.compile,
            donate=(0,),
        )
        limit = self.origin + count
        limit = limit if self._eager else self._tensor(limit)
        self.state = loop(self.state, limit, *self._fixed)
        self.plan.check_stuck(self.state[4])

    def ended(self):
        """Whether each row has reached a stop token, NumPy `(B,)`."""
        return _numpy(self.state[3])

    def newest(self):
        """The last token of each row, NumPy `(B,)`."""
        return _numpy(self.state[0])[:, int(self.state[1])]

    def new_tokens(self):
        """What was generated, one list a row, each up to its stop token."""
        tokens, column = _numpy(self.state[0]), int(self.state[1])
        new = tokens[:, self.origin + 1 : column + 1]
        return [_until_stop(row, self.stops) for row in new.tolist()]

    # Beam search

    def beam_search(self):
        """Returns the best text of each row, up to its stop token."""
        num_beams = self.beam.num_beams
        self._lay_out(repeats=num_beams)
        batch = len(self.rows)
        # All beams of a row begin equal: only the first may be continued.
        scores = np.full((batch, num_beams), sampling.RULED_OUT, "float32")
        scores[:, 0] = 0.0
        state = (
            self._tokens,
            self.origin if self._eager else self._tensor(self.origin),
            self._read_prompts(),
            self._tensor(np.zeros((batch, num_beams), "bool")),
            self._tensor(scores),
            self._tensor(np.zeros((batch, num_beams), "float32")),
        )
        search = self.plan.function(
            ("beam", self._shape, num_beams, self.beam.length_penalty),
            functools.partial(_beam_loop, self.plan, self.capacity, self.beam),
            self.compile,
            donate=(0,),
        )
        limit = self.origin + self.max_new_tokens
        state = search(
            state,
            limit if self._eager else self._tensor(limit),
            self._starts,
            self._tensor(_pad_stops(self.stops)),
            self.memory,
        )
        tokens, column = _numpy(state[0]), int(state[1])
        tokens = tokens.reshape(batch, num_beams, -1)
        scores, lengths = _numpy(state[4]), _numpy(state[5])
        ranks = scores / np.maximum(lengths, 1) ** self.beam.length_penalty
        self.beam_scores = ranks.max(axis=1)
        best = tokens[np.arange(batch), ranks.argmax(axis=1)]
        new = best[:, self.origin + 1 : column + 1]
        return [_until_stop(row, self.stops) for row in new.tolist()]

    # What both share

    @property
    def _eager(self):
        return not self.compile or keras.backend.backend() == "torch"

    def _tensor(self, x):
        x = np.asarray(x)
        if x.dtype == np.int64:
            x = x.astype("int32")
        return ops.convert_to_tensor(x)

    def _lay_out(self, repeats):
        """Left-pads the prompts to a bucket, in a buffer for all that comes."""
        lengths = np.array([len(row) for row in self.rows], "int32")
        self.origin = _prompt_bucket(int(lengths.max()) - 1)
        self.capacity = _capacity(self.origin + self.max_new_tokens)
        tokens = np.zeros((len(self.rows), self.capacity + 1), "int32")
        for index, row in enumerate(self.rows):
            tokens[index, self.origin + 1 - len(row) : self.origin + 1] = row
        tokens = np.repeat(tokens, repeats, axis=0)
        starts = np.repeat(self.origin + 1 - lengths, repeats)
        self._prompt = tokens[:, : self.origin]
        self._tokens = self._tensor(tokens)
        self._starts = self._tensor(starts)
        self.memory = self.plan.encode(self.source, self.compile, repeats)
        self._shape = (tokens.shape[0], self.capacity, _spec(self.memory))

    def _read_prompts(self):
        """Returns the entries behind the prompts, all tokens but the last."""
        first = self._prompt[:, :PROMPT_CHUNK]
        read = self.plan.function(
            ("first", first.shape[1], self._shape),
            functools.partial(_read_first, self.plan, self.capacity),
            self.compile,
        )
        entries = read(self._tensor(first), self._starts, self.memory)
        for column in range(first.shape[1], self.origin, PROMPT_CHUNK):
            part = self._prompt[:, column : column + PROMPT_CHUNK]
            read = self.plan.function(
                ("more", part.shape[1], self._shape),
                functools.partial(_read_more, self.plan, self.capacity),
                self.compile,
                donate=(0,),
            )
            entries = read(
                entries,
                self._tensor(part),
                column if self._eager else self._tensor(column),
                self._starts,
                self.memory,
            )
        return entries


# ----------------------------------------------------------------------------
# What is compiled
# ----------------------------------------------------------------------------


def _read_first(plan, capacity, tokens, starts, memory):
    """The first piece of the prompts, which makes the entries."""
    scope = cache.Scope(
        tokens, column=0, starts=starts, capacity=capacity, strict=plan.strict
    )
    plan.forward(tokens, memory, scope)
    plan.owners = scope.owners
    return scope.entries


def _read_more(plan, capacity, entries, tokens, column, starts, memory):
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


def _loop(
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


def _beam_loop(plan, capacity, beam, state, limit, starts, stops, memory):
    """Like `_loop`, with the beams of a row side by side in the batch."""

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


# ----------------------------------------------------------------------------
# What is known of a model
# ----------------------------------------------------------------------------

_PLANS = "_keras_tx_plans"
_lock = threading.RLock()


def _plan_of(model, has_source, target, output):
    """Returns the model's plan, made at the first use.

    It lives on the model itself: a store elsewhere would keep the model alive.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a `keras.Model`. Received: {model!r} (of type "
            f"{type(model).__name__}). `keras.Sequential([layer, ...])` makes one "
            "of layers."
        )
    if keras.backend.backend() == "jax":
        # While it trains, the newest weights are the trainer's.
        model.jax_state_sync()
    with _lock:
        plans = model.__dict__.get(_PLANS)
        if plans is None:
            plans = {}
            # Not as a tracked attribute: it is no part of the model.
            object.__setattr__(model, _PLANS, plans)
        key = (has_source, target, output)
        plan = plans.get(key)
        # Quantising, enabling LoRA, `Sequential.add` and the like put other
        # variables or layers in place.
        if plan is None or not plan.is_of_now():
            plan = plans[key] = _Plan(model, has_source, target, output)
            if plan.kind == "whole" and not model.built:
                _without_gradients(plan.probe)(None)
        return plan


class _Plan:
    """How to run a model step by step, and the functions compiled for it."""

    def __init__(self, model, has_source, target, output):
        self.model = model
        self.output = output
        self.encoder = self.decoder = None
        self.memory_structure = None
        self.lock = threading.RLock()
        self.functions = collections.OrderedDict()
        self.owners = None
        self.vocab_size = None
        self.checked = False
        self.strict = True
        inputs = _inputs_by_name(model)
        self.inputs = inputs
        self.target = _find_target(inputs, target, has_source)
        self._check_length()
        subclassed = callable(getattr(model, "encode", None)) and callable(
            getattr(model, "decode", None)
        )
        if has_source and subclassed:
            self.kind = "methods"
        elif has_source and len(inputs) > 1:
            self.kind = "split"
            self._split()
        elif has_source:
            raise ValueError(
                "`source` belongs to an encoder-decoder: a functional model with "
                "two inputs, or a subclassed one with the methods "
                "`encode(source)` and `decode(target, encoded)`. Received: "
                f"'{model.name}' of type {type(model).__name__} with the inputs "
                f"{sorted(inputs)}."
            )
        else:
            self.kind = "whole"
            unknown = sorted(set(inputs) - {self.target} - set(OTHER_INPUTS))
            if unknown:
                raise ValueError(
                    f"'{model.name}' also wants the inputs {unknown}. Pass them as "
                    "`source=`, an array or a dict of arrays by name; the input "
                    f"that is continued is '{self.target}', or say which with "
                    "`target=`."
                )
        self._look_up()

    @staticmethod
    def _limit(layers):
        lengths = [x.max_length for x in layers if isinstance(x, LearnedPosition)]
        return min(lengths, default=None)

    def _check_length(self):
        x = self.inputs.get(self.target)
        if x is not None and len(x.shape) == 2 and x.shape[1] is not None:
            raise ValueError(
                f"The input '{self.target}' of '{self.model.name}' has the fixed "
                f"length {x.shape[1]}, so that no step can be one token long. "
                "Declare it as `keras.Input((None,))`."
            )
        if x is not None and len(x.shape) != 2:
            raise ValueError(
                f"The input '{self.target}' of '{self.model.name}' must be tokens "
                f"(batch, time). Received: shape {tuple(x.shape)}."
            )

    def _split(self):
        """Cuts a functional model where source-only tensors meet the target."""
        model = self.model
        target = self.inputs[self.target]
        sources = {
            name: x
            for name, x in self.inputs.items()
            if x is not target and name not in OTHER_INPUTS
        }
        others = {name: x for name, x in self.inputs.items() if name in OTHER_INPUTS}
        reads_target = {id(target)} | {id(x) for x in others.values()}
        reads_source = {id(x) for x in sources.values()}
        border, source_nodes, target_nodes = {}, [], []
        for depth in sorted(model._nodes_by_depth, reverse=True):
            for node in model._nodes_by_depth[depth]:
                if node.is_input:
                    continue
                inputs = node.input_tensors
                if any(id(x) in reads_target for x in inputs):
                    reads_target.update(id(x) for x in node.outputs)
                    border.update((id(x), x) for x in inputs if id(x) in reads_source)
                    target_nodes.append(node)
                else:
                    reads_source.update(id(x) for x in node.outputs)
                    source_nodes.append(node)
        logits = _pick_output(model.output, self.output)
        if id(logits) not in reads_target:
            raise ValueError(
                f"The logits of '{model.name}' do not depend on its input "
                f"'{self.target}'. Say which input is continued with `target=`."
            )
        self.source_names = list(sources)
        self.other_names = list(others)
        border = list(border.values())
        self.encoder = _Part(source_nodes, list(sources.values()), border)
        self.decoder = _Part(
            target_nodes, [target, *others.values(), *border], [logits]
        )

    def _look_up(self):
        """Notes variables and layers, and what they say of the tokens."""
        self.variables = list(self.model.variables)
        self.parts = list(self.model._flatten_layers())
        self.layers = (
            self.decoder.layers() if self.kind == "split" else _all_layers(self.model)
        )
        self.remat = [
            x for x in (self.model, *self.layers) if getattr(x, "_remat_mode", None)
        ]
        embeddings = [x for x in self.layers if isinstance(x, TokenEmbedding)]
        tables = embeddings or [
            x
            for x in self.layers
            if isinstance(x, (keras.layers.Embedding, keras.layers.ReversibleEmbedding))
        ]
        self.num_tokens = max((x.input_dim for x in tables), default=None)
        pads = [x.pad_id for x in embeddings if x.pad_id is not None]
        pads += [0 for x in tables if getattr(x, "mask_zero", False)]
        self.pad_id = pads[0] if pads else None
        self.max_length = self._limit(self.layers)
        self.source_limit = self._limit(_all_layers(self.model))

    def is_of_now(self):
        """Whether the model has the variables and layers that it had."""
        return _same_objects(self.variables, self.model.variables) and _same_objects(
            self.parts, self.model._flatten_layers()
        )

    # Arguments

    def check_tokens(self, name, rows):
        """Refuses ids that the model's embedding does not have."""
        self._check_ids(name, rows, self.num_tokens)

    @staticmethod
    def _check_ids(name, rows, bound):
        low = min(int(np.min(row)) for row in rows if len(row))
        high = max(int(np.max(row)) for row in rows if len(row))
        if low < 0 or (bound is not None and high >= bound):
            upper = "" if bound is None else f" to {bound - 1}"
            raise ValueError(
                f"`{name}` must hold tokens of the model, 0{upper}. Received ids "
                f"from {low} to {high}. Check the tokenizer."
            )

    @staticmethod
    def check_stuck(stuck):
        if _numpy(stuck).any():
            rows = np.nonzero(_numpy(stuck))[0].tolist()
            raise ValueError(
                f"No token was left to choose in rows {rows}: the samplers ruled "
                "out all of them, or the logits are not finite. Loosen the "
                "constraint, or look for NaN in the weights."
            )

    # Running

    def encode(self, source, compiled, repeats=1):
        """Returns what the decoder needs of the source: tensors and masks."""
        if source is None:
            return ()
        leaves = keras.tree.flatten(source)
        key = ("encode", tuple((x.shape, str(x.dtype)) for x in leaves))
        run = self.function(key, self._encode, compiled)
        tensors, found = run(keras.tree.map_structure(ops.convert_to_tensor, source))
        if repeats > 1:

            def repeat(x):
                return None if x is None else ops.repeat(x, repeats, axis=0)

            tensors, found = [*map(repeat, tensors)], [*map(repeat, found)]
        return (tensors, found)

    def _encode(self, source):
        if self.kind == "methods":
            encoded = self.model.encode(source)
        else:
            if isinstance(source, dict):
                source = [source[name] for name in self.source_names]
            else:
                source = [source]
            encoded = self.encoder(source)
        tensors = keras.tree.flatten(encoded)
        found = [masks.implicit(x) for x in tensors]
        self.memory_structure = keras.tree.map_structure(lambda x: 0, encoded)
        return tensors, found

    def forward(self, tokens, memory, scope=None):
        """Returns logits `(B, T, V)`, inside `scope` if there is one."""
        with contextlib.ExitStack() as stack:
            # Of no use without gradients, and a trace of its own.
            stack.enter_context(remat.without(self.remat))
            if scope is not None:
                stack.enter_context(scope)
            return self._forward(tokens, memory, scope)

    def _forward(self, tokens, memory, scope):
        if self.kind == "whole":
            names = [x for x in self.inputs if x != self.target]
            if not names:
                outputs = self.model(tokens, training=False)
            else:
                given = {self.target: tokens, **_other_inputs(names, tokens, scope)}
                outputs = self.model(_like_inputs(self.model, given), training=False)
            return _check_logits(_pick_output(outputs, self.output), tokens, self)
        tensors, found = memory
        carried = []
        for x, mask in zip(tensors, found, strict=True):
            x = ops.convert_to_tensor(x)
            if mask is not None:
                # Compiled code hands tensors on without their masks.
                x = ops.copy(x) if keras.backend.backend() == "torch" else x
                masks.attach(x, mask)
            carried.append(x)
        if self.kind == "split":
            others = _other_inputs(self.other_names, tokens, scope)
            (logits,) = self.decoder([tokens, *others.values(), *carried])
            return _check_logits(logits, tokens, self)
        encoded = keras.tree.pack_sequence_as(self.memory_structure, carried)
        outputs = self.model.decode(tokens, encoded)
        return _check_logits(_pick_output(outputs, self.output), tokens, self)

    def function(self, key, function, compiled, donate=()):
        """Returns `function`, compiled once for `key`."""
        if not compiled or keras.backend.backend() == "torch":
            return _without_gradients(function)
        with self.lock:
            found = self.functions.get(key)
            if found is None:
                found = _compile(function, self.model, self.variables, donate)
                self.functions[key] = found
                while len(self.functions) > MAX_FUNCTIONS:
                    self.functions.popitem(last=False)
            self.functions.move_to_end(key)
            return found

    # First use

    def prepare(self, source, check):
        """Builds the model, learns V, and checks that it can be cached."""
        with self.lock:
            self.strict = check
            if self.vocab_size is not None and (self.checked or not check):
                return
            if check and self.kind != "methods":
                self._refuse_mixers()
            one = source
            if source is not None:
                one = keras.tree.map_structure(lambda x: x[:1], source)
            _without_gradients(self._compare if check else self.probe)(one)
            self.checked = self.checked or check

    def _refuse_mixers(self):
        for layer in self.layers:
            spans = isinstance(layer, CONVOLUTIONS) and any(
                size > 1 for size in np.ravel(layer.kernel_size)
            )
            if spans or isinstance(layer, MIXERS):
                self._refuse(layer, "mixes positions")

    def _refuse(self, layer, what):
        raise ValueError(
            f"'{getattr(layer, 'path', None) or layer.name}' "
            f"({type(layer).__name__}) {what}, "
            "and knows nothing of the tokens before a step, so that text "
            "generated token by token would differ from what the model says. Use "
            "causal layers of keras_tx for what looks across positions, and "
            "position layers of keras_tx for what counts them. If you know better, "
            "pass check=False."
        )

    def probe(self, source):
        """Builds the model, if its first call does, and learns V."""
        tokens = ops.convert_to_tensor(np.zeros((1, 2), "int32"))
        logits = self.forward(tokens, self._encode_eagerly(source))
        self.vocab_size = int(logits.shape[-1])
        self._look_up()

    def _encode_eagerly(self, source):
        if source is None:
            return ()
        return self._encode(keras.tree.map_structure(ops.convert_to_tensor, source))

    def _compare(self, source):
        """Compares one full forward pass with prompt, two and one tokens."""
        if self.num_tokens is None or not self.model.built:
            self.probe(source)
        length = min(8, self.max_length or 8)
        bound = self.num_tokens or self.vocab_size
        tokens = np.random.default_rng(0).integers(0, bound, (1, length))
        tokens = np.where(tokens == self.pad_id, (tokens + 1) % bound, tokens)
        tokens = tokens.astype("int32")
        pieces = [length - 3, 2, 1] if length > 3 else [1] * length

        def both_ways(source, tokens):
            memory = () if source is None else self._encode(source)
            full = self.forward(tokens, memory)
            return full, self._in_pieces(tokens, pieces, memory)

        run = both_ways
        if keras.backend.backend() == "jax":
            # Operation by operation it would compile each of them.
            run = _compile(both_ways, self.model, self.variables, ())
        given = None
        if source is not None:
            given = keras.tree.map_structure(ops.convert_to_tensor, source)
        full, cached = map(_numpy, run(given, ops.convert_to_tensor(tokens)))
        self.vocab_size = full.shape[-1]
        if self._close(full, cached):
            return
        memory = self._encode_eagerly(source)
        tokens = ops.convert_to_tensor(tokens)
        with _recorded(self.layers) as calls:
            self.forward(tokens, memory)
            whole = list(calls)
            calls.clear()
            self._in_pieces(tokens, pieces, memory)
            parts = list(calls)
        self._refuse(self._first_difference(whole, parts, pieces), "looks across them")

    def _in_pieces(self, tokens, pieces, memory):
        """Returns logits of tokens `(1, T)` that came in pieces."""
        starts = ops.zeros((1,), dtype="int32")
        entries, owners, column, logits = None, None, 0, []
        for piece in pieces:
            part = tokens[:, column : column + piece]
            scope = cache.Scope(
                part,
                column=column,
                starts=starts,
                capacity=cache.BLOCK,
                entries=entries,
                owners=owners,
            )
            logits.append(self.forward(part, memory, scope))
            entries, owners = scope.entries, scope.owners
            column += piece
        return ops.concatenate(logits, axis=1)

    def _close(self, full, cached):
        if full.shape != cached.shape:
            return False
        full, cached = full.astype("float64"), cached.astype("float64")
        dtypes = {x.compute_dtype for x in self.layers}
        half = dtypes & {"float16", "bfloat16"} or any(
            getattr(x, "quantization_mode", None) for x in self.layers
        )
        tolerance = TOLERANCE_HALF if half else TOLERANCE["float32"]
        spread = max(full.std(), 1e-6)
        return bool(np.abs(full - cached).max() <= tolerance * spread)

    def _first_difference(self, whole, parts, pieces):
        """Returns the layer whose output differs first, innermost first."""
        per_pass = len(whole)
        if len(parts) == per_pass * len(pieces):
            for index, (layer, full) in enumerate(whole):
                some = [parts[index + per_pass * k][1] for k in range(len(pieces))]
                if any(full.ndim != x.ndim or x.ndim < 2 for x in some):
                    continue
                # There is one row of tokens; what works on tokens alone, such as
                # a projection of heads, has them on the first axis.
                axis = 1 if len(full) == 1 else 0
                sizes = {x.shape[:axis] + x.shape[axis + 1 :] for x in (full, *some)}
                joined = np.concatenate(some, axis) if len(sizes) == 1 else None
                if joined is None or joined.shape != full.shape:
                    continue
                spread = max(float(full.std()), 1e-6)
                if np.abs(joined - full).max() > 1e-2 * spread:
                    return layer
        return self.model


class _Part:
    """Some nodes of a functional model's graph, as a function.

    `keras.Model` of tensors in the middle of a graph would rewire the model
    that they belong to, which could then not be saved.

    Args:
        nodes: The nodes, in the order of the graph.
        inputs: Symbolic tensors that are given.
        outputs: Symbolic tensors that are wanted.
    """

    def __init__(self, nodes, inputs, outputs):
        self.inputs = inputs
        self.outputs = outputs
        needed = {id(x) for x in outputs}
        self.nodes = []
        for node in reversed(nodes):
            if any(id(x) in needed for x in node.outputs):
                needed.update(id(x) for x in node.input_tensors)
                self.nodes.insert(0, node)

    def __call__(self, values):
        known = {id(x): value for x, value in zip(self.inputs, values, strict=True)}
        for node in self.nodes:
            args, kwargs = node.arguments.fill_in(known)
            results = keras.tree.flatten(node.operation(*args, **kwargs))
            known.update((id(x), y) for x, y in zip(node.outputs, results, strict=True))
        return [known[id(x)] for x in self.outputs]

    def layers(self):
        """Returns the layers of these nodes and theirs, each once."""
        found = {}
        for node in self.nodes:
            if isinstance(node.operation, keras.layers.Layer):
                for layer in node.operation._flatten_layers():
                    found[id(layer)] = layer
        return list(found.values())


# ----------------------------------------------------------------------------
# Backends
# ----------------------------------------------------------------------------


def _compile(function, model, variables, donate):
    """Compiles a function of tensors in which the model's weights take part."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(
            function, jit_compile=bool(model.supports_jit), autograph=False
        )
    import jax

    # Weights are arguments: as constants they would be copied, and go stale.
    def stateless(values, *args):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            return function(*args)

    jitted = jax.jit(stateless, donate_argnums=tuple(index + 1 for index in donate))

    def run(*args):
        return jitted([variable.value for variable in variables], *args)

    return run


def _without_gradients(function):
    """Returns the function, run without recording for gradients."""
    if keras.backend.backend() != "torch":
        return function
    import torch

    def run(*args):
        with torch.no_grad():
            return function(*args)

    return run


def _numpy(x):
    return ops.convert_to_numpy(x)


@contextlib.contextmanager
def _recorded(layers):
    """Records what each layer returns, in the order in which calls end."""
    calls = []

    def record(layer, call, *args, **kwargs):
        outputs = call(*args, **kwargs)
        for x in keras.tree.flatten(outputs)[:1]:
            calls.append((layer, np.asarray(_numpy(x), "float64")))
        return outputs

    patched = []
    try:
        for layer in layers:
            wrapped = functools.wraps(layer.call)(
                functools.partial(record, layer, layer.call)
            )
            object.__setattr__(layer, "call", wrapped)
            patched.append(layer)
        yield calls
    finally:
        for layer in patched:
            object.__delattr__(layer, "call")


# ----------------------------------------------------------------------------
# Inputs and outputs
# ----------------------------------------------------------------------------


def _inputs_by_name(model):
    """Returns `{name: symbolic input}`; nothing of a subclassed model."""
    try:
        inputs = model.inputs
    except (AttributeError, ValueError):
        inputs = None
    return {x.name: x for x in inputs or ()}


def _find_target(inputs, target, has_source):
    if target is not None:
        if inputs and target not in inputs:
            raise ValueError(
                "`target` must name an input of the model, one of "
                f"{sorted(inputs)}. Received: target={target!r}."
            )
        return target
    if len(inputs) == 1:
        return next(iter(inputs))
    for name in TOKEN_INPUTS:
        if name in inputs:
            return name
    if inputs:
        raise ValueError(
            f"The model has the inputs {sorted(inputs)}, none of them called "
            "'target' or 'tokens'. Say which is continued with `target=`."
        )
    return "target" if has_source else "tokens"


def _like_inputs(model, given):
    """Arranges inputs by name as the functional model takes them."""
    return keras.tree.map_structure(lambda x: given[x.name], model.input)


def _other_inputs(names, tokens, scope):
    """Inputs that follow from the tokens, by name."""
    batch, length = tokens.shape
    ones = ops.ones((batch, length), dtype="int32")
    if scope is not None:
        positions = scope.positions
    else:
        positions = ones * ops.arange(length, dtype="int32")[None, :]
    values = {
        "positions": positions,
        "segment_ids": ones,
        "token_types": ops.zeros_like(ones),
    }
    return {name: values[name] for name in names}


def _pick_output(outputs, output):
    """Returns the logits among a model's outputs."""
    if isinstance(outputs, dict):
        name = "logits" if output is None else output
        if name not in outputs:
            raise ValueError(
                f"The model returns {sorted(outputs)}. Say which are the logits "
                f"with `output=`, or call them 'logits'. Received: output={output!r}."
            )
        return outputs[name]
    if isinstance(outputs, (list, tuple)):
        index = 0 if output is None else output
        if not isinstance(index, int) or not -len(outputs) <= index < len(outputs):
            raise ValueError(
                f"The model returns {len(outputs)} outputs. Say which are the "
                f"logits with `output=`, a number. Received: output={output!r}."
            )
        return outputs[index]
    if output not in (None, 0):
        raise ValueError(
            f"The model returns one tensor. Received: output={output!r}. Leave it out."
        )
    return outputs


def _check_logits(logits, tokens, plan):
    if len(logits.shape) != 3 or logits.shape[1] != tokens.shape[1]:
        raise ValueError(
            f"'{plan.model.name}' must give logits (batch, time, vocabulary) for "
            f"tokens (batch, time). Received: logits of shape "
            f"{tuple(logits.shape)} for tokens of shape {tuple(tokens.shape)}."
        )
    return logits


def _check_stops(stop_tokens, vocab_size):
    """Returns stop tokens as a tuple of ints, each within the vocabulary."""
    if isinstance(stop_tokens, (int, np.integer)):
        stop_tokens = (stop_tokens,)
    stops = tuple(checks.integer("stop_tokens", token) for token in stop_tokens)
    if any(not 0 <= token < vocab_size for token in stops):
        raise ValueError(
            f"`stop_tokens` must lie in 0 to {vocab_size - 1}, the {vocab_size} "
            f"tokens that the model can say. Received: stop_tokens={stops}."
        )
    return stops


def _pad_stops(stops):
    """Stop tokens in a length that many calls share; no token is -1."""
    size = -(-max(len(stops), 1) // 8) * 8
    return np.array(list(stops) + [-1] * (size - len(stops)), "int32")


def _until_stop(row, stops):
    for index, token in enumerate(row):
        if token in stops:
            return row[: index + 1]
    return row


def _standardize_source(source, plan, pad_id):
    """Returns the source as arrays, ragged lists padded, lengths bucketed."""
    if isinstance(source, dict):
        if plan.kind == "split" and set(source) != set(plan.source_names):
            raise ValueError(
                f"`source` must have the entries {sorted(plan.source_names)}. "
                f"Received: {sorted(source)}."
            )
        return {name: _source_array(x, plan, pad_id) for name, x in source.items()}
    if plan.kind == "split" and len(plan.source_names) != 1:
        raise ValueError(
            f"The model has the source inputs {sorted(plan.source_names)}. Pass "
            "`source=` as a dict of arrays by name."
        )
    return _source_array(source, plan, pad_id)


def _source_array(x, plan, pad_id):
    if isinstance(x, (list, tuple)):
        rows = [np.asarray(row) for row in x]
        if rows and rows[0].ndim == 0:
            rows = [np.asarray(x)]
        lengths = {len(row) for row in rows}
        if len(lengths) > 1 and pad_id is None:
            raise ValueError(
                "Sources of different lengths need a padding token that the model "
                "masks. Make the model with `pad_id=`, or encode them one by "
                f"one. Received: lengths {sorted(lengths)}."
            )
        width = max(lengths, default=0)
        rows = [
            np.pad(row, (0, width - len(row)), constant_values=pad_id or 0)
            for row in rows
        ]
        x = np.stack(rows) if rows else np.zeros((0, 0), "int32")
    x = np.asarray(_numpy(x))
    if x.size == 0:
        raise ValueError(f"`source` is empty. Received: an array of shape {x.shape}.")
    if not np.issubdtype(x.dtype, np.integer):
        return x.astype("float32") if x.dtype == np.float64 else x
    x = x.astype("int32")
    x = x[None] if x.ndim == 1 else x
    if x.ndim == 2 and pad_id is not None and plan.pad_id == pad_id:
        # The model masks padding, so that a bucket changes nothing.
        width = _power_of_two(x.shape[1], 16)
        if plan.source_limit is not None:
            width = max(min(width, plan.source_limit), x.shape[1])
        x = np.pad(x, [(0, 0), (0, width - x.shape[1])], constant_values=pad_id)
    return x


class _Prompts:
    """Prompts as rows without padding, and the way back.

    Args:
        prompts: As in `generate`.
        pad_id: Optional padding token of arrays.
        num_sources: Optional number of rows that one flat prompt serves.
    """

    def __init__(self, prompts, pad_id, num_sources):
        self.pad_id = pad_id
        self.lists = isinstance(prompts, (list, tuple))
        self.left = False
        if self.lists:
            self.flat, rows = self._from_lists(prompts)
        else:
            self.flat, rows = self._from_array(prompts)
        if num_sources is not None and self.flat and num_sources >= 1:
            rows = rows * num_sources
            self.flat = self.flat and num_sources == 1
        if num_sources is not None and len(rows) != num_sources:
            raise ValueError(
                "`prompts` and `source` must have as many rows, or one flat prompt "
                f"serves all. Received: {len(rows)} prompts, {num_sources} sources."
            )
        self.rows = rows

    def _from_lists(self, prompts):
        if not prompts:
            raise _empty("no rows")
        flat = all(np.ndim(x) == 0 for x in prompts)
        rows = [np.asarray(_numpy_of(row)) for row in ([prompts] if flat else prompts)]
        for index, row in enumerate(rows):
            if row.ndim != 1 and row.size:
                raise ValueError(
                    "`prompts` must be a list of tokens or a list of such lists. "
                    f"Received: row {index} of shape {row.shape}."
                )
            self._check(index, row)
        return flat, [row.astype("int32") for row in rows]

    def _from_array(self, prompts):
        array = np.asarray(_numpy_of(prompts))
        if array.ndim not in (1, 2):
            raise ValueError(
                "`prompts` must be tokens (time,) or (batch, time). Received: an "
                f"array of shape {array.shape}."
            )
        flat = array.ndim == 1
        array = array[None] if flat else array
        if not len(array):
            raise _empty("no rows")
        for index, row in enumerate(array):
            self._check(index, row)
        rows = list(array.astype("int32"))
        if self.pad_id is not None:
            self.left = any(
                row[0] == self.pad_id and row[-1] != self.pad_id for row in rows
            )
            rows = [self._strip(index, row) for index, row in enumerate(rows)]
        self.width = array.shape[1]
        return flat, rows

    @staticmethod
    def _check(index, row):
        if not row.size:
            raise _empty(f"row {index} of length 0")
        if not np.issubdtype(row.dtype, np.integer):
            raise ValueError(
                "`prompts` must hold tokens, which are integers. Received: row "
                f"{index} of dtype {row.dtype}. Encode text with the tokenizer that "
                "the model was trained with."
            )

    def _strip(self, index, row):
        real = np.nonzero(row != self.pad_id)[0]
        if not len(real):
            raise _empty(f"row {index} with nothing but padding, {self.pad_id}")
        return row[real[0] : real[-1] + 1]

    def put_back(self, new):
        """Returns prompts and new tokens in the form that prompts came in."""
        texts = [
            [*row.tolist(), *more] for row, more in zip(self.rows, new, strict=True)
        ]
        if self.lists:
            return texts[0] if self.flat else texts
        width = max(map(len, texts)) if any(new) else self.width
        array = np.zeros((len(texts), width), "int32")
        for index, text in enumerate(texts):
            fill = text[-1] if self.pad_id is None else self.pad_id
            array[index] = fill
            if self.left:
                array[index, width - len(text) :] = text
            else:
                array[index, : len(text)] = text
        return array[0] if self.flat else array


def _numpy_of(x):
    return x if isinstance(x, (list, tuple, np.ndarray)) else _numpy(x)


def _empty(what):
    return ValueError(
        f"`prompts` must hold at least one token a row. Received: {what}. Begin "
        "with a start token, for example the tokenizer's <bos>."
    )


# ----------------------------------------------------------------------------
# Sizes
# ----------------------------------------------------------------------------


def _power_of_two(size, least):
    bucket = least
    while bucket < size:
        bucket *= 2
    return bucket


def _prompt_bucket(length):
    """Length that a prompt is padded to: powers of two, then whole pieces."""
    if length <= PROMPT_CHUNK:
        return min(_power_of_two(length, 16), PROMPT_CHUNK)
    return -(-length // PROMPT_CHUNK) * PROMPT_CHUNK


def _capacity(columns):
    """Columns to make room for: powers of two, then multiples of 1024."""
    if columns <= 2048:
        return _power_of_two(columns, cache.BLOCK)
    return -(-columns // 1024) * 1024


def _spec(memory):
    """Shapes and dtypes, hashable."""
    if not memory:
        return ()
    tensors, found = memory
    return tuple(
        None
        if x is None
        else (tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
        for x in [*tensors, *found]
    )


def _same_objects(first, second):
    second = list(second)
    return len(first) == len(second) and all(
        a is b for a, b in zip(first, second, strict=True)
    )


def _all_layers(model):
    """Returns the model's layers and theirs, without the model itself."""
    return [x for x in model._flatten_layers() if x is not model]
