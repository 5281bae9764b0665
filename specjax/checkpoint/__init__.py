"""Checkpoints in and out: Hugging Face folders, Orbax, hub ids, GGUF files, models known by name."""

from __future__ import annotations

from specjax.checkpoint.conversion import convert
from specjax.checkpoint.files import MissingCheckpoint, NetworkError, cache_folder
from specjax.checkpoint.hf import Checkpoint, load_folder, save_folder
from specjax.checkpoint.known import fetch, fetched_folder, names
from specjax.checkpoint.where import Header, inspect_checkpoint, load_checkpoint, resolve

__all__ = [
    "Checkpoint",
    "Header",
    "MissingCheckpoint",
    "NetworkError",
    "cache_folder",
    "convert",
    "fetch",
    "fetched_folder",
    "inspect_checkpoint",
    "load_checkpoint",
    "load_folder",
    "names",
    "resolve",
    "save_folder",
]
