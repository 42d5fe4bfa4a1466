"""One call of `generate` or `stream`.

Inside, rows are left-padded to a bucket, so that prompts and outputs of many
lengths share a few compiled functions. Row b has its first token at column
`starts[b]`, all but the last token of the prompts fill the columns below
`origin`, and the last one stands at `origin`, where the loop begins.
"""

import functools
import random

import keras
import numpy as np
from keras import ops

from keras_tx import checks, sampling
from keras_tx.generation import sizes, steps
from keras_tx.generation.plan import plan_of
from keras_tx.generation.prompts import (
    Prompts,
    check_stops,
    pad_stops,
    standardize_source,
    until_stop,
)


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

        self.plan = plan = plan_of(model, source is not None, target, output)
        pad_id = plan.pad_id if pad_id == "auto" else pad_id
        self.pad_id = checks.integer("pad_id", pad_id, optional=True)
        self.source = None
        num_sources = None
        if source is not None:
            self.source = standardize_source(source, plan, self.pad_id)
            num_sources = len(keras.tree.flatten(self.source)[0])
        self.prompts = Prompts(prompts, self.pad_id, num_sources)
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
        self.stops = check_stops(stop_tokens, plan.vocab_size)

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
            self._tensor(pad_stops(self.stops)),
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
            functools.partial(steps.loop, self.plan, self.capacity, self.samplers),
            self.compile,
            donate=(0,),
        )
        limit = self.origin + count
        limit = limit if self._eager else self._tensor(limit)
        self.state = loop(self.state, limit, *self._fixed)
        self.plan.check_stuck(self.state[4])

    def ended(self):
        """Whether each row has reached a stop token, NumPy `(B,)`."""
        return ops.convert_to_numpy(self.state[3])

    def newest(self):
        """The last token of each row, NumPy `(B,)`."""
        return ops.convert_to_numpy(self.state[0])[:, int(self.state[1])]

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
            self.origin if self._eager else self._tensor(self.origin),
            self._read_prompts(),
            self._tensor(np.zeros((batch, num_beams), "bool")),
            self._tensor(scores),
            self._tensor(np.zeros((batch, num_beams), "float32")),
        )
        search = self.plan.function(
            ("beam", self._shape, num_beams, self.beam.length_penalty),
            functools.partial(steps.beam_loop, self.plan, self.capacity, self.beam),
            self.compile,
            donate=(0,),
        )
        limit = self.origin + self.max_new_tokens
        state = search(
            state,
            limit if self._eager else self._tensor(limit),
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
        self.capacity = sizes.capacity_of(self.origin + self.max_new_tokens)
        tokens = np.zeros((len(self.rows), self.capacity + 1), "int32")
        for index, row in enumerate(self.rows):
            tokens[index, self.origin + 1 - len(row) : self.origin + 1] = row
        tokens = np.repeat(tokens, repeats, axis=0)
        starts = np.repeat(self.origin + 1 - lengths, repeats)
        self._prompt = tokens[:, : self.origin]
        self._tokens = self._tensor(tokens)
        self._starts = self._tensor(starts)
        self.memory = self.plan.encode(self.source, self.compile, repeats)
        self._shape = (tokens.shape[0], self.capacity, spec_of(self.memory))

    def _read_prompts(self):
        """Returns the entries behind the prompts, all tokens but the last."""
        first = self._prompt[:, : sizes.PROMPT_CHUNK]
        read = self.plan.function(
            ("first", first.shape[1], self._shape),
            functools.partial(steps.read_first, self.plan, self.capacity),
            self.compile,
        )
        entries = read(self._tensor(first), self._starts, self.memory)
        for column in range(first.shape[1], self.origin, sizes.PROMPT_CHUNK):
            part = self._prompt[:, column : column + sizes.PROMPT_CHUNK]
            read = self.plan.function(
                ("more", part.shape[1], self._shape),
                functools.partial(steps.read_more, self.plan, self.capacity),
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
