"""Pairs by name: which target and which draft belong together."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import msgspec

from specjax.errors import UsageError

DEFAULT_PAIR = "smollm2"
EMBEDDED_PAIR = "tiny"  # its weights are part of the package
MIXED = "mixed:"


class PairConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A pair's .toml file: WHERE of target and draft, and a draft length."""

    target: str
    draft: str = "ngram"
    gamma: int | None = None


def names_of(target: str | Path | None, draft: str | Path | None, pair: str | Path | None) -> PairConfig:
    """Return where target and draft are, from what a caller gave of target, draft and pair.

    Raises:
        UsageError: both a target and a pair, or an unknown pair.
    """
    if target is not None and pair is not None:
        raise UsageError("Got both a target and a pair; give one of them.")
    if target is not None:
        return PairConfig(str(target), str(draft or "ngram"))
    named = read_pair(pair or DEFAULT_PAIR)
    return named if draft is None else msgspec.structs.replace(named, draft=str(draft))


def pair_names() -> list[str]:
    """Return the names of the pairs that ship."""
    folder = importlib.resources.files("specjax.configs") / "pairs"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_pair(pair: str | Path) -> PairConfig:
    """Read a pair by name, or from a .toml file whose relative folders are taken from where it lies.

    Raises:
        UsageError: an unknown name or a file that cannot be read.
    """
    path = Path(pair)
    named = path.suffix != ".toml"
    if named and str(pair) not in pair_names():
        raise UsageError(f"Pair {str(pair)!r} is not known; known: {', '.join(pair_names())}, or pass a .toml file.")
    try:
        if named:
            text = (importlib.resources.files("specjax.configs") / "pairs" / f"{pair}.toml").read_text()
        else:
            text = path.read_text()
        config = msgspec.toml.decode(text, type=PairConfig)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UsageError(f"Pair {pair}: {error}. Expected target, and optionally draft and gamma.") from error
    if named:
        return config

    def beside(where: str) -> str:
        if where.startswith(MIXED):
            return MIXED + beside(where.removeprefix(MIXED))
        return str(path.parent / where) if (path.parent / where).exists() else where

    return msgspec.structs.replace(config, target=beside(config.target), draft=beside(config.draft))
