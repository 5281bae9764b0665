"""Mixtral (2401.04088): Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
    layers, window = fields["num_layers"], read.window(None)
    experts = read.experts(fields["mlp_width"], normalised=True)
    kinds = read.kinds(layers, window, [window is not None] * layers)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"], default_theta=1e6),
        kinds=tuple(replace(kind, experts=experts) for kind in kinds),
    )
    read.only("hidden_act", "silu")
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensors that hold it."""
    found = mapping.ends(config)
    for i in range(config.num_layers):
        found += mapping.norms(config, i, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        found += mapping.attention(config, i)
        found += mapping.experts(config, i, "block_sparse_moe", gate="w1", up="w3", down="w2")
    return found


EXAMPLE = {
    "model_type": "mixtral",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
}
FAMILY = Family("mixtral", ("mixtral",), parse, leaves, (EXAMPLE,))
