"""A prompt that is read once, for many continuations."""

import dataclasses
from typing import Any

import numpy as np

from keras_tx.generation.plan import Plan, plan_of


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """What `prefill` returns, and `generate` and `stream` take as `prefix=`.

    Its length is that of its tokens.
    """

    tokens: np.ndarray
    plan: Plan
    has_source: bool
    target: Any
    output: Any
    memory: Any
    entries: Any
    windows: Any
    capacity: int
    cache_dtype: str | None
    offset: int

    def __len__(self):
        return len(self.tokens)

    def __repr__(self):
        return f"Prefix of {len(self)} tokens for '{self.plan.model.name}'"

    def plan_for(self, model, source, target, output):
        """Returns the plan, after a check that the prefix belongs to it."""
        if source is not None:
            raise ValueError(
                "A prefix has its source already. Pass `source=` to `prefill`."
            )
        target = self.target if target is None else target
        output = self.output if output is None else output
        if plan_of(model, self.has_source, target, output) is not self.plan:
            raise ValueError(
                f"The prefix was read by '{self.plan.model.name}' as it was then, "
                "and this is another model, or its weights or layers were replaced "
                f"since. Received: '{model.name}'. Call `prefill` again."
            )
        return self.plan
