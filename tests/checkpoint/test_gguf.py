"""GGUF files: the same model as the folder they were written from, a working tokenizer, clear refusals."""

from __future__ import annotations

import json
import shutil

import gguf
import jax
import numpy as np
import pytest
import tiny_gguf
from copies import DATA, TIED
from tokenizers import Tokenizer

from specjax.checkpoint import MissingCheckpoint, load_checkpoint, load_folder
from specjax.checkpoint.gguf import convert
from specjax.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from specjax.errors import CheckpointError

UNTIED = DATA / "llama3-rope-untied"


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tiny.gguf"


def fails(file, *parts: str) -> None:
    """Check that conversion fails with one line that holds every part, and leaves nothing."""
    with pytest.raises(CheckpointError) as caught:
        convert(file)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("source", [TIED, DATA / "llama-8-heads"], ids=lambda p: p.name)
def test_same_model_as_the_folder(cache, file, source) -> None:
    tiny_gguf.write(file, source)
    checkpoint, expected = load_checkpoint(file), load_folder(source)
    assert checkpoint.config == expected.config
    assert checkpoint.name == str(file)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, expected.params)
    assert (checkpoint.eos_ids, checkpoint.bos_id) == ((1,), 0)


def test_converted_once(cache, file, monkeypatch) -> None:
    tiny_gguf.write(file, TIED)
    folder = convert(file)
    assert folder.parent == cache / "gguf"
    monkeypatch.setattr("specjax.checkpoint.gguf.write_converted", None)
    assert convert(file) == folder
    shutil.copy(file, file.with_name("other.gguf"))
    with pytest.raises(TypeError):  # another file is converted anew
        convert(file.with_name("other.gguf"))
    assert [p for p in folder.parent.iterdir() if p.is_dir()] == [folder]


def test_quantised_weights(cache, file) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    kinds = {name: gguf.GGMLQuantizationType.Q8_0, "model.norm.weight": gguf.GGMLQuantizationType.F16}
    tiny_gguf.write(file, TIED, quantise=kinds)
    got, exact = load_checkpoint(file).params, load_folder(TIED).params
    q, q_exact = (np.asarray(p["layers_0"]["attention"]["q"]["kernel"]) for p in (got, exact))
    error = np.abs(q - q_exact).max()
    assert 0 < error <= np.abs(q_exact).max() / 127  # half a step of 127, and float16 scales
    np.testing.assert_array_equal(
        np.asarray(got["final_norm"]["scale"]), np.asarray(exact["final_norm"]["scale"]).astype(np.float16)
    )


def test_linear_and_yarn_scaling(cache, file) -> None:
    tiny_gguf.write(file, TIED, llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.5)
    rope = load_checkpoint(file).config.rope
    assert (rope.rope_type, rope.factor) == ("linear", 2.5)
    more = {"llama.rope.scaling.original_context_length": 128}
    tiny_gguf.write(file, TIED, llama__rope__scaling__type="yarn", llama__rope__scaling__factor=4.0, **more)
    rope = load_checkpoint(file).config.rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)


def llama3_divisors(factor: float, head_dim: int, theta: float) -> np.ndarray:
    """The divisors of each frequency under Llama 3 scaling, one by one."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < 8192 / 4.0:
            out.append(1.0)
        elif wavelength > 8192 / 1.0:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recovered(cache, file) -> None:
    divisors = llama3_divisors(8.0, 16, 500000.0)
    assert ((divisors > 1) & (divisors < 8)).any()
    tiny_gguf.write(file, UNTIED, tensors={"rope_freqs.weight": divisors})
    checkpoint = load_checkpoint(file)
    rope = checkpoint.config.rope
    assert (rope.rope_type, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert rope.original_max_position_embeddings == 8192
    assert not checkpoint.config.tied
    np.testing.assert_array_equal(checkpoint.params["head"], load_folder(UNTIED).params["head"])
    divisors[1] *= 2
    tiny_gguf.write(file, UNTIED, tensors={"rope_freqs.weight": divisors})
    fails(file, "rope_freqs.weight")


def test_tokenizer(cache, file) -> None:
    folder = convert(tiny_gguf.write(file, TIED))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = {token: i for i, token in enumerate(tiny_gguf.vocabulary(320)[0])}

    def encode(text: str, **options) -> list[int]:
        return tokenizer.encode(text, **options).ids

    assert encode("hello world") == [ids["hello"], ids["Ġwo"], ids["r"], ids["l"], ids["d"]]
    assert encode("12") == [ids["1"], ids["2"]]  # digits stand alone, although "12" is a merge
    assert encode("<|start|>he<|tool|>") == [ids["<|start|>"], ids["he"], ids["<|tool|>"]]
    text = "héllo \n wörld 42 🙂"
    assert tokenizer.decode(encode(text)) == text
    assert tokenizer.decode(encode("<|start|>he<|tool|>")) == "he<|tool|>"  # user-defined tokens are text
    assert tokenizer.token_to_id("[PAD0]") is None  # unused rows of the embedding are no tokens
    assert tokenizer.get_vocab_size() == len(tiny_gguf.SPECIAL) + 256 + len(tiny_gguf.MERGES)
    assert (folder / "chat_template.jinja").read_text() == tiny_gguf.TEMPLATE
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|start|>", "<|end|>")


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "a12 b", ["a", "12", "Ġb"]),
        ("smollm", "a12 b", ["a", "1", "2", "Ġb"]),
        ("llama-bpe", "a1234 b", ["a", "123", "4", "Ġb"]),
        ("llama-bpe", "IT'S\n\n x", ["IT", "'S", "ĊĊ", "Ġx"]),
        ("qwen2", "a12 (b", ["a", "1", "2", "Ġ(", "b"]),
        ("gpt-2", "IT'S", ["IT", "'", "S"]),
    ],
)
def test_pre_tokenizers(cache, file, pre: str, text: str, expected: list[str]) -> None:
    folder = convert(tiny_gguf.write(file, TIED, tokenizer__ggml__pre=pre))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.pre_tokenizer is not None
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == expected


def test_bos_and_eos_are_added_when_the_file_says_so(cache, file) -> None:
    def ids(**changes) -> list[int]:
        folder = convert(tiny_gguf.write(file, TIED, **changes))
        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode("he").ids

    (plain,) = ids()
    assert ids(tokenizer__ggml__add_bos_token=True) == [0, plain]
    assert ids(tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True) == [0, plain, 1]
    assert ids(tokenizer__ggml__pre="llama-bpe") == [0, plain]
    assert ids(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=False) == [plain]


def test_further_end_tokens(cache, file) -> None:
    tiny_gguf.write(file, TIED, tokenizer__ggml__eot_token_id=2)
    assert load_checkpoint(file).eos_ids == (1, 2)


def test_without_a_tokenizer(cache, file) -> None:
    drop = ("tokenizer.ggml.model", "tokenizer.ggml.eos_token_id")
    checkpoint = load_checkpoint(tiny_gguf.write(file, TIED, drop=drop))
    assert not (checkpoint.folder / "tokenizer.json").exists()
    assert checkpoint.eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"tokenizer__ggml__pre": "default"}, ["pre-tokenizer 'default'", *PRE_TOKENIZERS]),
        ({"drop": ("tokenizer.ggml.pre",)}, ["pre-tokenizer None"]),
        ({"tokenizer__ggml__model": "t5"}, ["tokenizer model 't5'", "gpt2", "llama"]),
        ({"tokenizer__ggml__merges": ["q zz"]}, ["merges do not fit"]),
        ({"drop": ("tokenizer.ggml.merges",)}, ["merges are missing"]),
        ({"arch": "mamba"}, ["architecture 'mamba'", "llama"]),
        ({"llama__attention__sliding_window": 64}, ["llama.attention.sliding_window"]),
        ({"llama__expert_count": 8}, ["mixture of experts"]),
        ({"llama__rope__dimension_count": 8, "llama__attention__key_length": 16}, ["rope.dimension_count 8", "16"]),
        ({"llama__rope__scaling__type": "longrope"}, ["'longrope'"]),
        ({"llama__rope__scaling__type": "linear"}, ["llama.rope.scaling.factor is missing"]),
        ({"drop": ("llama.block_count",)}, ["llama.block_count is missing"]),
        ({"tensors": {"blk.0.attn_rel.weight": np.ones((2, 2), np.float32)}}, ["blk.0.attn_rel.weight"]),
        ({"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, ["biases on attn_q alone"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(cache, file, changes: dict, parts: list[str]) -> None:
    fails(tiny_gguf.write(file, TIED, **changes), str(file), *parts)
    assert not [p for p in (cache / "gguf").iterdir() if p.is_dir()]


@pytest.mark.parametrize("keep", [0, 3, 40, 2000, 0.5, -1])
def test_truncated(cache, file, keep: float) -> None:
    data = tiny_gguf.write(file, TIED).read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    fails(file, str(file), "truncated or not a GGUF file")


def test_not_a_gguf_file(cache, file) -> None:
    file.write_bytes(b"PK\x03\x04" * 1000)
    fails(file, "not a GGUF file")


def test_missing(cache, file) -> None:
    with pytest.raises(MissingCheckpoint, match=r"tiny\.gguf does not exist"):
        convert(file)
