"""Qwen2 and 2.5 (2407.10671): Llama with biases on q, k and v, and a window on the upper layers where asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family, LayerKind


def upper_windows(read: hf_config.Reader, num_layers: int) -> tuple[LayerKind, ...]:
    """Read the windows: of the layers from ``max_window_layers`` on, or of those that ``layer_types`` names."""
    window, first = read.window(4096), read.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"config.json: max_window_layers is {first!r}; expected 0 or a positive integer.")
    if not read.flag("use_sliding_window", False):
        window = None
    return read.kinds(num_layers, window, [window is not None and i >= first for i in range(num_layers)])


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5).

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = read.shape()
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        qkv_bias=True,
        kinds=upper_windows(read, fields["num_layers"]),
    )
    read.only("hidden_act", "silu")
    read.refuse_the_rest()
    return config


EXAMPLE = {
    "model_type": "qwen2",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "sliding_window": 4,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "tie_word_embeddings": True,
}
FAMILY = Family("qwen2", ("qwen2",), parse, mapping.llama_like, (EXAMPLE,))
