"""Tiny recipes: a corpus of a few words, and transformers of one or two layers of width 16."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specjax.distill import Recipe

NAMES, THINGS, PLACES = ("Ben", "Ana", "Tom", "Mia"), ("key", "box", "snail", "boat"), ("hill", "sea", "wood")


def write_corpus(path: Path, rows: int = 120, seed: int = 0) -> Path:
    """Write short texts of one pattern, each with a prompt that names it."""
    rng = np.random.default_rng(seed)
    lines = []
    for i in range(rows):
        name, thing, place = (rng.choice(words) for words in (NAMES, THINGS, PLACES))
        text = f"{name} had a {thing}. {name} took the {thing} to the {place}. The {thing} was happy by the {place}."
        lines.append(json.dumps({"id": i, "prompt": f"Story {i} of a {thing}.", "text": text}))
    path.write_text("\n".join(lines) + "\n")
    return path


def student(width: int = 16, layers: int = 1, **more: Any) -> dict[str, Any]:
    """Return the config of a tiny Llama."""
    return {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128,
            "tie_word_embeddings": True, **more}  # fmt: skip


def recipe(**parts: Any) -> Recipe:
    """Return a recipe from plain values, small where nothing is said."""
    train = {"steps": 4, "batch_rows": 4, "length": 64, "warmup": 1, "save_every": 100, "log_every": 1,
             "learning_rate": 1e-2, **parts.pop("train", {})}  # fmt: skip
    validation = {"every": 0, "share": 0.1, "prompts": 3, "max_new_tokens": 8, "speed": False, "gamma": 2,
                  **parts.pop("validation", {})}  # fmt: skip
    parts = {"student": {"config": student()}, **parts, "train": train, "validation": validation}
    return msgspec.convert(parts, Recipe)


def target_recipe(data: Path, output: Path, **parts: Any) -> Recipe:
    """Return the recipe of a tiny target, from text alone."""
    return recipe(teacher="none", data=str(data), output=str(output), tokenizer={"vocab_size": 300}, **parts)
