"""Small real transformers: the fixtures of tests/data, whole or cut to fewer layers, and programs over them.

Programs are shared by all test files of a run: compiling is most of what these tests cost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoint import load_folder
from specjax.draft import early_exit_drafter, mixed_drafter, model_drafter, ngram_drafter, no_drafter
from specjax.engine import Engine, Request, Result
from specjax.generate import Program, Prompt
from specjax.models.decoder import DecoderFn
from specjax.pair import Draft, Model, Pair
from specjax.sampling import SamplingParams, row_key
from specjax.types import Controller, Drafter
from specjax.verify import RULES

DATA = Path(__file__).parent / "data"
TARGET = "llama-gqa-tied"
NEAR, MID, FAR = (f"{TARGET}.draft-{kind}" for kind in ("near", "mid", "far"))
VOCAB = 320
BATCH = 4


@dataclasses.dataclass(frozen=True)
class Tiny:
    """A model ready to run."""

    fn: DecoderFn
    params: Any = dataclasses.field(hash=False, compare=False)


@functools.cache
def tiny(name: str = TARGET, dtype: str = "float32", layers: int | None = None) -> Tiny:
    """Load a fixture, or its first layers only."""
    checkpoint = load_folder(DATA / name, dtype=dtype)
    config, params = checkpoint.config, dict(checkpoint.params)
    if layers is not None:
        config = dataclasses.replace(config, num_layers=layers)
        params = {key: value for key, value in params.items() if not _past(key, layers)}
    return Tiny(DecoderFn(config, dtype), params)


def _past(key: str, layers: int) -> bool:
    return key.startswith("layers_") and int(key.removeprefix("layers_")) >= layers


@functools.cache
def reference(name: str = TARGET) -> dict[str, np.ndarray]:
    """Return a fixture's prompts, logits and greedy tokens."""
    with np.load(DATA / name / "reference.npz") as arrays:
        return dict(arrays)


@functools.cache
def all_logits(fn: DecoderFn):
    """Return a compiled ``(params, tokens [B, T], cache) -> (logits [B, T, V], cache)``."""

    @jax.jit
    def run(params, tokens, cache):
        out = fn(params, tokens, cache)
        return out.logits, out.cache

    return run


@functools.cache
def drafter(source: str, fn: DecoderFn | None = None, vocab: int = VOCAB) -> Drafter:
    """Return a draft source by name, always the same object."""
    if source == "none":
        return no_drafter()
    if source == "ngram":
        return ngram_drafter()
    assert fn is not None
    if source == "early_exit":
        return early_exit_drafter(fn, 1, vocab)
    if source == "mixed":
        return mixed_drafter(drafter("model", fn, vocab))
    assert source == "model"
    return model_drafter(fn, vocab)


@functools.cache
def program(
    fn: DecoderFn,
    source: str = "none",
    draft_fn: DecoderFn | None = None,
    *,
    rule: str = "greedy",
    gamma: int = 0,
    width: int | None = None,
    vocab: int = VOCAB,
    check: bool = True,
    exact: bool = False,
    widths: tuple[int, ...] | None = None,
    controller: Controller | None = None,
) -> Program:
    """Return a program with log-probabilities, always the same object for the same parts."""
    return Program(
        fn,
        drafter(source, draft_fn, vocab),
        rule=RULES[rule],
        gamma=gamma,
        vocab_size=vocab,
        width=widths or width,
        exact=exact,
        controller=controller,
        check=check,
        logprobs=True,
    )


def run(
    program: Program,
    target: Tiny,
    draft: Tiny | None,
    prompts: Sequence[Sequence[int]],
    max_new: int | Sequence[int],
    *,
    temperature: float | Sequence[float] = 0.0,
    eos: Sequence[int] = (),
    ids: Sequence[Any] | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
    longest: int = 200,
    chunk: int = 64,
    watchers: Sequence[Any] | None = None,
    costs: Any = None,
) -> list[Result]:
    """Run prompts through an engine; results in the order of the prompts."""
    count = len(prompts)
    limits = [max_new] * count if isinstance(max_new, int) else max_new
    temperatures = [temperature] * count if isinstance(temperature, int | float) else temperature
    params = {"target": target.params, "draft": {} if draft is None else draft.params, "costs": costs}
    engine = Engine(program, params, batch_size=batch_size, longest=longest)
    requests = [
        Request(
            i,
            Prompt(
                ids=[int(t) for t in prompt],
                limit=len(prompt) + limits[i],
                eos=tuple(eos),
                key=row_key(seed, i if ids is None else ids[i]),
                sampling=SamplingParams(temperature=temperatures[i]),
            ),
            None if watchers is None else watchers[i],
        )
        for i, prompt in enumerate(prompts)
    ]
    results = {result.key: result for result in engine.run(requests, chunk=chunk)}
    assert sorted(results) == list(range(count))
    for result in results.values():
        broken = result.status & ~0b11
        assert not broken, f"row {result.key} broke an invariant: {broken!r}"
    return [results[i] for i in range(count)]


def prompts(name: str = TARGET) -> list[list[int]]:
    """Return the fixture's four prompts: 1, 7, 40 and 90 tokens."""
    return [reference(name)[f"prompt_{i}"].tolist() for i in range(4)]


def greedy(name: str = TARGET) -> list[list[int]]:
    """Return the fixture's own 48 greedy tokens for each prompt."""
    return [reference(name)[f"greedy_{i}"].tolist() for i in range(4)]


def acceptance(results: Sequence[Result]) -> float:
    """Return accepted drafts by drafted tokens, over rounds that were not cut short."""
    accepted = drafted = 0
    for result in results:
        whole = ~result.accepted  # a round whose extra token is visible was not cut
        drafted += int(result.drafted[whole].sum())
        accepted += int(result.place[whole].sum())
    return accepted / max(drafted, 1)


def pair(
    target: Tiny,
    draft: Tiny | str = "none",
    *,
    tokenizer: Any = None,
    vocab: int = VOCAB,
    eos: Sequence[int] = (),
    bos: int | None = 1,
) -> Pair:
    """Return a Pair for the library calls, without a tokenizer unless one is given."""
    model = Model(
        name="tiny",
        fn=target.fn,
        params=target.params,
        tokenizer=tokenizer,
        vocab_size=vocab,
        max_positions=target.fn.config.max_positions,
        eos_ids=tuple(eos),
        bos_id=bos,
        dtype=target.fn.dtype,
    )
    if draft == "none":
        return Pair(model, Draft("none", drafter("none"), {}, "off: no draft"))
    if draft == "ngram":
        return Pair(model, Draft("ngram", drafter("ngram"), {}))
    assert isinstance(draft, Tiny)
    return Pair(model, Draft("small", drafter("model", draft.fn, vocab), draft.params))


def with_nan(model: Tiny, token: int) -> Tiny:
    """Return the model with an embedding row of NaN: only rows that meet this token are hit.

    Tied models would carry it into every row's logits, so the head becomes a separate, clean copy.
    """
    params = dict(model.params)
    config = model.fn.config
    if config.tied:
        params["head"] = params["embedding"]
        config = dataclasses.replace(config, tied=False)
    params["embedding"] = params["embedding"].at[token].set(jnp.nan)
    return Tiny(dataclasses.replace(model.fn, config=config), params)
