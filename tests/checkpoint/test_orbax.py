"""Orbax folders: the same model as the one they were made from, and each fault by its own message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from copies import DATA, SHARDED, TIED

from specjax.checkpoint import MissingCheckpoint, convert, load_checkpoint, load_folder
from specjax.checkpoint import orbax_folder as orbax
from specjax.errors import CheckpointError, UsageError


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A float32 model as an Orbax folder, read only."""
    return convert(TIED, tmp_path_factory.mktemp("orbax") / "model", to="orbax")


@pytest.fixture
def folder(made, tmp_path) -> Path:
    """A copy of it to break."""
    return Path(shutil.copytree(made, tmp_path / "model"))


def fails(folder: str | Path, *parts: str, kind: type[Exception] = CheckpointError) -> None:
    """Check that loading fails with one line that holds every part."""
    with pytest.raises(kind) as caught:
        load_checkpoint(folder)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def change_config(folder: Path, **changes: object) -> None:
    """Change ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loads_what_the_folder_gives(made, dtype: str) -> None:
    checkpoint, expected = load_checkpoint(made, dtype=dtype), load_folder(TIED, dtype=dtype)
    assert (checkpoint.config, checkpoint.hf_config) == (expected.config, expected.hf_config)
    assert (checkpoint.eos_ids, checkpoint.bos_id) == (expected.eos_ids, expected.bos_id)
    assert (checkpoint.name, checkpoint.folder) == (str(made), made)
    assert jax.tree.structure(checkpoint.params) == jax.tree.structure(expected.params)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.params, expected.params)
    for array in jax.tree.leaves(checkpoint.params):
        assert array.dtype == (dtype if array.ndim > 1 else "float32")
        assert array.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_values_stored_in_bfloat16_are_widened_here(tmp_path) -> None:
    made = convert(SHARDED, tmp_path / "model", to="orbax")
    assert {dtype for dtype, _ in orbax.kinds(made).values()} == {np.dtype(ml_dtypes.bfloat16)}
    params = load_checkpoint(made, dtype="float32").params
    assert {array.dtype for array in jax.tree.leaves(params)} == {np.dtype("float32")}
    jax.tree.map(np.testing.assert_array_equal, params, load_folder(SHARDED, dtype="float32").params)


def test_relative_paths(folder, monkeypatch) -> None:
    monkeypatch.chdir(folder.parent)
    assert load_checkpoint("model").config.num_layers == load_checkpoint("./model/").config.num_layers


def test_more_layers_than_there_are(folder) -> None:
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    change_config(folder, num_hidden_layers=layers + 4)
    fails(folder, "lacks parameters", f"layers_{layers}/attention", "and ", "another model")
    change_config(folder, num_hidden_layers=layers - 1)
    fails(folder, "not asked for", f"layers_{layers - 1}/")


def test_other_shapes(folder) -> None:
    change_config(folder, intermediate_size=100)
    fails(folder, "another shape", "layers_0/mlp/gate/kernel [160, 64] instead of [100, 64]")


def test_no_config(folder) -> None:
    (folder / "config.json").unlink()
    fails(folder, "without a config.json")


def test_broken_files(folder) -> None:
    for path in (folder / "params").rglob("*"):
        if path.is_file() and path.parent.name == "d":
            path.write_bytes(path.read_bytes()[:50])
    fails(folder, "cannot be read by Orbax")


def test_unfinished(folder) -> None:
    shutil.rmtree(folder / "params")
    (folder / "params").mkdir()
    fails(folder, "params holds no finished checkpoint")


def test_steps(folder, tmp_path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(folder / "config.json", run)
    for step in ("5", "40"):
        shutil.copytree(folder / "params", run / step)
    (run / "9").mkdir()  # never finished
    (run / "41.orbax-checkpoint-tmp-1").mkdir()
    assert orbax.steps(run) == ["5", "40"]
    expected = load_folder(TIED).params
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(run / "40").params, expected)
    fails(run, "holds the steps 5, 40", str(run / "40"))
    fails(run / "9", "no finished checkpoint", "the steps 5, 40")
    fails(run / "999", "does not exist", "the steps 5, 40", kind=MissingCheckpoint)
    monkeypatch.chdir(tmp_path)
    fails("run/999", "the steps 5, 40", kind=MissingCheckpoint)
    shutil.rmtree(run / "5")
    shutil.rmtree(run / "40")
    fails(run / "9", "no step that does")


def test_parameters_alone_are_read(tmp_path) -> None:
    from orbax.checkpoint import v1 as ocp

    expected = load_folder(TIED)
    ocp.save(tmp_path / "model", expected.params)
    shutil.copy(TIED / "config.json", tmp_path / "model")
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(tmp_path / "model").params, expected.params)


def test_integers_are_no_parameters(tmp_path) -> None:
    from orbax.checkpoint import v1 as ocp

    params = jax.tree.map(np.asarray, load_folder(TIED).params)
    params["embedding"] = params["embedding"].astype(np.int32)
    ocp.save(tmp_path / "model" / "params", {"params": params})
    shutil.copy(TIED / "config.json", tmp_path / "model")
    fails(tmp_path / "model", "embedding int32")


def test_another_dtype(made) -> None:
    with pytest.raises(UsageError, match="'float16'"):
        load_checkpoint(made, dtype="float16")


def test_weights_in_hugging_face_layout_come_first(tmp_path) -> None:
    shutil.copytree(TIED, tmp_path / "model")
    (tmp_path / "model" / "params").mkdir()
    assert orbax.locate(tmp_path / "model") is None
    assert orbax.locate(DATA) is None
