"""The loop of rounds, pure: what ``generate`` compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from specjax import round
from specjax.types import Controller, Drafter, Finish, ModelFn, Params, RoundState, Rule

MAX_GAMMA = 64
MAX_WIDTHS = 3


def make_decoder(
    target_fn: ModelFn,
    drafter: Drafter,
    *,
    rule: Rule,
    gamma: int,
    vocab_size: int,
    width: int | Sequence[int] | None = None,
    exact: bool = False,
    controller: Controller | None = None,
    check: bool = False,
) -> Callable[[dict[str, Params], RoundState, jax.Array | int], RoundState]:
    """Return the loop ``decode(params, state, round_limit) -> state``: pure, one ``lax.while_loop``, no host sync.

    It runs rounds until no row is running or ``round_limit`` (traced) rounds are done; call it again to go on.

    Args:
        target_fn: the target.
        drafter: the draft source.
        rule: the verification rule.
        gamma: K, drafted tokens per round, 0..64; a row's own ``RoundState.gamma`` may be less.
        vocab_size: V, the vocabulary in use.
        width: W, rows of each target step, at least ``gamma + 1`` (the default); or up to three, ascending: each is
            compiled, and a round takes the smallest that holds its drafts.
        exact: no bit of the target's results may depend on the draft; one width.
        controller: chooses gamma in every round; ``params["costs"]`` is for it.
        check: also set the status bits of broken invariants.

    Raises:
        ValueError: gamma or width out of range.
    """
    if not 0 <= gamma <= MAX_GAMMA:
        raise ValueError(f"gamma is {gamma}; expected 0..{MAX_GAMMA}.")
    widths = widths_of(gamma, width)
    if exact and len(widths) > 1:
        raise ValueError(f"widths are {widths}; expected one where bits are to be exact.")
    parts = round.Parts(target_fn, drafter, rule, gamma, widths, vocab_size, exact, controller, check)

    def decode(params: dict[str, Params], state: RoundState, round_limit: jax.Array | int) -> RoundState:
        limit = jnp.asarray(round_limit, jnp.int32)

        def unfinished(carry):
            rounds, state = carry
            return (rounds < limit) & jnp.any(state.finish == Finish.RUNNING)

        def body(carry):
            rounds, state = carry
            return rounds + 1, round.speculative_round(params, state, parts)[0]

        return lax.while_loop(unfinished, body, (jnp.int32(0), state))[1]

    return decode


def widths_of(gamma: int, width: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the widths to compile.

    Raises:
        ValueError: not one to three, not ascending, or the last cannot hold gamma drafts.
    """
    given = (gamma + 1,) if width is None else (width,) if isinstance(width, int) else tuple(width)
    if given and given[-1] < gamma + 1:
        raise ValueError(f"width is {given[-1]}; expected at least gamma + 1 = {gamma + 1}.")
    if not 1 <= len(given) <= MAX_WIDTHS or list(given) != sorted(set(given)) or given[0] < 1:
        raise ValueError(f"widths are {given}; expected one to {MAX_WIDTHS}, ascending.")
    return given
