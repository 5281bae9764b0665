"""Where arrays lie on a mesh of devices: logical axes of each parameter and cache, and one table from them to the mesh.

The mesh has two axes: ``data`` splits the rows of the batch, ``model`` splits each layer (heads, the MLP's inner size)
and the vocabulary, as in Megatron-LM (1909.08053, section 3). Models declare logical axes where they declare a
parameter's shape, dtype and initialiser; ``RULES`` says which mesh axis each one takes. What does not divide is
replicated, and said (``Spec.notes``).

Everything here is a no-op without a mesh: programs for one device lower to what they would without this file.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from specjax.errors import UsageError

DATA, MODEL = "data", "model"
Axes = tuple[str | None, ...]

# Logical axis -> mesh axis. None: never split.
RULES: dict[str, str | None] = {
    "batch": DATA,
    "vocab": MODEL,
    "heads": MODEL,
    "kv_heads": MODEL,
    "mlp": MODEL,
    "experts": None,  # a token's experts differ from row to row: they stay whole
    "embed": None,
    "positions": None,
    "layers": None,
}
# For a model that lies whole on each shard: only its rows are split.
REPLICATED: dict[str, str | None] = {name: axis if axis == DATA else None for name, axis in RULES.items()}

_rules: contextvars.ContextVar[Mapping[str, str | None]] = contextvars.ContextVar("rules", default=RULES)


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """What ``--mesh`` says.

    Attributes:
        data: D, parts of the batch.
        model: M, parts of each layer and of the vocabulary.
        draft: "replicated": every shard holds the whole draft model; "sharded": it is split as the target is.
    """

    data: int = 1
    model: int = 1
    draft: str = "replicated"

    @property
    def sizes(self) -> dict[str, int]:
        """By mesh axis."""
        return {DATA: self.data, MODEL: self.model}

    @property
    def size(self) -> int:
        """Devices."""
        return self.data * self.model

    def __str__(self) -> str:
        return f"data={self.data},model={self.model},draft={self.draft}"


def parse_mesh(text: str) -> MeshShape:
    """Read ``data=4,model=2`` (either may be left out), with ``draft=replicated`` or ``draft=sharded`` behind.

    Raises:
        UsageError: anything else.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        good = value.isdecimal() and int(value) > 0 if name in (DATA, MODEL) else value in ("replicated", "sharded")
        if name not in (DATA, MODEL, "draft") or not equals or not good or name in found:
            raise UsageError(
                f"mesh is {text!r}; expected data=N,model=N, each once, and optionally draft=replicated|sharded."
            )
        found[name] = int(value) if name != "draft" else value
    return MeshShape(**found)


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> jax.sharding.Mesh:
    """Return the mesh over all devices: neighbours along ``model``, which has the traffic.

    Raises:
        UsageError: there are not exactly so many devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    if len(devices) != shape.size:
        raise UsageError(
            f"mesh {shape.data} x {shape.model} needs {shape.size} devices, and there are {len(devices)}: "
            "data times model must be their number."
        )
    return jax.make_mesh(
        (shape.data, shape.model), (DATA, MODEL), axis_types=(AxisType.Auto, AxisType.Auto), devices=devices
    )


@dataclasses.dataclass(frozen=True)
class Spec:
    """Where one array lies.

    Attributes:
        parts: the mesh axis that splits each dimension, or None.
        notes: what the rules would split and does not divide.
    """

    parts: tuple[str | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def partition(self) -> PartitionSpec:
        """As JAX has it."""
        return PartitionSpec(*self.parts)


def spec(
    axes: Axes,
    shape: Sequence[int],
    sizes: Mapping[str, int],
    *,
    rules: Mapping[str, str | None] | None = None,
    counts: Mapping[str, int] | None = None,
) -> Spec:
    """Return where an array with these logical axes lies on a mesh.

    Args:
        axes: a logical name for each dimension; None: never split.
        shape: its shape.
        sizes: devices along each mesh axis.
        rules: those in force by default.
        counts: of a logical axis whose units are wider than one entry (heads): how many units there are.

    Raises:
        ValueError: an unknown logical axis, another number of axes than dimensions, or two dimensions on one mesh axis.
    """
    rules = _rules.get() if rules is None else rules
    if len(axes) != len(shape):
        raise ValueError(f"{len(shape)} dimensions {tuple(shape)} have {len(axes)} logical axes, {axes}.")
    if unknown := [name for name in axes if name is not None and name not in rules]:
        raise ValueError(f"Logical axis {unknown[0]!r} has no rule; known: {', '.join(rules)}.")
    wanted = [None if name is None else rules[name] for name in axes]
    used = [axis for axis in wanted if axis is not None]
    if len(set(used)) < len(used):
        raise ValueError(f"Logical axes {axes} put two dimensions on one mesh axis: {wanted}.")
    parts, notes = [], []
    for name, axis, size in zip(axes, wanted, shape, strict=True):
        count = (counts or {}).get(name or "", size)
        ways = 1 if axis is None else sizes.get(axis, 1)
        if ways > 1 and (count % ways or size % ways):
            notes.append(f"{name} ({count}) does not divide by {axis}={ways}: replicated")
            axis = None
        parts.append(axis)
    return Spec(tuple(parts), tuple(notes))


def expanded_kv_heads(num_heads: int, num_kv_heads: int, ways: int) -> int:
    """Return how many key-value heads a model has once each of ``ways`` shards holds those its queries attend to.

    Where shards outnumber the heads, a head is repeated within its group of shards: more heads, of the same values.
    Unchanged where the query heads do not divide by ``ways``: attention is replicated then.
    """
    if num_heads % ways:
        return num_kv_heads
    return num_heads // math.gcd(num_heads // ways, num_heads // num_kv_heads)


def current() -> Any | None:
    """Return the mesh in force (``jax.set_mesh``), or None where there is none with more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty or mesh.size == 1 or MODEL not in mesh.axis_names else mesh


@contextlib.contextmanager
def using(rules: Mapping[str, str | None]) -> Iterator[None]:
    """Trace with other rules."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Lay an array out by its logical axes; x itself without a mesh."""
    mesh = current()
    if mesh is None:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, dict(mesh.shape)).partition)


def local(function: Callable, inputs: Sequence[Any], outputs: Any, *arguments: Any) -> Any:
    """Call a function on each device with its own parts of the arguments; an ordinary call without a mesh.

    The function may use ``jax.lax`` collectives over ``model``, and loops whose trip counts differ where it uses none.

    Args:
        function: of the parts.
        inputs, outputs: a ``PartitionSpec`` for each argument and each result, or a tree of them.
        arguments: arrays, or trees.
    """
    mesh = current()
    if mesh is None:
        return function(*arguments)
    return jax.shard_map(function, mesh=mesh, in_specs=tuple(inputs), out_specs=outputs, check_vma=False)(*arguments)


def partition(shape: Sequence[int], *axes: str | None) -> PartitionSpec:
    """Return the PartitionSpec of an array under the mesh and rules in force."""
    mesh = current()
    return PartitionSpec() if mesh is None else spec(axes, shape, dict(mesh.shape)).partition
