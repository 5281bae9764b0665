"""docs/reliability.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_the_reliability_page_names_exists():
    named = set(re.findall(r"`?(?:-k )?(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > 25
    assert sorted(name for name in named if f"def {name}(" not in sources) == []
