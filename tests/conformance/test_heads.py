"""Every kind of head on a real transformer: bits of the text, what is kept of the target, places in a batch."""

from __future__ import annotations

import functools

import faulty as f
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t
import tiny_heads as h

from specjax.draft import mixed_drafter
from specjax.engine import Engine, Request
from specjax.generate import Program, Prompt
from specjax.models.heads import KINDS
from specjax.prefill import observed
from specjax.sampling import SamplingParams, row_key
from specjax.verify import RULES

GAMMA, NEW = 4, 40
SLOW = [pytest.param(kind, marks=[] if kind in ("mlp", "eagle") else pytest.mark.slow) for kind in KINDS]
ONE = [pytest.param(kind, marks=[] if kind == "mlp" else pytest.mark.slow) for kind in KINDS]


@functools.cache
def program(kind: str, rule: str = "rejection", *, listed: bool = False, mixed: bool = False, width: int = 8):
    drafter = h.source(kind, listed=listed)[0]
    return Program(
        t.tiny().fn, mixed_drafter(drafter) if mixed else drafter, rule=RULES[rule], gamma=GAMMA, vocab_size=t.VOCAB,
        width=width, exact=True, check=True, logprobs=True,
    )  # fmt: skip


def as_tiny(kind: str, *, listed: bool = False) -> t.Tiny:
    return t.Tiny(t.tiny().fn, h.source(kind, listed=listed)[1])


@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ONE)
def test_greedy_rows_are_plain_decodings_and_drafts_are_accepted_and_rejected(kind, listed):
    """Sampled rows stand in the same batch; two slots are refilled."""
    temperatures = [0.0, 1.0] * 4
    prompts = [prompt for prompt in t.prompts() for _ in range(2)]
    found = t.run(
        program(kind, listed=listed), t.tiny(), as_tiny(kind, listed=listed), prompts, NEW, temperature=temperatures,
        batch_size=2, chunk=3,
    )  # fmt: skip
    assert [row.ids.tolist() for row in found[::2]] == [ids[:NEW] for ids in t.greedy()]
    assert 0.1 < t.acceptance(found) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("kind", ONE)
def test_a_row_has_the_same_bits_alone_and_among_others(kind):
    together = t.run(program(kind), t.tiny(), as_tiny(kind), t.prompts(), NEW, temperature=[0, 1, 0, 1], batch_size=4)
    for i, prompt in enumerate(t.prompts()):
        (alone,) = t.run(
            program(kind), t.tiny(), as_tiny(kind), [prompt], NEW, temperature=[0.0, 1.0][i % 2], ids=[i], batch_size=1
        )
        if i % 2 == 0:
            np.testing.assert_array_equal(alone.ids, together[i].ids)
            np.testing.assert_array_equal(alone.logprobs, together[i].logprobs)
        else:
            # A head's own last bits may move with the batch, and a draw with them: the texts may part, once, late.
            same = alone.ids == together[i].ids
            assert same[:8].all()


def states(kind: str, mixed: bool = False):
    """Return the loop's state after a batch has run, and the draft's after a prefill of the same texts."""
    source, params = h.source(kind)
    made, params = program(kind, mixed=mixed), {"target": t.tiny().params, "draft": params}
    state = made.empty(params, 4, 200)
    for i, prompt in enumerate(t.prompts()):
        row = Prompt(prompt, len(prompt) + NEW, (), row_key(0, i), SamplingParams(temperature=float(i % 2)))
        state = made.insert(params, state, row, i)
    state = made.decode(params, state, 15)
    tokens, count = jnp.asarray(state.tokens), jnp.asarray(state.num_tokens)

    @jax.jit
    def fresh(params, tokens, count):
        seen = source.init(params["draft"], tokens, count, tokens.shape[1])
        observe = functools.partial(source.observe, params["draft"])
        return observed(t.tiny().fn, params["target"], tokens, count, tokens.shape[1], observe=observe, seen=seen)[1]

    return state, fresh(params, tokens, count)


@pytest.mark.parametrize("mixed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ONE[:2])
def test_what_a_head_keeps_is_what_a_fresh_prefill_gives(kind, mixed):
    """After rounds of every kind, in mid-generation: true features and entries alone, nothing of rejected drafts."""
    state, fresh = states(kind, mixed)
    accepted = np.asarray(state.accepted)
    assert accepted.any()
    assert int(np.asarray(state.num_tokens).max()) > 100
    np.testing.assert_array_equal(state.draft.cache.length, state.num_tokens - 1)
    for row, length in enumerate(np.asarray(state.num_tokens) - 1):
        pairs = [(state.draft.features[row], fresh.features[row])]
        for name in ("k", "v"):
            for a, b in zip(getattr(state.draft.cache, name), getattr(fresh.cache, name), strict=True):
                pairs.append((a[row].swapaxes(0, 1), b[row].swapaxes(0, 1)))
        assert len(pairs) == (3 if kind == "eagle" else 1)
        for a, b in pairs:
            np.testing.assert_allclose(a[:length], b[:length], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["mlp", "eagle"])
def test_a_shared_prefix_gives_the_same_rows(kind):
    """Prompts with two, one and no pieces of it."""
    rng = np.random.default_rng(0)
    prefix, other = rng.integers(0, 320, size=520).tolist(), rng.integers(0, 320, size=300).tolist()
    made, params = program(kind), {"target": t.tiny().params, "draft": h.source(kind)[1]}
    held = made.prefix(params, prefix)
    assert held is not None
    for ids in (prefix[:400] if kind == "mlp" else prefix, other):
        prompt = Prompt(ids, 600, (), row_key(0, 0))
        whole, shared = (made.row(params, prompt, given) for given in (None, held))
        count = len(ids) - 1
        assert shared.draft.cache.length.tolist() == [count]
        np.testing.assert_array_equal(whole.draft.features[:, :count], shared.draft.features[:, :count])
        for a, b in zip(whole.draft.cache.k, shared.draft.cache.k, strict=True):
            np.testing.assert_allclose(a[:, :, :count], b[:, :, :count], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle"])
def test_after_the_device_failed_rows_go_on_as_they_would_have(kind):
    params = {"target": t.tiny().params, "draft": h.source(kind)[1]}
    rows = [
        Request(i, Prompt(prompt, len(prompt) + NEW, (), row_key(0, i), SamplingParams(temperature=0.0)))
        for i, prompt in enumerate(t.prompts())
    ]
    results = []
    for made in (program(kind), f.Faulty(program(kind), fail={2})):
        engine = Engine(made, params, batch_size=4, longest=200)
        results.append({result.key: result for result in engine.run(rows, chunk=2)})
    assert engine.num_rebuilt >= 3
    for i in range(4):
        np.testing.assert_array_equal(results[0][i].ids, results[1][i].ids)
        np.testing.assert_array_equal(results[0][i].accepted, results[1][i].accepted)
