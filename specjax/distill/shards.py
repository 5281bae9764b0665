"""Packed rows on disk: shards of int32 [N, 3, T] as .npy, and a manifest that says what they are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint.files import read_json, staged, write_json
from specjax.distill.packing import Packed
from specjax.errors import UsageError

MANIFEST = "manifest.json"
SCHEMA = 1
ROWS_PER_SHARD = 2048


def write_shards(folder: Path, packed: Packed, about: dict[str, Any]) -> Path:
    """Write rows: complete under the folder's name, or not at all.

    Args:
        folder: must not exist.
        packed: the rows.
        about: what they were made of, for the manifest.

    Raises:
        CheckpointError: the folder exists or cannot be written.
    """
    rows = packed.rows
    with staged(folder) as temp:
        shards = []
        for first in range(0, len(rows), ROWS_PER_SHARD):
            name, part = f"shard-{first // ROWS_PER_SHARD:05d}.npy", rows[first : first + ROWS_PER_SHARD]
            np.save(temp / name, part)
            digest = hashlib.sha256((temp / name).read_bytes()).hexdigest()
            shards.append({"file": name, "rows": len(part), "sha256": digest})
        write_json(
            temp / MANIFEST,
            {"schema": SCHEMA, "about": about, "rows": len(rows), "length": rows.shape[-1],
             "tokens": int((rows[:, 1] > 0).sum()), "labels": packed.num_labels, "dropped": packed.dropped,
             "shards": shards},
        )  # fmt: skip
    return folder


class Shards:
    """Rows on disk, read as they are asked for: a random-access source for grain.

    Raises:
        UsageError: there is no manifest, or a shard is not what it says.
    """

    def __init__(self, folder: Path, *, verify: bool = True):
        if not (folder / MANIFEST).is_file():
            raise UsageError(f"{folder} has no {MANIFEST}: make the data again (--overwrite).")
        self.manifest = read_json(folder / MANIFEST)
        self._parts = []
        for shard in self.manifest["shards"]:
            path = folder / shard["file"]
            if not path.is_file() or (verify and hashlib.sha256(path.read_bytes()).hexdigest() != shard["sha256"]):
                raise UsageError(f"{path} is missing or not what {MANIFEST} says: make the data again (--overwrite).")
            self._parts.append(np.load(path, mmap_mode="r"))
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1]) if self._parts else 0

    def __getitem__(self, index: int) -> np.ndarray:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        return np.asarray(self._parts[shard][index - first])

    def counts(self, vocab_size: int) -> np.ndarray:
        """Return how often each token is trained on, int64 [V]."""
        total = np.zeros(vocab_size, np.int64)
        for part in self._parts:
            labelled = part[:, 2, :-1].astype(bool)
            total += np.bincount(part[:, 0, 1:][labelled], minlength=vocab_size)[:vocab_size]
        return total
