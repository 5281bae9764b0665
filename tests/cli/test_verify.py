"""``specjax verify``: the table, the report, the verdict and the exit code."""

from __future__ import annotations

import json

import pytest

from specjax import proof
from specjax.errors import RowError
from specjax.proof_stages import Found


def lost(case):
    raise RowError("row 1 failed")


@pytest.fixture
def stages(monkeypatch):
    """Return ``stages(**functions)``: replaces the stages, whose comparisons tests/test_proof.py covers."""

    def replace(**functions):
        monkeypatch.setattr(proof, "STAGES", functions)

    return replace


def test_a_pass_is_a_table_a_verdict_and_exit_0(specjax, model, stages, tmp_path):
    stages(one=lambda case: Found(True, f"gamma {case.gamma}, top-k {case.settings.top_k}", ["a line"], {"n": 3}))
    path = tmp_path / "report.json"
    done = specjax("verify", "--target", model, "--draft", "ngram", "--dtype", "float32", "--gamma", 3, "--top-k", 5,
                   "--output", path)  # fmt: skip
    assert done.code == 0
    assert "verdict: lossless" in done.out
    assert "one" in done.out
    assert "gamma 3, top-k 5" in done.out
    assert "one: a line" in done.out
    report = json.loads(path.read_text())
    assert list(report) == ["specjax", "schema", "verdict", "settings", "stages"]
    assert report["verdict"] == "lossless"
    assert report["settings"]["sampling"]["top_k"] == 5
    (stage,) = report["stages"]
    assert list(stage) == ["name", "passed", "saw", "details", "seconds", "numbers"]
    assert stage["numbers"] == {"n": 3}


def test_a_loss_names_the_stage_and_exits_with_1(specjax, model, stages):
    stages(one=lambda case: Found(True, "fine"), two=lost)
    done = specjax("verify", "--target", model, "--draft", "ngram", "--dtype", "float32", "--output", "-")
    assert done.code == 1
    assert "verdict: a loss: two" in done.err
    assert "row 1 failed" in done.err
    assert json.loads(done.out)["verdict"] == "loss"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft", "none"], "nothing to verify"),
        (["--rule", "greedy", "--draft", "ngram"], "Rule greedy is what every rule does"),
        (["--draft", "ngram", "--ban-sequence", ""], "ban_sequence has an empty text"),
        (["--draft", "ngram", "--draft-top-k", "3"], "ngram draws nothing"),
        (["--top-p", "0"], "top_p is 0.0"),
        (["--logit-bias", "{"], "--logit-bias is not JSON"),
    ],
)
def test_wrong_calls_exit_with_2(specjax, model, options, message):
    done = specjax("verify", "--target", model, *options)
    assert done.code == 2
    assert message in done.err


@pytest.mark.slow
def test_a_real_pair_passes_every_stage(specjax, model):
    draft = model.with_name(model.name + ".draft-near")
    done = specjax("verify", "--target", model, "--draft", draft, "--dtype", "float32", "--quick", "--temperature", 0.8,
                   "--top-k", 50, "--frequency-penalty", 0.3, "--logit-bias", '{"5": 1.5}')  # fmt: skip
    assert done.code == 0, done.out
    assert done.out.count("passed") == 6
