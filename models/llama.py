"""The Llama family: pre-norm, rotary embedding, grouped heads, gated MLP. SmolLM2 is one."""

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
    fields = read.shape(max_positions=2048)
    attention_bias = read.flag("attention_bias", False)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", False),
    )
    read.only("hidden_act", "silu")
    read.only("rope_interleaved", False)
    read.only("pretraining_tp", 1, ignored=True)
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor that holds it."""
    return mapping.llama_like(config)


BIASED = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "mlp_bias": True,
}
TIED = {
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
}
FAMILY = Family(name="llama", model_types=("llama",), parse=parse, leaves=leaves, examples=(BIASED, TIED))
