"""Costs: measured, kept, read again; a missing table is measured briefly, and said."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import tiny as t

import specjax
from specjax import tune
from specjax.cli.main import main
from specjax.errors import UsageError
from specjax.speculation import plan

KEY = {"batch_size": 1, "rule": "greedy"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    return tmp_path


def table(**changes) -> tune.CostTable:
    values = {"key": KEY, "widths": [1, 4], "draft_seconds": [0.0, 0.1], "verify_seconds": [1.0, 1.5],
              "catch_up_seconds": 0.01, "rounds": 3}  # fmt: skip
    return tune.CostTable(**{**values, **changes})


def test_a_table_that_was_kept_is_read_again(cache):
    assert tune.read(KEY) is None
    assert tune.write(table())
    assert tune.read(KEY) == table()
    assert tune.read({**KEY, "batch_size": 2}) is None
    tune.path_of(KEY).write_text("{")
    assert tune.read(KEY) is None


def test_a_cache_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "file"))
    assert not tune.write(table())


def test_the_costs_of_a_step_and_of_each_width_are_told_apart():
    """Five timings of 0.3 per draft step, and 1, 2, 3 at the widths; a width no round had costs what the last does."""
    width_of = {0: 0, 1: 1, 3: 1, 4: 2, 7: 2}
    seconds = {d: 0.3 * d + 1.0 + width for d, width in width_of.items()}
    step, verify = tune._fit(seconds, width_of, 4)
    assert step == pytest.approx(0.3)
    np.testing.assert_allclose(verify, [1.0, 2.0, 3.0, 3.0])


def test_noise_never_makes_a_draft_step_or_a_wider_step_gain_time():
    step, verify = tune._fit({0: 1.0, 1: 0.9, 3: 0.8, 7: 0.7}, {0: 0, 1: 1, 3: 1, 7: 2}, 3)
    assert step == 0.0
    assert verify == sorted(verify)
    assert tune._fit({0: 1.0, 1: 1.1, 2: 1.6, 3: 1.7}, {0: 0, 1: 0, 2: 1, 3: 1}, 2, free=True)[0] == 0.0


@pytest.mark.slow
def test_auto_measures_what_is_missing_once_and_repeats_itself(cache):
    pair = t.pair(t.tiny(layers=1), t.tiny(t.MID, layers=1))
    options = {"gamma": "auto", "max_new_tokens": 24, "batch_size": 2}
    prompts = t.prompts()[:2]
    with pytest.warns(tune.TuneWarning, match=r"batch size 2; they were measured briefly\. 'specjax tune'"):
        first = specjax.generate(pair, prompts, **options)
    (kept,) = (cache / "costs").iterdir()
    assert kept.suffix == ".json"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second, third = (specjax.generate(pair, prompts, **options) for _ in range(2))
    plain = specjax.generate(t.pair(t.tiny(layers=1)), prompts, max_new_tokens=24, batch_size=2)
    assert [out.ids for out in second] == [out.ids for out in first] == [out.ids for out in plain]
    assert [out.stats for out in second] == [out.stats for out in third]
    assert len(first[0].stats["num_accepted_tokens_per_pos"]) == 7


@pytest.mark.slow
def test_the_command_measures_and_keeps_tables(cache, capsys):
    words = ["tune", "--target", str(t.DATA / t.TARGET), "--draft", "ngram", "--dtype", "float32", "--batch-size", "1",
             "--rule", "greedy", "--rounds", "2"]  # fmt: skip
    assert main(words) == 0
    shown = capsys.readouterr()
    assert "plain" in shown.out
    assert "1: 1.00, 4: " in shown.out
    (kept,) = (cache / "costs").iterdir()
    found = tune.msgspec.json.decode(kept.read_bytes(), type=tune.CostTable)
    assert found.widths == [1, 4, 8]
    assert found.rounds == 2
    assert all(value > 0 for value in found.verify_seconds)
    assert len(found.draft_seconds) == 8


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--draft", "none"], "no draft to measure"), (["--batch-size", "0"], "--batch-size is 0"),
     (["--rounds", "0"], "--rounds is 0")],
)  # fmt: skip
def test_wrong_calls_of_the_command_are_refused(words, said, cache, capsys):
    assert main(["tune", "--target", str(t.DATA / t.TARGET), "--dtype", "float32", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gamma", "draft", "width", "dtype", "wanted"),
    [
        (None, "ngram", None, "float32", (4, (5,), False, False)),
        (2, "ngram", None, "bfloat16", (2, (3,), False, False)),
        (0, "ngram", None, "bfloat16", (0, (2,), False, False)),
        (3, "none", None, "float32", (0, (1,), False, False)),
        ("auto", "none", None, "float32", (0, (1,), False, False)),
        ("auto", "ngram", None, "float32", (7, (1, 4, 8), False, True)),
        ("auto", "ngram", None, "bfloat16", (7, (2, 4, 8), False, True)),
        ("auto", "ngram", 6, "bfloat16", (5, (6,), True, True)),
        ("auto", "ngram", 16, "float32", (7, (16,), True, True)),
    ],
)
def test_what_a_call_asks_becomes_widths(gamma, draft, width, dtype, wanted):
    found = plan(gamma, None, draft, width, dtype)
    assert (found.gamma, found.widths, found.exact, found.controller is not None) == wanted


def test_a_gamma_that_is_neither_a_number_nor_auto_is_refused():
    with pytest.raises(UsageError, match=r"gamma is many; expected 0\.\.64, or auto"):
        specjax.generate(t.pair(t.tiny(layers=1)), [[1]], gamma="many")
