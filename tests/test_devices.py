"""Several devices: the same ids with rows over a data axis (invariant 8a), and weights loaded in shards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.checkpoint import convert

HERE = Path(__file__).parent
PROGRAM = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tiny as t
from specjax import sampling as s
from specjax.engine import Engine, Request
from specjax.generate import Prompt
from specjax.verify import RULES

RULE, BATCH, NEW = {rule!r}, 8, 20
target, draft = t.tiny(layers=1), t.tiny(t.NEAR, layers=1)
program = t.program(target.fn, "model", draft.fn, gamma=3, rule=RULE)
params = {{"target": target.params, "draft": draft.params}}
rng = np.random.default_rng(0)
prompts = [rng.integers(0, t.VOCAB, size=3 + 5 * i).tolist() for i in range(BATCH)]
for count in (1, 2, 4, 8):
    mesh = Mesh(np.array(jax.devices()[:count]), ("data",))
    state = program.empty(params, BATCH, 80)
    for i, ids in enumerate(prompts):
        row = Prompt(ids, len(ids) + NEW, (), s.row_key(7, i), s.SamplingParams(temperature=1.0))
        state = program.insert(params, state, row, i)
    everywhere = jax.device_put(params, NamedSharding(mesh, P()))
    state = jax.device_put(state, NamedSharding(mesh, P("data")))
    state = program.decode(everywhere, state, 100)
    assert len(state.tokens.sharding.device_set) == count
    output = [np.asarray(state.tokens)[i, len(p): len(p) + NEW].tolist() for i, p in enumerate(prompts)]
    rate = np.mean([np.asarray(state.accepted)[i, len(p): len(p) + NEW] for i, p in enumerate(prompts)])
    print(count, round(float(rate), 3), output)
"""

LOADING = """
import sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import tiny as t
from specjax.checkpoint import load_checkpoint, load_folder

mesh = Mesh(np.array(jax.devices()[:4]), ("model",))

def sharding(path, shape):
    return NamedSharding(mesh, P("model") if shape[0] % 4 == 0 else P())

for where in (t.DATA / t.TARGET, sys.argv[1]):
    for dtype in ("float32", "bfloat16"):
        whole = load_folder(t.DATA / t.TARGET, dtype=dtype).params
        parts = load_checkpoint(where, dtype=dtype, sharding=sharding).params
        for (path, leaf), (_, part) in zip(*map(jax.tree_util.tree_leaves_with_path, (whole, parts)), strict=True):
            wanted = sharding(path, leaf.shape)
            assert part.sharding == wanted, (path, part.sharding)
            assert part.dtype == leaf.dtype
            if leaf.shape[0] % 4 == 0:
                assert part.addressable_shards[1].data.shape[0] == leaf.shape[0] // 4
            np.testing.assert_array_equal(leaf, part)
print("equal")
"""


def run(program: str, *arguments: str) -> str:
    """Run Python with 8 devices and return what it printed."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_weights_are_loaded_onto_a_sharding_that_is_given(tmp_path):
    """From a Hugging Face folder and from Orbax, in both dtypes, over 4 devices."""
    made = convert(HERE / "data" / "llama-gqa-tied", tmp_path / "model", to="orbax")
    assert run(LOADING, str(made)) == "equal\n"


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_ids_do_not_depend_on_the_devices(rule):
    output = run(PROGRAM.format(rule=rule))
    lines = [line.split(" ", 2) for line in output.splitlines()]
    assert [line[0] for line in lines] == ["1", "2", "4", "8"]
    assert 0.1 < float(lines[0][1]) < 0.75  # of all new tokens; a draft that is always right gives 0.75
    assert len({line[2] for line in lines}) == 1
