"""Slots: refill, watchers, faults. On the toy, where every bit is exact whatever the batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import tiny as t
import toy_laws
import toys

from specjax.engine import Engine, Request
from specjax.generate import Prompt
from specjax.sampling import SamplingParams, row_key
from specjax.types import Finish, Status

VOCAB, GAMMA = 8, 3
TABLE = toys.table(VOCAB, seed=4, sharpness=1.5)
TARGET = t.Tiny(toys.MarkovFn(VOCAB), TABLE)  # type: ignore[arg-type]
DRAFT = t.Tiny(toys.MarkovFn(VOCAB), toys.noisy(TABLE, 1.0, seed=5))  # type: ignore[arg-type]
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, VOCAB, size=size).tolist() for size in (1, 5, 40, 2, 33, 7, 1, 12, 3, 20)]
BUDGETS = [20, 3, 11, 0, 30, 1, 17, 5, 9, 2]
TEMPERATURES = [0.0, 1.0, 0.7, 0.3, 0.0, 1.0, 1.0, 0.0, 0.5, 1.0]


def program(source: str = "model", rule: str = "rejection"):
    return t.program(TARGET.fn, source, DRAFT.fn, gamma=GAMMA, vocab=VOCAB, rule=rule)


run = functools.partial(t.run, longest=100)


def same(a, b) -> None:
    for name in ("ids", "place", "accepted", "drafted", "logprobs"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert (a.finish, a.status, a.draft_on) == (b.finish, b.status, b.draft_on)


@pytest.mark.parametrize(
    ("rule", "batch_size"),
    [
        ("rejection", 1),
        ("coupled", 3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("rejection", 3), ("block", 1), ("coupled", 1))),
    ],
)
def test_rows_are_the_same_whatever_the_batch_the_place_and_the_mates(rule, batch_size):
    """Case 35: ten rows through few slots, all at once, and turned around."""
    options = {"temperature": TEMPERATURES}
    whole = run(program(rule=rule), TARGET, DRAFT, PROMPTS, BUDGETS, batch_size=16, **options)
    few = run(program(rule=rule), TARGET, DRAFT, PROMPTS, BUDGETS, batch_size=batch_size, chunk=3, **options)
    for a, b in zip(whole, few, strict=True):
        same(a, b)
    assert [len(r.ids) for r in whole] == BUDGETS
    assert all(r.finish == Finish.LENGTH for r in whole)
    for i in (0, 4, 7):
        assert tuple(whole[i].ids.tolist()) == toy_laws.greedy_chain(TABLE, PROMPTS[i], BUDGETS[i])
    order = list(range(9, -1, -1))
    turned = run(
        program(rule=rule),
        TARGET,
        DRAFT,
        [PROMPTS[i] for i in order],
        [BUDGETS[i] for i in order],
        temperature=[TEMPERATURES[i] for i in order],
        ids=order,
        batch_size=16,
    )
    for place, i in enumerate(order):
        same(turned[place], whole[i])


def test_seeds_ids_and_samples_have_draws_of_their_own():
    """Cases 35 and 37: one prompt, 32 samples; ids 1 and "1"; two seeds."""
    engine = Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=8, longest=100)

    def draw(seed: int, names: Sequence[tuple[int | str, int]]) -> dict:
        hot = SamplingParams(temperature=1.0)
        rows = [Request(name, Prompt([1, 2], 32, (), row_key(seed, *name), hot)) for name in names]
        return {result.key: tuple(result.ids.tolist()) for result in engine.run(rows)}

    names = [(1, sample) for sample in range(32)] + [("1", 0)]
    first = draw(0, names)
    assert len(set(first.values())) == 33
    assert draw(0, names[::-1]) == first
    assert not set(draw(1, names).values()) & set(first.values())


class Cut:
    """Ends its row after ``count`` tokens, whenever it sees them; notes what it was shown."""

    def __init__(self, count: int):
        self.count, self.shown = count, []

    def push(self, ids: Sequence[int]) -> int | None:
        self.shown += ids
        return self.count if len(self.shown) >= self.count else None


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_a_watcher_ends_its_row_inside_a_block(chunk):
    """Case 39: ids, log-probabilities and records are cut alike; mates and the slot's next row are untouched."""
    whole = run(program(), TARGET, DRAFT, PROMPTS, 30, temperature=TEMPERATURES)
    cuts = [Cut(n) if n else None for n in (1, 2, 3, 5, 8, 0, 13, 30, 29, 0)]
    found = run(
        program(), TARGET, DRAFT, PROMPTS, 30, temperature=TEMPERATURES, watchers=cuts, chunk=chunk, batch_size=3
    )
    for row, (cut, result, complete) in enumerate(zip(cuts, found, whole, strict=True)):
        if cut is None:
            same(result, complete)
            continue
        assert result.finish == Finish.STOP, row
        for name in ("ids", "place", "accepted", "drafted", "logprobs"):
            np.testing.assert_array_equal(getattr(result, name), getattr(complete, name)[: cut.count])
        assert cut.shown == complete.ids[: len(cut.shown)].tolist()


def test_the_chunks_counts_add_up_to_the_ids():
    counts: list[int] = []
    engine = Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=3, longest=100)
    cuts = {2: Cut(7), 5: Cut(1)}
    rows = [
        Request(i, Prompt(prompt, len(prompt) + 15, (), row_key(0, i)), cuts.get(i)) for i, prompt in enumerate(PROMPTS)
    ]
    results = list(engine.run(rows, chunk=2, on_chunk=counts.append))
    assert sum(counts) == sum(len(r.ids) for r in results) == 8 * 15 + 7 + 1


def test_a_closed_engine_says_so():
    with Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=2, longest=100) as engine:
        row = Request(0, Prompt([1], 5, (), row_key(0, 0)))
        assert len(list(engine.run([row]))) == 1
    with pytest.raises(RuntimeError, match="closed"):
        list(engine.run([row]))


def test_no_requests_give_no_results():
    engine = Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=2, longest=100)
    assert list(engine.run([])) == []


def test_a_row_longer_than_the_engine_was_made_for_is_refused():
    """Its writes would be clamped onto its own valid entries."""
    engine = Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=2, longest=100)
    with pytest.raises(ValueError, match="limit of 101"):
        list(engine.run([Request(0, Prompt([1], 101, (), row_key(0, 0)))]))


def test_a_target_without_finite_logits_ends_its_row_alone():
    """Case: the context (3, 3) has NaN; ids before it stay, mates and the slot's next rows are right."""
    broken = np.array(TABLE)
    broken[3, 3] = np.nan
    target = t.Tiny(TARGET.fn, broken)
    prompts = [[1, 2], [3, 3], [1, 2], [5, 6], [2, 1]]
    whole = run(program(), TARGET, DRAFT, prompts, 40, temperature=0.0)
    found = run(program(), target, DRAFT, prompts, 40, temperature=0.0, batch_size=2)
    for prompt, right, result in zip(prompts, whole, found, strict=True):
        text = [*prompt, *right.ids.tolist()]
        met = next((i + 2 for i in range(len(text) - 1) if text[i : i + 2] == [3, 3]), None)
        if met is None:
            same(result, right)
            continue
        assert (result.finish, bool(result.status & Status.TARGET_NOT_FINITE)) == (Finish.ERROR, True)
        assert result.ids.tolist() == text[len(prompt) : max(met, len(prompt))]
    assert found[1].ids.tolist() == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_without_finite_logits_is_given_up_for_its_row(temperature):
    broken = np.array(DRAFT.params)
    broken[4, 1] = np.nan
    prompts = [[4, 1], [2, 2]]
    plain = t.program(TARGET.fn, vocab=VOCAB, rule="rejection")
    wanted = run(plain, TARGET, None, prompts, 25, temperature=temperature)
    found = run(program(), TARGET, t.Tiny(DRAFT.fn, broken), prompts, 25, temperature=temperature)
    assert found[0].ids.tolist() == wanted[0].ids.tolist()
    assert not found[0].drafted.any()
    assert not found[0].draft_on
    assert found[0].status == Status.DRAFT_NOT_FINITE
    assert len(found[1].ids) == 25


def row_of(i: int, budget: int = 30, temperature: float = 1.0, watcher=None) -> Request:
    prompt = PROMPTS[i]
    sampling = SamplingParams(temperature=temperature)
    return Request(i, Prompt(prompt, len(prompt) + budget, (), row_key(0, i), sampling), watcher)


def engine_of(batch_size: int = 3) -> Engine:
    return Engine(program(), {"target": TABLE, "draft": DRAFT.params}, batch_size=batch_size, longest=100)


def test_the_next_chunk_is_dispatched_before_the_last_one_is_waited_for(monkeypatch):
    events: list[str] = []
    engine, made = engine_of(), program()
    step, wait = made.step, engine.pace.wait
    monkeypatch.setattr(made, "step", lambda *a: (events.append("step"), step(*a))[1])
    monkeypatch.setattr(engine.pace, "wait", lambda view: (events.append("wait"), wait(view))[1])
    assert len(list(engine.run([row_of(i) for i in range(4)], chunk=3))) == 4
    assert events[:5] == ["step", "step", "wait", "step", "wait"]
    assert events.count("step") == events.count("wait")


def test_a_cancelled_row_has_a_prefix_and_its_slot_goes_on():
    whole = {result.key: result for result in engine_of().run([row_of(i) for i in range(5)])}
    engine = engine_of(2)
    found = {}

    def look(count: int) -> None:
        if engine.num_chunks == 2:
            assert engine.cancel(0)
            assert not engine.cancel("nobody")

    for result in engine.run([row_of(i) for i in range(5)], chunk=2, on_chunk=look):
        found[result.key] = result
    assert found[0].finish == Finish.CANCELLED
    count = len(found[0].ids)
    assert 0 < count < 30
    np.testing.assert_array_equal(found[0].ids, whole[0].ids[:count])
    for i in range(1, 5):
        same(found[i], whole[i])
    assert engine.waste.num_tokens > 0
    assert engine.waste.num_draft_tokens >= engine.waste.num_tokens / (GAMMA + 1)


def test_a_change_of_sampling_holds_from_the_next_dispatched_chunk_on():
    """Before it the row is what it was; after it, at temperature 0, it is the greedy chain of what stands there."""
    whole = {result.key: result for result in engine_of().run([row_of(i) for i in range(3)])}
    engine = engine_of()
    lengths: list[int] = []

    def look(count: int) -> None:
        lengths.append(engine._slots[1].seen if engine._slots[1] else 0)
        if engine.num_chunks == 1:
            assert engine.change(1, SamplingParams(temperature=0.0))
            assert not engine.change("nobody", SamplingParams())

    found = {result.key: result for result in engine.run([row_of(i) for i in range(3)], chunk=1, on_chunk=look)}
    same(found[0], whole[0])
    same(found[2], whole[2])
    changed = lengths[1]  # the chunk in flight when it was asked for is the last one of before
    ids = found[1].ids.tolist()
    assert ids[:changed] == whole[1].ids.tolist()[:changed]
    assert ids[changed:] == list(toy_laws.greedy_chain(TABLE, PROMPTS[1] + ids[:changed], 30 - changed))
    assert ids != whole[1].ids.tolist()
    greedy = Engine(t.program(TARGET.fn, vocab=VOCAB), {"target": TABLE, "draft": {}}, batch_size=1, longest=100)
    with pytest.raises(ValueError, match="greedy"):
        greedy.change(0, SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="no penalties, sequences"):
        engine.change(0, SamplingParams(presence_penalty=1.0, ban_sequences=[(1, 2)]))


def test_an_abandoned_run_leaves_a_usable_engine():
    engine = engine_of()
    rows = [row_of(i) for i in range(6)]
    first = next(iter(engine.run(rows)))
    assert list(engine.run(rows, stop=lambda: True)) == []
    found = {result.key: result for result in engine.run(rows)}
    assert len(found) == 6
    same(found[first.key], first)


def test_chunks_of_chosen_length_change_nothing():
    rows = [row_of(i) for i in range(6)]
    whole = {result.key: result for result in engine_of().run(rows, chunk=64)}
    engine = engine_of()
    for result in engine.run(rows):
        same(result, whole[result.key])
    assert engine.num_chunks > 3
    assert 1 <= engine.pace.chunk <= 64
    assert engine.pace.host_seconds > 0
    assert 0 <= engine.pace.idle_seconds <= engine.pace.host_seconds + engine.pace.wait_seconds
