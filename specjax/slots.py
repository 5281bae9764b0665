"""What an engine needs of the loop's state besides the loop: a view to read while the next chunk runs, and rows put
back from their confirmed ids. Pure functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from specjax import cache as kv
from specjax import transforms
from specjax.types import Cache, Drafter, Finish, ModelFn, Observed, Params, RoundState

# The per-token records of a state; those that were not asked for are None.
RECORDS = ("tokens", "place", "accepted", "drafted", "logprobs", "sampled_logprobs", "top_ids", "top_logprobs")


@flax.struct.dataclass
class View:
    """Copies of what the host reads after a chunk: the state itself is donated to the next one.

    Attributes:
        finish, status, num_tokens, round: [B] int32, as in the state.
        draft_on: [B] bool.
        in_step: [B] bool, whether the row's caches fitted its tokens before the chunk, and fit them after it.
        records: [B, S, ...] by name, those of ``RECORDS`` that are kept.
    """

    finish: jax.Array
    status: jax.Array
    num_tokens: jax.Array
    round: jax.Array
    draft_on: jax.Array
    in_step: jax.Array
    records: dict[str, jax.Array]


def in_step(state: RoundState, drafter: Drafter, gamma: int, may_lag: bool) -> jax.Array:
    """Say of each row whether its caches hold what its tokens say (invariant 1); True where nothing runs.

    Args:
        state: the loop's.
        drafter, gamma: of the program.
        may_lag: rows may sit out rounds, so that the draft's cache may lack entries.
    """
    fits = state.cache.length == state.num_tokens - 1
    length = drafter.length(state.draft)
    if length is not None:
        fits &= length <= state.num_tokens - 1
        asked = state.draft_on & (jnp.minimum(state.gamma, gamma) > 0)
        if drafter.max_positions is not None:
            asked &= state.num_tokens + gamma <= drafter.max_positions
        if not (may_lag or drafter.lazy):
            fits &= (length >= state.num_tokens - 2) | ~asked
    return fits | (state.finish != Finish.RUNNING)


def view_of(state: RoundState, fits: jax.Array) -> View:
    """Return what the host may read of a state; ``fits`` is ``in_step`` before the chunk and after it."""
    kept = {name: getattr(state, name) for name in RECORDS}
    return View(
        finish=state.finish,
        status=state.status,
        num_tokens=state.num_tokens,
        round=state.round,
        draft_on=state.draft_on,
        in_step=fits,
        records={name: value for name, value in kept.items() if value is not None},
    )


def restored(
    row: RoundState,
    params: dict[str, Params],
    tokens: jax.Array,
    saved: dict[str, Any],
    *,
    target_fn: ModelFn,
    drafter: Drafter,
    width: int,
) -> RoundState:
    """Return the state of one row as it was: its prompt prefilled as at first, its output fed in blocks of ``width``.

    A step of that width is what wrote each entry first, so at one width the entries are the same bits.

    Args:
        row: the state of its prompt, prefilled, of capacity T or more.
        params: ``{"target": ..., "draft": ...}``.
        tokens: [1, T] prompt and output, padded; T is at least their number and ``width`` more.
        saved: ``num_tokens``, ``round``, ``status``, ``draft_on`` [1], and the records [1, T, ...] without the tokens.
        target_fn, drafter, width: of the program.
    """
    capacity = tokens.shape[1]
    first, count = row.num_tokens[0] - 1, saved["num_tokens"][0]

    def feed(i: jax.Array, carry: tuple[Cache, Any]) -> tuple[Cache, Any]:
        cache, draft = carry
        block = lax.dynamic_slice(tokens, (0, first + i * width), (1, width))
        if drafter.observe is None:
            return target_fn(params["target"], block, cache, logits="none").cache, draft
        out = target_fn(params["target"], block, cache, logits="none", features=True)
        assert out.features is not None
        seen = Observed(block, out.features, cache.length, saved["num_tokens"])
        return out.cache, drafter.observe(params["draft"], draft, seen)

    draft = () if drafter.observe is None else row.draft
    cache, draft = lax.fori_loop(0, (count - 1 - first + width - 1) // width, feed, (row.cache, draft))
    if drafter.observe is None:
        draft = drafter.init(params["draft"], tokens, saved["num_tokens"], row.tokens.shape[1])
    records = {name: value for name, value in saved.items() if name in RECORDS}
    pad = {name: getattr(row, name).shape[1] - value.shape[1] for name, value in records.items()}
    records = {
        name: jnp.pad(value, ((0, 0), (0, pad[name]), *((0, 0),) * (value.ndim - 2)))
        for name, value in records.items()
    }  # fmt: skip
    return replace(
        row,
        tokens=jnp.pad(tokens, ((0, 0), (0, row.tokens.shape[1] - capacity))),
        num_tokens=saved["num_tokens"],
        finish=jnp.full((1,), int(Finish.RUNNING), jnp.int32),
        status=saved["status"],
        round=saved["round"],
        draft_on=saved["draft_on"],
        history=transforms.replay(row.sampling, row.history, tokens, row.prompt_length, saved["num_tokens"]),
        cache=kv.rollback(cache, saved["num_tokens"] - 1),
        draft=draft,
        **records,
    )


def with_sampling(state: RoundState, sampling: Any, slot: jax.Array) -> RoundState:
    """Return the state with other sampling settings, of one row, in a slot: in force from its next round on."""

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        return whole.at[slot].set(part[0].astype(whole.dtype))

    return replace(state, sampling=jax.tree.map(put, state.sampling, sampling))
