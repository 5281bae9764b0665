"""A second, smaller transformer as the draft."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax import numerics, transforms
from specjax import sampling as s
from specjax.prefill import prefill
from specjax.types import Cache, Context, Drafter, DraftView, ModelFn, Proposal

WINDOW = 2  # tokens per draft step


@flax.struct.dataclass
class _Block:
    """The loop's carry while a block is drafted."""

    cache: Cache
    newest: Int[Array, "B 2"]
    drafts: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None
    finite: Bool[Array, " B"]
    context: Context | None


def model_drafter(model_fn: ModelFn, vocab_size: int, max_positions: int | None = None) -> Drafter:
    """Return a source that decodes with ``model_fn``, under the same transforms as the target.

    Each step feeds the two newest tokens, not one: the second entry that is missing after a fully accepted round
    is filled on the way, and a single row would cost as much (bfloat16 products want two). A row at temperature 0
    drafts its argmax and has a one-hot q.

    Args:
        model_fn: the draft model.
        vocab_size: V, the vocabulary in use; further logits of the model are dropped.
        max_positions: the draft's context length where it is shorter than the target's.
    """

    def init(params, tokens, num_tokens, capacity):
        return prefill(model_fn, params, tokens, num_tokens, capacity)

    def propose(params, state: Cache, view: DraftView, gamma: int, greedy: bool):
        batch = view.tokens.shape[0]
        # A row of one token has no second newest: its first step feeds a filler after it, and reads the first row.
        places = jnp.maximum(view.num_tokens - WINDOW, 0)[:, None] + jnp.arange(WINDOW)
        newest = jnp.take_along_axis(view.tokens, places, axis=1)

        def step(i, block: _Block) -> _Block:
            count = view.num_tokens + i
            start = jnp.maximum(count - WINDOW, 0)
            out = model_fn(params, block.newest, kv.rollback(block.cache, start), logits=count - 1 - start)
            assert out.logits is not None
            logits = out.logits[:, :vocab_size]
            shaped = transforms.shape(logits, view.sampling, block.context)
            probs = block.probs
            if probs is None:
                token = numerics.argmax(shaped)
            else:
                q = s.distribution(shaped[:, None], view.sampling)
                token = s.draw(q.log_weights[:, 0], view.keys.place[:, i], few=q.few)
                probs = lax.dynamic_update_slice(probs, q.probs, (0, i, 0))
            last = jnp.where(count == 1, block.newest[:, 0], block.newest[:, 1])
            return _Block(
                cache=out.cache,
                newest=jnp.stack([last, token], axis=1),
                drafts=lax.dynamic_update_slice(block.drafts, token[:, None], (0, i)),
                probs=probs,
                finite=block.finite & jnp.isfinite(jnp.max(logits, axis=-1)),
                context=None if block.context is None else transforms.advance(view.sampling, block.context, token),
            )

        block = _Block(
            cache=state,
            newest=newest,
            drafts=jnp.zeros((batch, gamma), jnp.int32),
            probs=None if greedy else jnp.zeros((batch, gamma, vocab_size), jnp.float32),
            finite=jnp.ones((batch,), jnp.bool_),
            context=view.context,
        )
        block = lax.fori_loop(0, gamma, step, block)
        # Valid now: everything up to the token fed last.
        cache = kv.rollback(block.cache, view.num_tokens + gamma - 1)
        num_drafted = jnp.full((batch,), gamma, jnp.int32)
        return Proposal(block.drafts, block.probs, num_drafted, block.finite), cache

    def rollback(state: Cache, num_tokens: jax.Array) -> Cache:
        return kv.rollback(state, jnp.minimum(state.length, num_tokens - 1))

    return Drafter(
        init=init,
        propose=propose,
        rollback=rollback,
        length=lambda state: state.length,
        max_positions=max_positions,
    )
