"""A tiny GGUF file, written by the gguf library from a fixture's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
SPECIAL = {"<|start|>": 3, "<|end|>": 3, "<|tool|>": 4}  # text: token type
TEMPLATE = "{% for m in messages %}<|start|>{{ m.content }}<|end|>\n{% endfor %}"
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ġw o"]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def vocabulary(size: int) -> tuple[list[str], list[int]]:
    """Tokens and types: specials, bytes, merges, and unused rows up to ``size``."""
    tokens = [*SPECIAL, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    types = [*SPECIAL.values()] + [1] * (len(tokens) - len(SPECIAL))
    pad = size - len(tokens)
    return tokens + [f"[PAD{i}]" for i in range(pad)], types + [5] * pad


def permute(values: np.ndarray, heads: int) -> np.ndarray:
    """Interleave each head's rows, as GGUF keeps Llama's query and key."""
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = values[head * size + i]
            out[head * size + 2 * i + 1] = values[head * size + size // 2 + i]
    return out


def gguf_name(name: str, arch: str = "llama") -> str:
    """Translate a Hugging Face tensor name."""
    stem, suffix = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    names = SANDWICH if arch.startswith("gemma") else {**SANDWICH, **BLOCK}
    return f"blk.{layer}.{names[part]}.{suffix}"


def write(
    path: Path,
    source: Path,
    *,
    arch: str = "llama",
    drop: tuple[str, ...] = (),
    quantise: dict[str, gguf.GGMLQuantizationType] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """Write a fixture as GGUF.

    Args:
        path: the file.
        source: a fixture's folder with one file of weights.
        arch: GGUF architecture.
        drop: metadata keys to leave out.
        quantise: tensors (by Hugging Face name) not kept in float32.
        tensors: more tensors, by GGUF name.
        changes: metadata to change or add; "__" stands for ".".
    """
    config = json.loads((source / "config.json").read_text())
    tokens, types = vocabulary(config["vocab_size"])
    rope = config["rope_parameters"]
    metadata: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": rope.get("full_attention", rope)["rope_theta"],
        f"{arch}.rope.dimension_count": config.get("head_dim", config["hidden_size"] // config["num_attention_heads"]),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata.update({key.replace("__", "."): value for key, value in changes.items()})
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if key in drop or value is None:
            continue
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add.get(type(value), writer.add_array)(key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in load_file(source / "model.safetensors").items():
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            values = permute(values, heads[part])
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + np.float32(1)
        kind = (quantise or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name, arch), values)
        else:
            writer.add_tensor(gguf_name(name, arch), gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
