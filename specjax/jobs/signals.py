"""Being asked to stop: finish the chunk of rounds, keep what is done, leave."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

from specjax.errors import Terminated


class StopSignals:
    """Takes SIGTERM and SIGINT while it is entered.

    Before ``wait`` is called, and at a second signal, they end the process's work at once (``Terminated``,
    ``KeyboardInterrupt``); after it the first one is only noted, for the loop to see between chunks.

    Args:
        noticed: says of a job of several processes that all of them stop now; it hears of SIGTERM by itself, and gets
            the first SIGINT as one.

    Attributes:
        number: the signal that came, or None.
    """

    def __init__(self, noticed: Callable[[], bool] | None = None) -> None:
        self.number: int | None = None
        self._noticed, self._told = noticed, False
        self._waiting = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        """Say whether to stop."""
        if self._noticed is not None:
            self._told = self._told or self._noticed()  # it says so once
            return self._told
        return self.number is not None

    def wait(self) -> None:
        """From now on, only note the first signal."""
        self._waiting = True

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGINT,) if self._noticed else (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._take) for number in numbers}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _take(self, number: int, frame: FrameType | None) -> None:
        first, self.number = self.number is None, number
        if not (first and self._waiting):
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated
        if self._noticed:
            os.kill(os.getpid(), signal.SIGTERM)
