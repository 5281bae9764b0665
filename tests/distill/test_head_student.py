"""Heads as students: trained on a target's features, resumed, sharded, written, and read back as drafts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipes
import test_step
import tiny
from test_train import StopAt, draft_recipe, lines, steps_of

import specjax
from specjax.distill import distill, mesh
from specjax.distill.config import LossSpec, StudentSpec
from specjax.distill.figures import read_metrics
from specjax.distill.head_student import HeadStudent
from specjax.distill.losses import LOSSES
from specjax.distill.step import Objective, TrainState, make_step, place, run_teacher
from specjax.distill.student import Base, make_student
from specjax.errors import UsageError
from specjax.head_folder import load_head
from specjax.models import heads
from specjax.pair import Model

SIZES = {
    "mlp": {"mlp_width": 32},
    "eagle": {"mlp_width": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8},
    "medusa": {"positions": 2},
    "early_exit": {"layers": 1, "adapter": 8},
}
HEAD = {"kind": "mlp", "head_ids": 64, "config": {"mlp_width": 32, "prompt_ids": 8}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory, corpus) -> Path:
    """Return the run of a target of two layers, so that a head can exit after one."""
    run = tmp_path_factory.mktemp("runs") / "deep"
    student = {"config": recipes.student(layers=2, tie_word_embeddings=False)}
    assert distill(recipes.target_recipe(corpus, run, student=student, train={"steps": 60})) is not None
    return run


def small(kind: str, *, ids: np.ndarray | None = None, dtype: str = "float32", **more) -> HeadStudent:
    """Return a head of a fixture's two layers."""
    found = tiny.tiny()
    target = Model("tiny", found.fn, found.params, None, test_step.VOCAB, 512, (0,), None, "float32")
    base = Base(target, None, test_step.VOCAB, (0,), None, Path())  # type: ignore[arg-type]
    student = make_student(StudentSpec(kind, config=SIZES[kind], **more), base, dtype=dtype, remat=False)
    assert isinstance(student, HeadStudent)
    student.ids = ids
    return student


def one_step(kind: str, parts: int = 1, shards: tuple[int, int] = (1, 1), dtype: str = "float32"):
    """Return parameters and metrics after one step of plain gradient descent."""
    student, teacher = small(kind, ids=np.arange(0, test_step.VOCAB, 2, dtype=np.int32), dtype=dtype), tiny.tiny()
    grid, transform = mesh.make_mesh(*shards), optax.sgd(0.5)
    objective = Objective(student, teacher.fn, LossSpec("lk"), test_step.VOCAB)
    params = jax.tree.map(jnp.array, student.init(jax.random.key(0)))
    state = TrainState(params, transform.init(params), jnp.zeros(2, jnp.uint32))
    state = jax.device_put(state, place(grid, state))
    step = make_step(objective, transform, grid, state, parts)
    teacher_params = jax.device_put(teacher.params, mesh.of_parameters(grid, teacher.params))
    state, metrics = step(state, teacher_params, mesh.put_rows(grid, test_step.batch()))
    return jax.device_get(state.params), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    "kind", ["mlp", *(pytest.param(kind, marks=pytest.mark.slow) for kind in heads.KINDS if kind != "mlp")]
)
def test_a_trained_head_is_a_draft_and_loses_nothing(deep, corpus, tmp_path, kind):
    made = draft_recipe(
        corpus, deep, tmp_path / "run", train={"steps": 30},
        student={"kind": kind, "head_ids": 64, "config": {**SIZES[kind], "prompt_ids": 8}},
        loss=[{"name": "forward_kl"}, {"name": "lk", "start": 0.5}],
    )  # fmt: skip
    outcome = distill(made)
    assert outcome is not None
    alphas = [line["alpha"] for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert np.mean(alphas[-5:]) > np.mean(alphas[:5]) + 0.05
    for name in ("greedy", "sampled"):
        assert 1.0 <= outcome.figures[name]["mean_acceptance_length"] <= 3.0
    assert len(json.loads((outcome.folder / "head_ids.json").read_text())["ids"]) == 64
    assert f"{kind} head" in (outcome.folder / "README.md").read_text().lower()
    prompts = ["Ana had", "The boat was", "Tom took the"]
    options = {"max_new_tokens": 16, "gamma": 2, "width": 3}
    pair = specjax.load(target=deep / "model", draft=outcome.folder, dtype="float32", require_draft=True)
    plain = specjax.load(target=deep / "model", draft="none", dtype="float32")
    drafted = specjax.generate(pair, prompts, **options)
    assert [out.ids for out in drafted] == [out.ids for out in specjax.generate(plain, prompts, **options)]
    assert sum(out.stats["num_accepted_tokens"] for out in drafted) > 0


@pytest.mark.slow
def test_a_head_from_the_teachers_answers_is_measured(deep, corpus, tmp_path):
    made = draft_recipe(
        corpus, deep, tmp_path / "run", student={**HEAD, "config": {"mlp_width": 32, "trained_output": True}},
        mix=[{"teacher": 1.0}], responses={"max_new_tokens": 8, "limit": 16, "prompt_tokens": 4, "greedy_share": 0.5},
        train={"dtype": "bfloat16", "accumulate": 2}, validation={"speed": True, "repeats": 1, "prompts": 1},
        teacher_dtype="bfloat16",
    )  # fmt: skip
    outcome = distill(made)
    assert outcome is not None
    for name in ("greedy", "sampled"):
        assert outcome.figures["predicted"][name]["speedup"] > 0
        assert outcome.figures["measured"][name]["ratio"]["median"] > 0
    assert load_head(outcome.folder).config.trained_output


@pytest.mark.slow
def test_case_92_5_and_5_steps_of_a_head_resumed_are_10_straight(target, corpus, tmp_path):
    def made(name: str):
        train = {"steps": 10, "accumulate": 2}
        return draft_recipe(corpus, target, tmp_path / name, student={**HEAD, "dtype": "float32"}, train=train)

    straight = distill(made("straight"))
    assert distill(made("parts"), stop=StopAt(5)) is None
    assert steps_of(tmp_path / "parts") == [5]
    resumed = distill(made("parts"), resume=True)
    assert straight is not None
    assert resumed is not None
    one, other = (load_head(outcome.folder).params for outcome in (straight, resumed))
    assert all(np.array_equal(one[name], other[name]) for name in one)
    assert lines(tmp_path / "straight") == lines(tmp_path / "parts")


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_loss_is_the_weighted_sum_of_the_steps_means(name):
    """Each step has a mean of its own: a later one begins later in each text."""
    student, teacher = small("mlp", step_weights=[1.0, 0.5, 0.25]), tiny.tiny()
    rows = jax.tree.map(jnp.asarray, test_step.batch())
    params = student.init(jax.random.key(0))
    objective = Objective(student, teacher.fn, LossSpec(name), test_step.VOCAB)
    counts = objective.counts(rows)
    place = np.broadcast_to(np.arange(rows["mask"].shape[1]), rows["mask"].shape)
    assert counts.tolist() == [float(np.sum(rows["mask"] * (place >= s))) for s in range(3)]
    total, metrics = objective(params, teacher.params, rows, counts)
    out = run_teacher(teacher.fn, teacher.params, rows, "final")
    expected = 0.0
    for s, weight in enumerate(student.step_weights):
        masks = student.masks(rows)
        alone = small("mlp", step_weights=[1.0])
        alone.logits = lambda *_, s=s: (student.logits(params, rows, out, teacher.params)[s],)  # type: ignore[method-assign]
        alone.masks = lambda batch, s=s, masks=masks: (masks[s],)  # type: ignore[method-assign]
        single = Objective(alone, teacher.fn, LossSpec(name), test_step.VOCAB)
        expected += weight * float(single(params, teacher.params, rows, counts[s : s + 1])[0])
    assert float(total) == pytest.approx(expected, rel=1e-5)
    assert np.isfinite(metrics["cross_entropy"])


@pytest.mark.parametrize("elsewhere", [50.0, np.nan])
def test_case_96_the_teachers_logits_elsewhere_change_nothing_at_any_step(elsewhere):
    student, teacher, rows = small("eagle"), tiny.tiny(), jax.tree.map(jnp.asarray, test_step.batch())
    params = student.init(jax.random.key(0))

    def value(fn, teacher_params):
        objective = Objective(student, fn, LossSpec("reverse_kl"), test_step.VOCAB)
        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        (loss, _), grads = gradient(params, teacher_params, rows, objective.counts(rows))
        return loss, grads

    class Changed(test_step.Other):
        def __call__(self, held, tokens, cache, **options):
            return super().__call__({**held, "model": held}, tokens, cache, **options)

    changed = {**teacher.params, "mask": rows["mask"], "elsewhere": elsewhere}
    (loss, grads), (same, alike) = value(Changed(teacher.fn.config), changed), value(teacher.fn, teacher.params)
    assert loss == same
    assert all(np.array_equal(grads[name], alike[name]) for name in grads)


def test_texts_in_one_row_do_not_see_each_other():
    student, teacher = small("eagle", steps=3), tiny.tiny()
    first, second = test_step.batch(rows=2, length=9, seed=1), test_step.batch(rows=2, length=7, seed=2)
    first["segment"][:], second["segment"][:] = 1, 2
    rows = {name: jnp.concatenate([first[name], second[name]], axis=1) for name in first}
    params = jax.tree.map(lambda leaf: leaf + 0.1, student.init(jax.random.key(0)))

    @jax.jit
    def logits(batch):
        out = run_teacher(teacher.fn, teacher.params, batch, "final")
        return student.logits(params, batch, out, teacher.params)

    both = logits(rows)
    for part, alone in ((slice(0, 9), first), (slice(9, 16), second)):
        alone = {**jax.tree.map(jnp.asarray, alone), "segment": jnp.ones_like(alone["segment"])}
        for s, (one, other) in enumerate(zip(both, logits(alone), strict=True)):
            np.testing.assert_allclose(one[:, part][:, s:], other[:, s:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", heads.KINDS)
def test_a_step_in_parts_is_the_step_at_once(kind):
    whole, cut = one_step(kind), one_step(kind, parts=4)
    test_step.assert_close(cut[0], whole[0])
    assert cut[1] == pytest.approx(whole[1], rel=1e-5)


def test_bfloat16_products_leave_parameters_and_loss_near_float32():
    (params, metrics), whole = one_step("mlp", dtype="bfloat16"), one_step("mlp")
    assert {leaf.dtype.name for leaf in params.values()} == {"float32"}
    assert metrics["loss"] == pytest.approx(whole[1]["loss"], rel=0.02)


PROGRAM = """
import test_step
import test_head_student as t
for kind in ("mlp", "medusa"):
    whole = t.one_step(kind)
    for shards in ((4, 1), (2, 2)):
        params, metrics = t.one_step(kind, shards=shards)
        test_step.assert_close(params, whole[0])
        assert all(abs(metrics[n] - v) <= 1e-5 * abs(v) + 1e-7 for n, v in whole[1].items()), (metrics, whole[1])
        print("agrees", kind, shards)
"""


@pytest.mark.slow
def test_four_devices_agree_with_one_to_rounding():
    assert test_step.run_on_devices(PROGRAM, 4).count("agrees") == 4


@pytest.mark.parametrize(
    ("student", "message"),
    [
        ({"kind": "mlp", "config": {"positions": 2}}, r"has 'positions'; a head of kind mlp has mlp_width, prompt_ids"),
        ({"kind": "mlp", "config": {"mlp_width": 0}}, "mlp_width is 0"),
        ({"kind": "mlp", "config": {"mlp_width": "wide"}}, "Expected `int`, got `str`"),
        ({"kind": "early_exit"}, "layers is 0"),
        ({"kind": "early_exit", "config": {"layers": 2}}, "layers is 2; the teacher has 2 layers"),
        ({"kind": "medusa", "steps": 5}, r"steps is 5; a head of kind medusa has 1\.\.4"),
        ({"kind": "mlp", "steps": 2, "step_weights": [1.0]}, r"step_weights are \[1.0\]; expected 2"),
        ({"kind": "mlp", "layers": [0]}, "student.layers is of models"),
        ({"kind": "rnn"}, "known: model, mlp, eagle, medusa, early_exit"),
        ({"steps": 2, "config": recipes.student()}, "of heads; a model has none"),
    ],
)
def test_a_head_that_cannot_be_is_refused(deep, corpus, tmp_path, student, message):
    with pytest.raises(UsageError, match=message):
        distill(draft_recipe(corpus, deep, tmp_path / "run", student=student))
