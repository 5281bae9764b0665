"""From what a caller asks to rows the loop can run: options checked, prompts encoded, limits set."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specjax.errors import RowError, UsageError
from specjax.generate import MAX_GAMMA, Prompt
from specjax.pair import Draft, Model, Pair, no_draft
from specjax.rows import BadRow, Row, refuse_duplicates
from specjax.sampling import GREEDY, SamplingParams, row_key
from specjax.speculation import AUTO, Gamma, Plan, plan
from specjax.types import Constraint, Rule
from specjax.verify import rule_for

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_BATCH_SIZE = 8
MAX_TOP_LOGPROBS = 64
_HOT = "temperature is {0.temperature}, the draft's {0.draft.temperature}, but rule greedy serves temperature 0 only."
# Settings that a row may have of its own; the names are those of SamplingParams.
_OWN = ("min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "logit_bias", "ban", "allow")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of one call of ``specjax.generate``.

    Attributes:
        sampling: how rows sample that say nothing themselves.
        ban_sequence: texts that are never completed, spelled by their own tokens with or without a space in front.
        constraint: a pure function that says which token may come next, for every row (``specjax.constraint``).
        gamma: drafted tokens per round, or "auto": chosen round by round (default: the pair's, else 4; without a draft
            always 0).
        width: rows of every target step, for bit-exact results across drafts, gammas and batches.
        rule: the name of a rule, or a ``Rule``; whatever it is, rows at temperature 0 are greedy.
        max_new_tokens: the most tokens to generate per row.
        eos: ids that end a row instead of the model's.
        ignore_eos: go on past them.
        stop: strings that end a row.
        seed: of the random draws.
        samples: rows drawn per prompt.
        logprobs: keep each token's log-probability, raw and as sampled.
        top_logprobs: N, those of the N most probable tokens too, up to 64; it implies ``logprobs``.
        batch_size: rows at once.
        cache_length: the most tokens of prompt and output together (default: the model's context); the caches hold so
            many (default: as many as the longest row asks for), so that calls with the same one share a program.
        prefix: text that stands before every prompt, as a system message of chats; its whole pieces of 256 tokens are
            prefilled once.
        raw: no chat template for texts.
        check: verify the invariants while running.
        require_draft: raise when the draft fails.
        chunk: rounds between two looks at the rows (default: as few as hide the host's work).
        trace: called with a record of each round and row as the row ends (``specjax.trace``); rounds then run one by
            one, in a program of their own, with the same ids.
        trace_full: whole distributions in the records too; for vocabularies of up to 4096 tokens.

    Raises:
        UsageError: a value out of range.
    """

    sampling: SamplingParams = GREEDY
    ban_sequence: Sequence[str] = ()
    constraint: Constraint | None = None
    gamma: Gamma | None = None
    width: int | None = None
    rule: str | Rule = "rejection"
    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    eos: Sequence[int] | None = None
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    seed: int = 0
    samples: int = 1
    logprobs: bool = False
    top_logprobs: int = 0
    batch_size: int = DEFAULT_BATCH_SIZE
    cache_length: int | None = None
    prefix: str = ""
    raw: bool = False
    check: bool = False
    require_draft: bool = False
    chunk: int | None = None
    trace: Callable[[dict[str, Any]], None] | None = None
    trace_full: bool = False

    def __post_init__(self):
        if self.gamma not in (None, AUTO) and not (isinstance(self.gamma, int) and 0 <= self.gamma <= MAX_GAMMA):
            raise UsageError(f"gamma is {self.gamma}; expected 0..{MAX_GAMMA}, or {AUTO}.")
        least = {"max_new_tokens": 0, "samples": 1, "batch_size": 1, "chunk": 1, "width": 1, "cache_length": 1,
                 "top_logprobs": 0}  # fmt: skip
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise UsageError(f"{name} is {value}; expected at least {lowest}.")
        if self.top_logprobs > MAX_TOP_LOGPROBS:
            raise UsageError(f"top_logprobs is {self.top_logprobs}; expected at most {MAX_TOP_LOGPROBS}.")
        if "" in self.ban_sequence:
            raise UsageError("ban_sequence has an empty text; expected at least one character.")
        if wrong := [stop for stop in self.stop if not stop or "\ufffd" in stop]:
            raise UsageError(f"stop has {wrong[0]!r}; expected text that is not empty and without U+FFFD.")
        rule = rule_for(self.rule)
        if rule.greedy and not self.sampling.greedy:
            raise UsageError(_HOT.format(self.sampling))


@dataclasses.dataclass(frozen=True)
class Job:
    """One row and sample, ready for the engine.

    Attributes:
        index: its place in the results.
        row, sample: what it is.
        prompt: what the loop needs.
        stops: its stop strings.
    """

    index: int
    row: Row
    sample: int
    prompt: Prompt
    stops: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Refused:
    """One row and sample that cannot be served, and why."""

    index: int
    row: Row | BadRow
    sample: int
    reason: str


def check(pair: Pair, options: Options) -> None:
    """Refuse what this pair cannot honour.

    Raises:
        UsageError: it says what.
    """
    target = pair.target
    chosen = plan_of(pair, pair.draft, options)
    gamma = chosen.gamma
    if pair.layout.mesh is not None and chosen.controller is not None:
        raise UsageError("gamma is auto; expected a number on a mesh: costs are measured on one device.")
    if options.constraint is not None and target.num_logits != target.vocab_size:
        raise UsageError(
            f"A constraint has masks of {target.vocab_size} ids, and the mesh splits {target.num_logits}: leave out"
            " the constraint, or the mesh's model axis."
        )
    if options.width is not None and options.width < gamma + 1:
        raise UsageError(f"width is {options.width}; expected more than gamma, {gamma}.")
    if options.cache_length is not None and options.cache_length > target.max_positions:
        raise UsageError(
            f"cache_length is {options.cache_length}; expected 1..{target.max_positions}, the model's context."
        )
    if wrong := _outside(options.eos or (), target):
        raise UsageError(f"eos has {wrong[0]}; expected ids in 0..{target.vocab_size - 1}.")
    if wrong := _outside(options.sampling.ids, target):
        raise UsageError(f"A bias, ban or allow-list has {wrong[0]}; expected ids in 0..{target.vocab_size - 1}.")
    if options.ban_sequence and target.tokenizer is None:
        raise UsageError("ban_sequence needs a tokenizer, and the model's folder has none: ban_sequences takes ids.")
    # A draft that failed leaves its settings without effect: decoding goes on, and it was said.
    draws_nothing = pair.draft.name == "ngram" or pair.draft.speculation == no_draft().speculation
    if options.sampling.has_draft_settings and draws_nothing:
        raise UsageError(
            "draft_temperature, draft_top_k and draft_top_p are for a draft model; "
            f"draft {pair.draft.name} draws nothing."
        )


def plan_of(pair: Pair, draft: Draft, options: Options) -> Plan:
    """Return what speculation with this draft comes to."""
    return plan(options.gamma, pair.gamma, draft.name, options.width, pair.target.dtype)


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


def jobs_of(rows: Sequence[Row | BadRow], target: Model, options: Options) -> Iterator[Job | Refused]:
    """Yield each row and sample, in order: ready, or refused with the reason."""
    index = 0
    options = spelled(options, target)
    for row in rows:
        prompt, stops, reason = None, (), ""
        try:
            if isinstance(row, BadRow):
                raise RowError(row.message)
            prompt, stops = _prompt(row, target, options), _stops(row, target, options)
        except RowError as error:
            reason = str(error)
        for sample in range(options.samples):
            if prompt is None or isinstance(row, BadRow):
                yield Refused(index, row, sample, reason)
            else:
                seed = options.seed if row.seed is None else row.seed
                keyed = dataclasses.replace(prompt, key=row_key(seed, row.id, sample))
                yield Job(index, row, sample, keyed, stops)
            index += 1


def spelled(options: Options, target: Model) -> Options:
    """Return the options with the texts of banned sequences as ids.

    Raises:
        UsageError: a text that is not valid Unicode.
    """
    if target.tokenizer is None:
        return options
    try:
        spelled = [ids for text in options.ban_sequence for ids in target.tokenizer.spellings(text)]
    except RowError as error:
        raise UsageError(f"ban_sequence: {error}") from error
    sampling = dataclasses.replace(options.sampling, ban_sequences=[*options.sampling.ban_sequences, *spelled])
    return dataclasses.replace(options, sampling=sampling)


def longest_of(options: Options, prompts: Sequence[Prompt]) -> int:
    """Return how many tokens a row's caches hold."""
    return options.cache_length or max(prompt.limit for prompt in prompts)


def _prompt(row: Row, target: Model, options: Options) -> Prompt:
    ids = prompt_ids(row, target, options.prefix)
    longest = options.cache_length or target.max_positions
    if len(ids) >= longest:
        raise RowError(
            f"The prompt has {len(ids)} tokens, the cache length is {longest}: shorten the prompt"
            + (" or raise --cache-length." if longest < target.max_positions else ".")
        )
    new = options.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens
    eos = target.eos_ids if options.eos is None else options.eos
    if row.eos is not None and (wrong := _outside(row.eos, target)):
        raise RowError(f"eos has {wrong[0]}; expected ids in 0..{target.vocab_size - 1}.")
    own = {name: getattr(row, name) for name in _OWN}
    sampling = dataclasses.replace(options.sampling, **{k: value for k, value in own.items() if value is not None})
    if rule_for(options.rule).greedy and not sampling.greedy:
        raise RowError(_HOT.format(sampling))
    if wrong := _outside(sampling.ids, target):
        raise RowError(f"A bias, ban or allow-list has {wrong[0]}; expected ids in 0..{target.vocab_size - 1}.")
    if sampling.min_new_tokens > new:
        raise RowError(
            f"min_new_tokens is {sampling.min_new_tokens}, max_new_tokens {new}: lower the one, raise the other."
        )
    return Prompt(
        ids=ids,
        limit=min(len(ids) + new, longest),
        eos=() if options.ignore_eos else tuple(dict.fromkeys(eos if row.eos is None else row.eos)),
        key=row_key(0, row.id),
        sampling=sampling,
    )


def _stops(row: Row, target: Model, options: Options) -> tuple[str, ...]:
    stops = tuple(options.stop if row.stop is None else row.stop)
    if stops and target.tokenizer is None:
        raise RowError("stop strings need a tokenizer, and the model's folder has none.")
    return stops


def shared_prefix(prompts: Sequence[list[int]]) -> list[int]:
    """Return the ids that all prompts begin with."""
    first, last = min(prompts), max(prompts)
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:same]


def prompt_ids(row: Row, target: Model, prefix: str = "") -> list[int]:
    """Return a row's prompt as ids, with a text before it.

    Raises:
        RowError: no tokenizer, an id outside the vocabulary, nothing to start from, or no place for the prefix.
    """
    tokenizer = target.tokenizer
    if row.prompt_ids is not None and not prefix:
        ids = list(row.prompt_ids)
    elif tokenizer is None:
        raise RowError(
            "The model's folder has no tokenizer: " + ("leave out the prefix." if prefix else "give prompt_ids.")
        )
    elif row.prompt_ids is not None:
        ids = [*tokenizer.encode(prefix), *row.prompt_ids]
    elif row.messages is not None:
        ids = tokenizer.encode_chat([*_system(row, prefix), *row.messages])
    else:
        ids = tokenizer.encode(prefix + (row.prompt or ""))
    if not ids and target.bos_id is not None:
        ids = [target.bos_id]
    if not ids:
        raise RowError("The prompt is empty and the model has no BOS to start from: give a prompt.")
    if wrong := next((i for i in ids if not 0 <= i < target.vocab_size), None):
        raise RowError(f"prompt_ids has {wrong}; expected ids in 0..{target.vocab_size - 1}.")
    return ids


def _system(row: Row, prefix: str) -> list[dict[str, str]]:
    if not prefix:
        return []
    first = row.messages[0] if row.messages else None
    if isinstance(first, dict) and first.get("role") == "system":
        raise RowError("The chat has a system message of its own, and the prefix is one: leave out one of them.")
    return [{"role": "system", "content": prefix}]


def _outside(ids: Sequence[int], target: Model) -> list[int]:
    return [i for i in ids if not 0 <= i < target.vocab_size]
