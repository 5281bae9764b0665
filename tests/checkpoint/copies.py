"""Small checkpoints, and hands to break them with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  (teaches NumPy the name bfloat16, which safetensors asks for)
import numpy as np
from safetensors.numpy import load_file, save_file

DATA = Path(__file__).parents[1] / "data"
TIED = DATA / "llama-gqa-tied"
SHARDED = DATA / "llama-bf16-sharded"


class Folder:
    """A writable copy of a fixture."""

    def __init__(self, path: Path, source: Path):
        shutil.copytree(source, path)
        self.path = path

    def config(self, drop: str | None = None, **changes: object) -> None:
        """Change ``config.json``."""
        self.json("config.json", drop, **changes)

    def json(self, name: str, drop: str | None = None, **changes: object) -> None:
        """Change a JSON file (made when absent)."""
        path = self.path / name
        value = json.loads(path.read_text()) if path.exists() else {}
        value.update(changes)
        value.pop(drop, None)
        path.write_text(json.dumps(value))

    def tensors(self, name: str = "model.safetensors") -> dict[str, np.ndarray]:
        """Read a file of weights, by the safetensors library."""
        return load_file(self.path / name)

    def write(self, tensors: dict[str, np.ndarray], name: str = "model.safetensors") -> None:
        """Write a file of weights, by the safetensors library."""
        save_file(tensors, self.path / name)
