"""Tensors in safetensors files: read one at a time in any of three dtypes, written one at a time."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import ml_dtypes
import numpy as np

from specjax.checkpoint.files import read_json
from specjax.errors import CheckpointError

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Every dtype that can be copied as it is; a weight has one of the three above.
RAW: dict[str, np.dtype] = {code: DTYPES[name] for code, name in _CODES.items()} | {
    "F64": np.dtype(np.float64),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_CHUNK_BYTES = 1 << 24
# (path, shape) of a parameter -> jax.sharding.Sharding: where it goes.
Sharding = Callable[[tuple[str, ...], tuple[int, ...]], Any]
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def one_device(path: tuple[str, ...], shape: tuple[int, ...]) -> Any:
    """Return where a parameter goes when nothing else is said: the first device."""
    import jax

    del path, shape
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where one tensor lies.

    Attributes:
        file: its safetensors file.
        code: its dtype as the file spells it.
        shape: its shape.
        offset: first byte in the file.
    """

    file: Path
    code: str
    shape: tuple[int, ...]
    offset: int


class TensorStore:
    """The tensors of a folder in Hugging Face layout: single file, or shards with an index.

    Example:
        store = TensorStore(Path("folder"))
        weight = store.read("model.norm.weight", np.dtype("float32"))

    Raises:
        CheckpointError: no weights, only pickled ones, a missing shard, a truncated file, or an index that
            names a tensor its shard lacks.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.tensors: dict[str, Stored] = {}
        if (folder / SINGLE).is_file():
            self.tensors.update(_read_header(folder / SINGLE))
        elif (folder / INDEX).is_file():
            self._read_index()
        else:
            raise CheckpointError(_no_weights(folder))

    def _read_index(self) -> None:
        path = self.folder / INDEX
        weight_map = read_json(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path} lacks the key 'weight_map'. Copy or download the file again.")
        shards = sorted({str(name) for name in weight_map.values()})
        for name in shards:
            if Path(name).name != name:
                raise CheckpointError(f"{path} names the shard {name!r}; expected a file name without folders.")
            if not (self.folder / name).is_file():
                raise CheckpointError(
                    f"Shard {name} is missing from {self.folder}: {INDEX} names {len(shards)} shards. "
                    "Copy or download that file."
                )
        held = {name: _read_header(self.folder / name) for name in shards}
        for tensor, shard in weight_map.items():
            if tensor not in held[shard]:
                raise CheckpointError(f"{path} says that {shard} holds tensor {tensor}, but that shard lacks it.")
        for tensors in held.values():
            self.tensors.update(tensors)

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check that a tensor is there, of that shape and of a dtype that can be read.

        Raises:
            CheckpointError: one of these does not hold.
        """
        stored = self.tensors.get(name)
        if stored is None:
            raise CheckpointError(
                f"Tensor {name} {list(shape)} is missing from {self.folder}; config.json asks for it."
            )
        if stored.shape != tuple(shape):
            raise CheckpointError(
                f"Tensor {name} in {stored.file} has shape {list(stored.shape)}; config.json asks for {list(shape)}."
            )
        if stored.code not in _CODES:
            raise CheckpointError(
                f"Tensor {name} in {stored.file} has dtype {stored.code}; expected one of {', '.join(_CODES)}. "
                "Quantised weights have to be converted first."
            )

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype a tensor is stored in.

        Raises:
            CheckpointError: one that cannot be read.
        """
        stored = self.tensors[name]
        if stored.code not in RAW:
            raise CheckpointError(
                f"Tensor {name} in {stored.file} has dtype {stored.code}; expected one of {', '.join(RAW)}."
            )
        return RAW[stored.code]

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """Read one whole tensor as ``dtype``; as it is stored by default."""
        out = np.empty(self.tensors[name].shape, self.dtype(name) if dtype is None else dtype)
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: np.ndarray) -> None:
        """Read one tensor into ``out`` (C-contiguous, same shape), cast to its dtype.

        Plain reads in chunks rather than a mapping: the pages of a mapping stay resident, which would
        double the peak memory of a load.

        Raises:
            CheckpointError: the file ends early.
        """
        stored = self.tensors[name]
        source = self.dtype(name)
        flat = out.reshape(-1)
        step = _CHUNK_BYTES // source.itemsize
        with open(stored.file, "rb") as file:
            file.seek(stored.offset)
            for start in range(0, flat.size, step):
                part = flat[start : start + step]
                if source == out.dtype:
                    raw = part
                else:
                    raw = np.empty(part.shape, source)
                if file.readinto(raw.view(np.uint8).data) != raw.nbytes:
                    raise CheckpointError(f"{stored.file} ends inside tensor {name}. Copy or download the file again.")
                if raw is not part:
                    part[...] = raw

    def read_part(self, name: str, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read a part of one tensor, cast to ``dtype``: the rows asked for, and of each only its columns.

        Args:
            name: the tensor.
            index: a slice of each axis, as ``jax.make_array_from_callback`` gives them.
            dtype: of the result.

        Raises:
            CheckpointError: the file ends early.
        """
        stored, source = self.tensors[name], self.dtype(name)
        bounds = [part.indices(size)[:2] for part, size in zip(index, stored.shape, strict=True)]
        (first, last), rest = bounds[0], stored.shape[1:]
        width = math.prod(rest)
        whole = all(bound == (0, size) for bound, size in zip(bounds[1:], rest, strict=True))
        low, high = (0, width) if whole else bounds[1]
        if not whole and len(rest) > 1:
            raise ValueError(f"Tensor {name} has {len(stored.shape)} axes; only those of a matrix can be split.")
        out = np.empty((last - first, high - low), source)
        with open(stored.file, "rb") as file:
            for row, segment in enumerate([out.reshape(-1)] if whole else out):
                file.seek(stored.offset + ((first + row) * width + low) * source.itemsize)
                if file.readinto(segment.view(np.uint8).data) != segment.nbytes:
                    raise CheckpointError(f"{stored.file} ends inside tensor {name}. Copy or download the file again.")
        shape = (last - first, *(rest if whole else (high - low,)))
        return out.reshape(shape).astype(dtype, copy=False)

    def equal(self, first: str, second: str) -> bool:
        """Say whether two tensors hold the same values."""
        a, b = self.tensors[first], self.tensors[second]
        if a.shape != b.shape or a.code not in _CODES or b.code not in _CODES:
            return False
        wide = DTYPES["float32"]
        return np.array_equal(self.read(first, wide), self.read(second, wide))


def _no_weights(folder: Path) -> str:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
    if pickled:
        return (
            f"{folder} holds only pickled weights ({pickled[0]}), which can run code when loaded and are not read. "
            "Convert them to safetensors."
        )
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    if shards:
        return f"{folder} holds {shards[0]} but neither {SINGLE} nor {INDEX}. Copy or download the index."
    return f"{folder} holds no weights: expected {SINGLE}, or {INDEX} with its shards."


def _read_header(path: Path) -> dict[str, Stored]:
    """Read the table of contents of a safetensors file, checked against the file's size by the library."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except (SafetensorError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}). Copy or download the file again."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    header.pop("__metadata__", None)
    return {
        name: Stored(path, item["dtype"], tuple(item["shape"]), 8 + length + item["data_offsets"][0])
        for name, item in header.items()
    }


def write_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, np.ndarray]], dtype: str
) -> None:
    """Write a safetensors file, holding one tensor in memory at a time.

    Args:
        path: the file.
        shapes: name and shape of every tensor, in the order of ``tensors``.
        tensors: the same names with their arrays; cast to ``dtype`` when written.
        dtype: "float32", "float16" or "bfloat16".
    """
    write_as_stored(path, {name: (DTYPES[dtype], shape) for name, shape in shapes.items()}, tensors)


def write_as_stored(
    path: Path, kinds: Mapping[str, tuple[np.dtype, tuple[int, ...]]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write a safetensors file whose tensors each have their own dtype.

    Args:
        path: the file.
        kinds: dtype and shape of every tensor, in the order of ``tensors``.
        tensors: the same names with their arrays; cast to their dtype when written.
    """
    codes = {dtype: code for code, dtype in RAW.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in kinds.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    expected = iter(kinds.items())
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, array in tensors:
            wanted, (dtype, shape) = next(expected, ("", (DTYPES["float32"], ())))
            if (name, tuple(array.shape)) != (wanted, shape):
                raise ValueError(f"Tensor {name} {array.shape} came out of the order or shape declared.")
            _write(file, array, dtype)
    if next(expected, None) is not None:
        raise ValueError("Fewer tensors came than were declared.")


def _write(file: IO[bytes], array: np.ndarray, target: np.dtype) -> None:
    flat = np.ascontiguousarray(array).reshape(-1)
    step = _CHUNK_BYTES // 4
    for start in range(0, flat.size, step):
        file.write(flat[start : start + step].astype(target, copy=False).view(np.uint8).data)
