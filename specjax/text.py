"""From text to ids and back: the tokenizer, the chat template, streaming decode, stop strings.

Decoding is ``tokenizers``' own, special tokens skipped, without the spaces clean-up of older configs (it
would change text that is already shown).
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from specjax.errors import CheckpointError, RowError
from specjax.text_stream import StopFinder, StreamDecoder, StreamRules

__all__ = ["StopFinder", "StreamDecoder", "Tokenizer", "load_tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's tokenizer with its chat template.

    Args:
        backend: a ``tokenizers.Tokenizer``; its truncation and padding are switched off.
        config: ``tokenizer_config.json``, for the named special tokens, the template and ``add_bos_token``.
        template: the chat template, if it is not in ``config``.

    Attributes:
        vocab_size: number of ids, added tokens among them (largest id + 1).
        bos_id: id of the beginning-of-sequence token, or None.
    """

    def __init__(self, backend: Any, *, config: dict[str, Any] | None = None, template: str | None = None) -> None:
        config = config or {}
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._names = _named_tokens(config)
        self._template, self._template_names = (template, []) if template else _pick_template(config)
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.bos_id: int | None = backend.token_to_id(self._names.get("bos_token", ""))
        self._add_bos = config.get("add_bos_token") if self.bos_id is not None else None

    @property
    def has_template(self) -> bool:
        """Whether ``encode_chat`` can be used."""
        return self._template is not None

    @property
    def template(self) -> str | None:
        """The chat template's text."""
        return self._template

    def named(self, name: str) -> str | None:
        """Return the text of a named special token, as "eos_token"; None where the config names none."""
        return self._names.get(name)

    def encode(self, text: str) -> list[int]:
        """Return the ids of raw text, with the tokenizer's own special tokens.

        Raises:
            RowError: the text is not valid Unicode (a lone surrogate).
        """
        ids = self._ids(text, special=True)
        if self._add_bos is True and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # type: ignore[list-item]
        if self._add_bos is False and ids[:1] == [self.bos_id]:
            return self._ids(text, special=False)
        return ids

    def spellings(self, text: str) -> list[list[int]]:
        """Return the ids of a text inside another: as it stands and after a space, without special tokens.

        Raises:
            RowError: the text is not valid Unicode (a lone surrogate).
        """
        found = [self._ids(text, special=False), self._ids(f" {text}", special=False)]
        return [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]

    def encode_plain(self, text: str) -> list[int]:
        """Return the ids of a text as it stands, without special tokens of the tokenizer's own.

        Raises:
            RowError: the text is not valid Unicode (a lone surrogate).
        """
        return self._ids(text, special=False)

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Return the ids of a chat up to the assistant's turn; a BOS comes from the template alone.

        Raises:
            RowError: no template, messages of the wrong form, or the template refuses them.
        """
        return self._ids(self.render_chat(messages), special=False)

    def render_chat(self, messages: list[dict[str, Any]], *, generation_prompt: bool = True) -> str:
        """Return the text of a chat, as the template writes it, with the generation prompt or without.

        Raises:
            RowError: no template, messages of the wrong form, or the template refuses them.
        """
        if self._template is None:
            names = f" by default (only the named ones {self._template_names})" if self._template_names else ""
            raise RowError(f"The model has no chat template{names}: give raw text (prompt, or --raw) or prompt_ids.")
        _check_messages(messages, self._template)
        try:
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=generation_prompt
            )
        except RowError:
            raise
        except Exception as error:
            raise RowError(f"The chat template refuses these messages: {_one_line(error)}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens skipped; ids of no token give no text."""
        return self._backend.decode([int(token_id) for token_id in ids], skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """Return a fresh streaming decoder."""
        return StreamDecoder(self._rules)

    def differences(self, other: Tokenizer, limit: int = 5) -> list[str]:
        """Compare two tokenizers id by id.

        Returns:
            One line for each id whose token differs, those that both have first, at most ``limit`` of them and
            then a line with the number of others. Empty: the same tokens throughout.
        """
        ours, theirs = self._id_tokens, other._id_tokens
        both = [f"id {i}: {ours[i]!r} and {theirs[i]!r}" for i in sorted(ours.keys() & theirs.keys())
                if ours[i] != theirs[i]]  # fmt: skip
        one = [f"id {i}: {ours[i]!r} and no token" if i in ours else f"id {i}: no token and {theirs[i]!r}"
               for i in sorted(ours.keys() ^ theirs.keys())]  # fmt: skip
        lines = both + one
        return lines if len(lines) <= limit else [*lines[:limit], f"and {len(lines) - limit} other ids"]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over every id and its token."""
        pairs = sorted(self._id_tokens.items())
        return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()

    @cached_property
    def _id_tokens(self) -> dict[int, str]:
        ids = self._backend.get_vocab(with_added_tokens=True).values()
        return {i: self._backend.id_to_token(i) for i in ids}

    @cached_property
    def _rules(self) -> StreamRules:
        return StreamRules(self._backend)

    @cached_property
    def _compiled(self) -> Any:
        environment = _template_environment()
        environment.globals.update(self._names)
        try:
            return environment.from_string(self._template or "")
        except Exception as error:
            raise RowError(f"The model's chat template cannot be read: {_one_line(error)}") from error

    def _ids(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RowError(f"The text is not valid Unicode at character {error.start}: {_one_line(error)}") from error
        return self._backend.encode(text, add_special_tokens=special).ids


def load_tokenizer(folder: str | Path) -> Tokenizer | None:
    """Load the tokenizer of a folder in Hugging Face layout.

    Returns:
        The tokenizer, or None when the folder has no ``tokenizer.json``.

    Raises:
        CheckpointError: a file is there but cannot be read.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({_one_line(error)}): fetch the tokenizer again.") from error
    config = {
        **_read_json(folder / "special_tokens_map.json"),
        **_read_json(folder / "chat_template.json"),
        **_read_json(folder / "tokenizer_config.json"),
    }
    template = folder / "chat_template.jinja"
    try:
        text = template.read_text(encoding="utf-8") if template.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{template} cannot be read: {_one_line(error)}") from error
    return Tokenizer(backend, config=config, template=text)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected an object.")
    return content


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens that a template may name; each is written as text or as an object."""
    tokens = {name: config.get(name) for name in _NAMED_TOKENS}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _pick_template(config: dict[str, Any]) -> tuple[str | None, list[str]]:
    """Return the template of a config, and the names of its templates when none is the default."""
    template = config.get("chat_template")
    if isinstance(template, list):
        try:
            named = {entry["name"]: entry["template"] for entry in template}
        except (TypeError, KeyError) as error:
            raise CheckpointError(
                "chat_template in the tokenizer's config: expected name and template each."
            ) from error
        only = next(iter(named.values())) if len(named) == 1 else None
        return named.get("default", only), sorted(named)
    return template or None, []


def _check_messages(messages: Any, template: str) -> None:
    """Refuse messages of the wrong form, and fields that the template would not see.

    Raises:
        RowError: what was got, and what is expected.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError(f"messages must be a list of at least one message, got {_short(messages)}.")
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RowError(f"messages[{place}] must be an object with role and content, got {_short(message)}.")
        for field in ("role", "content"):
            if not isinstance(message.get(field), str):
                raise RowError(f"messages[{place}].{field} must be text, got {_short(message.get(field))}.")
        unused = [field for field in message if field not in ("role", "content") and str(field) not in template]
        if unused:
            raise RowError(f"messages[{place}] has {unused[0]!r}, which the model's chat template does not use.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _template_environment() -> Any:
    """Return the environment that chat templates are written for."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """``{% generation %}`` marks the assistant's text for training; here it is only its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise RowError(f"The chat template refuses these messages: {' '.join(str(message).split())}")


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as templates expect it: without the escapes of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
