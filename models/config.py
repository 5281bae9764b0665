"""What a decoder is made of, as plain values: no arrays, no jax, cheap to import."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; field names are the Hugging Face ``rope_parameters`` keys.

    ``factor`` and below are used by the scaled kinds only (linear, llama3, yarn), except the last:
    ``partial_rotary_factor`` is the share of a head's dimensions, from the first on, that turn.
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
    partial_rotary_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of an MLP.

    Attributes:
        count: how many experts.
        top: how many serve each token.
        width: inner size of each.
        normalised: the weights of the chosen ones are scaled to a sum of 1.
    """

    count: int
    top: int
    width: int
    normalised: bool


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What may differ from layer to layer.

    Attributes:
        window: a query sees itself and ``window - 1`` positions before it; None: all.
        rope: rotary embedding of this layer; None: the decoder's.
        experts: None: the MLP.
    """

    window: int | None = None
    rope: RopeConfig | None = None
    experts: Experts | None = None


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
        norm_eps: epsilon of every norm.
        rope: rotary embedding; None: positions are learned vectors added to the embedding.
        tied: the output head is the embedding.
        qkv_bias, out_bias, mlp_bias: whether those projections carry a bias.
        activation: the MLP's function; "gelu_tanh" is the approximation by tanh.
        kinds: one per layer, for families whose layers differ; empty: all alike.
        gated: the MLP is down(act(gate(x)) * up(x)); else down(act(up(x))).
        norm: "rms" scales by w, "rms_plus_one" by 1 + w, "layer" is LayerNorm.
        norm_place: norms before each half of a block, after it (on what is added), or both.
        qk_norm: RMSNorm of queries and keys before they turn: per head, or over the whole projection.
        query_scale: factor of the scores; None: H ** -0.5.
        attention_cap, logit_cap: soft caps, cap * tanh(x / cap), of scores and of logits.
        scaled_embedding: the embedding is multiplied by sqrt(D), rounded to the dtype of the weights.
        head_rows: rows of an output head that scores fewer tokens than V; None: all. Not with ``tied``.
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
    rope: RopeConfig | None = RopeConfig()
    tied: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    kinds: tuple[LayerKind, ...] = ()
    gated: bool = True
    norm: Literal["rms", "rms_plus_one", "layer"] = "rms"
    norm_place: Literal["before", "after", "both"] = "before"
    qk_norm: Literal["head", "whole"] | None = None
    query_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    scaled_embedding: bool = False
    head_rows: int | None = None

    def kind(self, layer: int) -> LayerKind:
        """Return what is particular to a layer."""
        return self.kinds[layer] if self.kinds else LayerKind()

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary embedding of a layer."""
        return self.kind(layer).rope or self.rope


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and where a Hugging Face checkpoint keeps it.

    Attributes:
        path: keys into the nested parameter dict, e.g. ``("layers_0", "attention", "q", "kernel")``.
        shape: its shape.
        sources: the checkpoint tensors that make it, concatenated along axis 0 (one name: that tensor as it is).
        source_shapes: the shape of each source.
        transposed: the sources are stored [in, out]; each is transposed before anything else.
        rows: first row and the row after the last, where the leaf is a part of its one source.
    """

    path: tuple[str, ...]
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...]
    transposed: bool = False
    rows: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A model family: one file in ``models/`` and one line in ``registry.py``.

    Attributes:
        name: the family's name.
        model_types: the ``model_type`` values of ``config.json`` that it serves.
        parse: ``config.json`` (transformers 4 or 5 form) to a DecoderConfig; raises ValueError naming each
            option it does not honour.
        leaves: every parameter with its place in a checkpoint. A tied model lists no output head. The leaves that
            share a source by ``rows`` cover it, in order.
        examples: the ``config.json`` of a few tiny models, which between them use every option that the family
            honours; the conformance suite runs them.
    """

    name: str
    model_types: tuple[str, ...]
    parse: Callable[[Mapping[str, Any]], DecoderConfig]
    leaves: Callable[[DecoderConfig], list[Leaf]]
    examples: tuple[Mapping[str, Any], ...] = ()
