"""Models on a mesh: each parameter on its own devices, and what a shard needs that a checkpoint does not say."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from specjax import sharding
from specjax.digest import weights_digest
from specjax.layout import Layout
from specjax.models.config import DecoderConfig
from specjax.models.decoder import DecoderFn
from specjax.sharding import MODEL, REPLICATED, RULES
from specjax.types import ModelFn, Params

Path = tuple[str, ...]
_REPEATED = ("k", "v", "k_norm")  # parameters of an attention that has more key-value heads than its checkpoint


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the parameters of one model lie.

    Attributes:
        config: the model's, as the checkpoint has it.
        sizes: devices along each mesh axis.
        replicated: every shard holds all of it.
        axes: logical axes of each parameter, by path.
    """

    config: DecoderConfig
    sizes: Mapping[str, int]
    replicated: bool
    axes: Mapping[Path, sharding.Axes]

    def spec(self, path: Path, shape: tuple[int, ...]) -> sharding.Spec:
        """Return where a parameter of the checkpoint lies."""
        return self._spec(path, shape, self.config)

    def expanded_spec(self, path: Path, shape: tuple[int, ...]) -> sharding.Spec:
        """Return where a parameter lies once key-value heads are repeated."""
        return self._spec(path, shape, self.expanded)

    @property
    def expanded(self) -> DecoderConfig:
        """The config with as many key-value heads as the shards need."""
        c = self.config
        ways = 1 if self.replicated else self.sizes.get(MODEL, 1)
        return dataclasses.replace(
            c, num_kv_heads=sharding.expanded_kv_heads(c.num_heads, c.num_kv_heads, ways)
        )  # fmt: skip

    @property
    def repeats(self) -> int:
        """How often each key-value head is there."""
        return self.expanded.num_kv_heads // self.config.num_kv_heads

    def expanded_shape(self, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return a parameter's shape once key-value heads are repeated."""
        return (shape[0] * self.repeats, *shape[1:]) if self._is_repeated(path) else shape

    def notes(self, shapes: Mapping[Path, tuple[int, ...]]) -> list[str]:
        """Say, once each, what is not split although the rules would split it, and which heads are repeated."""
        found = dict.fromkeys(
            note for path, shape in shapes.items()
            for note in self.expanded_spec(path, self.expanded_shape(path, shape)).notes
        )  # fmt: skip
        if self.repeats > 1:
            found[
                f"kv_heads ({self.config.num_kv_heads}) are fewer than model={self.sizes[MODEL]} needs: each is held "
                f"by {self.repeats} shards"
            ] = None
        return list(found)

    def expand(self, params: Params, mesh: Mesh) -> Params:
        """Return parameters with key-value heads repeated, each shard holding those that its queries attend to."""
        if self.repeats == 1:
            return params
        heads = self.config.num_kv_heads

        def repeat(path: Any, leaf: jax.Array) -> jax.Array:
            keys = tuple(entry.key for entry in path)
            if not self._is_repeated(keys):
                return leaf
            shape = self.expanded_shape(keys, leaf.shape)
            place = NamedSharding(mesh, self.expanded_spec(keys, shape).partition)

            def widen(x: jax.Array) -> jax.Array:
                return jnp.repeat(x.reshape(heads, -1, *x.shape[1:]), self.repeats, axis=0).reshape(shape)

            return jax.jit(widen, out_shardings=place)(leaf)

        return jax.tree_util.tree_map_with_path(repeat, params)

    def _is_repeated(self, path: Path) -> bool:
        if self.repeats == 1 or len(path) < 3 or path[-3] != "attention":
            return False
        return path[-2] in _REPEATED and (path[-2] != "k_norm" or self.config.qk_norm == "whole")

    def _spec(self, path: Path, shape: tuple[int, ...], config: DecoderConfig) -> sharding.Spec:
        counts = {"heads": config.num_heads, "kv_heads": config.num_kv_heads}
        rules = REPLICATED if self.replicated else RULES
        found = sharding.spec(self.axes[path], shape, self.sizes, rules=rules, counts=counts)
        return found


def placement(fn: DecoderFn, mesh: sharding.MeshShape, *, replicated: bool = False) -> Placement:
    """Return where a model's parameters lie on a mesh.

    Args:
        fn: the model, with the config of its checkpoint.
        mesh: its shape.
        replicated: lay all of it on every shard.
    """
    return Placement(fn.config, mesh.sizes, replicated, fn.parameter_axes())


@dataclasses.dataclass(frozen=True)
class OnMesh:
    """A mesh that models are loaded onto.

    Attributes:
        shape, mesh: the mesh.
        replicated: the model to be loaded lies whole on every shard.
        notes: filled with what is not split although the rules would split it.
    """

    shape: sharding.MeshShape
    mesh: Mesh
    replicated: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)

    @staticmethod
    def of(mesh: str | sharding.MeshShape) -> OnMesh:
        """Make the mesh over all devices.

        Raises:
            UsageError: it cannot be read, or is not of so many devices.
        """
        shape = sharding.parse_mesh(mesh) if isinstance(mesh, str) else mesh
        return OnMesh(shape, sharding.make_mesh(shape))

    @property
    def layout(self) -> Layout:
        """The layout of programs on it."""
        return Layout(self.mesh, self.shape.draft)

    def for_draft(self) -> OnMesh:
        """Return the mesh as the draft model takes it."""
        return dataclasses.replace(self, replicated=self.shape.draft == "replicated")

    def shardings(self, config: DecoderConfig) -> Callable[[Path, tuple[int, ...]], NamedSharding]:
        """Return where each parameter of a checkpoint goes, as ``load_checkpoint`` takes it."""
        where = self._placement(DecoderFn(config))
        return lambda path, shape: NamedSharding(self.mesh, where.spec(path, shape).partition)

    def spread(self, fn: ModelFn, params: Params, vocab_size: int) -> dict[str, Any]:
        """Return what changes of a loaded Model: its function, parameters, and what is said of them."""
        assert isinstance(fn, DecoderFn)
        where, rows = self._placement(fn), fn.config.vocab_size
        leaves = jax.tree_util.tree_leaves_with_path(params)
        self.notes.extend(where.notes({tuple(e.key for e in path): leaf.shape for path, leaf in leaves}))
        ways = self.shape.model
        return {
            "digest": weights_digest(params),
            "fn": dataclasses.replace(fn, config=where.expanded),
            "params": where.expand(params, self.mesh),
            "num_logits": rows if ways > 1 and rows % ways == 0 else vocab_size,
            "whole": self.replicated,
        }

    def _placement(self, fn: DecoderFn) -> Placement:
        return placement(fn, self.shape, replicated=self.replicated)
