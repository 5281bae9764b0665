"""One optimiser step: a mean over all tokens of the step, however it is cut into parts and devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from specjax.distill import losses, mesh
from specjax.distill.config import LossSpec, TrainSpec
from specjax.distill.student import Batch, Student, as_packed
from specjax.models.decoder import DecoderFn
from specjax.types import ModelOutput, Params


class TrainState(NamedTuple):
    """What a step changes.

    Attributes:
        params: the student's, float32.
        optimiser: optax's state.
        key: uint32 [2], from which the student's draws get theirs.
    """

    params: Params
    optimiser: Any
    key: jax.Array


def schedule(spec: TrainSpec) -> optax.Schedule:
    """Return the learning rate by step: a linear warm-up, then a cosine down to ``final`` times the peak."""
    warmup = min(spec.warmup, spec.steps - 1)
    peak, end = spec.learning_rate, spec.learning_rate * spec.final
    if warmup == 0:
        return optax.cosine_decay_schedule(peak, spec.steps, alpha=spec.final)
    return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, spec.steps, end)


def optimiser(spec: TrainSpec) -> optax.GradientTransformation:
    """Return AdamW with clipping; only matrices decay."""

    def matrices(tree: Params) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)

    adamw = optax.adamw(
        schedule(spec), b1=spec.betas[0], b2=spec.betas[1], weight_decay=spec.weight_decay, mask=matrices
    )
    return optax.chain(optax.clip_by_global_norm(spec.clip), adamw) if spec.clip else adamw


def run_teacher(fn: DecoderFn, params: Params, batch: Batch, reads: str | int | None) -> ModelOutput:
    """Return the teacher's logits over packed texts, and the features that a student reads."""
    texts = as_packed(batch)
    tokens = batch["tokens"]
    if not isinstance(reads, int):
        return fn(params, tokens, texts, features=reads == "final")
    layers = fn.config.num_layers
    below = fn(params, tokens, texts, logits="none", features=True, layers=(0, reads))
    above = fn(params, tokens, texts, layers=(reads, layers), hidden=below.features)
    return ModelOutput(above.logits, below.cache, below.features)


class Objective:
    """The loss of a student against its teacher.

    Args:
        student: what is trained.
        teacher: the target's function, or None.
        spec: which loss.
        vocab_size: V, the vocabulary in use: logits past it (padding) are dropped on both sides.
    """

    def __init__(self, student: Student, teacher: DecoderFn | None, spec: LossSpec, vocab_size: int):
        self._student, self._spec, self._vocab = student, spec, vocab_size
        self._ids = None if student.ids is None else jnp.asarray(student.ids)
        self._loss = losses.loss_for(spec.name, beta=spec.beta, weight=spec.weight)
        self.compares = teacher is not None and spec.name != "cross_entropy"
        self._teacher = teacher if self.compares or student.reads is not None else None

    def counts(self, batch: Batch) -> jax.Array:
        """Return how many positions count at each own-feature step, at least 1: float32 [S]."""
        return jnp.maximum(jnp.stack([jnp.sum(mask) for mask in self._student.masks(batch)]), 1.0)

    def __call__(
        self, params: Params, teacher_params: Params, batch: Batch, counts: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return a part's share of the step's loss, and of its metrics.

        Args:
            params, teacher_params: of the two.
            batch: a part of the step's rows.
            counts: of all its rows.
        """
        out = None
        if self._teacher is not None:
            out = run_teacher(self._teacher, teacher_params, batch, self._student.reads)
            out = jax.lax.stop_gradient(out)
        teacher_logits = None
        if out is not None and self.compares:
            # Whatever the teacher says elsewhere, it must not reach a gradient either: 0 * NaN is NaN.
            assert out.logits is not None
            teacher_logits = jnp.where(batch["mask"][..., None] > 0, out.logits[..., : self._vocab], 0.0)
        label = jnp.pad(batch["tokens"][:, 1:], ((0, 0), (0, 1)))
        total, metrics = jnp.zeros(()), {}
        steps = zip(
            self._student.logits(params, batch, out, teacher_params), self._student.masks(batch),
            self._student.step_weights, strict=True,
        )  # fmt: skip
        for s, (logits, mask, weight) in enumerate(steps):
            at = losses.position(
                teacher_logits, logits, label, ids=self._ids, temperature=self._spec.teacher_temperature
            )

            def mean(values: jax.Array, mask=mask, s=s) -> jax.Array:
                return jnp.sum(jnp.where(mask > 0, values * mask, 0.0)) / counts[s]

            total += weight * mean(self._loss(at))
            if s == 0:
                metrics["cross_entropy"] = mean(losses.cross_entropy(at))
                if self.compares:
                    metrics["alpha"] = mean(losses.overlap(at))
        return total, metrics


def make_step(
    objective: Objective, transform: optax.GradientTransformation, grid: Mesh, state: TrainState, parts: int
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Compile ``(state, teacher_params, batch) -> (state, metrics)``; ``state`` is donated.

    Args:
        objective: the loss.
        transform: the optimiser.
        grid: the devices.
        state: one, for shapes.
        parts: that the rows of a step are computed in; the gradients' sum is that of all rows at once.
    """

    def step(state: TrainState, teacher_params: Params, batch: Batch):
        counts = objective.counts(batch)
        gradient = jax.value_and_grad(objective, has_aux=True)
        if parts == 1:
            (loss, metrics), grads = gradient(state.params, teacher_params, batch, counts)
        else:
            # Every part takes rows from each device, so that none has to move.
            cut = {name: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0) for name, x in batch.items()}

            def one(total, part):
                found = gradient(state.params, teacher_params, part, counts)
                return jax.tree.map(jnp.add, total, found), None

            first = jax.tree.map(lambda x: x[0], cut)
            shapes = jax.eval_shape(gradient, state.params, teacher_params, first, counts)
            zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            ((loss, metrics), grads), _ = jax.lax.scan(one, zero, cut)
        updates, opt_state = transform.update(grads, state.optimiser, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = {"loss": loss, **metrics, "grad_norm": optax.tree.norm(grads), "labels": counts[0]}
        return TrainState(params, opt_state, state.key), metrics

    placed = place(grid, state)
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, None))


def place(grid: Mesh, state: TrainState) -> TrainState:
    """Return a sharding for each leaf of a state."""
    return TrainState(*(mesh.of_parameters(grid, part) for part in state))
