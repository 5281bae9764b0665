"""Whether a target and a draft fit, what follows before a generation, and rows that outgrow their draft's context."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path

import pytest
import tiny as t

import specjax
from specjax import fit
from specjax.errors import CheckpointError, UsageError
from specjax.models.config import RopeConfig
from specjax.pair import PairWarning, draft_of, load_model, side_of
from specjax.text import load_tokenizer

TEXT = t.DATA / "tokenizers"
CONFIG = t.tiny().fn.config


def side(name: str = "x", **changes) -> fit.Side:
    """A side of 320 rows without a tokenizer."""
    return dataclasses.replace(fit.Side(name, None, 320, 320, 512, (2,), 1, "float32", 1000, CONFIG), **changes)


def with_text(name: str, kind: str = "byte_level", **changes) -> fit.Side:
    """A side with a tokenizer."""
    tokenizer = load_tokenizer(TEXT / kind)
    assert tokenizer is not None
    return side(name, **{"tokenizer": tokenizer, "vocab_size": tokenizer.vocab_size, **changes})


def finding(target: fit.Side, draft: fit.Side, what: str) -> fit.Finding:
    return next(item for item in fit.compare(target, draft).items if item.what == what)


def test_a_side_fits_itself():
    for one in (side(), with_text("x")):
        found = fit.compare(one, one)
        assert (found.verdict, found.errors, found.warnings) == ("fits", [], [])


def test_tokenizers_that_differ_name_the_ids():
    """Case 18."""
    found = fit.compare(with_text("a"), with_text("b", "sentencepiece"))
    assert found.verdict == "does not fit"
    assert found.errors[0].startswith("The tokenizers of target a and draft b differ (id 0: ")
    assert "\n" not in found.errors[0]


def test_without_a_tokenizer_sizes_are_compared():
    assert finding(with_text("a"), side("b"), "tokenizer").message == (
        "b has none to compare: only the sizes of the vocabularies are"
    )
    assert finding(side(), side(), "tokenizer").level == "note"
    found = fit.compare(side("a"), side("b", rows=352, vocab_size=352))
    assert found.errors == ["Draft b has 352 ids, target a uses 320: a draft must share its target's vocabulary."]


def test_padding_of_either_side_is_handled():
    """Case 17: 320 rows against 288 or 352, with the tokenizer's ids in use."""
    target = with_text("a")
    for rows in (target.vocab_size, 352):
        for one, other in ((target, with_text("b", rows=rows)), (with_text("b", rows=rows), target)):
            assert fit.compare(one, other).verdict == "fits"
    assert finding(target, with_text("b", rows=352), "ids in use").level == "note"
    short = with_text("b", rows=target.vocab_size - 1)
    assert fit.compare(target, short).errors == [
        f"Draft b has {short.rows} ids, target a uses {target.vocab_size}: a draft must share its target's vocabulary."
    ]


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("EOS ids", {"eos_ids": (2, 5)}),
        ("BOS id", {"bos_id": None}),
        ("weights", {"dtype": "bfloat16"}),
        ("context", {"max_positions": 1024}),
        ("rotary", {"config": dataclasses.replace(CONFIG, rope=RopeConfig("yarn", 5e5, factor=4.0))}),
        ("rotary", {"config": None}),
    ],
)
def test_what_may_differ_is_noted(what, changes):
    found = finding(side(), side(**changes), what)
    assert (found.level, fit.compare(side(), side(**changes)).verdict) == ("note", "fits")
    assert found.target != found.draft
    assert found.message


def test_names_and_templates():
    plain, chat = with_text("a", "sentencepiece"), with_text("b")
    assert finding(chat, chat, "chat template").level == "ok"
    assert finding(chat, plain, "chat template").level == "note"
    assert chat.tokenizer is not None
    assert finding(chat, chat, "bos_token").target == chat.tokenizer.named("bos_token")


def test_rotary_overrides_are_shown():
    rope = RopeConfig("llama3", 500000.0, factor=8.0, original_max_position_embeddings=64)
    scaled = side(config=dataclasses.replace(CONFIG, rope=rope))
    assert finding(scaled, side(), "rotary").target == "llama3 500000, factor 8, original_max_position_embeddings 64"
    assert finding(scaled, side(), "rotary").draft == "default 10000"


def test_what_works_less_well_is_a_warning():
    found = fit.compare(side("a"), side("b", max_positions=100, num_params=2_500_000))
    assert found.verdict == "fits with warnings"
    assert found.warnings == [
        "Draft b has a context of 100 tokens, target a of 512: a row goes on without speculation past 100.",
        "Draft b has 2.5M parameters, target a 1k: a draft larger than its target cannot pay.",
    ]


def test_a_folder_is_described_without_its_weights(monkeypatch):
    described = fit.describe(t.DATA / t.TARGET)
    assert described == dataclasses.replace(side_of(load_model(t.DATA / t.TARGET, dtype="float32")))
    monkeypatch.setattr("specjax.checkpoint.tensors.TensorStore.read_into", None)
    assert fit.describe(t.DATA / t.TARGET) == described


def copy(name: str, folder: Path, tokenizer: str | None = None, **changes: object) -> Path:
    """Copy a fixture with another config, and maybe a tokenizer."""
    shutil.copytree(t.DATA / name, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    for file in (TEXT / tokenizer).iterdir() if tokenizer else ():
        shutil.copy(file, folder)
    return folder


def test_more_ids_than_rows(tmp_path):
    folder = copy(t.TARGET, tmp_path / "x", "byte_level")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["model"]["vocab"]["far"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    for call in (fit.describe, load_model):
        with pytest.raises(CheckpointError, match="401 ids, the model's embedding 320 rows"):
            call(folder)


def test_errors_stop_a_generation_and_warnings_do_not(tmp_path):
    target = copy(t.TARGET, tmp_path / "target", "byte_level")
    with pytest.raises(UsageError, match="tokenizers of target"):
        specjax.load(target, copy(t.NEAR, tmp_path / "other", "sentencepiece"), dtype="float32")
    short = copy(t.NEAR, tmp_path / "short", "byte_level", max_position_embeddings=60)
    with pytest.warns(PairWarning, match=r"^Draft .* past 60\.$") as caught:
        pair = specjax.load(target, short, dtype="float32")
    assert len(caught) == 1
    assert pair.draft.drafter.max_positions == 60
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair = specjax.load(short, target, dtype="float32")
    assert pair.draft.drafter.max_positions is None


@pytest.fixture(scope="module")
def short_pair(tmp_path_factory) -> tuple[specjax.Pair, specjax.Pair]:
    """Plain decoding, and a draft that is the target itself but for a context of 60."""
    folder = copy(t.TARGET, tmp_path_factory.mktemp("short") / "short", max_position_embeddings=60)
    plain = specjax.load(t.DATA / t.TARGET, "none", dtype="float32")
    with pytest.warns(PairWarning, match="past 60"):
        draft = draft_of(load_model(folder, dtype="float32"), plain.target)
    return plain, specjax.Pair(plain.target, draft)


@pytest.mark.parametrize(
    ("rule", "temperature"), [("rejection", 0.0), pytest.param("coupled", 0.8, marks=pytest.mark.slow)]
)
def test_past_its_drafts_context_a_row_goes_on_without_speculation(short_pair, rule, temperature):
    plain, pair = short_pair
    prompts = t.prompts()[1:]  # 7, 40 and 90 tokens
    options = {
        "max_new_tokens": 48,
        "check": True,
        "ignore_eos": True,
        "rule": rule,
        "sampling": specjax.SamplingParams(temperature=temperature),
    }
    outs = specjax.generate(pair, prompts, gamma=4, **options)
    assert [out.ids for out in outs] == [out.ids for out in specjax.generate(plain, prompts, **options)]
    short, middle, long = (out.stats for out in outs)
    # Rounds begin at 40, 45, 50 and 55; from 60 on they are plain.
    assert (middle["num_drafts"], middle["num_rounds"], middle["num_draft_tokens"]) == (4, 4 + 28, 16)
    assert short["num_drafts"] == short["num_rounds"] == 10
    assert (long["num_drafts"], long["num_rounds"], long["draft_acceptance_rate"]) == (0, 48, None)
    assert {out.stats["speculation"] for out in outs} == {"on"}
