"""Gemma 2 (2408.00118): soft caps, a window on every second layer, norms before and after, a scaled embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family, Leaf


def common(read: hf_config.Reader) -> dict[str, Any]:
    """Read what Gemma 2 and 3 share into DecoderConfig fields."""
    fields = read.shape(head_dim=256, tied=True)
    bias = read.flag("attention_bias", False)
    # Old configs spell the activation twice, and only this key was ever used.
    read.only("hidden_act", "gelu_pytorch_tanh", ignored=True)
    read.only("use_bidirectional_attention", False)
    return {
        **fields,
        "qkv_bias": bias,
        "out_bias": bias,
        "activation": read.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norm": "rms_plus_one",
        "norm_place": "both",
        "query_scale": read.number("query_pre_attn_scalar", 256) ** -0.5,
        "scaled_embedding": True,
    }


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = common(read)
    layers, window = fields["num_layers"], read.window(4096)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        attention_cap=read.cap("attn_logit_softcapping", 50.0),
        logit_cap=read.cap("final_logit_softcapping", 30.0),
        kinds=read.kinds(layers, window, [i % 2 == 0 for i in range(layers)]),
    )
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor that holds it."""
    found = mapping.ends(config)
    for i in range(config.num_layers):
        found += mapping.norms(
            config,
            i,
            attention_norm="input_layernorm",
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        )
        found += mapping.attention(config, i) + mapping.mlp(config, i)
    return found


EXAMPLE = {
    "model_type": "gemma2",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "query_pre_attn_scalar": 5,
    "sliding_window": 5,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
FAMILY = Family("gemma2", ("gemma2",), parse, leaves, (EXAMPLE,))
