"""Prefill, the jitted while_loop, the result: the pieces a whole generation is made of.

``make_decoder`` is the pure loop, to jit, shard or export; ``Program`` compiles it, with the insertion of a prompt,
for one set of static choices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cache as kv
from specjax import layout as layouts
from specjax import prefill, slots, transforms
from specjax.generate_loop import MAX_GAMMA, make_decoder, widths_of
from specjax.sampling import GREEDY, Features, SamplingParams, features_of, stack
from specjax.types import Cache, Controller, Drafter, Finish, ModelFn, Params, RoundState, Rule

__all__ = [
    "MAX_GAMMA", "PLAIN", "HeldPrefix", "Program", "Prompt", "Saved", "capacity_for", "make_decoder", "put_row",
    "start", "widths_of",
]  # fmt: skip

PLAIN = Features()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One row as the loop takes it: plain values.

    Attributes:
        ids: the prompt, at least one token.
        limit: the row ends when prompt and output reach this many tokens; at least ``len(ids)``.
        eos: ids that end the row.
        key: uint32 [2], from ``sampling.row_key``.
        sampling: how it samples.
        gamma: the most tokens to draft per round for this row; the program's K where that is less.
    """

    ids: Sequence[int]
    limit: int
    eos: Sequence[int]
    key: np.ndarray
    sampling: SamplingParams = GREEDY
    gamma: int = MAX_GAMMA


@dataclasses.dataclass(frozen=True)
class Saved:
    """A running row between two chunks, as the host read it.

    Attributes:
        tokens: [N] prompt and output.
        round, status, draft_on: see ``RoundState``.
        records: [N, ...] by name, for each of the tokens.
    """

    tokens: np.ndarray
    round: int
    status: int
    draft_on: bool
    records: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class HeldPrefix:
    """A shared prompt prefix that is prefilled.

    Attributes:
        ids: what it is, in whole pieces.
        cache: one row.
        features: [1, P, D] for a draft source that observes, else None.
    """

    ids: tuple[int, ...]
    cache: Cache
    features: jax.Array | None = None

    def of(self, ids: Sequence[int]) -> prefill.Prefix | None:
        """Return the part of it that a prompt begins with, or None; a prompt's last token is never in it."""
        same = next((i for i, (a, b) in enumerate(zip(self.ids, ids[:-1], strict=False)) if a != b), None)
        same = min(len(self.ids), len(ids) - 1) if same is None else same
        pieces = same // prefill.PIECE
        return prefill.Prefix(self.cache, np.int32(pieces), self.features) if pieces else None


def filled(
    params: dict[str, Params],
    tokens: jax.Array,
    count: jax.Array,
    prefix: prefill.Prefix | None = None,
    *,
    target_fn: ModelFn,
    drafter: Drafter,
    capacity: int,
) -> tuple[Cache, Any]:
    """Prefill prompts: return the target's cache and the draft's state. What rows ask for is not in this program.

    Args:
        params: ``{"target": ..., "draft": ...}``.
        tokens: [B, T] padded prompts.
        count: [B] tokens of each.
        prefix: what they begin with, or None.
        target_fn, drafter: the parts.
        capacity: positions to allocate.
    """
    capacity = kv.round_up(max(capacity, tokens.shape[1]))
    return prefill.observed(
        target_fn, params["target"], tokens, count, capacity, prefix,
        None if drafter.observe is None else functools.partial(drafter.observe, params["draft"]),
        drafter.init(params["draft"], tokens, count, capacity),
    )  # fmt: skip


def start(
    tokens: jax.Array,
    rows: dict[str, Any],
    held: tuple[Cache, Any],
    *,
    capacity: int,
    vocab_size: int,
    logprobs: bool,
    top_logprobs: int = 0,
    controller: Controller | None = None,
) -> RoundState:
    """Return the state of rows that are prefilled and have run no round.

    Args:
        tokens: [B, T] padded prompts.
        rows: ``num_tokens`` [B], ``limit`` [B], ``eos`` [B, E], ``key`` [B, 2], ``sampling``, ``gamma`` [B].
        held: what ``filled`` returned.
        controller: of gamma, or None.
        capacity: positions to allocate.
        vocab_size: V, the vocabulary in use.
        logprobs: keep log-probabilities.
        top_logprobs: N, keep those of the N most probable tokens too.
    """
    batch, length = tokens.shape
    capacity = kv.round_up(max(capacity, length))
    count = rows["num_tokens"]
    zeros = jnp.zeros((batch,), jnp.int32)
    top_logprobs = top_logprobs if logprobs else 0
    cache, draft = held

    def record(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
        return jnp.zeros((batch, capacity, *shape), dtype)

    return RoundState(
        tokens=jnp.pad(tokens, ((0, 0), (0, capacity - length))),
        prompt_length=count,
        num_tokens=count,
        limit=rows["limit"],
        eos=rows["eos"],
        finish=jnp.where(rows["limit"] > count, int(Finish.RUNNING), int(Finish.LENGTH)),
        status=zeros,
        key=rows["key"],
        round=zeros,
        draft_on=jnp.ones((batch,), jnp.bool_),
        gamma=rows["gamma"],
        control=() if controller is None else controller.init(batch),
        sampling=rows["sampling"],
        history=transforms.init_history(rows["sampling"], tokens, count, vocab_size),
        cache=cache,
        draft=draft,
        place=record(dtype=jnp.int8),
        accepted=record(dtype=jnp.bool_),
        drafted=record(dtype=jnp.int8),
        logprobs=record() if logprobs else None,
        sampled_logprobs=record() if logprobs else None,
        top_ids=record(top_logprobs, dtype=jnp.int32) if top_logprobs else None,
        top_logprobs=record(top_logprobs) if top_logprobs else None,
    )


def put_row(state: RoundState, row: RoundState, slot: jax.Array | int) -> RoundState:
    """Put a state of one row, of the same or a smaller capacity, into a slot of a batch, in place.

    What the slot's last row left past the new row's valid length stays there, unseen.
    """

    def put(whole: jax.Array, part: jax.Array) -> jax.Array:
        part = part[tuple(slice(0, size) for size in whole.shape)]
        return lax.dynamic_update_slice(whole, part.astype(whole.dtype), (slot, *(0,) * (whole.ndim - 1)))

    return jax.tree.map(put, state, row)


class Program:
    """The compiled pieces for one target, draft, rule, gamma and width. Compiles lazily, once per shape.

    Args:
        target_fn, drafter, rule, gamma, vocab_size, width, exact, controller, check: as ``make_decoder`` takes them.
        logprobs: keep each token's log-probability under the target's raw softmax, and as sampled.
        top_logprobs: N, and those of the N most probable tokens.
        features: the families of transforms that its rows may use; none by default, which leaves temperature.
        num_eos: E, columns of the EOS table.
        layout: the devices it runs on.
    """

    def __init__(
        self,
        target_fn: ModelFn,
        drafter: Drafter,
        *,
        rule: Rule,
        gamma: int,
        vocab_size: int,
        width: int | Sequence[int] | None = None,
        exact: bool = False,
        controller: Controller | None = None,
        check: bool = False,
        logprobs: bool = False,
        top_logprobs: int = 0,
        features: Features = PLAIN,
        num_eos: int = 4,
        layout: layouts.Layout = layouts.ONE,
    ):
        decode = make_decoder(
            target_fn, drafter, rule=rule, gamma=gamma, vocab_size=vocab_size, width=width, exact=exact,
            controller=controller, check=check,
        )  # fmt: skip
        self.gamma, self.widths, self.drafter, self.vocab_size = gamma, widths_of(gamma, width), drafter, vocab_size
        self.num_eos = num_eos
        self._features = features
        self._filled = functools.partial(filled, target_fn=target_fn, drafter=drafter)
        self._start = functools.partial(
            start, vocab_size=vocab_size, logprobs=logprobs, top_logprobs=top_logprobs, controller=controller
        )
        self.greedy = rule.greedy
        self.controlled = controller is not None  # params["costs"] are its own
        self._target_fn, self._loop = target_fn, decode
        self._empty: dict[tuple[int, int], Callable[[], RoundState]] = {}
        self.layout, jit = layout, layout.jit
        self._step = jit(self._one_step, read=True, donate_argnums=1)
        self._fill = jit(self._one_filled)  # apart from the row's settings: one program, whatever they are
        self._row = jit(self._one_row)
        self._restore = jit(self._restored_row)
        self._prefix = jit(functools.partial(prefill.whole, target_fn, features=drafter.observe is not None))
        self._put = jit(put_row, donate_argnums=0)
        self._retune = jit(slots.with_sampling, donate_argnums=0)
        self._blank = jit(self._blank_row, donate_argnums=0)
        self._cancel = jit(_cancel_row, donate_argnums=0)

    def empty(self, params: dict[str, Params], batch: int, longest: int) -> RoundState:
        """Return ``batch`` empty slots for rows of up to ``longest`` tokens, prompt and output together."""
        key = batch, capacity_for(longest, self.widths[-1])
        if key not in self._empty:  # tracing the models takes a second
            shapes = self.shapes(params, batch, longest)

            def fill() -> RoundState:
                state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
                return dataclasses.replace(state, finish=jnp.full((batch,), int(Finish.EMPTY), jnp.int32))

            self._empty[key] = fill if self.layout.mesh is None else self.layout.jit(fill)
        return self._empty[key]()

    def shapes(self, params: dict[str, Params], batch: int, longest: int) -> RoundState:
        """Return the shapes of such a state; those of ``params`` are enough."""
        rows = self._rows([Prompt([0], 1, (), np.zeros(2, np.uint32))] * batch)
        tokens = jnp.zeros((batch, prefill.SMALLEST_BUCKET), jnp.int32)
        capacity = capacity_for(longest, self.widths[-1])

        def traced(params, tokens, rows) -> RoundState:
            held = self._filled(params, tokens, rows["num_tokens"], capacity=capacity)
            return self._start(tokens, rows, held, capacity=capacity)

        return jax.eval_shape(traced, params, tokens, rows)

    def midway(self, params: dict[str, Params], batch: int, longest: int, prompt: Prompt) -> RoundState:
        """Return rows in mid-generation, with caches of zeros: what rounds cost does not depend on what they hold."""
        state, rows = self.empty(params, batch, longest), self._rows([prompt] * batch)
        tokens = np.zeros(state.tokens.shape, np.int32)
        tokens[:, : len(prompt.ids)] = prompt.ids
        return dataclasses.replace(
            state,
            tokens=jnp.asarray(tokens),
            prompt_length=jnp.asarray(rows["num_tokens"]),
            finish=jnp.full((batch,), int(Finish.RUNNING), jnp.int32),
            draft_on=jnp.ones((batch,), jnp.bool_),
            cache=kv.rollback(state.cache, jnp.asarray(rows["num_tokens"] - 1)),
            **{name: jax.tree.map(jnp.asarray, value) for name, value in rows.items()},
        )

    def insert(self, params: dict[str, Params], state: RoundState, prompt: Prompt, slot: int) -> RoundState:
        """Prefill a prompt and put it into a slot. ``state`` is donated."""
        return self.put(state, self.row(params, prompt), slot)

    def row(self, params: dict[str, Params], prompt: Prompt, prefix: HeldPrefix | None = None) -> RoundState:
        """Prefill a prompt, beside whatever runs, as a state of one row for ``put``.

        The row is computed by itself in the bucket of its own length, so no bit depends on the other rows.
        """
        tokens, rows = _padded(prompt.ids), self._rows([prompt])
        return self._row(tokens, rows, self._fill(params, tokens, rows["num_tokens"], _of(prefix, prompt)))

    def put(self, state: RoundState, row: RoundState, slot: int) -> RoundState:
        """Put a row into a slot. ``state`` is donated."""
        return self._put(state, row, np.int32(slot))

    def restored(
        self, params: dict[str, Params], prompt: Prompt, saved: Saved, prefix: HeldPrefix | None = None
    ) -> RoundState:
        """Return a row as it was when ``saved`` was read, for ``put``: it goes on as it would have gone on."""
        count = len(saved.tokens)
        tokens = _padded(saved.tokens, prefill.bucket(count + self.widths[-1]))
        records = {
            name: np.zeros((1, tokens.shape[1], *value.shape[1:]), value.dtype) for name, value in saved.records.items()
        }
        for name, value in saved.records.items():
            records[name][0, :count] = value
        fields = {
            "num_tokens": np.asarray([count], np.int32),
            "round": np.asarray([saved.round], np.int32),
            "status": np.asarray([saved.status], np.int32),
            "draft_on": np.asarray([saved.draft_on]),
        }
        saves = {**fields, **records}
        return self._restore(params, tokens, _padded(prompt.ids), self._rows([prompt]), _of(prefix, prompt), saves)

    def prefix(self, params: dict[str, Params], ids: Sequence[int]) -> HeldPrefix | None:
        """Prefill a text that many prompts begin with, in whole pieces; None where it has not one."""
        held = len(ids) // prefill.PIECE * prefill.PIECE
        if held == 0:
            return None
        ids = list(ids[:held])
        tokens = _padded([*ids, 0])  # a cache holds every token but the last
        count = np.asarray([held + 1], np.int32)
        return HeldPrefix(tuple(ids), *self._prefix(params["target"], tokens, count))

    def decode(self, params: dict[str, Params], state: RoundState, round_limit: int) -> RoundState:
        """Run up to ``round_limit`` rounds. ``state`` is donated."""
        return self.step(params, state, round_limit)[0]

    def step(self, params: dict[str, Params], state: RoundState, round_limit: int) -> tuple[RoundState, slots.View]:
        """Run up to ``round_limit`` rounds; return also what may be read once the state is donated in its turn."""
        return self._step(params, state, np.int32(round_limit))

    def refuse(self, sampling: SamplingParams) -> None:
        """Refuse settings that this program was not compiled for.

        Raises:
            ValueError: it names them.
        """
        if self.greedy and not sampling.greedy:
            raise ValueError(f"temperature is {sampling.temperature}, but this program's rule is greedy: expected 0.")
        wanted, has = features_of([sampling]), self._features
        lacking = [name for name in ("bias", "min_new", "penalties", "truncation", "draft")
                   if getattr(wanted, name) and not getattr(has, name)]  # fmt: skip
        if any(a > b for a, b in zip(wanted.sequences, has.sequences, strict=True)):
            lacking.append("sequences")
        if lacking:
            raise ValueError(f"this program has no {', '.join(lacking)}: make it with those features.")

    def retune(self, state: RoundState, prompt: Prompt, slot: int) -> RoundState:
        """Give the row in a slot the sampling settings of ``prompt``. ``state`` is donated."""
        return self._retune(state, self._rows([prompt])["sampling"], np.int32(slot))

    def cancel(self, state: RoundState, slot: int) -> RoundState:
        """End a row where it stands. ``state`` is donated."""
        return self._cancel(state, np.int32(slot))

    def blank(self, state: RoundState, slot: int) -> RoundState:
        """Overwrite a slot with zeros: a row that met NaN may have left some, and 0 * NaN is NaN. Donates ``state``."""
        return self._blank(state, np.int32(slot))

    def _rows(self, prompts: list[Prompt]) -> dict[str, Any]:
        eos = np.full((len(prompts), self.num_eos), -1, np.int32)
        for i, prompt in enumerate(prompts):
            eos[i, : len(prompt.eos)] = prompt.eos
        return {
            "num_tokens": np.asarray([len(p.ids) for p in prompts], np.int32),
            "limit": np.asarray([p.limit for p in prompts], np.int32),
            "eos": eos,
            "key": np.stack([p.key for p in prompts]),
            "sampling": stack([p.sampling for p in prompts], self._features, self.vocab_size),
            "gamma": np.asarray([p.gamma for p in prompts], np.int32),
        }

    def _one_filled(self, params, tokens, count, prefix) -> tuple[Cache, Any]:
        return self._filled(params, tokens, count, prefix, capacity=tokens.shape[1])

    def _one_row(self, tokens, rows, held) -> RoundState:
        return self._start(tokens, rows, held, capacity=tokens.shape[1])

    def _restored_row(self, params, tokens, prompt, rows, prefix, saved) -> RoundState:
        # In one program: the caches have the capacity of the whole text, the prompt the bucket of its own.
        held = self._filled(params, prompt, rows["num_tokens"], prefix, capacity=tokens.shape[1])
        row = self._start(prompt, rows, held, capacity=tokens.shape[1])
        return slots.restored(
            row, params, tokens, saved, target_fn=self._target_fn, drafter=self.drafter, width=self.widths[-1]
        )

    def _one_step(self, params, state: RoundState, round_limit) -> tuple[RoundState, slots.View]:
        before = self._fits(state)
        state = self._loop(params, state, round_limit)
        return state, slots.view_of(state, before & self._fits(state))

    def _fits(self, state: RoundState) -> jax.Array:
        return slots.in_step(state, drafter=self.drafter, gamma=self.gamma, may_lag=self.controlled)

    @staticmethod
    def _blank_row(state: RoundState, slot) -> RoundState:
        row = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), state)
        return put_row(state, dataclasses.replace(row, finish=jnp.full((1,), int(Finish.EMPTY), jnp.int32)), slot)


def _of(prefix: HeldPrefix | None, prompt: Prompt) -> prefill.Prefix | None:
    return None if prefix is None else prefix.of(prompt.ids)


def _padded(ids: Sequence[int] | np.ndarray, size: int | None = None) -> np.ndarray:
    tokens = np.zeros((1, prefill.bucket(len(ids)) if size is None else size), np.int32)
    tokens[0, : len(ids)] = ids
    return tokens


def _cancel_row(state: RoundState, slot) -> RoundState:
    return dataclasses.replace(state, finish=state.finish.at[slot].set(int(Finish.CANCELLED)))


def capacity_for(longest: int, width: int) -> int:
    """Return the positions to allocate for rows of ``longest`` tokens: a power of two of chunks, so that few
    programs are compiled; a step of ``width`` rows that starts at the last token never runs over."""
    chunks = kv.round_up(longest + width) // kv.CHUNK
    return kv.CHUNK * (1 << max(chunks - 1, 0).bit_length())
