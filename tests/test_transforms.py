"""Bias, bans and penalties on the toy: greedy text is that of plain arithmetic, whatever is drafted; edge values."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax import sampling as s
from specjax import transforms
from specjax.draft import model_drafter, ngram_drafter, no_drafter
from specjax.errors import RowError
from specjax.reference_transforms import shaped, transformed
from specjax.sampling import SamplingParams
from specjax.types import Finish, Status
from specjax.verify import RULES

V = 8
TABLE = toys.table(V, seed=27, sharpness=1.0)
DRAFTS = {
    "none": (no_drafter(), {}),
    "ngram": (ngram_drafter(), {}),
    "model": (model_drafter(toys.MarkovFn(V), V), toys.noisy(TABLE, 0.7, seed=1)),
}
SETTINGS = [
    {},
    {"logit_bias": {1: 1.5, 6: -2.0}},
    {"ban": [2, 5]},
    {"allow": [0, 1, 4, 7]},
    {"ban_sequences": [[7, 4], [6, 6, 1], [3]]},
    {"min_new_tokens": 9},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.4},
    {"frequency_penalty": -0.4},
    {"logit_bias": {1: 1.5}, "ban_sequences": [[7, 4], [6, 6]], "min_new_tokens": 9, "repetition_penalty": 1.2,
     "presence_penalty": 0.5, "frequency_penalty": 0.3, "min_p": 0.1, "top_k": 3, "top_p": 0.8},
]  # fmt: skip
PROMPTS = [[1], [7, 0, 5, 5, 1, 6, 2]]
ROWS = [(prompt, SamplingParams(**each)) for each in SETTINGS for prompt in PROMPTS]
EOS, NEW, GAMMA = 3, 24, 3


def run(source: str, rows=ROWS, *, rule="greedy", eos: int | None = EOS, **options) -> toys.Run:
    drafter, draft = DRAFTS[source]
    return toys.run_batch(
        toys.MarkovFn(V),
        drafter,
        {"target": TABLE, "draft": draft},
        [prompt for prompt, _ in rows],
        rule=RULES[rule],
        gamma=GAMMA if source != "none" else 0,
        max_new=NEW,
        vocab=V,
        eos=eos,
        sampling=[params for _, params in rows],
        **options,
    )


def chain(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Return the greedy output by plain arithmetic."""
    output: list[int] = []
    while len(output) < NEW and EOS not in output[-1:]:
        before = [*prompt, *output]
        row = TABLE[before[-2] if len(before) > 1 else 0, before[-1]]
        output.append(int(np.argmax(shaped(row, params, prompt, output, eos=(EOS,)))))
    return tuple(output)


@pytest.mark.parametrize("source", DRAFTS)
def test_greedy_text_under_every_transform_is_that_of_plain_arithmetic(source):
    """Cases 12 and 49 among them: penalties of both signs, and sequences within one block and across two."""
    result = run(source)
    assert result.outputs == [chain(*row) for row in ROWS]
    assert len(set(result.outputs)) > 12  # the settings make a difference
    if source == "model":
        assert 0.2 < result.acceptance < 0.95


def test_a_banned_sequence_is_drafted_at_every_place_and_never_comes():
    """Case 49: without the ban it comes within blocks and across them."""
    free = run("model", [(prompt, SamplingParams()) for prompt in PROMPTS], eos=None)
    pairs = {pair for output in free.outputs for pair in itertools.pairwise(output)}
    places = {int(p) for row in range(2) for p in free.state.place[row, free.state.prompt_length[row] + 1 :][:NEW]}
    assert {0, 1} <= places
    rows = [(prompt, SamplingParams(ban_sequences=[pair])) for pair in sorted(pairs) for prompt in PROMPTS]
    for (_, params), output in zip(rows, run("model", rows, eos=None).outputs, strict=True):
        assert params.ban_sequences[0] not in set(itertools.pairwise(output))


@pytest.mark.parametrize("rule", ["greedy", "rejection"])
def test_a_bias_of_minus_100_keeps_out_what_the_draft_always_proposes(rule):
    """Case 14: at no position of a block."""
    token = 6
    eager = np.full_like(TABLE, 0.0)
    eager[..., token] = 300.0  # proposed in spite of the bias
    params = SamplingParams(temperature=0.0 if rule == "greedy" else 1.0, logit_bias={token: -100.0})
    result = toys.run_batch(
        toys.MarkovFn(V), DRAFTS["model"][0], {"target": TABLE, "draft": eager}, PROMPTS * 8, rule=RULES[rule],
        gamma=GAMMA, max_new=NEW, vocab=V, sampling=[params] * 16,
    )  # fmt: skip
    assert result.acceptance == 0.0
    assert not any(token in output for output in result.outputs)


def test_the_repetition_penalty_is_applied_once_and_sees_the_prompt():
    """Cases 51 and 52: logit -2 becomes -3 and 3 becomes 2, however often the token was there; presence and frequency
    count the output alone."""
    logits = jnp.asarray([[-2.0, 3.0, 1.0, 1.0]] * 2)
    rows = [SamplingParams(repetition_penalty=1.5), SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)]
    sampling = s.stack(rows)
    tokens = jnp.asarray([[0, 0, 1, 2, 2, 0]] * 2)
    prompt, count = jnp.asarray([3, 3]), jnp.asarray([6, 6])
    history = transforms.init_history(sampling, tokens, prompt, 4)
    history = transforms.commit(history, None, tokens[:, 3:], jnp.asarray([3, 3]))
    context = transforms.begin(sampling, history, tokens, prompt, count, jnp.full((2, 1), -1))
    found = transforms.shape(logits, sampling, context)
    np.testing.assert_allclose(found[0], [-3.0, 2.0, 1 / 1.5, 1.0])
    np.testing.assert_allclose(found[1], [-2.75, 3.0, 0.0, 1.0])
    for row, params in enumerate(rows):
        np.testing.assert_allclose(found[row], shaped(logits[row], params, [0, 0, 1], [2, 2, 0]), rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_all_ids_but_one_are_banned_it_comes_alone(temperature):
    params = SamplingParams(temperature=temperature, ban=[i for i in range(V) if i != 5])
    result = run("model", [([1, 2], params)] * 4, rule="rejection", eos=None)
    assert result.outputs == [(5,) * NEW] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.slow
def test_where_nothing_is_allowed_the_row_fails_and_its_mates_go_on(temperature):
    """At once, or when a sequence's last token is the only one left: what came before stays."""
    everything = list(range(V))
    rows = [
        ([1, 2], SamplingParams(temperature=temperature, ban=everything)),
        ([1, 2], SamplingParams(temperature=temperature, allow=[4], ban_sequences=[[4, 4, 4]])),
        ([1, 2], SamplingParams(temperature=temperature, allow=[EOS], min_new_tokens=1)),
        ([1, 2], SamplingParams(temperature=temperature)),
    ]
    for source in DRAFTS:
        result = run(source, rows, rule="rejection", check=False)
        assert [result.outputs[i] for i in range(3)] == [(), (4, 4), ()]
        assert result.state.finish.tolist()[:3] == [Finish.ERROR] * 3
        assert result.state.status.tolist() == [Status.NOTHING_ALLOWED] * 3 + [Status.OK]
        assert result.state.finish[3] != Finish.ERROR


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-8},
        {"temperature": 1.0, "top_p": 1e-8},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 0.0, "top_k": 5, "top_p": 0.9},
    ],
)
def test_edge_values_that_leave_the_likeliest_token_are_greedy(settings):
    """Rows of one program beside each other; TABLE has no ties."""
    result = run("model", [(prompt, SamplingParams(**settings)) for prompt in PROMPTS], rule="rejection")
    assert result.outputs == [chain(prompt, SamplingParams()) for prompt in PROMPTS]


def test_edge_values_that_keep_everything_change_nothing():
    logits = TABLE[0, :3]
    rows = [{}, {"top_k": 0}, {"top_k": V}, {"top_k": V + 100}, {"top_p": 1.0}, {"min_p": 0.0}]
    params = [SamplingParams(temperature=0.7, **row) for row in rows]
    sampling = s.stack(params, s.Features(truncation=True))
    found = s.distribution(jnp.broadcast_to(jnp.asarray(logits), (len(rows), 3, V)), sampling)
    for row in range(len(rows)):
        np.testing.assert_array_equal(found.probs[row], found.probs[0])
        np.testing.assert_allclose(found.probs[row, 0], transformed(logits[0], params[row]), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"top_k": -1}, "top_k is -1; expected an integer >= 0"),  # case 33
        ({"top_k": 2.5}, "top_k"),
        ({"top_p": 0.0}, "top_p is 0.0; expected a number above 0"),
        ({"top_p": 1.1}, "top_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias has inf"),
        ({"allow": []}, "allow is empty"),
        ({"ban_sequences": [[]]}, "empty sequence"),
        ({"min_new_tokens": -1}, "min_new_tokens"),
        ({"draft_temperature": -1.0}, "draft_temperature"),
        ({"draft_top_p": 0.0}, "draft_top_p"),
    ],
)
def test_values_out_of_range_are_refused(settings, message):
    with pytest.raises(RowError, match=message):
        SamplingParams(**settings)


def test_what_no_row_uses_is_not_in_the_program():
    plain = s.features_of([SamplingParams(), SamplingParams(temperature=0.7)])
    assert plain == s.Features()
    # At temperature 0 a truncation leaves the likeliest token, so it costs nothing.
    assert s.features_of([SamplingParams(top_k=5, top_p=0.9, draft_top_k=3)]) == s.Features()
    assert s.features_of([SamplingParams(temperature=1.0, draft_top_k=3)]) == s.Features(truncation=True, draft=True)
    assert s.features_of([SamplingParams(ban_sequences=[[1]])]) == s.Features(bias=True)
    assert s.features_of([SamplingParams(ban_sequences=[[1, 2, 3], [4, 5], [5, 6]])]).sequences == (4, 4)


class Counting(toys.MarkovFn):
    """Counts how often it is traced."""

    traces = 0

    def __call__(self, *args, **options):
        Counting.traces += 1
        return super().__call__(*args, **options)


def test_changed_values_compile_nothing():
    """Case 80: the values are traced; only which families are in use is static."""
    target = Counting(V)
    base = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.1, "ban": [1]}
    other = {"temperature": 1.3, "min_p": 0.1, "presence_penalty": 0.3, "logit_bias": {2: 1.0}, "allow": [2, 3, 4]}
    outputs = []
    for settings in (base, other, {**other, "temperature": 0.9}):
        result = toys.run_batch(
            target, DRAFTS["ngram"][0], {"target": TABLE, "draft": {}}, PROMPTS, rule=RULES["rejection"], gamma=GAMMA,
            max_new=NEW, vocab=V, sampling=[SamplingParams(**settings)] * 2,
        )  # fmt: skip
        outputs.append((result.outputs, Counting.traces))
    assert outputs[0][1] > 0
    assert len({traces for _, traces in outputs}) == 1
    assert outputs[0][0] != outputs[1][0]
