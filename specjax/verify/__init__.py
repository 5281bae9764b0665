"""Verification rules. A new rule is one file and one line in ``RULES``."""

from __future__ import annotations

from specjax.errors import UsageError
from specjax.types import Rule
from specjax.verify import block, coupled, greedy, rejection

RULES: dict[str, Rule] = {rule.name: rule for rule in (greedy.RULE, rejection.RULE, block.RULE, coupled.RULE)}


def rule_for(rule: str | Rule) -> Rule:
    """Return a rule by name, or the rule itself.

    Raises:
        UsageError: an unknown name; the message lists the known ones.
    """
    if isinstance(rule, Rule):
        return rule
    if rule not in RULES:
        raise UsageError(f"Unknown rule {rule!r}; known: {', '.join(RULES)}.")
    return RULES[rule]
