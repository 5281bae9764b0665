"""What the compiled loop is made of: read in the lowered and the optimised program."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
import tiny as t

from specjax.engine import Engine, Request
from specjax.generate import Prompt
from specjax.sampling import SamplingParams, row_key

LAYERS, GAMMA, LONGEST = 1, 4, 300


@functools.cache
def parts():
    """Return a program with a model draft, its parameters and an empty state of four slots."""
    target, draft = t.tiny(layers=LAYERS), t.tiny(t.MID, layers=LAYERS)
    program = t.program(target.fn, "model", draft.fn, gamma=GAMMA, rule="rejection", check=False)
    params = {"target": target.params, "draft": draft.params}
    return program, params, program.empty(params, 4, LONGEST)


@functools.cache
def lowered(stage: str):
    program, params, state = parts()
    if stage == "decode":
        return program._step.lower(params, state, np.int32(3))
    rows = program._rows([Prompt([1], 9, (), row_key(0, 0))])
    tokens = np.zeros((1, 32), np.int32)
    arguments = params, tokens, rows["num_tokens"], None
    if stage == "put":
        held = jax.eval_shape(program._one_filled, *arguments)
        return program._put.lower(state, jax.eval_shape(program._one_row, tokens, rows, held), np.int32(0))
    return program._fill.lower(*arguments)


@functools.cache
def optimised(stage: str) -> str:
    return lowered(stage).compile().as_text()


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_nothing_calls_back_to_the_host(stage):
    text = lowered(stage).as_text()
    assert "stablehlo.while" in text
    for word in ("callback", "infeed", "outfeed", "send", "recv"):
        assert not re.search(rf"\b\w*{word}\w*\b", text), word


def test_the_loop_exports_for_every_platform_without_a_callback():
    """Lowered for cpu, cuda and tpu at once, from shapes alone."""
    program, params, state = parts()
    shapes = jax.eval_shape(lambda *given: given, params, state, np.int32(3))
    exported = jax.export.export(program._step, platforms=("cpu", "cuda", "tpu"))(*shapes)
    assert exported.platforms == ("cpu", "cuda", "tpu")
    text = re.sub(r"loc\(.*", "", exported.mlir_module())  # places in the source name our functions
    assert "stablehlo.while" in text
    assert set(re.findall(r"custom_call @(\w+)", text)) <= {"Sharding", "annotate_device_placement"}
    assert not re.search("callback|infeed|outfeed|stablehlo.send|stablehlo.recv", text)


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_weights_are_arguments_not_constants(stage):
    """Case 77: what is written out is small (places, rotary frequencies), and the weights come in as arguments."""
    text = lowered(stage).as_text()
    written = re.findall(r"dense<(\"0x[0-9A-F]+\"|\[[^>]*)>", text)
    assert written
    assert max(len(constant) for constant in written) < 4000  # a weight of 64 by 64 takes 32,000 characters
    shapes = [leaf.shape for leaf in jax.tree.leaves(parts()[1])]
    arguments = re.search(r"func\.func public @main\((.*?)\) ->", text, re.DOTALL)
    assert arguments is not None
    for shape in shapes if stage == "decode" else []:  # a prefill without logits has no use for the last layer's rest
        assert f"tensor<{'x'.join(str(n) for n in shape)}xf32>" in arguments.group(1)


@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_every_float32_product_asks_for_full_precision(stage):
    """Invariant 12."""
    dots = re.findall(r"stablehlo\.dot_general.*", lowered(stage).as_text())
    assert len(dots) >= (10 if stage == "decode" else 4)  # jax 0.12 drops what a prefill does not need
    assert all("precision = [HIGHEST, HIGHEST]" in dot for dot in dots)


def test_the_state_is_updated_in_place():
    """Every leaf of the state that goes in comes out of the same buffer."""
    header = optimised("decode").split("\n", 1)[0]
    aliased = re.findall(r"\((\d+), \{\}, (?:may|must)-alias\)", header)
    _, params, state = parts()
    first = len(jax.tree.leaves(params))
    caches = 2 * 2 * LAYERS  # keys and values, target and draft
    assert len(set(aliased)) == len(aliased) >= caches + 10
    large = {first + i for i, leaf in enumerate(jax.tree.leaves(state)) if leaf.size > 10_000}
    assert len(large) == caches
    assert large <= {int(number) for number in aliased}


@pytest.mark.parametrize("stage", ["decode", "put"])
def test_no_cache_is_copied_whole(stage):
    """Case 78: a step writes the new entries; a copy of [4, 2, 512, 16] would be found by its shape."""
    state = parts()[2]
    shape = ",".join(str(n) for n in state.cache.k[0].shape)
    assert f"f32[{shape}]" in optimised(stage)
    copies = re.findall(rf"^.*f32\[{shape}\]\S* copy\(.*$", optimised(stage), re.MULTILINE)
    assert copies == []


def test_temporary_memory_is_less_than_one_cache():
    """Case 78."""
    program, params, _ = parts()
    state = program.empty(params, 4, 4000)
    memory = program._step.lower(params, state, np.int32(3)).compile().memory_analysis()
    one = state.cache.k[0].nbytes
    assert memory.temp_size_in_bytes < one


@pytest.mark.parametrize("draft", ["none", "ngram", "model"])
def test_no_copy_of_the_embedding_is_kept_in_bfloat16(draft):
    """A CPU gathers bfloat16 from a converted table; hoisted out of the loop, that would be all of it."""
    tiny = t.tiny(layers=LAYERS)
    fn = dataclasses.replace(tiny.fn, config=dataclasses.replace(tiny.fn.config, vocab_size=1 << 14), dtype="bfloat16")
    program = t.program(fn, draft, fn, gamma=0 if draft == "none" else 1, width=2, check=False, vocab=1 << 14)
    weights = jax.eval_shape(fn.init_params, jax.random.key(0))
    params = {"target": weights, "draft": weights if draft == "model" else ()}
    state = program.shapes(params, 1, 100)
    memory = program._step.lower(params, state, np.int32(3)).compile().memory_analysis()
    assert weights["embedding"].dtype == "bfloat16"
    assert memory.temp_size_in_bytes < weights["embedding"].size


def test_lengths_settings_and_batches_compile_once_per_bucket():
    """Case 80: 20 prompt lengths in two buckets, other temperatures, a last partial batch."""
    target, draft = t.tiny(layers=LAYERS), t.tiny(t.MID, layers=LAYERS)
    program = t.program(target.fn, "model", draft.fn, gamma=GAMMA, rule="rejection", check=False)
    engine = Engine(program, parts()[1], batch_size=4, longest=LONGEST)
    before = program._fill._cache_size(), program._step._cache_size()
    lengths = [*range(1, 20, 2), *range(33, 52, 2)]
    requests = [
        Request(n, Prompt([1] * n, n + 1 + n % 3, (), row_key(0, n), SamplingParams(temperature=n / 50)))
        for n in lengths
    ]
    assert len(list(engine.run(requests, chunk=2))) == 20
    after = program._fill._cache_size(), program._step._cache_size()
    assert after[0] - before[0] <= 2
    assert after[1] - before[1] <= 1
