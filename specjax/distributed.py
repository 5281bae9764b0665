"""Several processes that run one program: started together, dealt rows, stopped together.

Every process runs the same programs in the same order on the same arguments, so each one's host follows the whole job;
what it writes is its own share of the rows. JAX's coordination service starts them, tells of a lost one by its
heartbeats, and carries a preemption notice to all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator

import numpy as np

from specjax.errors import SpecjaxError, UsageError
from specjax.roster import PeerError, meet

HEARTBEAT_SECONDS = 30  # a process that is silent for so long is lost
CHUNK = 8  # rounds between two looks at the rows: the same on all processes, so not chosen by measured times
_EXPECTED = "expected auto, off, or coordinator=HOST:PORT,num=N,id=I"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which process this is.

    Attributes:
        coordinator: HOST:PORT of process 0.
        num: processes.
        id: this one, from 0.
    """

    coordinator: str
    num: int
    id: int


def parse(text: str) -> Cluster | str:
    """Read ``--distributed``: "auto", "off", or a Cluster.

    Raises:
        UsageError: anything else.
    """
    if text in ("auto", "off"):
        return text
    given = {part.partition("=")[0]: part.partition("=")[2] for part in text.split(",")}
    host, _, port = given.get("coordinator", "").rpartition(":")
    numbers = (given.get("num", ""), given.get("id", ""), port)
    if set(given) != {"coordinator", "num", "id"} or not host or not all(n.isdecimal() for n in numbers):
        raise UsageError(f"distributed is {text!r}; {_EXPECTED}.")
    cluster = Cluster(given["coordinator"], int(given["num"]), int(given["id"]))
    if not cluster.id < cluster.num:
        raise UsageError(f"distributed has id={cluster.id} of num={cluster.num}; expected 0..{cluster.num - 1}.")
    return cluster


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a job, seen from one of them.

    Attributes:
        index: this one.
        count: of all.
    """

    index: int = 0
    count: int = 1

    @property
    def mesh(self) -> str | None:
        """The mesh where none is given: rows over all devices; None: one process uses one device."""
        if self.count == 1:
            return None
        import jax

        return f"data={jax.device_count()}"

    @property
    def first(self) -> bool:
        """This one writes what there is one of."""
        return self.index == 0

    def deals(self, name: tuple[str, int]) -> bool:
        """Say whether a row, by its name (``specjax.rows.row_name``), is this process's to write."""
        digest = hashlib.sha256(f"{name[0]} {name[1]}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % self.count == self.index

    def barrier(self, name: str) -> None:
        """Wait until all are here."""
        if self.count > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(name)

    def refuse_differences(self, what: str, value: str) -> None:
        """Compare a text that should be the same on all processes, and wait until all have.

        Raises:
            UsageError: it is not.
        """
        if self.count == 1:
            return
        from jax.experimental import multihost_utils

        mine = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint32)
        all_of_them = np.asarray(multihost_utils.process_allgather(mine)).reshape(self.count, -1)
        if different := [i for i in range(self.count) if (all_of_them[i] != all_of_them[0]).any()]:
            raise UsageError(f"Processes {different} and process 0 have different {what}: expected the same on all.")

    def stopper(self) -> Callable[[], bool]:
        """Return what says, at the same call on every process, that a preemption notice has come to one of them."""
        if self.count == 1:
            return lambda: False
        from jax.experimental import multihost_utils

        steps = itertools.count()
        return lambda: bool(multihost_utils.reached_preemption_sync_point(next(steps)))


ALONE = Processes()


@contextlib.contextmanager
def processes(how: Cluster | str, start_timeout: int, debug: bool = False) -> Iterator[Processes]:
    """Join the other processes, and leave together.

    Where one fails, it ends without waiting for the others, who are told by its silence.

    Args:
        how: from ``parse``.
        start_timeout: seconds to wait for all to start.
        debug: show a traceback with an error.

    Raises:
        PeerError: not all started in time.
        UsageError: auto, and nothing says what cluster this is.
    """
    if how == "off":
        yield ALONE
        return
    import jax

    found = _join(how, start_timeout)
    if found.count == 1:
        yield found
        return
    try:
        yield found
        found.barrier("end")
        jax.distributed.shutdown()
    except BaseException as error:
        _leave(error, found, debug)


def _join(how: Cluster | str, start_timeout: int) -> Processes:
    import jax

    cluster = _detected(start_timeout) if isinstance(how, str) else how
    meet(cluster.coordinator, cluster.num, cluster.id, start_timeout)
    jax.distributed.initialize(
        cluster.coordinator, cluster.num, cluster.id,
        initialization_timeout=start_timeout, heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=HEARTBEAT_SECONDS,
    )  # fmt: skip
    return Processes(cluster.id, cluster.num)


def _detected(timeout: int) -> Cluster:
    """Ask JAX what cluster this is."""
    from jax._src import clusters  # what jax.distributed.initialize asks; it has no public name

    coordinator, num, index, _ = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, timeout
    )
    if coordinator is None or num is None or index is None:
        raise UsageError(
            "distributed is auto, and nothing says what cluster this is: "
            "give coordinator=HOST:PORT,num=N,id=I, or off for one process."
        )
    return Cluster(coordinator, num, index)


def _leave(error: BaseException, found: Processes, debug: bool) -> None:
    """Say what happened and end at once: an ordinary exit would wait for a peer that may never come."""
    import jax

    code, message = 1, str(error) or type(error).__name__
    if isinstance(error, SpecjaxError):
        code = error.exit_code
    elif isinstance(error, KeyboardInterrupt):
        code, message = 130, "interrupted."
    elif isinstance(error, jax.errors.JaxRuntimeError):
        code, message = PeerError.exit_code, lost(error)
    if debug:
        import traceback

        traceback.print_exc()
    print(f"specjax: error: process {found.index}: {' '.join(message.split())}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


def lost(error: BaseException) -> str:
    """Return what to say of an error of the device in a job of several processes."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"a peer was lost, or a device failed ({line[:200]}). Finished parts are kept: --resume goes on with them."
