"""Packed rows, shards on disk, and batches from them."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.distill.config import MixSpec
from specjax.distill.examples import Example
from specjax.distill.packing import LABELS, SEGMENTS, TOKENS, pack, positions
from specjax.distill.pipeline import Batches, as_batch
from specjax.distill.shards import ROWS_PER_SHARD, Shards, write_shards
from specjax.errors import UsageError


def examples(count: int, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [
        Example(str(i), tuple(rng.integers(1, 90, rng.integers(1, 5))), tuple(rng.integers(1, 90, rng.integers(1, 9))))
        for i in range(count)
    ]


def test_every_text_stands_in_one_row_whole_with_its_labels():
    made = examples(40)
    packed = pack(made, 16, seed=1)
    found = []
    for row in packed.rows:
        place = positions(row[SEGMENTS])
        for segment in range(1, row[SEGMENTS].max() + 1):
            here = np.flatnonzero(row[SEGMENTS] == segment)
            assert place[here].tolist() == list(range(len(here)))
            labels = [int(row[TOKENS, t + 1]) for t in here if row[LABELS, t]]
            found.append((tuple(row[TOKENS, here].tolist()), tuple(labels)))
        assert not row[LABELS, row[SEGMENTS] == 0].any()
    assert sorted(found) == sorted(((*e.prompt, *e.completion), e.completion) for e in made)
    assert packed.dropped == 0
    assert len(packed.rows) < len(made) / 1.5


def test_a_long_text_goes_on_in_pieces_and_a_long_answer_is_cut():
    text = Example("a", (1,), tuple(range(2, 22)), is_text=True)
    packed = pack([text], 8, seed=0)
    assert packed.rows[:, SEGMENTS].astype(bool).sum() == 21
    assert packed.dropped == 0
    answer = Example("b", (1, 2), tuple(range(3, 23)))
    packed = pack([answer], 8, seed=0)
    assert packed.rows[0, TOKENS].tolist() == list(range(1, 9))
    assert packed.num_labels == 6
    assert packed.dropped == 14


def test_shards_come_back_and_a_changed_one_is_refused(tmp_path):
    rows = np.random.default_rng(0).integers(0, 50, (ROWS_PER_SHARD + 5, 3, 4)).astype(np.int32)
    packed = pack(examples(3), 8, seed=0)
    folder = write_shards(tmp_path / "data", type(packed)(rows, 0), {"source": "data", "x": [1]})
    found = Shards(folder)
    assert len(found) == len(rows)
    for index in (0, ROWS_PER_SHARD - 1, ROWS_PER_SHARD, len(rows) - 1):
        assert np.array_equal(found[index], rows[index])
    assert found.manifest["about"] == {"source": "data", "x": [1]}
    shard = folder / "shard-00001.npy"
    shard.write_bytes(shard.read_bytes()[:-4] + b"\x01\x00\x00\x00")
    with pytest.raises(UsageError, match=r"shard-00001\.npy is missing or not what"):
        Shards(folder)


def rows_of(value: int, count: int = 6) -> np.ndarray:
    rows = np.zeros((count, 3, 4), np.int32)
    rows[:, TOKENS] = value + np.arange(count)[:, None]
    return rows


def make(steps=20, epochs=0, mixes=None) -> Batches:
    mixes = mixes or [MixSpec(data=1.0, teacher=1.0), MixSpec(start=0.5, teacher=1.0)]
    batches = Batches(4, seed=3, mixes=mixes, steps=steps, epochs=epochs)
    batches.put("data", rows_of(100))
    batches.put("teacher", rows_of(200))
    return batches


def tokens(batches: Batches, steps) -> list:
    return [batches.batch(step)["tokens"][:, 0].tolist() for step in steps]  # type: ignore[index]


@pytest.mark.slow
def test_a_restored_stream_goes_on_with_the_same_rows():
    straight = tokens(make(), range(20))
    first = make()
    assert tokens(first, range(7)) == straight[:7]
    second = make()
    second.restore(first.state())
    assert tokens(second, range(7, 20)) == straight[7:]


def test_the_mix_follows_its_schedule():
    found = np.asarray(tokens(make(), range(20)))
    assert (found[10:] >= 200).all()
    early = (found[:10] < 200).mean()
    assert 0.2 < early < 0.8  # 40 draws at 1/2: outside by chance in less than 1 of 5000 seeds; the seed is fixed


def test_each_pass_takes_every_row_once_and_then_the_data_runs_out():
    batches = Batches(3, seed=0, mixes=[MixSpec(data=1.0)], steps=99, epochs=2)
    batches.put("data", rows_of(100))
    found = np.ravel(tokens(batches, range(4)))
    assert sorted(found[:6]) == sorted(found[6:]) == list(range(100, 106))
    assert found[:6].tolist() != found[6:].tolist()
    assert batches.batch(4) is None
    with pytest.raises(UsageError, match="no rows of source 'teacher'"):
        batches.put("teacher", rows_of(0, 0))


def test_a_batch_has_positions_and_a_mask():
    packed = pack(examples(5), 12, seed=0)
    batch = as_batch(packed.rows)
    assert batch["mask"].sum() == packed.num_labels
    assert {name: (value.dtype.name, value.shape) for name, value in batch.items()} == {
        **dict.fromkeys(("tokens", "segment", "position"), ("int32", (len(packed.rows), 12))),
        "mask": ("float32", (len(packed.rows), 12)),
    }
