"""The loop on the real transformer: EOS, budgets, capacity, ragged batches, caches, seeds, faults."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
import tiny as t

from specjax.generate import Prompt, capacity_for
from specjax.models.decoder import DecoderFn
from specjax.sampling import row_key
from specjax.types import Finish, Status

GAMMA = 4


def model_program(draft: t.Tiny, **options):
    return t.program(t.tiny().fn, "model", draft.fn, **{"gamma": GAMMA, **options})


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """200 greedy tokens after each prompt, without a draft."""
    return [r.ids.tolist() for r in t.run(t.program(t.tiny().fn), t.tiny(), None, t.prompts(), 200, longest=300)]


def test_plain_decoding_gives_the_references_tokens(plain):
    assert [ids[:48] for ids in plain] == t.greedy()


@pytest.mark.parametrize(("name", "low", "high"), [(t.NEAR, 0.3, 0.9), (t.MID, 0.15, 0.7), (t.FAR, 0.04, 0.4)])
def test_speculative_text_is_plain_text(plain, name, low, high):
    draft = t.tiny(name)
    results = t.run(model_program(draft), t.tiny(), draft, t.prompts(), 60)
    assert [r.ids.tolist() for r in results] == [ids[:60] for ids in plain]
    assert low < t.acceptance(results) < high


def test_a_prompt_of_one_id_is_decoded_as_plainly():
    """Case 56: the draft's first step has no second newest token."""
    draft, prompts = t.tiny(t.NEAR), [[7], [250], t.prompts()[0]]
    program = t.program(t.tiny().fn)
    plain = [r.ids.tolist() for r in t.run(program, t.tiny(), None, prompts, 40)]
    results = t.run(model_program(draft), t.tiny(), draft, prompts, 40)
    assert [r.ids.tolist() for r in results] == plain
    assert 0.2 < t.acceptance(results[:2]) < 1


@pytest.mark.parametrize("gamma", [4, *(pytest.param(g, marks=pytest.mark.slow) for g in (1, 2, 3, 5, 6, 7, 8))])
def test_a_draft_that_is_the_target_is_always_accepted(plain, gamma):
    """Case 3: a draft cache that lost an entry after a fully accepted round would show as less."""
    results = t.run(model_program(t.tiny(), gamma=gamma), t.tiny(), t.tiny(), t.prompts(), 200, longest=300)
    assert [r.ids.tolist() for r in results] == plain
    assert t.acceptance(results) == 1.0


def test_eos_at_every_offset_of_a_block_ends_the_row_there():
    """Case 1: the draft is the target, so blocks begin at tokens 0, 5, 10, ... of a row."""
    program, prompt, ids = model_program(t.tiny()), t.prompts()[3], t.greedy()[3]
    first_seen = [i for i, token in enumerate(ids) if token not in ids[:i]]
    assert {i % (GAMMA + 1) for i in first_seen} == set(range(GAMMA + 1))
    for end in first_seen:
        (result,) = t.run(program, t.tiny(), t.tiny(), [prompt], 48, eos=(ids[end],))
        assert (result.ids.tolist(), result.finish) == (ids[: end + 1], Finish.EOS)
        assert len(result.place) == len(result.accepted) == len(result.logprobs) == end + 1


@pytest.mark.parametrize("temperature", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_small_budgets_under_a_large_gamma_are_prefixes_of_a_longer_run(temperature):
    """Case 2."""
    draft, rule = t.tiny(t.MID), "greedy" if temperature == 0 else "rejection"
    program = model_program(draft, gamma=8, rule=rule)
    runs = {n: t.run(program, t.tiny(), draft, t.prompts(), n, temperature=temperature) for n in (0, 1, 2, 3, 40)}
    for n, results in runs.items():
        assert [len(r.ids) for r in results] == [n] * 4
        assert all(r.finish == Finish.LENGTH for r in results)
        assert [r.ids.tolist() for r in results] == [r.ids.tolist()[:n] for r in runs[40]]


def test_prompts_within_gamma_of_the_limit_end_there_exactly(plain):
    """Case 15 and 4: the whole capacity is asked for, and the last blocks do not fit into it."""
    draft, prompt = t.tiny(t.MID), t.prompts()[3]
    program = model_program(draft)
    longest = 128 - GAMMA - 1  # limit + width is the capacity itself
    assert capacity_for(longest, program.widths[-1]) == 128
    text = prompt + plain[3]
    for room in range(1, GAMMA + 2):
        start = text[: longest - room]
        (result,) = t.run(program, t.tiny(), draft, [start], room, longest=longest)
        assert (result.ids.tolist(), result.finish) == (text[longest - room : longest], Finish.LENGTH)


def test_caches_hold_what_a_fresh_prefill_holds():
    """Case 5: after rounds with different acceptances in each row, in float32 up to rounding."""
    draft = t.tiny(t.MID)
    program, params = model_program(draft), {"target": t.tiny().params, "draft": draft.params}
    prompts = t.prompts()
    state = program.empty(params, 4, 200)
    for slot, ids in enumerate(prompts):
        state = program.insert(params, state, Prompt(ids, 200, (), row_key(0, slot)), slot)
    state = jax.device_get(program.decode(params, state, 7))
    advanced = state.num_tokens - state.prompt_length
    assert len(set(advanced.tolist())) > 1, "all rows accepted alike"
    for slot in range(4):
        count = int(state.num_tokens[slot])
        text = state.tokens[slot, :count].tolist()
        fresh = program.insert(params, program.empty(params, 4, 200), Prompt(text, 200, (), row_key(0, slot)), slot)
        fresh = jax.device_get(fresh)
        for ours, theirs in ((state.cache, fresh.cache), (state.draft, fresh.draft)):
            valid = int(ours.length[slot])
            assert count - 2 <= valid <= count - 1
            assert theirs.length[slot] == count - 1
            for a, b in zip((*ours.k, *ours.v), (*theirs.k, *theirs.v), strict=True):
                np.testing.assert_allclose(a[slot, :, :valid], b[slot, :, :valid], rtol=0, atol=2e-4)


def test_a_row_does_not_depend_on_its_mates():
    """Case 35 and 29: alone, in any place, with hot and cold mates, the same tokens."""
    draft = t.tiny(t.MID)
    program = model_program(draft, rule="rejection")
    prompts, temperatures, names = t.prompts(), [0.0, 0.7, 1.0, 0.7], ["a", 1, "1", 7]
    together = t.run(program, t.tiny(), draft, prompts, 30, temperature=temperatures, ids=names)
    for i in range(4):
        (alone,) = t.run(
            program, t.tiny(), draft, [prompts[i]], 30, temperature=temperatures[i], ids=[names[i]], batch_size=1
        )
        assert alone.ids.tolist() == together[i].ids.tolist()
    order = [2, 0, 3, 1]
    turned = t.run(
        program, t.tiny(), draft, [prompts[i] for i in order], 30,
        temperature=[temperatures[i] for i in order], ids=[names[i] for i in order],
    )  # fmt: skip
    assert [r.ids.tolist() for r in turned] == [together[i].ids.tolist() for i in order]
    assert together[0].ids.tolist() == t.greedy()[0][:30]


def test_seeds_and_samples():
    """Case 35 and 37."""
    draft = t.tiny(t.MID)
    program, prompt = model_program(draft, rule="rejection"), t.prompts()[1]

    def draw(seed: int) -> list[tuple[int, ...]]:
        names = [("row", sample) for sample in range(32)]
        results = t.run(program, t.tiny(), draft, [prompt] * 32, 12, temperature=1.0, ids=names, seed=seed)
        return [tuple(r.ids.tolist()) for r in results]

    first, again, other = draw(0), draw(0), draw(1)
    assert first == again
    assert len(set(first)) == 32
    assert not set(first) & set(other)


def test_a_target_without_finite_logits_ends_its_row_alone(plain):
    broken = t.with_nan(t.tiny(), token=3)
    program = t.program(broken.fn, "ngram", gamma=GAMMA)
    prompts = [t.prompts()[1], [5, 3, 7], t.prompts()[2]]
    results = t.run(program, broken, None, prompts, 20, batch_size=2)
    assert results[1].finish == Finish.ERROR
    assert results[1].status & Status.TARGET_NOT_FINITE
    assert len(results[1].ids) == 0
    # The third row takes a slot that may have held NaN.
    assert [results[i].ids.tolist() for i in (0, 2)] == [plain[i][:20] for i in (1, 2)]


def test_tokens_before_the_first_bad_logits_are_kept(plain):
    row, place = next(
        (i, n) for i in (1, 2, 3) for n in range(6, 40) if plain[i][n] not in plain[i][:n] + t.prompts()[i]
    )
    broken = t.with_nan(t.tiny(), token=plain[row][place])
    draft = dataclasses.replace(broken, params={**broken.params, "embedding": t.tiny().params["embedding"]})
    program = t.program(broken.fn, "model", draft.fn, gamma=GAMMA)
    (result,) = t.run(program, broken, draft, [t.prompts()[row]], 60)
    # A draft of that token may spoil the places before it in its block: 0 * NaN. What is kept is plain's.
    count = len(result.ids)
    assert place - GAMMA <= count <= place + 1
    assert (result.ids.tolist(), result.finish) == (plain[row][:count], Finish.ERROR)


def test_a_draft_without_finite_logits_is_switched_off_for_its_row(plain):
    draft = t.with_nan(t.tiny(t.NEAR), token=3)
    program = t.program(t.tiny().fn, "model", draft.fn, gamma=GAMMA)
    prompts = [[*t.prompts()[1], 3, *t.prompts()[1]], t.prompts()[1]]
    wanted = t.run(t.program(t.tiny().fn), t.tiny(), None, prompts, 20)
    results = t.run(program, t.tiny(), draft, prompts, 20)
    assert [r.ids.tolist() for r in results] == [r.ids.tolist() for r in wanted]
    assert [r.draft_on for r in results] == [False, True]
    assert results[0].status & Status.DRAFT_NOT_FINITE
    assert not results[0].drafted.any()
    assert results[1].accepted.any()


def test_a_long_prompt_runs_in_pieces(plain):
    """Prompts past 256 tokens: several pieces, the last one partial."""
    prompt = (t.prompts()[3] * 4)[:301]
    draft = t.tiny(t.MID)
    wanted = t.run(t.program(t.tiny().fn), t.tiny(), None, [prompt], 30, longest=400)
    found = t.run(model_program(draft), t.tiny(), draft, [prompt], 30, longest=400)
    assert found[0].ids.tolist() == wanted[0].ids.tolist()
    logits, _ = t.all_logits(t.tiny().fn)(
        t.tiny().params, np.asarray([prompt], np.int32), t.tiny().fn.init_cache(1, 400)
    )
    assert int(np.argmax(logits[0, -1])) == wanted[0].ids[0]


def test_the_decoder_function_is_static():
    fn = t.tiny().fn
    assert fn == DecoderFn(fn.config, fn.dtype, fn.cache_dtype)
    assert hash(fn) == hash(DecoderFn(fn.config, fn.dtype, fn.cache_dtype))
