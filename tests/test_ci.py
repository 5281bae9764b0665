"""What the README tells a newcomer to type is what .ci/run runs."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_readme_has_two_commands_and_ci_runs_the_second():
    section = (ROOT / "README.md").read_text().split("## Install and run")[1].split("\n## ")[0]
    commands = re.findall(r"^```sh\n(.*?)\n```$", section, flags=re.M | re.S)
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert commands[0].startswith("python -m venv .venv && .venv/bin/pip install . && .venv/bin/specjax generate ")
    assert commands[1].endswith(".venv/bin/pytest")
    ci = ["bash", str(ROOT / ".ci" / "run"), "--print-test-command"]
    done = subprocess.run(ci, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [commands[1]]
