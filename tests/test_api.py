"""The library's front door, on the toy with a tokenizer of eight letters."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
import toy_laws
from letters import DRAFT, HOT, TABLE, pair, text_of

import specjax
from specjax import api
from specjax.api import program_for
from specjax.engine import Engine
from specjax.errors import CheckpointError, UsageError
from specjax.pair import DraftWarning, Pair

TINY = Path(__file__).parent / "data" / "llama-gqa-tied"


def ask(prompts, *, of: Pair | None = None, **options):
    return specjax.generate(of or pair(), prompts, **{"max_new_tokens": 20, "check": True, **options})


def test_greedy_text_is_the_chains():
    (out,) = ask("abc")
    chain = toy_laws.greedy_chain(TABLE, (0, 1, 2), 20)
    assert (out.ids, out.text, out.finish_reason, out.id, out.sample) == (list(chain), text_of(chain), "length", 1, 0)
    assert out.logprobs is None
    assert out.error is None


def test_prompts_of_every_form_are_one_prompt():
    forms = ["abc", [0, 1, 2], {"prompt": "abc"}, {"id": "x", "prompt_ids": [0, 1, 2]}]
    outs = ask(forms)
    assert [out.id for out in outs] == [1, 2, 3, "x"]
    assert len({tuple(out.ids) for out in outs}) == 1


def test_stats_are_counted_from_the_visible_tokens():
    (out,) = ask("abc", gamma=3)
    stats = out.stats
    assert stats["speculation"] == "on"
    assert stats["num_tokens"] == 20
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"]
    assert sum(stats["acceptance_histogram"]) == stats["num_drafts"]
    assert stats["num_accepted_tokens"] == sum(i * n for i, n in enumerate(stats["acceptance_histogram"]))
    assert stats["mean_acceptance_length"] == pytest.approx(1 + stats["num_accepted_tokens"] / stats["num_drafts"])
    (plain,) = ask("abc", of=pair("none"))
    assert plain.ids == out.ids
    assert plain.stats["num_drafts"] == 0
    assert plain.stats["num_rounds"] == 20
    assert plain.stats["speculation"].startswith("off")


def test_faulty_rows_fail_alone():
    outs = ask(["abc", [], [3, 8], {"prompt": "a", "typo": 1}, {"prompt_ids": list(range(8)) * 9}, "b"])
    assert [out.finish_reason for out in outs] == ["length", "error", "error", "error", "error", "length"]
    for out, words in zip(outs[1:5], ["empty", "8; expected ids in 0..7", "typo", "72 tokens"], strict=True):
        assert words in out.error
        assert out.ids == []
    assert "64" in outs[4].error


def test_an_empty_prompt_starts_from_the_bos():
    outs = ask([[], "a"], of=pair(bos=0))
    assert outs[0].ids == outs[1].ids


@pytest.mark.parametrize("budget", [0, 1, 2, 3])
def test_small_budgets(budget):
    """Cases 2 and 60."""
    (out,) = ask("abc", max_new_tokens=budget, gamma=8)
    assert out.ids == list(toy_laws.greedy_chain(TABLE, (0, 1, 2), budget))
    assert (out.finish_reason, out.text) == ("length", text_of(out.ids))


def test_the_cache_length_is_the_most_that_prompt_and_output_take():
    """Cases 15 and 59."""
    outs = ask(["a" * n for n in (12, 11, 10, 8, 7, 1)], cache_length=12, max_new_tokens=50, gamma=4)
    assert "12 tokens" in outs[0].error
    assert [len(out.ids) for out in outs[1:]] == [1, 2, 4, 5, 11]
    assert {out.finish_reason for out in outs[1:]} == {"length"}


def test_calls_with_one_cache_length_share_a_program_and_nothing_else_changes(monkeypatch):
    loaded = specjax.load(TINY, "ngram", dtype="float32")
    calls = [([1, 2, 3], 3), ([1, 2, 3] * 50, 40), ([7], 100)]

    def ids(**options):
        return [ask([prompt], of=loaded, max_new_tokens=n, width=3, gamma=2, **options)[0].ids for prompt, n in calls]

    programs = []
    monkeypatch.setattr(api, "program_for", lambda *given: programs.append(program_for(*given)) or programs[-1])
    expected = ids()
    before = programs[-1]._step._cache_size()
    assert before >= 2
    assert ids(cache_length=300) == expected
    assert len(set(programs)) == 1
    assert programs[0]._step._cache_size() == before + 1


def test_eos_ids_of_the_model_the_call_and_the_row():
    """Case 46: each of a list stops; the caller's list replaces it; a row's replaces both."""
    chain = toy_laws.greedy_chain(TABLE, (0, 1, 2), 20)
    seen = list(dict.fromkeys(chain))
    model = pair(eos=(seen[-1], seen[1]))
    (by_model,) = ask("abc", of=model)
    assert (by_model.ids, by_model.finish_reason) == (list(chain[: chain.index(seen[1]) + 1]), "eos")
    assert by_model.text == text_of(by_model.ids[:-1])
    (by_call,) = ask("abc", of=model, eos=[seen[2]])
    assert by_call.ids == list(chain[: chain.index(seen[2]) + 1])
    (by_row,) = ask([{"prompt": "abc", "eos": [seen[0]]}], of=model, eos=[seen[2]])
    assert by_row.ids == list(chain[:1])
    (never,) = ask("abc", of=model, ignore_eos=True)
    assert never.ids == list(chain)


@pytest.mark.parametrize(("gamma", "chunk"), [(4, 64), (4, 1), (16, 64)])
def test_a_stop_string_cuts_ids_text_logprobs_and_stats_alike(gamma, chunk):
    """Cases 39 and 40, in the middle of a block and at its first token; streamed text is the text."""
    chain = text_of(toy_laws.greedy_chain(TABLE, (0, 1, 2), 20))
    (whole,) = ask("abc", gamma=gamma, logprobs=True)
    for stop in (chain[0], chain[2:4], chain[5:8], chain[17:20]):
        streamed: list[str] = []
        (out,) = ask(
            "abc",
            gamma=gamma,
            chunk=chunk,
            stop=[stop],
            logprobs=True,
            on_text=lambda _, text, s=streamed: s.append(text),
        )
        end = chain.index(stop) + len(stop)
        assert out.ids == whole.ids[:end]
        assert out.logprobs == whole.logprobs[:end]
        assert (out.text, out.finish_reason) == (chain[: end - len(stop)], "stop")
        assert "".join(streamed) == out.text
        assert out.stats["num_tokens"] == end


def test_a_row_may_bring_its_own_settings():
    outs = ask(
        [
            {"prompt": "abc", "max_new_tokens": 2},
            {"prompt": "abc", "temperature": 1.0, "seed": 1},
            {"id": "again", "prompt": "abc", "temperature": 1.0, "seed": 1},
            "abc",
        ]
    )
    assert len(outs[0].ids) == 2
    assert outs[1].ids != outs[2].ids  # their ids are part of the key
    assert outs[3].ids == list(toy_laws.greedy_chain(TABLE, (0, 1, 2), 20))


@pytest.mark.slow
def test_samples_are_distinct_and_reproducible():
    """Cases 35, 37, 104."""
    options = {"sampling": HOT, "samples": 32, "gamma": 3}
    first = [tuple(out.ids) for out in ask("abc", **options)]
    assert len(set(first)) == 32
    assert [tuple(out.ids) for out in ask("abc", **options, batch_size=5)] == first
    assert not set(first) & {tuple(out.ids) for out in ask("abc", **options, seed=1)}
    assert [out.sample for out in ask(["abc", []], samples=2)] == [0, 1, 0, 1]


def test_ids_that_differ_only_by_type_are_two_rows():
    one, other = ask([{"id": 1, "prompt": "abc"}, {"id": "1", "prompt": "abc"}], sampling=HOT)
    assert one.ids != other.ids
    with pytest.raises(UsageError, match="both have the id"):
        ask([{"id": 2, "prompt": "abc"}, {"id": 2, "prompt": "a"}])


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_every_rule_serves_hot_and_cold_rows(rule):
    outs = ask([{"prompt": "abc", "temperature": 0.0}, {"prompt": "abc", "temperature": 1.0}], rule=rule)
    assert outs[0].ids == list(toy_laws.greedy_chain(TABLE, (0, 1, 2), 20))
    assert outs[1].stats["speculation"] == "on"


def test_under_the_coupled_rule_the_draft_does_not_change_the_text():
    options = {"rule": "coupled", "sampling": HOT, "samples": 4}
    plain = [out.ids for out in ask("abc", of=pair("none"), **options)]
    assert [out.ids for out in ask("abc", **options, gamma=2)] == plain
    assert [out.ids for out in ask("abc", of=pair("ngram"), **options, gamma=5)] == plain


def test_a_draft_without_finite_logits_is_left_out():
    broken = np.full_like(DRAFT, np.nan)
    model = pair(draft_table=broken)
    with pytest.warns(DraftWarning, match="not finite") as seen:
        outs = ask(["abc", "b"], of=model)
    assert len(seen) == 1
    assert [out.ids for out in outs] == [out.ids for out in ask(["abc", "b"], of=pair("none"))]
    assert all(out.stats["speculation"] == "off: draft gave logits that are not finite." for out in outs)
    with pytest.raises(CheckpointError, match=r"not finite.*required"):
        ask("abc", of=model, require_draft=True)


def test_a_target_without_finite_logits_is_an_error_of_its_row():
    chain = toy_laws.greedy_chain(TABLE, (0, 1, 2), 20)
    broken = np.array(TABLE)
    broken[chain[4], chain[5]] = np.nan
    met = next(i for i in range(19) if chain[i : i + 2] == chain[4:6]) + 2
    (out,) = ask("abc", of=pair(table=broken))
    assert (out.finish_reason, out.ids) == ("error", list(chain[:met]))
    assert f"new token {met + 1}" in out.error


def test_a_draft_that_runs_out_of_memory_is_left_out(monkeypatch):
    run = Engine.run

    def scarce(self, requests, **options):
        if self._params["draft"] is DRAFT:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return run(self, requests, **options)

    monkeypatch.setattr(Engine, "run", scarce)
    with pytest.warns(DraftWarning, match="out of memory"):
        (out,) = ask("abc")
    assert out.ids == list(toy_laws.greedy_chain(TABLE, (0, 1, 2), 20))
    assert "out of memory" in out.stats["speculation"]
    with pytest.raises(CheckpointError, match="required"):
        ask("abc", require_draft=True)


def test_logprobs_are_the_same_with_a_draft_and_without():
    """Case 53."""
    (with_draft,), (plain,) = (ask("abc", of=pair(kind), logprobs=True) for kind in ("model", "none"))
    assert len(with_draft.logprobs) == 20
    np.testing.assert_allclose(with_draft.logprobs, plain.logprobs, atol=1e-6)


def test_without_a_tokenizer_ids_are_served_and_texts_are_not():
    outs = ask([[0, 1, 2], "abc", {"prompt_ids": [0, 1, 2], "stop": ["a"]}], of=pair(tokenizer=None))
    assert (outs[0].text, outs[0].ids) == (None, list(toy_laws.greedy_chain(TABLE, (0, 1, 2), 20)))
    assert [out.finish_reason for out in outs] == ["length", "error", "error"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gamma": 65}, "gamma is 65"),
        ({"gamma": -1}, "gamma is -1"),
        ({"gamma": 4, "width": 4}, "width is 4"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"samples": 0}, "samples is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"chunk": 0}, "chunk is 0"),
        ({"cache_length": 65}, "cache_length is 65"),
        ({"cache_length": 0}, "cache_length is 0"),
        ({"rule": "typo"}, "'typo'"),
        ({"rule": "greedy", "sampling": HOT}, "temperature is 1.0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(options, words):
    with pytest.raises(UsageError, match=words):
        ask("abc", **options)


def test_outputs_are_handed_over_as_they_finish():
    seen, counts = [], []
    outs = ask(["abc", [], "b"], on_output=seen.append, on_tokens=counts.append)
    assert sorted(out.id for out in seen) == [1, 2, 3]
    assert {id(out) for out in seen} == {id(out) for out in outs}
    assert sum(counts) == sum(len(out.ids) for out in outs)
