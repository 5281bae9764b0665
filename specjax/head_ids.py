"""A draft's trimmed output head: the list of token ids that its folder ships, and the model cut down to them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint.files import read_json
from specjax.errors import CheckpointError
from specjax.models.decoder import DecoderFn

FILE = "head_ids.json"


def read(folder: Path, vocab_size: int) -> np.ndarray | None:
    """Return the ids of a folder's ``head_ids.json``, ``{"ids": [...]}``, ascending, int32 [M]; None without it.

    Raises:
        CheckpointError: not a list of different ids below ``vocab_size``.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    ids = read_json(path).get("ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f'{path}: expected {{"ids": [...]}} with token ids in 0..{vocab_size - 1}.')
    if len(set(ids)) < len(ids):
        raise CheckpointError(f"{path} lists {len(ids) - len(set(ids))} ids twice; expected each once.")
    return np.asarray(sorted(ids), np.int32)


def text(ids: np.ndarray) -> str:
    """Return the file's content for a list of ids."""
    return json.dumps({"ids": [int(i) for i in ids]}) + "\n"


def trim(fn: DecoderFn, params: Any, ids: np.ndarray) -> tuple[DecoderFn, dict[str, Any]]:
    """Return a decoder whose head scores ``ids`` alone, and its parameters; a tied embedding stays whole for input."""
    config = dataclasses.replace(fn.config, tied=False, head_rows=len(ids))
    head = params["embedding" if fn.config.tied else "head"]
    return dataclasses.replace(fn, config=config), {**params, "head": head[ids]}
