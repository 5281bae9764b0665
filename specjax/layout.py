"""A program's arrays on a mesh: rows of the state on ``data``, heads of the caches and the vocabulary on ``model``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.types import Cache, ModelFn, RoundState


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a program runs.

    Attributes:
        mesh: None: one device, and nothing here changes a program.
        draft: how a draft model lies on the mesh, "replicated" or "sharded".
    """

    mesh: Mesh | None = None
    draft: str = "replicated"

    def rows(self, wanted: int) -> int:
        """Return how many rows a batch of ``wanted`` has: as many on each part of ``data``, some of them empty."""
        parts = 1 if self.mesh is None else self.mesh.shape[sharding.DATA]
        return -(-wanted // parts) * parts

    @property
    def spans_processes(self) -> bool:
        """Some of its devices belong to other processes: every process then runs the same programs in the same order,
        and the host's arguments are the same on all."""
        return self.mesh is not None and len({d.process_index for d in self.mesh.devices.flat}) > 1

    def jit(self, function: Callable[..., Any], *, read: bool = False, **options: Any) -> Callable[..., Any]:
        """Return ``jax.jit(function)`` on the mesh, its results laid out.

        Args:
            function: pure.
            read: what it returns beside a state is for the host to read: on several processes each holds all of it.
            options: of ``jax.jit``.
        """
        mesh = self.mesh
        if mesh is None:
            return jax.jit(function, **options)

        def laid_out(*arguments: Any) -> Any:
            found = function(*arguments)
            if read and self.spans_processes:
                state, seen = found
                everywhere = NamedSharding(mesh, PartitionSpec())
                return self.constrain(state), jax.lax.with_sharding_constraint(seen, everywhere)
            return self.constrain(found)

        compiled = jax.jit(laid_out, **options)

        def call(*arguments: Any) -> Any:
            with jax.set_mesh(mesh):
                return compiled(*self._arguments(arguments))

        def lower(*arguments: Any) -> Any:
            with jax.set_mesh(mesh):
                return compiled.lower(*arguments)

        call.lower = lower  # type: ignore[attr-defined]
        return call

    def constrain(self, tree: Any) -> Any:
        """Lay a tree out, inside a program: a state, or anything whose leaves lead with the batch axis."""
        assert self.mesh is not None
        return jax.lax.with_sharding_constraint(tree, self.shardings(tree))

    def shardings(self, tree: Any) -> Any:
        """Return where each leaf of such a tree lies."""
        if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
            return tuple(self.shardings(part) for part in tree)
        if not isinstance(tree, RoundState):
            return self._by_batch(tree, sharding.RULES)
        found = self._by_batch(dataclasses.replace(tree, draft=()), sharding.RULES)
        rules = sharding.RULES if self.draft == "sharded" else sharding.REPLICATED
        history, sampling = found.history, found.sampling
        if tree.history.counts is not None:
            wide = self._of(("batch", "vocab"), tree.history.counts, sharding.RULES)
            history = dataclasses.replace(history, counts=wide, in_prompt=wide)
        if tree.sampling.bias is not None:
            wide = self._of(("batch", "vocab"), tree.sampling.bias, sharding.RULES)
            sampling = dataclasses.replace(sampling, bias=wide)
        draft = self._by_batch(tree.draft, rules)
        return dataclasses.replace(found, history=history, sampling=sampling, draft=draft)

    def _by_batch(self, tree: Any, rules: Mapping[str, str | None]) -> Any:
        def place(leaf: Any) -> Any:
            if isinstance(leaf, Cache):
                return jax.tree.map(lambda part: self._of(_cache_axes(part.ndim), part, rules), leaf)
            axes = ("batch", *(None,) * (leaf.ndim - 1)) if leaf.ndim else ()
            return self._of(axes, leaf, rules)

        return jax.tree.map(place, tree, is_leaf=lambda leaf: isinstance(leaf, Cache))

    def _of(self, axes: sharding.Axes, leaf: Any, rules: Mapping[str, str | None]) -> NamedSharding:
        assert self.mesh is not None
        return NamedSharding(self.mesh, sharding.spec(axes, leaf.shape, dict(self.mesh.shape), rules=rules).partition)

    def _arguments(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return arguments that all devices can take: what lies on one device goes there from the host."""
        assert self.mesh is not None
        devices = set(self.mesh.devices.flat)

        def anywhere(leaf: Any) -> Any:
            return np.asarray(leaf) if isinstance(leaf, jax.Array) and leaf.sharding.device_set != devices else leaf

        return jax.tree.map(anywhere, arguments)


ONE = Layout()


def _cache_axes(ndim: int) -> sharding.Axes:
    if ndim == 1:
        return ("batch",)
    return ("batch", *("layers",) * (ndim - 4), "kv_heads", None, None)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A model that lies whole on every shard of ``model``: only its rows are split. A ModelFn."""

    fn: ModelFn

    def __call__(self, params: Any, tokens: jax.Array, cache: Cache, **options: Any) -> Any:
        """Run the model under rules that split rows only."""
        with sharding.using(sharding.REPLICATED):
            return self.fn(params, tokens, cache, **options)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache."""
        return self.fn.init_cache(batch, capacity)


@dataclasses.dataclass(frozen=True)
class Padded:
    """A model whose logits have ``size`` places, -inf past the vocabulary in use: what the mesh splits evenly.

    Attributes:
        fn: the model; of its logits ``vocab_size`` count.
        vocab_size: V.
        size: at least V.
    """

    fn: ModelFn
    vocab_size: int
    size: int

    def __call__(self, params: Any, tokens: jax.Array, cache: Cache, **options: Any) -> Any:
        """Run the model."""
        out = self.fn(params, tokens, cache, **options)
        if out.logits is None:
            return out
        scores = out.logits
        if scores.shape[-1] != self.size:
            missing = max(self.size - scores.shape[-1], 0)
            scores = jnp.pad(scores, ((0, 0),) * (scores.ndim - 1) + ((0, missing),))[..., : self.size]
        scores = jnp.where(jnp.arange(self.size) < self.vocab_size, scores, -jnp.inf)
        return dataclasses.replace(out, logits=scores)

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache."""
        return self.fn.init_cache(batch, capacity)


def padded(fn: ModelFn, vocab_size: int, size: int) -> ModelFn:
    """Return a model with ``size`` logits; itself where those are its vocabulary in use."""
    return fn if size == vocab_size else Padded(fn, vocab_size, size)
