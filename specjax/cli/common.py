"""What the commands share: options, JAX set up for a command, one line of results, progress."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import UseAppendAction, arg

from specjax.errors import UsageError

if TYPE_CHECKING:
    from specjax.pair import Pair

Dtype = Literal["float32", "bfloat16"]
# Options that are given several times, with several values each.
Texts = Annotated[tuple[tuple[str, ...], ...], arg(metavar="TEXT [TEXT ...]"), UseAppendAction]
Ids = Annotated[tuple[tuple[int, ...], ...], arg(metavar="ID [ID ...]"), UseAppendAction]


def unset(metavar: str) -> Any:
    """Describe an option that is not set by default; its help says what that means."""
    return arg(metavar=metavar, help_behavior_hint="")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command."""

    debug: bool = False
    """Show a traceback with an error."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(Common):
    """Options that say which models to use, and how they are read."""

    target: Annotated[str | None, unset("WHERE")] = None
    """The model that decides: a folder in Hugging Face layout or of Orbax, a .gguf file, a name that 'specjax fetch'
    knows, or a hub id (default: that of the pair)."""
    draft: Annotated[str | None, unset("WHERE|ngram|early-exit:N|mixed:WHERE|none")] = None
    """The draft: a model as above; ngram; the target's first N layers; ngram where it finds something, else a model; or
    none for plain decoding (default: that of the pair, else ngram)."""
    pair: Annotated[str | None, unset("NAME|FILE.toml")] = None
    """A target and its draft by name, or from a file (default without --target: smollm2)."""
    dtype: Dtype = "bfloat16"
    """Of the weights; sums are float32 in both."""
    attention: Annotated[str, arg(metavar="chunks|dot_product")] = "chunks"
    """How attention is computed: over the valid part of the cache, or at once over all of it."""

    scan_layers: bool = False
    """Run alike layers in a loop: a deep model compiles as fast as a shallow one (steps on a CPU are slower)."""

    def load(self, *, require_draft: bool, mesh: str | None = None) -> Pair:
        """Load the target and its draft; say on standard error what is fetched or converted, and what is not split."""
        from specjax.pair import load

        pair = load(self.target, self.draft, pair=self.pair, dtype=self.dtype, attention=self.attention,
                    scan_layers=self.scan_layers, require_draft=require_draft, progress=True, mesh=mesh)  # fmt: skip
        for text in pair.notes:
            note(f"mesh: {text}")
        return pair


def prepare_jax() -> None:
    """Import JAX as a command wants it: compiled programs kept on disk, no chatter."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax

    from specjax.checkpoint import cache_folder

    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def flat(option: str, given: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the values of an option that may be given several times.

    Raises:
        UsageError: it was given without a value.
    """
    if not all(given):
        raise UsageError(f"{option} needs a value.")
    return [value for values in given for value in values]


def note(line: str) -> None:
    """Say something on standard error."""
    print(f"specjax: {line}", file=sys.stderr, flush=True)


class Meter:
    """Counts tokens over time, from the first chunk of rounds on: loading and compiling come before it."""

    def __init__(self) -> None:
        self.tokens = 0
        self._began = self._last = time.perf_counter()
        self._first: tuple[float, int] | None = None

    def add(self, count: int) -> None:
        """Take the tokens of one chunk of rounds."""
        self.tokens += count
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last, self.tokens

    @property
    def rate(self) -> float:
        """Tokens per second; of everything, compilation included, when all came in one chunk."""
        began, before = self._first or (self._began, 0)
        if self.tokens == before:
            began, before = self._began, 0
        return (self.tokens - before) / max(self._last - began, 1e-9)


def summary(total: Mapping[str, Any], meter: Meter) -> str:
    """Return the closing line of a generation, from the stats of all its rows together."""
    from specjax.stats import tokens_per_target_pass

    line = (
        f"{meter.tokens} tokens, {meter.rate:.1f} tokens/s, "
        f"mean acceptance length {number(total['mean_acceptance_length'])}, "
        f"acceptance rate {number(total['draft_acceptance_rate'])}, "
        f"{number(tokens_per_target_pass(total))} tokens per target pass"
    )
    return line if total["speculation"] == "on" else f"{line} (speculation {total['speculation']})"


def number(value: float | None) -> str:
    """Return a rate with two places, or a dash where there is none."""
    return "-" if value is None else f"{value:.2f}"


@contextlib.contextmanager
def progress_bar(total: int | None, unit: str) -> Iterator[Callable[[int, str], None]]:
    """Give ``update(advance, text)`` of a bar on standard error; it is not there unless that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    counted = () if total is None else (MofNCompleteColumn(), TimeRemainingColumn())
    columns = (TextColumn(unit), BarColumn(), *counted, TextColumn("{task.fields[text]}"))
    bar = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    with bar:
        task = bar.add_task("", total=total, text="")
        yield lambda advance, text: bar.update(task, advance=advance, text=text)
