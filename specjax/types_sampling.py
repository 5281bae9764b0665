"""Records of sampling: settings as arrays, what transforms remember, what they look at. A part of ``specjax.types``.

Shape letters as there; E is the width of the EOS table, N and L the number and the length of banned sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int


class Constraint(NamedTuple):
    """A user's rule on which token may come next: pure, run inside the loop, rolled back with rejected drafts.

    Attributes:
        init: ``() -> state``: arrays of one row, before anything is generated.
        step: ``(state, token) -> (mask [V] bool, new state)``, of one row: which tokens may follow ``token``, the row's
            newest one; -1 before the first new token.
    """

    init: Callable[[], Any]
    step: Callable[[Any, jax.Array], tuple[jax.Array, Any]]


@flax.struct.dataclass
class Truncation:
    """Which tokens are kept: each setting [B].

    Attributes:
        min_p: float32, 0 is off: the least probability, as a share of the largest one.
        top_k: int32, 0 is off: the k most probable, and those tied with the k-th.
        top_p: float32, 1 is off: the fewest most probable whose mass reaches it, and those tied with the last.
    """

    min_p: Float[Array, " B"]
    top_k: Int[Array, " B"]
    top_p: Float[Array, " B"]


@flax.struct.dataclass
class Penalties:
    """Penalties on tokens that were there before: each setting float32 [B].

    Attributes:
        repetition: 1 is off; of tokens in prompt or output, positive logits are divided, negative ones multiplied.
        presence: 0 is off; taken from the logits of tokens in the output.
        frequency: 0 is off; taken once for each time the token is in the output.
    """

    repetition: Float[Array, " B"]
    presence: Float[Array, " B"]
    frequency: Float[Array, " B"]


@flax.struct.dataclass
class RowSampling:
    """Sampling settings of each row, as traced values; a family that no row of the program uses is None.

    Attributes:
        temperature: [B] float32; 0 means greedy (the lowest id on ties).
        truncation: min-p, top-k and top-p.
        draft_temperature, draft_truncation: the draft's own, or None: the target's. ``DraftView.sampling`` has them in
            the places of the target's.
        bias: [B, V] float32, added to the logits; -inf bans.
        min_new: [B] int32, new tokens before the first of which no EOS may come.
        sequences: [B, N, L] int32, token sequences that may not be completed, padded with -1 in front.
        penalties: repetition, presence, frequency.
        constraint: static.
    """

    temperature: Float[Array, " B"]
    truncation: Truncation | None = None
    draft_temperature: Float[Array, " B"] | None = None
    draft_truncation: Truncation | None = None
    bias: Float[Array, "B V"] | None = None
    min_new: Int[Array, " B"] | None = None
    sequences: Int[Array, "B N L"] | None = None
    penalties: Penalties | None = None
    constraint: Constraint | None = flax.struct.field(pytree_node=False, default=None)


@flax.struct.dataclass
class History:
    """What transforms remember of a row; it holds committed tokens only. None where no row needs it.

    Attributes:
        counts: [B, V] int32, how often each token is in the output.
        in_prompt: [B, V] bool.
        constraint: the constraint's state before it was given the row's newest token.
    """

    counts: Int[Array, "B V"] | None = None
    in_prompt: Bool[Array, "B V"] | None = None
    constraint: Any = None


@flax.struct.dataclass
class Context:
    """What the transforms at one position look at: the committed tokens and the drafts before that position.

    Attributes:
        history: with the drafts counted; its constraint state has been given the newest token.
        allowed: [B, V] bool, the constraint's mask for this position, or None.
        window: [B, L - 1] int32, the newest tokens, -1 before a row's first; None without banned sequences.
        num_new: [B] int32, new tokens before this position.
        eos: [B, E] int32, padded with -1.
    """

    history: History
    allowed: Bool[Array, "B V"] | None
    window: Int[Array, "B L1"] | None
    num_new: Int[Array, " B"]
    eos: Int[Array, "B E"]
