"""Counts over a job's rows, for its manifest and its closing line."""

from __future__ import annotations

from collections import Counter
from typing import Any

from specjax.stats import Stats, merge_stats


class Totals:
    """Sums rows one by one, so that a job of any length takes no memory for them.

    Attributes:
        rows, failed: rows, and those of them that ended in an error.
        finish: rows by finish_reason.
    """

    def __init__(self) -> None:
        self.rows = self.failed = 0
        self.finish: Counter[str] = Counter()
        self._speculation: Counter[str] = Counter()
        self._stats = merge_stats([])

    def add(self, record: dict[str, Any]) -> None:
        """Take a row as it is written."""
        self.rows += 1
        self.failed += record.get("error") is not None
        self.finish[record["finish_reason"]] += 1
        self._speculation[record["stats"]["speculation"]] += 1
        one = {"speculation": ""}  # counted above
        self._stats = merge_stats([{**self._stats, **one}, {**record["stats"], **one}])

    @property
    def stats(self) -> Stats:
        """The stats of all rows together, as ``merge_stats`` gives them."""
        kinds = sorted(self._speculation.items())
        if len(kinds) > 1:
            speculation = "; ".join(f"{kind} ({count} rows)" for kind, count in kinds)
        else:
            speculation = kinds[0][0] if kinds else "off: no rows"
        return {**self._stats, "speculation": speculation}
