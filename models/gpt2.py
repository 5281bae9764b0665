"""GPT-2: learned positions, LayerNorm, a plain MLP with GELU, biases throughout, weights stored [in, out]."""

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
    width, heads, positions = read.positive("n_embd"), read.positive("n_head"), read.positive("n_positions")
    if width % heads:
        raise ValueError(f"n_embd {width} is not a multiple of n_head {heads}.")
    config = DecoderConfig(
        vocab_size=read.positive("vocab_size"),
        width=width,
        mlp_width=read.positive("n_inner", 4 * width),
        num_layers=read.positive("n_layer"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        max_positions=positions,
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        rope=None,
        tied=read.flag("tie_word_embeddings", True),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        activation=read.activation("activation_function", "gelu_new"),
        gated=False,
        norm="layer",
        query_scale=None if read.flag("scale_attn_weights", True) else 1.0,
    )
    read.only("n_ctx", positions)
    read.only("scale_attn_by_inverse_layer_idx", False)
    read.only("add_cross_attention", False)
    read.flag("reorder_and_upcast_attn", False)  # scores are float32 in any case
    for key in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        read.only(key, 0.1, ignored=True)
    for key in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"):
        read.get(f"summary_{key}", None)  # of a classification head
    read.refuse_the_rest()
    return config


def leaves(config: DecoderConfig) -> list[Leaf]:
    """List every parameter with the tensor, or the columns of a tensor, that hold it."""
    c = config
    found = [
        mapping.leaf(("embedding",), "transformer.wte.weight", c.vocab_size, c.width),
        mapping.leaf(("positions",), "transformer.wpe.weight", c.max_positions, c.width),
        *_norm(("final_norm",), "transformer.ln_f", c.width),
    ]
    for i in range(c.num_layers):
        here, there = f"layers_{i}", f"transformer.h.{i}"
        found += _norm((here, "attention_norm"), f"{there}.ln_1", c.width)
        found += _norm((here, "mlp_norm"), f"{there}.ln_2", c.width)
        found += _linears((here, "attention"), ("q", "k", "v"), f"{there}.attn.c_attn", c.width, c.width)
        found += _linears((here, "attention"), ("out",), f"{there}.attn.c_proj", c.width, c.width)
        found += _linears((here, "mlp"), ("up",), f"{there}.mlp.c_fc", c.mlp_width, c.width)
        found += _linears((here, "mlp"), ("down",), f"{there}.mlp.c_proj", c.width, c.mlp_width)
    if not c.tied:
        found.append(mapping.leaf(("head",), "lm_head.weight", c.vocab_size, c.width))
    return found


def _norm(path: tuple[str, ...], tensor: str, size: int) -> list[Leaf]:
    return [
        mapping.leaf((*path, "scale"), f"{tensor}.weight", size),
        mapping.leaf((*path, "bias"), f"{tensor}.bias", size),
    ]


def _linears(path: tuple[str, ...], names: tuple[str, ...], tensor: str, rows: int, columns: int) -> list[Leaf]:
    kernels = {(*path, name, "kernel"): rows for name in names}
    biases = {(*path, name, "bias"): rows for name in names}
    return [
        *mapping.parts(f"{tensor}.weight", kernels, columns, transposed=True),
        *mapping.parts(f"{tensor}.bias", biases),
    ]


EXAMPLE = {
    "model_type": "gpt2",
    "vocab_size": 24,
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 20,
}
FAMILY = Family("gpt2", ("gpt2",), parse, leaves, (EXAMPLE,))
