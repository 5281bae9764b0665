"""What a round is made of, what it moves and multiplies, and what the machine can: measured apart from any run.

A round of the very program that runs is timed with its drafts and with none, several rounds a call; the target's step
alone in a compiled loop of steps of the same shape. Drafting is the difference of the first two, the rest of a round
that of the second and the third.
"""

from __future__ import annotations

import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import cache as kv
from specjax.api import program_for
from specjax.generate import Program, capacity_for
from specjax.pair import Model, Pair
from specjax.requests import Job, Options, jobs_of, longest_of
from specjax.rows import Row
from specjax.timing import RoundTimer, per_round
from specjax.types import ModelFn, Params

REPEATS = 7
ROUNDS = 6  # of a longer call; its difference to a call of one is what rounds cost
_TIMED = ("round", "no draft", "step")
COPY_BYTES = 1 << 28  # past every cache
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_DOT = (1024, 2048, 2048)  # [rows, in] times [out, in]


def measure_parts(
    pairs: Mapping[str, Pair],
    rows: Sequence[Row],
    gamma: int,
    options: Mapping[str, dict[str, Any]],
    *,
    repeats: int = REPEATS,
    rounds: int = ROUNDS,
) -> dict:
    """Measure the rounds of plain decoding and of speculation with ``gamma`` drafts, and their steps.

    Args:
        pairs: "plain" and "speculative".
        rows: what the runs decode; they say how many tokens a row holds here: prompt and half the output, the median.
        gamma: drafts per round.
        options: of ``specjax.generate``, by side.
        repeats: of each call; medians are taken.
        rounds: or steps, of a call.

    Returns:
        ``length``, tokens that rows hold; ``batch``; ``plain`` and ``speculative``: ``width``, ``round_seconds``,
        ``draft_seconds``, ``target_seconds``, ``other_seconds``, ``shares`` of the last three, and ``call_seconds``,
        what a call of the loop costs besides its rounds; ``roofline``, see ``step_rates``; ``memory`` in bytes.
    """
    target = pairs["plain"].target
    asked = {side: Options(**{**options[side], "gamma": gamma if side == "speculative" else 0}) for side in pairs}
    prompts = {
        side: [job.prompt for job in jobs_of(rows, target, asked[side]) if isinstance(job, Job)] for side in pairs
    }
    programs = {side: program_for(pairs[side], asked[side], prompts[side]) for side in pairs}
    some = prompts["plain"]
    batch, longest = min(asked["plain"].batch_size, len(some)), longest_of(asked["plain"], some)
    held = int(statistics.median((len(prompt.ids) + prompt.limit) // 2 for prompt in some))
    params = {side: {"target": target.params, "draft": pairs[side].draft.params} for side in programs}
    calls: dict[tuple[str, str, int], Callable[[], float]] = {}
    length = 0
    for side, program in programs.items():
        width, capacity = program.widths[-1], capacity_for(longest, program.widths[-1])
        length = max(1, min(held, capacity - width - rounds * (program.gamma + 1)))
        timer = RoundTimer(program, params[side], batch, capacity - width, prompts[side][0].sampling,
                           length=length, limit=capacity - width)  # fmt: skip
        step = step_loop(target.fn, target.params, width, batch, length, capacity, target.vocab_size)
        for count in (1, rounds):
            calls[side, "round", count] = functools.partial(_rounds, timer, program.gamma, count)
            calls[side, "no draft", count] = functools.partial(_rounds, timer, 0, count)
            calls[side, "step", count] = functools.partial(step, count)
    seconds = dict(zip(calls, in_turns(list(calls.values()), repeats), strict=True))
    sides = {
        side: _side(program, {name: [seconds[side, name, count] for count in (1, rounds)] for name in _TIMED}, rounds)
        for side, program in programs.items()
    }
    bytes_moved = weight_bytes(target.params) + _cache_bytes(target.fn, batch, length)
    return {
        "length": length,
        "batch": batch,
        **sides,
        "roofline": {
            side: step_rates(target, bytes_moved, batch * part["width"], part["target_seconds"])
            for side, part in sides.items()
        },
        "memory": memory(programs["speculative"], params["speculative"], batch, longest),
    }


def _rounds(timer: RoundTimer, gamma: int, rounds: int) -> float:
    return timer.run(gamma, rounds=rounds).seconds


def _side(program: Program, seconds: Mapping[str, Sequence[float]], rounds: int) -> dict[str, Any]:
    """Take a round apart, from the seconds of calls of one and of several; no part is less than nothing."""
    whole, without, step = (per_round(seconds[name][0], seconds[name][1], rounds) for name in _TIMED)
    if program.gamma == 0:
        whole = without = (whole + without) / 2  # the same thing measured twice
    parts = {"draft": max(whole - without, 0.0), "target": step, "other": max(without - step, 0.0)}
    total = sum(parts.values())
    return {
        "width": program.widths[-1],
        "round_seconds": whole,
        **{f"{name}_seconds": value for name, value in parts.items()},
        "shares": {name: value / total for name, value in parts.items()},
        "call_seconds": max(seconds["round"][0] - whole, 0.0),
    }


def step_loop(
    fn: ModelFn,
    params: Params,
    width: int,
    batch: int,
    length: int,
    capacity: int,
    vocab_size: int,
) -> Callable[[int], float]:
    """Return a call that runs some steps of a model and returns their seconds.

    Every step's tokens are the argmax of the last one's logits, so that nothing can be left out.

    Args:
        fn, params: the model.
        width: rows of a step for each of ``batch`` texts.
        length: tokens that each text holds, in a cache of ``capacity``.
        vocab_size: of the tokens that go in.
    """

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params, cache, tokens, count):
        def step(_, carry):
            cache, tokens = carry
            out = fn(params, tokens, cache, logits="all")
            assert out.logits is not None
            return kv.rollback(out.cache, cache.length), jnp.argmax(out.logits, axis=-1).astype(jnp.int32)

        return lax.fori_loop(0, count, step, (cache, tokens))

    tokens = jnp.asarray(np.random.default_rng(0).integers(0, vocab_size, (batch, width)), jnp.int32)
    state = [kv.rollback(fn.init_cache(batch, capacity), jnp.full((batch,), length, jnp.int32))]

    def run(steps: int) -> float:
        began = time.perf_counter()
        state[0] = jax.block_until_ready(loop(params, state[0], tokens, np.int32(steps)))[0]
        return time.perf_counter() - began

    return run


def in_turns(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Return the median of what each call returns, the calls taking turns, after one of each that compiles."""
    found: list[list[float]] = [[] for _ in runs]
    for turn in range(repeats + 1):
        for run, values in zip(runs, found, strict=True):
            value = run()
            if turn:
                values.append(value)
    return [statistics.median(values) for values in found]


def step_rates(target: Model, bytes_moved: int, rows: int, seconds: float) -> dict[str, float]:
    """Return what a target step achieves.

    Bytes are the weights, once, and the valid part of the cache, once; operations are two for each weight and row
    (attention, which is far less at such lengths, is left out).
    """
    flops = 2 * weight_count(target.params) * rows
    return {
        "rows": rows,
        "seconds": seconds,
        "bytes": bytes_moved,
        "flops": flops,
        "bytes_per_second": bytes_moved / seconds,
        "flops_per_second": flops / seconds,
    }


def machine(dtype: str) -> dict[str, Any]:
    """Measure what the machine reads from memory and multiplies, in one large piece each.

    Returns:
        ``read_bytes_per_second``: a sum over COPY_BYTES of float32; ``copy_bytes_per_second``: a copy of as many, reads
        and writes both counted; ``flops_per_second``: a product of [1024, 2048] with [2048, 2048] of ``dtype``,
        accumulated in float32, two operations for each product and sum.
    """
    read, copy, dot = in_turns([_read_call(), _copy_call(), _dot_call(dtype)], 5)
    rows, wide, out = _DOT
    return {
        "dtype": dtype,
        "read_bytes_per_second": COPY_BYTES / read,
        "copy_bytes_per_second": 2 * COPY_BYTES / copy,
        "flops_per_second": 2 * rows * wide * out / dot,
    }


def clocked(call: Callable[[], Any]) -> Callable[[], float]:
    """Return a call that waits for what ``call`` returns, and returns its seconds."""

    def run() -> float:
        began = time.perf_counter()
        jax.block_until_ready(call())
        return time.perf_counter() - began

    return run


def _read_call() -> Callable[[], float]:
    source = jnp.ones((CORES, COPY_BYTES // 4 // CORES), jnp.float32)
    total = jax.jit(lambda x: jnp.sum(x, axis=1))
    return clocked(lambda: total(source))


def _copy_call() -> Callable[[], float]:
    if jax.default_backend() != "cpu":
        source = jnp.ones(COPY_BYTES // 4, jnp.float32)
        add = jax.jit(lambda x: x + 1)
        return clocked(lambda: add(source))
    held, sink = np.ones(COPY_BYTES, np.uint8), np.zeros(COPY_BYTES, np.uint8)
    slices = [slice(i * COPY_BYTES // CORES, (i + 1) * COPY_BYTES // CORES) for i in range(CORES)]
    pool = ThreadPoolExecutor(CORES)
    return clocked(lambda: list(pool.map(lambda part: np.copyto(sink[part], held[part]), slices)))


def _dot_call(dtype: str) -> Callable[[], float]:
    rows, wide, out = _DOT
    left, right = jnp.ones((rows, wide), dtype), jnp.ones((out, wide), dtype)
    dot = jax.jit(lambda a, b: lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32))
    return clocked(lambda: dot(left, right))


def weight_bytes(params: Params) -> int:
    """Return the bytes of the parameters that a step reads: all of them, the embedding once (as the tied head)."""
    return sum(leaf.nbytes for leaf in _read_leaves(params))


def weight_count(params: Params) -> int:
    """Return how many numbers those are."""
    return sum(leaf.size for leaf in _read_leaves(params))


def _read_leaves(params: Params) -> list[jax.Array]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    untied = any("head" in jax.tree_util.keystr(path) for path, _ in leaves)
    return [leaf for path, leaf in leaves if not (untied and "embedding" in jax.tree_util.keystr(path))]


def _cache_bytes(fn: ModelFn, batch: int, length: int) -> int:
    """Return the bytes of the first ``length`` entries of ``batch`` rows."""
    one = jax.eval_shape(lambda: fn.init_cache(batch, kv.CHUNK))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in (*one.k, *one.v)) * length // kv.CHUNK


def memory(program: Program, params: dict[str, Params], batch: int, longest: int) -> dict[str, Any]:
    """Return bytes of the parameters, of the caches that rows of ``longest`` tokens get, and the peak so far.

    The peak is the device's where it counts one, else the whole process's resident memory, everything before included.
    """
    state = program.shapes(params, batch, longest)
    size = {name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
            for name, part in (("cache", state.cache), ("draft", state.draft), ("target", params["target"]),
                               ("draft_params", params["draft"]))}  # fmt: skip
    counted = jax.devices()[0].memory_stats() or {}
    peak = counted.get("peak_bytes_in_use")
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "target_cache_bytes": size["cache"],
        "draft_state_bytes": size["draft"],
        "target_parameter_bytes": size["target"],
        "draft_parameter_bytes": size["draft_params"],
        "peak_bytes": peak or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "peak_of": "process" if peak is None else "device",
    }
