"""Texts side by side in rows of one length; each token has its text's number and whether the next is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from specjax.distill.examples import Example

TOKENS, SEGMENTS, LABELS = 0, 1, 2  # planes of a row
_OPEN = 64  # rows that a text is tried in


@dataclasses.dataclass(frozen=True)
class Packed:
    """Rows to train on.

    Attributes:
        rows: int32 [N, 3, T]: token ids; the text's number in the row, from 1, and 0 where nothing stands; 1 where the
            token that follows is a completion's.
        dropped: tokens of completions that were longer than a row.
    """

    rows: np.ndarray
    dropped: int

    @property
    def num_labels(self) -> int:
        """Tokens that are trained on."""
        return int(self.rows[:, LABELS].sum())


def pack(examples: Iterable[Example], length: int, *, seed: int) -> Packed:
    """Pack examples with completions into rows.

    Args:
        examples: those without a completion are left out.
        length: T. Of a longer text the rest goes into pieces of its own; an answer is cut, since it would stand without
            its prompt.
        seed: of the order.
    """
    pieces: list[tuple[np.ndarray, int]] = []
    dropped = 0
    for example in examples:
        if example.completion is None:
            continue
        ids = np.asarray((*example.prompt, *example.completion), np.int32)
        if example.is_text:
            pieces += [(ids[i : i + length], len(example.prompt) if i == 0 else 0) for i in range(0, len(ids), length)]
        elif len(example.prompt) < length:
            dropped += max(len(ids) - length, 0)
            pieces.append((ids[:length], len(example.prompt)))
        else:
            dropped += len(example.completion)
    order = np.random.default_rng(seed).permutation(len(pieces))
    full: list[np.ndarray] = []
    opened: list[_Row] = []
    for index in order:
        ids, prompt = pieces[index]
        if len(ids) < 2:
            continue  # nothing follows its one token
        row = next((row for row in opened if row.used + len(ids) <= length), None)
        if row is None:
            row = _Row(np.zeros((3, length), np.int32))
            opened.append(row)
            full.append(row.planes)
            if len(opened) > _OPEN:
                opened.remove(max(opened, key=lambda one: one.used))
        row.add(ids, prompt)
    return Packed(np.stack(full) if full else np.zeros((0, 3, length), np.int32), dropped)


@dataclasses.dataclass(eq=False)
class _Row:
    planes: np.ndarray
    used: int = 0
    texts: int = 0

    def add(self, ids: np.ndarray, prompt: int) -> None:
        """Put a text behind the others; its prompt has that many tokens."""
        self.texts += 1
        there = slice(self.used, self.used + len(ids))
        self.planes[TOKENS, there] = ids
        self.planes[SEGMENTS, there] = self.texts
        # A token's label is the one after it: the first of the completion is the last prompt token's.
        self.planes[LABELS, self.used + max(prompt - 1, 0) : self.used + len(ids) - 1] = 1
        self.used += len(ids)


def positions(segments: np.ndarray) -> np.ndarray:
    """Return each token's place in its own text, int32 [..., T], for segments [..., T]."""
    index = np.broadcast_to(np.arange(segments.shape[-1]), segments.shape)
    starts = np.ones(segments.shape, bool)
    starts[..., 1:] = segments[..., 1:] != segments[..., :-1]
    return (index - np.maximum.accumulate(np.where(starts, index, 0), axis=-1)).astype(np.int32)
