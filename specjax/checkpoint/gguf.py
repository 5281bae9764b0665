"""GGUF files: converted once to a folder in Hugging Face layout, float32, kept in the cache folder."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import gguf_tokenizer, hf, tensors
from specjax.checkpoint.files import MissingCheckpoint, cache_folder, make_once
from specjax.checkpoint.gguf_architectures import ARCHITECTURES, decimal
from specjax.errors import CheckpointError

# Part of the cache key: raise it when the conversion changes.
_VERSION = 2
_ROPE_FREQS = "rope_freqs.weight"


class GGUF:
    """An open GGUF file: metadata, and tensors by name.

    Raises:
        CheckpointError: not a GGUF file, truncated, or of an architecture that is not supported.
    """

    def __init__(self, path: Path):
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(path)
            self.shapes = {t.name: tuple(int(n) for n in reversed(t.shape)) for t in self._reader.tensors}
            self._tensors = {t.name: t for t in self._reader.tensors}
            name = self.get("general.architecture")
        except Exception as error:  # the reader has no errors of its own: a short file breaks it anywhere
            raise CheckpointError(
                f"{path} is truncated or not a GGUF file ({type(error).__name__}: {error}). "
                "Copy or download the file again."
            ) from error
        architecture = ARCHITECTURES.get(name)
        if architecture is None:
            raise CheckpointError(
                f"{path}: GGUF architecture {name!r} is not supported; known: {', '.join(ARCHITECTURES)}."
            )
        self.name, self.architecture = name, architecture
        unknown = sorted(
            key
            for key in self._reader.fields
            if key.startswith(f"{name}.") and key[len(name) + 1 :] not in architecture.keys
        )
        if unknown:
            raise CheckpointError(f"{path}: metadata not honoured: {', '.join(unknown[:5])}.")

    def get(self, key: str) -> Any:
        """Return a metadata value, None when absent."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Return a metadata value of the architecture.

        Raises:
            CheckpointError: it is absent.
        """
        value = self.get(f"{self.name}.{key}")
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {self.name}.{key} is missing.")
        return value

    def opt(self, key: str, default: Any = None) -> Any:
        """Return a metadata value of the architecture, or the default."""
        value = self.get(f"{self.name}.{key}")
        return default if value is None else value

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor as float32, dequantised.

        Raises:
            CheckpointError: its quantisation is not supported.
        """
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise CheckpointError(f"{self.path}: tensor {name}: {error}.") from error
        return values.astype(np.float32, copy=False).reshape(self.shapes[name])


def convert(path: str | Path, *, progress: bool = False) -> Path:
    """Return a folder in Hugging Face layout made from a GGUF file: once, then from the cache folder.

    Args:
        path: the ``.gguf`` file.
        progress: show a bar on standard error while converting.

    Raises:
        MissingCheckpoint: the file does not exist.
        CheckpointError: it cannot be read, or holds something that is not honoured.
    """
    path = existing(path)
    final = cache_folder() / "gguf" / f"{path.stem}-{_key(path)}"
    return make_once(final, lambda temp: write_converted(path, temp, progress=progress))


def existing(path: str | Path) -> Path:
    """Return the path of a file that is there.

    Raises:
        MissingCheckpoint: it is not.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise MissingCheckpoint(f"{path} does not exist.")
    return path


def _key(path: Path) -> str:
    """Tell files apart without reading gigabytes: size, time of change, and the first and last bytes."""
    stat = path.stat()
    digest = hashlib.sha256(f"{_VERSION} {stat.st_size} {stat.st_mtime_ns}".encode())
    with open(path, "rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 16)))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def write_converted(path: Path, folder: Path, *, progress: bool = False) -> None:
    """Write the files of a Hugging Face folder from a GGUF file into ``folder``, which exists.

    Raises:
        CheckpointError: as ``convert``.
    """
    file = GGUF(path)
    names = _names(file)
    config = hf_config(file)
    hf.write_config(folder, config, "float32")
    hf.read_config(folder)  # refuse what the family does not honour before the long part
    gguf_tokenizer.write_tokenizer(folder, file.get, path)
    shapes = {new: file.shapes[old] for old, new in names.items()}
    tensors.write_tensors(folder / tensors.SINGLE, shapes, _values(file, names, config, progress), "float32")


def _values(
    file: GGUF, names: dict[str, str], config: dict[str, Any], progress: bool
) -> Iterator[tuple[str, np.ndarray]]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, disable=not (progress and console.is_terminal), transient=True) as bar:
        task = bar.add_task(f"Converting {file.path.name}", total=sum(math.prod(file.shapes[n]) for n in names))
        for old, new in names.items():
            values = file.tensor(old)
            part = old.split(".")[-2]
            if (key := file.architecture.permuted.get(part)) is not None and old.startswith("blk."):
                values = unpermute(values, config[key])
            if part.endswith("norm") and file.architecture.norm_offset:
                values = values - np.float32(file.architecture.norm_offset)
            yield new, values
            bar.advance(task, values.size)


def unpermute(values: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of each head's rows: [heads * H, ...] in, the same shape out."""
    rows, rest = values.shape[0], values.shape[1:]
    return values.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _names(file: GGUF) -> dict[str, str]:
    """Map each tensor's GGUF name to its Hugging Face name."""
    names: dict[str, str] = {}
    unknown = []
    for old in file.shapes:
        block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", old)
        top = re.fullmatch(r"(\w+)\.(weight|bias)", old)
        if old == _ROPE_FREQS:
            continue
        if block and block[2] in file.architecture.block:
            names[old] = f"model.layers.{block[1]}.{file.architecture.block[block[2]]}.{block[3]}"
        elif top and top[1] in file.architecture.top:
            names[old] = f"{file.architecture.top[top[1]]}.{top[2]}"
        else:
            unknown.append(old)
    if unknown:
        raise CheckpointError(f"{file.path}: tensors not honoured: {', '.join(unknown[:5])}.")
    return names


def hf_config(file: GGUF) -> dict[str, Any]:
    """Translate the metadata to a ``config.json``.

    Raises:
        CheckpointError: metadata that is missing or not honoured.
    """
    heads = file.need("attention.head_count")
    width = file.need("embedding_length")
    if not isinstance(heads, int) or isinstance(file.opt("attention.head_count_kv"), list):
        raise CheckpointError(f"{file.path}: a head count per layer is not honoured.")
    if file.opt("expert_count", 0):
        raise CheckpointError(f"{file.path}: a mixture of experts is not honoured.")
    head_dim = file.opt("attention.key_length", file.opt("rope.dimension_count", width // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.opt(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{file.path}: {key} {file.opt(key)} unlike the head size {head_dim} is not honoured."
            )
    if "token_embd.weight" not in file.shapes:
        raise CheckpointError(f"{file.path}: tensor token_embd.weight is missing.")
    config = {
        "architectures": [file.architecture.class_name],
        "model_type": file.architecture.model_type,
        "hidden_act": "silu",
        "vocab_size": file.shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": file.need("feed_forward_length"),
        "num_hidden_layers": file.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.opt("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.need("context_length"),
        "rms_norm_eps": decimal(file.need("attention.layer_norm_rms_epsilon")),
        "rope_theta": decimal(file.opt("rope.freq_base", file.architecture.rope_theta)),
        "tie_word_embeddings": "output.weight" not in file.shapes,
    }
    for key in ("bos", "eos"):
        if (value := file.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = int(value)
    if (scaling := _rope_scaling(file, head_dim, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
    file.architecture.finish(file, config)
    return config


def _rope_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any] | None:
    kind = file.opt("rope.scaling.type", "none")
    if _ROPE_FREQS in file.shapes:
        if kind != "none":
            raise CheckpointError(f"{file.path}: {_ROPE_FREQS} together with rope scaling {kind!r} is not honoured.")
        return _llama3_scaling(file, head_dim, theta)
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{file.path}: rope scaling {kind!r} is not honoured; known: none, linear, yarn.")
    scaling = {"rope_type": kind, "factor": decimal(file.need("rope.scaling.factor"))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.need("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(file: GGUF, head_dim: int, theta: float) -> dict[str, Any]:
    """Recover Llama 3's parameters from the per-frequency divisors that GGUF keeps in their place.

    Raises:
        CheckpointError: the divisors are not Llama 3's.
    """
    divisors = file.tensor(_ROPE_FREQS).astype(np.float64)
    factor, low, high, original = float(np.round(divisors.max(), 4)), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise CheckpointError(f"{file.path}: {_ROPE_FREQS} are not those of Llama 3 scaling, and are not honoured.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
