"""``specjax convert``: one checkpoint written in another form, complete under its final name or not there at all."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specjax.checkpoint import hf, orbax_folder, tensors
from specjax.checkpoint.files import staged
from specjax.errors import CheckpointError, UsageError

Form = Literal["hf", "orbax"]
KEEP = "keep"
DTYPES = ("float32", "bfloat16", KEEP)
_BESIDE = (*hf.TOKENIZER_FILES, "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")


def convert(
    source: str | Path, dest: str | Path, *, to: Form = "hf", dtype: str = KEEP, progress: bool = False
) -> Path:
    """Write a model as a folder in Hugging Face layout or as an Orbax folder.

    With ``dtype`` "keep" every tensor's bytes, its name and ``config.json`` come through unchanged, in both directions.
    A GGUF file's quantised values become float32.

    Args:
        source: as ``resolve`` takes it.
        dest: the folder; must not exist.
        to: "hf" or "orbax".
        dtype: "float32", "bfloat16" or "keep", of every tensor of floats.
        progress: show downloads and conversions on standard error.

    Returns:
        The folder.

    Raises:
        CheckpointError: ``dest`` exists, or the source cannot be read or holds something that is not honoured.
        UsageError: an unknown form or dtype.

    Example:
        convert("smollm2-135m", "smollm2-orbax", to="orbax", dtype="bfloat16")
    """
    from specjax.checkpoint.where import resolve

    dest = Path(dest).expanduser()
    if to not in ("hf", "orbax"):
        raise UsageError(f"Form {to!r} is not known; expected hf or orbax.")
    if dtype not in DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; expected one of {', '.join(DTYPES)}.")
    with staged(dest) as temp:
        if to == "hf" and dtype in ("float32", KEEP) and Path(source).suffix.lower() == ".gguf":
            from specjax.checkpoint import gguf

            gguf.write_converted(gguf.existing(source), temp, progress=progress)
            return dest
        folder = resolve(source, progress=progress)
        (_write_orbax if to == "orbax" else _write_hf)(_Source(folder), temp, dtype)
    return dest


class _Source:
    """A folder to convert from, of either form, checked against its config."""

    def __init__(self, folder: Path):
        place = orbax_folder.locate(folder)
        self.config_folder = folder if place is None else place.config
        self.hf_config, self.family, self.config = hf.read_config(self.config_folder)
        self.leaves = self.family.leaves(self.config)
        self.stored = None if place is None else orbax_folder.read(folder)
        self.store = None
        if self.stored is None:
            self.store, self.leaves = hf.open_store(folder, self.leaves, self.config)
        elif self.stored.bare_names:
            self.leaves = hf.without_prefix(self.leaves)

    def tensors(self) -> Iterator[tuple[str, np.dtype, tuple[int, ...], Any]]:
        """Yield each Hugging Face tensor: name, dtype, shape, and a function that reads it."""
        store = self.store
        if store is not None:
            for name, stored in store.tensors.items():
                yield name, store.dtype(name), stored.shape, functools.partial(store.read, name)
            return
        assert self.stored is not None
        for name, array in [*hf.sources(self.stored.params, self.leaves), *self.stored.extra.items()]:
            yield name, array.dtype, array.shape, lambda array=array: array

    def parameters(self, dtype: str) -> orbax_folder.Stored:
        """Return everything as an Orbax folder stores it."""
        if self.stored is not None:
            params, extra = (_cast_tree(tree, dtype) for tree in (self.stored.params, self.stored.extra))
            return orbax_folder.Stored(params, extra, self.stored.bare_names)
        store = self.store
        assert store is not None
        params: dict[str, Any] = {}
        for leaf in self.leaves:
            kinds = {_target(store.dtype(name), dtype) for name in leaf.sources}
            if len(kinds) > 1:
                raise CheckpointError(
                    f"{store.folder} keeps the parts of {'/'.join(leaf.path)} in several dtypes "
                    f"({', '.join(sorted(map(str, kinds)))}), which one array cannot: pass --dtype."
                )
            out = np.empty(leaf.shape, kinds.pop())
            hf.fill(store, leaf, out)
            hf.put(params, leaf.path, out)
        used = {name for leaf in self.leaves for name in leaf.sources}
        extra = {name: _cast(store.read(name), dtype) for name in store.tensors if name not in used}
        return orbax_folder.Stored(params, extra, self.leaves[0].sources != self.family.leaves(self.config)[0].sources)


def _write_hf(source: _Source, folder: Path, dtype: str) -> None:
    found = list(source.tensors())
    kinds = {name: (_target(stored, dtype), tuple(shape)) for name, stored, shape, _ in found}
    _write_beside(source, folder, dtype)
    tensors.write_as_stored(folder / tensors.SINGLE, kinds, ((name, read()) for name, _, _, read in found))


def _write_orbax(source: _Source, folder: Path, dtype: str) -> None:
    _write_beside(source, folder, dtype)
    orbax_folder.write(folder, source.parameters(dtype))


def _write_beside(source: _Source, folder: Path, dtype: str) -> None:
    """Write the config, as it stands unless the dtype changes, and copy what belongs to the tokenizer."""
    if dtype == KEEP:
        shutil.copyfile(source.config_folder / hf.CONFIG, folder / hf.CONFIG)
    else:
        hf.write_config(folder, source.hf_config, dtype)
    for name in _BESIDE:
        if (source.config_folder / name).is_file():
            shutil.copyfile(source.config_folder / name, folder / name)


def _target(stored: np.dtype, dtype: str) -> np.dtype:
    """Return the dtype to write: floats follow ``dtype``, masks and integers stay."""
    floats = {*tensors.DTYPES.values(), np.dtype(np.float64)}
    return stored if dtype == KEEP or stored not in floats else tensors.DTYPES[dtype]


def _cast(array: np.ndarray, dtype: str) -> np.ndarray:
    return array.astype(_target(array.dtype, dtype), copy=False)


def _cast_tree(tree: dict[str, Any], dtype: str) -> dict[str, Any]:
    return {
        key: _cast_tree(value, dtype) if isinstance(value, dict) else _cast(value, dtype) for key, value in tree.items()
    }
