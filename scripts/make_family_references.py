"""Make the tiny random checkpoints of tests/data/families, with logits and greedy tokens from transformers.

    pip install -e '.[peers]'
    python scripts/make_family_references.py tests/data/families [NAME ...]

Each folder holds config.json (some in the form that transformers 4 wrote), model.safetensors and reference.npz:
for three prompts, ``prompt_i``, ``logits_i``, 24 ``greedy_i`` tokens and the ``margin_i`` of each between the two best.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OLD = {"rope_theta": 5000.0, "rope_scaling": None, "torch_dtype": "float32", "transformers_version": "4.51.0"}
PROMPT_SIZES, NUM_GREEDY = (1, 6, 45), 24
# What each checkpoint is for: the odd parts of its family. The first dict goes to transformers; where there is a
# second one, config.json is SIZES with it, as transformers 4 wrote it.
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "mistral-old": (
        "MistralConfig",
        {"head_dim": 12, "sliding_window": 7, "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"model_type": "mistral", "head_dim": 12, "sliding_window": 7, "hidden_act": "silu", **OLD},
    ),
    "qwen2-upper-window": (
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        None,
    ),
    "qwen3-biased": (
        "Qwen3Config",
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
        None,
    ),
    "gemma2-old": (
        "Gemma2Config",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "num_hidden_layers": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        {
            "model_type": "gemma2",
            "head_dim": 12,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
            "num_hidden_layers": 3,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
            **OLD,
        },
    ),
    "gemma3-old": (
        "Gemma3TextConfig",
        {
            "head_dim": 12,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "num_hidden_layers": 3,
            "final_logit_softcapping": 6.0,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
        {
            "model_type": "gemma3_text",
            "head_dim": 12,
            "num_key_value_heads": 1,
            "query_pre_attn_scalar": 10,
            "sliding_window": 7,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 3,
            "final_logit_softcapping": 6.0,
            "hidden_activation": "gelu_pytorch_tanh",
            **OLD,
            "rope_local_base_freq": 100.0,
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
    "olmo2": ("Olmo2Config", {"attention_bias": True}, None),
    "phi3-partial": (
        "Phi3Config",
        {
            "hidden_size": 48,
            "sliding_window": 9,
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
        None,
    ),
    "phi3-old": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 1.0},
        },
        {
            "model_type": "phi3",
            "original_max_position_embeddings": 128,
            "attention_bias": False,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            **OLD,
        },
    ),
    "gpt2": ("GPT2Config", {"n_inner": 40}, None),
    "mixtral-old": (
        "MixtralConfig",
        {
            "num_local_experts": 4,
            "sliding_window": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        },
        {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 10, **OLD},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [0],
        },
        None,
    ),
    "qwen3-moe-unnormalised": (
        "Qwen3MoeConfig",
        {
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
        None,
    ),
}


def make_model(name: str):
    """Return a random model of transformers whose logits depend on all its parameters."""
    import torch  # type: ignore
    import transformers  # type: ignore

    config_class, fields, _ = FOLDERS[name]
    sizes = dict(SIZES)
    if config_class == "GPT2Config":
        new = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
        new["max_position_embeddings"] = "n_positions"
        sizes = {new.get(k, k): v for k, v in SIZES.items() if k not in ("num_key_value_heads", "intermediate_size")}
    config = getattr(transformers, config_class)(**{**sizes, **fields})
    config._attn_implementation = "eager"
    torch.manual_seed(sorted(FOLDERS).index(name))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or parameter.ndim == 1:  # norms and biases begin at 0 or 1: move them
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" in key or "wte" in key or "lm_head" in key:
                parameter.normal_(0, 0.5)
            else:
                parameter.normal_(0, 1.4 * parameter.shape[-1] ** -0.5)
    return model


def references(model) -> dict[str, np.ndarray]:
    """Return prompts, logits, greedy tokens and margins."""
    import torch  # type: ignore

    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray] = {}
    with torch.no_grad():
        for i, size in enumerate(PROMPT_SIZES):
            prompt = rng.integers(3, SIZES["vocab_size"], size).astype(np.int32)
            ids = torch.tensor(prompt[None].astype(np.int64))
            found[f"prompt_{i}"] = prompt
            found[f"logits_{i}"] = model(ids, use_cache=False).logits[0].numpy()
            margins = []
            for _ in range(NUM_GREEDY):
                best = model(ids, use_cache=False).logits[0, -1].topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                ids = torch.cat([ids, best.indices[:1, None]], dim=1)
            found[f"greedy_{i}"] = ids[0, size:].numpy().astype(np.int32)
            found[f"margin_{i}"] = np.asarray(margins, np.float32)
    return found


def main() -> None:
    """Make the folders asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="parent of the folders")
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(FOLDERS)}; default all")
    args = parser.parse_args()
    for name in args.names or FOLDERS:
        model = make_model(name)
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temp:
            model.save_pretrained(temp)
            shutil.copyfile(Path(temp) / "model.safetensors", folder / "model.safetensors")
            config = json.loads((Path(temp) / "config.json").read_text())
        old = FOLDERS[name][2]
        if old is not None:
            config = {**SIZES, **old}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        arrays = references(model)
        np.savez_compressed(folder / "reference.npz", **arrays)  # type: ignore[arg-type]
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1000
        print(f"{name}: {size:.0f} kB, least margin {min(arrays[f'margin_{i}'].min() for i in range(3)):.2g}")


if __name__ == "__main__":
    main()
