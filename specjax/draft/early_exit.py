"""The target's own first layers as the draft (self-speculation, as in LayerSkip, 2404.16710).

Nothing is stored twice: the draft reads the target's parameters and writes its first N layers' entries into the
target's cache. A round runs those layers once for each of the block's K + 1 tokens, K times while drafting and once for
the last draft, then the other layers for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from specjax import cache as kv
from specjax.draft.step import choose, no_probs
from specjax.types import Begun, Cache, Context, Drafter, DraftView, ModelFn, ModelOutput, Params, Proposal, TargetView

Exit = Callable[[Params, jax.Array], jax.Array]


@flax.struct.dataclass
class _Block:
    """The loop's carry while a block is drafted."""

    cache: Cache
    tokens: Int[Array, "B W"]
    hidden: Float[Array, "B W D"]
    probs: Float[Array, "B K V"] | None
    finite: Bool[Array, " B"]
    context: Context | None
    count: Int[Array, " B"]


def early_exit_drafter(
    target_fn: ModelFn, layers: int, vocab_size: int, *, trained_exit: Exit | None = None
) -> Drafter:
    """Return a source that decodes with the first layers of the target, through its norm and head.

    The first layers' entries of a token are those of the step that drafted it. With one width given all these steps run
    over W rows, so that they are the same bits as plain decoding's; otherwise a greedy text is plain decoding's up to
    near-ties, as for any change of width.

    Args:
        target_fn: the target; it takes ``layers`` and ``hidden``.
        layers: N, how many of its layers, fewer than it has.
        vocab_size: V, the vocabulary in use.
        trained_exit: ``(params["draft"], stream [B, D] after layer N) -> logits [B, V]``, instead of the target's norm
            and head.

    Raises:
        ValueError: layers below 1.
    """
    if layers < 1:
        raise ValueError(f"early exit: got {layers} layers; expected at least 1.")

    def propose(params, state, view: DraftView, gamma: int, greedy: bool):
        target = view.target
        assert target is not None
        batch, width, start = view.tokens.shape[0], target.width, target.cache.length
        rows = width if target.exact else 1

        def run(i, block: _Block, scored: bool) -> tuple[ModelOutput, _Block, jax.Array]:
            """Run the rows from the i-th of the block on; later ones are filler that a later step writes over."""
            first = jnp.minimum(i, width - rows)
            part = lax.dynamic_slice_in_dim(block.tokens, first, rows, axis=1)
            logits = jnp.broadcast_to(i - first, (batch,)) if scored else "none"
            cache = kv.rollback(block.cache, start + first)
            out = target_fn(target.params, part, cache, logits=logits, features=True, layers=(0, layers))
            assert out.features is not None
            hidden = lax.dynamic_update_slice(block.hidden, out.features, (0, first, 0))
            return out, replace(block, cache=out.cache, hidden=hidden), i - first

        def step(i, block: _Block) -> _Block:
            out, block, place = run(i, block, trained_exit is None)
            if trained_exit is None:
                assert out.logits is not None
                logits = out.logits[:, :vocab_size]
            else:
                assert out.features is not None
                logits = trained_exit(params, lax.dynamic_index_in_dim(out.features, place, axis=1, keepdims=False))
            token, probs, context, possible = choose(logits, view, block.context, block.probs, i)
            return replace(
                block,
                tokens=lax.dynamic_update_slice(block.tokens, token[:, None], (0, i + 1)),
                probs=probs,
                finite=block.finite & jnp.isfinite(jnp.max(logits, axis=-1)),
                context=context,
                count=block.count + (possible & (block.count == i)),
            )

        last = jnp.take_along_axis(view.tokens, view.num_tokens[:, None] - 1, axis=1)
        tokens = jnp.pad(last, ((0, 0), (0, width - 1)))
        block = _Block(
            cache=target.cache,
            tokens=tokens,
            hidden=jnp.zeros((batch, width, _stream_size(target_fn, target, tokens[:, :1], layers)), jnp.float32),
            probs=no_probs(view, gamma, vocab_size, greedy),
            finite=jnp.ones((batch,), jnp.bool_),
            context=view.context,
            count=jnp.zeros((batch,), jnp.int32),
        )
        steps = jnp.max(view.gamma)
        block = lax.fori_loop(0, steps, step, block)
        _, block, _ = run(steps, block, False)
        begun = Begun(cache=kv.rollback(block.cache, start), hidden=block.hidden, layers=layers)
        num_drafted = jnp.minimum(view.gamma, block.count)
        return Proposal(block.tokens[:, 1 : gamma + 1], block.probs, num_drafted, block.finite, begun), state

    return Drafter(init=_init, propose=propose, rollback=lambda state, num_tokens: state, on_target=True)


def _stream_size(target_fn: ModelFn, target: TargetView, tokens: jax.Array, layers: int) -> int:
    """Return D, without running anything."""

    def features(params, tokens, cache):
        return target_fn(params, tokens, cache, logits="none", features=True, layers=(0, layers)).features

    return jax.eval_shape(features, target.params, tokens, target.cache).shape[-1]


def _init(params, tokens, num_tokens, capacity):
    del params, tokens, num_tokens, capacity
    return ()
