"""A shared prompt prefix: prefilled once, and no bit differs from prompts that are prefilled whole."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest
import tiny as t

from specjax import prefill
from specjax.engine import Engine, Request
from specjax.generate import Prompt
from specjax.models import scan
from specjax.sampling import row_key

RNG = np.random.default_rng(0)
PREFIX = RNG.integers(0, 320, size=600).tolist()
OTHER = RNG.integers(0, 320, size=300).tolist()
# What follows it, or stands in its place: all of it and more, less than a piece of it, exactly so much, something else.
PROMPTS = [PREFIX + OTHER[:9], PREFIX[:513], PREFIX[:300] + OTHER, PREFIX[:256], PREFIX[:257], PREFIX[:90], OTHER]
PIECES = [2, 2, 1, 0, 1, 0, 0]


@functools.cache
def parts():
    target, draft = t.tiny(layers=1), t.tiny(t.MID, layers=1)
    program = t.program(target.fn, "model", draft.fn, gamma=3)
    return program, {"target": target.params, "draft": draft.params}


def test_whole_pieces_of_a_prefix_are_taken():
    program, params = parts()
    held = program.prefix(params, PREFIX)
    assert held is not None
    assert len(held.ids) == 512 == 2 * prefill.PIECE
    found = [held.of(ids) for ids in PROMPTS]
    assert [0 if part is None else int(part.num_pieces) for part in found] == PIECES
    assert program.prefix(params, PREFIX[:255]) is None


@pytest.mark.slow
def test_rows_are_the_same_bits_with_a_prefix_and_without():
    program, params = parts()
    rows = [Request(i, Prompt(ids, len(ids) + 12, (), row_key(0, i))) for i, ids in enumerate(PROMPTS)]
    results = []
    for prefix in ([], PREFIX):
        engine = Engine(program, params, batch_size=3, longest=640, prefix=prefix)
        results.append({result.key: result for result in engine.run(rows, chunk=2)})
    for i in range(len(PROMPTS)):
        assert results[0][i].ids.tolist() == results[1][i].ids.tolist()
        np.testing.assert_array_equal(results[0][i].logprobs, results[1][i].logprobs)
        assert len(results[0][i].ids) == 12


@functools.cache
def scanned():
    """Return a program whose layers run in a loop, over a cache of another shape."""
    target = t.tiny(layers=2)
    fn = dataclasses.replace(target.fn, scan_layers=True)
    return t.program(fn), {"target": scan.stack(fn.config, target.params), "draft": {}}


@pytest.mark.parametrize(("i", "made"), [(0, parts), (2, parts), (2, scanned)])
def test_the_cache_of_a_row_is_the_same_bits(i, made):
    program, params = made()
    prompt = Prompt(PROMPTS[i], 640, (), row_key(0, i))
    whole, shared = (program.row(params, prompt, held) for held in (None, program.prefix(params, PREFIX)))
    count = len(PROMPTS[i]) - 1
    assert whole.cache.length.tolist() == shared.cache.length.tolist() == [count]
    for a, b in zip(whole.cache.k + whole.cache.v, shared.cache.k + shared.cache.v, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[..., :count, :], np.asarray(b)[..., :count, :])
