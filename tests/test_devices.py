"""The same ids on 1, 2, 4 and 8 devices: rows over a data axis, one program, no word between rows (invariant 8a)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("rule", ["rejection", pytest.param("block", marks=pytest.mark.slow),
                                  pytest.param("coupled", marks=pytest.mark.slow)])  # fmt: skip
def test_ids_do_not_depend_on_the_devices(rule):
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(rule=rule)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    assert [line[0] for line in lines] == ["1", "2", "4", "8"]
    assert 0.1 < float(lines[0][1]) < 0.75  # of all new tokens; a draft that is always right gives 0.75
    assert len({line[2] for line in lines}) == 1
