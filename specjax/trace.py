"""Tracing: rounds one by one, by a program of their own, each decision with the numbers that it was made from.

The normal program has no part in it: nothing is called back, and a traced run compiles another program of the same
rounds. ``specjax.replay`` decides again from the records, which docs/trace.md describes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from specjax import numerics, round, slots
from specjax import sampling as s
from specjax.errors import UsageError
from specjax.generate import Program
from specjax.layout import ONE
from specjax.types import Finish, Params, Purpose, RoundInfo, RoundKeys, RoundState
from specjax.verify import RULES, block
from specjax.verify.rejection import extra_weights

MAX_FULL_VOCAB = 4096  # of a trace with whole distributions

Record = dict[str, Any]


class Traced(Program):
    """A Program whose every round leaves a record of its decisions.

    Args:
        target_fn, drafter: as ``Program`` takes them.
        full: record the whole distributions p and q too.
        **options: of ``Program``.

    Raises:
        UsageError: several widths, a rule that is not one of the package's, or ``full`` over a large vocabulary.
    """

    def __init__(self, target_fn, drafter, *, full: bool = False, **options: Any):
        super().__init__(target_fn, drafter, **options)
        rule = options["rule"]
        if len(self.widths) > 1:
            raise UsageError("A trace needs one width: with gamma auto, give width (--width N) too, or a fixed gamma.")
        if self.layout != ONE:
            raise UsageError("A trace is of one device: leave out the mesh (--mesh).")
        if RULES.get(rule.name) != rule:
            raise UsageError(f"Rule {rule.name!r} cannot be traced; expected one of {', '.join(RULES)}.")
        if full and self.vocab_size > MAX_FULL_VOCAB:
            raise UsageError(
                f"trace_full writes whole distributions: the vocabulary has {self.vocab_size} tokens, expected at most "
                f"{MAX_FULL_VOCAB}. Leave it out."
            )
        static = (options.get(name, default) for name, default in (("exact", False), ("controller", None),
                                                                   ("check", False)))  # fmt: skip
        self._parts = round.Parts(target_fn, drafter, rule, self.gamma, self.widths, self.vocab_size, *static)
        self._full, self._take = full, None
        self._traced = jax.jit(self._one_round, donate_argnums=1)

    def reporting(self, take: Callable[[Record], None]) -> Traced:
        """Return this program, with a place for its records to go."""
        mine = copy.copy(self)
        mine._take = take
        return mine

    def step(self, params: dict[str, Params], state: RoundState, round_limit: int) -> tuple[RoundState, slots.View]:
        """Run rounds, each one by itself, and hand out their records."""
        assert self._take is not None
        for _ in range(round_limit):
            state, view, record = self._traced(params, state)
            self._take(jax.device_get(record) | {"rule": self._parts.rule.name, "width": self.widths[-1]})
        return state, view

    def _one_round(self, params, state: RoundState) -> tuple[RoundState, slots.View, Record]:
        before = self._fits(state)
        new, info = round.speculative_round(params, state, self._parts)
        assert info is not None
        record = record_of(state, info, self._parts, full=self._full)
        return new, slots.view_of(new, before & self._fits(new)), record


def record_of(state: RoundState, info: RoundInfo, parts: round.Parts, *, full: bool) -> Record:
    """Return arrays [B, ...] that say how a round was decided.

    Args:
        state: before the round.
        info: what the round did.
        parts: of the program.
        full: add p and q.
    """
    keys = round.round_keys(state, parts.gamma, parts.rule)
    target = s.distribution(info.logits, state.sampling)
    proposal, gamma = info.proposal, info.proposal.tokens.shape[1]
    drafted = proposal.tokens[..., None]
    p = jnp.take_along_axis(target.probs[:, :gamma], drafted, axis=-1)[..., 0]
    record: Record = {
        "running": state.finish == Finish.RUNNING,
        "key": state.key,
        "round": state.round,
        "position": state.num_tokens,
        "at": state.num_tokens - state.prompt_length,
        "room": state.limit - state.num_tokens,
        "eos": state.eos,
        "temperature": state.sampling.temperature,
        "num_drafted": proposal.num_drafted,
        "num_accepted": info.verdict.num_accepted,
        "emitted": info.emitted,
        "num_emitted": info.num_emitted,
        "drafts": proposal.tokens,
        "log_p": jnp.log(p),
        "log_q": jnp.zeros_like(p),
        "overlap": p,  # q is one-hot
    }
    if proposal.probs is not None:
        q = jnp.take_along_axis(proposal.probs, drafted, axis=-1)[..., 0]
        record |= {
            "log_q": jnp.log(q),
            "overlap": numerics.row_sum(jnp.minimum(target.probs[:, :gamma], proposal.probs))[..., 0],
            "draft_noise": _noise_of(keys.place[:, :gamma], proposal.tokens),
        }
    record |= _decisions(info, target, keys, parts)
    if full:
        record |= {"p": target.probs} | ({} if proposal.probs is None else {"q": proposal.probs})
    return record


def _decisions(info: RoundInfo, target: s.Distribution, keys: RoundKeys, parts: round.Parts) -> Record:
    """Return what the rule's own decisions were made from."""
    proposal, accepted = info.proposal, info.verdict.num_accepted
    if parts.rule.greedy:
        return _choice("target", info.logits, None)
    if parts.rule.coupled:
        places = keys.place[:, : target.probs.shape[1]]
        return _choice("target", target.log_weights, _noise(places, target.probs.shape[-1]))
    gamma, scale, found = proposal.tokens.shape[1], None, {}
    if gamma:
        found = {"uniforms": s.uniforms(s.purpose_key(keys.round, Purpose.ACCEPT), gamma)}
    if gamma and parts.rule.name == block.RULE.name:
        pi = block.prefix_weights(target.probs, proposal)
        found |= {"pi": pi, "h": block.end_probability(target.probs, proposal, pi)}
        scale = block.scale_at(pi, accepted)
    weights, purpose = extra_weights(target, proposal, accepted, scale)
    noise = _noise(s.fold(keys.round, purpose)[:, None], weights.shape[-1])
    return found | _choice("extra", weights[:, None], noise)


def _choice(name: str, weights: Float[Array, "B P V"], noise: Float[Array, "B P V"] | None) -> Record:
    """Return the largest of log weights and noise, and its rival: ids, weights and noise, the last axis of two."""
    scores = weights if noise is None else weights + noise
    ids = jax.lax.top_k(scores, 2)[1]
    found = {f"{name}_ids": ids, f"{name}_weights": jnp.take_along_axis(weights, ids, axis=-1)}
    return found if noise is None else found | {f"{name}_noise": jnp.take_along_axis(noise, ids, axis=-1)}


def _noise(keys: UInt32[Array, "B P 2"], vocab_size: int) -> Float[Array, "B P V"]:
    return jax.vmap(jax.vmap(lambda key: s.gumbel(key, jnp.arange(vocab_size))))(keys)


def _noise_of(keys: UInt32[Array, "B K 2"], ids: jax.Array) -> Float[Array, "B K"]:
    return jax.vmap(jax.vmap(lambda key, i: s.gumbel(key, i[None])[0]))(keys, ids)


class Tracer:
    """Holds the rounds of running rows, and hands out those of a finished row, in order.

    Rounds are held until then because a stop may leave the last of them out, and because a row that is put back after
    a failure runs some of them again.

    Args:
        give: called with each record, as docs/trace.md has it.
    """

    def __init__(self, give: Callable[[Record], None]):
        self._give = give
        self._rounds: dict[bytes, dict[int, Record]] = {}

    def take(self, record: Record) -> None:
        """Take a round of all rows."""
        for i in np.flatnonzero(record["running"]):
            line = _line(record, int(i))
            self._rounds.setdefault(record["key"][i].tobytes(), {})[line["round"]] = line

    def finish(self, key: np.ndarray, row_id: int | str | None, sample: int, num_new: int) -> None:
        """Hand out the rounds of a row, those that begin before its end."""
        for _, line in sorted(self._rounds.pop(np.asarray(key).tobytes(), {}).items()):
            if line["at"] < num_new:
                self._give({"id": row_id, "sample": sample, **line})


def _line(record: Record, i: int) -> Record:
    """Return one row's part of a round as it is written."""
    count, accepted = int(record["num_drafted"][i]), int(record["num_accepted"][i])
    names = {"uniforms": "uniform", "draft_noise": "draft_noise", "pi": "pi", "h": "h"}
    line: Record = {
        "round": int(record["round"][i]),
        "at": int(record["at"][i]),
        "position": int(record["position"][i]),
        "rule": record["rule"],
        "temperature": _float(record["temperature"][i]),
        "width": record["width"],
        "key": record["key"][i].tolist(),
        "eos": [token for token in record["eos"][i].tolist() if token >= 0],
        "room": int(record["room"][i]),
        "num_drafted": count,
        "num_accepted": accepted,
        "emitted": record["emitted"][i, : record["num_emitted"][i]].tolist(),
        "drafts": [
            {
                "id": int(record["drafts"][i, k]),
                "log_p": _float(record["log_p"][i, k]),
                "log_q": _float(record["log_q"][i, k]),
                "overlap": _float(record["overlap"][i, k]),
                **{mine: _float(record[name][i, k]) for name, mine in names.items() if name in record},
                "accepted": k < accepted,
            }
            for k in range(count)
        ],
    }
    if "target_ids" in record:
        line["targets"] = [_choice_line(record, "target", i, k) for k in range(count + 1)]
    else:
        line["extra"] = {"from": "residual" if accepted < count else "bonus", **_choice_line(record, "extra", i, 0)}
    for name, rows in (("p", count + 1), ("q", count)):
        if name in record:
            line[name] = [[_float(value) for value in row] for row in record[name][i, :rows]]
    return line


def _choice_line(record: Record, name: str, i: int, place: int) -> Record:
    """Return a choice: the chosen token, its rival, and how far apart their scores are."""
    ids, weights = (record[f"{name}_{part}"][i, place] for part in ("ids", "weights"))
    noise = record.get(f"{name}_noise")
    drawn = {} if noise is None else {"noise": _float(noise[i, place, 0]), "rival_noise": _float(noise[i, place, 1])}
    scores = weights if noise is None else weights + noise[i, place]
    return {
        "id": int(ids[0]),
        "log_weight": _float(weights[0]),
        "rival": int(ids[1]),
        "rival_log_weight": _float(weights[1]),
        **drawn,
        "margin": _float(scores[0] - scores[1]) if np.isfinite(scores[1]) else None,
    }


def _float(value: np.floating | float) -> float | None:
    """Return a float32 in its shortest form, None where JSON has no word for it."""
    return float(str(np.float32(value))) if np.isfinite(value) else None
