"""Exact log-probabilities of given tokens, by teacher forcing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import numerics
from specjax.errors import RowError
from specjax.pair import Model
from specjax.prefill import PIECE, bucket
from specjax.rows import BadRow, ScoreRow
from specjax.types import ModelFn


def score(
    model: Model,
    rows: Sequence[Sequence[int] | ScoreRow | BadRow],
    *,
    on_output: Callable[[dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the log-probability of every token given those before it.

    Natural logs under the model's raw softmax over the vocabulary in use.

    Args:
        model: from ``specjax.pair.load_model`` or ``specjax.load(...).target``.
        rows: lists of ids, or rows with an id of their own.
        on_output: called with each result as it comes.

    Returns:
        ``{"id", "logprobs"}`` per row, null for the first token; ``{"id", "logprobs": [], "error"}`` for a row that
        cannot be scored.

    Example:
        specjax.score(pair.target, [[1, 2, 3]])[0]["logprobs"]
    """
    results = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, ScoreRow | BadRow):
            row = ScoreRow(number, number, tuple(int(i) for i in row))
        try:
            if isinstance(row, BadRow):
                raise RowError(row.message)
            result: dict[str, Any] = {"id": row.id, "logprobs": score_ids(model, row.ids)}
        except RowError as error:
            result = {"id": row.id, "logprobs": [], "error": str(error)}
        results.append(result)
        if on_output:
            on_output(result)
    return results


def score_ids(model: Model, ids: Sequence[int]) -> list[float | None]:
    """Return one log-probability per id, None for the first.

    Raises:
        RowError: an id outside the vocabulary, more ids than the context, or logits that are not finite.
    """
    if len(ids) > model.max_positions:
        raise RowError(f"The row has {len(ids)} tokens, the model's context {model.max_positions}: shorten it.")
    for i in ids:
        if not 0 <= i < model.vocab_size:
            raise RowError(f"ids has {i}; expected ids in 0..{model.vocab_size - 1}.")
    if len(ids) < 2:
        return [None] * len(ids)
    tokens = np.zeros((1, bucket(len(ids))), np.int32)
    tokens[0, : len(ids)] = ids
    logprobs = np.asarray(_program(model.fn, model.vocab_size)(model.params, tokens, len(ids)))[: len(ids) - 1]
    if not np.all(np.isfinite(logprobs) | np.isneginf(logprobs)):
        raise RowError("The model's logits are not finite: its weights or dtype are at fault.")
    return [None, *(float(x) for x in logprobs)]


@functools.lru_cache(maxsize=8)
def _program(model_fn: ModelFn, vocab_size: int):
    @jax.jit
    def run(params, tokens: jax.Array, count: jax.Array) -> jax.Array:
        """Return [T] log-probabilities; entry i is that of token i + 1."""
        size = tokens.shape[1]
        piece = min(size, PIECE)
        following = jnp.roll(tokens, -1, axis=1)

        def step(i, carry):
            cache, out = carry
            part = lax.dynamic_slice_in_dim(tokens, i * piece, piece, axis=1)
            wanted = lax.dynamic_slice_in_dim(following, i * piece, piece, axis=1)
            result = model_fn(params, part, cache, logits="all")
            assert result.logits is not None
            logits = result.logits[..., :vocab_size]
            chosen = jnp.take_along_axis(logits, wanted[..., None], axis=-1) - numerics.log_sum_exp(logits)
            chosen = chosen[0, :, 0]
            return result.cache, lax.dynamic_update_slice(out, chosen, (i * piece,))

        carry = (model_fn.init_cache(1, size), jnp.zeros((size,), jnp.float32))
        return lax.fori_loop(0, (count + piece - 1) // piece, step, carry)[1]

    return run
