"""What a run says while it goes and leaves behind: a bar, metrics as JSON Lines and for TensorBoard, a plot."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.errors import UsageError

METRICS = "metrics.jsonl"


class Metrics:
    """A run's metrics: a line of JSON for each logged step and each validation.

    Args:
        folder: of the run.
        after: lines of later steps are dropped: a resumed run writes them again.
        tensorboard: write for TensorBoard too.

    Raises:
        UsageError: TensorBoard is asked for and tensorboardX is not installed.
    """

    def __init__(self, folder: Path, *, after: int = 0, tensorboard: bool = False):
        self._path, self._board = folder / METRICS, None
        kept = [line for line in read_metrics(folder) if line["step"] <= after]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if tensorboard:
            try:
                from tensorboardX import SummaryWriter
            except ImportError as error:
                raise UsageError("train.tensorboard needs tensorboardX: pip install 'specjax[train]'.") from error
            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write a line: ``kind`` is "train" or "validation"."""
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        if self._board is not None:
            for name, value in _numbers(values):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Finish what is written."""
        if self._board is not None:
            self._board.close()


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics; none where there are none. A last line that was cut short is dropped."""
    path, found = folder / METRICS, []
    for line in path.read_text().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def _numbers(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, list):
            yield from _numbers({str(i + 1): item for i, item in enumerate(value)}, f"{above}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield above + name, float(value)


def plot(folder: Path) -> Path | None:
    """Draw loss and acceptance over the steps into ``curve.png``; None where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = read_metrics(folder)
    train = [line for line in lines if line["kind"] == "train"]
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), layout="constrained")
    above.plot([line["step"] for line in train], [line["loss"] for line in train], label="training")
    for name, label in (("loss", "held out"), ("cross_entropy", "held out, cross-entropy")):
        held = [(line["step"], line[name]) for line in lines if line["kind"] == "validation" and name in line]
        if held:
            above.plot(*zip(*held, strict=True), "o-", label=label)
    above.set_ylabel("loss")
    above.legend()
    for name, label in (("alpha", "training, by probabilities"),):
        shown = [(line["step"], line[name]) for line in train if name in line]
        if shown:
            below.plot(*zip(*shown, strict=True), label=label)
    for name in ("greedy", "sampled"):
        shown = [(line["step"], line[name]["alpha"][0]) for line in lines if name in line and line[name]["alpha"][0]]
        if shown:
            below.plot(*zip(*shown, strict=True), "o-", label=f"held out, decoder, {name}")
    below.set_ylabel("acceptance of the first draft")
    below.set_xlabel("step")
    if below.lines:
        below.legend()
    figure.savefig(folder / "curve.png", dpi=120)
    pyplot.close(figure)
    return folder / "curve.png"


@contextlib.contextmanager
def progress(total: int, done: int, *, show: bool) -> Iterator[Any]:
    """Give ``update(steps done, text)`` of a bar on standard error, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
               TextColumn("{task.fields[text]}"))  # fmt: skip
    bar = Progress(*columns, console=console, disable=not (show and console.is_terminal), transient=True)
    with bar:
        task = bar.add_task("", total=total, completed=done, text="")
        yield lambda step, text: bar.update(task, completed=step, text=text)
