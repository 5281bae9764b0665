"""The model card: what a draft is, how it was made, from what, and what it does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from specjax.distill.config import Recipe


def card(recipe: Recipe, student: str, data: dict[str, Any], figures: dict[str, Any]) -> str:
    """Return the text of README.md.

    Args:
        recipe: as it was run.
        student: what was trained, in one line.
        data: counts of rows and tokens.
        figures: of the last validation: held-out loss, acceptance, prediction and measurement.
    """
    recipe = msgspec.structs.replace(recipe, data=Path(recipe.data).name)  # a card travels, a path does not
    title = recipe.card.title or "A draft made with specjax distill"
    teacher = f"distilled from {recipe.teacher}" if recipe.has_teacher else "trained from text alone"
    parts = [
        f"---\nlicense: {_tag(recipe.card.licence)}\nlibrary_name: specjax\n---\n",
        f"# {title}\n",
        f"{student[:1].upper()}{student[1:]}; {teacher}.\n",
        "## Data\n",
        (recipe.card.data or f"Texts of `{recipe.data}`.") + "\n",
        _table(("", ""), [(name.replace("_", " "), str(value)) for name, value in data.items()]),
        "## Figures\n",
        _figures(figures),
        "## Recipe\n",
        f"`specjax distill --config RECIPE.toml`, with\n\n```toml\n{as_toml(recipe)}```\n",
        "## Licence\n",
        recipe.card.licence + "\n",
    ]
    return "\n".join(parts)


def as_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML, without what has its default value."""
    lines, tables = [], []
    for name, value in _changed(recipe).items():
        if isinstance(value, dict):
            tables += _section(name, value, "[%s]")
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                tables += _section(name, item, "[[%s]]")
        else:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join([*lines, *tables]) + "\n"


def _changed(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the fields that differ from their defaults, as plain values."""
    found = {}
    for field in msgspec.structs.fields(type(struct)):
        value = getattr(struct, field.name)
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        else:
            default = field.default
        if value == default or value is None:
            continue
        if isinstance(value, msgspec.Struct):
            value = _changed(value)
        elif isinstance(value, list):
            value = [_changed(item) if isinstance(item, msgspec.Struct) else item for item in value]
        found[field.name] = value
    return found


def _section(name: str, values: dict[str, Any], form: str) -> list[str]:
    plain = [f"{key} = {_value(value)}" for key, value in values.items() if not isinstance(value, dict)]
    nested = [_section(f"{name}.{key}", value, "[%s]") for key, value in values.items() if isinstance(value, dict)]
    return ["", form % name, *plain, *(line for part in nested for line in part)]


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + "}"
    return msgspec.json.encode(value).decode() if isinstance(value, str) else repr(value)


def _figures(figures: dict[str, Any]) -> str:
    rows = []
    for name, words in (("loss", "held-out loss"), ("cross_entropy", "held-out cross-entropy, nats a token")):
        if name in figures:
            rows.append((words, f"{figures[name]:.3f}"))
    for name in ("greedy", "sampled"):
        if name in figures:
            found = figures[name]
            alphas = " ".join("-" if rate is None else f"{rate:.2f}" for rate in found["alpha"])
            rows.append((f"{name}: acceptance by position, of drafts that were reached", alphas))
            rows.append((f"{name}: mean acceptance length", f"{found['mean_acceptance_length']:.2f}"))
        if name in figures.get("predicted", {}):
            rows.append((f"{name}: predicted speed-up", f"{figures['predicted'][name]['speedup']:.2f}"))
        if name in figures.get("measured", {}):
            ratio = figures["measured"][name]["ratio"]
            rows.append(
                (f"{name}: measured speed-up, median (least to most)",
                 f"{ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
            )  # fmt: skip
    return _table(("held-out prompts", ""), rows) if rows else "None were taken.\n"


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _tag(licence: str) -> str:
    """Return a licence as the hub spells it."""
    return licence.lower().replace(" ", "-") if licence != "not stated" else "other"
