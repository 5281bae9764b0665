"""The Llama family: pre-norm, rotary embedding, grouped heads, gated MLP. SmolLM2 is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config
from specjax.models.config import DecoderConfig, Family, Leaf


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    width = read.positive("hidden_size")
    heads = read.positive("num_attention_heads")
    max_positions = read.positive("max_position_embeddings", 2048)
    attention_bias = read.flag("attention_bias", False)
    head_dim = read.positive("head_dim", None)
    if head_dim is None:
        if width % heads:
            raise ValueError(f"hidden_size {width} is not a multiple of num_attention_heads {heads}: set head_dim.")
        head_dim = width // heads
    config = DecoderConfig(
        vocab_size=read.positive("vocab_size"),
        width=width,
        mlp_width=read.positive("intermediate_size"),
        num_layers=read.positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=read.positive("num_key_value_heads", heads),
        head_dim=head_dim,
        max_positions=max_positions,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=read.rope(max_positions),
        tied=read.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=read.flag("mlp_bias", False),
    )
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_attention_heads {config.num_heads} is not a multiple of num_key_value_heads {config.num_kv_heads}."
        )
    read.only("hidden_act", "silu")
    read.only("rope_interleaved", False)
    read.only("attention_dropout", 0.0, ignored=True)
    read.only("pretraining_tp", 1, ignored=True)
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor that holds it."""
    c = config
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    found = [_leaf(("embedding",), "model.embed_tokens.weight", c.vocab_size, c.width)]
    for i in range(c.num_layers):
        here, there = f"layers_{i}", f"model.layers.{i}"
        found.append(_leaf((here, "attention_norm", "scale"), f"{there}.input_layernorm.weight", c.width))
        found.append(_leaf((here, "mlp_norm", "scale"), f"{there}.post_attention_layernorm.weight", c.width))
        linears = (
            ("attention", "q", "self_attn.q_proj", query, c.width, c.qkv_bias),
            ("attention", "k", "self_attn.k_proj", key_value, c.width, c.qkv_bias),
            ("attention", "v", "self_attn.v_proj", key_value, c.width, c.qkv_bias),
            ("attention", "out", "self_attn.o_proj", c.width, query, c.out_bias),
            ("mlp", "gate", "mlp.gate_proj", c.mlp_width, c.width, c.mlp_bias),
            ("mlp", "up", "mlp.up_proj", c.mlp_width, c.width, c.mlp_bias),
            ("mlp", "down", "mlp.down_proj", c.width, c.mlp_width, c.mlp_bias),
        )
        for part, name, tensor, rows, columns, bias in linears:
            found.append(_leaf((here, part, name, "kernel"), f"{there}.{tensor}.weight", rows, columns))
            if bias:
                found.append(_leaf((here, part, name, "bias"), f"{there}.{tensor}.bias", rows))
    found.append(_leaf(("final_norm", "scale"), "model.norm.weight", c.width))
    if not c.tied:
        found.append(_leaf(("head",), "lm_head.weight", c.vocab_size, c.width))
    return found


def _leaf(path: tuple[str, ...], tensor: str, *shape: int) -> Leaf:
    return Leaf(path, shape, (tensor,), (shape,))


FAMILY = Family(name="llama", model_types=("llama",), parse=parse, leaves=leaves)
