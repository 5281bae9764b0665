"""The pair that ships: its size, its cards, what its draft is worth on openings it has not seen."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import specjax
from specjax import SamplingParams
from specjax.pair import Pair
from specjax.pair_names import EMBEDDED_PAIR

WEIGHTS = Path(specjax.__file__).parent / "weights"
FOLDERS = ("tiny", "tiny-draft")
OPENINGS = (
    "Once upon a time, there was a little",
    "One day, a small bird found a red",
    "The old man had a boat and he",
    "Tom and his sister went to the",
    "It was a cold night, and the",
    "A brave mouse wanted to see the",
    "Every morning, the cat would",
    "In a quiet village, a girl named",
    "The sun was bright and the children",
    "A frog sat by the pond and",
    "The little boy had a secret",
    "Deep in the forest, a bear",
)


@functools.cache
def pair(draft: str | None = None) -> Pair:
    return specjax.load(draft=draft, pair=EMBEDDED_PAIR, dtype="float32", require_draft=True)


def first_accepted(outputs: list[specjax.Output]) -> float:
    """Return how often the first draft of a round was accepted."""
    drafts = sum(out.stats["num_drafts"] for out in outputs)
    none = sum(out.stats["acceptance_histogram"][0] for out in outputs)
    assert drafts > 200
    return 1 - none / drafts


def test_it_is_small_and_says_how_it_was_made():
    files = [path for name in FOLDERS for path in (WEIGHTS / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    for name in FOLDERS:
        card = (WEIGHTS / name / "README.md").read_text()
        for word in ("Apache-2.0", "SmolLM2-135M-Instruct", "[student.config]", "validation"):
            assert word in card, (name, word)


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 0.7), (1.0, 0.6)])
def test_the_first_draft_is_accepted_often(temperature, least):
    outputs = specjax.generate(
        pair(), OPENINGS, sampling=SamplingParams(temperature=temperature), gamma=4, max_new_tokens=80, samples=2,
        batch_size=12, check=True,
    )  # fmt: skip
    assert least <= first_accepted(outputs) < 0.95


def test_its_greedy_text_is_the_targets():
    asked = {"gamma": 4, "width": 5, "max_new_tokens": 60, "batch_size": 6}
    ours = specjax.generate(pair(), OPENINGS[:6], check=True, logprobs=True, **asked)
    plain = specjax.generate(pair("none"), OPENINGS[:6], logprobs=True, **asked)
    assert [(out.ids, out.logprobs) for out in ours] == [(out.ids, out.logprobs) for out in plain]


def test_its_text_is_words():
    """The words of a story are those that stories are made of, over and over."""
    outputs = specjax.generate(pair(), OPENINGS, max_new_tokens=80, batch_size=12)
    words = [word.strip('.,!?"').lower() for out in outputs for word in (out.text or "").split()]
    assert len(words) > 300
    common = {"the", "and", "a", "to", "was", "in", "of", "it", "he", "she", "his", "her", "they", "with", "that"}
    assert 0.25 < sum(word in common for word in words) / len(words) < 0.7
