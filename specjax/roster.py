"""Who is there: processes that are about to start together meet at the coordinator's port first.

JAX's own start ends a process without a word where a peer is missing, so this comes before it: process 0 waits for the
others on the port that its coordination service takes next, and tells all who has not come.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable

from specjax.errors import SpecjaxError, UsageError

_HELLO, _GO, _MISSING, _TWICE = "specjax", "go", "missing", "twice"
_PAUSE = 0.2
_PATIENCE = 5.0  # for an answer, after the time is up


class PeerError(SpecjaxError):
    """Another process is missing or lost; what is finished stays."""

    exit_code = 75


def meet(coordinator: str, num: int, index: int, timeout: float) -> None:
    """Wait until all processes are there.

    Args:
        coordinator: HOST:PORT of process 0.
        num: how many processes.
        index: which one this is.
        timeout: seconds.

    Raises:
        PeerError: some did not come in time, and which.
        UsageError: two processes have one number, or the port is taken.
    """
    host, _, port = coordinator.rpartition(":")
    end = time.monotonic() + timeout
    if num > 1 and index == 0:
        _answer(_receive(int(port), num, end), num, timeout)
    elif num > 1:
        _report(host.strip("[]"), int(port), index, end, timeout)


def _receive(port: int, num: int, end: float) -> list[tuple[int, socket.socket]]:
    """Return who has come, until all have or the time is up."""
    found: list[tuple[int, socket.socket]] = []
    try:
        server = socket.create_server(("", port))
    except OSError as error:
        raise UsageError(f"Process 0 cannot listen on port {port}: {error.strerror}. Give another port.") from error
    with server:
        while len(found) < num - 1:
            server.settimeout(max(end - time.monotonic(), 0.01))
            try:
                peer, _ = server.accept()
            except TimeoutError:
                break
            index = _greeting(peer)
            if 0 < index < num:
                found.append((index, peer))
            else:  # a stranger
                peer.close()
    return found


def _greeting(peer: socket.socket) -> int:
    """Return the number of a process that has come, or -1."""
    try:
        peer.settimeout(_PATIENCE)
        with peer.makefile() as said:
            word, index = said.readline().split()
        return int(index) if word == _HELLO else -1
    except (OSError, ValueError):
        return -1


def _answer(found: list[tuple[int, socket.socket]], num: int, timeout: float) -> None:
    """Tell all who have come what is to be done."""
    there = [index for index, _ in found]
    missing = sorted(set(range(1, num)) - set(there))
    twice = sorted({index for index in there if there.count(index) > 1})
    word, numbers = (_TWICE, twice) if twice else (_MISSING, missing) if missing else (_GO, [])
    for _, peer in found:
        with contextlib.suppress(OSError), peer:
            peer.sendall(f"{word} {_listed(numbers)}\n".encode())
    _heed(word, _listed(numbers), timeout)


def _report(host: str, port: int, index: int, end: float, timeout: float) -> None:
    """Say that this process is there, and wait for the answer."""
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(end - time.monotonic(), 0.01)) as peer:
                peer.sendall(f"{_HELLO} {index}\n".encode())
                peer.settimeout(max(end - time.monotonic(), 0.0) + _PATIENCE)
                with peer.makefile() as said:
                    answer = said.readline().split()
            if answer:
                return _heed(answer[0], answer[-1], timeout)
        except OSError:
            pass
        if time.monotonic() >= end:
            raise PeerError(_absent("0", timeout))
        time.sleep(_PAUSE)


def _heed(word: str, numbers: str, timeout: float) -> None:
    if word == _MISSING:
        raise PeerError(_absent(numbers, timeout))
    if word == _TWICE:
        raise UsageError(f"Two processes have id {numbers}; expected each id once.")


def _absent(numbers: str, timeout: float) -> str:
    who = f"process {numbers}" if "," not in numbers else f"processes {numbers}"
    return f"{who} did not start within {timeout:g} s (--start-timeout): start the same command on every host."


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))
