"""A row in the engine: what was asked, what is confirmed of it, and what comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from specjax.generate import Prompt, Saved
from specjax.slots import View
from specjax.types import Finish, Status

DEVICE_ERRORS = (jax.errors.JaxRuntimeError, MemoryError)


def out_of_memory(error: BaseException) -> bool:
    """Say whether an error of the device, or of the host, is one of memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


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
        finish: why it ended; STOP when its watcher ended it.
        status: bits the loop set.
        place, accepted, drafted: [N], see ``RoundState``.
        logprobs, sampled_logprobs: [N] float32, or None.
        top_ids, top_logprobs: [N, M] int32 and float32, or None.
        draft_on: whether its draft was still in use at the end.
        error: what went wrong where ``status`` does not say it, or None.
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
    error: str | None = None


@dataclasses.dataclass
class Slot:
    """A row in a slot, or on its way back into one.

    Attributes:
        request: what was asked.
        since: the number of the first chunk that counts for it.
        seen: new tokens shown to its watcher, or to be returned.
        keep: how many of them stay, once its watcher has ended it.
        cancelled: its caller has ended it.
        rebuilding: it is to be put back from what is confirmed.
        mended: how often its caches were rebuilt because they did not fit its tokens.
        saved: what is confirmed of it, where no view says more.
        view, index: the last view that counted for it, and its slot then.
    """

    request: Request
    since: int = 0
    seen: int = 0
    keep: int | None = None
    cancelled: bool = False
    rebuilding: bool = False
    mended: int = 0
    saved: Saved | None = None
    view: View | None = None
    index: int = 0

    def settle(self) -> Saved | None:
        """Return what is confirmed of it, read back from its last view; None where it has not run."""
        if self.view is not None:
            # A device that is gone takes the view with it: the row then starts again from what was saved before.
            with contextlib.suppress(*DEVICE_ERRORS):
                self.saved = _saved(self.view, self.index)
            self.view = None
        return self.saved

    def result(self, finish: Finish, error: str | None = None) -> Result:
        """Return what came of it."""
        saved = self.settle()
        if saved is None:
            none = np.zeros(0, np.int8)
            ids, records = none.astype(np.int32), dict.fromkeys(("place", "accepted", "drafted"), none)
        else:
            first = len(self.request.prompt.ids)
            visible = slice(first, first + self.seen)
            ids = np.asarray(saved.tokens)[visible]
            records = {name: value[visible] for name, value in saved.records.items()}
        status, draft_on = (0, True) if saved is None else (saved.status, saved.draft_on)
        return Result(
            key=self.request.key,
            ids=ids,
            finish=finish,
            status=Status(status),
            draft_on=draft_on,
            error=error,
            **records,
        )


def _saved(view: View, i: int) -> Saved:
    count = int(np.asarray(view.num_tokens)[i])
    records = {name: np.asarray(value)[i, :count] for name, value in view.records.items()}
    return Saved(
        tokens=records.pop("tokens"),
        round=int(np.asarray(view.round)[i]),
        status=int(np.asarray(view.status)[i]),
        draft_on=bool(np.asarray(view.draft_on)[i]),
        records=records,
    )


@dataclasses.dataclass(frozen=True)
class Flight:
    """A chunk that is dispatched and not read yet.

    Attributes:
        number: its number.
        rounds: its limit.
        view: what it leaves to be read.
    """

    number: int
    rounds: int
    view: View


class Waste:
    """Counts what was computed past the ends of rows that were ended from outside.

    Attributes:
        num_tokens, num_draft_tokens: committed past the end, and drafted in the rounds that begin there.
    """

    def __init__(self) -> None:
        self.num_tokens = self.num_draft_tokens = 0
        self._ended: list[tuple[int, int, int]] = []

    def end(self, flight: Flight, i: int, end: int) -> None:
        """Note that the row in a slot ended at position ``end``, seen in this chunk; the next one ran on with it."""
        self._ended.append((flight.number + 1, i, self._count(flight.view, i, end)))

    def look(self, flight: Flight) -> None:
        """Count what this chunk did for rows that had ended before it."""
        for number, i, end in self._ended:
            if number == flight.number:
                self._count(flight.view, i, end)
        self._ended = [entry for entry in self._ended if entry[0] > flight.number]

    def _count(self, view: View, i: int, start: int) -> int:
        end = int(np.asarray(view.num_tokens)[i])
        place, drafted = (np.asarray(view.records[name])[i, start:end] for name in ("place", "drafted"))
        self.num_tokens += max(end - start, 0)
        self.num_draft_tokens += int(drafted[place == 0].sum())
        return max(end, start)


class Pace:
    """Chooses the rounds of a chunk: few, so that a free slot waits shortly, but more than hide the host's work.

    Attributes:
        chunk: rounds of the next chunk.
        host_seconds, wait_seconds: time between two waits for the device (all that the host and the engine's caller
            did, most of it while a chunk ran), and in them.
        idle_seconds: the most that the device can have waited for the host.
    """

    LEAST = 4  # a call of the loop costs a few milliseconds by itself
    MOST = 64
    _HIDE = 3  # a chunk lasts so many times as long as what the host does meanwhile

    def __init__(self) -> None:
        self.chunk = self.LEAST
        self.host_seconds = self.wait_seconds = self.idle_seconds = 0.0
        self._waited: float | None = None
        self._last = 0.0
        self._hosts: deque[float] = deque(maxlen=5)
        self._rounds: deque[float] = deque(maxlen=5)

    def wait(self, view: View) -> None:
        """Wait for a chunk."""
        began, before = time.perf_counter(), self._waited
        jax.block_until_ready(view)
        self._waited = time.perf_counter()
        self.wait_seconds += self._waited - began
        if before is not None:
            self.host_seconds += began - before
            self._hosts.append(began - before)
            self._last = self._waited - before

    def dispatch(self, ahead: View) -> None:
        """Take note that a chunk is dispatched now, behind the one that leaves ``ahead``."""
        ready = ahead.finish.is_ready()  # pyright: ignore[reportAttributeAccessIssue]
        if self._waited is not None and ready:
            self.idle_seconds += time.perf_counter() - self._waited

    def ran(self, rounds: int) -> None:
        """Take note that the chunk waited for last ran so many rounds."""
        if self._hosts:
            self._rounds.append(self._last / rounds)
            wanted = self._HIDE * statistics.median(self._hosts) / max(statistics.median(self._rounds), 1e-9)
            self.chunk = int(min(max(wanted + 1, self.LEAST), self.MOST))

    def pause(self) -> None:
        """What comes next is no host's work between chunks."""
        self._waited = None
