"""One call of `generate` or `stream`.

Inside, rows are left-padded to a bucket, so that prompts and outputs of many
lengths share a few compiled functions. Row b has its first token at column
`starts[b]`, all but the last token of the prompts fill the columns below
`origin`, and the last one stands at `origin`, where the loop begins.
"""

import dataclasses
import functools
import random

import keras
import numpy as np
from keras import ops

from keras_tx import cache, checks, sampling
from keras_tx.generation import sizes, steps
from keras_tx.generation.plan import plan_of, repeated
from keras_tx.generation.prefix import Prefix
from keras_tx.generation.prompts import (
    Prompts,
    check_stops,
    pad_stops,
    standardize_source,
    until_stop,
)

CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8")


class Job:
    """Checked arguments, then the state."""

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
        prefix=None,
        draft=None,
        draft_tokens=4,
        cache_dtype=None,
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

        self.prefix = prefix
        if not (prefix is None or isinstance(prefix, Prefix)):
            raise ValueError(
                "`prefix` is what `prefill(model, prompt)` returned. Received: "
                f"prefix={prefix!r}."
            )
        if prefix is None:
            self.plan = plan = plan_of(model, source is not None, target, output)
        else:
            self.plan = plan = prefix.plan_for(model, source, target, output)
        pad_id = plan.pad_id if pad_id == "auto" else pad_id
        self.pad_id = checks.integer("pad_id", pad_id, optional=True)
        self.source = None
        num_sources = None
        if source is not None:
            self.source = standardize_source(source, plan, self.pad_id)
            plan.check_source(self.source)
            num_sources = len(keras.tree.flatten(self.source)[0])
        self.prompts = Prompts(
            prompts, self.pad_id, num_sources, may_be_empty=prefix is not None
        )
        self.rows = self.prompts.rows
        plan.check_tokens("prompts", self.rows)
        if prefix is not None:
            self.rows = [np.append(prefix.tokens, row) for row in self.rows]
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
        self.stops = check_stops(stop_tokens, plan.vocab_size)
        self.draft = None
        self.ahead = 0
        if draft is not None:
            self.draft = self._plan_of_draft(draft, check)
            self.ahead = checks.positive_integer("draft_tokens", draft_tokens)
        if cache_dtype is not None:
            checks.choice("cache_dtype", cache_dtype, CACHE_DTYPES)
        if prefix is not None:
            cache_dtype = prefix.cache_dtype if cache_dtype is None else cache_dtype
            if cache_dtype != prefix.cache_dtype:
                raise ValueError(
                    "A prefix is kept in the dtype that `prefill` was told. Received: "
                    f"cache_dtype={cache_dtype!r} and a prefix in "
                    f"{prefix.cache_dtype!r}."
                )
        self.kept = cache.Kept(slack=self.ahead, dtype=cache_dtype)

    def _plan_of_draft(self, draft, check):
        if self.beam is not None or self.source is not None or self._memory_of_prefix:
            raise ValueError(
                "`draft` guesses what one model of tokens alone would choose. "
                "Leave it out with `Beam` and for encoder-decoders."
            )
        plan = plan_of(draft, False, None, None)
        plan.check_tokens("prompts", self.rows)
        plan.prepare(None, check)
        if plan.vocab_size != self.plan.vocab_size:
            raise ValueError(
                "`draft` must have the vocabulary of the model. Received: "
                f"{plan.vocab_size} tokens of '{draft.name}' and "
                f"{self.plan.vocab_size} of '{self.plan.model.name}'."
            )
        return plan

    @property
    def _memory_of_prefix(self):
        return () if self.prefix is None else self.prefix.memory

    # Greedy and drawn text

    def start(self):
        """Encodes the source and reads the prompts but for their last tokens."""
        self._lay_out(repeats=1)
        entries = self._read_prompts()
        if self.draft is not None:
            entries = (entries, self._read_prompts(self.draft))
        self.state = (
            self._tokens,
            self._column(self.origin),
            entries,
            self._tensor(np.zeros(len(self.rows), "bool")),
            self._tensor(np.zeros(len(self.rows), "bool")),
        )
        keys = sampling.row_keys(self.seed, self.rows)
        self._fixed = (
            self._starts,
            self._tensor(keys),
            self._tensor(pad_stops(self.stops)),
            self._tensor(sampling.numbers_of(self.samplers)),
            self._tensor(self.origin),
        )

    def advance(self, count):
        """Generates until there are `count` new tokens or all rows have ended."""
        kinds = tuple(sampler.key() for sampler in self.samplers)
        if self.draft is None:
            loop = self.plan.function(
                ("loop", self._shape, kinds),
                functools.partial(
                    steps.loop, self.plan, self.capacity, self.kept, self.samplers
                ),
                self.compile,
                donate=(0,),
            )
            fixed = (*self._fixed, self.memory)
        else:
            loop = self.plan.function(
                ("draft", self._shape, kinds, id(self.draft)),
                functools.partial(
                    steps.draft_loop,
                    self.plan,
                    self.draft,
                    self.capacity,
                    self.kept,
                    self.samplers,
                ),
                self.compile,
                donate=(0,),
                draft=self.draft,
            )
            fixed = self._fixed
        limit = self._column(self.origin + count)
        self.state = loop(self.state, limit, *fixed)
        self.plan.check_stuck(self.state[4])

    def columns_from(self, count):
        """The tokens behind `count` new ones, one NumPy `(B,)` a step."""
        tokens, column = ops.convert_to_numpy(self.state[0]), int(self.state[1])
        return list(tokens[:, self.origin + 1 + count : column + 1].T)

    def new_tokens(self):
        """What was generated, one list a row, each up to its stop token."""
        tokens, column = ops.convert_to_numpy(self.state[0]), int(self.state[1])
        new = tokens[:, self.origin + 1 : column + 1]
        return [until_stop(row, self.stops) for row in new.tolist()]

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
            self._column(self.origin),
            self._read_prompts(),
            self._tensor(np.zeros((batch, num_beams), "bool")),
            self._tensor(scores),
            self._tensor(np.zeros((batch, num_beams), "float32")),
        )
        search = self.plan.function(
            ("beam", self._shape, num_beams, self.beam.length_penalty),
            functools.partial(
                steps.beam_loop, self.plan, self.capacity, self.kept, self.beam
            ),
            self.compile,
            donate=(0,),
        )
        limit = self.origin + self.max_new_tokens
        state = search(
            state,
            self._column(limit),
            self._starts,
            self._tensor(pad_stops(self.stops)),
            self.memory,
        )
        tokens, column = ops.convert_to_numpy(state[0]), int(state[1])
        tokens = tokens.reshape(batch, num_beams, -1)
        scores, lengths = ops.convert_to_numpy(state[4]), ops.convert_to_numpy(state[5])
        ranks = scores / np.maximum(lengths, 1) ** self.beam.length_penalty
        self.beam_scores = ranks.max(axis=1)
        best = tokens[np.arange(batch), ranks.argmax(axis=1)]
        new = best[:, self.origin + 1 : column + 1]
        return [until_stop(row, self.stops) for row in new.tolist()]

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
        self.origin = sizes.prompt_bucket(int(lengths.max()) - 1)
        self.capacity = sizes.capacity_of(
            self.origin + self.max_new_tokens + self.ahead
        )
        tokens = np.zeros((len(self.rows), self.capacity + 1), "int32")
        for index, row in enumerate(self.rows):
            tokens[index, self.origin + 1 - len(row) : self.origin + 1] = row
        tokens = np.repeat(tokens, repeats, axis=0)
        starts = np.repeat(self.origin + 1 - lengths, repeats)
        self._prompt = tokens[:, : self.origin]
        self._tokens = self._tensor(tokens)
        self._starts = self._tensor(starts)
        if self.prefix is not None:
            self.memory = repeated(self._memory_of_prefix, len(tokens))
        else:
            self.memory = self.plan.encode(self.source, self.compile, repeats)
        self._shape = (len(tokens), self.capacity, self.kept, spec_of(self.memory))

    def _read_prompts(self, plan=None):
        """Returns the entries behind the prompts, all tokens but the last."""
        plan = plan or self.plan
        begin, entries = 0, None
        if self.prefix is not None and plan is self.plan:
            begin, entries = self._recall_prefix()
        for column in range(begin, self.origin, sizes.PROMPT_CHUNK):
            end = min(column + sizes.PROMPT_CHUNK, self.origin)
            part = self._tensor(self._prompt[:, column:end])
            kind = (part.shape[1], self._shape)
            if entries is None:
                read = plan.function(
                    ("first", *kind),
                    functools.partial(steps.read_first, plan, self.capacity, self.kept),
                    self.compile,
                )
                entries = read(part, self._starts, self.memory)
                continue
            read = plan.function(
                ("more", *kind),
                functools.partial(steps.read_more, plan, self.capacity, self.kept),
                self.compile,
                donate=(0,),
            )
            entries = read(
                entries, part, self._column(column), self._starts, self.memory
            )
        return entries

    def _recall_prefix(self):
        """Returns the column from which to read on, and what is held before it."""
        longest = max(len(row) for row in self.prompts.rows)
        again = sizes.prompt_bucket(longest - 1) if longest > 1 else 0
        column = self.origin - again
        if column <= 0:
            return 0, None  # it is short: reading it costs no more
        prefix = self.prefix
        spread = self.plan.function(
            ("spread", self._shape, prefix.capacity),
            functools.partial(
                steps.spread_prefix, prefix.windows, self.capacity, self.kept
            ),
            self.compile,
        )
        place = self._column(column), self._starts, self._column(prefix.offset)
        return column, spread(prefix.entries, *place)

    def read_prefix(self):
        """Reads one prompt whole; returns its entries, capacity and first column."""
        # What is read is all but the last token of a row.
        self.rows = [np.append(row, 0) for row in self.rows]
        self.kept = dataclasses.replace(self.kept, rings=False)
        self._lay_out(repeats=1)
        entries = self._read_prompts()
        return entries, self.capacity, self.origin + 1 - len(self.rows[0])

    def _column(self, column):
        return column if self._eager else self._tensor(column)


def spec_of(memory):
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
