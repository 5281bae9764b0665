"""Slots over generate's pieces: insert prompts, step, collect, cancel, refill. What jobs use.

Between chunks of rounds the host reads a few integers per row, never logits.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax.generate import Program, Prompt
from specjax.types import Finish, Params, RoundState, Status


class Watcher(Protocol):
    """Sees a row's new tokens between chunks; for streaming and stop strings."""

    def push(self, ids: Sequence[int]) -> int | None:
        """Take the row's new ids; return how many of all its ids so far stay, to end the row there, or None."""
        ...


@dataclasses.dataclass(frozen=True)
class Request:
    """A row on its way through the engine.

    Attributes:
        key: the caller's own handle, returned with the result.
        prompt: what the loop needs of it.
        watcher: sees its tokens as they come, or None.
    """

    key: Any
    prompt: Prompt
    watcher: Watcher | None = None


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished row; every array covers exactly its visible tokens.

    Attributes:
        key: of its request.
        ids: [N] int32 new tokens.
        finish: why it ended; CANCELLED when its watcher ended it.
        status: bits the loop set.
        place, accepted, drafted: [N], see ``RoundState``.
        logprobs, sampled_logprobs: [N] float32, or None.
        top_ids, top_logprobs: [N, M] int32 and float32, or None.
        draft_on: whether its draft was still in use at the end.
    """

    key: Any
    ids: np.ndarray
    finish: Finish
    status: Status
    place: np.ndarray
    accepted: np.ndarray
    drafted: np.ndarray
    draft_on: bool
    logprobs: np.ndarray | None = None
    sampled_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None


class Engine:
    """B slots of one compiled program. Call it from one thread.

    Args:
        program: the compiled pieces.
        params: ``{"target": ..., "draft": ...}``.
        batch_size: B, slots.
        longest: the largest ``limit`` a request may have.
        on_seconds: called with ("prefill" or "decode", seconds) after each insertion and each chunk; the host then
            waits for the device after both.
    """

    def __init__(
        self,
        program: Program,
        params: dict[str, Params],
        *,
        batch_size: int,
        longest: int,
        on_seconds: Callable[[str, float], None] | None = None,
    ):
        self._program, self._params, self._longest, self._on_seconds = program, params, longest, on_seconds
        self._state: RoundState | None = program.empty(params, batch_size, longest)
        self._slots: list[_Slot | None] = [None] * batch_size
        self.num_rounds = 0

    def run(
        self,
        requests: Iterable[Request],
        *,
        chunk: int = 64,
        on_chunk: Callable[[int], None] | None = None,
    ) -> Iterator[Result]:
        """Yield results as rows finish; free slots are refilled at once.

        Args:
            requests: taken one by one as slots become free.
            chunk: rounds between two looks at the rows.
            on_chunk: called with the number of new tokens after each chunk.

        Raises:
            ValueError: a request whose limit exceeds ``longest``.
        """
        waiting = iter(requests)
        while True:
            self._fill(waiting)
            if not any(self._slots):
                return
            self._step("decode", lambda state: self._program.decode(self._params, state, chunk))
            before = sum(slot.seen for slot in self._slots if slot)
            done = self._collect()
            if on_chunk:
                on_chunk(sum(slot.seen for slot in [*self._slots, *done] if slot) - before)
            yield from (slot.result for slot in done if slot.result)

    def _fill(self, waiting: Iterator[Request]) -> None:
        for i, slot in enumerate(self._slots):
            if slot is not None:
                continue
            request = next(waiting, None)
            if request is None:
                return
            if request.prompt.limit > self._longest:
                # Its last writes would be clamped onto its own valid entries.
                raise ValueError(
                    f"Request {request.key!r} has a limit of {request.prompt.limit} tokens, the engine was made for "
                    f"{self._longest}: pass a larger longest."
                )
            self._insert(request, i)
            self._slots[i] = _Slot(request)

    def _insert(self, request: Request, slot: int) -> None:
        self._step("prefill", lambda state: self._program.insert(self._params, state, request.prompt, slot))

    def _step(self, stage: str, step: Callable[[RoundState], RoundState]) -> None:
        began = time.perf_counter()
        self._state = step(self._take())
        if self._on_seconds:
            jax.block_until_ready(self._state)
            self._on_seconds(stage, time.perf_counter() - began)

    def _take(self) -> RoundState:
        """Hand the state over to a call that donates it."""
        if self._state is None:
            raise RuntimeError("The engine's state is gone: an earlier step failed. Make a new engine.")
        state, self._state = self._state, None
        return state

    def _collect(self) -> list[_Slot]:
        """Show new tokens to the watchers, end the rows they stop, and free the slots of finished rows."""
        state = self._take()
        finish, status, num_tokens = jax.device_get((state.finish, state.status, state.num_tokens))
        watched = any(slot and slot.request.watcher for slot in self._slots)
        tokens = np.asarray(state.tokens) if watched else None
        done: list[tuple[int, _Slot]] = []
        for i, slot in enumerate(self._slots):
            if slot is None:
                continue
            first = len(slot.request.prompt.ids)
            count = int(num_tokens[i]) - first
            if slot.request.watcher is not None and tokens is not None:
                slot.keep = slot.request.watcher.push(tokens[i, first + slot.seen : first + count].tolist())
            slot.seen = count if slot.keep is None else slot.keep
            if slot.keep is not None and finish[i] == Finish.RUNNING:
                state = self._program.cancel(state, i)
            if slot.keep is not None or finish[i] != Finish.RUNNING:
                done.append((i, slot))
        if done:
            records = jax.device_get(
                {
                    name: getattr(state, name)
                    for name in ("tokens", "place", "accepted", "drafted", "draft_on", *_LOGPROBS)
                }
            )
            for i, slot in done:
                slot.result = _result(slot, i, Finish(int(finish[i])), Status(int(status[i])), records)
                self._slots[i] = None
                if status[i] & (Status.TARGET_NOT_FINITE | Status.DRAFT_NOT_FINITE):
                    state = self._program.blank(state, i)
        self._state = state
        return [slot for _, slot in done]


@dataclasses.dataclass
class _Slot:
    request: Request
    seen: int = 0
    keep: int | None = None
    result: Result | None = None


# None where they are not asked for.
_LOGPROBS = ("logprobs", "sampled_logprobs", "top_ids", "top_logprobs")


def _result(slot: _Slot, i: int, finish: Finish, status: Status, records: dict[str, Any]) -> Result:
    first = len(slot.request.prompt.ids)
    visible = slice(first, first + slot.seen)
    logprobs = {name: None if records[name] is None else records[name][i, visible] for name in _LOGPROBS}
    return Result(
        key=slot.request.key,
        ids=records["tokens"][i, visible],
        finish=Finish.CANCELLED if slot.keep is not None else finish,
        status=status,
        place=records["place"][i, visible],
        accepted=records["accepted"][i, visible],
        drafted=records["drafted"][i, visible],
        draft_on=bool(records["draft_on"][i]),
        **logprobs,
    )
