"""Gamma chosen round by round: caches that wake right, a bounded loss, the same law and the same bits."""

from __future__ import annotations

import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t
import toy_laws
import toys
from kinds import SOURCES, make_source

from specjax import gamma as g
from specjax.draft import early_exit_drafter, model_drafter
from specjax.generate import widths_of
from specjax.types import Controller
from specjax.verify import RULES

VOCAB, GAMMA, WIDTHS = 8, 7, (1, 4, 8)
TABLE = toys.table(VOCAB, seed=4, sharpness=2.0)
PROMPTS = [[1], [2, 3], [7, 0, 5, 5, 1, 6, 2], [4, 4, 4]]
NEW = 64


@functools.cache
def scripted(*gammas: int) -> Controller:
    """Return a controller that goes through these, round by round, and then begins again."""
    table = np.asarray(gammas, np.int32)
    return Controller(
        init=lambda batch: (),
        choose=lambda control, view: jnp.asarray(table)[view.round % len(gammas)],
        update=lambda control, view, outcome: control,
    )


def costs(step: float = 0.1, verify=(1.0, 1.0, 1.15), catch_up: float = 0.0, gamma: int = GAMMA) -> g.Costs:
    """Return costs in plain steps: those of a small model and of a CPU with bfloat16 weights."""
    draft = jnp.arange(gamma + 1) * jnp.float32(step)
    return g.Costs(draft, jnp.asarray(verify, jnp.float32), jnp.float32(catch_up), jnp.int32(-1))


def run(draft_table, given: g.Costs, prompts=PROMPTS, *, rule="greedy", widths=WIDTHS, **options) -> toys.Run:
    options = {"max_new": NEW, "temperature": 0.0, **options}
    return toys.run_batch(
        toys.MarkovFn(VOCAB),
        model(),
        {"target": TABLE, "draft": draft_table, "costs": given},
        prompts,
        rule=RULES[rule],
        gamma=GAMMA,
        vocab=VOCAB,
        width=widths,
        controller=g.auto_controller(GAMMA, widths),
        **options,
    )


@functools.cache
def model():
    return model_drafter(toys.MarkovFn(VOCAB), VOCAB)


def rounds_of(run: toys.Run, row: int = 0) -> np.ndarray:
    """Return what each round of a row drafted."""
    span = slice(run.state.prompt_length[row], run.state.num_tokens[row])
    return run.state.drafted[row, span][run.state.place[row, span] == 0]


@pytest.mark.parametrize("source", ["model", "early_exit"])
def test_a_draft_that_slept_wakes_with_a_right_cache(source):
    """Gamma 3, 0, 0, 3 with draft = target, through two compiled widths: every draft is accepted."""
    if source == "model":
        fn, drafter, params = toys.MarkovFn(VOCAB), model(), {"target": TABLE, "draft": TABLE}
    else:
        fn = toys.TwoPartFn(VOCAB)
        drafter = early_exit_drafter(fn, 1, VOCAB)
        params = {"target": {"exit": TABLE, "final": TABLE}, "draft": {}}
    result = toys.run_batch(
        fn, drafter, params, PROMPTS, rule=RULES["rejection"], gamma=3, width=(1, 4), max_new=60, vocab=VOCAB,
        temperature=1.0, controller=scripted(3, 0, 0, 3),
    )  # fmt: skip
    for row in range(len(PROMPTS)):
        assert rounds_of(result, row).tolist() == [3, 0, 0, 3] * 6
    assert result.acceptance == 1.0
    assert result.state.round.tolist() == [24] * 4  # 4 + 1 + 1 + 4 tokens in four rounds


@pytest.mark.slow
def test_a_transformer_that_slept_is_still_accepted_wholly():
    """The same on real caches, greedy: a copy of the target, asleep for 40 of every 42 rounds, catches up in pieces."""
    target = t.tiny(layers=1)
    program = t.program(target.fn, "model", target.fn, gamma=3, widths=(1, 4), controller=scripted(3, *[0] * 40, 3))
    results = t.run(program, target, target, t.prompts()[:2], 96, longest=200)
    for result in results:
        whole = result.drafted[result.place == 0]
        assert whole.tolist()[:43] == [3, *[0] * 40, 3, 3]
    assert t.acceptance(results) == 1.0


@pytest.mark.parametrize("source", [pytest.param(s, marks=[] if s == "mixed" else pytest.mark.slow) for s in SOURCES])
def test_outputs_have_the_targets_law_while_gamma_chooses_itself(source):
    """As test_law.py: what is drafted depends on what was accepted, and that must not show."""
    drafter, params = make_source(source, toys.LAW_TABLE)
    widths = (1, 2, 4)
    result = toys.law_test(
        RULES["rejection"], drafter, params, width=widths, controller=g.auto_controller(toys.LAW_GAMMA, widths),
        costs=costs(0.3, gamma=toys.LAW_GAMMA),
    )  # fmt: skip
    assert result.acceptance <= 0.95
    assert result.p_value > 1e-5


def test_a_hopeless_draft_costs_no_more_than_the_account_allows():
    """A draft that is never right: cost by the table, of a row alone, within ALLOWANCE steps and RATE of its tokens."""
    given = costs(0.1)
    result = run(-TABLE, given, [[2, 3]], max_new=200)
    drafted = rounds_of(result)
    assert result.acceptance == 0
    assert result.outputs[0] == toy_laws.greedy_chain(TABLE, [2, 3], 200)
    verify = np.asarray(given.verify)[np.searchsorted(WIDTHS, drafted + 1)]
    total = float(np.sum(verify + 0.1 * drafted))
    assert 0 < np.count_nonzero(drafted) < 60
    assert np.count_nonzero(drafted[100:]) > 0  # it goes on trying
    assert total <= 200 + g.ALLOWANCE + g.RATE * 200


def test_a_draft_that_cannot_pay_is_never_asked():
    """A draft step as dear as the target's: even full acceptance gains nothing."""
    result = run(TABLE, costs(1.0))
    assert result.state.round.tolist() == [NEW] * 4
    assert np.count_nonzero(result.state.drafted) == 0


def test_where_verification_is_dear_gamma_falls_to_zero():
    """A large batch, as it were."""
    result = run(TABLE, costs(0.02, verify=(1.0, 4.0, 8.0)))
    assert np.count_nonzero(result.state.drafted) == 0


def test_a_perfect_draft_soon_drafts_as_much_as_it_may():
    drafted = rounds_of(run(TABLE, costs(0.02), [[2, 3]]))
    assert drafted[-2] == GAMMA
    assert len(drafted) < NEW / 4


def test_no_row_drafts_past_its_limit():
    """Under auto alone: elsewhere a larger budget must not change a sampled text."""
    result = run(TABLE, costs(0.02), max_new=[1, 2, 3, 30])
    assert [rounds_of(result, row).tolist() for row in range(3)] == [[0], [1], [2]]


@pytest.mark.slow
def test_each_row_has_a_history_of_its_own_and_a_call_repeats_itself():
    draft, hot = toys.noisy(TABLE, 2.0, seed=1), {"rule": "rejection", "temperature": 1.0}
    first, second = (run(draft, costs(0.1), **hot) for _ in range(2))
    for name in ("tokens", "drafted", "accepted", "round"):
        np.testing.assert_array_equal(getattr(first.state, name), getattr(second.state, name))
    assert len(set(first.state.control.accepted.tolist())) == len(PROMPTS)
    assert 0.2 < first.acceptance < 0.95


def test_expected_tokens_are_those_of_a_geometric_acceptance():
    """alpha = 0.8, gamma = 4: 3.3616; a row with room for two drafts counts no more."""
    found = g.expected_tokens(jnp.asarray([0.8, 0.8, 0.0]), jnp.asarray([7, 2, 7]), 4)
    np.testing.assert_allclose(found[0], [(1 - 0.8 ** (d + 1)) / 0.2 for d in range(5)], rtol=1e-6)
    assert found[0, 4] == pytest.approx(3.3616)
    np.testing.assert_allclose(found[1], [1.0, 1.8, 2.44, 2.44, 2.44], rtol=1e-6)
    np.testing.assert_array_equal(found[2], np.ones(5))


def bits(result) -> tuple[list[int], bytes]:
    return result.ids.tolist(), np.asarray(result.logprobs, np.float32).tobytes()


@pytest.mark.slow
def test_at_one_width_gamma_changes_no_bit():
    """Whatever is drafted, ids and log-probabilities are those of plain decoding at that width."""
    target, draft = t.tiny(layers=1), t.tiny(t.MID, layers=1)
    plain = t.program(target.fn, width=8)
    auto = t.program(target.fn, "model", draft.fn, gamma=7, width=8, exact=True, controller=g.auto_controller(7, (8,)))
    wanted = [bits(result) for result in t.run(plain, target, None, t.prompts(), 40)]
    results = t.run(auto, target, draft, t.prompts(), 40, costs=costs(0.1, verify=(1.0,)))
    assert [bits(result) for result in results] == wanted
    assert len({int(d) for result in results for d in result.drafted}) > 2
    assert 0.05 < t.acceptance(results) < 0.95


def test_no_cache_is_copied_whole_where_widths_are_chosen():
    """A lax.switch would copy them in each round."""
    target, draft = t.tiny(layers=1), t.tiny(t.MID, layers=1)
    program = t.program(
        target.fn, "model", draft.fn, gamma=7, widths=WIDTHS, check=False, controller=g.auto_controller(7, WIDTHS)
    )
    params = {"target": target.params, "draft": draft.params, "costs": costs()}
    state = program.empty(params, 4, 300)
    text = program._step.lower(params, state, np.int32(3)).compile().as_text()
    for cache in (state.cache, state.draft):
        shape = ",".join(str(n) for n in cache.k[0].shape)
        assert f"f32[{shape}]" in text
        assert re.findall(rf"^.*f32\[{shape}\]\S* copy\(.*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("width", [(1, 2, 4, 8), (4, 1), (), (0, 8), (2, 4)])
def test_widths_that_cannot_be_are_refused(width):
    with pytest.raises(ValueError, match="width"):
        widths_of(7, width)


def test_the_program_is_no_larger_for_a_larger_gamma():
    """Compile time does not grow with gamma: neither does what is compiled."""
    target, draft = t.tiny(layers=1), t.tiny(t.MID, layers=1)
    sizes = []
    for gamma in (2, 32):
        program = t.program(target.fn, "model", draft.fn, gamma=gamma, width=gamma + 1, rule="rejection", check=False)
        params = {"target": target.params, "draft": draft.params}
        text = program._step.lower(params, program.empty(params, 1, 100), np.int32(3)).as_text()
        sizes.append(len(re.findall(r"^\s*%", text, re.MULTILINE)))
    assert sizes[1] <= 1.05 * sizes[0]
