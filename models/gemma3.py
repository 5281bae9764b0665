"""Gemma 3, text (2503.19786): five windowed layers with their own rotary base to each full one, norms of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specjax.models import gemma2, hf_config
from specjax.models.config import DecoderConfig, Family, RopeConfig

FULL_BASE, LOCAL_BASE = 1e6, 1e4


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = gemma2.common(read)
    layers, window = fields["num_layers"], read.window(4096)
    pattern = read.positive("sliding_window_pattern", None) or read.positive("_sliding_window_pattern", 6)
    kinds = read.kinds(layers, window, [(i + 1) % pattern != 0 for i in range(layers)])
    full, local = _ropes(read, fields["max_positions"])
    read.only("attn_logit_softcapping", None)
    config = DecoderConfig(
        **fields,
        rope=full,
        qk_norm="head",
        logit_cap=read.cap("final_logit_softcapping", None),
        kinds=tuple(kind if kind.window is None else replace(kind, rope=local) for kind in kinds),
    )
    read.refuse_the_rest()
    return config


def _ropes(read: hf_config.Reader, max_positions: int) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary embeddings of full and of windowed layers: nested by layer type (5), or by two bases (4)."""
    nested = read.get("rope_parameters", None)
    if nested is None:
        local = read.number("rope_local_base_freq", LOCAL_BASE)
        return read.rope(max_positions, default_theta=FULL_BASE), RopeConfig(rope_theta=local)
    tables = {"full_attention": FULL_BASE, "sliding_attention": LOCAL_BASE}
    if not isinstance(nested, Mapping) or set(nested) - set(tables):
        raise ValueError(
            f"config.json: rope_parameters is {nested!r}; expected a table for each of {', '.join(tables)}."
        )
    for key in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        if read.get(key, None) is not None:
            raise ValueError(f"config.json has both rope_parameters and {key}: keep one.")
    full, local = (
        hf_config.rope_from(nested.get(name) or {}, max_positions, default_theta=base) for name, base in tables.items()
    )
    if {full.partial_rotary_factor, local.partial_rotary_factor} != {1.0}:
        raise ValueError("partial_rotary_factor is not honoured; only 1.0 is.")
    return full, local


EXAMPLE = {
    "model_type": "gemma3_text",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 6,
    "sliding_window": 5,
    "sliding_window_pattern": 3,
    "rope_theta": 1000.0,
    "rope_local_base_freq": 100.0,
    "final_logit_softcapping": 3.0,
}
FAMILY = Family("gemma3", ("gemma3_text",), parse, gemma2.leaves, (EXAMPLE,))
