"""The engine when the device fails: rows go on from their confirmed ids as if nothing had been."""

from __future__ import annotations

from dataclasses import replace

import faulty as f
import jax
import numpy as np
import pytest
import tiny as t
from test_engine import BUDGETS, DRAFT, PROMPTS, TABLE, TARGET, TEMPERATURES, Cut, program, same

from specjax.constraint import automaton
from specjax.engine import Engine, Request, Result
from specjax.generate import Program, Prompt
from specjax.sampling import SamplingParams, row_key
from specjax.sampling_params import Features
from specjax.types import Finish
from specjax.verify import RULES

PARAMS = {"target": TABLE, "draft": DRAFT.params}


def requests(watchers=None) -> list[Request]:
    """Return ten rows of all lengths and temperatures."""
    return [
        Request(
            i,
            Prompt(prompt, len(prompt) + budget, (), row_key(0, i), SamplingParams(temperature=temperature)),
            None if watchers is None else watchers[i],
        )
        for i, (prompt, budget, temperature) in enumerate(zip(PROMPTS, BUDGETS, TEMPERATURES, strict=True))
    ]


def engine_of(made, batch_size: int = 4, **options) -> Engine:
    return Engine(made, PARAMS, batch_size=batch_size, longest=100, **options)


def drain(engine: Engine, rows: list[Request], **options) -> dict[int, Result]:
    """Run rows; each comes once."""
    results = list(engine.run(rows, chunk=2, **options))
    assert sorted(result.key for result in results) == sorted(row.key for row in rows)
    return {result.key: result for result in results}


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, Result]:
    return drain(engine_of(program()), requests())


@pytest.mark.parametrize(("message", "slots"), [(f.INTERNAL, 4), (f.MEMORY, 1)])
def test_after_the_device_failed_rows_go_on_as_they_would_have(undisturbed, message, slots):
    """Invariant 13: the donated caches are gone. When memory was the reason, half the slots are left."""
    engine = engine_of(f.Faulty(program(), fail={2, 5}, message=message))
    for key, result in drain(engine, requests()).items():
        same(result, undisturbed[key])
    assert (engine.num_failures, engine.batch_size) == (2, slots)
    assert engine.num_rebuilt >= 4


def test_a_failure_that_shows_only_when_results_are_read_is_met_too(undisturbed, monkeypatch):
    made = program()
    engine = engine_of(made)
    wait, calls = engine.pace.wait, []

    def fail(view):
        calls.append(view)
        if len(calls) in (2, 6):
            raise jax.errors.JaxRuntimeError(f.INTERNAL)
        wait(view)

    monkeypatch.setattr(engine.pace, "wait", fail)
    for key, result in drain(engine, requests()).items():
        same(result, undisturbed[key])
    assert engine.num_failures == 2


def test_what_a_watcher_was_shown_is_not_shown_again(undisturbed):
    cuts = [Cut(100) for _ in PROMPTS]
    engine = engine_of(f.Faulty(program(), fail={2, 3, 6}))
    results = drain(engine, requests(cuts))
    whole = [key for key, result in results.items() if result.error is None]
    assert len(whole) == 6  # the four that ran failed twice
    for key in whole:
        assert cuts[key].shown == undisturbed[key].ids.tolist()
        same(results[key], undisturbed[key])


def test_rows_that_meet_an_error_twice_end_with_it_and_the_others_go_on(undisturbed):
    engine = engine_of(f.Faulty(program(), fail={3, 4}))
    results = drain(engine, requests())
    failed = {key for key, result in results.items() if result.error}
    assert 1 <= len(failed) <= 4
    for key, result in results.items():
        if key not in failed:
            same(result, undisturbed[key])
            continue
        assert (result.finish, "INTERNAL" in result.error) == (Finish.ERROR, True)
        np.testing.assert_array_equal(result.ids, undisturbed[key].ids[: len(result.ids)])
        assert len(result.place) == len(result.ids)


def test_an_engine_without_any_working_device_ends_every_row_with_an_error():
    results = drain(engine_of(f.Faulty(program(), fail=range(1000))), requests())
    assert all(result.error and not len(result.ids) for result in results.values())


def test_a_row_that_cannot_be_rebuilt_ends_alone(undisturbed):
    def fourth(prompt) -> bool:
        return list(prompt.ids) == PROMPTS[4]

    engine = engine_of(f.Faulty(program(), fail={3}, fail_restored=fourth), batch_size=10)
    results = drain(engine, requests())
    for key, result in results.items():
        if key == 4:
            assert "cannot be rebuilt" in result.error
            assert 0 < len(result.ids) < BUDGETS[4]
        else:
            same(result, undisturbed[key])


def test_a_row_whose_prompt_cannot_be_prefilled_ends_alone(undisturbed):
    engine = engine_of(f.Faulty(program(), fail_row=lambda prompt: list(prompt.ids) == PROMPTS[2]))
    results = drain(engine, requests())
    assert "cannot be rebuilt" in results[2].error
    for key in results.keys() - {2}:
        same(results[key], undisturbed[key])


@pytest.mark.parametrize(("which", "by"), [("cache", 1), ("cache", -1), ("cache", 3), ("draft", 2), ("draft", -2)])
def test_a_cache_out_of_step_is_found_and_rebuilt_and_nothing_changes(undisturbed, which, by):
    """Injected before the second chunk; a length that is wrong then would be hidden by the chunk's own rollback."""

    def change(number, state):
        return replace(state, **{which: f.longer(getattr(state, which), 2, by)}) if number == 1 else state

    engine = engine_of(f.Faulty(program(), change=change), batch_size=10)
    results = drain(engine, [row for row in requests() if row.prompt.limit - len(row.prompt.ids) > 8])
    for key, result in results.items():
        same(result, undisturbed[key])
    assert (engine.num_rebuilt, engine.num_failures) == (1, 0)


@pytest.mark.slow
def test_a_rebuilt_row_remembers_what_penalties_and_constraints_look_at():
    """Without its counts, or with the constraint at its start, it would go on otherwise."""
    table = np.random.default_rng(1).integers(0, 3, size=(3, 8)).astype(np.int32)
    table[np.arange(3), np.arange(3)] = -1  # in each state another token is excluded
    features = Features(penalties=True, constraint=automaton(table), sequences=(1, 2))
    made = Program(TARGET.fn, t.drafter("model", DRAFT.fn, 8), rule=RULES["rejection"], gamma=3, vocab_size=8,
                   features=features, check=True)  # fmt: skip
    settings = {"presence_penalty": 2.0, "repetition_penalty": 1.5, "ban_sequences": [(5, 6)]}
    rows = [
        Request(i, Prompt(ids, len(ids) + 30, (), row_key(0, i), SamplingParams(temperature=i / 2, **settings)))
        for i, ids in enumerate(PROMPTS[:4])
    ]
    whole = drain(engine_of(made), rows)
    found = drain(engine_of(f.Faulty(made, fail={2, 6})), rows)
    free = drain(engine_of(program()), [row for row in requests() if row.key == 0])
    for i in range(4):
        assert found[i].status == 0
        assert found[i].ids.tolist() == whole[i].ids.tolist()
    assert whole[0].ids.tolist()[:20] != free[0].ids.tolist()


def test_a_row_that_loses_step_again_and_again_ends_alone(undisturbed):
    def change(number, state):
        return replace(state, cache=f.longer(state.cache, 0, 1))

    engine = engine_of(f.Faulty(program(), change=change), batch_size=2)
    results = drain(engine, [requests()[0], requests()[4]])
    assert "again and again" in results[0].error
    same(results[4], undisturbed[4])


def test_out_of_memory_before_the_first_chunk_is_left_to_a_caller_who_can_drop_the_draft(undisturbed):
    rows = requests()
    engine = engine_of(f.Faulty(program(), fail={0}, message=f.MEMORY), draft_can_go=True)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        list(engine.run(rows))
    for key, result in drain(engine, rows).items():  # and can be used again
        same(result, undisturbed[key])


def test_slots_that_cannot_be_made_are_halved_until_they_can(undisturbed):
    made = program()

    class Small(f.Faulty):
        def empty(self, params, batch, longest):
            if batch > 2:
                raise MemoryError
            return made.empty(params, batch, longest)

    engine = engine_of(Small(made), batch_size=8)
    for key, result in drain(engine, requests()).items():
        same(result, undisturbed[key])
    assert engine.batch_size == 2


@pytest.mark.slow
def test_a_rebuilt_row_of_a_transformer_has_the_same_bits_at_one_width():
    """Its output's entries are written by steps of the same width as before."""
    target, draft = t.tiny(layers=1), t.tiny(t.MID, layers=1)
    made = t.program(target.fn, "model", draft.fn, gamma=3, width=6, rule="coupled")
    params = {"target": target.params, "draft": draft.params}
    rows = [
        Request(i, Prompt(ids, len(ids) + 40, (), row_key(0, i), SamplingParams(temperature=0.7)))
        for i, ids in enumerate(t.prompts())
    ]
    whole, broken = (
        {result.key: result for result in Engine(one, params, batch_size=4, longest=200).run(rows, chunk=2)}
        for one in (made, f.Faulty(made, fail={3}))
    )
    for i in range(4):
        assert whole[i].ids.tolist() == broken[i].ids.tolist()
        np.testing.assert_array_equal(whole[i].logprobs, broken[i].logprobs)
    assert 0.1 < t.acceptance(list(whole.values())) < 0.95
