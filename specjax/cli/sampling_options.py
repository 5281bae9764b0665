"""Options that say how rows are sampled, shared by the commands that generate."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from specjax.cli.common import Common, Ids, Texts, flat, unset
from specjax.errors import RowError, UsageError

if TYPE_CHECKING:
    from specjax.sampling import SamplingParams

# Options whose names are those of SamplingParams; None leaves its default.
_VALUES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "min_new_tokens", "draft_temperature", "draft_top_k", "draft_top_p")  # fmt: skip
SAMPLING_NAMES = (*_VALUES, "logit_bias", "ban", "ban_sequence", "allow")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions(Common):
    """How rows are sampled; docs/command-line.md has the order in which these apply."""

    temperature: Annotated[float, arg(metavar="F")] = 0.0
    """0 takes the likeliest token each time."""
    top_k: Annotated[int, arg(metavar="N")] = 0
    """Only the N likeliest tokens, and those tied with the last; 0 keeps all."""
    top_p: Annotated[float, arg(metavar="F")] = 1.0
    """Only the likeliest tokens that together reach this probability; 1 keeps all."""
    min_p: Annotated[float, arg(metavar="F")] = 0.0
    """Only tokens with at least this share of the likeliest one's probability; 0 keeps all."""
    repetition_penalty: Annotated[float, arg(metavar="F")] = 1.0
    """Above 1 makes tokens of prompt and output less likely; 1 is off."""
    presence_penalty: Annotated[float, arg(metavar="F")] = 0.0
    """Taken from the logits of tokens that are in the output."""
    frequency_penalty: Annotated[float, arg(metavar="F")] = 0.0
    """Taken from the logits of tokens in the output, once for each time."""
    draft_temperature: Annotated[float | None, unset("F")] = None
    """Of the draft model (default: as the target's)."""
    draft_top_k: Annotated[int | None, unset("N")] = None
    """Of the draft model (default: as the target's)."""
    draft_top_p: Annotated[float | None, unset("F")] = None
    """Of the draft model (default: as the target's)."""
    logit_bias: Annotated[str | None, unset("JSON")] = None
    """Added to logits, by token id: '{"11": -2.5}'."""
    ban: Ids = ()
    """Ids that never come."""
    ban_sequence: Texts = ()
    """Texts whose tokens, with or without a space in front, never come in a row."""
    allow: Ids = ()
    """The only ids that may come."""
    min_new_tokens: Annotated[int, arg(metavar="N")] = 0
    """No EOS and no stop string ends a row before it has this many tokens."""

    def sampling(self) -> SamplingParams:
        """Return the settings.

        Raises:
            UsageError: a value out of range.
        """
        from specjax.sampling import SamplingParams

        given: dict[str, Any] = {name: getattr(self, name) for name in _VALUES}
        given |= {"logit_bias": self._bias(), "ban": flat("--ban", self.ban)}
        try:
            return SamplingParams(**given, allow=flat("--allow", self.allow) or None)
        except RowError as error:
            raise UsageError(str(error)) from error

    def _bias(self) -> dict[int, float]:
        from specjax.rows import SETTINGS

        if self.logit_bias is None:
            return {}
        try:
            given = json.loads(self.logit_bias)
        except ValueError as error:
            raise UsageError(
                f'--logit-bias is not JSON ({error}); expected an object such as {{"11": -2.5}}.'
            ) from error
        try:
            return SETTINGS["logit_bias"]("--logit-bias", given)
        except RowError as error:
            raise UsageError(str(error)) from error
