"""What the conformance suite runs over: every registered rule, draft source and model family.

A new entry is picked up by itself; a draft source that needs parts or parameters of its own adds a line in
``make_source``.
"""

from __future__ import annotations

import numpy as np
import toys

from specjax import draft
from specjax.types import Drafter
from specjax.verify import RULES

# "model", "ngram", "no" (plain decoding), ...
SOURCES = [name.removesuffix("_drafter") for name in draft.__all__ if name.endswith("_drafter")]
VARIANTS = ["head_attends", "head_side_by_side", "mixed_head"]  # slow: tests/test_draft_head.py has them too
SOURCES += ["trimmed", *VARIANTS]
SAMPLING_RULES = [rule for rule in RULES.values() if rule.lossless and not rule.greedy]


def make_source(name: str, target_table, *, noise: float = 1.0) -> tuple[Drafter, object]:
    """Return a draft source for the toy target with this table, and its parameters (see ``toys.world``)."""
    vocab = len(target_table)
    if name == "early_exit":
        return draft.early_exit_drafter(toys.TwoPartFn(vocab), 1, vocab), toys.noisy(target_table, noise, seed=1)
    if name == "model":
        return draft.model_drafter(toys.MarkovFn(vocab), vocab), toys.noisy(target_table, noise, seed=1)
    if name == "trimmed":  # half the tokens are never drafted
        fn = draft.TrimmedFn(toys.MarkovFn(vocab), vocab)
        ids = np.arange(1, vocab, 2, dtype=np.int32)
        params = {"model": toys.noisy(target_table, noise, seed=1)[..., ids], "ids": ids}
        return draft.model_drafter(fn, vocab), params
    if name.startswith("head"):  # half the tokens, and the prompt's, but for the one that attends
        fn = toys.MarkovHead(vocab, name == "head_attends", positions=2 * (name == "head_side_by_side"))
        ids = None if fn.attends else np.arange(1, vocab, 2, dtype=np.int32)
        params = {"table": toys.noisy(target_table, noise, seed=1), "ids": ids}
        return draft.head_drafter(fn, vocab, prompt_ids=2), params
    if name.startswith("mixed"):
        drafter, params = make_source("head" if name == "mixed_head" else "model", target_table, noise=noise)
        return draft.mixed_drafter(drafter, min_n=2), params
    return getattr(draft, f"{name}_drafter")(), {}
