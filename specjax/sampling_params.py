"""How a row samples, as its user says it, and as the arrays of a batch that the loop works on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.errors import RowError
from specjax.types import Constraint, Penalties, RowSampling, Truncation

_MOST = 1e9  # of a bias or penalty: any logit is small beside it, and float32 is far from its end


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one row samples; the order is that of the transforms (docs/mathematics.md).

    Attributes:
        logit_bias: added to the logits, by token id.
        ban: ids that never come.
        allow: the only ids that may come; None allows all.
        ban_sequences: sequences of ids that are never completed, by prompt and output together.
        min_new_tokens: new tokens before an EOS or a stop string counts.
        repetition_penalty: above 0; of tokens in prompt or output, positive logits are divided by it, negative ones
            multiplied, once per token; 1 is off.
        presence_penalty: taken from the logits of tokens in the output; 0 is off.
        frequency_penalty: the same, once for each time; 0 is off.
        temperature: divides the logits; 0 is greedy, the lowest id on ties.
        min_p: 0..1, keeps tokens with at least this share of the largest probability; 0 is off.
        top_k: keeps the k most probable and what is tied with the k-th; 0, and the vocabulary or more, keep all.
        top_p: above 0, up to 1; keeps the most probable until their mass reaches it, and what is tied with the last;
            1 keeps all.
        draft_temperature, draft_top_k, draft_top_p: the draft's own; None follows the target's.

    Raises:
        RowError: a value out of range.

    Example:
        SamplingParams(temperature=0.7, top_p=0.9, logit_bias={11: -2.0}, ban=(13,))
    """

    temperature: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    ban: Sequence[int] = ()
    allow: Sequence[int] | None = None
    ban_sequences: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    draft_top_p: float | None = None

    def __post_init__(self):
        for prefix in ("", "draft_"):
            _check(self, prefix + "temperature", "a finite number >= 0 (0 is greedy)", lambda x: 0 <= x < math.inf)
            _check(self, prefix + "top_k", "an integer >= 0 (0 keeps all)", lambda x: x >= 0 and int(x) == x)
            _check(self, prefix + "top_p", "a number above 0, up to 1 (1 keeps all)", lambda x: 0 < x <= 1)
        _check(self, "min_p", "a number from 0 (off) to 1", lambda x: 0 <= x <= 1)
        _check(self, "repetition_penalty", f"a number from {1 / _MOST:g} to {_MOST:g} (1 is off)",
               lambda x: 1 / _MOST <= x <= _MOST)  # fmt: skip
        for name in ("presence_penalty", "frequency_penalty"):
            _check(self, name, f"a number of at most {_MOST:g} in size (0 is off)", lambda x: abs(x) <= _MOST)
        _check(self, "min_new_tokens", "an integer >= 0", lambda x: x >= 0)
        pairs = tuple(sorted((int(i), float(value)) for i, value in dict(self.logit_bias).items()))
        if wrong := [value for _, value in pairs if not abs(value) <= _MOST]:
            raise RowError(f"logit_bias has {wrong[0]}; expected numbers of at most {_MOST:g} in size (ban excludes).")
        if self.allow is not None and not self.allow:
            raise RowError("allow is empty; expected at least one id (leave it out to allow all).")
        sequences = tuple(tuple(int(i) for i in sequence) for sequence in self.ban_sequences)
        if not all(sequences):
            raise RowError("ban_sequences has an empty sequence; expected at least one id in each.")
        # Frozen, and equal where they mean the same.
        tidy = {
            "logit_bias": pairs,
            "ban": tuple(sorted({int(i) for i in self.ban})),
            "allow": None if self.allow is None else tuple(sorted({int(i) for i in self.allow})),
            "ban_sequences": tuple(sorted(set(sequences))),
        }
        for name, value in tidy.items():
            object.__setattr__(self, name, value)

    @property
    def ids(self) -> list[int]:
        """Every token id that is named."""
        named = list(dict(self.logit_bias))
        return [*named, *self.ban, *(self.allow or ()), *(i for sequence in self.ban_sequences for i in sequence)]

    @property
    def draft(self) -> SamplingParams:
        """The settings of the draft."""
        own = {"temperature": self.draft_temperature, "top_k": self.draft_top_k, "top_p": self.draft_top_p}
        own = {name: value for name, value in own.items() if value is not None}
        return dataclasses.replace(self, **own) if own else self

    @property
    def has_draft_settings(self) -> bool:
        """Whether the draft has settings of its own."""
        return any(x is not None for x in (self.draft_temperature, self.draft_top_k, self.draft_top_p))

    @property
    def without_draft(self) -> SamplingParams:
        """The target's settings alone."""
        return dataclasses.replace(self, draft_temperature=None, draft_top_k=None, draft_top_p=None)

    @property
    def greedy(self) -> bool:
        """Whether target and draft both take the likeliest token."""
        return self.temperature == 0 and self.draft.temperature == 0


def _check(params: SamplingParams, name: str, expected: str, good) -> None:
    value = getattr(params, name)
    if value is not None and not good(value):
        raise RowError(f"{name} is {value}; expected {expected}.")


GREEDY = SamplingParams()


class Features(NamedTuple):
    """Which families of transforms a program has: what no row of a job uses costs nothing. Static and hashable.

    Attributes:
        bias: logit bias, bans, allow-lists.
        min_new: a minimum of new tokens.
        penalties: repetition, presence, frequency.
        truncation: min-p, top-k, top-p.
        draft: the draft has settings of its own.
        sequences: (N, L), the room for banned sequences of more than one token; (0, 0) has none.
        constraint: the user's.
    """

    bias: bool = False
    min_new: bool = False
    penalties: bool = False
    truncation: bool = False
    draft: bool = False
    sequences: tuple[int, int] = (0, 0)
    constraint: Constraint | None = None


def features_of(rows: Iterable[SamplingParams], constraint: Constraint | None = None) -> Features:
    """Return the families that these rows use; the values themselves never matter."""
    rows = list(rows)
    hot = [row for row in rows if not row.greedy]  # the likeliest token survives every truncation
    long = [_long(row) for row in rows]
    count = max((len(sequences) for sequences in long), default=0)
    length = max((len(sequence) for sequences in long for sequence in sequences), default=0)
    return Features(
        bias=any(row.logit_bias or row.allow is not None or _bans(row) for row in rows),
        min_new=any(row.min_new_tokens for row in rows),
        penalties=any(
            row.repetition_penalty != 1 or row.presence_penalty != 0 or row.frequency_penalty != 0 for row in rows
        ),
        truncation=any(side.min_p > 0 or side.top_k > 0 or side.top_p < 1 for row in hot for side in (row, row.draft)),
        draft=any(row.draft != row for row in hot),
        # Powers of two: a few programs serve all.
        sequences=(_power(count), _power(length)) if count else (0, 0),
        constraint=constraint,
    )


def stack(rows: list[SamplingParams], features: Features | None = None, vocab_size: int | None = None) -> RowSampling:
    """Return the settings of a batch as arrays.

    Args:
        rows: one for each row.
        features: the program's families; those of ``rows`` by default.
        vocab_size: V, needed where there is a bias.
    """
    features = features_of(rows) if features is None else features
    drafts = [row.draft for row in rows]
    return RowSampling(
        temperature=_floats(row.temperature for row in rows),
        truncation=_truncation(rows) if features.truncation else None,
        draft_temperature=_floats(row.temperature for row in drafts) if features.draft else None,
        draft_truncation=_truncation(drafts) if features.draft and features.truncation else None,
        bias=jnp.asarray(np.stack([_bias(row, vocab_size) for row in rows])) if features.bias else None,
        min_new=jnp.asarray([row.min_new_tokens for row in rows], jnp.int32) if features.min_new else None,
        sequences=_sequences(rows, *features.sequences) if features.sequences[0] else None,
        penalties=Penalties(
            repetition=_floats(row.repetition_penalty for row in rows),
            presence=_floats(row.presence_penalty for row in rows),
            frequency=_floats(row.frequency_penalty for row in rows),
        )
        if features.penalties
        else None,
        constraint=features.constraint,
    )


def _truncation(rows: Sequence[SamplingParams]) -> Truncation:
    return Truncation(
        min_p=_floats(row.min_p for row in rows),
        top_k=jnp.asarray([min(row.top_k, 2**31 - 1) for row in rows], jnp.int32),
        top_p=_floats(row.top_p for row in rows),
    )


def _bias(row: SamplingParams, vocab_size: int | None) -> np.ndarray:
    if vocab_size is None:
        raise ValueError("vocab_size is None; expected the vocabulary's size, for a bias, ban or allow-list.")
    bias = np.zeros(vocab_size, np.float32)
    if row.allow is not None:
        bias[:] = -np.inf
        bias[list(row.allow)] = 0.0
    for i, value in dict(row.logit_bias).items():
        bias[i] += value
    bias[_bans(row)] = -np.inf
    return bias


def _sequences(rows: Sequence[SamplingParams], count: int, length: int):
    padded = np.full((len(rows), count, length), -1, np.int32)
    for i, row in enumerate(rows):
        for j, sequence in enumerate(_long(row)):
            padded[i, j, length - len(sequence) :] = sequence
    return jnp.asarray(padded)


def _bans(row: SamplingParams) -> list[int]:
    """Return the single ids that are banned."""
    return [*row.ban, *(sequence[0] for sequence in row.ban_sequences if len(sequence) == 1)]


def _long(row: SamplingParams) -> list[Sequence[int]]:
    return [sequence for sequence in row.ban_sequences if len(sequence) > 1]


def _power(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def _floats(values: Iterable[float]):
    return jnp.asarray(list(values), jnp.float32)
