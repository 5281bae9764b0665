"""``specjax fetch``."""

from pathlib import Path

from specjax import checkpoint


def test_the_folder_is_all_that_standard_output_gets(specjax, monkeypatch):
    asked = []

    def fetch(name: str, *, progress: bool) -> Path:
        asked.append((name, progress))
        return Path("/somewhere") / name

    monkeypatch.setattr(checkpoint, "fetch", fetch)
    done = specjax("fetch", "smollm2-135m")
    assert (done.code, done.out, done.err) == (0, "/somewhere/smollm2-135m\n", "")
    assert asked == [("smollm2-135m", True)]
