"""Slots over generate's pieces: insert prompts, step, collect, cancel, refill. What jobs use.

One chunk of rounds is always dispatched ahead: while the device runs it, the host reads what the chunk before left (a
few integers per row, never logits), shows text, writes files and prepares new prompts. A slot's new row therefore
starts after the chunk in flight, and a chunk counts only for the rows that were in their slots when it was dispatched.

When the device fails, the donated state is gone (invariant 13): rows are put back from their confirmed ids and go on
as they would have gone on, since every draw's key follows from the row and its round.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from specjax.engine_slot import DEVICE_ERRORS, Flight, Pace, Request, Result, Slot, Waste, Watcher, out_of_memory
from specjax.generate import Program, Prompt
from specjax.sampling import SamplingParams
from specjax.types import Finish, Params, RoundState, Status

_MENDED = 2  # rebuilt so often, a row whose caches still do not fit its tokens is given up


class Engine:
    """B slots of one compiled program; a context manager. Call it from one thread.

    Args:
        program: the compiled pieces.
        params: ``{"target": ..., "draft": ...}``.
        batch_size: B, slots; after running out of memory there are fewer.
        longest: the largest ``limit`` a request may have.
        prefix: ids that many prompts begin with: they are prefilled once.
        draft_can_go: raise when memory runs out before the first chunk is done, so that the caller can go on
            without a draft, instead of going on with fewer slots.
        on_seconds: called with ("prefill" or "decode", seconds) after each insertion and each chunk; the host then
            waits for the device after both, and nothing is dispatched ahead.

    Attributes:
        pace: how long chunks are, and where the host's time went.
        waste: work past the ends of rows that were ended from outside.
        num_chunks: chunks read.
        num_failures: errors of the device.
        num_rebuilt: rows put back from their confirmed ids.
    """

    def __init__(
        self,
        program: Program,
        params: dict[str, Params],
        *,
        batch_size: int,
        longest: int,
        prefix: Sequence[int] = (),
        draft_can_go: bool = False,
        on_seconds: Callable[[str, float], None] | None = None,
    ):
        self.pace, self.waste = Pace(), Waste()
        self.num_chunks = self.num_failures = self.num_rebuilt = 0
        self._program, self._params, self._longest, self._on_seconds = program, params, longest, on_seconds
        self._prefix_ids, self._prefix = prefix, None
        self._draft_can_go = draft_can_go
        self._closed = self._retried = False
        self._state: RoundState | None = None
        self._last: tuple[Any, RoundState] | None = None  # the newest prefill, and of what
        self._slots: list[Slot | None] = [None] * batch_size
        self._parked: deque[Slot] = deque()
        self._flights: deque[Flight] = deque()
        self._number = 0
        self._done: deque[Result] = deque()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the buffers; rows that still run are dropped."""
        self._drop()
        self._state, self._prefix, self._last, self._closed = None, None, None, True

    @property
    def batch_size(self) -> int:
        """B, the slots there are now."""
        return len(self._slots)

    def run(
        self,
        requests: Iterable[Request],
        *,
        chunk: int | None = None,
        on_chunk: Callable[[int], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> Iterator[Result]:
        """Yield results as rows finish; free slots are refilled at once.

        Args:
            requests: taken one by one as slots become free.
            chunk: rounds between two looks at the rows; None takes as few as hide the host's work.
            on_chunk: called with the number of new tokens after each chunk.
            stop: asked before each chunk; True ends the run, and the rows still running are dropped.

        Raises:
            ValueError: a request whose limit exceeds ``longest``.
            RuntimeError: the engine is closed.
        """
        if self._closed:
            raise RuntimeError("The engine is closed. Make a new one.")
        waiting = iter(requests)
        self.pace.pause()
        try:
            while not (stop and stop()):
                try:
                    self._fill(waiting)
                    busy = any(self._slots)
                    if not busy and not self._flights:
                        return
                    if busy:
                        self._dispatch(chunk)
                    while len(self._flights) > (busy and self._on_seconds is None):
                        count = self._collect(self._flights.popleft())
                        if on_chunk:
                            on_chunk(count)
                except DEVICE_ERRORS as error:
                    if self._program.layout.spans_processes:
                        raise  # what one process mends the others would not
                    self._recover(error)
                while self._done:
                    yield self._done.popleft()
        finally:
            self._drop()

    def cancel(self, key: Any) -> bool:
        """End a row at the next look at it; its result has what it has by then. Return whether it is running."""
        slot = self._find(key)
        if slot is not None:
            slot.cancelled = True
        return slot is not None

    def change(self, key: Any, sampling: SamplingParams) -> bool:
        """Change how a row samples, from the next chunk to be dispatched on; return whether it is running.

        A chunk is whole rounds, so no block crosses the change.

        Raises:
            ValueError: settings that the engine's program was not compiled for.
        """
        self._program.refuse(sampling)
        slot = self._find(key)
        if slot is None:
            return False
        slot.request = dataclasses.replace(
            slot.request, prompt=dataclasses.replace(slot.request.prompt, sampling=sampling)
        )
        if slot in self._slots and self._state is not None:
            self._state = self._program.retune(self._take(), slot.request.prompt, self._slots.index(slot))
        return True

    def _find(self, key: Any) -> Slot | None:
        return next((slot for slot in [*self._slots, *self._parked] if slot and slot.request.key == key), None)

    def _fill(self, waiting: Iterator[Request]) -> None:
        """Put rows into free slots: those that are on their way back first."""
        if self._state is None:
            self._state = self._program.empty(self._params, self.batch_size, self._longest)
            if len(self._prefix_ids) and self._prefix is None:
                self._prefix = self._program.prefix(self._params, self._prefix_ids)
        for i in range(self.batch_size):
            while self._slots[i] is None:
                slot = self._parked.popleft() if self._parked else self._next(waiting)
                if slot is None:
                    return
                self._insert(slot, i)

    def _next(self, waiting: Iterator[Request]) -> Slot | None:
        request = next(waiting, None)
        if request is None:
            return None
        if request.prompt.limit > self._longest:
            # Its last writes would be clamped onto its own valid entries.
            raise ValueError(
                f"Request {request.key!r} has a limit of {request.prompt.limit} tokens, the engine was made for "
                f"{self._longest}: pass a larger longest."
            )
        return Slot(request)

    def _insert(self, slot: Slot, i: int) -> None:
        """Prefill a row, or put it back as it was; one that cannot be put back ends alone."""
        began = time.perf_counter()
        self._slots[i], slot.since = slot, self._number
        prompt, prefix = slot.request.prompt, self._prefix
        if slot.rebuilding:
            try:
                saved = slot.saved
                row = (
                    self._program.row(self._params, prompt, prefix)
                    if saved is None
                    else self._program.restored(self._params, prompt, saved, prefix)
                )
                jax.block_until_ready(row)
            except DEVICE_ERRORS as error:
                self._fail(i, f"cannot be rebuilt after a failure: {_first_line(error)}")
                return
            slot.rebuilding = False
            self.num_rebuilt += 1
        else:
            row = self._prefilled(prompt)
        self._state = self._program.put(self._take(), row, i)
        self._timed("prefill", began)

    def _prefilled(self, prompt: Prompt) -> RoundState:
        """Return a row's state after its prompt; samples of one prompt, one after the other, share the prefill."""
        asked = tuple(prompt.ids), prompt.limit, tuple(prompt.eos), prompt.sampling, prompt.gamma
        if self._last is None or self._last[0] != asked:
            self._last = None  # before the next one is made
            self._last = asked, self._program.row(self._params, prompt, self._prefix)
        return dataclasses.replace(self._last[1], key=np.asarray(prompt.key)[None])

    def _dispatch(self, chunk: int | None) -> None:
        began = time.perf_counter()
        rounds = chunk or (Pace.MOST if self._on_seconds else self.pace.chunk)
        if self._flights:
            self.pace.dispatch(self._flights[-1].view)
        self._state, view = self._program.step(self._params, self._take(), rounds)
        self._flights.append(Flight(self._number, rounds, view))
        self._number += 1
        self._timed("decode", began)

    def _timed(self, stage: str, began: float) -> None:
        if self._on_seconds:
            jax.block_until_ready(self._state)
            self._on_seconds(stage, time.perf_counter() - began)

    def _take(self) -> RoundState:
        """Hand the state over to a call that donates it."""
        assert self._state is not None
        state, self._state = self._state, None
        return state

    def _collect(self, flight: Flight) -> int:
        """Read a chunk: show new tokens, end and free what is finished; return the number of new tokens."""
        self.pace.wait(flight.view)
        self.waste.look(flight)
        view = flight.view
        finish, num_tokens, in_step = jax.device_get((view.finish, view.num_tokens, view.in_step))
        counted = [(i, slot) for i, slot in enumerate(self._slots) if slot and slot.since <= flight.number]
        watched = any(slot.request.watcher for _, slot in counted)
        tokens = np.asarray(view.records["tokens"]) if watched else None
        self.num_chunks += 1
        if any(finish[i] == Finish.RUNNING for i, _ in counted):
            self._retried = False
            self.pace.ran(flight.rounds)
        total = 0
        for i, slot in counted:
            if not in_step[i]:
                self._mend(i, slot)
                continue
            slot.view, slot.index = view, i
            before = slot.seen
            self._look(slot, int(num_tokens[i]), None if tokens is None else tokens[i])
            total += slot.seen - before
            if slot.keep is not None or slot.cancelled or finish[i] != Finish.RUNNING:
                self._end(i, slot, Finish(int(finish[i])), flight)
        return total

    def _look(self, slot: Slot, num_tokens: int, tokens: np.ndarray | None) -> None:
        """Show a row's new tokens to its watcher."""
        first = len(slot.request.prompt.ids)
        count = num_tokens - first
        if slot.request.watcher is not None and tokens is not None and count > slot.seen:
            slot.keep = slot.request.watcher.push(tokens[first + slot.seen : first + count].tolist())
        # A row that started again from its prompt shows less at first than it has shown before.
        slot.seen = max(slot.seen, count) if slot.keep is None else slot.keep

    def _end(self, i: int, slot: Slot, finish: Finish, flight: Flight) -> None:
        """Free a finished row's slot."""
        if finish == Finish.RUNNING:
            self._state = self._program.cancel(self._take(), i)
        if slot.keep is not None:
            finish = Finish.STOP
        elif finish == Finish.RUNNING:
            finish = Finish.CANCELLED
        if finish in (Finish.STOP, Finish.CANCELLED):
            self.waste.end(flight, i, len(slot.request.prompt.ids) + slot.seen)
        result = slot.result(finish)
        self._done.append(result)
        self._slots[i] = None
        if result.status & (Status.TARGET_NOT_FINITE | Status.DRAFT_NOT_FINITE):
            self._state = self._program.blank(self._take(), i)

    def _mend(self, i: int, slot: Slot) -> None:
        """Rebuild both caches of a row from its ids before the chunk that found them out of step."""
        slot.settle()
        slot.mended += 1
        if slot.mended > _MENDED:
            self._fail(i, "lost step between its caches and its tokens again and again. Please report it.")
            self._state = self._program.cancel(self._take(), i)
            return
        slot.rebuilding = True
        self._insert(slot, i)

    def _fail(self, i: int, reason: str) -> None:
        """End a row with an error; it keeps what is confirmed."""
        slot = self._slots[i]
        assert slot is not None
        self._done.append(slot.result(Finish.ERROR, f"The row {reason}"))
        self._slots[i] = None

    def _recover(self, error: BaseException) -> None:
        """Make ready to go on after the device failed: once with all rows, then without those that ran."""
        self.num_failures += 1
        memory = out_of_memory(error)
        if memory and self._draft_can_go and self.num_chunks == 0:
            raise error
        self._state = self._last = None
        self._flights.clear()
        running = [i for i, slot in enumerate(self._slots) if slot]
        if running and self._retried:
            for i in running:
                self._fail(i, f"met an error twice: {_first_line(error)}")
            self._retried = False
            return
        if not running and not (memory and self.batch_size > 1):
            raise error  # not even empty slots can be made
        self._retried = bool(running)
        for slot in filter(None, self._slots):
            slot.settle()
            slot.rebuilding = True
            self._parked.append(slot)
        self._slots = [None] * (max(self.batch_size // 2, 1) if memory else self.batch_size)

    def _drop(self) -> None:
        """Forget the rows of a run."""
        if any(self._slots) or self._parked:
            self._state = None
        self._slots = [None] * self.batch_size
        self._parked.clear()
        self._flights.clear()
        self._done.clear()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


__all__ = ["Engine", "Request", "Result", "Watcher"]
