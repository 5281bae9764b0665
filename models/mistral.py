"""Mistral (2310.06825): Llama with a sliding window on every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specjax.models import hf_config, mapping
from specjax.models.config import DecoderConfig, Family


def parse(hf: Mapping[str, Any]) -> DecoderConfig:
    """Read a ``config.json`` (transformers 4 or 5); an absent ``sliding_window`` is 4096, null is none.

    Raises:
        ValueError: an option that this family does not honour, by name, or a missing key.
    """
    read = hf_config.Reader(hf)
    fields = read.shape()
    layers, window = fields["num_layers"], read.window(4096)
    config = DecoderConfig(
        **fields,
        rope=read.rope(fields["max_positions"]),
        kinds=read.kinds(layers, window, [window is not None] * layers),
    )
    read.only("hidden_act", "silu")
    read.refuse_the_rest()
    return config


EXAMPLE = {
    "model_type": "mistral",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "sliding_window": 5,
}
FAMILY = Family("mistral", ("mistral",), parse, mapping.llama_like, (EXAMPLE,))
