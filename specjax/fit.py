"""Do a target and a draft fit? One comparison, shown by ``specjax check`` and made before every generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from specjax.checkpoint import inspect_checkpoint
from specjax.errors import CheckpointError
from specjax.models.config import DecoderConfig, RopeConfig
from specjax.text import Tokenizer, load_tokenizer

Level = Literal["ok", "note", "warning", "error"]
_NONE = "-"


@dataclasses.dataclass(frozen=True)
class Side:
    """What is compared of a model; the weights need not be loaded.

    Attributes:
        name: what the user called it.
        tokenizer: None when it has none.
        rows: ids that the model has an embedding for, padding included.
        vocab_size: ids in use.
        max_positions: the context length.
        eos_ids, bos_id: from its generation config.
        dtype: of its weights, as they are stored or as they were loaded.
        num_params: how many parameters it has.
        config: None for a model that is no decoder of ours.
    """

    name: str
    tokenizer: Tokenizer | None
    rows: int
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    num_params: int
    config: DecoderConfig | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing compared.

    Attributes:
        what: its name.
        target, draft: the two values, as text.
        level: "ok"; "note": they differ, and that is handled; "warning"; "error": the two do not fit.
        message: what follows; a whole sentence where the level is a warning or an error.
    """

    what: str
    target: str
    draft: str
    level: Level = "ok"
    message: str = ""


@dataclasses.dataclass(frozen=True)
class Findings:
    """Everything compared of a pair."""

    items: tuple[Finding, ...]

    @property
    def errors(self) -> list[str]:
        """Why the two do not fit; empty when they do."""
        return [item.message for item in self.items if item.level == "error"]

    @property
    def warnings(self) -> list[str]:
        """What works less well than it could."""
        return [item.message for item in self.items if item.level == "warning"]

    @property
    def verdict(self) -> str:
        """ "fits", "fits with warnings" or "does not fit"."""
        return "does not fit" if self.errors else "fits with warnings" if self.warnings else "fits"


def compare(target: Side, draft: Side) -> Findings:
    """Compare a target and a draft.

    Example:
        print(compare(describe("smollm2-135m"), describe("./my-draft")).verdict)
    """
    return Findings(tuple(_findings(target, draft)))


def describe(where: str | Path, *, progress: bool = False) -> Side:
    """Read what is compared of a model, without its weights.

    Raises:
        UsageError, CheckpointError: as ``specjax.checkpoint.load_checkpoint``.
    """
    header = inspect_checkpoint(where, progress=progress)
    tokenizer, rows = load_tokenizer(header.folder), header.config.vocab_size
    refuse_too_many_ids(header.name, tokenizer, rows)
    return Side(
        name=header.name,
        tokenizer=tokenizer,
        rows=rows,
        vocab_size=rows if tokenizer is None else tokenizer.vocab_size,
        max_positions=header.config.max_positions,
        eos_ids=header.eos_ids,
        bos_id=header.bos_id,
        dtype=", ".join(header.dtypes),
        num_params=header.num_params,
        config=header.config,
    )


def refuse_too_many_ids(name: str, tokenizer: Tokenizer | None, rows: int) -> None:
    """Refuse a tokenizer with ids that the model has no embedding for.

    Raises:
        CheckpointError: it has.
    """
    if tokenizer is not None and tokenizer.vocab_size > rows:
        raise CheckpointError(
            f"{name}: the tokenizer has {tokenizer.vocab_size} ids, the model's embedding {rows} rows; "
            "the two do not belong together."
        )


def _findings(target: Side, draft: Side) -> Iterator[Finding]:
    yield _tokenizers(target, draft)
    yield _vocabularies(target, draft)
    yield from _special_tokens(target, draft)
    yield _templates(target, draft)
    yield _contexts(target, draft)
    yield _ropes(target, draft)
    same = target.dtype == draft.dtype
    yield _finding("weights", [target.dtype, draft.dtype], *_noted(same, "each is loaded in the dtype asked for"))
    yield _sizes(target, draft)


def _finding(what: str, values: Sequence[str], level: Level, message: str) -> Finding:
    return Finding(what, values[0], values[1], level, message)


def _noted(same: bool, message: str) -> tuple[Level, str]:
    return ("ok", "") if same else ("note", message)


def _tokenizers(target: Side, draft: Side) -> Finding:
    ours, theirs = target.tokenizer, draft.tokenizer
    sizes = [_NONE if side.tokenizer is None else f"{side.tokenizer.vocab_size} ids" for side in (target, draft)]
    if ours is None and theirs is None:
        return _finding("tokenizer", sizes, "note", "none to compare: only the sizes are")
    if ours is None or theirs is None:
        lacking = target if ours is None else draft
        return _finding(
            "tokenizer", sizes, "note", f"{lacking.name} has none to compare: only the sizes of the vocabularies are"
        )
    if found := ours.differences(theirs):
        return _finding(
            "tokenizer",
            sizes,
            "error",
            f"The tokenizers of target {target.name} and draft {draft.name} differ ({'; '.join(found)}): "
            "a draft must share its target's tokenizer.",
        )
    return _finding("tokenizer", sizes, "ok", "the same, id by id")


def _vocabularies(target: Side, draft: Side) -> Finding:
    values = [f"{side.vocab_size} of {side.rows}" for side in (target, draft)]
    fits = draft.rows >= target.vocab_size if target.tokenizer is not None else draft.rows == target.vocab_size
    if not fits:
        return _finding(
            "ids in use",
            values,
            "error",
            f"Draft {draft.name} has {draft.rows} ids, target {target.name} uses {target.vocab_size}: "
            "a draft must share its target's vocabulary.",
        )
    padded = max(target.rows, draft.rows) > target.vocab_size
    return _finding("ids in use", values, *_noted(not padded, "padded: rows past the ids in use are left out"))


def _special_tokens(target: Side, draft: Side) -> Iterator[Finding]:
    used = "the target's are used"
    ends = [", ".join(map(str, side.eos_ids)) or _NONE for side in (target, draft)]
    yield _finding("EOS ids", ends, *_noted(set(target.eos_ids) == set(draft.eos_ids), used))
    begins = [_NONE if side.bos_id is None else str(side.bos_id) for side in (target, draft)]
    yield _finding("BOS id", begins, *_noted(begins[0] == begins[1], "the target's is used"))
    for name in ("bos_token", "eos_token", "pad_token"):
        texts = [_NONE if side.tokenizer is None else side.tokenizer.named(name) or _NONE for side in (target, draft)]
        if texts != [_NONE, _NONE]:
            yield _finding(name, texts, *_noted(texts[0] == texts[1], "the target's is used"))


def _templates(target: Side, draft: Side) -> Finding:
    ours, theirs = (None if side.tokenizer is None else side.tokenizer.template for side in (target, draft))
    values = [_NONE if text is None else f"{len(text)} characters" for text in (ours, theirs)]
    return _finding("chat template", values, *_noted(ours == theirs, "the target's is used"))


def _contexts(target: Side, draft: Side) -> Finding:
    values = f"{target.max_positions} tokens", f"{draft.max_positions} tokens"
    if draft.max_positions < target.max_positions:
        return _finding(
            "context",
            values,
            "warning",
            f"Draft {draft.name} has a context of {draft.max_positions} tokens, target {target.name} of "
            f"{target.max_positions}: a row goes on without speculation past {draft.max_positions}.",
        )
    longer = draft.max_positions > target.max_positions
    return _finding("context", values, *_noted(not longer, "the target's is in force"))


def _ropes(target: Side, draft: Side) -> Finding:
    values = [_rope(side.config) for side in (target, draft)]
    return _finding("rotary", values, *_noted(values[0] == values[1], "each follows its own"))


def _rope(config: DecoderConfig | None) -> str:
    """Name a model's rotary embeddings and what they change from the default."""
    if config is None:
        return _NONE
    kinds = dict.fromkeys(config.rope_of(layer) for layer in range(config.num_layers))
    return " / ".join("none" if kind is None else _rope_of(kind) for kind in kinds)


def _rope_of(rope: RopeConfig) -> str:
    default = RopeConfig()
    more = [
        f"{field.name} {getattr(rope, field.name):.15g}"
        for field in dataclasses.fields(rope)
        if field.name not in ("rope_type", "rope_theta")
        and getattr(rope, field.name) not in (None, getattr(default, field.name))
    ]
    return ", ".join([f"{rope.rope_type} {rope.rope_theta:.15g}", *more])


def _sizes(target: Side, draft: Side) -> Finding:
    values = [_size(side) for side in (target, draft)]
    if draft.num_params > target.num_params:
        return _finding(
            "size",
            values,
            "warning",
            f"Draft {draft.name} has {_count(draft.num_params)} parameters, target {target.name} "
            f"{_count(target.num_params)}: a draft larger than its target cannot pay.",
        )
    share = draft.num_params / max(target.num_params, 1)
    return _finding("size", values, "ok", f"the draft is {share:.0%} of the target")


def _size(side: Side) -> str:
    if side.config is None:
        return f"{_count(side.num_params)} parameters"
    return f"{_count(side.num_params)} parameters, {side.config.num_layers} layers, width {side.config.width}"


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


def no_model(draft: str, side: Side) -> Findings:
    """Return the findings for a draft that is no model: it fits every target."""
    values: dict[str, Any] = {"target": _size(side), "draft": draft}
    return Findings((Finding("draft", **values, message="no model: it needs nothing but the target's own tokens"),))
