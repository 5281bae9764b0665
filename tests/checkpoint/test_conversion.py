"""Conversion: every byte comes through, in both directions, and nothing half-made is ever left."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import tiny_gguf
from copies import DATA, TIED
from safetensors.numpy import load_file, save_file

from specjax.checkpoint import MissingCheckpoint, convert, load_checkpoint, load_folder, save_folder
from specjax.errors import CheckpointError, UsageError

FIXTURES = sorted(path.parent.name for path in DATA.glob("*/config.json") if ".draft-" not in path.parent.name)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Read every tensor of a folder, by the safetensors library."""
    found: dict[str, np.ndarray] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same(first: Path, second: Path) -> None:
    """Check that two folders hold the same tensors, byte for byte, and the same config."""
    a, b = stored(first), stored(second)
    assert a.keys() == b.keys()
    for name, values in a.items():
        assert (values.dtype, values.shape) == (b[name].dtype, b[name].shape)
        assert values.tobytes() == b[name].tobytes(), name
    assert (first / "config.json").read_bytes() == (second / "config.json").read_bytes()


def there_and_back(source: Path, tmp_path: Path) -> Path:
    """Convert to Orbax and back."""
    orbax = convert(source, tmp_path / "orbax", to="orbax")
    return convert(orbax, tmp_path / "back")


@pytest.mark.parametrize("name", FIXTURES)
def test_there_and_back_is_exact(tmp_path, name: str) -> None:
    same(DATA / name, there_and_back(DATA / name, tmp_path))


def test_a_file_of_ours_comes_back_as_the_same_file(tmp_path) -> None:
    c = load_folder(TIED)
    ours = save_folder(tmp_path / "ours", c.hf_config, c.params, c.family, c.config, dtype="bfloat16")
    back = there_and_back(ours, tmp_path)
    for name in ("model.safetensors", "config.json"):
        assert (back / name).read_bytes() == (ours / name).read_bytes()


def test_tensors_that_are_no_parameters_come_through(tied, tmp_path) -> None:
    tensors = tied.tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.arange(8, dtype=np.float64)
    tensors["model.layers.0.self_attn.attn.masked_bias"] = np.array(-(2**40), np.int64)
    tied.write(tensors)
    same(tied.path, there_and_back(tied.path, tmp_path))


def test_names_of_a_bare_decoder_come_through(tied, tmp_path) -> None:
    tied.write({name.removeprefix("model."): values for name, values in tied.tensors().items()})
    same(tied.path, there_and_back(tied.path, tmp_path))


def test_each_tensor_keeps_its_own_dtype(tied, tmp_path) -> None:
    tensors = tied.tensors()
    for i, name in enumerate(sorted(tensors)):
        tensors[name] = tensors[name].astype(("float32", "float16", ml_dtypes.bfloat16)[i % 3])
    tied.write(tensors)
    back = there_and_back(tied.path, tmp_path)
    same(tied.path, back)
    same(tied.path, convert(tied.path, tmp_path / "copy"))


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_dtype(tied, tmp_path, to) -> None:
    made = convert(tied.path, tmp_path / "made", to=to, dtype="bfloat16")
    back = stored(convert(made, tmp_path / "back"))
    for name, values in tied.tensors().items():
        assert back[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(back[name], values.astype(ml_dtypes.bfloat16))
    assert json.loads((made / "config.json").read_text())["dtype"] == "bfloat16"
    wide = stored(convert(made, tmp_path / "wide", dtype="float32"))
    assert {values.dtype for values in wide.values()} == {np.dtype("float32")}


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_what_belongs_to_the_tokenizer_goes_with_it(tied, tmp_path, to) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "tokenizer.model", "notes.txt"):
        (tied.path / name).write_text('{"a": 1}')
    made = convert(tied.path, tmp_path / "made", to=to)
    assert (made / "tokenizer.json").read_text() == '{"a": 1}'
    assert {"tokenizer.model", "chat_template.jinja", "tokenizer_config.json"} <= {p.name for p in made.iterdir()}
    assert not (made / "notes.txt").exists()


@pytest.mark.parametrize("to", ["hf", "orbax"])
@pytest.mark.parametrize("dtype", ["keep", "bfloat16"])
def test_from_gguf(cache, tmp_path, to, dtype) -> None:
    kind = {"model.layers.0.mlp.up_proj.weight": gguf.GGMLQuantizationType.Q8_0}
    file = tiny_gguf.write(tmp_path / "tiny.gguf", TIED, quantise=kind)
    made = convert(file, tmp_path / "made", to=to, dtype=dtype)
    read_as = "float32" if dtype == "keep" else dtype
    got, expected = load_checkpoint(made, dtype=read_as), load_checkpoint(file, dtype=read_as)
    assert got.config == expected.config
    assert (made / "tokenizer.json").is_file()
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(read_as), expected.params)  # vectors too
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b.astype(a.dtype)), got.params, rounded)


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_an_existing_folder_is_refused(tmp_path, to) -> None:
    (tmp_path / "made").mkdir()
    with pytest.raises(CheckpointError, match="made exists already"):
        convert(TIED, tmp_path / "made", to=to)
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.parametrize("to", ["hf", "orbax"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), ValueError("x")])
def test_an_interrupted_conversion_leaves_nothing(tmp_path, monkeypatch, to, error) -> None:
    def fail(*_, **__):
        raise error

    place = "specjax.checkpoint.tensors._write" if to == "hf" else "orbax.checkpoint.v1.save"
    monkeypatch.setattr(place, fail)
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        convert(TIED, tmp_path / "made", to=to)
    if not isinstance(error, ValueError) or to == "orbax":
        assert isinstance(caught.value, KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    assert load_checkpoint(convert(TIED, tmp_path / "made", to=to)).config.num_layers


def test_parts_of_one_parameter_in_two_dtypes(tmp_path) -> None:
    from specjax.models import mixtral

    config = dict(mixtral.EXAMPLE)
    family = mixtral.FAMILY
    tensors = {
        name: np.ones(shape, np.float32)
        for leaf in family.leaves(family.parse(config))
        for name, shape in zip(leaf.sources, leaf.source_shapes, strict=True)
    }
    name = next(n for n in tensors if ".experts.0." in n)
    tensors[name] = tensors[name].astype(np.float16)
    (tmp_path / "mixed").mkdir()
    save_file(tensors, tmp_path / "mixed" / "model.safetensors")
    (tmp_path / "mixed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"several dtypes \(float16, float32\).*--dtype"):
        convert(tmp_path / "mixed", tmp_path / "made", to="orbax")
    made = convert(tmp_path / "mixed", tmp_path / "made", to="orbax", dtype="bfloat16")
    assert {a.dtype for a in stored(convert(made, tmp_path / "back")).values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_wrong_calls(tmp_path) -> None:
    for options in ({"to": "onnx"}, {"dtype": "int4"}):
        with pytest.raises(UsageError, match="expected"):
            convert(TIED, tmp_path / "made", **options)
    for source in (tmp_path / "none", tmp_path / "none.gguf"):
        with pytest.raises(MissingCheckpoint, match="does not exist"):
            convert(source, tmp_path / "made")
    assert not (tmp_path / "made").exists()
