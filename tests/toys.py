"""Toy models whose exact law is known: second-order Markov chains that read their context from a real cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import toy_laws

from specjax import cache as kv
from specjax.draft import model_drafter
from specjax.generate import capacity_for, filled, make_decoder, widths_of
from specjax.generate import start as start_rows
from specjax.sampling import SamplingParams, features_of, fold, purpose_key, row_key, stack
from specjax.types import (
    Cache,
    Constraint,
    Controller,
    Drafter,
    Finish,
    ModelOutput,
    Purpose,
    RoundKeys,
    RoundState,
    Rule,
)


@dataclasses.dataclass(frozen=True)
class MarkovFn:
    """Logits follow from the last two tokens; the earlier one is read from the cache, so a stale entry shows.

    Its parameters are one table of logits [V, V, V]: by the token before, by the last token, of the next one. Its
    features are those two tokens.
    """

    vocab: int

    def init_cache(self, batch: int, capacity: int) -> Cache:
        return kv.init(batch, capacity, 1, 1, 1, jnp.float32)

    def __call__(self, params, tokens, cache, *, logits="all", features=False) -> ModelOutput:
        held = kv.write(cache.k[0], tokens[:, None, :, None].astype(jnp.float32), cache.length)
        at = cache.length[:, None] + jnp.arange(tokens.shape[1])
        before = jnp.take_along_axis(held[:, 0, :, 0], jnp.maximum(at - 1, 0), axis=1).astype(jnp.int32)
        before = jnp.where(at > 0, before, 0)
        new = Cache(k=(held,), v=cache.v, length=cache.length + tokens.shape[1])
        stream = jnp.stack([before, tokens], axis=-1).astype(jnp.float32) if features else None
        if isinstance(logits, str) and logits == "none":
            return ModelOutput(None, new, stream)
        scores = params[before, tokens]
        if not isinstance(logits, str):
            scores = jnp.take_along_axis(scores, logits[:, None, None], axis=1)[:, 0]
        return ModelOutput(scores, new, stream)


@dataclasses.dataclass(frozen=True)
class MarkovHead:
    """A head for MarkovFn: logits follow from its token and the one before, which it takes from the feature before it.

    With ``attends`` that token comes from its own cache, whose entries are made of features: the entry at t holds the
    feature's token, x_(t-1), so what a round leaves out or leaves wrong shows one step later.

    Parameters: ``{"table": [V, V, V], "ids": int32 [M] or None}``. ``positions`` heads side by side all score as the
    first one does.
    """

    vocab: int
    attends: bool = False
    positions: int = 0
    width: int = 2

    def init_cache(self, batch: int, capacity: int) -> Cache:
        return kv.init(batch, capacity, int(self.attends), 1, 1, jnp.float32)

    def advance(self, params, tokens, features, cache):
        before = features[..., 1]
        length = cache.length + tokens.shape[1]
        if self.attends:
            held = kv.write(cache.k[0], before[:, None, :, None], cache.length)
            at = cache.length[:, None] + jnp.arange(tokens.shape[1])
            # The entry at t - 1 is checked, too: all that went before must have been right.
            older = jnp.take_along_axis(held[:, 0, :, 0], jnp.maximum(at - 1, 0), axis=1)
            before = jnp.where((at > 1) & (older != features[..., 0]), 0.0, before)
            cache = Cache(k=(held,), v=cache.v, length=length)
        hidden = jnp.stack([before, tokens.astype(jnp.float32)], axis=-1)
        if self.positions:
            hidden = jnp.repeat(hidden[:, :, None], self.positions, axis=2)
        return hidden, kv.rollback(cache, length)

    def rows_of(self, params, ids):
        return ids[..., None]

    def logits(self, params, hidden, more):
        at = hidden.astype(jnp.int32)
        whole = jnp.asarray(params["table"])[at[..., 0], at[..., 1]]
        listed = whole if params["ids"] is None else whole[..., params["ids"]]
        if more is None:
            return listed
        ids = jnp.broadcast_to(jnp.minimum(more[:, None, :, 0], self.vocab - 1), (*whole.shape[:2], more.shape[1]))
        return jnp.concatenate([listed, jnp.take_along_axis(whole, ids, axis=-1)], axis=-1)


@dataclasses.dataclass(frozen=True)
class TwoPartFn:
    """A Markov target of two layers, each with entries of its own; an exit after the first has a table of its own.

    Parameters: ``{"exit": [V, V, V], "final": [V, V, V]}``. The stream [B, T, 1] carries the token ids.
    """

    vocab: int

    def init_cache(self, batch: int, capacity: int) -> Cache:
        return kv.init(batch, capacity, 2, 1, 1, jnp.float32)

    def __call__(self, params, tokens, cache, *, logits="all", features=False, layers=None, hidden=None) -> ModelOutput:
        first, last = layers or (0, 2)
        stream = tokens[..., None].astype(jnp.float32) if hidden is None else hidden
        at = cache.length[:, None] + jnp.arange(stream.shape[1])
        held = list(cache.k)
        for i in range(first, last):
            held[i] = kv.write(held[i], stream[:, None], cache.length)
        before = jnp.take_along_axis(held[last - 1][:, 0, :, 0], jnp.maximum(at - 1, 0), axis=1).astype(jnp.int32)
        before = jnp.where(at > 0, before, 0)
        new = Cache(k=tuple(held), v=cache.v, length=cache.length + stream.shape[1])
        scores = jnp.asarray(params["final" if last == 2 else "exit"])[before, stream[..., 0].astype(jnp.int32)]
        if isinstance(logits, str):
            scores = scores if logits == "all" else None
        else:
            scores = jnp.take_along_axis(scores, logits[:, None, None], axis=1)[:, 0]
        return ModelOutput(scores, new, stream if features else None)


def world(drafter: Drafter, target_table: np.ndarray, draft_params: Any) -> tuple[Any, dict[str, Any]]:
    """Return the target that a draft source runs on, and both parameters: a part of it where the source wants one."""
    vocab = len(target_table)
    if drafter.on_target:
        return TwoPartFn(vocab), {"target": {"exit": draft_params, "final": target_table}, "draft": {}}
    return MarkovFn(vocab), {"target": target_table, "draft": draft_params}


def table(vocab: int, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """Return random logits [V, V, V]."""
    return np.random.default_rng(seed).normal(size=(vocab,) * 3).astype(np.float32) * sharpness


def noisy(logits: np.ndarray, noise: float, seed: int) -> np.ndarray:
    """Return a noisy copy."""
    return logits + noise * np.random.default_rng(seed).normal(size=logits.shape).astype(np.float32)


def argmax_drafter(vocab: int) -> Drafter:
    """Return a deterministic draft: the Markov model's argmax, whatever the row's temperature."""
    drafter = model_drafter(MarkovFn(vocab), vocab)

    def propose(params, state, view, gamma, greedy):
        return drafter.propose(params, state, view, gamma, True)

    return drafter._replace(propose=propose)


def keys_of(keys: jax.Array, gamma: int) -> RoundKeys:
    """Return one round's keys from a key [B, 2] of each row."""
    base = purpose_key(keys, Purpose.DRAFT)
    return RoundKeys(round=keys, place=jnp.stack([fold(base, i) for i in range(gamma + 1)], axis=1))


@dataclasses.dataclass(frozen=True)
class Run:
    """What a batch of rows did."""

    outputs: list[tuple[int, ...]]
    state: RoundState  # NumPy arrays

    @property
    def acceptance(self) -> float:
        """Share of drafted tokens that were accepted, over whole rounds and visible tokens."""
        output = np.arange(self.state.tokens.shape[1]) < self.state.num_tokens[:, None]
        output &= np.arange(self.state.tokens.shape[1]) >= self.state.prompt_length[:, None]
        first = output & (self.state.place == 0) & (self.state.drafted > 0)
        hits = output & self.state.accepted & (self.state.place == 0)
        return float(hits.sum() / max(first.sum(), 1))


def run_batch(
    target_fn,
    drafter: Drafter,
    params: dict,
    prompts: list[list[int]],
    *,
    rule: Rule,
    gamma: int,
    max_new: int | list[int],
    vocab: int,
    eos: int | list[int] | None = None,
    temperature: float | list[float] = 1.0,
    seed: int = 0,
    width: int | tuple[int, ...] | None = None,
    check: bool = True,
    round_limit: int = 1000,
    logprobs: bool = False,
    sampling: list[SamplingParams] | None = None,
    constraint: Constraint | None = None,
    exact: bool = False,
    controller: Controller | None = None,
) -> Run:
    """Decode a ragged batch in one call, without the engine; ``sampling`` says more than ``temperature``."""
    count = len(prompts)
    limits = max_new if isinstance(max_new, list) else [max_new] * count
    temperatures = temperature if isinstance(temperature, list) else [temperature] * count
    shared = {t: SamplingParams(temperature=t) for t in set(temperatures)}
    sampling = sampling or [shared[t] for t in temperatures]
    longest = max(len(p) + n for p, n in zip(prompts, limits, strict=True))
    size = 1 << max(max(len(p) for p in prompts) - 1, 0).bit_length()
    tokens = np.zeros((count, size), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    base = row_key(seed, 0)
    keys = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(base), i)))
    rows = {
        "num_tokens": np.asarray([len(p) for p in prompts], np.int32),
        "limit": np.asarray([len(p) + n for p, n in zip(prompts, limits, strict=True)], np.int32),
        "eos": np.broadcast_to(np.asarray(-1 if eos is None else eos, np.int32).reshape(-1, 1), (count, 1)),
        "key": keys(jnp.arange(count, dtype=jnp.uint32)),
        "sampling": stack(sampling, features_of(sampling, constraint), vocab),
        "gamma": np.full(count, gamma, np.int32),
    }
    capacity = capacity_for(longest, widths_of(gamma, width)[-1])
    start, decode = _compiled(
        target_fn, drafter, rule, gamma, vocab, width, check, logprobs, capacity, exact, controller
    )
    state = jax.device_get(decode(params, start(params, tokens, rows), round_limit))
    if check:
        assert not np.any(state.status), f"status bits {sorted(set(state.status.tolist()))}"
    outputs = [
        tuple(int(t) for t in state.tokens[i, state.prompt_length[i] : state.num_tokens[i]]) for i in range(count)
    ]
    if round_limit == 1000:
        assert np.all(state.finish != Finish.RUNNING)
    return Run(outputs, state)


_CACHE: dict = {}


def _compiled(target_fn, drafter, rule, gamma, vocab, width, check, logprobs, capacity, exact, controller):
    key = (target_fn, drafter, rule, gamma, vocab, width, check, logprobs, capacity, exact, controller)
    if key not in _CACHE:

        def start(params, tokens, rows):
            held = filled(params, tokens, rows["num_tokens"], target_fn=target_fn, drafter=drafter, capacity=capacity)
            return start_rows(
                tokens, rows, held, capacity=capacity, vocab_size=vocab, logprobs=logprobs, controller=controller
            )

        decode = make_decoder(
            target_fn, drafter, rule=rule, gamma=gamma, vocab_size=vocab, width=width, check=check, exact=exact,
            controller=controller,
        )  # fmt: skip
        _CACHE[key] = jax.jit(start), jax.jit(decode, donate_argnums=1)
    return _CACHE[key]


def always_accepted(run: Run, gamma: int, count: int) -> bool:
    """Say whether every row has ``count`` tokens, all of them in whole rounds of gamma accepted drafts and a bonus."""
    rounds = np.arange(count) % (gamma + 1)
    rows = range(len(run.outputs))
    spans = [slice(run.state.prompt_length[row], run.state.num_tokens[row]) for row in rows]
    return all(
        np.array_equal(run.state.place[row, span], rounds)
        and np.array_equal(run.state.accepted[row, span], rounds < gamma)
        for row, span in zip(rows, spans, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class LawResult:
    """What ``law_test`` saw."""

    p_value: float
    cells: int
    draws: int
    acceptance: float


# Ragged on purpose: prompts of 1 to 5 tokens, budgets of 3 to 5, two temperatures, an EOS that cuts rows short.
LAW_VOCAB, LAW_EOS, LAW_GAMMA = 4, 0, 3
LAW_ROWS = [
    (prompt, max_new, temperature)
    for prompt, max_new in (([1], 5), ([2, 3], 4), ([3, 1, 2, 1, 2], 5), ([3, 3, 1, 0, 2], 3))
    for temperature in (1.0, 0.7)
]
LAW_BATCH = 16384
LAW_TABLE = table(LAW_VOCAB, seed=0)


def law_test(
    rule: Rule,
    drafter: Drafter,
    draft_params=None,
    *,
    batches: int = 8,
    seed: int = 0,
    target_table: np.ndarray = LAW_TABLE,
    costs: Any = None,
    **options: Any,
) -> LawResult:
    """Draw ``batches`` times LAW_BATCH rows and compare the joint law of their whole outputs with the exact one."""
    rows = [LAW_ROWS[i % len(LAW_ROWS)] for i in range(LAW_BATCH)]
    outputs: list[list[tuple[int, ...]]] = [[] for _ in LAW_ROWS]
    acceptance = []
    target_fn, params = world(drafter, target_table, draft_params)
    params["costs"] = costs
    for batch in range(batches):
        run = run_batch(
            target_fn,
            drafter,
            params,
            [row[0] for row in rows],
            rule=rule,
            gamma=LAW_GAMMA,
            max_new=[row[1] for row in rows],
            vocab=LAW_VOCAB,
            eos=LAW_EOS,
            temperature=[row[2] for row in rows],
            seed=1000 * seed + batch,
            **options,
        )
        for i, output in enumerate(run.outputs):
            outputs[i % len(LAW_ROWS)].append(output)
        acceptance.append(run.acceptance)
    laws = [toy_laws.output_law(LAW_TABLE, row[0], row[1], LAW_EOS, row[2]) for row in LAW_ROWS]
    p_value, cells = toy_laws.chi_square(zip(outputs, laws, strict=True))
    return LawResult(p_value, cells, batches * LAW_BATCH, float(np.mean(acceptance)))
