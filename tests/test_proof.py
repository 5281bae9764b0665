"""``prove`` passes on right parts and names the stage that each fault is first seen in."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import toys
from letters import VOCAB, pair

import specjax.round
from specjax import api, proof, proof_rule, transforms
from specjax import cache as kv
from specjax import proof_stats as ps
from specjax.constraint import automaton
from specjax.errors import UsageError
from specjax.generate import Program
from specjax.proof import STAGES, prove
from specjax.sampling import SamplingParams
from specjax.types import Rule
from specjax.verify import greedy, rejection

SETTINGS = SamplingParams(temperature=0.8, top_p=0.95, repetition_penalty=1.1)
DEEP = 40  # a fault that begins here is only seen by the long context


@pytest.fixture(autouse=True)
def own_programs(monkeypatch):
    """A patched function must not meet, or leave behind, a program that is compiled already."""
    monkeypatch.setattr(api, "compiled", functools.lru_cache(Program))
    proof_rule._blocks.cache_clear()


def failed(monkeypatch, *names: str, quick: bool = True, **options) -> list[str]:
    """Return which of these stages fail."""
    monkeypatch.setattr(proof, "STAGES", {name: STAGES[name] for name in names})
    report = prove(options.pop("of", None) or pair(), quick=quick, **options)
    assert [stage["name"] for stage in report["stages"]] == list(names)
    lost = [stage["name"] for stage in report["stages"] if not stage["passed"]]
    assert report["verdict"] == ("loss" if lost else "lossless")
    return lost


@pytest.mark.parametrize(
    ("draft", "rule"), [pytest.param("model", "rejection", marks=pytest.mark.slow),
                        pytest.param("ngram", "block", marks=pytest.mark.slow),
                        pytest.param("model", "coupled", marks=pytest.mark.slow)]
)  # fmt: skip
def test_right_parts_pass_every_stage(draft, rule, monkeypatch):
    report = prove(pair(draft), sampling=SETTINGS, rule=rule, quick=True)
    assert [
        (stage["name"], stage["passed"], stage["details"]) for stage in report["stages"] if not stage["passed"]
    ] == []
    assert [stage["name"] for stage in report["stages"]] == list(STAGES)
    assert report["verdict"] == "lossless"
    sampled = next(stage for stage in report["stages"] if stage["name"] == "sampling")
    assert all(0 < each["effect"] < 0.6 for each in sampled["numbers"]["statistics"] if each["effect"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::specjax.tune.TuneWarning")
def test_auto_a_banned_text_and_a_constraint_pass_every_stage(monkeypatch):
    table = np.full((2, VOCAB), 1)
    table[1, 3] = -1  # after the first token, never id 3
    table[1, :3] = 0
    options = {"gamma": "auto", "ban_sequence": ["ab"], "constraint": automaton(table)}
    assert failed(monkeypatch, *STAGES, sampling=SETTINGS, **options) == []


def test_a_constraint_that_only_the_draft_side_forgets_is_seen_in_greedy(monkeypatch):
    """Verification that lets a token through which the constraint forbids."""
    table = np.array([[0] * VOCAB])
    table[0, 2] = -1
    shape_block = transforms.shape_block

    def forgetful(raw, sampling, context, tokens):
        logits, states = shape_block(raw, sampling, context, tokens)
        return jnp.concatenate([logits[:, :1], raw[:, 1:]], axis=1), states

    monkeypatch.setattr(transforms, "shape_block", forgetful)
    assert failed(monkeypatch, "greedy", constraint=automaton(table)) == ["greedy"]


def test_a_rollback_that_is_off_is_seen_in_small(monkeypatch):
    class Wrong:
        rollback = staticmethod(lambda cache, length: kv.rollback(cache, length - 1))

    monkeypatch.setattr(specjax.round, "kv", Wrong)
    assert failed(monkeypatch, "small") == ["small"]


@pytest.mark.slow
def test_a_greedy_rule_that_counts_past_a_miss_is_seen_in_greedy(monkeypatch):
    wrong = lambda hits, num_drafted: jnp.sum(hits, axis=1).astype(jnp.int32)  # noqa: E731
    monkeypatch.setattr(greedy, "leading", wrong)
    assert failed(monkeypatch, "greedy") == ["greedy"]


@pytest.mark.slow
def test_plain_p_for_the_residual_is_seen_in_identity(monkeypatch):
    monkeypatch.setattr(rejection, "_residual", lambda p, log_weights, proposal, place: log_weights)
    assert failed(monkeypatch, "identity", sampling=SETTINGS) == ["identity"]


@pytest.mark.slow
def test_penalties_that_do_not_see_the_drafts_are_seen_in_identity(monkeypatch):
    monkeypatch.setattr(specjax.transforms, "advance", lambda sampling, context, token: context)
    hot = SamplingParams(temperature=1.0, frequency_penalty=1.0)
    assert failed(monkeypatch, "identity", sampling=hot) == ["identity"]


@pytest.mark.slow
def test_a_rule_that_accepts_everything_is_seen_in_identity(monkeypatch):
    def verify(logits, proposal, sampling, keys):
        return rejection.verify(logits, proposal, sampling, keys).replace(num_accepted=proposal.num_drafted)

    assert failed(monkeypatch, "identity", rule=Rule("eager", verify)) == ["identity"]


@pytest.mark.slow
def test_one_key_for_all_rounds_is_seen_in_sampling(monkeypatch):
    fresh = specjax.round.round_keys
    monkeypatch.setattr(
        specjax.round, "round_keys", lambda state, *rest: fresh(state.replace(round=state.round * 0), *rest)
    )
    assert failed(monkeypatch, "sampling", quick=False) == ["sampling"]


class Blind(toys.MarkovFn):
    """Sees other logits in a block of several tokens that stands far down."""

    def __call__(self, params, tokens, cache, *, logits="all", features=False):
        out = super().__call__(params, tokens, cache, logits=logits, features=features)
        if tokens.shape[1] < 3 or (isinstance(logits, str) and logits == "none"):
            return out
        far = cache.length[:, None, None] > DEEP
        return out.replace(logits=jnp.where(far, jnp.roll(out.logits, 1, axis=-1), out.logits))


@pytest.mark.slow
def test_a_fault_far_down_is_seen_in_the_long_context(monkeypatch):
    of = pair()
    config = of.target.fn.config
    blind = type("Fn", (Blind,), {"dtype": "float32", "config": config})(VOCAB)
    deep = of.__class__(of.target.__class__(**{**vars(of.target), "fn": blind, "max_positions": 100}), of.draft)
    prompts = [[1, 2], [3], [4, 5, 6]]
    # --quick gives plain decoding the same width, and with it the same fault
    found = failed(monkeypatch, "small", "long context", of=deep, prompts=prompts, quick=False)
    assert found == ["long context"]


@pytest.mark.slow
def test_rows_that_wait_for_the_least_acceptance_are_seen_in_the_ragged_batch(monkeypatch):
    """Alone, a row has no mate to wait for."""
    right = greedy.leading

    def least(hits, num_drafted):
        count = right(hits, num_drafted)
        return jnp.broadcast_to(jnp.min(count), count.shape)

    def verify(logits, proposal, sampling, keys):
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        count = right(proposal.tokens == best[:, :-1], proposal.num_drafted)
        token = jnp.take_along_axis(best, count[:, None], axis=1)[:, 0]
        return greedy.Verdict(least(proposal.tokens == best[:, :-1], proposal.num_drafted), token)

    monkeypatch.setitem(api.RULES, "greedy", greedy.RULE._replace(verify=verify))
    assert failed(monkeypatch, "greedy", "ragged batch") == ["ragged batch"]


def test_what_cannot_be_verified_is_refused():
    for options, message in (
        ({"gamma": 0}, "gamma is 0"),
        ({"rule": "greedy"}, "Rule greedy"),
        ({"prompts": [[1]]}, "One prompt"),
    ):
        with pytest.raises(UsageError, match=message):
            prove(pair(), **options)
    with pytest.raises(UsageError, match="no draft"):
        prove(pair("none"))


def test_two_samples_of_one_law_are_taken_for_one_and_others_are_not():
    """20 repeats: p-values of one law are spread; a total variation of three times the effect is found at 1e-5."""
    rng = np.random.default_rng(0)
    p = np.full(20, 0.05)
    draws = [rng.choice(20, size=(2, 1000), p=p) for _ in range(20)]
    found = [ps.compare("same", [(a.tolist(), b.tolist())]) for a, b in draws]
    assert min(each.p_value for each in found) > 1e-4
    assert 0.2 < np.mean([each.p_value for each in found]) < 0.8
    effect = found[0].effect
    assert effect is not None
    shift = np.where(np.arange(20) < 10, 1, -1) * effect / 10
    other = rng.choice(20, size=1000, p=p + shift * 1.5)
    assert ps.compare("other", [(draws[0][0].tolist(), other.tolist())]).p_value < 1e-5
    counts = np.bincount(draws[0][0], minlength=20).astype(float)
    assert ps.against("same", [(counts, p)]).p_value > 1e-4
    assert ps.against("impossible", [(np.append(counts, 1.0), np.append(p, 0.0))]).p_value < 1e-5


def test_the_tail_of_chi_square_is_scipys():
    from scipy.special import chdtrc

    for degrees, statistic in ((1, 3.84), (10, 30.0), (500, 600.0), (500, 700.0)):
        assert ps.chi_square_tail(degrees, statistic) == pytest.approx(chdtrc(degrees, statistic), rel=1e-3)
    assert ps.chi_square_tail(0, 0.0) == 1.0
