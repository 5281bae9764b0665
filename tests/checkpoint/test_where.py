"""WHERE: what a user writes, and what it stands for."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import tiny_gguf
from copies import TIED
from huggingface_hub import errors

from specjax.checkpoint import MissingCheckpoint, cache_folder, load_checkpoint, resolve
from specjax.errors import CheckpointError, UsageError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch) -> None:
    """Work in an empty folder, where relative paths mean nothing yet."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


class Hub:
    """A pretended hub."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.answer: Exception | None = None
        self.downloaded: Path | Exception | None = None
        self.cached: Path | None = None
        self.asked: list[str] = []
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", self._info)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    def _info(self, repo: str, *, timeout: float) -> None:
        assert timeout <= 10
        self.asked.append(repo)
        if self.answer is not None:
            raise self.answer

    def _download(self, repo: str, *, allow_patterns, ignore_patterns, local_files_only=False, etag_timeout=None):
        assert "*.safetensors" in allow_patterns
        assert "*.bin" not in allow_patterns
        if local_files_only:
            if self.cached is None:
                raise errors.LocalEntryNotFoundError("nothing cached")
            return str(self.cached)
        if isinstance(self.downloaded, Exception):
            raise self.downloaded
        return str(self.downloaded)


@pytest.fixture
def hub(monkeypatch) -> Hub:
    return Hub(monkeypatch)


def hub_error(kind: type[Exception]) -> Exception:
    return kind.__new__(kind)  # their constructors ask for a whole HTTP response


def test_a_folder() -> None:
    assert resolve(TIED) == TIED
    assert load_checkpoint(str(TIED)).name == str(TIED)


def test_home_is_expanded(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve("~/model") == tmp_path / "model"


def test_a_gguf_file(cache) -> None:
    tiny_gguf.write(Path("tiny.gguf"), TIED)
    assert resolve("tiny.gguf").parent == cache / "gguf"


def test_a_folder_comes_before_a_name_and_a_hub_id(hub, cache) -> None:
    for name in ("smollm2-135m", "org/model"):
        shutil.copytree(TIED, name)
        assert resolve(name) == Path(name)
    assert hub.asked == []


@pytest.mark.parametrize("where", ["smollm3", "", "a b", "GPT"])
def test_unknown_names(where: str) -> None:
    with pytest.raises(UsageError, match=r"is not known. Known names: .*smollm2-135m"):
        resolve(where)


@pytest.mark.parametrize(
    "where", ["./x", "/x", "~/x", "../x", "x/", "x.gguf", "a/b.gguf", "a/b/c", "here/x", Path("x"), Path("a/b")]
)
def test_missing_paths(hub, where: str | Path) -> None:
    Path("here").mkdir()
    with pytest.raises(MissingCheckpoint, match="does not exist"):
        resolve(where)
    assert hub.asked == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "weights.bin"])
def test_other_files(name: str) -> None:
    Path("m").mkdir()
    Path("m", name).touch()
    with pytest.raises(CheckpointError, match="Pass its folder, m" if name != "weights.bin" else r"expected a \.gguf"):
        resolve(f"m/{name}")


@pytest.mark.parametrize("mark", ["_CHECKPOINT_METADATA", "manifest.ocdbt", "default/_METADATA"])
def test_an_orbax_checkpoint_without_a_config_is_refused(mark: str) -> None:
    path = Path("ckpt", mark)
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(CheckpointError, match=r"Orbax checkpoint without a config\.json"):
        resolve("ckpt")


def test_hub_id(hub) -> None:
    hub.downloaded = TIED
    assert load_checkpoint("org/model-1.5").config.vocab_size == 320
    assert hub.asked == ["org/model-1.5"]


def test_hub_is_out_of_reach(hub) -> None:
    hub.answer = ConnectionError("no route")
    with pytest.raises(MissingCheckpoint, match=r"no folder 'org/model' here, and the hub cannot be reached"):
        resolve("org/model")
    hub.cached = TIED
    assert resolve("org/model") == TIED


@pytest.mark.parametrize(
    ("kind", "raised", "part"),
    [
        (errors.RepositoryNotFoundError, MissingCheckpoint, "no public model of that id"),
        (errors.GatedRepoError, CheckpointError, "hf auth login"),
        (errors.HFValidationError, UsageError, "neither a folder nor a hub id"),
    ],
)
def test_hub_refuses(hub, kind, raised, part: str) -> None:
    hub.answer = hub_error(kind)
    with pytest.raises(raised, match=part) as caught:
        resolve("org/model")
    assert type(caught.value) is raised
    assert "\n" not in str(caught.value)


def test_hub_download_breaks(hub) -> None:
    hub.downloaded = OSError("connection lost\nmore")
    with pytest.raises(CheckpointError, match=r"failed: connection lost\. Try again"):
        resolve("org/model")


def test_cache_folder(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("SPECJAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == Path("/home/me/.cache/specjax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/specjax")
    monkeypatch.setenv("SPECJAX_CACHE", "~/own")
    assert cache_folder() == Path("/home/me/own")
