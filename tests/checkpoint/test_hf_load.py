"""Loading a folder in Hugging Face layout: what comes out, and each fault by its own message."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from specjax.checkpoint import MissingCheckpoint, load_folder
from specjax.checkpoint.tensors import DTYPES, TensorStore
from specjax.errors import CheckpointError, UsageError

Q = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def fails(folder, *parts: str) -> str:
    """Check that loading fails with one line that holds every part."""
    with pytest.raises(CheckpointError) as caught:
        load_folder(folder.path)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


def test_every_tensor_arrives_unchanged(tied) -> None:
    checkpoint = load_folder(tied.path)
    stored = tied.tensors()
    leaves = checkpoint.family.leaves(checkpoint.config)
    assert len(jax.tree.leaves(checkpoint.params)) == len(leaves) == len(stored)
    for leaf in leaves:
        array = checkpoint.params
        for key in leaf.path:
            array = array[key]
        assert array.dtype == np.float32
        expected = np.concatenate([stored[name] for name in leaf.sources])
        np.testing.assert_array_equal(np.asarray(array), expected)
    assert checkpoint.name == "tied"
    assert checkpoint.folder == tied.path
    assert checkpoint.hf_config == json.loads((tied.path / "config.json").read_text())
    assert (checkpoint.eos_ids, checkpoint.bos_id) == ((2,), 1)


def test_shards_are_joined(sharded) -> None:
    checkpoint = load_folder(sharded.path, dtype="bfloat16")
    index = json.loads((sharded.path / "model.safetensors.index.json").read_text())["weight_map"]
    stored = sharded.tensors(index["lm_head.weight"])["lm_head.weight"]
    assert checkpoint.params["head"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(np.asarray(checkpoint.params["head"]), stored)
    assert len(jax.tree.leaves(checkpoint.params)) == len(index)


@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtypes(tied, source: str, dtype: str) -> None:
    stored = {name: values.astype(source) for name, values in tied.tensors().items()}
    tied.write(stored)
    params = load_folder(tied.path, dtype=dtype).params
    assert params["embedding"].dtype == dtype
    np.testing.assert_array_equal(
        np.asarray(params["embedding"]), stored["model.embed_tokens.weight"].astype(np.float32).astype(dtype)
    )
    # Vectors stay float32 whatever is asked.
    assert params["final_norm"]["scale"].dtype == np.float32
    np.testing.assert_array_equal(np.asarray(params["final_norm"]["scale"]), stored[NORM].astype(np.float32))


def test_large_tensors_are_read_in_chunks(tied, monkeypatch) -> None:
    monkeypatch.setattr("specjax.checkpoint.tensors._CHUNK_BYTES", 1000)
    params = load_folder(tied.path, dtype="bfloat16").params
    expected = tied.tensors()["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(params["embedding"]), expected)


def test_eos_comes_from_generation_config_first(tied) -> None:
    tied.json("generation_config.json", eos_token_id=[7, 9, 7], temperature=0.2)
    checkpoint = load_folder(tied.path)
    assert checkpoint.eos_ids == (7, 9)
    assert checkpoint.bos_id == 1


def test_no_eos_at_all(tied) -> None:
    tied.config(eos_token_id=None, bos_token_id=None)
    checkpoint = load_folder(tied.path)
    assert (checkpoint.eos_ids, checkpoint.bos_id) == ((), None)


def test_eos_of_another_kind_is_refused(tied) -> None:
    tied.json("generation_config.json", eos_token_id="</s>")
    fails(tied, "generation_config.json", "eos_token_id", "'</s>'")


def test_missing_folder(tmp_path) -> None:
    with pytest.raises(MissingCheckpoint, match="nowhere does not exist"):
        load_folder(tmp_path / "nowhere")


def test_unknown_dtype(tied) -> None:
    with pytest.raises(UsageError, match=r"'int8'.*float32 or bfloat16"):
        load_folder(tied.path, dtype="int8")


def test_missing_config(tied) -> None:
    (tied.path / "config.json").unlink()
    fails(tied, "has no config.json")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_broken_config(tied, text: str) -> None:
    (tied.path / "config.json").write_bytes(text.encode("latin-1"))
    fails(tied, "config.json", "expected an object" if text == "[1]" else "not valid JSON")


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_missing_key(tied, key: str) -> None:
    tied.config(drop=key)
    fails(tied, repr(key), str(tied.path))


def test_unknown_architecture(tied) -> None:
    tied.config(model_type="mamba")
    fails(tied, "'mamba'", "llama")


@pytest.mark.parametrize(("key", "value"), [("hidden_act", "gelu"), ("sliding_window_pattern", 6)])
def test_option_not_honoured(tied, key: str, value: object) -> None:
    tied.config(**{key: value})
    fails(tied, key, str(tied.path))


def test_missing_shard(sharded) -> None:
    (sharded.path / "model-00003-of-00008.safetensors").unlink()
    fails(sharded, "Shard model-00003-of-00008.safetensors is missing", "8 shards")


def test_shard_outside_the_folder_is_refused(sharded) -> None:
    path = sharded.path / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00003", "../model-00003"))
    fails(sharded, "'../model-00003", "without folders")


def test_index_without_map(sharded) -> None:
    (sharded.path / "model.safetensors.index.json").write_text("{}")
    fails(sharded, "'weight_map'")


def test_index_names_a_tensor_its_shard_lacks(sharded) -> None:
    name = "model-00008-of-00008.safetensors"
    stored = sharded.tensors(name)
    del stored["lm_head.weight"]
    sharded.write({**stored, "other": np.zeros(1, np.float32)}, name)
    fails(sharded, "lm_head.weight", name, "lacks it")


def test_missing_tensor(tied) -> None:
    stored = tied.tensors()
    del stored[Q]
    tied.write(stored)
    fails(tied, f"Tensor {Q} [64, 64] is missing")


def test_wrong_shape(tied) -> None:
    stored = tied.tensors()
    stored[Q] = stored[Q][:32]
    tied.write(stored)
    fails(tied, Q, "[32, 64]", "[64, 64]")


def test_unreadable_dtype(tied) -> None:
    stored = tied.tensors()
    stored[Q] = stored[Q].astype(np.int8)
    tied.write(stored)
    fails(tied, Q, "I8", "BF16")


def test_unexpected_tensors(tied) -> None:
    extra = {f"model.extra.{i}.weight": np.zeros(2, np.float32) for i in range(7)}
    tied.write({**tied.tensors(), **extra})
    message = fails(tied, "model.extra.0.weight", "model.extra.4.weight", "and 2 more")
    assert "model.extra.5" not in message


def test_derived_buffers_are_ignored(tied) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    tied.write({**tied.tensors(), **buffer})
    assert "head" not in load_folder(tied.path).params


def test_head_of_a_tied_model(tied) -> None:
    stored = tied.tensors()
    head = stored["model.embed_tokens.weight"].copy()
    tied.write({**stored, "lm_head.weight": head})
    assert "head" not in load_folder(tied.path).params  # equal: nothing to say (a warning would be an error)
    head[3, 3] += 1
    tied.write({**stored, "lm_head.weight": head})
    with pytest.warns(UserWarning, match=re.escape("lm_head.weight is not used")):
        params = load_folder(tied.path).params
    assert "head" not in params
    tied.config(tie_word_embeddings=False)
    np.testing.assert_array_equal(np.asarray(load_folder(tied.path).params["head"]), head)


@pytest.mark.parametrize("keep", [0, 5, 300, 0.5, -1])
def test_truncated_file(tied, keep: float) -> None:
    path = tied.path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    fails(tied, "model.safetensors is truncated")


def test_pickle_is_refused(tied) -> None:
    (tied.path / "model.safetensors").rename(tied.path / "pytorch_model.bin")
    fails(tied, "pytorch_model.bin", "pickled", "safetensors")


def test_no_weights(tied) -> None:
    path = tied.path / "model.safetensors"
    path.rename(tied.path / "model-00001-of-00002.safetensors")
    fails(tied, "model-00001-of-00002.safetensors", "index")
    (tied.path / "model-00001-of-00002.safetensors").unlink()
    fails(tied, "holds no weights")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "index", [(slice(8, 24), slice(None)), (slice(None), slice(16, 48)), (slice(3, 5), slice(1, 2))]
)
def test_a_part_of_a_tensor_is_that_part_of_the_whole(dtype, index) -> None:
    """What a host reads of a weight that others share."""
    store = TensorStore(Path(__file__).parents[1] / "data" / "llama-gqa-tied")
    name = "model.layers.0.self_attn.o_proj.weight"
    part = store.read_part(name, index, DTYPES[dtype])
    whole = store.read(name, DTYPES[dtype])
    assert part.dtype == whole.dtype
    np.testing.assert_array_equal(part, whole[index])
    vector = store.read_part("model.norm.weight", (slice(4, 9),), DTYPES["float32"])
    np.testing.assert_array_equal(vector, store.read("model.norm.weight")[4:9])
