"""The run: data, the loop with its validations and checkpoints, and the folder at the end.

A run's folder holds ``recipe.toml``, ``tokenizer`` (where one was trained), ``data`` (shards), ``checkpoints``,
``metrics.jsonl``, ``curve.png`` and, at the end, ``model``: a WHERE for ``--draft`` (or ``--target``).
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.checkpoint.files import write_json
from specjax.distill import card, figures, mesh, validate
from specjax.distill.checkpoints import Checkpoints, abstract
from specjax.distill.config import LossSpec, Recipe
from specjax.distill.corpus import Corpus
from specjax.distill.pipeline import Batches, as_batch
from specjax.distill.shards import Shards
from specjax.distill.step import Objective, TrainState, make_step, optimiser, place
from specjax.distill.student import Student, make_student
from specjax.errors import UsageError
from specjax.models.decoder import DecoderFn
from specjax.pair import Pair, load

Say = Callable[[str], None]
RECIPE, CHECKPOINTS, MODEL, SUMMARY = "recipe.toml", "checkpoints", "model", "summary.json"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run comes to.

    Attributes:
        folder: the draft's.
        step: whose parameters it has.
        figures: of the last validation.
    """

    folder: Path
    step: int
    figures: dict[str, Any]


def distill(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    say: Say = lambda line: None,
    bar: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome | None:
    """Train a student as a recipe says, and write its folder.

    Args:
        recipe: from ``read_recipe``.
        resume: go on from the newest checkpoint of the run's folder.
        overwrite: remove a run that is there.
        say: called with lines of news.
        bar: show a progress bar, where standard error is a terminal.
        stop: asked before each step; True saves and ends the run, to be resumed.

    Returns:
        What the run comes to; None when it was stopped.

    Raises:
        UsageError: the folder is in use, or the recipe asks for what cannot be had.
        CheckpointError: the teacher cannot be read, or something cannot be written.

    Example:
        outcome = distill(read_recipe("tiny-draft", data="stories.jsonl"))
    """
    folder = prepare(Path(recipe.output).expanduser().resolve(), recipe, resume=resume, overwrite=overwrite)
    return Run(recipe, folder, say, stop).run(resume=resume, bar=bar)


def prepare(folder: Path, recipe: Recipe, *, resume: bool, overwrite: bool) -> Path:
    """Make a run's folder, or refuse one that is in use, before anything is computed.

    Raises:
        UsageError: it is in use, or has nothing to resume, or is another recipe's.
    """
    if resume and overwrite:
        raise UsageError("Got both --resume and --overwrite; give one of them.")
    text = card.as_toml(recipe)
    used = folder.is_file() or (folder.is_dir() and any(folder.iterdir()))
    if resume:
        if not (folder / RECIPE).is_file():
            raise UsageError(f"{folder} has no run to resume; leave out --resume.")
        if _comparable((folder / RECIPE).read_text()) != _comparable(text):
            raise UsageError(f"{folder} was begun with another recipe ({RECIPE} there); give that, or --overwrite.")
    elif used and not overwrite:
        raise UsageError(f"{folder} is in use; pass --resume to go on, --overwrite to begin anew, or another --output.")
    try:
        if overwrite and used:
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECIPE).write_text(text)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror or error}.") from error
    return folder


def _comparable(text: str) -> list[str]:
    """Return a recipe without what may change between a run and its resumption."""
    return [line for line in text.splitlines() if not line.startswith(("output =", "data ="))]


class Run:
    """One run."""

    def __init__(self, recipe: Recipe, folder: Path, say: Say, stop: Callable[[], bool]):
        self.recipe, self.folder, self.say, self.stop = recipe, folder, say, stop
        self.grid = mesh.make_mesh(recipe.train.data_shards, recipe.train.model_shards)
        self.corpus = Corpus(recipe, folder, say)
        self.teacher = self.corpus.target
        self.student: Student = make_student(
            recipe.student, self.corpus.base, dtype=recipe.train.dtype, remat=recipe.train.remat
        )
        self.batches = Batches(
            recipe.train.batch_rows, seed=recipe.train.seed, mixes=recipe.mixes, steps=recipe.train.steps,
            epochs=recipe.train.epochs,
        )  # fmt: skip
        self._transform = optimiser(recipe.train)
        self._steps: dict[LossSpec, Any] = {}
        self._evaluate: Any = None
        self._draws: dict[str, Any] = {}

    def run(self, *, resume: bool, bar: bool) -> Outcome | None:
        """Train, validate, write."""
        train = self.recipe.train
        self.student.ids = self.corpus.head_ids(self.recipe.student.head_ids)
        self.say(f"student: {self.student.describe()}")
        for name in ("data", "teacher"):
            if any(getattr(mix, name) for mix in self.recipe.mixes):
                self.batches.put(name, self.corpus.shards(name))
        state, teacher_params = self._start()
        with Checkpoints(self.folder / CHECKPOINTS, keep=train.keep) as checkpoints:
            self.corpus.describe_steps(self.folder / CHECKPOINTS, self.student)
            step = 0
            if resume and checkpoints.steps:
                state, data, step = checkpoints.restore(abstract(state, place(self.grid, state)))
                self._go_on(data)
                self.say(f"resumed at step {step} of {train.steps}")
            metrics = figures.Metrics(self.folder, after=step, tensorboard=train.tensorboard)
            try:
                state, step, found = self._loop(state, teacher_params, step, checkpoints, metrics, bar)
            finally:
                metrics.close()
            if found is None:
                return None
            checkpoints.wait()
            best = checkpoints.best()
            if best is not None and best != step:
                state, _, step = checkpoints.restore(abstract(state, place(self.grid, state)), best)
                found = next(line for line in reversed(figures.read_metrics(self.folder))
                             if line["step"] == best and line["kind"] == "validation")  # fmt: skip
        return self._write(state, step, {k: v for k, v in found.items() if k not in ("step", "kind")})

    def _start(self) -> tuple[TrainState, Any]:
        """Return the first state and the teacher's parameters, on the mesh."""
        key = jax.random.key(self.recipe.train.seed)
        params = self.student.init(jax.random.fold_in(key, 1))
        state = TrainState(params, self._transform.init(params), jax.random.key_data(key))
        state = jax.device_put(state, place(self.grid, state))
        params = {} if self.teacher is None else self.teacher.params
        return state, jax.device_put(params, mesh.of_parameters(self.grid, params))

    def _loop(self, state, teacher_params, step, checkpoints, metrics, bar):
        """Run the steps that are left; return the last state, step and validation (None: stopped)."""
        train, validation = self.recipe.train, self.recipe.validation
        found: dict[str, Any] = {}
        saved = step
        began, tokens = time.perf_counter(), 0
        with figures.progress(train.steps, step, show=bar) as update:
            while step < train.steps:
                if self.stop():
                    checkpoints.save(step, state, self._data_state())
                    self.say(f"stopped at step {step} of {train.steps}; --resume goes on")
                    return state, step, None
                if self.batches.needs("student", step):
                    self._redraw(state, step)
                batch = self.batches.batch(step)
                if batch is None:
                    self.say(f"the data ran out after step {step} of {train.steps}")
                    break
                run = self._step_at(step, state)
                state, values = run(state, teacher_params, mesh.put_rows(self.grid, batch))
                step += 1
                tokens += batch["tokens"].size
                if step % train.log_every == 0 or step == train.steps:
                    numbers = {name: float(value) for name, value in values.items()}
                    now = time.perf_counter()
                    numbers["tokens_per_second"], began, tokens = tokens / (now - began), now, 0
                    metrics.write(step, "train", numbers)
                    update(step, _summary(numbers))
                    if not np.isfinite(numbers["loss"]):
                        raise UsageError(f"The loss is {numbers['loss']} at step {step}: lower train.learning_rate.")
                validate_now = bool(validation.every) and step % validation.every == 0 and step < train.steps
                if validate_now:
                    found = self._validate(state, teacher_params, step, metrics)
                if validate_now or (step % train.save_every == 0 and step < train.steps):
                    score = found.get("score") if validate_now else None
                    checkpoints.save(step, state, self._data_state(), score)
                    saved = step
                if validate_now:
                    began, tokens = time.perf_counter(), 0
        if step > saved or not found:
            found = self._validate(state, teacher_params, step, metrics)
            checkpoints.save(step, state, self._data_state(), found.get("score"))
        return state, step, found

    def _step_at(self, step: int, state: TrainState) -> Any:
        """Return the compiled step of the loss in force."""
        spec = [loss for loss in self.recipe.losses if loss.start * self.recipe.train.steps <= step][-1]
        if spec not in self._steps:
            objective = self._objective(spec)
            self._steps[spec] = make_step(objective, self._transform, self.grid, state, self.recipe.train.accumulate)
        return self._steps[spec]

    def _objective(self, spec: LossSpec) -> Objective:
        fn = None if self.teacher is None else self.teacher.fn
        assert fn is None or isinstance(fn, DecoderFn)
        return Objective(self.student, fn, spec, self.corpus.base.vocab_size)

    def _redraw(self, state: TrainState, step: int) -> None:
        """Let the student answer anew, where that is due; a draw that is on disk already is taken from there."""
        draw = step // self.recipe.responses.redraw
        if self._draws.get("student") != draw:
            rows = self.corpus.draw(self.student, lambda: mesh.whole(state.params), draw)
            self.batches.put("student", rows, draw=draw)
            self._draws["student"] = draw

    def _data_state(self) -> dict[str, Any]:
        return {"streams": self.batches.state(), "draws": dict(self._draws)}

    def _go_on(self, data: dict[str, Any]) -> None:
        """Take up the data where a checkpoint left it."""
        for name, draw in data["draws"].items():
            self.batches.put(name, Shards(self.corpus.draw_folder(draw)), draw=draw)
            self._draws[name] = draw
        self.batches.restore(data["streams"])

    def _validate(self, state: TrainState, teacher_params: Any, step: int, metrics: figures.Metrics) -> dict[str, Any]:
        """Return held-out loss and, with a teacher, what the real decoder accepts."""
        found = self._held_out(state, teacher_params)
        if self.teacher is not None:
            pair = Pair(self.teacher, self.student.draft(mesh.whole(state.params), self.teacher))
            spec = self.recipe.validation
            found |= validate.acceptance(pair, self.corpus.validation_prompts(), spec)
            found["score"] = validate.score_of(found)
        elif "cross_entropy" in found:
            found["score"] = -found["cross_entropy"]
        metrics.write(step, "validation", found)
        self.say(f"step {step}: {_summary(found)}")
        return found

    def _held_out(self, state: TrainState, teacher_params: Any) -> dict[str, float]:
        """Return loss, cross-entropy and alpha over the held-out texts, teacher-forced."""
        rows = self.corpus.held_rows()
        if not len(rows):
            return {}
        if self._evaluate is None:
            objective = self._objective(self.recipe.losses[-1])

            def evaluate(params, teacher_params, batch, counts):
                loss, metrics = objective(params, teacher_params, batch, counts)
                return {**metrics, "loss": loss}

            self._evaluate = jax.jit(evaluate)
        size = self.recipe.train.batch_rows
        rows = np.concatenate([rows, np.zeros((-len(rows) % size, *rows.shape[1:]), rows.dtype)])
        counts = self._objective(self.recipe.losses[-1]).counts(jax.tree.map(jax.numpy.asarray, as_batch(rows)))
        total: dict[str, float] = {}
        for first in range(0, len(rows), size):
            batch = mesh.put_rows(self.grid, as_batch(rows[first : first + size]))
            for name, value in self._evaluate(state.params, teacher_params, batch, counts).items():
                total[name] = total.get(name, 0.0) + float(value)
        if total.get("loss") == total.get("cross_entropy"):
            total.pop("loss")
        return total

    def _write(self, state: TrainState, step: int, found: dict[str, Any]) -> Outcome:
        """Write the folder, then measure it as a user would use it, and write that into its card."""
        params, folder = mesh.whole(state.params), self.folder / MODEL
        counts = {**self.corpus.counts(), "step": step}
        if folder.exists():
            shutil.rmtree(folder)
        self.student.save(folder, params, card.card(self.recipe, self.student.describe(), counts, found))
        spec = self.recipe.validation
        if self.teacher is not None and spec.speed:
            pair = load(target=self.recipe.teacher, draft=folder, require_draft=True)
            prompts = self.corpus.validation_prompts()
            shipped = validate.acceptance(pair, prompts, spec)
            found = {**found, **shipped, "predicted": validate.predict(pair, shipped, spec)}
            found["measured"] = validate.measure(pair, prompts, spec)
            text = card.card(self.recipe, self.student.describe(), counts, found)
            (folder / "README.md").write_text(text, encoding="utf-8")
        write_json(self.folder / SUMMARY, {"step": step, "data": counts, "figures": found})
        if figures.plot(self.folder) is None:
            self.say("no plot: matplotlib is not installed (pip install 'specjax[bench]')")
        return Outcome(folder, step, found)


def _summary(numbers: dict[str, Any]) -> str:
    words = []
    for name, label in (("loss", "loss"), ("cross_entropy", "cross-entropy"), ("alpha", "alpha")):
        if name in numbers:
            words.append(f"{label} {numbers[name]:.3f}")
    if "tokens_per_second" in numbers:
        words.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
    for name in ("greedy", "sampled"):
        if name in numbers and numbers[name]["mean_acceptance_length"] is not None:
            found = numbers[name]
            first = found["alpha"][0] or 0.0
            words.append(f"{name} alpha1 {first:.2f}, length {found['mean_acceptance_length']:.2f}")
    return ", ".join(words)
