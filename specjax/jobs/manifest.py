"""What a job is, so that only the same job goes on with its parts; and what came of it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

import specjax
from specjax.digest import weights_digest
from specjax.errors import UsageError
from specjax.jobs.folder import Folder
from specjax.outputs import json_line
from specjax.pair import Draft, Model, Pair
from specjax.requests import Options, plan_of
from specjax.rows import BadRow, Row
from specjax.speculation import AUTO
from specjax.types import Rule

NAME = "manifest.json"
SCHEMA = 1
# What changes how a job runs, but not what it says.
_NOT_SETTINGS = ("batch_size", "chunk", "check", "require_draft", "trace", "trace_full")


def identity(pair: Pair, options: Options, rows: Iterable[Row | BadRow]) -> dict[str, Any]:
    """Return what makes a job that job: models, settings and input. Two jobs of one identity write the same rows."""
    settings = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    settings = {name: value for name, value in settings.items() if name not in _NOT_SETTINGS}
    chosen = plan_of(pair, pair.draft, options)
    settings |= {"gamma": AUTO if chosen.controller else chosen.gamma, "width": chosen.widths[-1]}
    if isinstance(options.rule, Rule):
        settings["rule"] = options.rule.name
    return {
        "target": {"name": pair.target.name, "dtype": pair.target.dtype, "weights": _digest(pair.target)},
        "draft": {"name": pair.draft.name, "weights": _digest(pair.draft)},
        "settings": json.loads(json.dumps(settings, default=_as_json)),
        "input": rows_digest(rows),
    }


def fingerprint(job: dict[str, Any]) -> str:
    """Return an identity as one short text."""
    return hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()


def _digest(model: Model | Draft) -> str:
    return model.digest or weights_digest(model.params)


def rows_digest(rows: Iterable[Row | BadRow]) -> str:
    """Return a digest of the rows and their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(dataclasses.asdict(row), sort_keys=True, default=_as_json).encode() + b"\n")
    return digest.hexdigest()[:32]


def versions() -> dict[str, Any]:
    """Return what a job ran on."""
    device = jax.devices()[0]
    return {
        "specjax": specjax.__version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "num_devices": jax.device_count(),
    }


def read_manifest(folder: Folder, name: str = NAME) -> dict[str, Any] | None:
    """Return a folder's manifest, or None where there is none.

    Raises:
        UsageError: it cannot be read as one.
    """
    if name not in folder.names():
        return None
    try:
        found = json.loads(folder.read(name))
        if found["schema"] == SCHEMA and {"fingerprint", "identity", "status"} <= set(found):
            return found
        problem = f"schema is {found['schema']}, expected {SCHEMA}"
    except (ValueError, TypeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    raise UsageError(f"{folder}/{name} is no manifest of this version ({problem}): give another output.")


def write_manifest(folder: Folder, manifest: dict[str, Any], name: str = NAME) -> None:
    """Write a manifest, whole or not at all.

    Raises:
        SpecjaxError: it cannot be written.
    """
    folder.write(name, (json_line(manifest) + "\n").encode("ascii"))


def refuse_another(found: dict[str, Any], job: dict[str, Any], where: str) -> None:
    """Refuse to go on with another job's rows.

    Raises:
        UsageError: it names what differs.
    """
    if found["fingerprint"] == fingerprint(job):
        return
    differs = "; ".join(_differences(found["identity"], job)) or "the fingerprint"
    raise UsageError(
        f"{where} holds rows of another job ({differs}): give the same models, options and input, or --overwrite."
    )


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [
            text for key in keys for text in _differences(old.get(key), new.get(key), f"{name} {key}".strip())
        ]  # fmt: skip
    if old == new:
        return []
    if name == "input" or name.endswith("weights"):
        return [f"another {name}" if name == "input" else f"other {name}"]
    return [f"{name} was {json.dumps(old)}, now {json.dumps(new)}"]


def _as_json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(value):  # its repr has an address in it
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
