"""Folders in Hugging Face layout: read into a parameter tree, and written from one."""

from __future__ import annotations

import dataclasses
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint import tensors
from specjax.checkpoint.files import MissingCheckpoint, read_json, staged, write_json
from specjax.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specjax.models.config import DecoderConfig, Family, Leaf

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    GENERATION_CONFIG,
)
# Buffers that some versions of transformers saved although they follow from the config.
_DERIVED = re.compile(r"\.(rotary_emb\.inv_freq|attn\.bias|attn\.masked_bias)$")
_HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model read from disk.

    Attributes:
        name: what the user called it.
        folder: the folder in Hugging Face layout that it was read from.
        family: the model family.
        config: the parsed config.
        hf_config: ``config.json`` as it stands.
        params: nested dict of arrays by ``Leaf.path``. Matrices have the dtype asked; vectors (norm scales,
            biases) are float32.
        eos_ids: end-of-text ids; may be empty.
        bos_id: the beginning-of-text id, if any.
    """

    name: str
    folder: Path
    family: Family
    config: DecoderConfig
    hf_config: dict[str, Any]
    params: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None


def load_folder(
    folder: str | Path,
    *,
    dtype: str = "float32",
    name: str | None = None,
    sharding: tensors.Sharding | None = None,
) -> Checkpoint:
    """Load a folder in Hugging Face layout.

    Args:
        folder: holds ``config.json`` and safetensors, single or sharded, in float32, float16 or bfloat16.
        dtype: "float32" or "bfloat16", of every matrix.
        name: what to call it; the folder's name by default.
        sharding: ``(path, shape) -> jax.sharding.Sharding`` of each parameter; by default all on one device.

    Raises:
        MissingCheckpoint: the folder does not exist.
        CheckpointError: anything in it that is missing, broken, unknown or not honoured; the message says which.
        UsageError: another dtype.

    Example:
        checkpoint = load_folder("tests/data/llama-gqa-tied", dtype="bfloat16")
    """
    import jax

    folder = Path(folder)
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype {dtype!r} is not supported; expected float32 or bfloat16.")
    if not folder.is_dir():
        raise MissingCheckpoint(f"Folder {folder} does not exist. Pass a folder in Hugging Face layout.")
    hf_config, family, config = read_config(folder)
    eos_ids, bos_id = special_ids(folder, hf_config)
    store, leaves = open_store(folder, family.leaves(config), config)
    params: dict[str, Any] = {}
    for leaf in leaves:
        target = tensors.DTYPES[dtype if len(leaf.shape) > 1 else "float32"]
        if sharding is None:
            host = np.empty(leaf.shape, target)
            fill(store, leaf, host)
            value = jax.device_put(host, tensors.one_device(leaf.path, leaf.shape))
        else:
            value = _in_shards(store, leaf, target, sharding(leaf.path, leaf.shape))
        put(params, leaf.path, value)
    return Checkpoint(name or folder.name, folder, family, config, hf_config, params, eos_ids, bos_id)


def read_config(folder: Path) -> tuple[dict[str, Any], Family, DecoderConfig]:
    """Read ``config.json``: as it stands, the family that serves it, and the parsed config.

    Raises:
        CheckpointError: the file or a key is missing, it is not JSON, the architecture is unknown, or an
            option is not honoured.
    """
    from specjax.models.registry import family_for

    path = folder / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {CONFIG}; expected a folder in Hugging Face layout.")
    hf_config = read_json(path)
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{path} lacks the key 'model_type'.")
    try:
        family = family_for(model_type)
        return hf_config, family, family.parse(hf_config)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks the key {error.args[0]!r}.") from error
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def special_ids(folder: Path, hf_config: Mapping[str, Any]) -> tuple[tuple[int, ...], int | None]:
    """Read EOS ids and the BOS id: generation_config.json first, config.json where it says nothing."""
    path = folder / GENERATION_CONFIG
    sources = [(path, read_json(path))] if path.is_file() else []
    sources.append((folder / CONFIG, dict(hf_config)))
    eos = _ids(sources, "eos_token_id")
    bos = _ids(sources, "bos_token_id")
    return eos, bos[0] if bos else None


def _ids(sources: list[tuple[Path, dict[str, Any]]], key: str) -> tuple[int, ...]:
    for path, source in sources:
        value = source.get(key)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise CheckpointError(f"{path}: {key} is {value!r}; expected an id or a list of ids.")
        return tuple(dict.fromkeys(ids))
    return ()


def open_store(folder: Path, leaves: list[Leaf], config: DecoderConfig) -> tuple[tensors.TensorStore, list[Leaf]]:
    """Open a folder's tensors, checked against its config; the leaves come back under the names it uses.

    Raises:
        CheckpointError: a tensor is missing, of another shape or dtype, or not accounted for.
    """
    store = tensors.TensorStore(folder)
    embedding = _embedding(leaves)
    if embedding not in store.tensors and _embedding(bare := without_prefix(leaves)) in store.tensors:
        leaves = bare
    _check_tensors(store, leaves, config)
    return store, leaves


def without_prefix(leaves: list[Leaf]) -> list[Leaf]:
    """Drop the leading part of the names (``model.``, ``transformer.``), as a folder of the bare decoder has them."""
    prefix = _embedding(leaves).partition(".")[0] + "."
    return [
        dataclasses.replace(leaf, sources=tuple(name.removeprefix(prefix) for name in leaf.sources)) for leaf in leaves
    ]


def _embedding(leaves: list[Leaf]) -> str:
    return next(leaf.sources[0] for leaf in leaves if leaf.path == ("embedding",))


def _check_tensors(store: tensors.TensorStore, leaves: list[Leaf], config: DecoderConfig) -> None:
    wanted: set[str] = set()
    for leaf in leaves:
        for source, shape in zip(leaf.sources, leaf.source_shapes, strict=True):
            store.check(source, shape)
            wanted.add(source)
    extra = sorted(name for name in store.tensors if name not in wanted and not _DERIVED.search(name))
    if config.tied and _HEAD in extra:
        extra.remove(_HEAD)
        if not store.equal(_HEAD, _embedding(leaves)):
            warnings.warn(
                f"{store.folder} has a {_HEAD} unlike its embedding, but its {CONFIG} ties the two: "
                f"{_HEAD} is not used. Set tie_word_embeddings to false to use it.",
                stacklevel=5,
            )
    if extra:
        more = f" and {len(extra) - 5} more" if len(extra) > 5 else ""
        raise CheckpointError(
            f"{store.folder} holds tensors that its {CONFIG} does not account for: {', '.join(extra[:5])}{more}. "
            "The config asks for another model than this one."
        )


def fill(store: tensors.TensorStore, leaf: Leaf, out: np.ndarray) -> None:
    """Read one leaf into ``out``, of its shape, cast to its dtype."""
    if not leaf.transposed and leaf.rows is None:
        row = 0
        for source, shape in zip(leaf.sources, leaf.source_shapes, strict=True):
            store.read_into(source, out[row : row + shape[0]])
            row += shape[0]
        return
    parts = [store.read(source, out.dtype) for source in leaf.sources]
    whole = np.concatenate([part.T if leaf.transposed else part for part in parts])
    out[...] = whole if leaf.rows is None else whole[slice(*leaf.rows)]


def _in_shards(store: tensors.TensorStore, leaf: Leaf, dtype: np.dtype, sharding: Any) -> Any:
    """Return one leaf laid out, this process having read no more than the parts of its own devices."""
    import jax

    held: dict[str, np.ndarray] = {}  # devices that hold the same part share the reading

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        name = str(index)
        if name not in held:
            held[name] = _part(store, leaf, index, dtype)
        return held[name]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def _part(store: tensors.TensorStore, leaf: Leaf, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
    if leaf.transposed or leaf.rows is not None:
        whole = np.empty(leaf.shape, dtype)
        fill(store, leaf, whole)
        return np.ascontiguousarray(whole[index])
    first, last, _ = index[0].indices(leaf.shape[0])
    parts, row = [], 0
    for source, shape in zip(leaf.sources, leaf.source_shapes, strict=True):
        low, high = max(first, row), min(last, row + shape[0])
        if low < high:
            parts.append(store.read_part(source, (slice(low - row, high - row), *index[1:]), dtype))
        row += shape[0]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put a leaf into a nested dict."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _get(tree: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    node: Any = tree
    for key in path:
        node = node[key]
    return node


def save_folder(
    path: str | Path,
    hf_config: Mapping[str, Any],
    params: Mapping[str, Any],
    family: Family,
    config: DecoderConfig,
    *,
    dtype: str = "float32",
    tokenizer_from: Path | None = None,
    files: Mapping[str, str] | None = None,
) -> Path:
    """Write a folder in Hugging Face layout: complete under its final name, or not there at all.

    Args:
        path: the folder; must not exist.
        hf_config: written as ``config.json`` with its dtype set.
        params: nested dict of arrays, as in ``Checkpoint.params``.
        family: names the tensors.
        config: the parsed config.
        dtype: "float32", "float16" or "bfloat16", of every tensor in the file.
        tokenizer_from: a folder whose tokenizer, chat template and generation config are copied.
        files: further files by name, as text: a card.

    Returns:
        The folder.

    Raises:
        CheckpointError: ``path`` exists or cannot be written, or ``params`` do not fit ``config``.
        UsageError: another dtype.
    """
    path = Path(path)
    if dtype not in tensors.DTYPES:
        raise UsageError(f"dtype {dtype!r} is not supported; expected one of {', '.join(tensors.DTYPES)}.")
    leaves = family.leaves(config)
    for leaf in leaves:
        try:
            got = tuple(_get(params, leaf.path).shape)
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"Parameter {'/'.join(leaf.path)} is missing; the config asks for it.") from error
        if got != leaf.shape:
            raise CheckpointError(
                f"Parameter {'/'.join(leaf.path)} has shape {list(got)}; the config asks for {list(leaf.shape)}."
            )
    shapes = {name: shape for leaf in leaves for name, shape in zip(leaf.sources, leaf.source_shapes, strict=True)}
    with staged(path) as temp:
        write_config(temp, hf_config, dtype)
        tensors.write_tensors(temp / tensors.SINGLE, shapes, sources(params, leaves), dtype)
        if tokenizer_from is not None:
            for name in TOKENIZER_FILES:
                if (tokenizer_from / name).is_file():
                    shutil.copyfile(tokenizer_from / name, temp / name)
        for name, text in (files or {}).items():
            (temp / name).write_text(text, encoding="utf-8")
    return path


def write_config(folder: Path, hf_config: Mapping[str, Any], dtype: str) -> None:
    """Write ``config.json`` with ``dtype`` under the key that the config uses (transformers 4 or 5)."""
    value = dict(hf_config)
    key = "torch_dtype" if "torch_dtype" in value and "dtype" not in value else "dtype"
    value.pop("torch_dtype", None)
    value[key] = dtype
    write_json(folder / CONFIG, value)


def sources(params: Mapping[str, Any], leaves: list[Leaf]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the checkpoint's tensors, each made of the leaves that share it, in the order of their first leaf."""
    shared: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        if leaf.rows is not None:
            shared.setdefault(leaf.sources[0], []).append(leaf)
    for leaf in leaves:
        if leaf.rows is not None:
            parts = shared.pop(leaf.sources[0], None)
            if parts is None:
                continue
            whole = np.concatenate([np.asarray(_get(params, part.path)) for part in parts])
        else:
            whole = np.asarray(_get(params, leaf.path))
        row = 0
        for name, shape in zip(leaf.sources, leaf.source_shapes, strict=True):
            rows = shape[-1] if leaf.transposed else shape[0]
            part = whole[row : row + rows]
            yield name, part.T if leaf.transposed else part
            row += rows
