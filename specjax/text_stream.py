"""Streaming decode and stop strings: text as it comes, equal to decoding all ids at once.

``tokenizers.DecodeStream`` is not used: it drops an incomplete character at the end, raises on lone byte
tokens, and shows text that byte fallback takes back when a later byte makes the run invalid.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

_BYTE_TOKEN = re.compile(r"<0x(?:[0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")
_ANCHOR = "a"  # an ordinary token put first, so that what follows it is decoded as text in the middle is


def _char_bytes() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in set(plain)]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(shifted)}


_CHAR_BYTES = _char_bytes()


class _Assembler(Protocol):
    """Turns visible tokens into text that no later token can change, plus a tail that one still can."""

    def push(self, token: str) -> str: ...

    def tail(self) -> str: ...


class _ByteAssembler:
    """Byte-level vocabularies: tokens are bytes, and only an unfinished character is kept back."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> str:
        known = [_CHAR_BYTES.get(char, -1) for char in token]
        # As in the library: a token with one foreign character is taken as plain text.
        return self._utf8.decode(token.encode() if -1 in known else bytes(known))

    def tail(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")


class _GroupAssembler:
    """Vocabularies whose tokens are text by themselves, apart from runs of byte tokens.

    A run of byte tokens is one group: one bad byte makes the whole run U+FFFD, so that its text is known only
    when another token or the end comes. Only the first group and a strip at the start depend on their place.
    """

    def __init__(self, kind: _Groups) -> None:
        self._kind = kind
        self._run: list[str] = []
        self._first = True
        self._strip = kind.strip

    def push(self, token: str) -> str:
        if self._kind.byte_runs and _BYTE_TOKEN.fullmatch(token):
            self._run.append(token)
            return ""
        text = self._take(self._run) if self._run else ""
        self._run = []
        return text + self._take([token])

    def tail(self) -> str:
        return self._stripped(self._kind.text(self._run, first=self._first)) if self._run else ""

    def _take(self, group: list[str]) -> str:
        text = self._kind.text(group, first=self._first)
        kept = self._stripped(text)
        self._strip = 0 if kept else self._strip - len(text)  # the strip ends at the first text it leaves
        self._first = False
        return kept

    def _stripped(self, text: str) -> str:
        cut = 0
        while cut < min(self._strip, len(text)) and text[cut] == self._kind.strip_char:
            cut += 1
        return text[cut:]


class _WholeAssembler:
    """Decoders where a later token may change any text before it: nothing is final before the end."""

    def __init__(self, decode: Callable[[list[str]], str]) -> None:
        self._decode = decode
        self._tokens: list[str] = []

    def push(self, token: str) -> str:
        self._tokens.append(token)
        return ""

    def tail(self) -> str:
        return self._decode(self._tokens)


class _Groups:
    """What a tokenizer's group assemblers share: the rules of its decoder, and the text of each token seen."""

    def __init__(self, decode: Callable[[list[str]], str], *, strip: int, strip_char: str, byte_runs: bool) -> None:
        self._decode = decode
        self.strip = strip
        self.strip_char = strip_char
        self.byte_runs = byte_runs
        self._texts: dict[str, str] = {}

    def text(self, group: list[str], *, first: bool) -> str:
        """Return the text of one group of tokens, before the strip at the start of the whole text."""
        if first and not self.strip:
            return self._decode(group)
        if len(group) > 1:
            return self._decode([_ANCHOR, *group])[len(_ANCHOR) :]
        token = group[0]
        if token not in self._texts:
            self._texts[token] = self._decode([_ANCHOR, token])[len(_ANCHOR) :]
        return self._texts[token]


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a decoder's steps in order, nested sequences opened."""
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _groups(decode: Callable[[list[str]], str], steps: list[dict[str, Any]]) -> _Groups | None:
    """Return the rules for a decoder that works token by token, or None if it is not known to."""
    fused, strip, strip_char = False, 0, ""
    types = [step["type"] for step in steps]
    for step, kind in zip(steps, types, strict=True):
        if fused and kind == "Strip" and not strip and not step["stop"] and step["content"] != _ANCHOR:
            strip, strip_char = step["start"], step["content"]
        elif fused and kind != "Fuse":
            return None
        elif kind == "Fuse":
            fused = True
        elif kind == "Replace":
            if re.search(r"[\w<>+]", step["pattern"].get("String", "a") + step["content"], re.ASCII):
                return None  # it might make or unmake a byte token
        elif kind not in ("ByteFallback", "Metaspace", "Strip"):
            return None
    if (strip and "Metaspace" in types) or decode([_ANCHOR]) != _ANCHOR:
        return None
    return _Groups(decode, strip=strip, strip_char=strip_char, byte_runs="ByteFallback" in types)


class StreamRules:
    """How a tokenizer's tokens become text piece by piece; built once, shared by its streams.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self._tokens: dict[int, str | None] = {}
        self.new_assembler: Callable[[], _Assembler] = self._choose()

    def _choose(self) -> Callable[[], _Assembler]:
        decoder = self._backend.decoder
        if decoder is None:
            groups = _Groups(" ".join, strip=0, strip_char="", byte_runs=False)
            return lambda: _GroupAssembler(groups)
        steps = _steps(json.loads(decoder.__getstate__()))
        types = [step["type"] for step in steps]
        if types[0] == "ByteLevel" and set(types[1:]) <= {"Fuse"}:
            return _ByteAssembler
        groups = _groups(decoder.decode, steps)
        if groups is None:
            return lambda: _WholeAssembler(decoder.decode)
        return lambda: _GroupAssembler(groups)

    def token(self, token_id: int) -> str | None:
        """Return the token that an id shows, or None: a special token, or no token of this tokenizer."""
        if token_id not in self._tokens:
            token = self._backend.id_to_token(token_id)
            self._tokens[token_id] = None if token in self._special else token
        return self._tokens[token_id]


class StreamDecoder:
    """Decodes ids as they come. The texts pushed and the flush, joined, equal ``decode`` of all ids.

    Special tokens are skipped. No character is split and no text is ever taken back: text that a later token
    could still change is kept until it cannot.

    Example:
        >>> stream = tokenizer.stream()                                  # doctest: +SKIP
        >>> print(stream.push(ids[:3]) + stream.push(ids[3:]) + stream.flush())  # doctest: +SKIP
    """

    def __init__(self, rules: StreamRules) -> None:
        self._rules = rules
        self._assembler = rules.new_assembler()
        self._closed = False

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids and return the text that is now final.

        Raises:
            RuntimeError: the stream was flushed.
        """
        if self._closed:
            raise RuntimeError("This stream was flushed; start a new one for further ids.")
        tokens = (self._rules.token(int(token_id)) for token_id in ids)
        return "".join(self._assembler.push(token) for token in tokens if token is not None)

    @property
    def tail(self) -> str:
        """The text kept back so far: what ``flush`` would give now."""
        return "" if self._closed else self._assembler.tail()

    def flush(self) -> str:
        """End the stream and return the text that was kept back."""
        tail = self.tail
        self._closed = True
        return tail


class StopFinder:
    """Streams text up to the first stop string; text that may begin one is kept back until it cannot.

    Which id stops, and which text is visible, do not depend on how the ids are cut into blocks: the first id
    after which the decoded text holds a stop string. Of several, the one that ends first counts, and of those
    the one that begins first. EOS ids are the caller's: text leaves them out, so do not push them.

    Args:
        stops: stop strings, none of them empty.
        decoder: a fresh stream of the tokenizer.
        least: ids before the first of which can complete a stop; what they complete is text like any other.

    Attributes:
        stop: the stop string found, or None.
        stop_index: the place (from 0) of the id that completes it among all ids pushed, or None. Output keeps
            ``ids[:stop_index + 1]``.
        text: all that was returned so far, joined.

    Raises:
        ValueError: a stop string is empty or holds U+FFFD, which stands for broken bytes.
    """

    def __init__(self, stops: Sequence[str], decoder: StreamDecoder, *, least: int = 0) -> None:
        for stop in stops:
            if not stop or "\ufffd" in stop:
                raise ValueError(f"Got stop string {stop!r}, expected text without U+FFFD, not empty.")
        self._stops = list(stops)
        self._decoder = decoder
        self._least = least
        self._held = ""
        self._count = 0
        self.text = ""
        self.stop: str | None = None
        self.stop_index: int | None = None

    def push(self, ids: Sequence[int]) -> str:
        """Take further ids, up to the one that completes a stop; return text that is safe to show.

        Ids after the completing one are not looked at: ``stop_index`` says where to cut.
        """
        shown = []
        for token_id in ids:
            if self.stop is not None:
                break
            shown.append(self._step(token_id))
        text = "".join(shown)
        self.text += text
        return text

    def flush(self) -> str:
        """End the stream and return the text kept back; empty after a stop."""
        held, self._held = self._held, ""
        text = "" if self.stop is not None else held + self._decoder.flush()
        self.text += text
        return text

    def _step(self, token_id: int) -> str:
        self._held += self._decoder.push([token_id])
        self._count += 1
        seen = self._held + self._decoder.tail if self._stops and self._count > self._least else ""
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := seen.find(stop)) >= 0]
        if found:
            _, start, self.stop = min(found)
            self.stop_index = self._count - 1
            self._held = ""
            return seen[:start]
        cut = len(self._held) - max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that begins ``stop``."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
