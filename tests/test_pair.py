"""Loading a target with its draft: what is missing, broken or of another size."""

from __future__ import annotations

import dataclasses
import shutil

import jax
import numpy as np
import pytest
import tiny as t
import tokenizers

import specjax
from specjax.errors import CheckpointError, UsageError
from specjax.models.decoder import DecoderFn
from specjax.pair import DraftWarning, Model, Pair, draft_of, load, model_in, no_draft
from specjax.pair_names import pair_names, read_pair
from specjax.text import Tokenizer

TARGET, NEAR = t.DATA / t.TARGET, t.DATA / t.NEAR


@pytest.fixture(scope="module")
def tiny_pair():
    return load(TARGET, NEAR, dtype="float32")


def test_a_pair_of_folders_generates(tiny_pair):
    (out,) = specjax.generate(tiny_pair, [t.prompts()[1]], max_new_tokens=30)
    assert out.ids == t.greedy()[1][:30]
    assert out.stats["speculation"] == "on"
    assert out.stats["num_accepted_tokens"] > 5
    assert (tiny_pair.target.eos_ids, tiny_pair.target.bos_id, tiny_pair.target.vocab_size) == ((2,), 1, 320)


@pytest.mark.parametrize(
    ("draft", "name"), [("none", "none"), ("ngram", "ngram"), (None, "ngram"), ("early-exit:2", "early-exit:2")]
)
def test_drafts_without_weights(draft, name):
    loaded = load(TARGET, draft, dtype="float32").draft
    assert loaded.name == name
    assert jax.tree.leaves(loaded.params) == []


def test_a_mixed_draft_holds_the_model_it_names():
    loaded = load(TARGET, f"mixed:{NEAR}", dtype="float32").draft
    assert loaded.name == f"mixed:{NEAR}"
    assert loaded.drafter.lazy
    assert model_in(loaded.name) == str(NEAR)


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("early-exit", "expected early-exit:N"),
        ("early-exit:0", "expected early-exit:N"),
        ("early-exit:two", "expected early-exit:N"),
        ("early-exit:3", r"has 3 layers; expected 1\.\.2"),
        ("mixed:", "names no model"),
        ("mixed:ngram", "names no model"),
        ("mixed:early-exit:1", "names no model"),
    ],
)
def test_drafts_that_cannot_be_are_refused(draft, words):
    with pytest.raises(UsageError, match=words):
        load(TARGET, draft, dtype="float32")


def broken_folder(tmp_path, fault: str):
    folder = tmp_path / "draft"
    if fault == "missing":
        return folder
    shutil.copytree(NEAR, folder)
    weights = folder / "model.safetensors"
    if fault == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        (folder / "config.json").write_text("{")
    return folder


@pytest.mark.parametrize("fault", ["missing", "truncated", "config"])
def test_a_draft_that_cannot_be_read_is_left_out_unless_required(tmp_path, fault):
    folder = broken_folder(tmp_path, fault)
    with pytest.warns(DraftWarning, match="without a draft"):
        pair = load(TARGET, folder, dtype="float32")
    assert pair.draft.name == "none"
    assert pair.draft.speculation.startswith("off: draft ")
    with pytest.raises(CheckpointError, match="required"):
        load(TARGET, folder, dtype="float32", require_draft=True)


def test_wrong_calls_are_refused_whatever_the_draft():
    with pytest.raises(UsageError, match="both a target and a pair"):
        load(TARGET, pair="smollm2")
    with pytest.raises(UsageError, match="smollm2"):
        load(pair="no-such-pair")
    with pytest.raises(UsageError, match="no-such-model"):
        load(TARGET, "no-such-model", dtype="float32")
    with pytest.raises((UsageError, CheckpointError)):
        load(TARGET, "none", dtype="float64")


def test_every_pair_that_ships_can_be_read():
    assert "smollm2" in pair_names()
    for name in pair_names():
        assert read_pair(name).target


def test_a_pair_file_names_folders_beside_it(tmp_path):
    shutil.copytree(TARGET, tmp_path / "big")
    shutil.copytree(NEAR, tmp_path / "small")
    path = tmp_path / "mine.toml"
    path.write_text('target = "big"\ndraft = "small"\ngamma = 2\n')
    pair = load(pair=path, dtype="float32")
    assert pair.gamma == 2
    assert pair.draft.speculation == "on"
    (out,) = specjax.generate(pair, [t.prompts()[1]], max_new_tokens=10)
    assert len(out.stats["num_accepted_tokens_per_pos"]) == 2


@pytest.mark.parametrize("text", ["draft = 'ngram'", "target = 'a'\ntypo = 1", "target = 1", "= ="])
def test_a_pair_file_that_cannot_be_used_is_refused(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"bad\.toml"):
        read_pair(path)
    with pytest.raises(UsageError, match=r"absent\.toml"):
        read_pair(tmp_path / "absent.toml")


def words(count: int, *, swap: tuple[int, int] | None = None) -> Tokenizer:
    ids = list(range(count))
    if swap:
        ids[swap[0]], ids[swap[1]] = ids[swap[1]], ids[swap[0]]
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": ids[i] for i in range(count)}, unk_token="w0"))
    return Tokenizer(backend)


def model(rows: int, seed: int, tokenizer: Tokenizer | None, scale: float = 30.0) -> Model:
    """Return a random model whose embedding has ``rows`` rows, the ones past the tokenizer's with large logits."""
    config = dataclasses.replace(t.tiny().fn.config, vocab_size=rows, num_layers=1, width=16, mlp_width=16, head_dim=8)
    fn = DecoderFn(config)
    params = dict(fn.init_params(jax.random.key(seed)))
    params["embedding"] = params["embedding"] * scale
    if tokenizer is not None:
        params["embedding"] = params["embedding"].at[tokenizer.vocab_size :].multiply(20.0)
    size = rows if tokenizer is None else tokenizer.vocab_size
    return Model(f"m{rows}", fn, params, tokenizer, size, 512, (), None, "float32")


@pytest.mark.slow
def test_vocabularies_padded_to_different_sizes_work():
    """Case 17: draft 128, target 132, tokenizer 120; no padded id is drafted, drawn or chosen."""
    target = model(132, 0, words(120))
    same_weights = dict(target.params)
    same_weights["embedding"] = np.asarray(same_weights["embedding"])[:128]
    small = model(128, 1, words(120))
    draft = dataclasses.replace(small, params=same_weights)
    prompts = [[1, 2, 3], [119]]
    plain = specjax.generate(Pair(target, no_draft()), prompts, max_new_tokens=20)
    found = specjax.generate(Pair(target, draft_of(draft, target)), prompts, max_new_tokens=20, check=True)
    assert [out.ids for out in found] == [out.ids for out in plain]
    assert all(max(out.ids) < 120 for out in found)
    assert all(out.stats["draft_acceptance_rate"] > 0.9 for out in found)


def test_swapped_ids_are_refused_and_named():
    """Case 18."""
    with pytest.raises(UsageError, match=r"id 5: 'w5' and 'w9'.*id 9: 'w9' and 'w5'"):
        draft_of(model(128, 1, words(120, swap=(5, 9))), model(132, 0, words(120)))


def test_without_tokenizers_sizes_must_agree():
    with pytest.raises(UsageError, match="128"):
        draft_of(model(128, 1, None), model(132, 0, None))
    assert draft_of(model(132, 1, None), model(132, 0, None)).speculation == "on"


def test_a_draft_with_too_few_rows_is_refused():
    with pytest.raises(UsageError, match="110"):
        draft_of(model(110, 1, None), model(132, 0, words(120)))
