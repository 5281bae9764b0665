"""n-gram lookup against a brute-force search in plain Python."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import keys_of

from specjax.draft import ngram_drafter
from specjax.types import DraftView, RowSampling

CAPACITY, GAMMA, BATCH = 24, 4, 8


def brute_force(tokens: list[int], gamma: int, min_n: int, max_n: int) -> list[int]:
    """Return what followed the longest, of equally long ones the most recent, earlier match of the last n tokens."""
    for n in range(max_n, min_n - 1, -1):
        if len(tokens) < n:
            continue
        suffix = tokens[len(tokens) - n :]
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == suffix:
                return tokens[end : end + gamma]
    return []


@functools.cache
def compiled(min_n: int, max_n: int, gamma: int):
    drafter = ngram_drafter(max_n=max_n, min_n=min_n)
    return jax.jit(lambda view: drafter.propose({}, (), view, gamma, False)[0])


def look_up(rows: list[list[int]], min_n: int = 1, max_n: int = 3, gamma: int = GAMMA) -> list[list[int]]:
    rows = rows + [[0]] * (BATCH - len(rows))
    tokens = np.random.default_rng(0).integers(0, 3, size=(BATCH, CAPACITY)).astype(np.int32)  # stale past the end
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    view = DraftView(
        tokens=jnp.asarray(tokens),
        num_tokens=jnp.asarray([len(ids) for ids in rows], jnp.int32),
        sampling=RowSampling(jnp.zeros(BATCH)),
        keys=keys_of(jnp.zeros((BATCH, 2), jnp.uint32), GAMMA),
        gamma=jnp.full(BATCH, gamma, jnp.int32),
    )
    proposal = compiled(min_n, max_n, gamma)(view)
    assert proposal.probs is None
    assert np.all(proposal.finite)
    found = zip(proposal.tokens.tolist(), proposal.num_drafted.tolist(), strict=True)
    return [ids[:count] for ids, count in found]


@pytest.mark.parametrize(("min_n", "max_n"), [(1, 3), (2, 2), (2, 4), (1, 1)])
@given(rows=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY), min_size=BATCH, max_size=BATCH))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_lookup_is_that_of_a_brute_force_search(min_n, max_n, rows):
    assert look_up(rows, min_n, max_n) == [brute_force(row, GAMMA, min_n, max_n) for row in rows]


def test_the_longest_match_wins_over_a_more_recent_one():
    assert look_up([[1, 2, 3, 7, 9, 3, 8, 1, 2, 3]]) == [[7, 9, 3, 8]] + [[]] * 7


def test_of_equally_long_matches_the_most_recent_wins():
    assert look_up([[5, 1, 5, 2, 6, 5]])[0] == [2, 6, 5]


def test_the_span_ends_at_the_newest_token():
    assert look_up([[4, 4]])[0] == [4]
    assert look_up([[4, 9, 4]])[0] == [9, 4]
    assert look_up([[1, 2, 3, 4, 5, 6, 1]])[0] == [2, 3, 4, 5]


def test_no_match_drafts_nothing():
    assert look_up([[1, 2, 3], [1], [7, 8]])[:3] == [[], [], []]


def test_a_match_shorter_than_min_n_does_not_count():
    row = [1, 2, 3, 9, 3]
    assert look_up([row], min_n=1)[0] == [9, 3]
    assert look_up([row], min_n=2, max_n=3)[0] == []


def test_stale_tokens_past_the_end_are_not_matched():
    """The row's own suffix stands in what an earlier row left behind."""
    assert look_up([[2], [1], [0]])[:3] == [[], [], []]


@pytest.mark.parametrize(("max_n", "min_n"), [(3, 0), (2, 3), (0, 0)])
def test_lengths_out_of_range_are_refused(max_n, min_n):
    with pytest.raises(ValueError, match=f"min_n={min_n}, max_n={max_n}"):
        ngram_drafter(max_n=max_n, min_n=min_n)
