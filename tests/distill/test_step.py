"""One step: the mean over its tokens, whatever its parts and devices, and what the loss does not see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from specjax.distill import mesh
from specjax.distill.config import LossSpec, TrainSpec
from specjax.distill.step import Objective, TrainState, make_step, optimiser, place, run_teacher, schedule
from specjax.distill.student import as_packed
from specjax.models.decoder import DecoderFn

HERE = Path(__file__).parents[1]
VOCAB = 300


class Small:
    """The first layers of a fixture as a student."""

    ids, reads, step_weights = None, None, (1.0,)

    def __init__(self, layers: int = 1, dtype: str = "float32"):
        found = tiny.tiny(layers=layers)
        self.fn, self.params = DecoderFn(found.fn.config, dtype), found.params

    def masks(self, batch):
        return (batch["mask"],)

    def logits(self, params, batch, teacher, teacher_params):
        return (self.fn(params, batch["tokens"], as_packed(batch)).logits[..., :VOCAB],)


def batch(rows: int = 8, length: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """Return rows whose masks differ a lot in size, with padding."""
    rng = np.random.default_rng(seed)
    segment = np.ones((rows, length), np.int32)
    segment[:, -2:] = 0
    mask = (rng.random((rows, length)) < np.linspace(0.1, 0.9, rows)[:, None]) & (segment == 1)
    mask[:, -3] = False
    return {
        "tokens": rng.integers(0, VOCAB, (rows, length)).astype(np.int32),
        "segment": segment,
        "position": np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)).copy(),
        "mask": mask.astype(np.float32),
    }


def one_step(parts: int = 1, shards: tuple[int, int] = (1, 1), loss: str = "forward_kl", dtype: str = "float32"):
    """Return parameters and metrics after one step of plain gradient descent."""
    import optax

    student, teacher = Small(dtype=dtype), tiny.tiny()
    grid, transform = mesh.make_mesh(*shards), optax.sgd(0.5)
    objective = Objective(student, teacher.fn, LossSpec(loss), VOCAB)  # type: ignore[arg-type]
    params = jax.tree.map(jnp.array, student.params)
    state = TrainState(params, transform.init(params), jnp.zeros(2, jnp.uint32))
    state = jax.device_put(state, place(grid, state))
    step = make_step(objective, transform, grid, state, parts)
    teacher_params = jax.device_put(teacher.params, mesh.of_parameters(grid, teacher.params))
    state, metrics = step(state, teacher_params, mesh.put_rows(grid, batch()))
    return jax.device_get(state.params), {name: float(value) for name, value in metrics.items()}


def assert_close(one, other, rtol=1e-5, atol=1e-6):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.fixture(scope="module")
def whole():
    return one_step()


@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_in_parts_is_the_step_at_once(whole, parts):
    """The parts have different numbers of tokens, so that a mean of means would differ."""
    masks = batch()["mask"].reshape(-1, parts, 12).sum(axis=(0, 2))
    assert len(set(masks.tolist())) > 1
    params, metrics = one_step(parts)
    assert_close(params, whole[0])
    assert metrics == pytest.approx(whole[1], rel=1e-5)
    assert metrics["labels"] == batch()["mask"].sum()


def test_the_loss_is_the_mean_over_tokens(whole):
    student, teacher, rows = Small(), tiny.tiny(), jax.tree.map(jnp.asarray, batch())
    q = jax.nn.log_softmax(student.logits(student.params, rows, None, None)[0])
    p = jax.nn.log_softmax(teacher.fn(teacher.params, rows["tokens"], as_packed(rows)).logits[..., :VOCAB])  # type: ignore[arg-type]
    divergence = np.sum(np.exp(p) * (p - q), axis=-1)
    assert whole[1]["loss"] == pytest.approx(float((divergence * rows["mask"]).sum() / rows["mask"].sum()), rel=1e-5)
    alpha = np.minimum(np.exp(p), np.exp(q)).sum(-1)
    assert whole[1]["alpha"] == pytest.approx(float((alpha * rows["mask"]).sum() / rows["mask"].sum()), rel=1e-5)


class Other(DecoderFn):
    """A teacher whose logits are changed where nothing is trained on."""

    def __call__(self, params, tokens, cache, **options):
        out = super().__call__(params["model"], tokens, cache, **options)
        return out.replace(logits=jnp.where(params["mask"][..., None] > 0, out.logits, params["elsewhere"]))


@pytest.mark.parametrize("elsewhere", [0.0, 50.0, np.nan])
def test_case_96_the_teachers_logits_on_prompt_and_padding_change_nothing(elsewhere):
    student, teacher, rows = Small(), tiny.tiny(), jax.tree.map(jnp.asarray, batch())
    spec = LossSpec("reverse_kl")

    def value(fn, params):
        objective = Objective(student, fn, spec, VOCAB)  # type: ignore[arg-type]
        gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        (loss, _), grads = gradient(student.params, params, rows, objective.counts(rows))
        return loss, grads

    changed = {"model": teacher.params, "mask": rows["mask"], "elsewhere": elsewhere}
    (loss, grads), (same, alike) = value(Other(teacher.fn.config), changed), value(teacher.fn, teacher.params)
    assert loss == same
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(alike), strict=True))


def test_a_student_that_reads_a_layer_gets_its_stream_and_the_same_logits():
    teacher, rows = tiny.tiny(), jax.tree.map(jnp.asarray, batch())
    plain = run_teacher(teacher.fn, teacher.params, rows, None)
    assert plain.features is None
    below = run_teacher(teacher.fn, teacher.params, rows, 1)
    final = run_teacher(teacher.fn, teacher.params, rows, "final")
    assert below.features is not None
    assert final.features is not None
    np.testing.assert_allclose(below.logits, plain.logits, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(final.logits, plain.logits, rtol=1e-5, atol=1e-5)
    assert not np.allclose(below.features, final.features)


def test_bfloat16_steps_stay_near_float32(whole):
    params, metrics = one_step(dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"float32"}
    assert metrics["loss"] == pytest.approx(whole[1]["loss"], rel=0.02)


def test_the_learning_rate_warms_up_and_falls():
    rate = schedule(TrainSpec(steps=100, warmup=10, learning_rate=1.0, final=0.1))
    values = [float(rate(step)) for step in range(101)]
    assert values[:11] == sorted(values[:11])
    assert values[10:] == sorted(values[10:], reverse=True)
    assert values[0] > 0
    assert (values[10], values[100]) == pytest.approx((1.0, 0.1))
    assert float(schedule(TrainSpec(steps=5, warmup=0, learning_rate=1.0))(0)) == 1.0


def test_only_matrices_decay():
    params = {"matrix": jnp.ones((2, 2)), "scale": jnp.ones(2)}
    transform = optimiser(TrainSpec(steps=10, warmup=0, learning_rate=0.1, weight_decay=0.5))
    updates, _ = transform.update(jax.tree.map(jnp.zeros_like, params), transform.init(params), params)
    assert np.allclose(updates["matrix"], -0.05)  # type: ignore[index]
    assert not np.any(updates["scale"])  # type: ignore[index]


PROGRAM = """
import jax, numpy as np, pickle, sys
import test_step as t
whole = t.one_step()
for parts, shards in ((1, (4, 1)), (1, (2, 2)), (1, (1, 4)), (2, (2, 2))):
    params, metrics = t.one_step(parts, shards)
    t.assert_close(params, whole[0])
    assert all(abs(metrics[n] - v) <= 1e-5 * abs(v) + 1e-7 for n, v in whole[1].items()), (metrics, whole[1])
    print("agrees", parts, shards)
"""


def run_on_devices(program: str, count: int, *arguments: str) -> str:
    """Run a program in a process of its own with so many fake devices."""
    path = os.pathsep.join(str(HERE / folder) for folder in (".", "distill"))
    env = {**os.environ, "PYTHONPATH": path, "JAX_NUM_CPU_DEVICES": str(count), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_four_devices_agree_with_one_to_rounding():
    assert run_on_devices(PROGRAM, 4).count("agrees") == 4
