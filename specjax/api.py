"""The library's front door: prompts in, texts, log-probabilities and statistics out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax import stats, tune
from specjax.distributed import CHUNK
from specjax.engine import Engine, Request, Result
from specjax.engine_slot import DEVICE_ERRORS, out_of_memory
from specjax.generate import Program, Prompt
from specjax.outputs import RowWriter, result_row
from specjax.pair import SPECULATION_ON, Pair, first_line, unusable
from specjax.requests import Job, Options, Refused, as_rows, check, jobs_of, longest_of, plan_of, shared_prefix
from specjax.rows import BadRow, Row, row_name
from specjax.sampling import features_of
from specjax.speculation import Plan
from specjax.text import StopFinder
from specjax.trace import Traced, Tracer
from specjax.types import Finish, Rule, Status
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
        index: its place among the rows and samples asked for.
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
    index: int = 0

    def record(self, *, numbered: bool) -> dict[str, Any]:
        """Return the row as ``generate`` writes it; ``numbered`` gives it its sample."""
        return result_row(
            self.id,
            text=self.text,
            ids=self.ids,
            finish_reason=self.finish_reason,
            stats=self.stats,
            error=self.error,
            sample=self.sample if numbered else None,
            logprobs=self.logprobs,
            sampled_logprobs=self.sampled_logprobs,
            top_logprobs=self.top_logprobs,
        )


def generate(
    pair: Pair,
    prompts: str | Row | Sequence[str | Sequence[int] | dict[str, Any] | Row | BadRow],
    *,
    on_output: Callable[[Output], None] | None = None,
    on_text: Callable[[int | str | None, str], None] | None = None,
    on_tokens: Callable[[int], None] | None = None,
    on_ids: Callable[[int | str | None, int, list[int]], None] | None = None,
    on_seconds: Callable[[str, float], None] | None = None,
    trace: str | Path | Callable[[dict[str, Any]], None] | None = None,
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
        on_ids: called with (id, sample, new ids) as they reach the host; with no ids when a row is taken up.
        on_seconds: called with ("prefill" or "decode", seconds) after each; the host waits for the device.
        trace: a file, or a function, that takes a record of each round and row (docs/trace.md).
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
    outputs = []
    with contextlib.ExitStack() as stack:
        if isinstance(trace, str | Path):
            trace = stack.enter_context(RowWriter(trace)).write
        call = Call(
            pair, Options(trace=trace, **options), on_text=on_text, on_tokens=on_tokens, on_ids=on_ids,
            on_seconds=on_seconds,
        )  # fmt: skip
        for output in call.run(as_rows(prompts, pair.target, raw=call.options.raw)):
            outputs.append(output)
            if on_output:
                on_output(output)
    return sorted(outputs, key=lambda output: output.index)


@dataclasses.dataclass
class _Watch:
    """Streams one row's ids and text, and finds its stop strings."""

    finder: StopFinder | None
    eos: frozenset[int]
    show: Callable[[str], None] | None
    show_ids: Callable[[list[int]], None] | None

    def push(self, ids: Sequence[int]) -> int | None:
        if self.show_ids:
            self.show_ids(list(ids))
        if self.finder is None:
            return None
        if ids and ids[-1] in self.eos:
            ids = ids[:-1]
        self.say(self.finder.push(ids))
        return None if self.finder.stop_index is None else self.finder.stop_index + 1

    def say(self, text: str) -> None:
        if self.show and text:
            self.show(text)


class Call:
    """One call of generate: rows in, outputs out as they finish; it keeps none of them.

    Args:
        pair, options: what to run.
        on_text, on_tokens, on_ids, on_seconds: as ``generate`` takes them.

    Raises:
        UsageError: an option that cannot be honoured.
    """

    def __init__(self, pair: Pair, options: Options, *, on_text=None, on_tokens=None, on_ids=None, on_seconds=None):
        self.pair, self.options = pair, options
        self._engines: list[Engine] = []
        self._on_text, self._on_tokens, self._on_ids, self._on_seconds = on_text, on_tokens, on_ids, on_seconds
        self._draft = pair.draft
        self._draft_broken = False
        self._watches: dict[int, _Watch] = {}
        self._tracer = Tracer(options.trace) if options.trace else None
        check(pair, options)

    def faults(self) -> dict[str, int]:
        """Count what did not go smoothly: errors of the device, and rows put back from their confirmed ids."""
        names = ("num_failures", "num_rebuilt")
        return {name: sum(getattr(engine, name) for engine in self._engines) for name in names}

    def wasted(self) -> dict[str, int]:
        """Count what was computed past the ends of rows that a stop ended."""
        names = ("num_tokens", "num_draft_tokens")
        return {name: sum(getattr(engine.waste, name) for engine in self._engines) for name in names}

    def run(
        self,
        rows: Sequence[Row | BadRow],
        *,
        done: Container[tuple[str, int]] = (),
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Output]:
        """Yield each row and sample as it finishes.

        Args:
            rows: what to answer.
            done: names (``specjax.rows.row_name``) to leave out.
            stop: asked between chunks of rounds; True ends the run.
        """
        jobs: dict[int, Job] = {}
        for job in jobs_of(rows, self.pair.target, self.options):
            if row_name(job.row, job.sample) in done:
                continue
            if isinstance(job, Refused):
                none = stats.row_stats([], [], [], speculation=self._speculation())
                yield Output(job.row.id, job.sample, None, [], "error", none, error=job.reason, index=job.index)
            else:
                jobs[job.index] = job
        while jobs and not (stop and stop()):
            try:
                for output in self._decode(list(jobs.values()), stop):
                    del jobs[output.index]
                    yield output
            except DEVICE_ERRORS as error:
                self._give_up_draft(error)

    def _give_up_draft(self, error: Exception) -> None:
        """Go on without the draft when memory ran out before the first tokens; raise where that cannot help."""
        if self.pair.layout.spans_processes or not out_of_memory(error) or self._draft.speculation != SPECULATION_ON:
            raise error
        reason = f"ran out of memory: {first_line(error)}"
        self._draft = unusable(self._draft.name, reason, self.options.require_draft)

    def _decode(self, jobs: list[Job], stop: Callable[[], bool] | None) -> Iterator[Output]:
        """Run jobs through one engine until all are finished."""
        options, target = self.options, self.pair.target
        pair, plan = dataclasses.replace(self.pair, draft=self._draft), self._plan()
        prompts = [job.prompt for job in jobs]
        rule, program = _rule_of(options, prompts), program_for(pair, options, prompts)
        if self._tracer is not None:
            assert isinstance(program, Traced)
            program = program.reporting(self._tracer.take)
        params: dict[str, Any] = {"target": target.params, "draft": self._draft.params}
        batch_size = self.pair.layout.rows(min(options.batch_size, len(jobs)))
        longest = longest_of(options, prompts)
        if plan.controller is not None:
            key = tune.key_of(params, self._draft.kind, rule.name, batch_size, plan.widths)
            params["costs"] = tune.costs_for(program, params, key, longest=longest, sampling=prompts[0].sampling)
        engine = Engine(
            program,
            params,
            batch_size=batch_size,
            longest=longest,
            prefix=shared_prefix([list(prompt.ids) for prompt in prompts]) if options.prefix else (),
            draft_can_go=self._draft.speculation == SPECULATION_ON,
            on_seconds=self._on_seconds,
        )
        requests = (Request(job, job.prompt, self._watch(job)) for job in jobs)
        with engine:
            self._engines.append(engine)
            chunk = options.chunk or (CHUNK if self.pair.layout.spans_processes else None)
            chunk = 1 if self._tracer else chunk
            for result in engine.run(requests, chunk=chunk, on_chunk=self._on_tokens, stop=stop):
                if self._tracer is not None:
                    job: Job = result.key
                    self._tracer.finish(job.prompt.key, job.row.id, job.sample, len(result.ids))
                yield self._output(result.key, result, plan.gamma)

    def _plan(self) -> Plan:
        return plan_of(self.pair, self._draft, self.options)

    def _speculation(self) -> str:
        on = self._draft.speculation == SPECULATION_ON
        return "off: gamma is 0" if on and self._plan().gamma == 0 else self._draft.speculation

    def _watch(self, job: Job) -> _Watch | None:
        tokenizer = self.pair.target.tokenizer
        finds = tokenizer is not None and bool(job.stops or self._on_text)
        if not (finds or self._on_ids):
            return None
        show = functools.partial(self._on_text, job.row.id) if self._on_text else None
        show_ids = functools.partial(self._on_ids, job.row.id, job.sample) if self._on_ids else None
        finder = None
        if tokenizer is not None and finds:
            finder = StopFinder(job.stops, tokenizer.stream(), least=job.prompt.sampling.min_new_tokens)
        watch = self._watches[job.index] = _Watch(finder, frozenset(job.prompt.eos), show, show_ids)
        if show_ids:
            show_ids([])
        return watch

    def _output(self, job: Job, result: Result, gamma: int) -> Output:
        if broken := result.status & ~_FAULTS:
            raise AssertionError(f"Row {job.row.id!r}: an invariant is broken: {broken!r}. Please report it.")
        ids = result.ids.tolist()
        speculation = self._speculation()
        if not result.draft_on and speculation == SPECULATION_ON:
            speculation = self._draft_not_finite()
        error = result.error
        if result.status & Status.NOTHING_ALLOWED:
            error = f"No token is allowed at new token {len(ids) + 1}: loosen bans, allow-list or constraint."
        elif result.finish == Finish.ERROR and error is None:
            error = f"The target's logits are not finite at new token {len(ids) + 1}: check its weights and dtype."
        counted = stats.row_stats(result.place, result.accepted, result.drafted, speculation=speculation, gamma=gamma)
        if not rule_for(self.options.rule).lossless:
            counted["lossless"] = False
        return Output(
            id=job.row.id,
            sample=job.sample,
            text=self._text(job, ids, result.finish),
            ids=ids,
            finish_reason=result.finish.name.lower(),
            stats=counted,
            logprobs=None if result.logprobs is None else result.logprobs.tolist(),
            sampled_logprobs=None if result.sampled_logprobs is None else result.sampled_logprobs.tolist(),
            top_logprobs=_top(result),
            error=error,
            index=job.index,
        )

    def _draft_not_finite(self) -> str:
        """Warn once a call (raise under ``require_draft``); return what the row's stats say."""
        reason = "gave logits that are not finite."
        if not self._draft_broken:
            self._draft_broken = True
            unusable(self._draft.name, reason, self.options.require_draft)
        return f"off: draft {reason}"

    def _text(self, job: Job, ids: list[int], finish: Finish) -> str | None:
        tokenizer, watch = self.pair.target.tokenizer, self._watches.pop(job.index, None)
        if tokenizer is None:
            return None
        if watch is None or watch.finder is None:
            return tokenizer.decode(ids[:-1] if finish == Finish.EOS else ids)
        watch.say(watch.finder.flush())
        return watch.finder.text


def program_for(pair: Pair, options: Options, prompts: Sequence[Prompt]) -> Program:
    """Return the program that ``generate`` runs these prompts with."""
    target, plan = pair.target, plan_of(pair, pair.draft, options)
    make, full = (traced, {"full": options.trace_full}) if options.trace else (compiled, {})
    return make(
        target.program_fn,
        pair.draft.drafter,
        **full,
        rule=_rule_of(options, prompts),
        gamma=plan.gamma,
        vocab_size=target.num_logits,
        width=plan.widths,
        exact=plan.exact,
        controller=plan.controller,
        check=options.check,
        logprobs=options.logprobs or options.top_logprobs > 0,
        top_logprobs=options.top_logprobs,
        features=features_of((prompt.sampling for prompt in prompts), options.constraint),
        num_eos=max(4, max(len(prompt.eos) for prompt in prompts)),
        layout=pair.layout,
    )


def _rule_of(options: Options, prompts: Sequence[Prompt]) -> Rule:
    """Return the rule that serves these rows: the greedy one where all of them are."""
    rule = rule_for(options.rule)
    return RULES["greedy"] if rule.lossless and all(prompt.sampling.greedy for prompt in prompts) else rule


# What a row can have without a fault of ours.
_FAULTS = Status.TARGET_NOT_FINITE | Status.DRAFT_NOT_FINITE | Status.NOTHING_ALLOWED


def _top(result: Result) -> list[list[tuple[int, float]]] | None:
    if result.top_ids is None or result.top_logprobs is None:
        return None
    pairs = zip(result.top_ids.tolist(), result.top_logprobs.tolist(), strict=True)
    return [list(zip(ids, logprobs, strict=True)) for ids, logprobs in pairs]


# Programs are kept for the process: a second call with the same parts compiles nothing.
compiled = functools.lru_cache(maxsize=32)(Program)
traced = functools.lru_cache(maxsize=8)(Traced)

__all__ = ["Call", "Options", "Output", "generate"]
