"""Lossless speculative decoding for JAX: exactly the target's distribution, one jitted loop."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specjax.api import Output, generate
    from specjax.errors import CheckpointError, RowError, SpecjaxError, UsageError
    from specjax.generate import make_decoder
    from specjax.pair import Pair, load
    from specjax.sampling import SamplingParams
    from specjax.score import score
    from specjax.types import Cache, Drafter, ModelFn, ModelOutput, Proposal, RoundInfo, RoundState, Rule, Verdict

__version__ = "0.1.0"

# Imported on first use, so that `specjax --help` does not wait for jax.
_HOMES = {
    "api": ("Output", "generate"),
    "errors": ("CheckpointError", "RowError", "SpecjaxError", "UsageError"),
    "generate": ("make_decoder",),
    "pair": ("Pair", "load"),
    "sampling": ("SamplingParams",),
    "score": ("score",),
    "types": (
        "Cache", "Drafter", "ModelFn", "ModelOutput", "Proposal", "RoundInfo", "RoundState", "Rule", "Verdict",
    ),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Cache", "CheckpointError", "Drafter", "ModelFn", "ModelOutput", "Output", "Pair", "Proposal", "RoundInfo",
    "RoundState", "RowError", "Rule", "SamplingParams", "SpecjaxError", "UsageError", "Verdict", "generate", "load",
    "make_decoder", "score",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.{_HOME_OF[name]}"), name)


class _Package(ModuleType):
    """Keeps ``specjax.generate`` and ``specjax.score`` the functions when the modules of that name are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
