"""Hugging Face -> parameters -> Hugging Face, exact for every family; names with and without their leading part."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import DATA

from specjax.checkpoint import load_folder, save_folder
from specjax.errors import CheckpointError

FOLDERS = ["mistral-window", "qwen2-bias", "qwen3-qknorm", "gemma2-softcap", "gemma3-dual-rope"]
FOLDERS += sorted(f"families/{path.name}" for path in (DATA / "families").iterdir())


@pytest.mark.parametrize("name", FOLDERS)
def test_round_trip_is_exact(name, tmp_path):
    """Case 70: every tensor comes back with its name, shape, dtype and bits."""
    first = load_folder(DATA / name)
    out = save_folder(tmp_path / "out", first.hf_config, first.params, first.family, first.config)
    before, after = (load_file(folder / "model.safetensors") for folder in (DATA / name, out))
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert (after[key].dtype, after[key].shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(after[key], value, err_msg=key)
    again = load_folder(out)
    assert again.config == first.config
    jax.tree.map(np.testing.assert_array_equal, again.params, first.params)


@pytest.fixture
def gpt2(tmp_path) -> Path:
    folder = tmp_path / "gpt2"
    shutil.copytree(DATA / "families" / "gpt2", folder)
    return folder


def rewrite(folder: Path, change) -> None:
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def test_a_folder_of_the_bare_decoder_loads(gpt2):
    """The names of the first GPT-2 checkpoints lack ``transformer.`` and keep the masks as buffers."""
    expected = load_folder(gpt2).params

    def bare(tensors):
        found = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        return {**found, "h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32)}

    rewrite(gpt2, bare)
    jax.tree.map(np.testing.assert_array_equal, load_folder(gpt2).params, expected)


def test_weights_stored_in_out_come_as_out_in(gpt2):
    stored = load_file(gpt2 / "model.safetensors")["transformer.h.1.attn.c_attn.weight"]
    attention = load_folder(gpt2).params["layers_1"]["attention"]
    for i, name in enumerate("qkv"):
        np.testing.assert_array_equal(attention[name]["kernel"], stored[:, 32 * i : 32 * (i + 1)].T)


def test_rows_of_a_fused_tensor():
    folder = DATA / "families" / "phi3-partial"
    stored, params = load_file(folder / "model.safetensors"), load_folder(folder).params["layers_0"]
    fused = np.concatenate([params["attention"][name]["kernel"] for name in "qkv"])
    np.testing.assert_array_equal(fused, stored["model.layers.0.self_attn.qkv_proj.weight"])
    np.testing.assert_array_equal(params["mlp"]["up"]["kernel"], stored["model.layers.0.mlp.gate_up_proj.weight"][40:])


def test_a_tied_head_that_differs_is_named(gpt2):
    """Case 64: the embedding has another name here."""
    rewrite(gpt2, lambda tensors: {**tensors, "lm_head.weight": tensors["transformer.wte.weight"] + 1})
    with pytest.warns(UserWarning, match="lm_head.weight unlike its embedding"):
        load_folder(gpt2)


def test_a_missing_expert_is_named(tmp_path):
    folder = tmp_path / "moe"
    shutil.copytree(DATA / "families" / "mixtral-old", folder)
    rewrite(folder, lambda tensors: {k: v for k, v in tensors.items() if ".1.block_sparse_moe.experts.3.w2" not in k})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.block_sparse_moe\.experts\.3\.w2\.weight"):
        load_folder(folder)


def test_more_experts_in_the_file_than_in_the_config(tmp_path):
    folder = tmp_path / "moe"
    shutil.copytree(DATA / "families" / "mixtral-old", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": 3}))
    with pytest.raises(CheckpointError, match=r"gate\.weight"):
        load_folder(folder)
