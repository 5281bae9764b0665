"""The library's front door: prompts in, texts, log-probabilities and statistics out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from specjax import stats
from specjax.engine import Engine, Request, Result
from specjax.errors import RowError, UsageError
from specjax.generate import MAX_GAMMA, Program, Prompt
from specjax.pair import Draft, Model, Pair, first_line, no_draft, unusable
from specjax.rows import BadRow, Row, refuse_duplicates
from specjax.sampling import GREEDY, SamplingParams, row_key
from specjax.text import StopFinder
from specjax.types import Finish, Rule, Status
from specjax.verify import RULES, rule_for

DEFAULT_GAMMA = 4
DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_BATCH_SIZE = 8


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
        error: what went wrong, or None.
    """

    id: int | str | None
    sample: int
    text: str | None
    ids: list[int]
    finish_reason: str
    stats: dict[str, Any]
    logprobs: list[float] | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one call of ``generate``; see there."""

    sampling: SamplingParams = GREEDY
    gamma: int | None = None
    width: int | None = None
    rule: str | Rule = "rejection"
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    eos: Sequence[int] | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    seed: int = 0
    samples: int = 1
    logprobs: bool = False
    batch_size: int = DEFAULT_BATCH_SIZE
    cache_length: int | None = None
    raw: bool = False
    check: bool = False
    require_draft: bool = False
    chunk: int = 64


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
        **options: fields of ``Options``:
            ``sampling`` how rows sample that say nothing themselves; ``gamma`` drafted tokens per round (default:
            the pair's, else 4; without a draft always 0); ``width`` rows of every target step, for bit-exact
            results across drafts, gammas and batches; ``rule`` "rejection" (rows at temperature 0 are greedy),
            "greedy", or a ``Rule``; ``max_new_tokens``; ``eos`` ids instead of the model's; ``ignore_eos``;
            ``stop`` strings; ``seed``; ``samples`` per row; ``logprobs``; ``batch_size`` rows at once;
            ``cache_length`` the most tokens of prompt and output together (default: the model's context);
            ``raw`` no chat template for texts; ``check`` verify the invariants while running; ``require_draft``
            raise when the draft fails; ``chunk`` rounds between two looks at the rows.

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


def as_rows(prompts: Any, target: Model, *, raw: bool = False) -> list[Row | BadRow]:
    """Return prompts of any accepted form as rows; ids are 1, 2, ... where a prompt has none.

    Raises:
        UsageError: two rows have one id.
    """
    if isinstance(prompts, str | Row | BadRow | dict):
        prompts = [prompts]
    chat = target.tokenizer is not None and target.tokenizer.has_template and not raw
    rows: list[Row | BadRow] = []
    for number, prompt in enumerate(prompts, 1):
        if isinstance(prompt, Row | BadRow):
            rows.append(prompt)
        elif isinstance(prompt, dict):
            rows.append(Row.from_dict(prompt, number))
        elif not isinstance(prompt, str):
            rows.append(Row(number, number, prompt_ids=tuple(int(i) for i in prompt)))
        elif chat:
            rows.append(Row(number, number, messages=[{"role": "user", "content": prompt}]))
        else:
            rows.append(Row(number, number, prompt=prompt))
    refuse_duplicates(rows, "the prompts")
    return rows


@dataclasses.dataclass
class _Watch:
    """Streams one row's text and finds its stop strings."""

    finder: StopFinder
    eos: frozenset[int]
    show: Callable[[str], None]

    def push(self, ids: Sequence[int]) -> int | None:
        if ids and ids[-1] in self.eos:
            ids = ids[:-1]
        self.show(self.finder.push(ids))
        return None if self.finder.stop_index is None else self.finder.stop_index + 1


@dataclasses.dataclass(frozen=True)
class _Job:
    """One row and sample, ready for the engine."""

    index: int
    row: Row
    sample: int
    prompt: Prompt
    watch: _Watch | None


class _Call:
    """One call of generate."""

    def __init__(self, pair: Pair, options: Options, on_output, on_text, on_tokens, on_seconds):
        self.pair, self.options = pair, options
        self.on_output, self.on_text, self.on_tokens, self.on_seconds = on_output, on_text, on_tokens, on_seconds
        self.draft = pair.draft
        self.rule = rule_for(options.rule)
        self.outputs: dict[int, Output] = {}
        _check(pair, options)

    def run(self, rows: list[Row | BadRow]) -> list[Output]:
        jobs = list(self._jobs(rows))
        while jobs:
            try:
                self._decode(jobs)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error) or self.draft.speculation != "on":
                    raise
                # The draft is what plain decoding can do without.
                self.draft = unusable(self.draft.name, f"ran out of memory: {first_line(error)}",
                                      self.options.require_draft)  # fmt: skip
            jobs = [job for job in jobs if job.index not in self.outputs]
        return [self.outputs[index] for index in sorted(self.outputs)]

    def _jobs(self, rows: list[Row | BadRow]) -> Iterable[_Job]:
        """Prepare each row and sample; a row that cannot be served is finished here."""
        index = 0
        for row in rows:
            try:
                if isinstance(row, BadRow):
                    raise RowError(row.message)
                prompt, stops = self._prompt(row)
            except RowError as error:
                for sample in range(self.options.samples):
                    self._finish(index, Output(row.id, sample, None, [], "error", self._no_tokens(), error=str(error)))
                    index += 1
                continue
            seed = self.options.seed if row.seed is None else row.seed
            for sample in range(self.options.samples):
                key = row_key(seed, row.id, sample)
                watch = self._watch(row, prompt, stops)
                yield _Job(index, row, sample, dataclasses.replace(prompt, key=key), watch)
                index += 1

    def _prompt(self, row: Row) -> tuple[Prompt, Sequence[str]]:
        target, options = self.pair.target, self.options
        ids = prompt_ids(row, target)
        longest = options.cache_length or target.max_positions
        if len(ids) >= longest:
            raise RowError(
                f"The prompt has {len(ids)} tokens, the cache length is {longest}: shorten the prompt"
                + (" or raise --cache-length." if longest < target.max_positions else ".")
            )
        new = options.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
        eos = target.eos_ids if options.eos is None else options.eos
        eos = tuple(dict.fromkeys(eos if row.eos is None else row.eos))
        if row.eos is not None and (wrong := _outside(row.eos, target)):
            raise RowError(f"eos has {wrong[0]}; expected ids in 0..{target.vocab_size - 1}.")
        temperature = options.sampling.temperature if row.temperature is None else row.temperature
        if temperature > 0 and self.rule.greedy:
            raise RowError(f"temperature is {temperature}, but rule greedy serves temperature 0 only.")
        stops = tuple(options.stop if row.stop is None else row.stop)
        if stops and target.tokenizer is None:
            raise RowError("stop strings need a tokenizer, and the model's folder has none.")
        prompt = Prompt(
            ids=ids,
            limit=min(len(ids) + new, longest),
            eos=() if options.ignore_eos else eos,
            key=np.zeros(2, np.uint32),
            sampling=SamplingParams(temperature=temperature),
        )
        return prompt, stops

    def _watch(self, row: Row, prompt: Prompt, stops: Sequence[str]) -> _Watch | None:
        tokenizer = self.pair.target.tokenizer
        if tokenizer is None or not (stops or self.on_text):
            return None
        show = functools.partial(self.on_text, row.id) if self.on_text else lambda text: None
        return _Watch(StopFinder(stops, tokenizer.stream()), frozenset(prompt.eos), show)

    def _decode(self, jobs: list[_Job]) -> None:
        """Run jobs through one engine until all are finished."""
        options, target = self.options, self.pair.target
        rule = self.rule
        if rule.lossless and all(job.prompt.sampling.temperature == 0 for job in jobs):
            rule = RULES["greedy"]
        gamma = effective_gamma(self.pair, self.draft, options.gamma)
        program = compiled(
            target.fn,
            self.draft.drafter,
            rule=rule,
            gamma=gamma,
            vocab_size=target.vocab_size,
            width=options.width or default_width(gamma, target.dtype),
            check=options.check,
            logprobs=options.logprobs,
            num_eos=max(4, max(len(job.prompt.eos) for job in jobs)),
        )
        engine = Engine(
            program,
            {"target": target.params, "draft": self.draft.params},
            batch_size=min(options.batch_size, len(jobs)),
            longest=max(job.prompt.limit for job in jobs),
            on_seconds=self.on_seconds,
        )
        requests = (Request(job, job.prompt, job.watch) for job in jobs)
        for result in engine.run(requests, chunk=options.chunk, on_chunk=self.on_tokens):
            job: _Job = result.key
            self._finish(job.index, self._output(job, result, gamma))

    def _output(self, job: _Job, result: Result, gamma: int) -> Output:
        if broken := result.status & ~(Status.TARGET_NOT_FINITE | Status.DRAFT_NOT_FINITE):
            raise AssertionError(f"Row {job.row.id!r}: an invariant is broken: {broken!r}. Please report it.")
        ids = result.ids.tolist()
        speculation = self.draft.speculation
        if not result.draft_on and speculation == "on":
            reason = "gave logits that are not finite."
            if self.options.require_draft:
                unusable(self.draft.name, reason, True)
            if not any("not finite" in out.stats["speculation"] for out in self.outputs.values()):
                unusable(self.draft.name, reason, False)
            speculation = f"off: draft {reason}"
        return Output(
            id=job.row.id,
            sample=job.sample,
            text=self._text(job, ids, result.finish),
            ids=ids,
            finish_reason="stop" if result.finish == Finish.CANCELLED else result.finish.name.lower(),
            stats=stats.row_stats(result.place, result.accepted, result.drafted, speculation=speculation, gamma=gamma),
            logprobs=None if result.logprobs is None else [float(x) for x in result.logprobs],
            error=None
            if result.finish != Finish.ERROR
            else f"The target's logits are not finite at new token {len(ids) + 1}: its weights or dtype are at fault.",
        )

    def _text(self, job: _Job, ids: list[int], finish: Finish) -> str | None:
        tokenizer = self.pair.target.tokenizer
        if tokenizer is None:
            return None
        if finish == Finish.EOS:
            ids = ids[:-1]
        if job.watch is None:
            return tokenizer.decode(ids)
        job.watch.show(job.watch.finder.flush())
        return job.watch.finder.text

    def _no_tokens(self) -> dict[str, Any]:
        return stats.row_stats([], [], [], speculation=self.draft.speculation)

    def _finish(self, index: int, output: Output) -> None:
        self.outputs[index] = output
        if self.on_output:
            self.on_output(output)


# Programs are kept for the process: a second call with the same parts compiles nothing.
compiled = functools.lru_cache(maxsize=32)(Program)


def _check(pair: Pair, options: Options) -> None:
    """Refuse what cannot be honoured.

    Raises:
        UsageError: it says what.
    """
    gamma = effective_gamma(pair, pair.draft, options.gamma)
    if options.gamma is not None and not 0 <= options.gamma <= MAX_GAMMA:
        raise UsageError(f"gamma is {options.gamma}; expected 0..{MAX_GAMMA}.")
    if options.width is not None and options.width < gamma + 1:
        raise UsageError(f"width is {options.width}; expected more than gamma, {gamma}.")
    for name, least in (("max_new_tokens", 0), ("samples", 1), ("batch_size", 1), ("chunk", 1)):
        if getattr(options, name) < least:
            raise UsageError(f"{name} is {getattr(options, name)}; expected at least {least}.")
    if options.cache_length is not None and not 1 <= options.cache_length <= pair.target.max_positions:
        raise UsageError(
            f"cache_length is {options.cache_length}; expected 1..{pair.target.max_positions}, the model's context."
        )
    if wrong := _outside(options.eos or (), pair.target):
        raise UsageError(f"eos has {wrong[0]}; expected ids in 0..{pair.target.vocab_size - 1}.")
    if wrong := [stop for stop in options.stop if not stop or "\ufffd" in stop]:
        raise UsageError(f"stop has {wrong[0]!r}; expected text that is not empty and without U+FFFD.")
    if options.sampling.temperature > 0 and rule_for(options.rule).greedy:
        raise UsageError(f"temperature is {options.sampling.temperature}, but rule greedy serves temperature 0 only.")


def _outside(ids: Sequence[int], target: Model) -> list[int]:
    return [i for i in ids if not 0 <= i < target.vocab_size]


def effective_gamma(pair: Pair, draft: Draft, gamma: int | None) -> int:
    """Return the draft length in force: the one asked for, the pair's, or 4; 0 without a draft."""
    if draft.name == "none":
        return 0
    return next(value for value in (gamma, pair.gamma, DEFAULT_GAMMA) if value is not None)


def default_width(gamma: int, dtype: str) -> int:
    """Return the rows of a target step: gamma + 1, but two for a lone bfloat16 row, which costs more than two."""
    return max(gamma + 1, 2 if dtype == "bfloat16" else 1)


def prompt_ids(row: Row, target: Model) -> list[int]:
    """Return a row's prompt as ids.

    Raises:
        RowError: no tokenizer, an id outside the vocabulary, or nothing to start from.
    """
    if row.prompt_ids is not None:
        ids = list(row.prompt_ids)
    elif target.tokenizer is None:
        raise RowError("The model's folder has no tokenizer: give prompt_ids.")
    elif row.messages is not None:
        ids = target.tokenizer.encode_chat(row.messages)
    else:
        ids = target.tokenizer.encode(row.prompt or "")
    if not ids and target.bos_id is not None:
        ids = [target.bos_id]
    if not ids:
        raise RowError("The prompt is empty and the model has no BOS to start from: give a prompt.")
    if wrong := next((i for i in ids if not 0 <= i < target.vocab_size), None):
        raise RowError(f"prompt_ids has {wrong}; expected ids in 0..{target.vocab_size - 1}.")
    return ids


__all__ = ["Options", "Output", "generate", "no_draft"]
