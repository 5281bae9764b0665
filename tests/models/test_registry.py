"""The registry of model families."""

from __future__ import annotations

import pytest

from specjax.models.registry import FAMILIES, family_for


def test_a_family_is_found_by_model_type():
    assert family_for("llama").name == "llama"


def test_no_model_type_is_served_twice():
    served = [name for family in FAMILIES for name in family.model_types]
    assert len(served) == len(set(served))


def test_an_unknown_type_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="'mamba'") as caught:
        family_for("mamba")
    assert "llama" in str(caught.value)
