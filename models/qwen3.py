"""Qwen3 (2505.09388): Llama with a norm over each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family
from specjax.models.qwen2 import upper_windows


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = read.shape(head_dim=128)
    bias = read.flag("attention_bias", False)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        kinds=upper_windows(read, fields["num_layers"]),
    )
    read.only("hidden_act", "silu")
    read.refuse_the_rest()
    return config


EXAMPLE = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
FAMILY = Family("qwen3", ("qwen3",), parse, mapping.llama_like, (EXAMPLE,))
