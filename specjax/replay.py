"""Decides the rounds of a trace again, in plain NumPy, and says where the trace does not agree.

    python -m specjax.replay trace.jsonl

The noise is drawn again from the row's key, by Threefry written out here; acceptance follows from log p, log q, the
uniforms, pi and h as they are written; the token after the accepted ones from its own and its rival's scores. Where a
trace has whole distributions (``--trace-full``), everything follows from those and from the noise alone.
docs/trace.md describes the records.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import UsageError
from specjax.reference import decide_round, gumbel_draw

DRAFT, ACCEPT, RESIDUAL, BONUS, COUPLED = range(5)  # specjax.types.Purpose
CLOSE = 1e-5  # of float32 numbers computed twice; a decision nearer than that is not judged
Record = dict[str, Any]


@dataclasses.dataclass
class Replay:
    """What came of a replay.

    Attributes:
        num_rounds, num_decisions: looked at; a decision is a draft judged or a token chosen.
        num_close: decisions too close to call in float32, and not judged.
        faults: where the trace does not agree, one line each.
    """

    num_rounds: int = 0
    num_decisions: int = 0
    num_close: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)


def replay(records: Iterable[Record]) -> Replay:
    """Decide records again.

    Raises:
        UsageError: a record is none of a trace.
    """
    found = Replay()
    for number, record in enumerate(records, 1):
        found.num_rounds += 1
        try:
            said = list(_Round(record, found).faults())
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise UsageError(f"Record {number} is none of a trace: {type(error).__name__} {error}.") from error
        where = f"id {record['id']!r}, sample {record['sample']}, round {record['round']}"
        found.faults += [f"{where}: {words}" for words in said]
    return found


def read(path: str | Path) -> Iterator[Record]:
    """Yield the records of a file.

    Raises:
        UsageError: it cannot be read, or a line is not JSON.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise UsageError(f"Cannot read the trace {path}: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}, line {number}: not JSON: {error}.") from error


def threefry(key: Sequence[int], high: Any, low: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return Threefry-2x32 of counters (high, low), 20 rounds (Salmon et al. 2011), as uint32."""
    turns = ((13, 15, 26, 6), (17, 29, 16, 24))
    with np.errstate(over="ignore"):
        k0, k1 = np.uint32(key[0]), np.uint32(key[1])
        keys = (k0, k1, k0 ^ k1 ^ np.uint32(0x1BD11BDA))
        x = np.asarray(high, np.uint32) + keys[0]
        y = np.asarray(low, np.uint32) + keys[1]
        for i in range(5):
            for turn in turns[i % 2]:
                x = x + y
                y = (y << np.uint32(turn)) | (y >> np.uint32(32 - turn))
                y = x ^ y
            x = x + keys[(i + 1) % 3]
            y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def fold(key: Sequence[int], *data: int) -> list[int]:
    """Return a key with numbers folded in, one after another, as ``jax.random.fold_in`` does."""
    for number in data:
        key = [int(word) for word in threefry(key, 0, number)]
    return list(key)


def uniform(key: Sequence[int]) -> np.float32:
    """Return the number in [0, 1) of a key."""
    return np.float32(_uniform(key, np.zeros(1, np.uint32))[0])


def gumbel(key: Sequence[int], ids: Any) -> np.ndarray:
    """Return the noise [N] of token ids [N], float32."""
    tiny = np.finfo(np.float32).tiny
    return -np.log(-np.log(np.maximum(_uniform(key, np.asarray(ids)), tiny)))


def _uniform(key: Sequence[int], counters: np.ndarray) -> np.ndarray:
    high, low = threefry(key, np.zeros_like(counters, np.uint32), counters)
    bits = (high ^ low) >> np.uint32(9) | np.uint32(0x3F800000)
    return bits.view(np.float32) - np.float32(1)


class _Round:
    """One record, decided again."""

    def __init__(self, record: Record, found: Replay):
        self.record, self.found = record, found
        self.drafts: list[Record] = record["drafts"]
        self.accepted: int = record["num_accepted"]
        self.key = fold(record["key"], record["round"])
        self.coupled = record["rule"] == "coupled"

    def faults(self) -> Iterator[str]:
        """Yield what does not agree."""
        count = self.record["num_drafted"]
        if len(self.drafts) != count or not 0 <= self.accepted <= count:
            yield f"{self.accepted} of {count} drafts accepted, {len(self.drafts)} written"
            return
        if [draft["accepted"] for draft in self.drafts] != [i < self.accepted for i in range(count)]:
            yield f"the drafts' own marks do not say that {self.accepted} are accepted"
        yield from self._noise()
        yield from self._by_rule()
        yield from self._emitted()
        if "p" in self.record:
            yield from self._full()

    def _by_rule(self) -> Iterator[str]:
        if self.record["rule"] in ("greedy", "coupled"):
            hits = [draft["id"] == target["id"] for draft, target in zip(self.drafts, self.targets, strict=False)]
            agreed = next((i for i, hit in enumerate(hits) if not hit), len(hits))
            self.found.num_decisions += len(self.targets)
            if agreed != self.accepted:
                yield f"the target's own tokens agree with {agreed} drafts, {self.accepted} are accepted"
            for i, target in enumerate(self.targets):
                yield from self._wins(target, f"place {i}")
            return
        self.found.num_decisions += len(self.drafts) + 1
        extra = self.record["extra"]
        if extra["from"] != ("residual" if self.accepted < len(self.drafts) else "bonus"):
            yield f"the extra token is said to be from the {extra['from']}"
        yield from self._wins(extra, "the extra token")
        yield from self._block() if self.record["rule"] == "block" else self._rejection()

    @property
    def targets(self) -> list[Record]:
        """The target's own choices."""
        return self.record["targets"]

    def _rejection(self) -> Iterator[str]:
        for i, draft in enumerate(self.drafts[: self.accepted + 1]):
            left, right = draft["uniform"] * _exp(draft["log_q"]), _exp(draft["log_p"])
            yield from self._judge(left < right, i < self.accepted, left, right, f"draft {i + 1}")

    def _block(self) -> Iterator[str]:
        for i, draft in enumerate(self.drafts):
            if i + 1 >= self.accepted:  # the last accepted one is a candidate end, those after it are none
                candidate = draft["uniform"] < draft["h"]
                said = i + 1 == self.accepted
                yield from self._judge(candidate, said, draft["uniform"], draft["h"], f"draft {i + 1} as the end")
        pi = 1.0
        for i, draft in enumerate(self.drafts):
            q = _exp(draft["log_q"])
            pi = min(1.0, pi * _exp(draft["log_p"]) / q) if q > 0 else 0.0
            if not _same(pi, draft["pi"]):
                yield f"draft {i + 1}: pi is {draft['pi']}, p and q give {pi:.7g}"
            pi = draft["pi"]

    def _judge(self, decided: bool, said: bool, left: float, right: float, name: str) -> Iterator[str]:
        if abs(left - right) <= CLOSE * max(abs(left), abs(right)):
            self.found.num_close += 1
        elif decided != said:
            yield f"{name}: {left:.7g} against {right:.7g}, but it is {'' if said else 'not '}accepted"

    def _wins(self, choice: Record, name: str) -> Iterator[str]:
        """Check a choice against its rival: the greater score, the lower id where they are equal."""
        if choice["rival_log_weight"] is None:
            return
        noise = [choice.get(which, 0.0) for which in ("noise", "rival_noise")]
        margin = choice["log_weight"] + noise[0] - choice["rival_log_weight"] - noise[1]
        size = CLOSE * max(1.0, abs(choice["log_weight"]), *map(abs, noise))
        if abs(margin - choice["margin"]) > size:
            yield f"{name}: the margin is {choice['margin']}, the scores differ by {margin:.7g}"
        if margin < -size or (choice["margin"] == 0 and choice["id"] > choice["rival"]):
            yield f"{name}: token {choice['id']} is chosen, but {choice['rival']} has the greater score"

    def _noise(self) -> Iterator[str]:
        """Draw again, from the row's key, all noise that is written."""
        for i, draft in enumerate(self.drafts):
            if "uniform" in draft and not _same(uniform(fold(self.key, ACCEPT, i)), draft["uniform"]):
                yield f"draft {i + 1}: its uniform is not that of the row's key"
            if "draft_noise" in draft and not _same(gumbel(self._place(i), [draft["id"]])[0], draft["draft_noise"]):
                yield f"draft {i + 1}: its noise is not that of the row's key"
        choices = []
        if "extra" in self.record:
            choices = [(self._extra_key(), self.record["extra"])]
        elif self.coupled:
            choices = [(self._place(i), target) for i, target in enumerate(self.targets)]
        for i, (key, choice) in enumerate(choices):
            ours = gumbel(key, [choice["id"], choice["rival"]])
            if not (_same(ours[0], choice["noise"]) and _same(ours[1], choice["rival_noise"])):
                yield f"choice {i + 1}: its noise is not that of the row's key"

    def _place(self, i: int) -> list[int]:
        """Return the key of a drafted place."""
        if self.coupled:
            return fold(self.record["key"], COUPLED, self.record["position"] + i)
        return fold(self.key, DRAFT, i)

    def _extra_key(self) -> list[int]:
        return fold(self.key, RESIDUAL if self.accepted < len(self.drafts) else BONUS)

    def _extra_id(self) -> int:
        return self.record["extra"]["id"] if "extra" in self.record else self.targets[self.accepted]["id"]

    def _emitted(self) -> Iterator[str]:
        """Check what the round committed: accepted drafts and one token, cut after an EOS or at the row's limit."""
        block = [draft["id"] for draft in self.drafts[: self.accepted]] + [self._extra_id()]
        block = block[: self.record["room"]]
        ends = next((i + 1 for i, token in enumerate(block) if token in self.record["eos"]), len(block))
        if self.record["emitted"] != block[:ends]:
            yield f"it committed {self.record['emitted']}, the decisions give {block[:ends]}"

    def _full(self) -> Iterator[str]:
        """Decide from the distributions and the noise alone."""
        p = np.asarray([[value or 0.0 for value in row] for row in self.record["p"]], np.float32)
        count, vocab = len(self.drafts), p.shape[-1]
        ids = np.asarray([draft["id"] for draft in self.drafts], np.int64)
        written = "q" in self.record
        q = np.eye(vocab, dtype=np.float32)[ids]
        if written:
            q = np.asarray(self.record["q"], np.float32).reshape(count, vocab)
        for i, draft in enumerate(self.drafts):
            overlap = float(np.minimum(p[i], q[i]).sum())
            for name, ours in (("log_p", p[i, ids[i]]), ("log_q", q[i, ids[i]]), ("overlap", overlap)):
                theirs = draft[name] if name == "overlap" else _exp(draft[name])
                if not _same(ours, theirs):
                    yield f"draft {i + 1}: {name} is {draft[name]}, the distributions say {float(ours):.7g}"
            if written and int(gumbel_draw(q[i], gumbel(self._place(i), np.arange(vocab)))) != ids[i]:
                yield f"draft {i + 1}: q and the noise give another token than {ids[i]}"
        accepted, token = self._decided(p, q if written else None, ids)
        if (accepted, token) != (self.accepted, self._extra_id()):
            yield (
                f"the distributions accept {accepted} drafts and then token {token}, the trace {self.accepted} and "
                f"{self._extra_id()}"
            )

    def _decided(self, p: np.ndarray, q: np.ndarray | None, ids: np.ndarray) -> tuple[int, int]:
        vocab, everything = p.shape[-1], np.arange(p.shape[-1])
        if self.record["rule"] in ("greedy", "coupled"):
            noise = np.zeros(p.shape, np.float32)
            if self.coupled:
                noise = np.stack([gumbel(self._place(i), everything) for i in range(len(p))])
            chosen = gumbel_draw(p, noise)
            miss = np.flatnonzero(chosen[:-1] != ids)
            accepted = int(miss[0]) if miss.size else len(ids)
            return accepted, int(chosen[accepted])
        uniforms = np.asarray([uniform(fold(self.key, ACCEPT, i)) for i in range(len(ids))], np.float32)
        final = gumbel(self._extra_key(), everything)
        if self.record["rule"] == "block":
            one_hot = np.eye(vocab, dtype=np.float32)[ids]
            return decide_block(p, one_hot if q is None else q, ids, uniforms, final)
        return decide_round(p, q, ids, uniforms, final)


def decide_block(
    p: np.ndarray, q: np.ndarray, drafts: np.ndarray, uniforms: np.ndarray, final_gumbel: np.ndarray
) -> tuple[int, int]:
    """Apply the block rule (Sun et al. 2403.10444, Algorithm 2) to one round whose randomness is given.

    Args:
        p: [K+1, V] target probabilities.
        q: [K, V] draft probabilities.
        drafts: [K] drafted ids.
        uniforms: [K] in [0, 1).
        final_gumbel: [V] noise of the last draw.

    Returns:
        The number of accepted drafts, and the token after them.
    """
    pi, accepted, scale = 1.0, 0, 1.0
    for i, token in enumerate(drafts):
        pi = min(1.0, pi * float(p[i, token]) / float(q[i, token])) if q[i, token] > 0 else 0.0
        h = pi
        if i + 1 < len(drafts):
            left = float(np.maximum(pi * p[i + 1] - q[i + 1], 0).sum())
            below = left + 1.0 - pi
            h = left / below if below > 0 else 1.0
        if uniforms[i] < h:
            accepted, scale = i + 1, pi
    weights = p[accepted]
    if accepted < len(drafts):
        left = np.maximum(np.float32(scale) * p[accepted] - q[accepted], 0)
        weights = left if left.any() else weights
    return accepted, int(gumbel_draw(weights, final_gumbel))


def _exp(log: float | None) -> float:
    """Return the number of a written logarithm; none is written for zero."""
    return 0.0 if log is None else float(np.exp(log))


def _same(ours: float | np.floating, theirs: float) -> bool:
    return abs(float(ours) - theirs) <= CLOSE * max(1.0, abs(theirs))


def main(argv: Sequence[str] | None = None) -> int:
    """Replay a file; exit with 1 where it does not agree."""
    parser = argparse.ArgumentParser(prog="python -m specjax.replay", description=main.__doc__)
    parser.add_argument("trace", help="what specjax generate --trace wrote")
    options = parser.parse_args(argv)
    try:
        found = replay(read(options.trace))
    except UsageError as error:
        parser.error(str(error))
    for fault in found.faults:
        print(fault)
    print(
        f"{found.num_rounds} rounds, {found.num_decisions} decisions, {found.num_close} too close to call in float32: "
        + (f"{len(found.faults)} do not agree" if found.faults else "all agree")
    )
    return 1 if found.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
