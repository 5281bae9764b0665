"""Rounds of a program, timed from the same state each time: what they cost does not depend on what the rows hold."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax.gamma import Costs
from specjax.generate import Program, Prompt
from specjax.sampling import SamplingParams
from specjax.types import Finish, Params, RoundState

HISTORY = 64  # tokens before the rounds that are timed
_PERIOD = 16  # of a text that repeats itself, for a source that drafts from the text alone
_LAG = 32


class Timed(NamedTuple):
    """One call: its seconds, how many rounds it ran, and the most tokens that a row drafted in the first."""

    seconds: float
    rounds: int
    drafted: int


def per_round(one: float, several: float, rounds: int) -> float:
    """Return the seconds of a round, or step, from a call of one and a call of several.

    What a call costs by itself is left out: a compiled loop may lay out weights anew before its first round.
    """
    return max(several - one, 0.0) / (rounds - 1) if rounds > 1 else one


class RoundTimer:
    """Times rounds of rows in mid-generation, over caches of zeros.

    Args:
        program: what runs them.
        params: ``{"target": ..., "draft": ...}``.
        batch: rows at once.
        longest: tokens of the longest row, as the rows' engine takes it, so that nothing is compiled twice.
        sampling: as the rows sample.
        length: tokens that each row holds before the rounds; at most ``longest - 1``.
        limit: where rows end; default ``longest``.

    Attributes:
        has_cache: the draft has a cache of its own.
        lag: entries that its cache can lack, see ``run``.
    """

    def __init__(
        self,
        program: Program,
        params: dict[str, Params],
        batch: int,
        longest: int,
        sampling: SamplingParams,
        *,
        length: int = HISTORY,
        limit: int | None = None,
    ):
        self._program, self._params = program, params
        self._length = min(length, longest - 1)
        gamma = program.gamma
        # Text without repetition shows what a model costs; only where nothing is drafted from it, one with it.
        for period in (program.vocab_size, _PERIOD):
            ids = [(7 * i) % min(period, program.vocab_size) for i in range(self._length)]
            prompt = Prompt(ids, limit or longest, (), np.zeros(2, np.uint32), sampling)
            self._fresh = program.midway(params, batch, longest, prompt)
            self._state: RoundState = self._fresh
            self._fresh = jax.tree.map(np.asarray, dataclasses.replace(self._fresh, cache=(), draft=()))
            if gamma == 0 or self.run(gamma).drafted > 0:
                break
        # A source that observes is given all features in every round: it never lags.
        observes = program.drafter.observe is not None
        self.has_cache = not observes and program.drafter.length(self._state.draft) is not None
        self.lag = min(_LAG, self._length - 3)

    def run(self, gamma: int, *, rounds: int = 1, behind: int = 0) -> Timed:
        """Run rounds in one call.

        Args:
            gamma: drafts of every round, at most the program's.
            rounds: how many; rows must not end before.
            behind: entries that the draft's cache lacks at first.
        """
        count = np.full(self._fresh.num_tokens.shape, self._length, np.int32)
        state = dataclasses.replace(
            jax.tree.map(jnp.asarray, self._fresh),
            cache=kv.rollback(self._state.cache, jnp.asarray(count - 1)),
            draft=self._program.drafter.rollback(self._state.draft, jnp.asarray(count - behind)),
            finish=jnp.full(count.shape, int(Finish.RUNNING), jnp.int32),
            gamma=jnp.full(count.shape, gamma, jnp.int32),
        )
        params: dict[str, Any] = dict(self._params)
        if self._program.controlled:
            ones = [jnp.ones(n, jnp.float32) for n in (self._program.gamma + 1, len(self._program.widths), ())]
            params["costs"] = Costs(*ones, force=jnp.int32(gamma))
        jax.block_until_ready(state)
        began = time.perf_counter()
        self._state = self._program.decode(params, state, rounds)
        jax.block_until_ready(self._state)
        seconds = time.perf_counter() - began
        ran = int(np.max(np.asarray(self._state.round)))
        return Timed(seconds, ran, int(np.max(np.asarray(self._state.drafted)[:, self._length])))
