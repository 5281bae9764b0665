"""Orbax checkpoints of a run: saved in the background, the newest and the best kept, resumed exactly.

A step's folder holds ``pytree`` (parameters, optimiser, key), and its notes where each stream of rows stands. With the
model's ``config.json`` beside the steps, any of them is a WHERE like another.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.distill.step import TrainState
from specjax.errors import CheckpointError

TREE, DATA, SCORE = "pytree", "data", "score"
_SHOWN = 5


class Checkpoints:
    """The checkpoints of one run; a context manager, which waits for the last save.

    Args:
        folder: made if it is not there.
        keep: newest steps that are kept, beside the one of the highest score.

    Raises:
        CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, keep: int = 2):
        from orbax.checkpoint import v1 as ocp

        self._folder = folder.resolve()
        policies = ocp.training.preservation_policies
        best = policies.BestN(get_metric_fn=lambda metrics: metrics[SCORE], n=1, keep_checkpoints_without_metrics=False)
        with _one_line(f"Checkpoints cannot be kept in {self._folder}"):
            self._folder.mkdir(parents=True, exist_ok=True)
            self._orbax = ocp.training.Checkpointer(
                str(self._folder),
                preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),  # type: ignore[arg-type]
                cleanup_tmp_directories=True,
            )
        self._pending: Any = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.wait()
        except CheckpointError:
            if kind is None:  # else the first error is the one to hear of
                raise
        finally:
            self._orbax.close()

    @property
    def steps(self) -> list[int]:
        """The finished steps, ascending."""
        return [found.step for found in self._orbax.checkpoints]

    def best(self) -> int | None:
        """Return the step of the highest score, the newest of equal ones; None without scores."""
        checkpoints: Any = self._orbax.checkpoints
        scored = [(found.metrics[SCORE], found.step) for found in checkpoints if found.metrics]
        return max(scored)[1] if scored else None

    def save(self, step: int, state: TrainState, data: dict[str, Any], score: float | None = None) -> None:
        """Save a step in the background, after the save before it; a step that is there already stays.

        Raises:
            CheckpointError: this save could not begin, or the one before it failed.
        """
        self.wait()
        if step in self.steps:
            return
        state = jax.tree.map(jnp.copy, state)  # the next step takes the buffers while this one is written
        metrics: Any = None if score is None else {SCORE: float(score)}
        with _one_line(f"Step {step} cannot be saved in {self._folder}"):
            self._pending = self._orbax.save_checkpointables_async(
                step, {TREE: _as_dicts(state)}, force=True, metrics=metrics, custom_metadata={DATA: data}
            )

    def wait(self) -> None:
        """Wait for the save that is under way.

        Raises:
            CheckpointError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            with _one_line(f"A checkpoint could not be saved in {self._folder}"):
                pending.result()

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, dict[str, Any], int]:
        """Restore a step, by default the newest.

        Args:
            like: the state wanted: shapes, dtypes and shardings (``jax.ShapeDtypeStruct``), on any mesh.
            step: which.

        Returns:
            The state, the data's state, and the step.

        Raises:
            CheckpointError: there is no such step, or it is of another model; the message names steps or parameters.
        """
        self.wait()
        step = self._existing(step)
        self._compare(like, step)
        with _one_line(f"Step {step} of {self._folder} cannot be read"):
            tree = self._orbax.load_checkpointables(step, {TREE: _as_dicts(like)})[TREE]
            notes: Any = self._orbax.checkpointables_metadata(step).custom_metadata
        leaves = [tree["optimiser"][name] for name in _named(like.optimiser)]
        optimiser = jax.tree.unflatten(jax.tree.structure(like.optimiser), leaves)
        return TrainState(tree["params"], optimiser, tree["key"]), notes[DATA], step

    def _existing(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise CheckpointError(f"{self._folder} holds no finished checkpoint: train first, without --resume.")
        if step is not None and step not in steps:
            shown = ", ".join(map(str, steps))
            raise CheckpointError(f"{self._folder} has no step {step}; it has the steps {shown}.")
        return steps[-1] if step is None else step

    def _compare(self, like: TrainState, step: int) -> None:
        """Refuse a checkpoint of another model: Orbax would cut, pad or cast in silence."""
        with _one_line(f"Step {step} of {self._folder} cannot be read"):
            stored = _kinds(self._orbax.checkpointables_metadata(step).metadata[TREE])
        wanted = dict(sorted(_kinds(_as_dicts(like)).items(), key=lambda item: not item[0].startswith("params")))
        faults = {
            "lacks": [f"{name} {list(wanted[name][0])}" for name in wanted if name not in stored],
            "has besides": [name for name in stored if name not in wanted],
            "has in another form": [
                f"{name} {list(stored[name][0])} {stored[name][1]} instead of {list(kind[0])} {kind[1]}"
                for name, kind in wanted.items()
                if name in stored and stored[name] != kind
            ],
        }
        said = [f"{what} {_short(names)}" for what, names in faults.items() if names]
        if said:
            raise CheckpointError(
                f"Step {step} of {self._folder} is of another model than the recipe's: it {'; it '.join(said)}."
            )


def abstract(state: Any, shardings: Any) -> Any:
    """Return a state as shapes, dtypes and shardings."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings)


def _as_dicts(state: TrainState) -> dict[str, Any]:
    """Return a state as it is stored: nested dicts alone, so that who reads the parameters needs no optimiser."""
    return {"params": state.params, "optimiser": _named(state.optimiser), "key": state.key}


def _named(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by their path."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        keys = [str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path]
        found[".".join(keys)] = leaf
    return found


def _kinds(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each leaf by its path."""
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in _named(tree).items()}


def _short(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn whatever Orbax raises and logs into one line."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:200].rstrip(".")
        raise CheckpointError(f"{what} ({type(error).__name__}: {reason}).") from error
    finally:
        logger.setLevel(level)
