"""Bit-exact at one width (invariant 8b): ids and log-probability bits do not depend on the draft, gamma, batch,
place or capacity."""

from __future__ import annotations

import numpy as np
import pytest
import tiny as t

WIDTH = 8
NEW = 40
ALONE, WIDE = ((0, 1, 2, 3), 1, 200), ((1, 3, 2, 0), 4, 1000)


def bits(result) -> tuple[list[int], bytes]:
    return result.ids.tolist(), np.asarray(result.logprobs, np.float32).tobytes()


def decode(dtype: str, source: str, gamma: int, order, batch: int, longest: int, rule: str, temperature: float):
    draft = t.tiny(t.MID, dtype) if source == "model" else None
    program = t.program(
        t.tiny(dtype=dtype).fn, source, None if draft is None else draft.fn, gamma=gamma, width=WIDTH, rule=rule
    )
    results = t.run(
        program, t.tiny(dtype=dtype), draft, [t.prompts()[i] for i in order], NEW,
        ids=list(order), batch_size=batch, longest=longest, temperature=temperature,
    )  # fmt: skip
    return {i: bits(result) for i, result in zip(order, results, strict=True)}, results


def test_a_draft_a_batch_and_a_capacity_change_no_bit():
    wanted, _ = decode("bfloat16", "none", 0, *ALONE, "coupled", 0.8)
    found, results = decode("bfloat16", "model", 4, *WIDE, "coupled", 0.8)
    assert found == wanted
    assert 0 < t.acceptance(results) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rule", "temperature"), [("greedy", 0.0), ("coupled", 0.8)])
def test_ids_and_log_probabilities_are_the_same_bits(dtype, rule, temperature):
    options = (rule, temperature)
    wanted, _ = decode(dtype, "none", 0, *ALONE, *options)
    assert decode(dtype, "none", 0, (3, 1, 0, 2), 4, 1000, *options)[0] == wanted
    rates = []
    # Every gamma of the width; the dearest of all tests, so each place and capacity meets some of them.
    ways = [("ngram", 4), *(("model", gamma) for gamma in range(1, WIDTH))]
    for i, (source, gamma) in enumerate(ways):
        for order, batch, longest in {0: (ALONE, WIDE), 4: (ALONE, ((2, 0, 3, 1), 4, 200), WIDE)}.get(i, (WIDE,)):
            found, results = decode(dtype, source, gamma, order, batch, longest, *options)
            assert found == wanted, f"{source}, gamma {gamma}, batch {batch}, longest {longest}"
        rates.append(t.acceptance(results))
    assert 0.2 < rates[1] < 0.9  # a noisy copy, one token drafted a round
    assert all(0 < rate < 0.9 for rate in rates[2:])


@pytest.mark.parametrize("width", [5, *(pytest.param(w, marks=pytest.mark.slow) for w in (2, 3, 4, 6, 7))])
def test_a_batch_changes_no_bit_at_a_smaller_width(width):
    program = t.program(t.tiny().fn, width=width, exact=True)
    together = t.run(program, t.tiny(), None, t.prompts(), 24)
    for i, prompt in enumerate(t.prompts()[:2]):
        (alone,) = t.run(program, t.tiny(), None, [prompt], 24, ids=[i], batch_size=1)
        np.testing.assert_array_equal(alone.ids, together[i].ids)
        np.testing.assert_array_equal(alone.logprobs, together[i].logprobs)
