"""Logical axes, the rules, and where parameters lie."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from specjax import sharding
from specjax.errors import UsageError
from specjax.models.decoder import DecoderFn
from specjax.models.registry import FAMILIES
from specjax.placement import placement
from specjax.sharding import MeshShape, expanded_kv_heads, parse_mesh, spec

EXAMPLES = [(family, example) for family in FAMILIES for example in family.examples]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data=4,model=2", MeshShape(4, 2)),
        ("model=2", MeshShape(1, 2)),
        (" data = 3 ", MeshShape(3, 1)),
        ("data=1,model=8,draft=sharded", MeshShape(1, 8, "sharded")),
    ],
)
def test_a_mesh_is_read(text, expected):
    assert parse_mesh(text) == expected


@pytest.mark.parametrize(
    "text", ["", "4x2", "data=0", "data=-1", "data=2,data=4", "rows=2", "model", "model=2.5", "draft=half", "data=2,,"]
)
def test_a_wrong_mesh_is_refused_with_what_is_expected(text):
    with pytest.raises(UsageError, match="expected data=N,model=N"):
        parse_mesh(text)


def test_a_mesh_of_another_number_of_devices_is_refused():
    with pytest.raises(UsageError, match=r"3 x 2 needs 6 devices, and there are 1"):
        sharding.make_mesh(MeshShape(3, 2), jax.devices()[:1])


def test_rules_split_what_divides_and_say_what_does_not():
    sizes = {"data": 2, "model": 4}
    assert spec(("heads", "embed"), (32, 64), sizes, counts={"heads": 8}).parts == ("model", None)
    heads = spec(("heads", "embed"), (36, 64), sizes, counts={"heads": 9})
    assert heads.parts == (None, None)
    assert heads.notes == ("heads (9) does not divide by model=4: replicated",)
    assert spec(("batch", "kv_heads", None, None), (3, 4, 128, 8), sizes).parts == (None, "model", None, None)
    assert spec(("batch", "vocab"), (4, 320), sizes, rules=sharding.REPLICATED).parts == ("data", None)
    assert spec(("vocab", "embed"), (321, 8), {"data": 8, "model": 1}).notes == ()  # nothing to split


def test_wrong_declarations_are_found():
    with pytest.raises(ValueError, match="'head' has no rule"):
        spec(("head",), (8,), {"model": 2})
    with pytest.raises(ValueError, match="two dimensions on one mesh axis"):
        spec(("heads", "mlp"), (8, 8), {"model": 2})
    with pytest.raises(ValueError, match="2 dimensions"):
        spec(("heads",), (8, 8), {"model": 2})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "expected"),
    [(8, 8, 8, 8), (8, 2, 2, 2), (8, 2, 4, 4), (8, 2, 8, 8), (4, 1, 4, 4), (9, 3, 3, 3), (9, 3, 4, 3), (12, 4, 6, 12)],
)
def test_each_shard_holds_the_heads_its_queries_attend_to(heads, kv_heads, ways, expected):
    found = expanded_kv_heads(heads, kv_heads, ways)
    assert found == expected
    if heads % ways:
        return
    repeated = np.repeat(np.arange(kv_heads), found // kv_heads)
    wanted = np.arange(heads) // (heads // kv_heads)  # the head of each query
    assert (repeated[np.arange(heads) // (heads // found)] == wanted).all()
    assert found % ways == 0


@pytest.mark.parametrize(("family", "example"), EXAMPLES, ids=[f"{f.name}-{i}" for i, (f, _) in enumerate(EXAMPLES)])
def test_every_parameter_of_every_family_declares_its_axes(family, example):
    """Shape, dtype, initialiser and axes stand in one place: the module; the checkpoint's leaves are the same ones."""
    config = family.parse(example)
    fn = DecoderFn(config)
    axes = fn.parameter_axes()
    leaves = {leaf.path: leaf.shape for leaf in family.leaves(config)}
    assert axes.keys() == leaves.keys()
    for ways in (1, 2, 3, 4):
        where = placement(fn, MeshShape(1, ways))
        for path, shape in leaves.items():
            where.expanded_spec(path, where.expanded_shape(path, shape))  # no collision, as many axes as dimensions


def test_axes_do_not_depend_on_depth():
    """They are read from one period of layers."""
    config = FAMILIES[0].parse(FAMILIES[0].examples[0])
    deep = dataclasses.replace(config, num_layers=6, kinds=(config.kinds * 6)[:6])
    axes = DecoderFn(deep).parameter_axes()
    assert axes["layers_5", "attention", "q", "kernel"] == ("heads", "embed")
    assert len({path[0] for path in axes}) == 6 + 2
