"""A proof on a user's own pair and settings that nothing is lost, in the order in which one would trust it.

Each stage needs less faith than the next: short prompts under ``check``; greedy text token by token; the
probabilities that verification used, and the rule on them; the statistics of sampled texts; a long context; a ragged
batch with rows that are stopped. A stage that fails says what it saw; the later ones still run.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from specjax import proof_stages as stages
from specjax.errors import SpecjaxError, UsageError
from specjax.pair import Pair
from specjax.proof_stages import Case, Found
from specjax.requests import Options, check, spelled
from specjax.sampling import GREEDY, SamplingParams
from specjax.speculation import AUTO, Gamma, default_width, plan
from specjax.types import Constraint, Rule
from specjax.verify import rule_for

SCHEMA = 1
LOSSLESS, LOSS = "lossless", "loss"
# Openings that a base model goes on with and a chat model answers.
PROMPTS = (
    "Once upon a time, in a small village by the sea,",
    "The three most important things about bread are",
    "def fibonacci(n):",
    "Q: What is the capital of France? A:",
    "one two three four one two three four one two",
    "Dear Sir or Madam, I am writing to",
    "The list of planets: Mercury, Venus, Earth,",
    "If it rains tomorrow, then we",
)
# A new stage is one function and one line here.
STAGES: dict[str, Callable[[Case], Found]] = {
    "small": stages.small,
    "greedy": stages.greedy,
    "identity": stages.identity,
    "sampling": stages.sampling,
    "long context": stages.long_context,
    "ragged batch": stages.ragged,
}


@dataclasses.dataclass(frozen=True)
class Stage:
    """What one stage found.

    Attributes:
        name: its name.
        passed: nothing was lost.
        saw: one line for the table.
        details: further lines: near-ties, statistics, what failed.
        seconds: it took.
        numbers: for the JSON.
    """

    name: str
    passed: bool
    saw: str
    details: list[str]
    seconds: float
    numbers: dict[str, Any]


def prove(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    sampling: SamplingParams = GREEDY,
    gamma: Gamma | None = None,
    width: int | None = None,
    rule: str | Rule = "rejection",
    seed: int = 0,
    quick: bool = False,
    ban_sequence: Sequence[str] = (),
    constraint: Constraint | None = None,
    on_stage: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Compare speculative with plain decoding on a pair, stage by stage.

    Args:
        pair: with a draft that can be used.
        prompts: texts or lists of ids; a few built-in texts by default (ids where there is no tokenizer).
        sampling: the settings to prove; the greedy stages use them at temperature 0, the sampled ones at 1 where they
            say 0.
        gamma, width, rule, seed, ban_sequence, constraint: as ``specjax.generate`` takes them.
        quick: fewer prompts and draws.
        on_stage: called with each stage's name before it begins.

    Returns:
        ``{"schema", "verdict": "lossless" or "loss", "settings", "stages": [...]}``, as docs/verify.md describes it.

    Raises:
        UsageError: no draft, a gamma below 1, rule greedy, or fewer than two prompts.

    Example:
        report = prove(specjax.load(target="smollm2-135m", draft="ngram"), quick=True)
        assert report["verdict"] == "lossless"
    """
    length = plan(gamma, pair.gamma, pair.draft.name, width, pair.target.dtype).gamma
    asked: Gamma = AUTO if AUTO in (gamma, pair.gamma if gamma is None else None) else length
    if pair.draft.name == "none":
        raise UsageError("There is no draft to verify: give --draft.")
    if rule_for(rule).greedy:
        raise UsageError("Rule greedy is what every rule does at temperature 0: give rejection, block or coupled.")
    if len(prompts or PROMPTS) < 2:
        raise UsageError("One prompt is too little to compare on: give two or more.")
    if length < 1:
        raise UsageError(f"gamma is {length}; expected at least 1.")
    options = Options(sampling=sampling, ban_sequence=ban_sequence, constraint=constraint)
    check(pair, options)
    ids, settings = stages.ids_of(pair.target, prompts or _default(pair)), spelled(options, pair.target).sampling
    if quick and asked != AUTO:
        width = width or default_width(length, pair.target.dtype)  # the ragged batch needs one: fewer programs
    case = Case(pair, ids, settings, asked, length, width, rule, seed, quick, constraint)
    found = [_run(name, stage, case, on_stage) for name, stage in STAGES.items()]
    return {
        "schema": SCHEMA,
        "verdict": LOSSLESS if all(stage.passed for stage in found) else LOSS,
        "settings": {
            "target": pair.target.name,
            "draft": pair.draft.name,
            "dtype": pair.target.dtype,
            "gamma": asked,
            "width": case.width,
            "rule": rule if isinstance(rule, str) else rule.name,
            "seed": seed,
            "quick": quick,
            "num_prompts": len(case.prompts),
            "sampling": dataclasses.asdict(sampling),
        },
        "stages": [dataclasses.asdict(stage) for stage in found],
    }


def _run(name: str, stage: Callable[[Case], Found], case: Case, on_stage: Callable[[str], None] | None) -> Stage:
    if on_stage:
        on_stage(name)
    began = time.perf_counter()
    try:
        found = stage(case)
    except UsageError:
        raise
    except (SpecjaxError, AssertionError) as error:  # a broken invariant, a row that failed
        found = Found(False, str(error).splitlines()[0])
    return Stage(name, found.passed, found.saw, found.details, time.perf_counter() - began, found.numbers)


def _default(pair: Pair) -> Sequence[str | Sequence[int]]:
    if pair.target.tokenizer is not None:
        return PROMPTS
    vocab = pair.target.vocab_size
    return [[(7 * i + 13 * j * j) % vocab for j in range(4 + i)] for i in range(len(PROMPTS))]
