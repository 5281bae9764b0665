"""Processes meet before they start, and each is told who has not come."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from specjax.errors import UsageError
from specjax.roster import PeerError, meet


@pytest.fixture
def coordinator():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def said(coordinator: str, num: int, present: list[int], timeout: float) -> list[str]:
    """Return what each process that is there is told; "" when all are."""

    def one(index: int) -> str:
        try:
            meet(coordinator, num, index, timeout)
        except (PeerError, UsageError) as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(present)) as pool:
        return list(pool.map(one, present))


def test_all_are_there(coordinator):
    began = time.monotonic()
    assert said(coordinator, 4, [3, 1, 0, 2], 20) == [""] * 4
    assert time.monotonic() - began < 5


def test_the_port_is_free_again_at_once(coordinator):
    """JAX's service takes it next."""
    assert said(coordinator, 2, [0, 1], 20) == ["", ""]
    socket.create_server(("127.0.0.1", int(coordinator.rpartition(":")[2]))).close()


def test_each_is_told_who_is_missing(coordinator):
    began = time.monotonic()
    expected = "processes 1,3 did not start within 0.8 s (--start-timeout): start the same command on every host."
    assert said(coordinator, 4, [0, 2], 0.8) == [expected] * 2
    assert time.monotonic() - began < 6


def test_without_the_coordinator_it_is_the_one_that_is_missing(coordinator):
    assert all("process 0 did not start within 0.5 s" in text for text in said(coordinator, 3, [1, 2], 0.5))


def test_one_number_twice_is_refused(coordinator):
    assert all("Two processes have id 1" in text for text in said(coordinator, 3, [0, 1, 1], 5))


def test_a_stranger_does_not_count(coordinator):
    host, _, port = coordinator.rpartition(":")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, coordinator, 2, 0, 20)
        time.sleep(0.1)
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        pool.submit(meet, coordinator, 2, 1, 20).result()
        first.result()


def test_a_port_that_is_taken_is_said(coordinator):
    with socket.create_server(("", int(coordinator.rpartition(":")[2]))), pytest.raises(UsageError, match="listen"):
        meet(coordinator, 2, 0, 1)


def test_one_process_waits_for_nobody(coordinator):
    meet(coordinator, 1, 0, 0)
