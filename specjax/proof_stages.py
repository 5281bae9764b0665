"""The stages of ``specjax verify``: each compares speculative with plain decoding in one way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import proof_stats as ps
from specjax.api import Output, generate
from specjax.errors import RowError
from specjax.pair import Model, Pair, no_draft
from specjax.prefill import bucket
from specjax.proof_rule import first_tokens
from specjax.reference_transforms import sampled, shaped
from specjax.rows import Row
from specjax.sampling import SamplingParams
from specjax.speculation import AUTO, Gamma, default_width
from specjax.types import Constraint, ModelFn, Rule

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}  # between the two largest logits at a first difference
SAME = 2e-3  # between log-probabilities of one width, computed in two ways
FALSE_ALARM = 1e-5
_WITH_LOGPROBS = {"check": True, "logprobs": True, "batch_size": 1}
Groups = list[tuple[list[list[int]], list[list[int]]]]  # texts of one prompt: plain, speculative
# New tokens of rows in a ragged batch.
_ROW_LENGTHS = (1, 2, 9, 17, 24, 40)
_QUICK_ROW_LENGTHS = (1, 2, 9, 5, 12, 20)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is to be proved.

    Attributes:
        pair: target and draft.
        prompts: ids.
        settings: how the user samples.
        asked, given_width, rule, seed: gamma, width, rule and seed as ``specjax.generate`` takes them.
        gamma: the most tokens drafted per round.
        quick: fewer prompts and draws.
        constraint: as ``specjax.generate`` takes it.
    """

    pair: Pair
    prompts: list[list[int]]
    settings: SamplingParams
    asked: Gamma
    gamma: int
    given_width: int | None
    rule: str | Rule
    seed: int
    quick: bool
    constraint: Constraint | None = None

    @property
    def width(self) -> int:
        """Rows of a verifying step."""
        return self.given_width or default_width(self.gamma, self.pair.target.dtype)

    @property
    def cold(self) -> SamplingParams:
        """The settings at temperature 0."""
        return dataclasses.replace(self._short, temperature=0.0, draft_temperature=None)

    @property
    def hot(self) -> SamplingParams:
        """The settings at the user's temperature, or 1."""
        return dataclasses.replace(self._short, temperature=self.settings.temperature or 1.0)

    @property
    def _short(self) -> SamplingParams:
        """The settings for rows of a few tokens."""
        return dataclasses.replace(self.settings, min_new_tokens=min(self.settings.min_new_tokens, 2))

    @property
    def long_prompt(self) -> int:
        """Tokens of the long context."""
        return min(400 if self.quick else 1500, self.pair.target.max_positions - 40)

    def run(
        self, rows: Sequence[Row], sampling: SamplingParams, *, plain: bool = False, **options: Any
    ) -> list[Output]:
        """Generate with the draft, or without.

        Raises:
            RowError: a row failed, or its draft was switched off.
        """
        pair = dataclasses.replace(self.pair, draft=no_draft()) if plain else self.pair
        if plain:
            sampling = sampling.without_draft
        if self.quick and options["batch_size"] == 1:  # the long context's programs serve all: compiling is most of it
            options["cache_length"] = self.long_prompt + max(row.max_new_tokens or 0 for row in rows)
        outputs = generate(
            pair, rows, sampling=sampling, gamma=self.asked, width=self.given_width, rule=self.rule, seed=self.seed,
            require_draft=not plain, constraint=self.constraint, **options,
        )  # fmt: skip
        for out in outputs:
            if out.error is not None:
                raise RowError(f"row {out.id} failed: {out.error}")
            if not plain and out.stats["speculation"] != "on":
                raise RowError(f"row {out.id} was decoded without its draft: {out.stats['speculation']}")
        return outputs

    def scores(self, raw: np.ndarray, sampling: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
        """Return the logits [V] after ``output``, shaped in plain NumPy."""
        allowed = None
        if self.constraint is not None:
            mask, state = self.constraint.step(self.constraint.init(), jnp.int32(-1))
            for token in output:
                mask, state = self.constraint.step(state, jnp.int32(token))
            allowed = np.asarray(mask)
        return shaped(raw, sampling, prompt, output, eos=self.pair.target.eos_ids, allowed=allowed)


@dataclasses.dataclass(frozen=True)
class Found:
    """What a stage found: whether nothing is lost, a line, further lines, and numbers for the JSON."""

    passed: bool
    saw: str
    details: list[str] = dataclasses.field(default_factory=list)
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)


def ids_of(target: Model, prompts: Sequence[str | Sequence[int]]) -> list[list[int]]:
    """Return prompts as ids; texts are raw."""
    from specjax.requests import prompt_ids

    rows = [Row(i, i, prompt=x) if isinstance(x, str) else Row(i, i, prompt_ids=x) for i, x in enumerate(prompts, 1)]
    return [prompt_ids(row, target) for row in rows]


def rows_of(prompts: Sequence[Sequence[int]], max_new: int | Sequence[int], **fields: Any) -> list[Row]:
    """Return prompts as rows."""
    lengths = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
    return [
        Row(i, i, prompt_ids=ids, max_new_tokens=length, **fields)
        for i, (ids, length) in enumerate(zip(prompts, lengths, strict=True), 1)
    ]


def small(case: Case) -> Found:
    """Run short prompts with every invariant checked inside the loop."""
    prompts = [case.prompts[0][:1], case.prompts[1][:3], case.prompts[2]]
    length = 8 if case.quick else 12
    rows = rows_of(prompts, length)
    # Later stages use these two programs again.
    runs = [case.run(rows, case.cold, check=True, batch_size=1), case.run(rows, case.hot, **_WITH_LOGPROBS)]
    outputs = [out for run in runs for out in run]
    drafted = sum(out.stats["num_draft_tokens"] for out in outputs)
    accepted = sum(out.stats["num_accepted_tokens"] for out in outputs)
    for out in outputs:
        whole = len(out.ids) == length and out.finish_reason != "eos"
        if len(out.ids) > length or (out.finish_reason == "length") != whole:
            raise RowError(f"row {out.id} has {len(out.ids)} tokens and ends with {out.finish_reason!r}")
    return Found(
        True,
        f"{len(outputs)} rows, every invariant held; {accepted} of {drafted} drafts accepted",
        numbers={"num_rows": len(outputs), "num_draft_tokens": drafted, "num_accepted_tokens": accepted},
    )


def greedy(case: Case) -> Found:
    """Compare greedy text token by token; a first difference must be a near-tie."""
    prompts = case.prompts[: 3 if case.quick else 8]
    return _same_text(case, prompts, 24 if case.quick else 64)


def long_context(case: Case) -> Found:
    """The same after a long prompt."""
    length = case.long_prompt
    text = list(itertools.islice(itertools.cycle(itertools.chain(*case.prompts)), length))
    found = _same_text(case, [text], 16 if case.quick else 24)
    return dataclasses.replace(found, saw=f"{length} tokens of prompt: {found.saw}")


def _same_text(case: Case, prompts: list[list[int]], max_new: int) -> Found:
    rows = rows_of(prompts, max_new)
    plain = case.run(rows, case.cold, plain=True, batch_size=1)
    ours = case.run(rows, case.cold, check=True, batch_size=1)
    details, lost = _differences(case, prompts, [out.ids for out in plain], ours)
    compared, equal = sum(len(out.ids) for out in plain), len(prompts) - len(details)
    return Found(
        not lost,
        f"{equal} of {len(prompts)} texts equal, {compared} tokens, {len(details) - lost} near-ties",
        details,
        {"num_prompts": len(prompts), "num_equal": equal, "num_tokens": compared, "num_near_ties": len(details) - lost},
    )


def _differences(
    case: Case, prompts: list[list[int]], expected: list[list[int]], outputs: list[Output]
) -> tuple[list[str], int]:
    """Return a line for each text's first difference, and how many of them are no near-ties."""
    details, lost = [], 0
    for prompt, ids, out in zip(prompts, expected, outputs, strict=True):
        pairs = itertools.zip_longest(ids, out.ids)
        first = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), None)
        if first is None:
            continue
        gap = _gap(case, prompt, ids[: first[0]])
        near = gap <= NEAR_TIE[case.pair.target.dtype] and None not in first
        lost += not near
        details.append(
            f"prompt {out.id}, new token {first[0] + 1}: {first[1]} expected, got {first[2]}, the two likeliest "
            f"{gap:.2g} apart: {'a near-tie' if near else 'a loss'}"
        )
    return details, lost


def _gap(case: Case, prompt: list[int], output: list[int]) -> float:
    raw = raw_logits(case.pair.target, [*prompt, *output], 1)[-1]
    scores = np.sort(case.scores(raw, case.cold, prompt, output))
    return float(scores[-1] - scores[-2]) if np.isfinite(scores[-2]) else float("inf")


def identity(case: Case) -> Found:
    """Compare the probabilities that verification used with plain ones, position by position; then try the rule.

    Where p is right, accepted drafts and corrections together must have the law p: q min(1, p/q) + (p - q)_+ = p.
    """
    target, prompts = case.pair.target, case.prompts[: 2 if case.quick else 4]
    if case.asked == AUTO:  # its several widths round differently
        case = dataclasses.replace(case, given_width=case.width)
    outputs = case.run(rows_of(prompts, 24), case.hot, **_WITH_LOGPROBS)
    worst, positions, edges, details, laws = 0.0, 0, 0, [], []
    for prompt, out in zip(prompts, outputs, strict=True):
        raw = raw_logits(target, [*prompt, *out.ids], case.width)[len(prompt) - 1 :].astype(np.float64)
        for i, token in enumerate(out.ids):
            plain = raw[i][token] - np.logaddexp.reduce(raw[i])
            p = sampled(case.scores(raw[i], case.hot, prompt, out.ids[:i]), case.hot)
            with np.errstate(divide="ignore"):
                as_sampled = float(np.log(p[token]))
            off = abs(out.logprobs[i] - plain) if out.logprobs else 0.0
            edge = abs(out.sampled_logprobs[i] - as_sampled) if out.sampled_logprobs else 0.0
            worst, positions = max(worst, off), positions + 1
            if off > SAME:
                details.append(f"prompt {out.id}, new token {i + 1}: log p is {off:.2g} off")
            edges += not edge <= max(SAME, 10 * SAME / case.hot.temperature)
            laws.append(p)
    # A token at the edge of a truncated set may fall on either side of it; many such positions are no accident.
    too_many = edges > max(1, positions // 50)
    if too_many:
        details.append(f"{edges} of {positions} positions differ after the transforms")
    rule = _rule_test(case, laws)
    wrong = rule.p_value < FALSE_ALARM
    if wrong:
        details.append(f"the rule's first token does not have the target's law: p = {rule.p_value:.1g}")
    return Found(
        not (details or wrong),
        f"{positions} positions, log p within {worst:.1g}; rule {rule.name} on them: {rule.draws} draws, "
        f"p = {rule.p_value:.2g}, sees {rule.effect or 0:.1%}",
        details[:10],
        {"num_positions": positions, "worst": worst, "num_edges": edges, "rule": dataclasses.asdict(rule)},
    )


def _rule_test(case: Case, laws: list[np.ndarray]) -> ps.Comparison:
    """Draw first tokens by the rule, on real p and on drafts with another real position's law as q."""
    count = min(len(laws) - 1, 8 if case.quick else 24)
    pairs = [(laws[i], 0.5 * laws[i] + 0.5 * laws[i + 1]) for i in range(count)]
    n = 4000 if case.quick else 8000
    return ps.against(
        case.rule if isinstance(case.rule, str) else case.rule.name,
        first_tokens(case.rule, pairs, min(case.gamma, 4), n, case.seed),
    )


def sampling(case: Case) -> Found:
    """Compare the statistics of sampled texts, speculative against plain."""
    prompts, samples, length = (case.prompts[:2], 40, 5) if case.quick else (case.prompts[:4], 200, 8)
    rows = rows_of(prompts, length)
    # Draws of their own on both sides: one seed would make the first tokens the same ones.
    plain, ours = (
        [out.ids for out in dataclasses.replace(case, seed=case.seed + i).run(
            rows, case.hot, plain=i == 1, samples=samples, batch_size=8)]
        for i in (1, 2)
    )  # fmt: skip
    groups = [(plain[i : i + samples], ours[i : i + samples]) for i in range(0, len(plain), samples)]
    eos = set(case.pair.target.eos_ids)
    found = [
        ps.compare("first token", _each(groups, lambda ids: ids[0])),
        ps.compare("token after a prefix", _after_prefixes(groups)),
        ps.compare("pairs of tokens", [(_one_pair(a, length), _one_pair(b, length)) for a, b in groups]),
        ps.compare("length", _each(groups, len)),
        ps.compare("EOS", _each(groups, lambda ids: ids[-1] in eos)),
    ]
    lost = [each for each in found if each.p_value < FALSE_ALARM / len(found)]
    return Found(
        not lost,
        f"{len(plain)} texts a side; least p = {min(each.p_value for each in found):.2g} of {len(found)} statistics",
        [
            f"{each.name}: p = {each.p_value:.2g} ({each.draws} draws a side, {each.cells} cells, "
            + (f"sees {each.effect:.1%})" if each.effect else "no freedom)")
            for each in found
        ],
        {"statistics": [dataclasses.asdict(each) for each in found]},
    )


def _each(groups: Groups, feature: Callable[[list[int]], Hashable]) -> list[tuple[list[Hashable], list[Hashable]]]:
    return [([feature(ids) for ids in a if ids], [feature(ids) for ids in b if ids]) for a, b in groups]


def _after_prefixes(groups: Groups) -> list[tuple[list[int], list[int]]]:
    """Return the second tokens after each first token that both sides have."""
    found = []
    for a, b in groups:
        shared = {ids[0] for ids in a if len(ids) > 1} & {ids[0] for ids in b if len(ids) > 1}
        for first in sorted(shared):
            seconds = [[ids[1] for ids in side if len(ids) > 1 and ids[0] == first] for side in (a, b)]
            found.append((seconds[0], seconds[1]))
    return found


def _one_pair(texts: list[list[int]], length: int) -> list[tuple[int, ...]]:
    """Return one pair of neighbours of each text, so that draws are independent: places 2, 4, ..., 2, 4, ..."""
    places = itertools.cycle(range(2, length - 1, 2))
    return [tuple(ids[place : place + 2]) for ids, place in zip(texts, places, strict=False)]


def ragged(case: Case) -> Found:
    """Run rows of many lengths together, some of them stopped in the middle, and compare with each alone."""
    lengths = list(_QUICK_ROW_LENGTHS if case.quick else _ROW_LENGTHS)
    prompts = [case.prompts[i % len(case.prompts)][: 1 + 5 * i] for i in range(len(lengths))]
    case = dataclasses.replace(case, given_width=case.width)  # at one width a row has the same bits in any batch
    alone = case.run(rows_of(prompts, lengths), case.cold, check=True, batch_size=1)
    rows = rows_of(prompts, lengths)
    expected = [out.ids for out in alone]
    cut = {i: ids[len(ids) // 2] for i, ids in enumerate(expected) if i % 3 == 2 and len(ids) > 4}
    for i, token in cut.items():
        rows[i] = dataclasses.replace(rows[i], eos=[token])
        expected[i] = expected[i][: expected[i].index(token) + 1]
    together = case.run(rows, case.cold, batch_size=4, check=True, chunk=3)
    details, lost = _differences(case, prompts, expected, together)
    equal = len(rows) - len(details)
    return Found(
        not lost,
        f"{equal} of {len(rows)} rows as alone at width {case.width}, {len(cut)} of them cut short",
        details,
        {"num_rows": len(rows), "num_equal": equal, "num_cut": len(cut)},
    )


def raw_logits(target: Model, ids: Sequence[int], width: int) -> np.ndarray:
    """Return the target's logits [T, V] after each id, by plain steps of ``width`` tokens."""
    size = -(-bucket(len(ids)) // width) * width
    tokens = np.zeros((1, size), np.int32)
    tokens[0, : len(ids)] = ids
    run = _forced(target.fn, target.vocab_size, width)
    return np.asarray(run(target.params, tokens))[: len(ids)]


@functools.lru_cache(maxsize=8)
def _forced(model_fn: ModelFn, vocab_size: int, width: int):
    @jax.jit
    def run(params, tokens: jax.Array) -> jax.Array:
        size = tokens.shape[1]

        def step(cache, part):
            out = model_fn(params, part[None], cache, logits="all")
            assert out.logits is not None
            return out.cache, out.logits[0, :, :vocab_size]

        parts = tokens[0].reshape(-1, width)
        _, logits = lax.scan(step, model_fn.init_cache(1, size), parts)
        return logits.reshape(size, vocab_size)

    return run
