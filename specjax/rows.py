"""Rows in: JSON Lines, checked field by field; a bad row gets its own error while the others go on."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specjax.errors import RowError, UsageError

_MAX_ID = 2**31 - 1  # ids are int32 on the device
_MAX_SEED = 2**32 - 1  # more bits would be dropped silently when the key is made


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt with its settings; None where the row leaves a setting to the command.

    Attributes:
        id: its name in the output: an int or text; the line number if the row has none.
        line: its line, from 1.
        prompt: raw text. Exactly one of ``prompt``, ``prompt_ids`` and ``messages`` is set.
        prompt_ids: ids, taken as they are.
        messages: a chat; what a message may hold is checked by ``Tokenizer.encode_chat``.
        max_new_tokens: at least 0.
        min_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias, ban, allow: as ``specjax.SamplingParams`` has them, which also knows their ranges.
        eos: ids that end the row; empty means that none does.
        stop: stop strings.
        seed: 0 to 2**32 - 1.
    """

    id: int | str
    line: int
    prompt: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: list[Any] | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ban: Sequence[int] | None = None
    allow: Sequence[int] | None = None
    eos: Sequence[int] | None = None
    stop: Sequence[str] | None = None
    seed: int | None = None

    @classmethod
    def from_dict(cls, record: dict[str, Any], line: int) -> Row | BadRow:
        """Return the row of a dict as a line of a file has it, or what is wrong with it."""
        return _checked(lambda: dict(record), line, _row)


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One row to score: its name, its line (from 1) and its ids."""

    id: int | str
    line: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot be served.

    Attributes:
        id: the row's id, or None where the line does not tell it.
        line: its line, from 1.
        message: one line, the line number in front.
    """

    id: int | str | None
    line: int
    message: str


def stable_id(row_id: int | str) -> str:
    """Return an id as compact JSON text: what seeds are hashed from; ``1`` and ``"1"`` differ.

    Example:
        >>> stable_id(1), stable_id("1")
        ('1', '"1"')
    """
    return json.dumps(row_id)


def row_name(row: Row | BadRow, sample: int) -> tuple[str, int]:
    """Return what a row's output is known by: its id and sample; its line where that does not tell the id."""
    return (f"line {row.line}" if row.id is None else stable_id(row.id), sample)


def read_rows(path: str | Path) -> list[Row | BadRow]:
    """Read prompts from a JSON Lines file, or from standard input (``-``).

    Lines end at a line feed only, so any other separator may stand inside a prompt. Blank lines are skipped.

    Returns:
        The rows in the file's order; those that cannot be served as ``BadRow``.

    Raises:
        UsageError: the file cannot be read, or two rows have one id.
    """
    return parse_rows(_read(path), str(path))


def read_score_rows(path: str | Path) -> list[ScoreRow | BadRow]:
    """Read rows to score, ``{"id", "ids"}``, as ``read_rows`` does.

    Raises:
        UsageError: the file cannot be read, or two rows have one id.
    """
    return parse_score_rows(_read(path), str(path))


def parse_rows(content: bytes, source: str = "input") -> list[Row | BadRow]:
    """Read rows from the bytes of a JSON Lines file; see ``read_rows``.

    Raises:
        UsageError: two rows have one id.
    """
    return _parse(content, source, _row)


def parse_score_rows(content: bytes, source: str = "input") -> list[ScoreRow | BadRow]:
    """Read rows to score from the bytes of a JSON Lines file; see ``read_score_rows``.

    Raises:
        UsageError: two rows have one id.
    """
    return _parse(content, source, _score_row)


def _read(path: str | Path) -> bytes:
    if "://" in str(path):
        from specjax.jobs.folder import read_remote

        return read_remote(str(path))
    try:
        return sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"Cannot read the input {path}: {error.strerror}. Give a JSON Lines file, or - .") from error


def _parse(content: bytes, source: str, build: Callable[[dict[str, Any], int | str, int], Any]) -> list[Any]:
    rows = [_checked(partial(_record, raw), line, build) for line, raw in _lines(content)]
    refuse_duplicates(rows, source)
    return rows


def refuse_duplicates(rows: Iterable[Row | ScoreRow | BadRow], source: str = "input") -> None:
    """Refuse rows that have one id; a row without an id of its own has its line number.

    Raises:
        UsageError: it names both lines.
    """
    lines: dict[str, int] = {}
    for row in rows:
        if row.id is None:
            continue
        name = stable_id(row.id)
        if name in lines:
            raise UsageError(
                f"Lines {lines[name]} and {row.line} of {source} both have the id {name}: give each its own id"
                " (a row without one has its line number)."
            )
        lines[name] = row.line


def _checked(read: Callable[[], dict[str, Any]], line: int, build: Callable[[dict[str, Any], int | str, int], Any]):
    """Build one row, or say what is wrong with it."""
    row_id = None
    try:
        record = read()
        row_id = _id(record.pop("id", line))
        return build(record, row_id, line)
    except RowError as error:
        return BadRow(row_id, line, f"line {line}: {error}")


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank with their numbers, from 1."""
    content = content.removeprefix(b"\xef\xbb\xbf")  # a byte order mark, as some editors write it
    for number, raw in enumerate(content.split(b"\n"), start=1):
        raw = raw.strip(b" \t\r")
        if raw:
            yield number, raw


def _record(raw: bytes) -> dict[str, Any]:
    try:
        record = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise RowError(f"not UTF-8 at byte {error.start + 1} of the line.") from error
    except json.JSONDecodeError as error:
        raise RowError(f"not JSON: {error.msg} at character {error.pos + 1}.") from error
    except RecursionError as error:
        raise RowError("not JSON that can be read: nested too deeply.") from error
    except RowError:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise RowError(f"not JSON that can be read: {error}.") from error
    if not isinstance(record, dict):
        raise RowError(f"expected an object, got {_short(record)}.")
    return record


def _refuse_constant(name: str) -> None:
    raise RowError(f"not JSON: {name} is no number.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RowError(f"{_short(twice)} is given twice.")
    return record


def _id(value: Any) -> int | str:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise RowError(f"id must be text or an integer, got {_short(value)}.")
    return value


def _row(record: dict[str, Any], row_id: int | str, line: int) -> Row:
    checks = {**PROMPTS, **SETTINGS}
    _refuse_unknown(record, checks)
    prompts = [name for name in PROMPTS if name in record]
    if len(prompts) != 1:
        raise RowError(f"expected exactly one of {', '.join(PROMPTS)}, got {' and '.join(prompts) or 'none'}.")
    return Row(row_id, line, **{name: checks[name](name, value) for name, value in record.items()})


def _score_row(record: dict[str, Any], row_id: int | str, line: int) -> ScoreRow:
    _refuse_unknown(record, {"ids": _ids})
    if "ids" not in record:
        raise RowError("expected ids, a list of token ids, got none.")
    return ScoreRow(row_id, line, _ids("ids", record["ids"]))


def _refuse_unknown(record: dict[str, Any], checks: dict[str, Any]) -> None:
    unknown = [name for name in record if name not in checks]
    if unknown:
        raise RowError(f"unknown field {_short(unknown[0])}; known are id, {', '.join(checks)}.")


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be text, got {_short(value)}.")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise RowError(f"{name} holds half a character (a lone surrogate): {_short(value)}.")
    return value


def _int(name: str, value: Any, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise RowError(f"{name} must be an integer from 0 to {most}, got {_short(value)}.")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise RowError(f"{name} must be a list of token ids, got {_short(value)}.")
    return tuple(_int(f"{name}[{place}]", item, _MAX_ID) for place, item in enumerate(value))


def _messages(name: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise RowError(f"{name} must be a list of at least one message, got {_short(value)}.")
    return value


def _number(name: str, value: Any, least: float = -math.inf) -> float:
    expected = "a finite number" + (f" of at least {least:g}" if least > -math.inf else "")
    wrong = RowError(f"{name} must be {expected}, got {_short(value)}.")
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < math.inf:
        raise wrong
    try:
        number = float(value)
    except OverflowError as error:
        raise wrong from error
    if math.isinf(number):
        raise wrong
    return number


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RowError(f"{name} must be an object of token ids and numbers, got {_short(value)}.")
    bias = {}
    for key, number in value.items():
        text = str(key)
        if isinstance(key, bool) or not (text.isascii() and text.isdigit()):
            raise RowError(f"{name} has the key {_short(key)}; expected token ids.")
        bias[_int(name, int(text), _MAX_ID)] = _number(f"{name}[{text}]", number)
    return bias


def _eos(name: str, value: Any) -> tuple[int, ...]:
    return _ids(name, value) if isinstance(value, list | tuple) else (_int(name, value, _MAX_ID),)


def _stop(name: str, value: Any) -> tuple[str, ...]:
    items = value if isinstance(value, list | tuple) else [value]
    stops = tuple(_text(name, item) for item in items)
    for stop in stops:
        if not stop or "\ufffd" in stop:
            raise RowError(f"{name} must be text that is not empty and without U+FFFD, got {_short(stop)}.")
    return stops


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, TypeError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


PROMPTS: dict[str, Callable[[str, Any], Any]] = {"prompt": _text, "prompt_ids": _ids, "messages": _messages}
SETTINGS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": lambda name, value: _int(name, value, _MAX_ID),
    "min_new_tokens": lambda name, value: _int(name, value, _MAX_ID),
    "temperature": lambda name, value: _number(name, value, least=0),
    "top_k": lambda name, value: _int(name, value, _MAX_ID),
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _bias,
    "ban": _ids,
    "allow": _ids,
    "eos": _eos,
    "stop": _stop,
    "seed": lambda name, value: _int(name, value, _MAX_SEED),
}
