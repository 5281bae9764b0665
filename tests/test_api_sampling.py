"""Sampling through the front door: rows' own settings, stops and minimum lengths, log-probabilities, streams."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny as t
from letters import HOT, LETTERS, TABLE, VOCAB, pair, text_of

import specjax
from specjax.checkpoint import load_folder
from specjax.constraint import automaton
from specjax.errors import UsageError
from specjax.reference_transforms import transformed
from specjax.sampling import SamplingParams
from specjax.text import load_tokenizer


def ask(prompts, *, of=None, **options):
    return specjax.generate(of or pair(), prompts, **{"max_new_tokens": 20, "check": True, **options})


OWN = [
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 2, "logit_bias": {"3": 1.5}},
    {"temperature": 0.7, "top_p": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_p": 0.2, "ban": [1, 2]},
    {"temperature": 1.0, "allow": [0, 3, 5], "min_new_tokens": 3},
]


@pytest.mark.slow
def test_rows_with_settings_of_their_own_equal_their_solo_runs_with_any_draft():
    """Case 35 under every family, at one width and the coupled rule: bits, log-probabilities among them."""
    rows = [{"id": i, "prompt": "abc", **own} for i, own in enumerate(OWN)]
    options = {"width": 5, "rule": "coupled", "top_logprobs": 3}
    together = ask(rows, gamma=3, **options)
    plain = ask(rows, of=pair("none"), **options)
    for i, (ours, theirs) in enumerate(zip(together, plain, strict=True)):
        assert ours.error is None
        assert (ours.ids, ours.logprobs, ours.sampled_logprobs) == (
            theirs.ids,
            theirs.logprobs,
            theirs.sampled_logprobs,
        )
        assert ours.top_logprobs == theirs.top_logprobs
        if i in (0, 3):
            assert ask(rows[i], gamma=3, **options)[0].ids == ours.ids
    assert not {1, 2} & set(together[3].ids)
    assert set(together[4].ids) <= {0, 3, 5}
    assert together[0].sampled_logprobs == [0.0] * 20


@pytest.mark.parametrize("source", ["model", *(pytest.param(x, marks=pytest.mark.slow) for x in ("ngram", "none"))])
def test_log_probabilities_are_the_models_and_scores_agree(source):
    """Case 53: raw ones do not depend on settings or draft; the likeliest tokens come in order."""
    params = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.2, logit_bias={4: 1.0})
    of = pair(source)
    (out,) = ask([[0, 1, 2]], of=of, sampling=params, top_logprobs=4, max_new_tokens=12)
    before = [0, 1, 2]
    for i, token in enumerate(out.ids):
        row = TABLE[before[-2], before[-1]].astype(np.float64)
        law = row - np.logaddexp.reduce(row)
        assert out.logprobs[i] == pytest.approx(law[token], abs=1e-5)
        order = np.argsort(-law, kind="stable")[:4]
        assert [i for i, _ in out.top_logprobs[i]] == order.tolist()
        np.testing.assert_allclose([value for _, value in out.top_logprobs[i]], law[order], atol=1e-5)
        p = transformed(row, params, [0, 1, 2], before[3:])
        assert out.sampled_logprobs[i] == pytest.approx(np.log(p[token]), abs=1e-4)
        before.append(token)
    scored = specjax.score(of.target, [before])[0]["logprobs"][3:]
    np.testing.assert_allclose(out.logprobs, scored, atol=1e-5)


def test_a_stop_counts_from_the_minimum_on_and_eos_stays_out_before_it():
    (free,) = ask("abc", max_new_tokens=20)
    last = text_of(free.ids)[0]
    for least in (0, 1, 4, 9):
        (out,) = ask("abc", stop=[last], sampling=SamplingParams(min_new_tokens=least), gamma=4)
        ends = [i for i, letter in enumerate(text_of(free.ids)) if letter == last and i >= least]
        if not ends:
            assert (out.ids, out.finish_reason) == (free.ids, "length")
            continue
        assert out.ids == free.ids[: ends[0] + 1]
        assert out.text == text_of(free.ids[: ends[0]])
        assert out.finish_reason == "stop"
        assert out.stats["num_tokens"] == len(out.ids)
    eos = free.ids[0]
    (out,) = ask("abc", eos=[eos], sampling=SamplingParams(min_new_tokens=6))
    assert eos not in out.ids[:6]


def test_a_banned_text_never_comes_and_a_constraint_holds_in_every_row():
    (free,) = ask("abc")
    pairs = text_of(free.ids)[3:5]
    (out,) = ask("abc", ban_sequence=[pairs])
    assert pairs not in "abc" + out.text
    table = np.full((2, VOCAB), -1)
    table[0, ::2], table[1, 1::2] = 1, 0
    for out in ask(["abc", "b", "ffgh"], constraint=automaton(table), sampling=HOT):
        assert [LETTERS.index(letter) % 2 for letter in out.text] == [i % 2 for i in range(20)]


def test_a_row_that_leaves_no_token_fails_and_says_so():
    bad, good = ask([{"prompt": "abc", "allow": [1], "ban": [1]}, {"prompt": "abc"}])
    assert (bad.ids, bad.finish_reason) == ([], "error")
    assert bad.error == "No token is allowed at new token 1: loosen bans, allow-list or constraint."
    assert good.error is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampling": SamplingParams(ban=[8])}, "allow-list has 8; expected ids in 0..7"),
        ({"top_logprobs": 65}, "top_logprobs is 65; expected at most 64"),
        ({"ban_sequence": [""]}, "ban_sequence has an empty text"),
        ({"of": pair("ngram"), "sampling": SamplingParams(temperature=1.0, draft_top_k=2)}, "ngram draws nothing"),
        ({"of": pair("none"), "sampling": SamplingParams(temperature=1.0, draft_top_k=2)}, "none draws nothing"),
        ({"of": pair(tokenizer=None), "ban_sequence": ["a"]}, "ban_sequence needs a tokenizer"),
        ({"rule": "greedy", "sampling": SamplingParams(draft_temperature=1.0)}, "rule greedy serves temperature 0"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        ask([[1]], **options)


@pytest.mark.parametrize(
    ("own", "words"),
    [
        ({"top_p": 0}, "top_p is 0.0; expected a number above 0"),
        ({"logit_bias": {"9": 1}}, "allow-list has 9; expected ids in 0..7"),
        ({"min_new_tokens": 21}, "min_new_tokens is 21, max_new_tokens 20"),
        ({"allow": []}, "allow is empty"),
    ],
)
def test_a_rows_own_wrong_setting_is_its_own_error(own, words):
    bad, good = ask([{"prompt": "abc", **own}, {"prompt": "abc"}])
    assert words in bad.error
    assert good.error is None


def test_streamed_bytes_joined_are_the_text_however_blocks_and_chunks_fall():
    """Case 42: a model held to the bytes of CJK and emoji writes whole and broken characters."""
    folder = t.DATA / "tokenizers" / "byte_level"
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    wanted = {token for text in ("日本🙂é", "a") for token in tokenizer.encode(text)} & set(vocab.values())
    params = SamplingParams(temperature=2.0, allow=sorted(wanted), ban_sequences=[])
    small = t.tiny(layers=1)
    of = t.pair(small, "ngram", tokenizer=tokenizer, vocab=min(t.VOCAB, tokenizer.vocab_size))
    assert load_folder(t.DATA / t.TARGET).config.vocab_size >= of.target.vocab_size
    for chunk in (1, 3):
        shown: list[str] = []
        options = {"sampling": params, "gamma": 4, "chunk": chunk, "max_new_tokens": 60, "ignore_eos": True}
        (out,) = specjax.generate(of, [[5, 17]], on_text=lambda _, text, shown=shown: shown.append(text), **options)
        assert "".join(shown) == out.text == tokenizer.decode(out.ids)
        assert len(shown) > 1
        assert any(ord(letter) > 127 for letter in out.text)
