"""A model whose output head scores a list of token ids only, as a ModelFn over the whole vocabulary."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from specjax.types import Cache, ModelFn, ModelOutput


@dataclasses.dataclass(frozen=True)
class TrimmedFn:
    """A model with a trimmed output head: the logits of all other tokens are -inf, so q is zero there.

    Its parameters are ``{"model": the model's own, "ids": int32 [M]}``: row m of the head scores token ``ids[m]``.
    The target keeps its whole head, and the residual of a rejected draft restores what q lacks, so nothing is lost
    but the acceptance of tokens that the list leaves out.

    Attributes:
        model_fn: the model; its logits have M columns.
        vocab_size: V.
    """

    model_fn: ModelFn
    vocab_size: int

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache of the model's."""
        return self.model_fn.init_cache(batch, capacity)

    def __call__(
        self,
        params: Any,
        tokens: jax.Array,
        cache: Cache,
        *,
        logits: Literal["all", "none"] | jax.Array = "all",
        features: bool = False,
        layers: tuple[int, int] | None = None,
        hidden: jax.Array | None = None,
    ) -> ModelOutput:
        """See ``specjax.types.ModelFn``; a part of the layers cannot be asked for."""
        assert layers is None
        assert hidden is None
        out = self.model_fn(params["model"], tokens, cache, logits=logits, features=features)
        if out.logits is None:
            return out
        whole = jnp.full((*out.logits.shape[:-1], self.vocab_size), -jnp.inf, jnp.float32)
        return dataclasses.replace(out, logits=whole.at[..., params["ids"]].set(out.logits))
