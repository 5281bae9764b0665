"""Toy models whose exact law is known: second-order Markov chains that read their context from a real cache."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import cache as kv
from specjax import generate as g
from specjax.sampling import SamplingParams, row_key, stack
from specjax.types import Cache, Drafter, Finish, ModelOutput, RoundState, Rule


@dataclasses.dataclass(frozen=True)
class MarkovFn:
    """Logits follow from the last two tokens; the earlier one is read from the cache, so a stale entry shows.

    Its parameters are one table of logits [V, V, V]: by the token before, by the last token, of the next one.
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
        if isinstance(logits, str) and logits == "none":
            return ModelOutput(None, new)
        scores = params[before, tokens]
        if not isinstance(logits, str):
            scores = jnp.take_along_axis(scores, logits[:, None, None], axis=1)[:, 0]
        return ModelOutput(scores, new)


def table(vocab: int, seed: int, sharpness: float = 1.0) -> np.ndarray:
    """Return random logits [V, V, V]."""
    return np.random.default_rng(seed).normal(size=(vocab,) * 3).astype(np.float32) * sharpness


def noisy(logits: np.ndarray, noise: float, seed: int) -> np.ndarray:
    """Return a noisy copy."""
    return logits + noise * np.random.default_rng(seed).normal(size=logits.shape).astype(np.float32)


def next_probs(logits: np.ndarray, prefix: tuple[int, ...], temperature: float) -> np.ndarray:
    """Return the exact next-token law in float64."""
    row = logits[prefix[-2] if len(prefix) > 1 else 0, prefix[-1]].astype(np.float64)
    if temperature == 0:
        return np.eye(len(row))[int(np.argmax(row))]
    row = row / temperature
    row = np.exp(row - row.max())
    return row / row.sum()


def output_law(logits, prompt, max_new: int, eos: int | None, temperature: float) -> dict[tuple[int, ...], float]:
    """Return the exact joint law of whole outputs by enumeration."""
    law: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], mass: float) -> None:
        if len(output) == max_new or (output and output[-1] == eos):
            law[output] = law.get(output, 0.0) + mass
            return
        for token, p in enumerate(next_probs(logits, (*prompt, *output), temperature)):
            if p > 0:
                grow((*output, token), mass * p)

    grow((), 1.0)
    return law


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
    eos: int | None = None,
    temperature: float | list[float] = 1.0,
    seed: int = 0,
    width: int | None = None,
    check: bool = True,
    round_limit: int = 1000,
    logprobs: bool = False,
) -> Run:
    """Decode a ragged batch in one call, without the engine."""
    count = len(prompts)
    limits = max_new if isinstance(max_new, list) else [max_new] * count
    temperatures = temperature if isinstance(temperature, list) else [temperature] * count
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
        "eos": np.full((count, 1), -1 if eos is None else eos, np.int32),
        "key": keys(jnp.arange(count, dtype=jnp.uint32)),
        "sampling": stack([SamplingParams(temperature=t) for t in temperatures]),
    }
    width = gamma + 1 if width is None else width
    start, decode = _compiled(
        target_fn, drafter, rule, gamma, vocab, width, check, logprobs, g.capacity_for(longest, width)
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


def _compiled(target_fn, drafter, rule, gamma, vocab, width, check, logprobs, capacity):
    key = (target_fn, drafter, rule, gamma, vocab, width, check, logprobs, capacity)
    if key not in _CACHE:

        def start(params, tokens, rows):
            return g.start(
                params, tokens, rows, target_fn=target_fn, drafter=drafter, capacity=capacity, logprobs=logprobs
            )

        decode = g.make_decoder(target_fn, drafter, rule=rule, gamma=gamma, vocab_size=vocab, width=width, check=check)
        _CACHE[key] = jax.jit(start), jax.jit(decode, donate_argnums=1)
    return _CACHE[key]


def tally(outputs: list[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> tuple[np.ndarray, np.ndarray]:
    """Return observed counts and expected counts, cells of fewer than 5 expected draws pooled.

    Raises:
        AssertionError: an output that the law gives no probability.
    """
    assert set(outputs) <= set(law), "an impossible output was drawn"
    n = len(outputs)
    cells = sorted(law, key=law.__getitem__, reverse=True)
    seen = dict.fromkeys(cells, 0)
    for output in outputs:
        seen[output] += 1
    big = [cell for cell in cells if law[cell] * n >= 5]
    small = cells[len(big) :]
    observed = [seen[cell] for cell in big]
    expected = [law[cell] * n for cell in big]
    if small:
        observed.append(sum(seen[cell] for cell in small))
        expected.append(sum(law[cell] for cell in small) * n)
        if expected[-1] < 5:
            observed[-2:] = [sum(observed[-2:])]
            expected[-2:] = [sum(expected[-2:])]
    return np.asarray(observed), np.asarray(expected)


def all_sequences(vocab: int, length: int):
    """Return every sequence of one length."""
    return itertools.product(range(vocab), repeat=length)
