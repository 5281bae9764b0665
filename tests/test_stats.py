"""Counters to metrics: hand counts, the invariants of visible tokens, sums of rows."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax import stats


def columns(rounds):
    """Return place, accepted, drafted as the loop keeps them, for rounds of (visible, accepted drafts, drafted)."""
    place = [i for visible, _, _ in rounds for i in range(visible)]
    accepted = [int(i < n) for visible, n, _ in rounds for i in range(visible)]
    drafted = [k for visible, _, k in rounds for _ in range(visible)]
    return tuple(np.array(column, np.int8) for column in (place, accepted, drafted))


def count(*rounds, gamma=None, speculation="on"):
    return stats.row_stats(*columns(rounds), speculation=speculation, gamma=gamma)


def test_a_row_counted_by_hand():
    """Four rounds of gamma 4: all accepted, none, two, and one cut by EOS at its second accepted draft."""
    row = count((5, 4, 4), (1, 0, 4), (3, 2, 4), (2, 2, 4))
    assert row == {
        "num_tokens": 11,
        "num_rounds": 4,
        "num_drafts": 4,
        "num_draft_tokens": 4 + 4 + 4 + 2,
        "num_accepted_tokens": 8,
        "num_accepted_tokens_per_pos": [3, 3, 1, 1],
        "num_reached_per_pos": [4, 3, 2, 1],
        "acceptance_histogram": [1, 0, 2, 0, 1],
        "mean_acceptance_length": 1 + 8 / 4,
        "draft_acceptance_rate": 8 / 14,
        "speculation": "on",
    }
    assert stats.unconditional_rates(row) == [3 / 4, 3 / 4, 1 / 4, 1 / 4]
    assert stats.conditional_rates(row) == [3 / 4, 3 / 3, 1 / 2, 1 / 1]
    assert stats.tokens_per_target_pass(row) == 11 / 4


def test_a_cut_at_the_extra_token_counts_every_draft():
    # the rejected drafts were proposed and verified; the visible end is the round's extra token
    assert count((2, 1, 4))["num_draft_tokens"] == 4
    # one token less and the end is an accepted draft: only what is visible counts
    assert count((1, 1, 4))["num_draft_tokens"] == 1


def test_plain_decoding_has_no_drafts():
    row = count((1, 0, 0), (1, 0, 0), speculation="off: no draft")
    assert row["num_rounds"] == row["num_tokens"] == 2
    assert row["num_drafts"] == row["num_draft_tokens"] == row["num_accepted_tokens"] == 0
    assert row["mean_acceptance_length"] is None
    assert row["draft_acceptance_rate"] is None
    assert row["num_accepted_tokens_per_pos"] == []
    assert row["acceptance_histogram"] == [0]
    assert row["speculation"] == "off: no draft"


def test_plain_steps_among_speculative_rounds():
    # an n-gram draft that finds nothing proposes nothing: such a round is a target pass, not a draft
    row = count((1, 0, 0), (3, 2, 2), (1, 0, 0), (1, 0, 1), gamma=3)
    assert (row["num_rounds"], row["num_drafts"], row["num_draft_tokens"]) == (4, 2, 3)
    assert row["num_accepted_tokens_per_pos"] == [1, 1, 0]
    assert row["num_reached_per_pos"] == [2, 1, 0]
    assert row["acceptance_histogram"] == [1, 0, 1, 0]
    assert row["mean_acceptance_length"] == 2.0
    assert stats.conditional_rates(row) == [0.5, 1.0, None]
    assert stats.unconditional_rates(row) == [0.5, 0.5, 0.0]


def test_an_empty_row():
    row = count(gamma=4)
    assert row["num_tokens"] == row["num_rounds"] == 0
    assert row["num_accepted_tokens_per_pos"] == [0] * 4
    assert row["acceptance_histogram"] == [0] * 5
    assert stats.tokens_per_target_pass(row) is None
    assert stats.conditional_rates(row) == [None] * 4
    assert stats.unconditional_rates(row) == [None] * 4


@pytest.mark.parametrize(
    ("place", "accepted", "drafted", "message"),
    [
        ([0, 1], [0, 0], [4, 4], "token 1: place does not follow"),  # goes on after the extra token
        ([1], [0], [4], "token 0: place does not follow"),
        ([0, 0], [1, 1], [4, 4], "token 1: place does not follow"),  # a cut round that is not the last
        ([0, 2], [1, 1], [4, 4], "token 1: place does not follow"),
        ([0, 1], [1, 0], [4, 3], "token 1: drafted differs"),
        ([0], [1], [0], "token 0: more tokens"),
        ([0, 1, 2], [1, 1, 0], [1, 1, 1], "token 1: more tokens"),
        ([0], [2], [4], "token 0: accepted is neither"),
        ([0], [0, 0], [4], "expected one shape"),
        ([[0]], [[0]], [[4]], "expected one shape"),
    ],
)
def test_counters_that_no_loop_writes_are_refused(place, accepted, drafted, message):
    with pytest.raises(ValueError, match=message):
        stats.row_stats(place, accepted, drafted, speculation="on")


def test_a_gamma_below_the_rounds_is_refused():
    with pytest.raises(ValueError, match="gamma: got 3, expected at least 4"):
        count((5, 4, 4), gamma=3)


@st.composite
def whole_rounds(draw):
    rounds = []
    for _ in range(draw(st.integers(0, 6))):
        drafted = draw(st.integers(0, 5))
        accepted = draw(st.integers(0, drafted))
        rounds.append((accepted + 1, accepted, drafted))
    return rounds


@settings(deadline=None)
@given(whole_rounds(), st.integers(0, 40))
def test_each_visible_token_is_an_accepted_draft_or_a_rounds_extra_token(rounds, cut):
    trimmed = [column[:cut] for column in columns(rounds)]
    row = stats.row_stats(*trimmed, speculation="on", gamma=5)
    place, accepted, _ = trimmed
    extra = int((accepted == 0).sum())
    ends_in_a_draft = bool(accepted.size and accepted[-1])
    assert row["num_tokens"] == min(cut, sum(visible for visible, _, _ in rounds))
    assert row["num_tokens"] == row["num_accepted_tokens"] + extra
    assert row["num_rounds"] == extra + ends_in_a_draft == (place == 0).sum()
    assert row["num_accepted_tokens"] == sum(row["num_accepted_tokens_per_pos"])
    assert row["num_accepted_tokens"] == sum(j * rounds for j, rounds in enumerate(row["acceptance_histogram"]))
    assert row["num_drafts"] == sum(row["acceptance_histogram"])
    assert row["num_accepted_tokens"] <= row["num_draft_tokens"] <= 5 * row["num_drafts"]
    reached, per_pos = row["num_reached_per_pos"], row["num_accepted_tokens_per_pos"]
    assert reached[0] == row["num_drafts"]
    assert all(later <= earlier for later, earlier in zip(reached[1:], per_pos[:-1], strict=True))
    assert all(a <= r for a, r in zip(per_pos, reached, strict=True))


@settings(deadline=None)
@given(st.lists(whole_rounds(), min_size=1, max_size=4))
def test_merged_rows_are_one_long_row(rows):
    merged = stats.merge_stats([count(*rounds) for rounds in rows])
    assert merged == count(*(a_round for rounds in rows for a_round in rounds))


def test_merging_pads_lists_and_names_each_speculation():
    merged = stats.merge_stats(
        [count((3, 2, 2)), count((1, 0, 0), speculation="off: draft not found"), count((1, 0, 1))]
    )
    assert merged["num_accepted_tokens_per_pos"] == [1, 1]
    assert merged["acceptance_histogram"] == [1, 0, 1]
    assert merged["draft_acceptance_rate"] == 2 / 3
    assert merged["speculation"] == "off: draft not found (1 rows); on (2 rows)"


def test_merging_nothing():
    merged = stats.merge_stats([])
    assert merged == stats.row_stats([], [], [], speculation="off: no rows")


def test_stats_are_plain_values():
    row = count((5, 4, 4), (1, 0, 4))
    assert json.loads(json.dumps(row)) == row
