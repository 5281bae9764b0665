"""From files to prompts and completions as ids: which tokens are trained on is decided here.

A row of the JSON Lines file is one of

    {"text": ...}                       a text by itself; a "prompt" beside it names it and is no part of it
    {"prompt": ..., "completion": ...}  a text that goes on from another
    {"messages": [...]}                 a chat; each turn of the assistant is a completion of what stands before it
    {"prompt": ...}                     a prompt without an answer; so is a chat that ends with the user's turn

Other fields are not read. A completion ends with the end-of-text token: the template's own in a chat. The loss covers
the completion's tokens, the first and the last of them among them, and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specjax.errors import RowError, UsageError
from specjax.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Example:
    """A prompt and what follows it.

    Attributes:
        key: what the held-out split goes by: the prompt, or the text where there is none.
        prompt: its ids.
        completion: ids to train on; None for a prompt without an answer.
        is_text: a text by itself: its prompt is what the tokenizer begins texts with.
    """

    key: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...] | None
    is_text: bool = False

    def begun(self, count: int) -> tuple[int, ...]:
        """Return the ids to answer: the prompt, or of a text its first ``count`` tokens."""
        if not self.is_text or self.completion is None:
            return self.prompt
        return (*self.prompt, *self.completion[: min(count, len(self.completion) - 1)])


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What turns text into ids.

    Attributes:
        tokenizer: the target's.
        eos_ids: ids that end a text; the first is written after a text.
        bos_id: what begins one where the tokenizer adds nothing, or None.
    """

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None

    @property
    def start(self) -> tuple[int, ...]:
        """What stands before a text's first token."""
        begins = tuple(self.tokenizer.encode(""))
        return begins or (() if self.bos_id is None else (self.bos_id,))


def read_examples(path: str | Path, vocabulary: Vocabulary) -> list[Example]:
    """Read a JSON Lines file.

    Raises:
        UsageError: it cannot be read, has nothing in it, or a line (named) is not a row or cannot be encoded.
    """
    found: list[Example] = []
    for line, row in read_lines(path):
        try:
            found += _examples(row, vocabulary)
        except RowError as error:
            raise UsageError(f"{path}, line {line}: {error}") from error
    if not found:
        raise UsageError(f"{path} has no rows; expected JSON Lines with text, prompt or messages.")
    return found


def read_lines(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a JSON Lines file with its line number, from 1; blank lines are skipped.

    Raises:
        UsageError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        content = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise UsageError(
            f"The data {path} cannot be read: {error.strerror}. Give a JSON Lines file (--data)."
        ) from error
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON ({error}).") from error
        if not isinstance(row, dict):
            raise UsageError(f"{path}, line {number}: expected an object, got a {type(row).__name__}.")
        yield number, row


def texts(path: str | Path) -> Iterator[str]:
    """Yield the texts of a file to train a tokenizer on: texts, completions with their prompts, and messages."""
    for _, row in read_lines(path):
        if "messages" in row:
            yield from (message.get("content", "") for message in row["messages"])
        elif "text" in row:
            yield row["text"]
        else:
            yield str(row.get("prompt", "")) + str(row.get("completion", ""))


def _examples(row: dict[str, Any], vocabulary: Vocabulary) -> Iterator[Example]:
    tokenizer, eos = vocabulary.tokenizer, vocabulary.eos_ids
    for name in ("text", "prompt", "completion"):
        if name in row and not isinstance(row[name], str):
            raise RowError(f"{name} must be text.")
    if "messages" in row:
        yield from _chat(row["messages"], vocabulary)
        return
    if not {"text", "prompt"} & row.keys():
        raise RowError(f"expected text, prompt or messages, got {', '.join(row) or 'nothing'}.")
    if ("text" in row or "completion" in row) and not eos:
        raise RowError("the target names no end-of-text token, so no completion can be ended.")
    if "text" in row:
        key = row.get("prompt", row["text"])
        yield Example(key, vocabulary.start, (*tokenizer.encode_plain(row["text"]), eos[0]), is_text=True)
        return
    completion = None
    if "completion" in row:
        completion = (*tokenizer.encode_plain(row["completion"]), eos[0])
    prompt = tuple(tokenizer.encode(row["prompt"])) or vocabulary.start
    yield Example(row["prompt"], prompt, completion)


def _chat(messages: Any, vocabulary: Vocabulary) -> Iterator[Example]:
    tokenizer = vocabulary.tokenizer
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise RowError("messages must be a list of objects with role and content.")
    key = json.dumps(messages[: next((i + 1 for i, m in enumerate(messages) if m.get("role") == "user"), 1)])
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    for i in turns:
        before = tokenizer.render_chat(messages[:i])
        yield Example(key, tuple(tokenizer.encode_plain(before)), _turn(messages[: i + 1], before, vocabulary))
    if not turns or turns[-1] < len(messages) - 1:
        yield Example(key, tuple(tokenizer.encode_chat(messages)), None)


def _turn(messages: list[dict[str, Any]], before: str, vocabulary: Vocabulary) -> tuple[int, ...]:
    """Return the last turn as the template writes it after ``before``, up to its end-of-turn token.

    Most templates do not mark the assistant's words, so they are found by comparison: the template of the chat with the
    turn must begin with the template of the chat before it.
    """
    whole = vocabulary.tokenizer.render_chat(messages, generation_prompt=False)
    if not whole.startswith(before):
        raise RowError(
            "the chat template writes a finished turn in another way than it asks for one, so which tokens are the "
            "assistant's cannot be told: give prompt and completion instead."
        )
    ids = vocabulary.tokenizer.encode_plain(whole[len(before) :])
    ends = [i for i, token in enumerate(ids) if token in vocabulary.eos_ids]
    if not ends:
        raise RowError(
            f"the chat template ends the assistant's turn with none of the end-of-text ids {vocabulary.eos_ids}: give "
            "prompt and completion instead."
        )
    return tuple(ids[: ends[0] + 1])


def held_out(key: str, share: float) -> bool:
    """Say whether a prompt is held out: by a hash, so that it is so in every run, whatever the file's order."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def split(examples: Sequence[Example], share: float) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on and those held out: no prompt is on both sides.

    Raises:
        UsageError: one side is empty.
    """
    held = [example for example in examples if held_out(example.key, share)]
    train = [example for example in examples if not held_out(example.key, share)]
    if not held or not train:
        raise UsageError(
            f"Of {len(examples)} rows {len(held)} are held out for validation (share {share}): give more rows or "
            "another validation.share."
        )
    return train, held
