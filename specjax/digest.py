"""A digest of a model's weights, the same however they lie on devices."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import numpy as np

from specjax.types import Params

_SAMPLED = 16  # numbers of each parameter that its digest covers


def weights_digest(params: Params) -> str:
    """Return a digest of every parameter's name, shape, dtype and first numbers.

    Reading all of a large model would take minutes; any training moves the first numbers too.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(jax.tree_util.tree_leaves_with_path(params), key=lambda item: str(item[0])):
        values = np.asarray(_first(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} ".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()[:32]


def _first(leaf: Any) -> Any:
    """Return a parameter's first numbers, also of one that other processes hold parts of."""

    def take(x: Any) -> Any:
        return x[(0,) * (x.ndim - 1)][:_SAMPLED] if x.ndim else x

    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return take(leaf)
    assert isinstance(leaf.sharding, jax.sharding.NamedSharding)
    everywhere = jax.sharding.NamedSharding(leaf.sharding.mesh, jax.sharding.PartitionSpec())
    return jax.jit(take, out_shardings=everywhere)(leaf)
