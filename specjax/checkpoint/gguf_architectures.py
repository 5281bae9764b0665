"""The GGUF architectures that are read: one table entry each, with its names, its permutation and its norm offset."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.errors import CheckpointError

if TYPE_CHECKING:
    from specjax.checkpoint.gguf import GGUF

Finish = Callable[["GGUF", dict[str, Any]], None]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_LLAMA_BLOCK = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", **_ATTENTION, **_MLP}
_GEMMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    **_ATTENTION,
    **_MLP,
}
_KEYS = frozenset(
    """
    block_count context_length embedding_length feed_forward_length attention.head_count attention.head_count_kv
    attention.layer_norm_rms_epsilon attention.key_length attention.value_length rope.freq_base
    rope.dimension_count vocab_size expert_count expert_used_count
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.finetuned
    """.split()
)
_GEMMA2_KEYS = _KEYS | {"attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}
_GEMMA3_KEYS = _KEYS | {
    "attention.sliding_window", "attention.sliding_window_pattern", "rope.freq_base_swa", "final_logit_softcapping",
}  # fmt: skip
# The models whose queries are scaled by D / N instead of H, which no metadata says: they are told by their layers.
_GEMMA2_27B_LAYERS, _GEMMA3_27B_LAYERS = 46, 62


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One GGUF architecture: how its names and values differ from Hugging Face's.

    Attributes:
        model_type: ``model_type`` of the Hugging Face config.
        class_name: its class.
        keys: metadata under ``<architecture>.`` that is understood; anything else is refused.
        top: tensors outside the blocks, without their suffix.
        block: tensors of a block.
        permuted: tensors of a block whose head rows are interleaved for rotary embedding, with the config key
            that counts their heads.
        norm_offset: what GGUF norm scales have on top of Hugging Face's.
        rope_theta: where the metadata has none.
        finish: changes the common config into that of this architecture.
    """

    model_type: str
    class_name: str
    keys: frozenset[str] = _KEYS
    top: dict[str, str] = dataclasses.field(default_factory=lambda: _TOP)
    block: dict[str, str] = dataclasses.field(default_factory=lambda: _LLAMA_BLOCK)
    permuted: dict[str, str] = dataclasses.field(default_factory=dict)
    norm_offset: float = 0.0
    rope_theta: float = 10000.0
    finish: Finish = lambda file, config: None


def decimal(value: float) -> float:
    """Take a float32 for the decimal that was written: 9.999999747378752e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _biases(file: GGUF, *, whole: tuple[set[str], ...]) -> set[str]:
    """Return the projections of a block that have biases.

    Raises:
        CheckpointError: some of a group have one and others not.
    """
    found = {name.split(".")[2] for name in file.shapes if name.startswith("blk.0.") and name.endswith(".bias")}
    for group in whole:
        if 0 < len(found & group) < len(group):
            raise CheckpointError(f"{file.path}: biases on {', '.join(sorted(found & group))} alone are not honoured.")
    return found


def _llama(file: GGUF, config: dict[str, Any]) -> None:
    found = _biases(file, whole=(set(_ATTENTION), set(_MLP)))
    config |= {"attention_bias": set(_ATTENTION) <= found, "mlp_bias": set(_MLP) <= found}


def _qwen3(file: GGUF, config: dict[str, Any]) -> None:
    config["attention_bias"] = set(_ATTENTION) <= _biases(file, whole=(set(_ATTENTION),))


def _gemma(file: GGUF, config: dict[str, Any], wide_layers: int) -> None:
    """Set what Gemma 2 and 3 share."""
    del config["hidden_act"]
    wide = config["num_hidden_layers"] == wide_layers
    heads = config["num_attention_heads"]
    config |= {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": config["hidden_size"] // heads if wide else config["head_dim"],
    }


def _gemma2(file: GGUF, config: dict[str, Any]) -> None:
    _gemma(file, config, _GEMMA2_27B_LAYERS)
    layers = range(config["num_hidden_layers"])
    config |= {
        "sliding_window": file.opt("attention.sliding_window", 4096),
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in layers],
        "attn_logit_softcapping": decimal(file.opt("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": decimal(file.opt("final_logit_softcapping", 30.0)),
    }


def _gemma3(file: GGUF, config: dict[str, Any]) -> None:
    _gemma(file, config, _GEMMA3_27B_LAYERS)
    layers = range(config["num_hidden_layers"])
    pattern = file.opt("attention.sliding_window_pattern", 6)
    windowed = pattern if isinstance(pattern, list) else [(i + 1) % pattern != 0 for i in layers]
    if len(windowed) != len(layers):
        raise CheckpointError(
            f"{file.path}: attention.sliding_window_pattern has {len(windowed)} entries for {len(layers)} layers."
        )
    full = {"rope_type": "default", **config.pop("rope_scaling", {}), "rope_theta": config.pop("rope_theta")}
    local = {"rope_type": "default", "rope_theta": decimal(file.opt("rope.freq_base_swa", 10000.0))}
    config |= {
        "sliding_window": file.need("attention.sliding_window"),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windowed],
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
    }
    if (cap := file.opt("final_logit_softcapping")) is not None:
        config["final_logit_softcapping"] = decimal(cap)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(
        "llama",
        "LlamaForCausalLM",
        permuted={"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"},
        finish=_llama,
    ),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", block=_LLAMA_BLOCK | _QK_NORMS, finish=_qwen3),
    "gemma2": Architecture(
        "gemma2", "Gemma2ForCausalLM", keys=_GEMMA2_KEYS, block=_GEMMA_BLOCK, norm_offset=1.0, finish=_gemma2
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        keys=_GEMMA3_KEYS,
        block=_GEMMA_BLOCK | _QK_NORMS,
        norm_offset=1.0,
        rope_theta=1e6,
        finish=_gemma3,
    ),
}
