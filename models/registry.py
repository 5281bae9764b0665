"""The model families, by ``model_type``. A new family is one file and one line here."""

from __future__ import annotations

from specjax.models import gemma2, gemma3, gpt2, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, qwen3_moe
from specjax.models.config import Family

FAMILIES: tuple[Family, ...] = (
    gemma2.FAMILY,
    gemma3.FAMILY,
    gpt2.FAMILY,
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    olmo2.FAMILY,
    phi3.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
)


def family_for(model_type: str) -> Family:
    """Return the family that serves ``model_type``.

    Raises:
        ValueError: none does; the message lists those that are known.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise ValueError(f"model_type {model_type!r} is not supported; known: {known}.")
