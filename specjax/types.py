"""Protocols and records that every room shares. Imports nothing of ours.

Shape letters: B batch rows, T tokens in this call, S capacity, K draft length (gamma), V vocabulary in use,
N query heads, G key-value heads, H head size, D width, W rows of one target step.

Invariants (tests/test_invariants.py; at run time under ``check=True``):

1. At a round's end the target's cache holds every committed token but the last one. A draft model's cache holds
   them too, or all but the last two after a fully accepted round: its every step feeds the two newest tokens, so
   the missing entry is always filled before it is needed. In a row that it sat out it holds a prefix of them, and
   catches up before it drafts again.
2. Rows of a cache at or past ``length`` are never attended, so rollback only sets ``length``.
3. A row ends at its limit exactly, with reason "length". The program allocates at least W rows more than the
   longest limit, so no write can start where it would be clamped.
4. Nothing after the first rejection, after EOS or past the budget reaches ids, counters or log-probabilities.
5. Accept iff ``u * q < p``: no epsilon; a zero-probability token is never accepted. When rounding empties the
   residual, the next token is drawn from p.
6. p and q are one float32 distribution each, used both to draw and to verify. A greedy draft's q is one-hot.
7. Every draw's key is (seed, id, sample) -> round -> purpose -> place: no draw serves two rounds, and none
   depends on the row's place in the batch. The coupled rule alone keys by absolute position.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.types_control import Controller, ControlView, Outcome
from specjax.types_sampling import Constraint, Context, History, Penalties, RowSampling, Truncation

__all__ = [
    "Begun", "Cache", "Constraint", "Context", "ControlView", "Controller", "DraftView", "Drafter", "Finish", "History",
    "ModelFn", "ModelOutput", "Observed", "Outcome", "Params", "Penalties", "Proposal", "Purpose", "RoundInfo",
    "RoundKeys", "RoundState", "RowSampling", "Rule", "Status", "TargetView", "Truncation", "Verdict",
]  # fmt: skip

Params = Any  # nested dict of arrays


@flax.struct.dataclass
class Cache:
    """Keys and values of every layer, of fixed size; only ``length`` says what is valid.

    Attributes:
        k, v: one array per layer, [B, G, S, H].
        length: [B] int32, traced: the number of valid positions of each row.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    length: Int[Array, " B"]


@flax.struct.dataclass
class ModelOutput:
    """What a model returns.

    Attributes:
        logits: float32 [B, T, V] (``logits="all"``), [B, V] (an index per row) or None.
        cache: with the T new entries written and ``length`` moved on by T.
        features: [B, T, D] float32 after the final norm, or None.
    """

    logits: jax.Array | None
    cache: Cache
    features: jax.Array | None = None


@runtime_checkable
class ModelFn(Protocol):
    """A pure transformer: cache in, cache out. Hashable, so that it can be static under jit."""

    def __call__(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        cache: Cache,
        *,
        logits: Literal["all", "none"] | Int[Array, " B"] = "all",
        features: bool = False,
        layers: tuple[int, int] | None = None,
        hidden: Float[Array, "B T D"] | None = None,
    ) -> ModelOutput:
        """Run T new tokens per row at positions ``cache.length + (0..T-1)``.

        Only an early exit asks for a part: ``layers`` = (i, j) runs layers i..j-1, on ``hidden`` unless i is 0, and
        writes their entries alone. Features are then the stream after layer j - 1 (the next part's ``hidden``), and
        logits are those of an exit there. The core passes neither argument elsewhere.
        """
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """Return an empty cache for ``batch`` rows of at least ``capacity`` positions."""
        ...


class Finish(enum.IntEnum):
    """Why a row stopped; RUNNING while it has not."""

    RUNNING = 0
    EOS = 1
    LENGTH = 2
    ERROR = 3
    CANCELLED = 4
    EMPTY = 5  # a slot that holds no row
    STOP = 6  # said by the host: a stop string was found


class Status(enum.IntFlag):
    """Bits that the loop sets for the host to read; nothing raises inside the program."""

    OK = 0
    TARGET_NOT_FINITE = 1
    DRAFT_NOT_FINITE = 2
    # Set by ``check=True`` programs only:
    TARGET_CACHE_LENGTH = 4
    DRAFT_CACHE_LENGTH = 8
    TOKEN_OUT_OF_RANGE = 16
    AFTER_END = 32
    CACHE_OVERRUN = 64
    HISTORY = 128  # what penalties count is not exactly the output
    TOKEN_FORBIDDEN = 256  # a token that bans or the constraint exclude was emitted
    # Set by every program:
    NOTHING_ALLOWED = 512  # bans, allow-list and constraint leave no token


class Purpose(enum.IntEnum):
    """What a random draw is for; folded into its key."""

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3
    COUPLED = 4  # folded into the row's key, not the round's


@flax.struct.dataclass
class RoundKeys:
    """The keys that a round's draws come from.

    Attributes:
        round: [B, 2] uint32, fresh in every round.
        place: [B, K + 1, 2] uint32, one for each new token: what a draft draws it with. Under the coupled rule it
            follows from the absolute position alone, and the target's draw uses it too.
    """

    round: UInt32[Array, "B 2"]
    place: UInt32[Array, "B K1 2"]


@flax.struct.dataclass
class TargetView:
    """The target, for a draft source that runs a part of it.

    Attributes:
        params: the target's.
        cache: the target's; it holds every committed token but the last.
        width: W, rows of the target's step.
        exact: the bits of the target's entries must not depend on the draft: every part runs over W rows.
    """

    params: Params
    cache: Cache
    width: int = flax.struct.field(pytree_node=False)
    exact: bool = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class DraftView:
    """What a draft source may look at: the committed tokens and nothing past them.

    Attributes:
        tokens: [B, S] int32; entries at or past ``num_tokens`` are not valid.
        num_tokens: [B] int32, at least 1 in a running row.
        sampling: the rows' settings, the draft's own in place.
        keys: this round's keys.
        context: of the first drafted position; ``specjax.transforms`` moves it on. None where no transform needs it.
        gamma: [B] int32, 0..K: the most tokens that each row may draft in this round. Where all are 0 nothing need
            be computed.
        target: for a source with ``on_target``, else None.
        may_lag: rows may have sat out rounds, so a cache of the source's own may lack entries.
    """

    tokens: Int[Array, "B S"]
    num_tokens: Int[Array, " B"]
    sampling: RowSampling
    keys: RoundKeys
    gamma: Int[Array, " B"]
    context: Context | None = None
    target: TargetView | None = None
    may_lag: bool = flax.struct.field(pytree_node=False, default=False)


@flax.struct.dataclass
class Begun:
    """The part of the target's step over a block that drafting it has done already.

    Attributes:
        cache: the target's, with the entries of layers 0..layers-1 written for every drafted token; ``length`` is
            where the block begins.
        hidden: [B, W, D] float32, the stream after those layers for the block: last token, drafts, padding.
        layers: how many layers.
    """

    cache: Cache
    hidden: Float[Array, "B W D"]
    layers: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Proposal:
    """A block of drafted tokens.

    Attributes:
        tokens: [B, K] int32, always inside the vocabulary, also past ``num_drafted``.
        probs: [B, K, V] float32, the distributions the tokens were drawn from; None for a deterministic draft,
            whose q is one-hot.
        num_drafted: [B] int32, 0..K: how many of the tokens count in each row.
        finite: [B] bool; False makes the round plain for that row and switches its draft off.
        begun: what has been done of the target's step, from a source with ``on_target``, else None.
        steps: int32, the draft steps that ran; None: as many as the largest gamma.
    """

    tokens: Int[Array, "B K"]
    probs: Float[Array, "B K V"] | None
    num_drafted: Int[Array, " B"]
    finite: Bool[Array, " B"]
    begun: Begun | None = None
    steps: Int[Array, ""] | None = None


@flax.struct.dataclass
class Verdict:
    """A rule's decision.

    Attributes:
        num_accepted: [B] int32, 0..num_drafted.
        next_token: [B] int32, the token that follows the accepted ones (residual sample, or bonus).
    """

    num_accepted: Int[Array, " B"]
    next_token: Int[Array, " B"]


@flax.struct.dataclass
class Observed:
    """What a step of the target leaves for a draft source that wants its features.

    Attributes:
        tokens: [B, T] int32, what the target ran; past ``num_tokens`` they are not committed.
        features: [B, T, D] float32, its final-normed stream at them.
        start: [B] int32, the position of the first.
        num_tokens: [B] int32, committed tokens now. The features of positions up to ``num_tokens - 2`` hold; a row
            with ``start >= num_tokens - 1`` has nothing new.
    """

    tokens: Int[Array, "B T"]
    features: Float[Array, "B T D"]
    start: Int[Array, " B"]
    num_tokens: Int[Array, " B"]


class Drafter(NamedTuple):
    """A draft source: pure functions over a pytree state whose every leaf leads with the batch axis.

    Attributes:
        init: ``(params, tokens [B, T], num_tokens [B], capacity) -> state``: ready to draft after these prompts.
        propose: ``(params, state, view, gamma, greedy) -> (Proposal, state)``. ``gamma`` and ``greedy`` are Python
            values; under ``greedy`` every row has temperature 0 and ``probs`` is None.
        rollback: ``(state, num_tokens [B]) -> state``: only that many tokens are committed now.
        length: ``state -> [B]`` or None: the valid length of the draft's cache, for ``check=True`` and for the cost of
            catching up.
        max_positions: its context length where that is shorter than the target's, else None: a row goes on without
            speculation where a round's drafts would pass it.
        on_target: it runs a part of the target: the view has ``target``, the proposal ``begun``, in every round.
        free: drafting costs nothing that grows with the number of drafts: it runs no step for each.
        lazy: its cache may lag behind also in a row that drafted, as it does where another source drafts for a row.
        observe: ``(params, state, Observed) -> state`` for a source that drafts from the target's features, else None:
            called with every piece of a prompt after ``init``, and with every block after it is verified, whether or
            not the row drafted.
    """

    init: Callable[[Params, jax.Array, jax.Array, int], Any]
    propose: Callable[[Params, Any, DraftView, int, bool], tuple[Proposal, Any]]
    rollback: Callable[[Any, jax.Array], Any]
    length: Callable[[Any], jax.Array | None] = lambda state: None
    max_positions: int | None = None
    on_target: bool = False
    free: bool = False
    lazy: bool = False
    observe: Callable[[Params, Any, Observed], Any] | None = None


class Rule(NamedTuple):
    """A verification rule.

    Attributes:
        name: its name on the command line and in results.
        verify: ``(logits [B, K+1, V], proposal, sampling, keys) -> Verdict``; the logits have bias, bans and penalties
            in them, and ``specjax.sampling.distribution`` does the rest.
        greedy: it serves rows at temperature 0 only, and needs no probabilities.
        coupled: draft and target share their noise, keyed by absolute position (common random numbers).
        lossless: the output has exactly the target's distribution.
    """

    name: str
    verify: Callable[[jax.Array, Proposal, RowSampling, RoundKeys], Verdict]
    greedy: bool = False
    coupled: bool = False
    lossless: bool = True


@flax.struct.dataclass
class RoundState:
    """Everything the loop carries; every leaf leads with the batch axis.

    The three per-token records stand at the token's own position and replace a per-round log: whatever prefix of
    the output a stop leaves visible, the counters of that prefix follow from it.

    Attributes:
        tokens: [B, S] int32, prompt and output.
        prompt_length, num_tokens: [B] int32; the output is ``tokens[prompt_length:num_tokens]``.
        limit: [B] int32, the row ends when ``num_tokens`` reaches it.
        eos: [B, E] int32, padded with -1.
        finish, status: [B] int32, Finish and Status.
        key: [B, 2] uint32, the row's key.
        round: [B] int32, rounds this row has run.
        draft_on: [B] bool.
        gamma: [B] int32, the most tokens the row may draft per round; the program's K is a bound of its own.
        control: the controller's per-row state, () without one.
        sampling: the rows' settings.
        history: what their transforms remember.
        cache: the target's.
        draft: the draft source's state.
        place: [B, S] int8, the token's place in its round, 0..K.
        accepted: [B, S] bool, an accepted draft (else the round's extra token).
        drafted: [B, S] int8, how many tokens its round had drafted.
        logprobs: [B, S] float32 under the target's raw softmax, or None when not asked for.
        sampled_logprobs: [B, S] float32, as sampled, after all transforms; None as above.
        top_ids, top_logprobs: [B, S, N] int32 and float32, the N most probable under the raw softmax, or None.
    """

    tokens: Int[Array, "B S"]
    prompt_length: Int[Array, " B"]
    num_tokens: Int[Array, " B"]
    limit: Int[Array, " B"]
    eos: Int[Array, "B E"]
    finish: Int[Array, " B"]
    status: Int[Array, " B"]
    key: UInt32[Array, "B 2"]
    round: Int[Array, " B"]
    draft_on: Bool[Array, " B"]
    gamma: Int[Array, " B"]
    control: Any
    sampling: RowSampling
    history: History
    cache: Cache
    draft: Any
    place: jax.Array
    accepted: jax.Array
    drafted: jax.Array
    logprobs: jax.Array | None
    sampled_logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


@flax.struct.dataclass
class RoundInfo:
    """Diagnostics of one round, for tests and tracing; the loop drops it.

    Attributes:
        proposal: what was drafted.
        logits: [B, K+1, V] float32, the target's as the rule saw them: bias, bans and penalties applied.
        verdict: what the rule decided.
        emitted: [B, K+1] int32, the block of new tokens.
        num_emitted: [B] int32, how many of them were committed.
    """

    proposal: Proposal
    logits: jax.Array
    verdict: Verdict
    emitted: jax.Array
    num_emitted: jax.Array
