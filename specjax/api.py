"""The library's front door: prompts in, texts, log-probabilities and statistics out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from specjax import stats
from specjax.engine import Engine, Request, Result
from specjax.generate import Program
from specjax.pair import SPECULATION_ON, Pair, first_line, unusable
from specjax.requests import Job, Options, Refused, as_rows, check, default_width, effective_gamma, jobs_of
from specjax.rows import BadRow, Row
from specjax.sampling import features_of
from specjax.text import StopFinder
from specjax.types import Finish, Status
from specjax.verify import RULES, rule_for


@dataclasses.dataclass(frozen=True)
class Output:
    """One finished row.

    Attributes:
        id: of its row.
        sample: 0..N-1.
        text: EOS and stop string left out; None without a tokenizer.
        ids: the new tokens, with the EOS or the token that completes a stop.
        finish_reason: "eos", "stop", "length" or "error".
        stats: see ``specjax.stats.row_stats``.
        logprobs: natural logs under the target's raw softmax, one per id, or None when not asked for.
        sampled_logprobs: the same as sampled, after all transforms.
        top_logprobs: per id the N most probable tokens under the raw softmax, ``[id, logprob]`` each, or None.
        error: what went wrong, or None.
    """

    id: int | str | None
    sample: int
    text: str | None
    ids: list[int]
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[float] | None = None
    sampled_logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    error: str | None = None


def generate(
    pair: Pair,
    prompts: str | Row | Sequence[str | Sequence[int] | dict[str, Any] | Row | BadRow],
    *,
    on_output: Callable[[Output], None] | None = None,
    on_text: Callable[[int | str | None, str], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    on_seconds: Callable[[str, float], None] | None = None,
    **options: Any,
) -> list[Output]:
    """Generate for each prompt, speculatively, with exactly the target's distribution.

    Args:
        pair: from ``specjax.load``.
        prompts: each one a text, a list of ids, or a dict as a line of ``generate --input`` has it
            (``{"messages": [...], "temperature": 0.7}``). A text goes through the chat template where there is one.
        on_output: called with each row as it finishes, in any order.
        on_text: called with (id, text) as text becomes final; joined they are the row's text. Needs a tokenizer.
        on_tokens: called with the number of new tokens after each chunk of rounds.
        on_seconds: called with ("prefill" or "decode", seconds) after each; the host waits for the device.
        **options: fields of ``specjax.requests.Options``, such as ``gamma=4``, ``sampling=SamplingParams(...)``.

    Returns:
        One Output per prompt and sample, in the order of the prompts. A row that cannot be served has
        ``finish_reason`` "error" and says why; the others go on.

    Raises:
        UsageError: an option that cannot be honoured.

    Example:
        out = specjax.generate(pair, ["Name three colours."], gamma=4, max_new_tokens=32)
        print(out[0].text, out[0].stats["mean_acceptance_length"])
    """
    call = _Call(pair, Options(**options), on_output, on_text, on_tokens, on_seconds)
    return call.run(as_rows(prompts, pair.target, raw=call.options.raw))


@dataclasses.dataclass
class _Watch:
    """Streams one row's text and finds its stop strings."""

    finder: StopFinder
    eos: frozenset[int]
    show: Callable[[str], None] | None

    def push(self, ids: Sequence[int]) -> int | None:
        if ids and ids[-1] in self.eos:
            ids = ids[:-1]
        self.say(self.finder.push(ids))
        return None if self.finder.stop_index is None else self.finder.stop_index + 1

    def say(self, text: str) -> None:
        if self.show and text:
            self.show(text)


class _Call:
    """One call of generate."""

    def __init__(self, pair: Pair, options: Options, on_output, on_text, on_tokens, on_seconds):
        self.pair, self.options = pair, options
        self.on_output, self.on_text, self.on_tokens, self.on_seconds = on_output, on_text, on_tokens, on_seconds
        self.draft = pair.draft
        self.outputs: dict[int, Output] = {}
        self.watches: dict[int, _Watch] = {}
        check(pair, options)

    def run(self, rows: list[Row | BadRow]) -> list[Output]:
        jobs: list[Job] = []
        for job in jobs_of(rows, self.pair.target, self.options):
            if isinstance(job, Refused):
                none = stats.row_stats([], [], [], speculation=self._speculation())
                self._finish(job.index, Output(job.row.id, job.sample, None, [], "error", none, error=job.reason))
            else:
                jobs.append(job)
        while jobs:
            try:
                self._decode(jobs)
            except jax.errors.JaxRuntimeError as error:
                self._give_up_draft(jobs, error)
            jobs = [job for job in jobs if job.index not in self.outputs]
        return [self.outputs[index] for index in sorted(self.outputs)]

    def _give_up_draft(self, jobs: list[Job], error: Exception) -> None:
        """Go on without the draft when memory ran out; raise where that cannot help or would change shown text."""
        begun = [job for job in jobs if job.index not in self.outputs and job.index in self.watches]
        shown = self.on_text is not None and any(self.watches[job.index].finder.text for job in begun)
        if "RESOURCE_EXHAUSTED" not in str(error) or self.draft.speculation != SPECULATION_ON or shown:
            raise error
        reason = f"ran out of memory: {first_line(error)}"
        self.draft = unusable(self.draft.name, reason, self.options.require_draft)

    def _decode(self, jobs: list[Job]) -> None:
        """Run jobs through one engine until all are finished."""
        options, target = self.options, self.pair.target
        rule = rule_for(options.rule)
        if rule.lossless and all(job.prompt.sampling.greedy for job in jobs):
            rule = RULES["greedy"]
        gamma = self._gamma()
        program = compiled(
            target.fn,
            self.draft.drafter,
            rule=rule,
            gamma=gamma,
            vocab_size=target.vocab_size,
            width=options.width or default_width(gamma, target.dtype),
            check=options.check,
            logprobs=options.logprobs or options.top_logprobs > 0,
            top_logprobs=options.top_logprobs,
            features=features_of((job.prompt.sampling for job in jobs), options.constraint),
            num_eos=max(4, max(len(job.prompt.eos) for job in jobs)),
        )
        engine = Engine(
            program,
            {"target": target.params, "draft": self.draft.params},
            batch_size=min(options.batch_size, len(jobs)),
            longest=max(job.prompt.limit for job in jobs),
            on_seconds=self.on_seconds,
        )
        requests = (Request(job, job.prompt, self._watch(job)) for job in jobs)
        for result in engine.run(requests, chunk=options.chunk, on_chunk=self.on_tokens):
            self._finish(result.key.index, self._output(result.key, result, gamma))

    def _gamma(self) -> int:
        return effective_gamma(self.pair, self.draft, self.options.gamma)

    def _speculation(self) -> str:
        on = self.draft.speculation == SPECULATION_ON
        return "off: gamma is 0" if on and self._gamma() == 0 else self.draft.speculation

    def _watch(self, job: Job) -> _Watch | None:
        tokenizer = self.pair.target.tokenizer
        if tokenizer is None or not (job.stops or self.on_text):
            return None
        show = functools.partial(self.on_text, job.row.id) if self.on_text else None
        least = job.prompt.sampling.min_new_tokens
        watch = _Watch(StopFinder(job.stops, tokenizer.stream(), least=least), frozenset(job.prompt.eos), show)
        self.watches[job.index] = watch
        return watch

    def _output(self, job: Job, result: Result, gamma: int) -> Output:
        if broken := result.status & ~_FAULTS:
            raise AssertionError(f"Row {job.row.id!r}: an invariant is broken: {broken!r}. Please report it.")
        ids = result.ids.tolist()
        speculation = self._speculation()
        if not result.draft_on and speculation == SPECULATION_ON:
            speculation = self._draft_not_finite()
        error = None
        if result.status & Status.NOTHING_ALLOWED:
            error = f"No token is allowed at new token {len(ids) + 1}: loosen bans, allow-list or constraint."
        elif result.finish == Finish.ERROR:
            error = f"The target's logits are not finite at new token {len(ids) + 1}: check its weights and dtype."
        counted = stats.row_stats(result.place, result.accepted, result.drafted, speculation=speculation, gamma=gamma)
        if not rule_for(self.options.rule).lossless:
            counted["lossless"] = False
        return Output(
            id=job.row.id,
            sample=job.sample,
            text=self._text(job, ids, result.finish),
            ids=ids,
            finish_reason="stop" if result.finish == Finish.CANCELLED else result.finish.name.lower(),
            stats=counted,
            logprobs=None if result.logprobs is None else result.logprobs.tolist(),
            sampled_logprobs=None if result.sampled_logprobs is None else result.sampled_logprobs.tolist(),
            top_logprobs=_top(result),
            error=error,
        )

    def _draft_not_finite(self) -> str:
        """Warn once a call (raise under ``require_draft``); return what the row's stats say."""
        reason = "gave logits that are not finite."
        if not any("not finite" in output.stats["speculation"] for output in self.outputs.values()):
            unusable(self.draft.name, reason, self.options.require_draft)
        return f"off: draft {reason}"

    def _text(self, job: Job, ids: list[int], finish: Finish) -> str | None:
        tokenizer, watch = self.pair.target.tokenizer, self.watches.get(job.index)
        if tokenizer is None:
            return None
        if watch is None:
            return tokenizer.decode(ids[:-1] if finish == Finish.EOS else ids)
        watch.say(watch.finder.flush())
        return watch.finder.text

    def _finish(self, index: int, output: Output) -> None:
        self.watches.pop(index, None)
        self.outputs[index] = output
        if self.on_output:
            self.on_output(output)


# What a row can have without a fault of ours.
_FAULTS = Status.TARGET_NOT_FINITE | Status.DRAFT_NOT_FINITE | Status.NOTHING_ALLOWED


def _top(result: Result) -> list[list[tuple[int, float]]] | None:
    if result.top_ids is None or result.top_logprobs is None:
        return None
    pairs = zip(result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True)
    return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


# Programs are kept for the process: a second call with the same parts compiles nothing.
compiled = functools.lru_cache(maxsize=32)(Program)

__all__ = ["Options", "Output", "generate"]
