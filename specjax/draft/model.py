"""A second, smaller transformer as the draft."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax.draft.step import choose, no_probs
from specjax.prefill import prefill
from specjax.types import Cache, Context, Drafter, DraftView, ModelFn, Params, Proposal

WINDOW = 2  # tokens per draft step
CATCH_UP = 16  # tokens per piece of what a cache lacks


@flax.struct.dataclass
class _Block:
    """The loop's carry while a block is drafted."""

    cache: Cache
    newest: Int[Array, "B 2"]
    drafts: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None
    finite: Bool[Array, " B"]
    context: Context | None
    count: Int[Array, " B"]


def model_drafter(model_fn: ModelFn, vocab_size: int, max_positions: int | None = None) -> Drafter:
    """Return a source that decodes with ``model_fn``, under the same transforms as the target.

    Each step feeds the two newest tokens, not one: the second entry that is missing after a fully accepted round
    is filled on the way, and a single row would cost as much (bfloat16 products want two). A row at temperature 0
    drafts its argmax and has a one-hot q. Where no row may draft, nothing runs; what the cache then lacks is filled in
    pieces once it drafts again.

    Args:
        model_fn: the draft model.
        vocab_size: V, the vocabulary in use; further logits of the model are dropped.
        max_positions: the draft's context length where it is shorter than the target's.
    """

    def init(params, tokens, num_tokens, capacity):
        # A piece may begin at a row's newest token.
        return prefill(model_fn, params, tokens, num_tokens, capacity + CATCH_UP)

    def propose(params, state: Cache, view: DraftView, gamma: int, greedy: bool):
        batch = view.tokens.shape[0]
        if view.may_lag:
            state = _catch_up(model_fn, params, state, view)
        # A row of one token has no second newest: its first step feeds a filler after it, and reads the first row.
        places = jnp.maximum(view.num_tokens - WINDOW, 0)[:, None] + jnp.arange(WINDOW)
        newest = jnp.take_along_axis(view.tokens, places, axis=1)

        def step(i, block: _Block) -> _Block:
            count = view.num_tokens + i
            start = jnp.maximum(count - WINDOW, 0)
            out = model_fn(params, block.newest, kv.rollback(block.cache, start), logits=count - 1 - start)
            assert out.logits is not None
            logits = out.logits[:, :vocab_size]
            token, probs, context, possible = choose(logits, view, block.context, block.probs, i)
            last = jnp.where(count == 1, block.newest[:, 0], block.newest[:, 1])
            return _Block(
                cache=out.cache,
                newest=jnp.stack([last, token], axis=1),
                drafts=lax.dynamic_update_slice(block.drafts, token[:, None], (0, i)),
                probs=probs,
                finite=block.finite & jnp.isfinite(jnp.max(logits, axis=-1)),
                context=context,
                count=block.count + (possible & (block.count == i)),
            )

        block = _Block(
            cache=state,
            newest=newest,
            drafts=jnp.zeros((batch, gamma), jnp.int32),
            probs=no_probs(view, gamma, vocab_size, greedy),
            finite=jnp.ones((batch,), jnp.bool_),
            context=view.context,
            count=jnp.zeros((batch,), jnp.int32),
        )
        steps = jnp.max(view.gamma)
        block = lax.fori_loop(0, steps, step, block)
        # Valid now: everything up to the token fed last; in a row that sits this round out, what was valid before.
        cache = kv.rollback(block.cache, jnp.where(view.gamma > 0, view.num_tokens + steps - 1, state.length))
        return Proposal(block.drafts, block.probs, jnp.minimum(view.gamma, block.count), block.finite), cache

    def rollback(state: Cache, num_tokens: jax.Array) -> Cache:
        return kv.rollback(state, jnp.minimum(state.length, num_tokens - 1))

    return Drafter(
        init=init,
        propose=propose,
        rollback=rollback,
        length=lambda state: state.length,
        max_positions=max_positions,
    )


def _catch_up(model_fn: ModelFn, params: Params, cache: Cache, view: DraftView) -> Cache:
    """Fill what a cache lacks before the two newest tokens of each row that drafts, in pieces for all such rows."""
    wanted = jnp.where(view.gamma > 0, view.num_tokens - WINDOW, 0)

    def piece(cache: Cache) -> Cache:
        places = cache.length[:, None] + jnp.arange(CATCH_UP)
        tokens = jnp.take_along_axis(view.tokens, jnp.minimum(places, view.tokens.shape[1] - 1), axis=1)
        out = model_fn(params, tokens, cache, logits="none")
        # Rows that lack nothing keep their length: what was written past it is not valid.
        return kv.rollback(out.cache, jnp.maximum(jnp.minimum(cache.length + CATCH_UP, wanted), cache.length))

    return lax.while_loop(lambda cache: jnp.any(cache.length < wanted), piece, cache)
