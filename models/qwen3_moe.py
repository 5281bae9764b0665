"""Qwen3-MoE (2505.09388): Qwen3 with a mixture of experts in some or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family, LayerKind, Leaf


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = read.shape()
    layers = fields["num_layers"]
    bias = read.flag("attention_bias", False)
    experts = read.experts(
        read.positive("moe_intermediate_size"),
        normalised=read.flag("norm_topk_prob", False),
    )
    step, dense = read.positive("decoder_sparse_step", 1), read.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(i in range(layers) for i in dense):
        raise ValueError(
            f"config.json: mlp_only_layers is {dense!r}; expected a list of layers from 0 to {layers - 1}."
        )
    read.only("use_sliding_window", False)
    read.window(None)  # without use_sliding_window it says nothing
    read.get("max_window_layers", None)
    kinds = tuple(LayerKind(experts=None if i in dense or (i + 1) % step else experts) for i in range(layers))
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        kinds=kinds,
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
        if config.kind(i).experts is None:
            found += mapping.mlp(config, i)
        else:
            found += mapping.experts(config, i, "mlp", gate="gate_proj", up="up_proj", down="down_proj")
    return found


EXAMPLE = {
    "model_type": "qwen3_moe",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
FAMILY = Family("qwen3_moe", ("qwen3_moe",), parse, leaves, (EXAMPLE,))
