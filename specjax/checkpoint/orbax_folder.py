"""Orbax folders: ``config.json`` and tokenizer files, with the parameters below as an Orbax checkpoint.

A folder that this package writes is ``FOLDER/config.json`` and ``FOLDER/params``, whose tree is ``{"params": ...}`` by
``Leaf.path``, and ``"extra"`` with the tensors of a Hugging Face folder that no parameter is made of. A checkpoint
that holds the parameters alone is read too, and so is one step of a training folder: config and tokenizer are then
looked for in the step's folder and in the one above.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import hf, tensors
from specjax.errors import CheckpointError, SpecjaxError, UsageError

PARAMS = "params"
EXTRA = "extra"
_BARE_NAMES = "bare_names"
_MARKS = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt", "orbax.checkpoint", "commit_success.txt")
_SHOWN = 5
_GRACE = 0.3  # seconds


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the parts of an Orbax folder lie.

    Attributes:
        config: the folder with ``config.json`` and the tokenizer.
        checkpoint: the Orbax checkpoint.
    """

    config: Path
    checkpoint: Path


@dataclasses.dataclass(frozen=True)
class Stored:
    """A whole checkpoint on the host, in the dtypes it is stored in.

    Attributes:
        params: nested dict of NumPy arrays by ``Leaf.path``.
        extra: tensors that no parameter is made of, by name.
        bare_names: the Hugging Face folder it came from named its tensors without the leading ``model.``.
    """

    params: dict[str, Any]
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    bare_names: bool = False


def locate(folder: Path) -> Place | None:
    """Return where the parts of an Orbax folder lie; None for a folder that has nothing of Orbax.

    Raises:
        CheckpointError: a folder of steps, a step without a finished checkpoint, or a checkpoint without a config.
    """
    if (folder / tensors.SINGLE).exists() or (folder / tensors.INDEX).exists():
        return None
    here = (folder / hf.CONFIG).is_file()
    for checkpoint in (folder / PARAMS, folder):
        if _is_checkpoint(checkpoint):
            config = next((place for place in (folder, folder.parent) if (place / hf.CONFIG).is_file()), None)
            if config is None:
                raise CheckpointError(
                    f"{folder} is an Orbax checkpoint without a {hf.CONFIG}, in it or above it: put the model's there."
                )
            return Place(config, checkpoint)
    if found := steps(folder):
        raise CheckpointError(f"{folder} holds the steps {_listed(found)}: pass one of them, as {folder / found[-1]}.")
    if folder.name.isdecimal():
        others = steps(folder.parent)
        raise CheckpointError(f"{folder} holds no finished checkpoint; {_others(folder.parent, others)}")
    if here and (folder / PARAMS).is_dir():
        raise CheckpointError(f"{folder / PARAMS} holds no finished checkpoint: convert or save it again.")
    return None


def steps(folder: Path) -> list[str]:
    """Return the finished steps of a training folder, by number; temporary and empty ones are left out."""
    if not folder.is_dir():
        return []
    found = [entry.name for entry in folder.iterdir() if entry.name.isdecimal() and _holds_checkpoint(entry)]
    return sorted(found, key=int)


def missing_step(path: Path) -> str | None:
    """Say which steps there are when ``path`` looks like a step that is not there; None when it does not."""
    if not path.name.isdecimal() or not (found := steps(path.parent)):
        return None
    return f"{path} does not exist; {_others(path.parent, found)}"


def _others(folder: Path, found: list[str]) -> str:
    return f"{folder} has the steps {_listed(found)}." if found else f"{folder} has no step that does."


def _listed(names: list[str]) -> str:
    return ", ".join(names if len(names) <= 10 else [*names[:3], "...", *names[-3:]])


def _holds_checkpoint(folder: Path) -> bool:
    return _is_checkpoint(folder) or _is_checkpoint(folder / PARAMS)


def _is_checkpoint(folder: Path) -> bool:
    """Say whether a folder is a checkpoint: marked itself, or its one item is."""
    if not folder.is_dir():
        return False
    below = [entry for entry in folder.iterdir() if entry.name != PARAMS and not entry.name.isdecimal()]
    items = [entry for entry in below if entry.is_dir()]
    return any((place / mark).exists() for place in (folder, *items) for mark in _MARKS)


def load(
    folder: Path, *, dtype: str = "float32", name: str | None = None, sharding: tensors.Sharding | None = None
) -> hf.Checkpoint:
    """Load an Orbax folder.

    Args:
        folder: as in ``locate``.
        dtype: "float32" or "bfloat16", of every matrix; values stored in another are rounded here, never by Orbax.
        name: what to call it; the folder's name by default.
        sharding: ``(path, shape) -> jax.sharding.Sharding`` of each parameter; each device is given its slices as they
            are read. By default all on one device.

    Raises:
        CheckpointError: parameters that are missing, of another shape or unknown; a checkpoint that cannot be read.
        UsageError: another dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype {dtype!r} is not supported; expected float32 or bfloat16.")
    place = _need(folder)
    hf_config, family, config = hf.read_config(place.config)
    eos_ids, bos_id = hf.special_ids(place.config, hf_config)
    leaves = family.leaves(config)
    tree, _ = _abstract(place.checkpoint)
    _check(place, leaves, tree)
    import jax

    place_of = sharding or tensors.one_device

    def on_device(path: tuple[str, ...], kind: Any) -> Any:
        if PARAMS in tree and path[:1] != (PARAMS,):  # extra tensors, or an optimiser's state
            return None
        inner = path[1:] if path[:1] == (PARAMS,) else path
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place_of(inner, tuple(kind.shape)))

    restored = _restore(place.checkpoint, tree, on_device)
    params: dict[str, Any] = {}
    for leaf in leaves:
        wanted = tensors.DTYPES[dtype if len(leaf.shape) > 1 else "float32"]
        array = _pop(_params_of(restored), leaf.path)
        hf.put(params, leaf.path, array if array.dtype == wanted else _cast(array, wanted))
    return hf.Checkpoint(name or folder.name, place.config, family, config, hf_config, params, eos_ids, bos_id)


def read(folder: Path) -> Stored:
    """Read everything an Orbax folder stores, on the host, as it is stored.

    Raises:
        CheckpointError: as ``load``.
    """
    place = _need(folder)
    _, family, config = hf.read_config(place.config)
    tree, custom = _abstract(place.checkpoint)
    _check(place, family.leaves(config), tree)
    restored = _restore(place.checkpoint, tree, lambda path, kind: np.empty(kind.shape, kind.dtype))
    return Stored(_params_of(restored), restored.get(EXTRA, {}), bool((custom or {}).get(_BARE_NAMES)))


def kinds(folder: Path) -> dict[tuple[str, ...], tuple[np.dtype, tuple[int, ...]]]:
    """Return the dtype and shape of every parameter, read from the metadata alone.

    Raises:
        CheckpointError: as ``load``.
    """
    place = _need(folder)
    _, family, config = hf.read_config(place.config)
    tree, _ = _abstract(place.checkpoint)
    _check(place, family.leaves(config), tree)
    return {path: (np.dtype(kind.dtype), tuple(kind.shape)) for path, kind in _flat(_params_of(tree))}


def write(folder: Path, stored: Stored) -> None:
    """Write parameters into ``folder / "params"``; ``folder`` exists, and the caller makes it final.

    Raises:
        CheckpointError: Orbax cannot write them.
    """
    from orbax.checkpoint import v1 as ocp

    tree: dict[str, Any] = {PARAMS: stored.params}
    if stored.extra:
        tree[EXTRA] = stored.extra
    with _one_line(f"{folder} cannot be written by Orbax"):
        ocp.save(str(folder.resolve() / PARAMS), tree, custom_metadata={_BARE_NAMES: stored.bare_names})


def _need(folder: Path) -> Place:
    place = locate(folder)
    if place is None:
        raise CheckpointError(f"{folder} is not an Orbax folder: it has no finished checkpoint.")
    return place


def _abstract(checkpoint: Path) -> tuple[dict[str, Any], Any]:
    """Return the tree of what is stored, each leaf with shape and dtype, and the checkpoint's own notes."""
    from orbax.checkpoint import v1 as ocp

    with _one_line(f"{checkpoint} cannot be read by Orbax", "Copy or convert it again."):
        found = ocp.metadata(str(checkpoint.resolve()))
        tree = found.metadata
        if not isinstance(tree, Mapping):
            raise ValueError("no tree of parameters can be read from it")
    return dict(tree), found.custom_metadata


def _restore(checkpoint: Path, tree: dict[str, Any], wanted: Any) -> dict[str, Any]:
    """Restore a tree; ``wanted(path, kind)`` gives each leaf's abstract value, None to leave it out."""
    from orbax.checkpoint import v1 as ocp

    abstract: dict[str, Any] = {}
    for path, kind in _flat(tree):
        value = wanted(path, kind)
        hf.put(abstract, path, ocp.PLACEHOLDER if value is None else value)
    with _one_line(f"{checkpoint} cannot be read by Orbax", "Copy or convert it again."):
        return ocp.load(str(checkpoint.resolve()), abstract)  # type: ignore[return-value]


@contextlib.contextmanager
def _one_line(what: str, advice: str = "") -> Iterator[None]:
    """Turn whatever Orbax raises, and logs or prints meanwhile, into one line."""
    logger = logging.getLogger("absl")
    level, hook = logger.level, sys.unraisablehook
    logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda left: None if "Event loop is closed" in str(left.exc_value) else hook(left)
    try:
        yield
    except SpecjaxError:
        raise
    except Exception as error:
        time.sleep(_GRACE)  # reads that were under way end now, and find nobody who waits for them
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200].rstrip(".")
        raise CheckpointError(f"{what} ({type(error).__name__}: {reason}). {advice}".strip()) from error
    finally:
        logger.setLevel(level)
        sys.unraisablehook = hook


def _params_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    inner = tree.get(PARAMS)
    return inner if isinstance(inner, dict) else dict(tree)


def _check(place: Place, leaves: list[Any], tree: Mapping[str, Any]) -> None:
    """Compare what is stored with what the config asks for.

    Raises:
        CheckpointError: it names the parameters that are missing, of another shape, unknown, or no floats.
    """
    stored = dict(_flat(_params_of(tree)))
    wanted = {tuple(leaf.path): leaf.shape for leaf in leaves}
    floats = set(tensors.DTYPES.values())
    other = [
        f"{_path(p)} {list(stored[p].shape)} instead of {list(shape)}"
        for p, shape in wanted.items()
        if p in stored and tuple(stored[p].shape) != shape
    ]
    no_floats = [
        f"{_path(p)} {stored[p].dtype}" for p in wanted if p in stored and np.dtype(stored[p].dtype) not in floats
    ]
    faults = (
        ("lacks parameters", [f"{_path(p)} {list(shape)}" for p, shape in wanted.items() if p not in stored]),
        ("has parameters of another shape", other),
        ("has parameters that are not asked for", [_path(p) for p in stored if p not in wanted]),
        ("has parameters of a dtype that is not read", no_floats),
    )
    said = [f"{what}: {_short(names)}" for what, names in faults if names]
    if said:
        raise CheckpointError(
            f"{place.checkpoint} {'; '.join(said)}. {place.config / hf.CONFIG} is of another model than this one."
        )


def _short(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _path(path: tuple[str, ...]) -> str:
    return "/".join(path)


def _flat(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def _pop(tree: dict[str, Any], path: tuple[str, ...]) -> Any:
    """Take a leaf out of the tree, so that what is cast does not stay in memory twice."""
    for key in path[:-1]:
        tree = tree[key]
    return tree.pop(path[-1])


def _cast(array: Any, dtype: np.dtype) -> Any:
    """Round on the host, piece by piece, where each device has its own."""
    import jax

    pieces = [jax.device_put(np.asarray(piece.data).astype(dtype), piece.device) for piece in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, pieces)
