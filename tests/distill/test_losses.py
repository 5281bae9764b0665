"""The losses against closed forms in NumPy, float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.distill import losses
from specjax.distill.losses import LOSSES, Position, loss_for

RNG = np.random.default_rng(0)
P, Q = (RNG.dirichlet(np.ones(5), size=(2, 3)) for _ in range(2))
LABEL = RNG.integers(0, 5, size=(2, 3))
AT = Position(jnp.log(P), jnp.log(Q), jnp.asarray(LABEL))


def kl(a, b):
    return (a * (np.log(a) - np.log(b))).sum(-1)


def js(beta):
    mixed = beta * P + (1 - beta) * Q
    return beta * kl(P, mixed) + (1 - beta) * kl(Q, mixed)


CLOSED = {
    "forward_kl": (kl(P, Q), {}),
    "reverse_kl": (kl(Q, P), {}),
    "jsd": (js(0.3), {"beta": 0.3}),
    "tvd": (0.5 * np.abs(P - Q).sum(-1), {}),
    "lk": (-np.log(np.minimum(P, Q).sum(-1)), {}),
    "lk_mix": (0.2 * kl(P, Q) + 0.8 * 0.5 * np.abs(P - Q).sum(-1), {"weight": 0.2}),
    "cross_entropy": (-np.log(np.take_along_axis(Q, LABEL[..., None], -1)[..., 0]), {}),
}


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_closed_form(name):
    expected, options = CLOSED[name]
    np.testing.assert_allclose(loss_for(name, **options)(AT), expected, rtol=2e-6, atol=1e-7)


def test_case_94_jsd_is_forward_kl_at_0_and_reverse_kl_at_1():
    np.testing.assert_allclose(loss_for("jsd", beta=0.0)(AT), kl(P, Q), rtol=2e-6)
    np.testing.assert_allclose(loss_for("jsd", beta=1.0)(AT), kl(Q, P), rtol=2e-6)
    # and they are the limits of the rest: ten times nearer to the end, several times nearer to the divergence
    for near, nearer, end in ((1e-2, 1e-3, kl(P, Q)), (1 - 1e-2, 1 - 1e-3, kl(Q, P))):
        far, close = (np.abs(loss_for("jsd", beta=b)(AT) / min(b, 1 - b) - end) for b in (near, nearer))
        assert (close < 0.3 * far).all()
        assert (close < 0.05 * end).all()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy"}))
def test_zero_where_the_two_agree_and_the_gradient_leads_there(name):
    logits = jnp.log(P)

    def value(student):
        at = losses.position(logits, student, AT.label, ids=None, temperature=1.0)
        return jnp.mean(loss_for(name)(at))

    assert abs(float(value(logits))) < 1e-6
    start = jnp.log(Q)
    moved = start - 0.1 * jax.grad(value)(start)
    assert float(value(moved)) < float(value(start))


def test_overlap_is_the_chance_of_acceptance():
    np.testing.assert_allclose(losses.overlap(AT), np.minimum(P, Q).sum(-1), rtol=1e-6)


def test_teacher_temperature_and_trimmed_ids():
    ids = jnp.asarray([0, 2, 3])
    logits = jnp.log(P)
    at = losses.position(logits, jnp.log(Q)[..., :3], jnp.asarray(LABEL), ids=ids, temperature=2.0)
    hot = np.sqrt(P) / np.sqrt(P).sum(-1, keepdims=True)
    np.testing.assert_allclose(np.exp(at.log_p), hot[..., [0, 2, 3]], rtol=1e-5)
    column = {0: 0, 2: 1, 3: 2}
    assert at.label.tolist() == [[column.get(label, -1) for label in row] for row in LABEL.tolist()]


def test_no_logit_of_probability_zero_breaks_a_loss():
    teacher, student = jnp.asarray([[0.0, -jnp.inf, 1.0]]), jnp.asarray([[0.0, 1.0, 2.0]])
    at = losses.position(teacher, student, jnp.asarray([0]), ids=None, temperature=1.0)
    for name in ("forward_kl", "tvd", "lk", "lk_mix", "cross_entropy"):
        assert np.isfinite(loss_for(name)(at)).all(), name
