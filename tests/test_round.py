"""One round and short loops on the toy: EOS, limits, capacity, caches, keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_laws
import toys

from specjax.draft import model_drafter, no_drafter
from specjax.generate import capacity_for, make_decoder
from specjax.types import Drafter, DraftView, Finish, Proposal, Rule, Verdict
from specjax.verify import RULES

VOCAB, GAMMA = 16, 4
TABLE = toys.table(VOCAB, seed=11, sharpness=2.0)
DRAFT = toys.noisy(TABLE, 1.0, seed=12)
TARGET = toys.MarkovFn(VOCAB)


@functools.cache
def small_draft() -> Drafter:
    return model_drafter(TARGET, VOCAB)


def run(prompts, max_new, *, draft=DRAFT, rule="greedy", gamma=GAMMA, temperature=0.0, **options) -> toys.Run:
    return toys.run_batch(
        TARGET,
        small_draft(),
        {"target": TABLE, "draft": draft},
        prompts,
        rule=RULES[rule],
        gamma=gamma,
        max_new=max_new,
        vocab=VOCAB,
        temperature=temperature,
        **options,
    )


def fresh_chain(length: int) -> list[int]:
    """Return a prompt whose greedy output begins with ``length`` tokens that all differ."""
    for first in range(VOCAB):
        for second in range(VOCAB):
            chain = toy_laws.greedy_chain(TABLE, (first, second), length)
            if len(set(chain)) == length:
                return [first, second]
    raise AssertionError("the table has no such prompt")


@pytest.mark.parametrize("draft", [TABLE, DRAFT], ids=["draft = target", "noisy"])
def test_eos_at_every_offset_of_a_block_ends_the_row_there(draft):
    """Case 1: one row for each offset 0..gamma, all in one batch."""
    prompt = fresh_chain(GAMMA + 1)
    chain = toy_laws.greedy_chain(TABLE, prompt, GAMMA + 1)
    result = run([prompt] * (GAMMA + 1), 20, draft=draft, eos=list(chain))
    for offset, output in enumerate(result.outputs):
        assert output == chain[: offset + 1]
        assert result.state.finish[offset] == Finish.EOS
    if draft is TABLE:
        assert result.state.round.tolist() == [1] * (GAMMA + 1)


@pytest.mark.parametrize(("rule", "temperature"), [("greedy", 0.0), *((r, 1.0) for r in RULES if r != "greedy")])
def test_small_budgets_are_prefixes_of_a_longer_run(rule, temperature):
    """Case 2: 0, 1, 2, 3 tokens under gamma 8, the same rows with 30."""
    prompts = [[1, 2], [3], [5, 6, 7], [9, 9]] * 4
    options = {"rule": rule, "temperature": temperature, "gamma": 8}
    longer = run(prompts, 30, **options).outputs
    budgets = [i // 4 for i in range(16)]
    shorter = run(prompts, budgets, **options)
    assert [len(output) for output in shorter.outputs] == budgets
    assert shorter.outputs == [output[:n] for output, n in zip(longer, budgets, strict=True)]
    assert np.all(shorter.state.finish == Finish.LENGTH)
    # Nothing to do is no round.
    assert shorter.state.round[:4].tolist() == [0] * 4


def test_prompts_within_gamma_of_the_limit_end_there_and_overwrite_nothing():
    """Cases 4 and 15: limit + width is the whole capacity, so a write past it would be clamped onto valid entries."""
    longest = 128 - (GAMMA + 1)
    assert capacity_for(longest, GAMMA + 1) == 128
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size=longest - room).tolist() for room in range(1, GAMMA + 2)]
    result = run(prompts, list(range(1, GAMMA + 2)))
    state = result.state
    assert state.tokens.shape[1] == 128
    for row, prompt in enumerate(prompts):
        assert result.outputs[row] == toy_laws.greedy_chain(TABLE, prompt, row + 1)
        assert (state.num_tokens[row], state.finish[row]) == (longest, Finish.LENGTH)
        for cache in (state.cache, state.draft):
            valid = cache.length[row]
            assert longest - 2 <= valid <= longest - 1
            np.testing.assert_array_equal(cache.k[0][row, 0, :valid, 0], state.tokens[row, :valid])


def scripted(accepted: list[int]) -> Drafter:
    """Return a draft that is right ``accepted[row]`` times in each block and then wrong."""

    def propose(params, state, view: DraftView, gamma: int, greedy: bool):
        batch = view.tokens.shape[0]
        last = jnp.take_along_axis(view.tokens, view.num_tokens[:, None] - 1, axis=1)[:, 0]
        before = jnp.take_along_axis(view.tokens, jnp.maximum(view.num_tokens[:, None] - 2, 0), axis=1)[:, 0]
        before = jnp.where(view.num_tokens > 1, before, 0)
        tokens = []
        for i in range(gamma):
            best = jnp.argmax(params[before, last], axis=-1)
            token = jnp.where(i < jnp.asarray(accepted), best, (best + 1) % VOCAB).astype(jnp.int32)
            tokens.append(token)
            before, last = last, token
        full = jnp.full(batch, gamma, jnp.int32)
        return Proposal(jnp.stack(tokens, axis=1), None, full, jnp.ones(batch, jnp.bool_)), state

    return Drafter(init=lambda *_: (), propose=propose, rollback=lambda state, num_tokens: state)


def test_rows_that_accept_0_2_5_and_all_go_their_own_ways():
    """Case 5: each row equals its solo run, its records say what was accepted, its cache holds its own tokens."""
    gamma, accepted = 6, [0, 2, 5, 6]
    prompts = [[1], [2, 3], [4, 5, 6, 7, 8], [9, 1]]
    result = toys.run_batch(
        TARGET,
        scripted(accepted),
        {"target": TABLE, "draft": TABLE},
        prompts,
        rule=RULES["greedy"],
        gamma=gamma,
        max_new=40,
        vocab=VOCAB,
        temperature=0.0,
    )
    state = result.state
    for row, (prompt, count) in enumerate(zip(prompts, accepted, strict=True)):
        assert result.outputs[row] == toy_laws.greedy_chain(TABLE, prompt, 40)
        output = slice(len(prompt), len(prompt) + 40)
        np.testing.assert_array_equal(state.place[row, output], np.arange(40) % (count + 1))
        np.testing.assert_array_equal(state.accepted[row, output], np.arange(40) % (count + 1) < count)
        assert np.all(state.drafted[row, output] == gamma)
        assert state.round[row] == -(-40 // (count + 1))
        valid = state.cache.length[row]
        assert valid == len(prompt) + 39
        np.testing.assert_array_equal(state.cache.k[0][row, 0, :valid, 0], state.tokens[row, :valid])


def test_finished_rows_keep_their_state_while_mates_run_on():
    prompts = [[1, 2], [3, 4]]
    short = run(prompts, [3, 40])
    alone = run(prompts, [3, 3])
    for name in ("num_tokens", "round", "finish", "status"):
        assert getattr(short.state, name)[0] == getattr(alone.state, name)[0]
    assert short.outputs[0] == alone.outputs[0]
    assert short.state.cache.length[0] == len(prompts[0]) + 2


def test_logprobs_are_those_of_the_raw_softmax_and_the_same_with_any_draft():
    """Case 53; the temperature does not touch them."""
    prompts = [[1], [2, 3], [4, 5, 6]]
    sampled = run(prompts, 12, rule="rejection", temperature=0.5, logprobs=True)
    for row, output in enumerate(sampled.outputs):
        start = len(prompts[row])
        for i in range(len(output)):
            law = toy_laws.next_probs(TABLE, (*prompts[row], *output[:i]), 1.0)
            assert sampled.state.logprobs[row, start + i] == pytest.approx(np.log(law[output[i]]), abs=2e-5)


def test_no_key_serves_two_rounds_purposes_or_rows():
    """Invariant 7: every key a rule and a draft were given, over a whole run with all rows at once."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []

    def verify(logits, proposal, sampling, keys):
        jax.debug.callback(lambda r, p: seen.append((r, p)), keys.round, keys.place)
        return RULES["rejection"].verify(logits, proposal, sampling, keys)

    toys.run_batch(
        TARGET,
        small_draft(),
        {"target": TABLE, "draft": DRAFT},
        [[1], [1], [2, 3]],
        rule=Rule("spy", verify),
        gamma=GAMMA,
        max_new=30,
        vocab=VOCAB,
    )
    jax.effects_barrier()
    running = [
        *(tuple(k) for r, _ in seen for k in r.tolist()),
        *(tuple(k) for _, p in seen for k in p.reshape(-1, 2).tolist()),
    ]
    # Rows that have finished repeat their last round's keys; every other key is met once.
    assert len(seen) > 5
    assert len(set(running)) > 0.6 * len(running)
    first = [tuple(k) for r, p in seen[:5] for k in (*r.tolist(), *p.reshape(-1, 2).tolist())]
    assert len(set(first)) == len(first)


@pytest.mark.slow
def test_a_padded_step_gives_the_same_tokens():
    """Width 8 under gamma 4: three rows of the target's step are padding."""
    prompts = [[1], [2, 3], [4, 5, 6]]
    assert run(prompts, 25, width=8).outputs == run(prompts, 25).outputs
    hot = {"rule": "rejection", "temperature": 1.0}
    assert run(prompts, 25, width=8, **hot).outputs == run(prompts, 25, **hot).outputs


def test_the_round_limit_stops_and_goes_on():
    """A traced limit: in steps of two rounds the same rows come out."""
    whole = run([[1, 2], [3]], 30)
    part = run([[1, 2], [3]], 30, round_limit=2)
    assert np.all(part.state.finish == Finish.RUNNING)
    assert part.state.round.tolist() == [2, 2]
    for row in range(2):
        assert part.outputs[row] == whole.outputs[row][: len(part.outputs[row])]


@pytest.mark.parametrize(
    ("gamma", "width", "words"), [(-1, None, "gamma is -1"), (65, None, "gamma is 65"), (4, 4, "width is 4")]
)
def test_static_choices_out_of_range_are_refused(gamma, width, words):
    with pytest.raises(ValueError, match=words):
        make_decoder(TARGET, no_drafter(), rule=RULES["greedy"], gamma=gamma, vocab_size=VOCAB, width=width)


def test_a_rule_object_of_ones_own_is_used():
    """A rule that accepts nothing is plain decoding, one token a round."""

    def verify(logits, proposal, sampling, keys):
        none = jnp.zeros_like(proposal.num_drafted)
        return Verdict(none, jnp.argmax(logits[:, 0], axis=-1).astype(jnp.int32))

    result = toys.run_batch(
        TARGET,
        small_draft(),
        {"target": TABLE, "draft": TABLE},
        [[1, 2]],
        rule=Rule("never", verify, greedy=True),
        gamma=2,
        max_new=9,
        vocab=VOCAB,
        temperature=0.0,
    )
    assert result.outputs[0] == toy_laws.greedy_chain(TABLE, (1, 2), 9)
    assert result.state.round[0] == 9
