"""OLMo 2 (2501.00656): norms after each half of a block instead of before, and over whole queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family, Leaf


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = read.shape(norm_eps=1e-5)
    bias = read.flag("attention_bias", False)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        qkv_bias=bias,
        out_bias=bias,
        norm_place="after",
        qk_norm="whole",
    )
    read.only("hidden_act", "silu")
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor that holds it."""
    found = mapping.ends(config)
    for i in range(config.num_layers):
        found += mapping.norms(
            config, i, attention_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm"
        )
        found += mapping.attention(config, i) + mapping.mlp(config, i)
    return found


EXAMPLE = {
    "model_type": "olmo2",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "attention_bias": True,
}
FAMILY = Family("olmo2", ("olmo2",), parse, leaves, (EXAMPLE,))
