"""A draft that ships a list of token ids: its head scores them alone."""

from __future__ import annotations

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import tiny as t
import toys

from specjax import head_ids, load
from specjax.draft import TrimmedFn, model_drafter
from specjax.errors import CheckpointError
from specjax.generate import Program
from specjax.sampling import SamplingParams
from specjax.verify import RULES


def test_a_trimmed_head_gives_the_whole_heads_logits_at_its_ids():
    """Tied: the embedding stays whole for input, the head becomes a few of its rows."""
    model = t.tiny(layers=1)
    ids = np.asarray([3, 50, 51, 319], np.int32)
    fn, params = head_ids.trim(model.fn, model.params, ids)
    assert params["head"].shape == (4, model.fn.config.width)
    tokens = jnp.asarray([[5, 170, 44]], jnp.int32)
    whole = model.fn(model.params, tokens, model.fn.init_cache(1, 8)).logits
    some = fn(params, tokens, fn.init_cache(1, 8)).logits
    np.testing.assert_allclose(some, whole[..., ids], rtol=1e-5, atol=1e-5)


def test_a_draft_folder_with_a_list_drafts_nothing_else(tmp_path):
    folder = tmp_path / "draft"
    shutil.copytree(t.DATA / t.NEAR, folder)
    (folder / head_ids.FILE).write_text(json.dumps({"ids": list(range(0, 320, 2))}))
    pair = load(target=t.DATA / t.TARGET, draft=folder, dtype="float32")
    assert pair.draft.params["ids"].tolist() == list(range(0, pair.target.vocab_size, 2))
    program = Program(
        pair.target.fn, pair.draft.drafter, rule=RULES["greedy"], gamma=3, vocab_size=t.VOCAB, check=True, logprobs=True
    )
    results = t.run(program, t.tiny(), t.Tiny(t.tiny().fn, pair.draft.params), t.prompts()[:2], 48)
    assert [result.ids.tolist() for result in results] == t.greedy()[:2]
    drafted = np.concatenate([result.ids[result.accepted] for result in results])
    assert len(drafted) > 10
    assert not np.any(drafted % 2)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "holds a JSON list"),
        ('{"ids": []}', "expected"),
        ('{"ids": [1, 400]}', r"token ids in 0\.\.319"),
        ('{"ids": [1, true]}', "expected"),
        ('{"ids": [1, 2, 1]}', "lists 1 ids twice"),
    ],
)
def test_a_list_that_is_not_one_is_refused(tmp_path, content, words):
    (tmp_path / head_ids.FILE).write_text(content)
    with pytest.raises(CheckpointError, match=words):
        head_ids.read(tmp_path, 320)


def test_a_folder_without_a_list_has_a_whole_head(tmp_path):
    assert head_ids.read(tmp_path, 320) is None


def test_a_row_that_allows_nothing_of_the_list_drafts_nothing():
    """q has no mass there: a token drawn from it all the same would have q = 0 and be accepted."""
    vocab, ids = 8, np.arange(1, 8, 2, dtype=np.int32)
    table = toys.table(vocab, seed=4)
    run = toys.run_batch(
        toys.MarkovFn(vocab),
        model_drafter(TrimmedFn(toys.MarkovFn(vocab), vocab), vocab),
        {"target": table, "draft": {"model": table[..., ids], "ids": ids}},
        [[2, 4], [2, 4]],
        rule=RULES["rejection"],
        gamma=3,
        max_new=40,
        vocab=vocab,
        sampling=[SamplingParams(temperature=1.0, ban=tuple(ids.tolist())), SamplingParams(temperature=1.0)],
    )
    assert not run.state.accepted[0].any()
    assert not set(run.outputs[0]) & set(ids.tolist())
    assert run.state.drafted[0].max() == 0
    assert run.state.drafted[1].max() == 3
    assert run.acceptance > 0.2
