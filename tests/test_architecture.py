"""The one direction of the arrows between rooms, read from the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# The core, lowest first: a room may import the rooms of earlier rows, and itself.
CORE_ROWS = (("types",), ("cache", "sampling"), ("verify", "draft"), ("round",), ("generate",), ("engine",))
CORE = {room for row in CORE_ROWS for room in row}
STANDALONE = {"errors", "text", "cost", "stats", "reference", "sharding"}  # import none of the others but errors
MAY_IMPORT = {
    **{room: {r for row in CORE_ROWS[:i] for r in row} for i, row in enumerate(CORE_ROWS) for room in row},
    **{room: set() for room in STANDALONE},
    "models": {"types", "cache", "sharding"},
    "checkpoint": {"models", "types", "cache", "sharding"},
}
FORBIDDEN_BELOW = {"models", "checkpoint", "cli", "distill"}  # the core reaches none of them, not even through others
HEAVY = {
    *("jax", "jaxlib", "flax", "numpy", "scipy", "optax", "orbax", "ml_dtypes", "safetensors", "gguf", "tokenizers"),
    *("jinja2", "huggingface_hub", "transformers", "torch", "grain", "matplotlib", "tensorboardX", "jaxtyping"),
}
LIGHT = ("specjax.errors", "specjax.rows", "specjax.cli", "specjax.cli.main")  # answer --help at once


def module_name(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name that a source file is imported by: models/x.py is specjax.models.x."""
    parts = path.relative_to(root).with_suffix("").parts
    parts = parts if parts[0] == "specjax" else ("specjax", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_tree(root: Path = ROOT) -> dict[str, str]:
    folders = ("specjax", "models", "configs")
    return {module_name(path, root): path.read_text() for name in folders for path in (root / name).rglob("*.py")}


def room_of(module: str) -> str:
    """Return specjax.X's X, where its leading part names a room: text_stream and text are one room."""
    parts = module.split(".")
    if len(parts) < 2:
        return ""
    known = {*MAY_IMPORT, *FORBIDDEN_BELOW}
    return next((room for room in known if parts[1] == room or parts[1].startswith(f"{room}_")), parts[1])


def imports(name: str, source: str, modules: set[str], *, top_only: bool = False) -> Iterator[str]:
    """Yield the dotted names that a module imports; with ``top_only``, those that run when it is imported."""
    is_package = any(module.startswith(f"{name}.") for module in modules)
    package = name.split(".") if is_package else name.split(".")[:-1]
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{target}.{alias.name}"
                yield deeper if deeper in modules else target
        elif top_only and (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        ):
            continue
        else:
            pending += ast.iter_child_nodes(node)


def violations(sources: dict[str, str]) -> list[str]:
    """Return each import that runs against the arrows."""
    modules = set(sources)
    graph = {name: set(imports(name, source, modules)) for name, source in sources.items()}
    found = []
    for name, targets in sorted(graph.items()):
        room = room_of(name)
        allowed = {room, "errors", *MAY_IMPORT.get(room, ())}
        if room in CORE - {"types"}:
            allowed |= STANDALONE - {"reference"}  # they import nothing, so they lie below every room
        # a room that the design does not name is judged by what it reaches, below
        judged = {*map(room_of, targets)} if room in STANDALONE else {*MAY_IMPORT, *FORBIDDEN_BELOW}
        for target in sorted(targets):
            to = room_of(target)
            if target.split(".")[0] in ("models", "configs", "tests", "scripts"):
                found.append(f"{name} imports {target}, which exists in the checkout only")
            elif target == "specjax" and room in MAY_IMPORT:
                found.append(f"{name} imports the flat API")
            elif target.startswith("specjax.") and room in MAY_IMPORT and to in judged - allowed:
                found.append(f"{name} imports {target}")
        if room in CORE:
            reached, pending = set(), [name]
            while pending:
                for target in graph.get(pending.pop(), ()):
                    if target in graph and target != "specjax" and target not in reached:
                        reached.add(target)
                        pending.append(target)
            found += [f"{name} reaches {target}" for target in sorted(reached) if room_of(target) in FORBIDDEN_BELOW]
    return found


def heavy_at_the_top(name: str, sources: dict[str, str]) -> list[str]:
    return sorted({t for t in imports(name, sources[name], set(sources), top_only=True) if t.split(".")[0] in HEAVY})


def test_the_tree_follows_the_arrows():
    sources = read_tree()
    assert {"specjax.reference", "specjax.stats", "specjax.types", "specjax.models.config"} <= set(sources)
    assert violations(sources) == []


@pytest.mark.parametrize("name", [name for name in LIGHT if name in read_tree()])
def test_nothing_heavy_at_the_top_of_what_help_imports(name):
    assert heavy_at_the_top(name, read_tree()) == []


@pytest.mark.parametrize("name", ["specjax", *(name for name in LIGHT if name in read_tree())])
def test_importing_what_help_imports_loads_nothing_heavy(name):
    code = f"import sys, {name}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("specjax.types", "from specjax import cache", "specjax.types imports specjax.cache"),
        ("specjax.types", "from specjax import stats", "specjax.types imports specjax.stats"),
        ("specjax.cache", "from .round import step", "specjax.cache imports specjax.round"),
        ("specjax.cache", "from specjax import sampling", "specjax.cache imports specjax.sampling"),
        ("specjax.verify.greedy", "from ..draft import ngram", "specjax.verify.greedy imports specjax.draft.ngram"),
        ("specjax.draft.model", "import specjax.generate", "specjax.draft.model imports specjax.generate"),
        ("specjax.draft.model", "from specjax.verify import greedy", "imports specjax.verify.greedy"),
        (
            "specjax.round",
            "def f():\n    from specjax.models import config",
            "specjax.round imports specjax.models.config",
        ),
        ("specjax.engine", "from specjax import checkpoint", "specjax.engine imports specjax.checkpoint"),
        ("specjax.engine", "from specjax import reference", "specjax.engine imports specjax.reference"),
        ("specjax.engine", "from specjax.helper import load", "specjax.engine reaches specjax.checkpoint"),
        ("specjax.engine", "import specjax", "specjax.engine imports the flat API"),
        ("specjax.stats", "from specjax import types", "specjax.stats imports specjax.types"),
        ("specjax.stats", "from specjax import helper", "specjax.stats imports specjax.helper"),
        ("specjax.text_stream", "from specjax import rows", "specjax.text_stream imports specjax.rows"),
        ("specjax.models.config", "from specjax import checkpoint", "specjax.models.config imports specjax.checkpoint"),
        ("specjax.cli.main", "import models.config", "specjax.cli.main imports models.config, which exists"),
        ("specjax.cli.main", "from models import config", "specjax.cli.main imports models, which exists"),
    ],
)
def test_a_wrong_arrow_is_found(name, source, message):
    rooms = [*CORE, *STANDALONE, "models", "models.config", "checkpoint", "cli", "cli.main", "rows", "text_stream"]
    modules = ["specjax", *(f"specjax.{room}" for room in [*rooms, "verify.greedy", "draft.ngram", "draft.model"])]
    tree = dict.fromkeys(modules, "from specjax import errors") | {
        "specjax": "from specjax import generate",
        "specjax.errors": "",
        "specjax.helper": "from specjax import checkpoint",
        "specjax.checkpoint": "from specjax.models import config",
        "specjax.generate": "from specjax import round, stats, text",
        "specjax.cli.main": "from specjax import generate, checkpoint",
    }
    assert violations(tree) == []
    assert any(message in line for line in violations({**tree, name: source}))


def test_a_heavy_import_at_the_top_is_found():
    source = """
from typing import TYPE_CHECKING
import jax.numpy as jnp
if TYPE_CHECKING:
    import flax
try:
    from tokenizers import Tokenizer
except ImportError:
    pass
def later():
    import numpy
"""
    assert heavy_at_the_top("specjax.rows", {"specjax.rows": source}) == ["jax.numpy", "tokenizers"]
