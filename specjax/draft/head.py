"""A small head over the target's features as the draft (EAGLE, 2401.15077; Medusa, 2401.10774, as one chain).

The head's step for position t takes the token there and the feature of the position before it. The state keeps the
target's features at their own positions, and the entries of a head with attention; both are valid up to a length, as in
any cache: at a round's end, for every committed token but the last one. While drafting a head goes on from its own
output; what it wrote then is overwritten with what follows from the true features as soon as they are there, in
``observe``, after every verification and in every row, also where nothing was drafted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax import numerics
from specjax.draft import listed
from specjax.draft.step import choose, no_probs
from specjax.types import Cache, Context, Drafter, DraftView, Observed, Params, Proposal


class HeadFn(Protocol):
    """A head: pure functions, hashable. Its parameters have ``ids``, int32 [M], what the output's rows score, or None.

    Attributes:
        positions: K of heads side by side, whose drafts do not see each other; 0 for one that goes on from its own
            output.
        width: D.
    """

    @property
    def positions(self) -> int: ...

    @property
    def width(self) -> int: ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache, of no layers for a head without attention."""
        ...

    def advance(self, params: Params, tokens: jax.Array, features: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Run tokens [B, T], each with the feature [B, T, D] before it; [B, T, D], or [B, T, K, D] side by side."""
        ...

    def rows_of(self, params: Params, ids: jax.Array) -> jax.Array:
        """Return the output rows [B, X, D] of some ids of each row."""
        ...

    def logits(self, params: Params, hidden: jax.Array, more: jax.Array | None) -> jax.Array:
        """Return logits [B, T, M + X] of hidden [B, T, D]: of the listed tokens, then of ``more`` rows [B, X, D]."""
        ...


@flax.struct.dataclass
class HeadState:
    """What a head keeps of its rows.

    Attributes:
        cache: its own entries; ``length`` says what is valid, of the features too.
        features: [B, S, D] float32, the target's, each at its position.
        prompt_ids: [B, X] int32, ids of the prompt that the list leaves out, V where there are no more; None without.
    """

    cache: Cache
    features: Float[Array, "B S D"]
    prompt_ids: Int[Array, "B X"] | None


@flax.struct.dataclass
class _Block:
    """The loop's carry while a block is drafted."""

    cache: Cache
    last: Int[Array, " B"]
    feature: Float[Array, "B D"]
    drafts: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None
    finite: Bool[Array, " B"]
    context: Context | None
    count: Int[Array, " B"]


@dataclass(frozen=True)
class _Step:
    """One draft step of all rows.

    Attributes:
        fn, params: the head.
        prompt_ids, more: the ids that are scored besides the listed ones, and their output rows; or None.
        view: the rows.
        vocab_size: V.
        quick: the draft is the scores' argmax; nothing else is wanted of them.
    """

    fn: HeadFn
    params: Params
    prompt_ids: jax.Array | None
    more: jax.Array | None
    view: DraftView
    vocab_size: int
    quick: bool

    def run(self, block: _Block, i: jax.Array | int) -> tuple[jax.Array, Cache]:
        """Run the newest token, after which i are drafted."""
        cache = kv.rollback(block.cache, self.view.num_tokens - 1 + i)
        return self.fn.advance(self.params, block.last[:, None], block.feature[:, None], cache)

    def scored(self, hidden: jax.Array) -> jax.Array:
        """Return the scores of the listed tokens, then of the prompt's; -inf where a prompt has no more."""
        ids, scores = self.params["ids"], self.fn.logits(self.params, hidden, self.more)
        if ids is None:
            return scores[..., : self.vocab_size]
        if self.prompt_ids is None:
            return scores
        always = jnp.ones((hidden.shape[0], ids.shape[0]), jnp.bool_)
        there = jnp.concatenate([always, self.prompt_ids < self.vocab_size], axis=1)
        return jnp.where(there[:, None], scores, -jnp.inf)

    def take(self, block: _Block, scores: jax.Array, i: jax.Array) -> _Block:
        """Draw the i-th draft from its scores."""
        ids = self.params["ids"]
        if self.quick:
            place = numerics.argmax(scores)
            token, probs, context = listed.id_at(ids, self.prompt_ids, place), None, None
            possible = jnp.ones(token.shape, jnp.bool_)
        else:
            logits = listed.whole(scores, ids, self.prompt_ids, self.vocab_size)
            token, probs, context, possible = choose(logits, self.view, block.context, block.probs, i)
        return replace(
            block,
            last=token,
            drafts=lax.dynamic_update_slice(block.drafts, token[:, None], (0, i)),
            probs=probs,
            finite=block.finite & jnp.isfinite(jnp.max(scores, axis=-1)),
            context=context,
            count=block.count + (possible & (block.count == i)),
        )

    def onward(self, i: jax.Array, block: _Block) -> _Block:
        """Draft the i-th token from the head's own output."""
        hidden, cache = self.run(block, i)
        return self.take(replace(block, cache=cache, feature=hidden[:, 0]), self.scored(hidden)[:, 0], i)

    def side_by_side(self, block: _Block, steps: jax.Array) -> _Block:
        """Draft so many tokens from one run of heads that stand side by side."""

        def together() -> jax.Array:
            return self.scored(self.run(block, 0)[0][:, 0])

        size = jax.eval_shape(together)
        scores = lax.cond(steps > 0, together, lambda: jnp.zeros(size.shape, size.dtype))
        return lax.fori_loop(0, steps, lambda i, block: self.take(block, scores[:, i], i), block)


def head_drafter(fn: HeadFn, vocab_size: int, *, prompt_ids: int = 0) -> Drafter:
    """Return a source that drafts with a head over the target's features, under the same transforms as the target.

    Args:
        fn: the head.
        vocab_size: V, the vocabulary in use.
        prompt_ids: X, how many ids of a row's own prompt are scored besides the listed ones; the lowest, where the
            prompt has more.
    """

    def init(params, tokens, num_tokens, capacity) -> HeadState:
        batch = tokens.shape[0]
        cache = fn.init_cache(batch, capacity)
        further = None
        if prompt_ids and params["ids"] is not None:
            further = listed.unlisted(tokens, num_tokens, params["ids"], prompt_ids, vocab_size)
        return HeadState(cache, jnp.zeros((batch, kv.round_up(capacity), fn.width), jnp.float32), further)

    def observe(params, state: HeadState, seen: Observed) -> HeadState:
        before = _feature(state, seen.start)[:, None]
        features = seen.features.astype(jnp.float32)
        shifted = jnp.concatenate([before, features[:, :-1]], axis=1)
        # Only what it writes is used: the compiler drops the rest of the layer.
        _, cache = fn.advance(params, seen.tokens, shifted, kv.rollback(state.cache, seen.start))
        length = jnp.minimum(seen.num_tokens - 1, seen.start + seen.tokens.shape[1])
        held = kv.write(state.features[:, None], features[:, None], seen.start)[:, 0]
        return replace(state, cache=kv.rollback(cache, length), features=held)

    def propose(params, state: HeadState, view: DraftView, gamma: int, greedy: bool):
        batch, start = view.tokens.shape[0], view.num_tokens - 1
        more = None if state.prompt_ids is None else fn.rows_of(params, state.prompt_ids)
        quick = greedy and view.context is None and view.sampling.bias is None
        step = _Step(fn, params, state.prompt_ids, more, view, vocab_size, quick)
        block = _Block(
            cache=state.cache,
            last=jnp.take_along_axis(view.tokens, start[:, None], axis=1)[:, 0],
            feature=_feature(state, start),
            drafts=jnp.zeros((batch, gamma), jnp.int32),
            probs=no_probs(view, gamma, vocab_size, greedy),
            finite=jnp.ones((batch,), jnp.bool_),
            context=view.context,
            count=jnp.zeros((batch,), jnp.int32),
        )
        steps = jnp.max(view.gamma)
        if fn.positions:
            steps = jnp.minimum(steps, fn.positions)
            block = step.side_by_side(block, steps)
        else:
            block = lax.fori_loop(0, steps, step.onward, block)
        state = replace(state, cache=kv.rollback(block.cache, state.cache.length))
        num_drafted = jnp.minimum(view.gamma, block.count)
        return Proposal(block.drafts, block.probs, num_drafted, block.finite, steps=steps), state

    def rollback(state: HeadState, num_tokens: jax.Array) -> HeadState:
        return replace(state, cache=kv.rollback(state.cache, jnp.minimum(state.cache.length, num_tokens - 1)))

    return Drafter(
        init=init, propose=propose, rollback=rollback, length=lambda state: state.cache.length, observe=observe
    )


def _feature(state: HeadState, position: Int[Array, " B"]) -> Float[Array, "B D"]:
    """Return the feature that stands before a position; zeros at the first."""
    found = jnp.take_along_axis(state.features, jnp.maximum(position - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where(position[:, None] > 0, found, 0.0)
