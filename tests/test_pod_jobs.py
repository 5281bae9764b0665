"""What is launched on pods: the manifest is one that JobSet takes, its command one that the command line takes."""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from specjax.cli.generate import Generate
from specjax.cli.main import _parse
from specjax.sharding import parse_mesh

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "tests" / "data" / "schemas" / "jobset.json").read_text())
MANIFEST = yaml.safe_load((ROOT / "configs" / "pods" / "jobset.yaml").read_text())
KINDS: dict[str, Any] = {"object": dict, "map": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def problems(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Say where a value does not follow a schema."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"]]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{at}: {value!r} is none of {schema['enum']}"]
    if "pattern" in schema:
        return [] if re.fullmatch(schema["pattern"], str(value)) else [f"{at}: {value!r} is no name"]
    if not isinstance(value, KINDS[schema["type"]]) or (schema["type"] == "integer" and isinstance(value, bool)):
        return [f"{at}: {value!r} is no {schema['type']}"]
    if schema["type"] == "array":
        return [text for i, item in enumerate(value) for text in problems(item, schema["items"], f"{at}[{i}]")]
    if schema["type"] != "object":
        return []
    found = [f"{at}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    for name, part in value.items():
        known = schema["properties"].get(name)
        found += [f"{at}.{name} is unknown"] if known is None else problems(part, known, f"{at}.{name}")
    return found


def test_the_manifest_follows_the_schema():
    assert problems(MANIFEST, SCHEMA) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["spec"].pop("replicatedJobs"), ".spec.replicatedJobs is missing"),
        (lambda m: m["spec"].update(failurePolicy={"maxRestart": 3}), "maxRestart is unknown"),
        (lambda m: m["spec"]["failurePolicy"].update(maxRestarts="3"), "'3' is no integer"),
        (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Stop"), "'Stop' is none of"),
        (lambda m: m["metadata"].update(name="Generate"), "'Generate' is no name"),
    ],
)
def test_the_schema_refuses_what_is_wrong(change, message):
    manifest = copy.deepcopy(MANIFEST)
    change(manifest)
    assert any(message in text for text in problems(manifest, SCHEMA))


def test_the_manifest_runs_a_command_that_fits_its_slice():
    job = MANIFEST["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    container = pod["containers"][0]
    command = _parse([*container["command"][1:], *container["args"]])
    assert isinstance(command, Generate)
    command._refuse()
    assert command.distributed == "auto"
    assert command.resume
    chips = job["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert parse_mesh(str(command.mesh)).size == chips
    x, y = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert int(x) * int(y) == chips
    assert job["completions"] == job["parallelism"]
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]  # 75 is to be tried again


def test_the_tpu_vm_script_passes_its_options_on(tmp_path):
    """gcloud gets one command, in which every option is one word again."""
    (tmp_path / "gcloud").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (tmp_path / "gcloud").chmod(0o755)
    (tmp_path / "specjax").write_text('#!/bin/sh\nfor word in "$@"; do echo "<$word>"; done\n')
    (tmp_path / "specjax").chmod(0o755)
    script = str(ROOT / "scripts" / "tpu_vm.sh")
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    options = ["--mesh", "data=4,model=4", "--stop", "it's over", "--output", "gs://b/out"]
    said = subprocess.run([script, "pod", "zone-a", *options], env=path, capture_output=True, text=True, check=True)
    words = said.stdout.splitlines()
    assert words[:7] == ["compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "zone-a"]
    run = subprocess.run(words[-1], env=path, shell=True, capture_output=True, text=True, check=True)
    expected = ["generate", "--distributed", "auto", "--resume", *options]
    assert run.stdout.splitlines() == [f"<{word}>" for word in expected]
    assert subprocess.run([script, "pod"], env=path, capture_output=True, check=False).returncode == 2
