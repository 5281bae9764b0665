"""What the conformance suite runs over: every registered rule, draft source and model family.

A new entry is picked up by itself; a draft source that needs parameters of its own adds one line in ``make_source``.
"""

from __future__ import annotations

import toys

from specjax import draft
from specjax.types import Drafter
from specjax.verify import RULES

SOURCES = [name.removesuffix("_drafter") for name in draft.__all__]  # "model", "ngram", "no" (plain decoding), ...
SAMPLING_RULES = [rule for rule in RULES.values() if rule.lossless and not rule.greedy]


def make_source(name: str, target_table, *, noise: float = 1.0) -> tuple[Drafter, object]:
    """Return a draft source for the toy target with this table, and its parameters."""
    vocab = len(target_table)
    if name == "model":
        return draft.model_drafter(toys.MarkovFn(vocab), vocab), toys.noisy(target_table, noise, seed=1)
    return getattr(draft, f"{name}_drafter")(), {}
