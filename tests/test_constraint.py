"""A constraint as a pure function: an automaton for a JSON-like grammar runs in the loop and rolls back."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import toys

from specjax.constraint import automaton
from specjax.draft import model_drafter, ngram_drafter, no_drafter
from specjax.sampling import SamplingParams
from specjax.types import Constraint, Finish
from specjax.verify import RULES

# The tokens of a tiny JSON: objects of one-letter keys whose values are 1 or objects, up to DEPTH deep.
OPEN, CLOSE, KEY, COLON, COMMA, ONE, END, OTHER = range(8)
V, DEPTH, NEW = 8, 3, 40
TABLE = toys.table(V, seed=4, sharpness=0.7)
DRAFTS = {
    "none": (no_drafter(), {}, 0),
    "ngram": (ngram_drafter(), {}, 4),
    "model": (model_drafter(toys.MarkovFn(V), V), toys.noisy(TABLE, 0.7, seed=1), 4),
}


def grammar() -> np.ndarray:
    """Return the table of the automaton: what may come where, at each depth."""
    places = [
        "start",
        "done",
        *(f"{what}{d}" for d in range(1, DEPTH + 1) for what in ("open", "key", "value", "after")),
    ]
    number = {name: i for i, name in enumerate(places)}
    table = np.full((len(places), V), -1)

    def rule(at: str, token: int, to: str) -> None:
        table[number[at], token] = number[to]

    rule("start", OPEN, "open1")
    rule("done", END, "done")
    for d in range(1, DEPTH + 1):
        outer = "done" if d == 1 else f"after{d - 1}"
        rule(f"open{d}", KEY, f"key{d}")
        rule(f"open{d}", CLOSE, outer)
        rule(f"key{d}", COLON, f"value{d}")
        rule(f"value{d}", ONE, f"after{d}")
        if d < DEPTH:
            rule(f"value{d}", OPEN, f"open{d + 1}")
        rule(f"after{d}", COMMA, f"open{d}")
        rule(f"after{d}", CLOSE, outer)
    return table


JSON = automaton(grammar())


def parse(tokens: list[int]) -> list[int]:
    """Read one object off the front and return the rest; an independent check by recursive descent."""
    assert tokens[0] == OPEN
    tokens = tokens[1:]
    while tokens[0] != CLOSE:
        assert tokens[:2] == [KEY, COLON]
        tokens = parse(tokens[2:]) if tokens[2] == OPEN else tokens[3:] if tokens[2] == ONE else pytest.fail("a value")
        if tokens[0] == COMMA:
            tokens = tokens[1:]
    return tokens[1:]


def run(source: str, rule: str, params: SamplingParams, constraint: Constraint = JSON, rows: int = 200) -> toys.Run:
    drafter, draft, gamma = DRAFTS[source]
    return toys.run_batch(
        toys.MarkovFn(V), drafter, {"target": TABLE, "draft": draft}, [[OTHER, 2], [1]] * (rows // 2), rule=RULES[rule],
        gamma=gamma, max_new=NEW, vocab=V, eos=END, sampling=[params] * rows, constraint=constraint,
    )  # fmt: skip


@pytest.mark.parametrize("source", ["ngram", "model"])
def test_every_text_that_ends_is_an_object_of_the_grammar(source):
    result = run(source, "rejection", SamplingParams(temperature=1.0, repetition_penalty=0.9))
    ended = [list(output) for output, finish in zip(result.outputs, result.state.finish, strict=True)
             if finish == Finish.EOS]  # fmt: skip
    assert len(ended) > 100
    assert len(set(map(tuple, ended))) > 20
    for output in ended:
        assert parse(output) == [END]
    assert 0.2 < result.acceptance < 0.95  # some drafts were rejected: states rolled back


@pytest.mark.slow
def test_the_text_under_a_constraint_is_plain_decodings_whatever_is_drafted():
    for rule, params in (("greedy", SamplingParams()), ("coupled", SamplingParams(temperature=1.0, top_p=0.9))):
        plain = run("none", rule, params, rows=40)
        assert run("model", rule, params, rows=40).outputs == plain.outputs


def test_the_first_call_has_no_token_and_the_state_counts_the_output():
    """The state may be any pytree: here a countdown after which only END may come."""

    def step(state, token):
        left = jnp.where(token < 0, state["left"], state["left"] - 1)
        return (jnp.arange(V) == END) == (left <= 0), {"left": left}

    countdown = Constraint(lambda: {"left": jnp.asarray(5, jnp.int32)}, step)
    result = run("model", "rejection", SamplingParams(temperature=1.0), countdown, rows=40)
    assert [len(output) for output in result.outputs] == [6] * 40
    assert all(output[-1] == END and END not in output[:-1] for output in result.outputs)


def test_a_mask_of_another_size_is_refused():
    wrong = Constraint(lambda: jnp.int32(0), lambda state, token: (jnp.ones(V + 1, bool), state))
    with pytest.raises(ValueError, match=r"mask has the shape \(9,\); expected \(8,\)"):
        run("ngram", "greedy", SamplingParams(), wrong, rows=2)


@pytest.mark.parametrize("table", [[[0.5, 1.0]], [1, 0], [[2, 0]], [[-2, 0]]])
def test_a_table_that_is_no_automaton_is_refused(table):
    with pytest.raises(ValueError, match="table"):
        automaton(table)
