"""Where a training run's arrays lie: rows over ``data``, the first axis of matrices over ``model``."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from specjax.errors import UsageError

DATA, MODEL = "data", "model"


def make_mesh(data: int, model: int) -> Mesh:
    """Return a mesh over the first ``data * model`` devices; every device of a run with several processes.

    Raises:
        UsageError: there are fewer.
    """
    devices = jax.devices()
    needed = data * model
    if needed > len(devices) or (jax.process_count() > 1 and needed != len(devices)):
        raise UsageError(
            f"train.data_shards {data} times model_shards {model} needs {needed} devices; there are {len(devices)}."
        )
    return jax.make_mesh((data, model), (DATA, MODEL), axis_types=(AxisType.Auto,) * 2, devices=devices[:needed])


def of_parameters(mesh: Mesh, tree: Any) -> Any:
    """Return a sharding for each leaf of parameters or of an optimiser's state, by its shape."""

    def place(leaf: Any) -> NamedSharding:
        ways = mesh.shape[MODEL]
        split = len(leaf.shape) > 1 and ways > 1 and leaf.shape[0] % ways == 0
        return NamedSharding(mesh, PartitionSpec(MODEL) if split else PartitionSpec())

    return jax.tree.map(place, tree)


def of_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch's arrays, [B, ...]."""
    return NamedSharding(mesh, PartitionSpec(DATA))


def put_rows(mesh: Mesh, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Lay a batch out; every process holds the same whole batch and gives its own part."""
    sharding = of_rows(mesh)
    return {
        name: jax.make_array_from_callback(value.shape, sharding, lambda index, value=value: value[index])
        for name, value in batch.items()
    }


def whole(tree: Any) -> Any:
    """Return a tree whose leaves lie on this process's first device, for what runs outside the mesh."""
    device = jax.local_devices()[0]

    def gather(leaf: jax.Array) -> jax.Array:
        if not leaf.is_fully_addressable:
            mesh = leaf.sharding.mesh  # type: ignore[attr-defined]
            leaf = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, PartitionSpec()))(leaf)
            leaf = leaf.addressable_data(0)
        return jax.device_put(leaf, device)

    return jax.tree.map(gather, tree)
