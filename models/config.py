"""What a decoder is made of, as plain values: no arrays, no jax, cheap to import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; field names are the Hugging Face ``rope_parameters`` keys.

    ``factor`` and below are used by the scaled kinds only (linear, llama3, yarn).
    """

    rope_type: Literal["default", "linear", "llama3", "yarn"] = "default"
    rope_theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer.

    Letters: V vocabulary, L layers, N query heads, G key-value heads, H head size, D width.

    Attributes:
        vocab_size: V, rows of the embedding (padding included).
        width: D.
        mlp_width: inner size of the MLP.
        num_layers: L.
        num_heads: N.
        num_kv_heads: G; N is a multiple of G.
        head_dim: H; N * H need not equal D.
        max_positions: context length the checkpoint declares.
        norm_eps: epsilon of RMSNorm.
        rope: rotary embedding.
        tied: the output head is the embedding.
        qkv_bias, out_bias, mlp_bias: whether those projections carry a bias.
        activation: the MLP's gate function.
    """

    vocab_size: int
    width: int
    mlp_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float = 1e-5
    rope: RopeConfig = RopeConfig()
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu"] = "silu"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and where a Hugging Face checkpoint keeps it.

    Attributes:
        path: keys into the nested parameter dict, e.g. ``("layers_0", "attention", "q", "kernel")``.
        shape: its shape.
        sources: the checkpoint tensors that make it, concatenated along axis 0 (one name: that tensor as it is).
        source_shapes: the shape of each source.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: one file in ``models/`` and one line in ``registry.py``.

    Attributes:
        name: the family's name.
        model_types: the ``model_type`` values of ``config.json`` that it serves.
        parse: ``config.json`` (transformers 4 or 5 form) to a DecoderConfig; raises ValueError naming each
            option it does not honour.
        leaves: every parameter with its place in a checkpoint. A tied model lists no output head.
    """

    name: str
    model_types: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], DecoderConfig]
    leaves: Callable[[DecoderConfig], list[Leaf]]
