"""What fits where, from shapes alone."""

from __future__ import annotations

import dataclasses
import json

import jax
import pytest
import tiny as t

from specjax import plan as p
from specjax.cli.main import main
from specjax.models.decoder import DecoderFn
from specjax.sharding import MeshShape

LLAMA = t.DATA / "llama-8-heads"
WORK = p.Work(batch=8, cache_length=200, dtype="float32", cache_dtype="float32")


def test_weights_and_caches_are_counted_to_the_byte():
    shapes, model = p.read_shapes(LLAMA), t.tiny("llama-8-heads")
    found = p.needs(shapes, shapes, MeshShape(), WORK)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    state = jax.eval_shape(lambda: t.program(model.fn, "model", model.fn, gamma=4).empty(
        {"target": model.params, "draft": model.params}, 8, 200))  # fmt: skip
    size = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((tree.k, tree.v)))  # noqa: E731
    assert (found.target, found.draft) == (weights, weights)
    assert (found.target_cache, found.draft_cache) == (size(state.cache), size(state.draft))


def test_a_mesh_divides_what_its_rules_split():
    shapes = p.read_shapes(LLAMA)
    one, rows, layers = (p.needs(shapes, None, mesh, WORK) for mesh in (MeshShape(), MeshShape(8, 1), MeshShape(1, 8)))
    assert rows.target == one.target
    assert rows.target_cache == layers.target_cache == one.target_cache // 8
    assert one.target / 8 < layers.target < one.target / 7  # norms are whole everywhere
    draft = p.needs(shapes, shapes, MeshShape(1, 8), WORK)
    assert draft.draft == one.target
    assert p.needs(shapes, shapes, MeshShape(1, 8, "sharded"), WORK).draft == layers.target


def test_heads_that_are_fewer_than_shards_are_held_by_several_and_it_is_said():
    shapes = p.read_shapes(t.DATA / "gemma3-dual-rope")
    one, four = (p.needs(shapes, None, MeshShape(1, ways), WORK) for ways in (1, 4))
    assert four.target_cache == one.target_cache  # one head each
    assert p.notes(shapes, None, MeshShape(1, 4)) == [
        "target: kv_heads (1) are fewer than model=4 needs: each is held by 4 shards"
    ]
    assert any("heads (4) does not divide by model=8" in note for note in p.notes(shapes, None, MeshShape(1, 8)))


def test_the_largest_batch_is_the_last_that_fits():
    shapes, mesh = p.read_shapes(LLAMA), MeshShape(2, 2)
    hbm = 20_000_000
    most = p.largest_batch(shapes, shapes, mesh, WORK, hbm)
    assert most > 0
    assert most % 2 == 0

    def total(rows):
        return p.needs(shapes, shapes, mesh, dataclasses.replace(WORK, batch=rows)).total

    assert total(most) <= hbm < total(most + 2)
    assert p.largest_batch(shapes, shapes, mesh, WORK, 1000) == 0


def test_the_shipped_configs_have_the_sizes_of_their_names():
    """70.6 and 8.03 thousand million parameters, as their cards say; in two bytes each."""
    for name, count in (("llama-3-70b", 70.55e9), ("llama-3-8b", 8.03e9)):
        weights = p.needs(p.read_shapes(name), None, MeshShape(), p.Work()).target
        assert weights / 2 == pytest.approx(count, rel=0.002)
    assert {"llama-3-70b", "llama-3-8b"} <= set(p.plan_names())


def test_the_command_prints_every_way_to_split_and_says_what_fits(capsys):
    call = ["plan", "--target", "llama-3-70b", "--draft", "llama-3-8b", "--devices", "8", "--batch", "16", "--json"]
    assert main([*call, "--hbm-gb", "95"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert [(line["mesh"]["data"], line["mesh"]["model"]) for line in lines] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert [line["fits"] for line in lines] == [False, False, True, True]
    assert lines[0]["largest_batch"] == 0
    assert lines[2]["largest_batch"] >= 16
    assert main([*call, "--hbm-gb", "8"]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "llama-3-8b", "--devices", "0"], "devices is 0; expected at least 1"),
        (["--target", "llama-3-8b", "--hbm-gb", "0"], "hbm_gb is 0.0; expected more than 0"),
        (["--target", "llama-3-8b", "--mesh", "data=2", "--devices", "8"], "has 2 devices, --devices says 8"),
        (["--target", "llama-3-8b", "--cache-length", "9000"], "expected 1..8192"),
        (["--target", "no-such"], "not known"),
    ],
)
def test_a_wrong_call_is_one_line(options, message, capsys):
    assert main(["plan", *options]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_a_config_that_is_none_is_refused(tmp_path, capsys):
    (tmp_path / "c.json").write_text("{}")
    assert main(["plan", "--target", str(tmp_path / "c.json")]) == 2
    assert "Expected the config.json of a model" in capsys.readouterr().err


def test_nothing_is_loaded(tmp_path, monkeypatch):
    """A folder with a config alone is enough."""
    (tmp_path / "config.json").write_text((LLAMA / "config.json").read_text())
    shapes = p.read_shapes(tmp_path)
    assert shapes.config == t.tiny("llama-8-heads").fn.config
    assert DecoderFn(shapes.config) == t.tiny("llama-8-heads").fn
