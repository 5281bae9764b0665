"""Phi-3 (2404.14219): Llama whose checkpoints fuse q, k, v and gate, up; heads may turn in part only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family, Leaf


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key. Among them longrope, whose
            frequencies depend on how long the text will be.
    """
    read = hf_config.Reader(hf)
    fields = read.shape(norm_eps=1e-5)
    layers, window = fields["num_layers"], read.window(None)
    rope = read.rope(fields["max_positions"], partial=True)
    if rope.rope_type != "default":  # transformers takes even "yarn" for longrope here
        raise ValueError(f"rope type {rope.rope_type!r} is not honoured in Phi-3; only 'default' is.")
    turning = int(fields["head_dim"] * rope.partial_rotary_factor)
    if turning < 2 or turning % 2 or turning > fields["head_dim"]:
        raise ValueError(
            f"partial_rotary_factor = {rope.partial_rotary_factor}: {turning} of {fields['head_dim']} dimensions "
            "would turn; expected an even number."
        )
    config = DecoderConfig(**fields, rope=rope, kinds=read.kinds(layers, window, [window is not None] * layers))
    read.only("hidden_act", "silu")
    read.only("attention_bias", False)
    read.only("original_max_position_embeddings", None, ignored=True)
    for dropout in ("embd_pdrop", "resid_pdrop"):
        read.only(dropout, 0.0, ignored=True)
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor, or the rows of a tensor, that hold it."""
    c = config
    query, key_value = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = (query, key_value, key_value)
    found = mapping.ends(c)
    for i in range(c.num_layers):
        here, there = f"layers_{i}", f"model.layers.{i}"
        found += mapping.norms(c, i, attention_norm="input_layernorm", mlp_norm="post_attention_layernorm")
        found += mapping.parts(
            f"{there}.self_attn.qkv_proj.weight",
            {(here, "attention", name, "kernel"): rows for name, rows in zip("qkv", sizes, strict=True)},
            c.width,
        )
        found += mapping.linear((here, "attention", "out"), f"{there}.self_attn.o_proj", c.width, query, False)
        found += mapping.parts(
            f"{there}.mlp.gate_up_proj.weight",
            {(here, "mlp", name, "kernel"): c.mlp_width for name in ("gate", "up")},
            c.width,
        )
        found += mapping.linear((here, "mlp", "down"), f"{there}.mlp.down_proj", c.width, c.mlp_width, False)
    return found


EXAMPLE = {
    "model_type": "phi3",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "partial_rotary_factor": 0.75,
    "sliding_window": 5,
    "pad_token_id": 0,
}
FAMILY = Family("phi3", ("phi3",), parse, leaves, (EXAMPLE,))
