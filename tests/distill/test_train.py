"""Whole runs on tiny transformers: trained, resumed, refused, written, and read back as drafts."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
import recipes

import specjax
from specjax.distill import distill, read_recipe
from specjax.distill.card import as_toml
from specjax.distill.config import CardSpec, Recipe
from specjax.distill.figures import read_metrics
from specjax.errors import CheckpointError, SpecjaxError, UsageError
from specjax.pair import load_model


def draft_recipe(corpus: Path, target: Path, output: Path, **parts) -> Recipe:
    return recipes.recipe(teacher=str(target / "model"), data=str(corpus), output=str(output), **parts)


def steps_of(run: Path) -> list[int]:
    return sorted(int(entry.name) for entry in (run / "checkpoints").iterdir() if entry.name.isdecimal())


def lines(run: Path) -> list[dict]:
    """Return a run's metrics without the clock's."""
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in read_metrics(run)]


def test_text_alone_trains_a_target_that_is_read_back(target, corpus):
    found = [line for line in read_metrics(target) if line["kind"] == "train"]
    assert found[0]["cross_entropy"] > 5.0
    assert found[-1]["cross_entropy"] < 0.65 * found[0]["cross_entropy"]
    pair = specjax.load(target=target / "model", draft="none")
    model = pair.target
    assert model.eos_ids == (0,)
    assert model.tokenizer is not None
    assert model.tokenizer.encode("Ben")[0] == 0  # the end-of-text token begins a text, as in training
    (out,) = specjax.generate(pair, ["Ben had"], max_new_tokens=5)
    assert len(out.ids) == 5
    card = (target / "model" / "README.md").read_text()
    assert "trained from text alone" in card
    assert "vocab_size = 300" in card
    assert 'data = "texts.jsonl"' in card  # its name, not where it lay
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                 "generation_config.json"):  # fmt: skip
        assert (target / "model" / name).is_file()
    assert json.loads((target / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.slow
def test_a_draft_of_all_sources_and_two_losses(target, corpus, tmp_path):
    made = draft_recipe(
        corpus, target, tmp_path / "run",
        mix=[{"data": 1.0, "teacher": 1.0, "student": 1.0}],
        responses={"max_new_tokens": 6, "limit": 8, "redraw": 3, "prompts_per_draw": 4, "written": 2,
                   "prompt_tokens": 4, "greedy_share": 0.5},
        loss=[{"name": "forward_kl"}, {"name": "lk", "start": 0.5}],
        train={"steps": 6, "tensorboard": True}, validation={"every": 3, "speed": True, "repeats": 1},
        student={"config": recipes.student(), "head_ids": 64},
    )  # fmt: skip
    news: list[str] = []
    outcome = distill(made, say=news.append)
    assert outcome is not None
    names = sorted(path.name.split("-")[0] for path in (tmp_path / "run" / "data").iterdir())
    assert names == ["data", "student", "student", "teacher"]
    for name in ("greedy", "sampled"):
        found = outcome.figures[name]
        assert 1.0 <= found["mean_acceptance_length"] <= 3.0
        assert len(found["by_position"]) == 2
        assert outcome.figures["predicted"][name]["speedup"] > 0
        assert outcome.figures["measured"][name]["ratio"]["median"] > 0
    card = (outcome.folder / "README.md").read_text()
    assert "measured speed-up" in card
    assert "predicted speed-up" in card
    assert (tmp_path / "run" / "curve.png").is_file()
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    pair = specjax.load(target=target / "model", draft=outcome.folder, require_draft=True)
    assert len(json.loads((outcome.folder / "head_ids.json").read_text())["ids"]) == 64
    (out,) = specjax.generate(pair, ["Ana had"], max_new_tokens=6, gamma=2)
    assert out.stats["speculation"] == "on"


@pytest.mark.slow
def test_a_draft_learns_its_target(target, corpus, tmp_path):
    made = draft_recipe(corpus, target, tmp_path / "run", train={"steps": 60})
    outcome = distill(made)
    assert outcome is not None
    alphas = [line["alpha"] for line in read_metrics(tmp_path / "run") if line["kind"] == "train"]
    assert alphas[-1] > alphas[0] + 0.15
    assert outcome.figures["greedy"]["alpha"][0] > 0.3


class StopAt:
    """Asks to stop before the step after the n-th."""

    def __init__(self, steps: int):
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.slow
def test_case_92_10_and_10_steps_resumed_are_20_straight(target, corpus, tmp_path):
    """Parameters, learning rate, data order and the student's own samples; the stop falls inside a draw."""

    def made(name: str) -> Recipe:
        return draft_recipe(
            corpus, target, tmp_path / name, mix=[{"data": 1.0, "student": 1.0}],
            responses={"max_new_tokens": 5, "redraw": 8, "prompts_per_draw": 8, "prompt_tokens": 4},
            train={"steps": 20, "accumulate": 2},
        )  # fmt: skip

    straight = distill(made("straight"))
    assert distill(made("parts"), stop=StopAt(10)) is None
    assert steps_of(tmp_path / "parts") == [10]
    resumed = distill(made("parts"), resume=True)
    assert straight is not None
    assert resumed is not None
    one, other = (load_model(outcome.folder, dtype="float32").params for outcome in (straight, resumed))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(a, b)
    assert lines(tmp_path / "straight") == lines(tmp_path / "parts")
    assert [line["step"] for line in lines(tmp_path / "parts") if line["kind"] == "train"] == list(range(1, 21))


@pytest.mark.slow
def test_case_86_88_the_last_step_is_saved_whatever_the_period(corpus, tmp_path):
    train = {"steps": 7, "save_every": 3, "keep": 9}
    distill(recipes.target_recipe(corpus, tmp_path / "period", train=train))
    assert steps_of(tmp_path / "period") == [3, 6, 7]
    news: list[str] = []
    train = {"steps": 1000, "epochs": 1, "batch_rows": 16, "save_every": 1000}
    distill(recipes.target_recipe(corpus, tmp_path / "out", train=train), say=news.append)
    (last,) = steps_of(tmp_path / "out")
    assert f"the data ran out after step {last} of 1000" in news


@pytest.mark.slow
def test_the_best_step_is_what_is_written(target, corpus, tmp_path, monkeypatch):
    from specjax.distill import validate

    scores = iter([1.5, 1.2, 1.1])
    monkeypatch.setattr(validate, "score_of", lambda found: next(scores))
    made = draft_recipe(corpus, target, tmp_path / "run", train={"steps": 6, "keep": 1}, validation={"every": 2})
    outcome = distill(made)
    assert outcome is not None
    assert outcome.step == 2
    assert outcome.figures["score"] == 1.5
    assert steps_of(tmp_path / "run") == [2, 6]
    step = load_model(tmp_path / "run" / "checkpoints" / "2", dtype="bfloat16").params  # a step is a WHERE, too
    for a, b in zip(jax.tree.leaves(step), jax.tree.leaves(load_model(outcome.folder).params), strict=True):
        assert np.array_equal(a.astype("bfloat16"), b)  # a step keeps the scales of its norms in float32


@pytest.mark.slow
def test_from_text_alone_the_lowest_held_out_cross_entropy_is_what_is_written(corpus, tmp_path):
    """At such a learning rate the first validation is the best one."""
    train = {"steps": 6, "keep": 1, "learning_rate": 1.0, "clip": 0.0, "warmup": 5}
    outcome = distill(recipes.target_recipe(corpus, tmp_path / "run", train=train, validation={"every": 1}))
    assert outcome is not None
    found = {line["step"]: line["cross_entropy"] for line in lines(tmp_path / "run") if line["kind"] == "validation"}
    assert outcome.step == min(found, key=found.__getitem__) < 6
    assert outcome.figures["cross_entropy"] == found[outcome.step]


def test_a_used_folder_is_refused_before_anything_is_done(corpus, tmp_path):
    made = recipes.target_recipe(corpus, tmp_path / "run")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine").write_text("x")
    with pytest.raises(UsageError, match="is in use; pass --resume to go on, --overwrite"):
        distill(made)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["mine"]
    with pytest.raises(UsageError, match="no run to resume"):
        distill(made, resume=True)
    with pytest.raises(UsageError, match="both --resume and --overwrite"):
        distill(made, resume=True, overwrite=True)
    distill(made, overwrite=True)
    assert not (tmp_path / "run" / "mine").exists()
    other = msgspec.structs.replace(made, train=msgspec.structs.replace(made.train, learning_rate=0.5))
    with pytest.raises(UsageError, match="begun with another recipe"):
        distill(other, resume=True)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        distill(msgspec.structs.replace(made, output=str(file / "run")))


@pytest.mark.slow
def test_layers_of_the_target_start_a_student(target, corpus, tmp_path):
    big = recipes.target_recipe(corpus, tmp_path / "big", student={"config": recipes.student(layers=3)})
    assert distill(big) is not None
    made = draft_recipe(corpus, tmp_path / "big", tmp_path / "run", student={"layers": [0, 2]}, train={"steps": 1})
    made = msgspec.structs.replace(made, train=msgspec.structs.replace(made.train, learning_rate=0.0))
    outcome = distill(made)
    assert outcome is not None
    ours, theirs = load_model(outcome.folder), load_model(tmp_path / "big" / "model")
    assert np.array_equal(
        ours.params["layers_1"]["mlp"]["up"]["kernel"], theirs.params["layers_2"]["mlp"]["up"]["kernel"]
    )
    assert ours.fn.config.num_layers == 2  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"has 7; the teacher has layers 0\.\.2"):
        distill(draft_recipe(corpus, tmp_path / "big", tmp_path / "other", student={"layers": [7]}))


@pytest.mark.slow
def test_case_93_padded_widths_differ(target, corpus, tmp_path):
    """The tokenizer's size counts: rows past it are padding on either side; too few rows are refused early."""
    size = load_model(target / "model").vocab_size
    wide = recipes.student(width=8, vocab_size=size + 20)  # of width 16 it would be larger than its target
    outcome = distill(draft_recipe(corpus, target, tmp_path / "wide", student={"config": wide}))
    assert outcome is not None
    assert outcome.figures["greedy"]["mean_acceptance_length"] >= 1.0
    narrow = recipes.student(vocab_size=size - 4)
    with pytest.raises(UsageError, match=f"{size - 4} rows of the vocabulary, the target uses {size}"):
        distill(draft_recipe(corpus, target, tmp_path / "narrow", student={"config": narrow}))


def test_a_loss_that_is_not_finite_ends_the_run(corpus, tmp_path):
    made = recipes.target_recipe(corpus, tmp_path / "run", train={"learning_rate": 1e30, "clip": 0.0, "steps": 20})
    with pytest.raises(SpecjaxError, match=r"The loss is .* lower train\.learning_rate"):
        distill(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("teacher = 'none'\ndata = 'x'\nsteps = 3", "unknown field `steps`"),
        ("data = 'x'", "missing required field `teacher`"),
        ("teacher = 'none'\ndata = 'x'", r"add \[tokenizer\]"),
        ("teacher = 'none'\ndata = 'x'\n[tokenizer]\nvocab_size = 9", "at least 257"),
        ("teacher = 'a'\ndata = 'x'\n[tokenizer]\nvocab_size = 900", "shares its teacher's tokenizer"),
        (
            "teacher = 'a'\ndata = 'x'\n[[loss]]\nname = 'l2'",
            "loss 'l2' is not known; known: cross_entropy, forward_kl",
        ),
        ("teacher = 'none'\ndata = 'x'\n[[loss]]\nname = 'tvd'", "'tvd' needs a teacher"),
        ("teacher = 'a'\ndata = 'x'\n[[mix]]\ndata = -1", "a mix needs shares"),
        ("teacher = 'a'\ndata = 'x'\n[[mix]]\ndata = 1\nstart = 0.5", "first mix starts at 0"),
        ("teacher = 'a'\ndata = 'x'\n[train]\nbatch_rows = 3\naccumulate = 2", "expected a multiple of accumulate 2"),
        ("teacher = 'a'\ndata = 'x'\n[train]\nsteps = 0", "train.steps is 0"),
        ("teacher = 'a'\ndata = 'x'\n[validation]\nshare = 1.0", "between 0 and 1"),
        ("teacher =", "Recipe"),
    ],
)
def test_a_wrong_recipe_is_refused(tmp_path, text, message):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_recipe(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [("tiny-target", "stories.jsonl"), ("tiny-draft", "stories.jsonl"), ("smollm2-head", "prompts.jsonl")],
)
def test_recipes_that_ship_are_read_by_name_and_survive_being_written(name, data, tmp_path):
    recipe = read_recipe(name, data="mine.jsonl")
    assert recipe.data == "mine.jsonl"
    assert recipe.card == CardSpec()  # what it says of its own texts is not said of others
    assert read_recipe(name, data=f"elsewhere/{data}").card.licence == "Apache-2.0"
    (tmp_path / "again.toml").write_text(as_toml(recipe))
    assert read_recipe(tmp_path / "again.toml") == recipe
    with pytest.raises(UsageError, match=r"one of .*tiny-draft"):
        read_recipe("no-such")


@pytest.mark.slow
def test_data_of_prompts_alone_needs_responses(target, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{name} {i}"}) + "\n" for i in range(30) for name in recipes.NAMES))
    with pytest.raises(UsageError, match="has no completions to train on"):
        distill(draft_recipe(path, target, tmp_path / "none"))
    made = draft_recipe(
        path, target, tmp_path / "run", mix=[{"teacher": 1.0}], responses={"max_new_tokens": 5, "limit": 20}
    )
    assert distill(made) is not None
    with pytest.raises((UsageError, CheckpointError), match="is not a file"):
        distill(draft_recipe(tmp_path / "absent.jsonl", target, tmp_path / "absent"))
