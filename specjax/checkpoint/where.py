"""WHERE: what a user writes for a model, and the folder that it stands for."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.checkpoint import hf, known, orbax_folder
from specjax.checkpoint.files import MissingCheckpoint
from specjax.checkpoint.tensors import Sharding
from specjax.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    from specjax.models.config import DecoderConfig, Family

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_HUB_SECONDS = 10


def load_checkpoint(
    where: str | Path, *, dtype: str = "float32", progress: bool = False, sharding: Sharding | None = None
) -> hf.Checkpoint:
    """Load a model from wherever the user says it is.

    Args:
        where: as in ``resolve``.
        dtype: "float32" or "bfloat16", of every matrix.
        progress: show downloads and conversions on standard error.
        sharding: ``(path, shape) -> jax.sharding.Sharding`` of each parameter; by default all on one device.

    Raises:
        UsageError: an unknown name or dtype.
        MissingCheckpoint: nothing is there.
        CheckpointError: what is there cannot be read.

    Example:
        checkpoint = load_checkpoint("smollm2-135m", dtype="bfloat16")
    """
    folder = resolve(where, progress=progress)
    if orbax_folder.locate(folder) is not None:
        return orbax_folder.load(folder, dtype=dtype, name=str(where), sharding=sharding)
    return hf.load_folder(folder, dtype=dtype, name=str(where), sharding=sharding)


@dataclasses.dataclass(frozen=True)
class Header:
    """A checkpoint without its weights: what its files say, checked against each other.

    Attributes:
        name: what the user called it.
        folder: holds its config and tokenizer.
        family, config, hf_config, eos_ids, bos_id: as in ``Checkpoint``.
        dtypes: of the parameters as stored.
        num_params: their number.
    """

    name: str
    folder: Path
    family: Family
    config: DecoderConfig
    hf_config: dict[str, Any]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtypes: tuple[str, ...]
    num_params: int


def inspect_checkpoint(where: str | Path, *, progress: bool = False) -> Header:
    """Read what a checkpoint is, without its weights.

    Args:
        where: as in ``resolve``.
        progress: show downloads and conversions on standard error.

    Raises:
        UsageError, MissingCheckpoint, CheckpointError: as ``load_checkpoint``.
    """
    folder = resolve(where, progress=progress)
    place = orbax_folder.locate(folder)
    config_folder = folder if place is None else place.config
    hf_config, family, config = hf.read_config(config_folder)
    leaves = family.leaves(config)
    if place is not None:
        dtypes = {str(dtype) for dtype, _ in orbax_folder.kinds(folder).values()}
    else:
        store, named = hf.open_store(folder, leaves, config)
        dtypes = {str(store.dtype(name)) for leaf in named for name in leaf.sources}
    count = sum(math.prod(leaf.shape) for leaf in leaves)
    ids = hf.special_ids(config_folder, hf_config)
    return Header(str(where), config_folder, family, config, hf_config, *ids, tuple(sorted(dtypes)), count)


def resolve(where: str | Path, *, progress: bool = False) -> Path:
    """Return the folder that ``where`` stands for, in Hugging Face layout or of Orbax, making it when needed.

    Args:
        where: a folder, a ``.gguf`` file, a name in ``configs/models``, or a hub id ``org/name``; what exists on
            disk comes first.
        progress: show downloads and conversions on standard error.

    Raises:
        UsageError: a bare word that is no known name.
        MissingCheckpoint: a path that does not exist, or a hub id that the hub does not give.
        NetworkError: a known name that is not here yet, and no network.
        CheckpointError: a file or folder of another kind, or a download or conversion that failed.
    """
    text = os.fspath(where)
    path = Path(text).expanduser()
    if text and path.is_dir():
        orbax_folder.locate(path)  # an Orbax folder that cannot be loaded is refused here
        return path
    if text and path.is_file():
        return _file(path, progress)
    if text in known.names():
        return known.fetch(text, progress=progress)
    if isinstance(where, Path) or _looks_like_path(text):
        raise MissingCheckpoint(
            orbax_folder.missing_step(path)
            or f"{text} does not exist. Pass a folder in Hugging Face layout, an Orbax folder or a .gguf file."
        )
    if _HUB_ID.fullmatch(text):
        return _hub(text, progress)
    raise UsageError(
        f"Model {text!r} is not known. Known names: {', '.join(known.names())}; "
        "otherwise pass a folder, a .gguf file or a hub id 'org/name'."
    )


def _looks_like_path(text: str) -> bool:
    first = text.split("/", 1)[0]
    return (
        text.startswith(("/", "./", "../", "~"))
        or text.endswith((".gguf", ".safetensors", "/"))
        or "\\" in text
        or text.count("/") > 1
        or ("/" in text and Path(first).is_dir())
    )


def _file(path: Path, progress: bool) -> Path:
    if path.suffix.lower() == ".gguf":
        from specjax.checkpoint.gguf import convert

        return convert(path, progress=progress)
    if path.suffix == ".safetensors" or path.name == hf.CONFIG:
        raise CheckpointError(f"{path} is one file of a model. Pass its folder, {path.parent}.")
    raise CheckpointError(
        f"{path} is not a model: expected a .gguf file, an Orbax folder or a folder in Hugging Face layout."
    )


def _hub(repo: str, progress: bool) -> Path:
    """Download a model from the hub; its cache serves when the hub cannot be reached."""
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    here = f"There is no folder {repo!r} here, and"
    (enable_progress_bars if progress else disable_progress_bars)()
    wanted: dict[str, Any] = {"allow_patterns": _HUB_FILES, "ignore_patterns": ["*/*"]}
    try:
        # snapshot_download asks the same first, but without a time limit.
        huggingface_hub.HfApi().repo_info(repo, timeout=_HUB_SECONDS)
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"Hub id {repo!r} asks for your consent first: accept its terms on its page, then run 'hf auth login'."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise MissingCheckpoint(
            f"{here} the hub has no public model of that id. Check the spelling; for a private one run 'hf auth login'."
        ) from error
    except errors.HFValidationError as error:
        raise UsageError(f"{repo!r} is neither a folder nor a hub id ({error}).") from error
    except Exception as error:  # the errors of whatever HTTP library the hub's client uses
        try:
            return Path(huggingface_hub.snapshot_download(repo, local_files_only=True, **wanted))
        except errors.LocalEntryNotFoundError:
            raise MissingCheckpoint(
                f"{here} the hub cannot be reached. Check the network, or pass a folder in Hugging Face layout."
            ) from error
    try:
        return Path(huggingface_hub.snapshot_download(repo, etag_timeout=_HUB_SECONDS, **wanted))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise CheckpointError(f"{here} downloading it from the hub failed: {reason}. Try again.") from error
