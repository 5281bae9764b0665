"""GGUF architectures beside llama: the same model as the folder they were written from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
import tiny_gguf
from copies import DATA

from specjax.checkpoint import load_checkpoint, load_folder
from specjax.checkpoint.gguf import GGUF
from specjax.checkpoint.gguf_architectures import ARCHITECTURES
from specjax.errors import CheckpointError

FOLDERS = {
    "qwen2": "qwen2-bias",
    "qwen3": "qwen3-qknorm",
    "gemma2": "gemma2-softcap",
    "gemma3": "gemma3-dual-rope",
}
GEMMA2 = {
    "gemma2__attention__sliding_window": 16,
    "gemma2__attn_logit_softcapping": 50.0,
    "gemma2__final_logit_softcapping": 30.0,
}
MORE = {"gemma2": GEMMA2, "gemma3": {"gemma3__attention__sliding_window": 16}}
NORMS = "norm"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tiny.gguf"


def write(file: Path, arch: str, **changes: Any) -> Path:
    """Write the fixture of an architecture."""
    config = json.loads((DATA / FOLDERS[arch] / "config.json").read_text())
    sizes = {f"{arch}__attention__key_length": config.get("head_dim", 16)}
    return tiny_gguf.write(file, DATA / FOLDERS[arch], arch=arch, **{**sizes, **MORE.get(arch, {}), **changes})


def test_every_architecture_is_tested() -> None:
    assert {"llama", *FOLDERS} == set(ARCHITECTURES)


@pytest.mark.parametrize("arch", FOLDERS)
def test_same_model_as_the_folder(cache, file, arch: str) -> None:
    write(file, arch)
    checkpoint, expected = load_checkpoint(file), load_folder(DATA / FOLDERS[arch])
    config = expected.config
    if arch.startswith("gemma"):  # GGUF does not say it: H, but for the largest models
        config = dataclasses.replace(config, query_scale=config.head_dim**-0.5)
    assert checkpoint.config == config

    def same(path, got, wanted) -> None:
        if arch.startswith("gemma") and "norm" in str(path):
            wanted = (np.asarray(wanted) + np.float32(1)) - np.float32(1)  # what GGUF rounds
        np.testing.assert_array_equal(got, wanted)

    jax.tree_util.tree_map_with_path(same, checkpoint.params, expected.params)


@pytest.mark.parametrize(("arch", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_their_queries_by_width_over_heads(tmp_path, cache, file, arch, layers) -> None:
    shutil.copytree(DATA / FOLDERS[arch], tmp_path / "deep")
    path = tmp_path / "deep" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": layers}))
    tiny_gguf.write(file, tmp_path / "deep", arch=arch, **{f"{arch}__attention__key_length": 32}, **MORE[arch])
    from specjax.checkpoint.gguf import hf_config

    assert hf_config(GGUF(file))["query_pre_attn_scalar"] == 64 // 4


def test_gemma2_defaults(cache, file) -> None:
    write(file, "gemma2", **dict.fromkeys(GEMMA2))
    config = load_checkpoint(file).config
    assert (config.attention_cap, config.logit_cap, config.kind(0).window, config.kind(1).window) == (
        50,
        30,
        4096,
        None,
    )


def test_gemma3_windows_and_ropes(cache, file) -> None:
    more = {"gemma3__rope__freq_base_swa": 5000.0, "gemma3__rope__scaling__type": "linear"}
    pattern = [True, False, True, False, True, True]
    write(file, "gemma3", gemma3__attention__sliding_window_pattern=pattern, gemma3__rope__scaling__factor=8.0, **more)
    config = load_checkpoint(file).config
    assert [config.kind(i).window is not None for i in range(6)] == pattern
    full, local = config.rope_of(1), config.rope_of(0)
    assert full is not None
    assert local is not None
    assert (full.rope_type, full.factor, full.rope_theta) == ("linear", 8.0, 1e6)
    assert (local.rope_type, local.rope_theta) == ("default", 5000.0)
    write(file, "gemma3", gemma3__attention__sliding_window_pattern=3)
    config = load_checkpoint(file).config
    assert [config.kind(i).window is None for i in range(6)] == [False, False, True] * 2
    write(file, "gemma3", gemma3__attention__sliding_window_pattern=[True])
    with pytest.raises(CheckpointError, match="1 entries for 6 layers"):
        load_checkpoint(file)


@pytest.mark.parametrize(
    ("arch", "changes", "part"),
    [
        ("gemma3", {"gemma3__attention__sliding_window": None}, "attention.sliding_window is missing"),
        ("qwen3", {"tensors": {"blk.0.attn_q.bias": np.ones(128, np.float32)}}, "biases on attn_q alone"),
        ("qwen2", {"qwen2__attention__sliding_window": 8}, "qwen2.attention.sliding_window"),
        ("qwen2", {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}}, "attn_q_norm.weight"),
    ],
)
def test_refusals(cache, file, arch: str, changes: dict, part: str) -> None:
    write(file, arch, **changes)
    with pytest.raises(CheckpointError, match=part) as caught:
        load_checkpoint(file)
    assert "\n" not in str(caught.value)


def scales_q4_k(block: bytes) -> tuple[list[int], list[int]]:
    """The eight 6-bit scales and minima of a 12-byte field, one by one."""
    scales, minima = [], []
    for j in range(8):
        if j < 4:
            scales.append(block[j] & 63)
            minima.append(block[j + 4] & 63)
        else:
            scales.append((block[j + 4] & 15) | (block[j - 4] >> 6) << 4)
            minima.append((block[j + 4] >> 4) | (block[j] >> 6) << 4)
    return scales, minima


def q4_k(block: bytes, high: bytes = bytes(32), first: int = 16) -> list[float]:
    """One block of 256 values, value by value; ``high`` are the fifth bits of Q5_K."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    scales, minima = scales_q4_k(block[4:16])
    out = []
    for j in range(8):
        quants = block[first + 32 * (j // 2) : first + 32 * (j // 2) + 32]
        for k, byte in enumerate(quants):
            nibble = byte >> 4 if j % 2 else byte & 15
            out.append(d * scales[j] * (nibble + 16 * (high[k] >> j & 1)) - dmin * minima[j])
    return out


def q5_k(block: bytes) -> list[float]:
    return q4_k(block, block[16:48], 48)


def q6_k(block: bytes) -> list[float]:
    low, high, scales = block[:128], block[128:192], np.frombuffer(block[192:208], np.int8)
    d = np.frombuffer(block[208:], np.float16).astype(np.float32)[0]
    out = [0.0] * 256
    for half in range(2):
        for k in range(32):
            for part in range(4):
                byte = low[64 * half + 32 * (part % 2) + k]
                nibble = byte >> 4 if part > 1 else byte & 15
                value = (nibble | (high[32 * half + k] >> 2 * part & 3) << 4) - 32
                place = 128 * half + 32 * part + k
                out[place] = d * int(scales[place // 16]) * value
    return out


def open_one(file: Path, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Write one tensor and read it back."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tensor("x.weight", values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUF(file).tensor("x.weight")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantisations_that_can_be_written(file, name: str) -> None:
    kind = gguf.GGMLQuantizationType[name]
    exact = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    stored = gguf.quants.quantize(exact, kind)
    got = open_one(file, stored, kind)
    assert (got.dtype, got.shape) == (np.float32, exact.shape)
    np.testing.assert_array_equal(got, gguf.quants.dequantize(stored, kind))
    bits = {"F32": 30, "F16": 11, "BF16": 8, "Q8_0": 7}.get(name, int(name[1]) - 1 if name[1].isdigit() else 0)
    assert np.abs(got - exact).max() <= np.abs(exact).max() * 1.01 / 2**bits


@pytest.mark.parametrize(("name", "by_hand"), [("Q4_K", q4_k), ("Q5_K", q5_k), ("Q6_K", q6_k)])
def test_quantisations_that_can_only_be_read(file, name: str, by_hand) -> None:
    kind = gguf.GGMLQuantizationType[name]
    size, length = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (4, 2 * length), dtype=np.uint8)
    scales = (208, 210) if name == "Q6_K" else (0, 4)
    for row in blocks:
        for start in (0, length):
            numbers = np.random.default_rng(2).uniform(0.01, 0.1, (scales[1] - scales[0]) // 2).astype(np.float16)
            row[start + scales[0] : start + scales[1]] = numbers.view(np.uint8)
    got = open_one(file, blocks, kind)
    assert got.shape == (4, 2 * size)
    expected = [by_hand(row[:length].tobytes()) + by_hand(row[length:].tobytes()) for row in blocks]
    np.testing.assert_allclose(got, np.array(expected, np.float32), rtol=1e-6, atol=1e-5)


def test_a_quantisation_that_is_not_read(file) -> None:
    kind = gguf.GGMLQuantizationType.Q8_K
    blocks = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    with pytest.raises(CheckpointError, match=r"x\.weight"):
        open_one(file, blocks, kind)
