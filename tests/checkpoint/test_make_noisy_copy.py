"""scripts/make_noisy_copy.py."""

from __future__ import annotations

import runpy
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoint import load_folder

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_noisy_copy.py"


@pytest.fixture
def main():
    return runpy.run_path(str(SCRIPT))["main"]


def test_noise_is_as_asked(main, tied, tmp_path) -> None:
    (tied.path / "tokenizer.json").write_text("{}")
    outs = [tmp_path / name for name in ("a", "b", "c")]
    for out, seed in zip(outs, ("0", "0", "1"), strict=True):
        assert main(["--source", str(tied.path), "--dest", str(out), "--noise", "0.1", "--seed", seed]) == 0
    source, first, second, third = (load_folder(path).params for path in (tied.path, *outs))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    noise = np.asarray(first["embedding"]) - np.asarray(source["embedding"])
    np.testing.assert_allclose(noise.std(), 0.1 * np.asarray(source["embedding"]).std(), rtol=0.03)
    assert not np.array_equal(first["embedding"], third["embedding"])
    np.testing.assert_array_equal(first["final_norm"]["scale"], source["final_norm"]["scale"])
    assert (outs[0] / "tokenizer.json").exists()


def test_errors_are_one_line(main, tied, tmp_path, capsys) -> None:
    assert main(["--source", str(tied.path), "--dest", str(tied.path)]) != 0
    assert main(["--source", str(tmp_path / "nowhere"), "--dest", str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["make_noisy_copy"] * 2
