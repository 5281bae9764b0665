"""Traces: the same ids as without, and decisions that plain NumPy makes again."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import tiny as t
import toys

import specjax
import specjax.api
import specjax.requests
import specjax.tune
from specjax import draft, replay, sampling
from specjax.cli.main import main
from specjax.errors import UsageError
from specjax.pair import Draft, Model, Pair
from specjax.types import Rule
from specjax.verify import RULES

PROMPTS = [[5, 17, 42, 9, 17, 42, 9], [3, 250, 3, 250, 3]]


def quick(chosen: str) -> list:
    """Return the rules, all but one of them slow."""
    return [rule if rule == chosen else pytest.param(rule, marks=pytest.mark.slow) for rule in RULES]


def toy_pair(source: str = "model") -> Pair:
    """Return Markov chains over five tokens."""
    fn = toys.MarkovFn(5)
    target = Model("toy", fn, toys.table(5, 0), None, 5, 64, (4,), None, "float32")
    if source == "ngram":
        return Pair(target, Draft("ngram", draft.ngram_drafter(), {}))
    return Pair(target, Draft("toy", draft.model_drafter(fn, 5), toys.noisy(toys.table(5, 0), 0.7, 1)))


def hot(rule: str) -> sampling.SamplingParams:
    return sampling.SamplingParams(temperature=0.0 if rule == "greedy" else 0.9)


def traced(pair: Pair, prompts=None, **options) -> tuple[list, list[dict]]:
    """Return the outputs and the records of a traced call, the latter as a file has them."""
    records: list[dict] = []
    outputs = specjax.generate(pair, prompts or PROMPTS, trace=records.append, **options)
    return outputs, json.loads(json.dumps(records))


def counts(records: list[dict]) -> dict[tuple, list[int]]:
    """Return each row's ids as its records have them."""
    found: dict[tuple, list[int]] = {}
    for record in records:
        found.setdefault((record["id"], record["sample"]), []).extend(record["emitted"])
    return found


def toy_run(source: str, rule: str) -> list[dict]:
    """Return the records of a traced run, which are those of the ids that an untraced run gives."""
    options = {"rule": rule, "sampling": hot(rule), "gamma": 3, "max_new_tokens": 24, "samples": 3, "batch_size": 4}
    prompts = [[0, 1, 2, 0, 1], [3, 2, 3]]
    outputs, records = traced(toy_pair(source), prompts, trace_full=True, **options)
    plain = specjax.generate(toy_pair(source), prompts, **options)
    assert [out.ids for out in outputs] == [out.ids for out in plain]
    assert counts(records) == {(out.id, out.sample): out.ids for out in outputs if out.ids}
    assert len(records) == sum(out.stats["num_rounds"] for out in outputs)
    return records


@pytest.fixture(scope="module")
def toy_records() -> dict[str, list[dict]]:
    """Return the records of a drafting model, by rule."""
    return {rule: toy_run("model", rule) for rule in RULES}


def numbers_of(records: list[dict]) -> list[dict]:
    """Return copies of records without their distributions."""
    return [{name: value for name, value in record.items() if name not in "pq"} for record in copy.deepcopy(records)]


def decided_again(records: list[dict]) -> None:
    for some in (records, numbers_of(records)):
        found = replay.replay(some)
        assert found.faults == []
        assert found.num_rounds == len(records) < found.num_decisions
    assert sum(record["num_drafted"] for record in records) > 5


@pytest.mark.slow
def test_toys_are_traced_and_decided_again(toy_records):
    for records in toy_records.values():
        decided_again(records)
        accepted = [draft["accepted"] for record in records for draft in record["drafts"]]
        assert any(accepted)
        assert not all(accepted)


@pytest.mark.parametrize("rule", quick("rejection"))
def test_a_draft_without_distributions_is_traced_and_decided_again(rule):
    decided_again(toy_run("ngram", rule))


@pytest.mark.slow
@pytest.mark.parametrize("rule", quick("block"))
def test_a_transformer_is_traced_and_decided_again(rule):
    pair = t.pair(t.tiny(layers=1), t.tiny(t.MID, layers=1))
    options = {"rule": rule, "sampling": hot(rule), "gamma": 3, "max_new_tokens": 12, "batch_size": 2}
    outputs, records = traced(pair, trace_full=True, **options)
    plain = specjax.generate(pair, PROMPTS, **options)
    assert [out.ids for out in outputs] == [out.ids for out in plain]
    assert [out.stats for out in outputs] == [out.stats for out in plain]
    assert counts(records) == {(out.id, out.sample): out.ids for out in outputs}
    assert replay.replay(records).faults == []
    assert len(records[0]["p"][0]) == t.VOCAB


def first(records: list[dict], good) -> dict:
    return next(record for record in records if good(record))


TAMPERED = {
    "a uniform": ("rejection", lambda r: r["drafts"][0].update(uniform=r["drafts"][0]["uniform"] / 2), "uniform"),
    "a draft's noise": ("block", lambda r: r["drafts"][0].update(draft_noise=9.0), "its noise"),
    "a draft": ("coupled", lambda r: r["drafts"][0].update(id=(r["drafts"][0]["id"] + 1) % 5), "noise"),
    "an acceptance": ("rejection", lambda r: r.update(num_accepted=r["num_accepted"] - 1), "marks"),
    "log p": ("rejection", lambda r: r["drafts"][0].update(log_p=-30.0), "but it is accepted"),
    "log q": ("block", lambda r: r["drafts"][0].update(log_q=0.0), "pi is"),
    "pi": ("block", lambda r: r["drafts"][0].update(pi=0.123), "pi is"),
    "the extra token": ("rejection", lambda r: r["extra"].update(id=(r["extra"]["id"] + 1) % 5), "noise"),
    "its weight": ("block", lambda r: r["extra"].update(log_weight=-50.0), "greater score"),
    "a margin": ("greedy", lambda r: r["targets"][0].update(margin=7.0), "margin"),
    "the target's token": ("greedy", lambda r: r["targets"][0].update(id=(r["targets"][0]["id"] + 1) % 5), "agree"),
    "what came out": ("coupled", lambda r: r["emitted"].append(1), "committed"),
    "the key": ("coupled", lambda r: r.update(key=[1, 2]), "noise"),
    "the round": ("rejection", lambda r: r.update(round=r["round"] + 1), "uniform"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAMPERED)
def test_a_trace_that_was_changed_is_caught(toy_records, name):
    rule, change, words = TAMPERED[name]
    records = numbers_of(toy_records[rule])
    record = first(records, lambda r: r["num_accepted"] > 0 and r["num_drafted"] > r["num_accepted"])
    change(record)
    faults = replay.replay(records).faults
    assert any(words in fault for fault in faults), faults
    where = f"id {record['id']}, sample {record['sample']}, round {record['round']}:"
    assert all(fault.startswith(where) for fault in faults)


@pytest.mark.parametrize("rule", RULES)
def test_distributions_that_do_not_fit_are_caught(toy_records, rule):
    records = copy.deepcopy(toy_records[rule])
    record = first(records, lambda r: r["num_drafted"] > 0)
    record["p"] = [[*row[1:], row[0]] for row in record["p"]]
    assert any("the distributions" in fault for fault in replay.replay(records).faults)


def test_threefry_is_that_of_jax():
    key = np.asarray([7, 1234567890], np.uint32)
    ids = np.asarray([0, 1, 4000], np.uint32)
    np.testing.assert_allclose(replay.gumbel(key, ids), sampling.gumbel(key, ids), rtol=1e-6, atol=1e-6)
    assert replay.fold(key, 3, 5) == np.asarray(sampling.fold(sampling.fold(key[None], 3), 5))[0].tolist()
    ours = [replay.uniform(replay.fold(key, i)) for i in range(3)]
    assert ours == np.asarray(sampling.uniforms(key[None], 3))[0].tolist()


def test_a_stop_leaves_out_the_rounds_after_it():
    """The engine runs one round ahead of what it has seen."""
    pair = toy_pair()

    class Stops:
        def __init__(self):
            self.ids: list[int] = []

        def push(self, ids):
            self.ids += ids
            return 5 if len(self.ids) >= 5 else None

    call = specjax.api.Call(pair, specjax.api.Options(trace=(records := []).append, gamma=3, ignore_eos=True))
    call._watch = lambda job: Stops()
    (out,) = call.run(specjax.requests.as_rows([[0, 1, 2]], pair.target))
    assert len(out.ids) == 5
    assert [record["at"] for record in records] == sorted({record["at"] for record in records})
    assert all(record["at"] < 5 for record in records)
    assert counts(records)[1, 0][:5] == out.ids


def test_what_cannot_be_traced_is_said_in_a_line():
    pair = toy_pair()
    for options, words in (
        ({"gamma": "auto"}, "needs one width"),
        ({"rule": Rule("mine", RULES["rejection"].verify), "sampling": hot("rejection")}, "'mine' cannot be traced"),
    ):
        with pytest.raises(UsageError, match=words):
            traced(pair, [[0, 1]], **options)
    large = Pair(Model("large", toys.MarkovFn(5), toys.table(5, 0), None, 5000, 64, (), None, "float32"), pair.draft)
    with pytest.raises(UsageError, match="at most 4096"):
        traced(large, [[0, 1]], trace_full=True)


@pytest.mark.slow
def test_auto_is_traced_at_one_width(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    pair = t.pair(t.tiny(layers=1), t.tiny(t.MID, layers=1))
    with pytest.warns(specjax.tune.TuneWarning):
        _, records = traced(pair, PROMPTS[:1], gamma="auto", width=4, max_new_tokens=8)
    assert replay.replay(records).faults == []
    assert {record["width"] for record in records} == {4}


def test_a_file_is_written_and_replayed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "cache"))
    trace, rows = tmp_path / "trace.jsonl", tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_ids": [5, 17, 42]}\n')
    call = ["generate", "--target", str(t.DATA / t.TARGET), "--dtype", "float32", "--input", str(rows), "--output", "-",
            "--max-new-tokens", "6", "--trace", str(trace)]  # fmt: skip
    assert main(call) == 0
    (out,) = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert counts(list(replay.read(trace)))[1, 0] == out["ids"]
    assert replay.main([str(trace)]) == 0
    assert capsys.readouterr().out.endswith("all agree\n")
    lines = trace.read_text().splitlines()
    broken = json.loads(lines[0])
    broken["emitted"][0] += 1
    trace.write_text("\n".join([json.dumps(broken), *lines[1:]]))
    assert replay.main([str(trace)]) == 1
    assert "1 do not agree" in capsys.readouterr().out
    assert main([*call, "--trace-full", "--resume"]) == 2
    assert main([*call]) == 2
    assert "exists" in capsys.readouterr().err


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(UsageError, match="Record 1 is none of a trace"):
        replay.replay([{"id": 1}])
    with pytest.raises(UsageError, match="Cannot read"):
        list(replay.read(tmp_path / "nowhere"))
    (tmp_path / "bad").write_text("{\n")
    with pytest.raises(UsageError, match="line 1: not JSON"):
        list(replay.read(tmp_path / "bad"))
    with pytest.raises(SystemExit):
        replay.main([str(tmp_path / "nowhere")])


def test_a_call_without_a_trace_compiles_the_normal_program():
    pair, prompts = toy_pair(), [[0, 1, 2]]
    before = specjax.api.traced.cache_info().misses
    specjax.generate(pair, prompts, gamma=3, max_new_tokens=2)
    assert specjax.api.traced.cache_info().misses == before
    traced(pair, prompts, gamma=3, max_new_tokens=2)
    assert specjax.api.traced.cache_info().misses == before + 1
