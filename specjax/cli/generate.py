"""``specjax generate``: prompts in, text out."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from specjax.cli.common import (
    Ids,
    Meter,
    PairOptions,
    Texts,
    flat,
    note,
    prepare_jax,
    summary,
    unset,
)
from specjax.cli.sampling_options import SamplingOptions
from specjax.errors import UsageError
from specjax.outputs import RowWriter

if TYPE_CHECKING:
    from specjax.api import Output
    from specjax.distributed import Processes
    from specjax.pair import Pair

_STREAM_CHUNK = 4  # rounds between two looks while text is shown as it comes
_COMPARED_RUNS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(SamplingOptions, PairOptions):
    """Generate text, speculatively, with exactly the target's distribution.

    Prompts as arguments are shown as text, one after another; with --output, and from --input, rows are written.
    """

    prompts: Annotated[tuple[str, ...], arg(metavar="[PROMPT ...]", help_behavior_hint=""), Positional] = ()
    """What to answer, before the options or after --; a chat where the model has a template, else raw text."""
    raw: bool = False
    """Take PROMPT as raw text: no chat template."""
    input: Annotated[str | None, unset("FILE|-")] = None
    """Rows of prompts as JSON Lines, instead of PROMPT; - is standard input."""
    output: Annotated[str | None, unset("FILE|DIR|-")] = None
    """Where rows go as JSON Lines: a file, a folder of parts (a name without a suffix), or - for standard output
    (default with --input)."""
    resume: bool = False
    """Go on with an output that an earlier run of the same job left."""
    overwrite: bool = False
    """Replace an output that exists."""
    require_draft: bool = False
    """Fail when the draft cannot be used, instead of decoding without it."""
    gamma: Annotated[int | Literal["auto"] | None, unset("N|auto")] = None
    """Tokens drafted per round; auto chooses round by round, by measured costs (default: that of the pair, else 4)."""
    width: Annotated[int | None, unset("N")] = None
    """Rows of every target step, more than gamma; one width gives the same bits with any draft, gamma and batch
    (default: what is fastest)."""
    rule: Annotated[str, arg(metavar="rejection|block|coupled|greedy")] = "rejection"
    """How drafts are accepted; under rejection, rows at temperature 0 are greedy."""
    max_new_tokens: Annotated[int, arg(metavar="N")] = 128
    """The most tokens to generate per row."""
    stop: Texts = ()
    """End a row at any of these strings, which the text leaves out."""
    eos: Ids = ()
    """Ids that end a row, instead of the model's."""
    ignore_eos: bool = False
    """Go on past them."""
    seed: Annotated[int, arg(metavar="N")] = 0
    """Of the random draws."""
    samples: Annotated[int, arg(metavar="N")] = 1
    """Rows to draw for each prompt."""
    logprobs: bool = False
    """Write each token's log-probability under the target, raw and as sampled."""
    top_logprobs: Annotated[int, arg(metavar="N")] = 0
    """And those of the N likeliest tokens, up to 64."""
    batch_size: Annotated[int | None, unset("N")] = None
    """Rows at once (default: 8; 1 where text is shown)."""
    cache_length: Annotated[int | None, unset("N")] = None
    """The most tokens of prompt and output together (default: the model's context)."""
    prefix: Annotated[str | None, unset("FILE")] = None
    """Text that stands before every prompt (a system message of chats); it is prefilled once."""
    mesh: Annotated[str | None, unset("data=D,model=M")] = None
    """Split rows over D and the model over M of all D x M devices; ,draft=sharded splits a draft model too, which is
    else whole on every shard (default: one device; with several processes, rows over all devices)."""
    distributed: Annotated[str, arg(metavar="auto|off|coordinator=HOST:PORT,num=N,id=I")] = "off"
    """Run with other processes as one job: auto finds them (TPU pods, Slurm, Open MPI); needs --output FILE or DIR."""
    start_timeout: Annotated[int, arg(metavar="SECONDS")] = 300
    """How long to wait for all processes to start."""
    check: bool = False
    """Verify the invariants of speculation while running."""
    trace: Annotated[str | None, unset("FILE")] = None
    """Write a record of each round and row as JSON Lines: what was drafted, with which chances, and how it was decided
    (slower; the same ids)."""
    trace_full: bool = False
    """Write whole distributions into the trace too (vocabularies of up to 4096 tokens)."""
    compare: bool = False
    """Then time the same prompts with and without the draft, in turns, and say how much faster it is."""

    def run(self) -> int:
        """Generate; 1 when some rows failed."""
        self._refuse()
        from specjax import distributed

        with distributed.processes(distributed.parse(self.distributed), self.start_timeout, self.debug) as found:
            return self._run(found)

    def _run(self, processes: Processes) -> int:
        if processes.count > 1:
            from specjax.jobs.place import is_stream

            if is_stream(self.output):
                raise UsageError("Several processes write rows: give --output FILE or DIR, which all can reach.")
        if self.input is None and self.output is None:
            return self._show()
        from specjax.cli.generate_rows import write_rows

        return write_rows(self, processes)

    def _refuse(self) -> None:
        """Refuse what cannot be honoured, before anything is loaded.

        Raises:
            UsageError: it says what.
        """
        shown = self.input is None and self.output is None
        wrong = (
            (not self.prompts and self.input is None, "no prompt: give PROMPT, or --input FILE."),
            (self.prompts and self.input is not None, "got both PROMPT and --input; give one of them."),
            (self.raw and self.input is not None, "--raw is for PROMPT; a row says it with prompt."),
            (self.resume and self.overwrite, "got both --resume and --overwrite; give one of them."),
            (self.resume and self.output in (None, "-"), "--resume needs --output FILE or DIR."),
            (self.eos and self.ignore_eos, "got both --eos and --ignore-eos; give one of them."),
            (self.require_draft and self.draft == "none", "got both --draft none and --require-draft."),
            (self.compare and not shown, "--compare is for PROMPT shown as text; specjax bench measures rows."),
            (self.trace_full and self.trace is None, "--trace-full needs --trace FILE."),
            (self.trace is not None and self.resume, "a trace is of a whole run: leave out --trace or --resume."),
            (self.trace is not None and self.compare, "got --trace and --compare; a traced run is not timed."),
            (self.compare and self.draft == "none", "got --compare and --draft none: nothing to compare."),
            (shown and self.logprobs, "--logprobs is written in rows: add --output FILE (or - )."),
            (shown and self.top_logprobs, "--top-logprobs is written in rows: add --output FILE (or - )."),
            (self.start_timeout < 1, f"--start-timeout is {self.start_timeout}; expected at least 1."),
            (shown and self.batch_size not in (None, 1),
             "prompts shown as text run one at a time: add --output FILE (or - ) for --batch-size."),
        )  # fmt: skip
        for found, message in wrong:
            if found:
                raise UsageError(message)

    def load(self, *, require_draft: bool, mesh: str | None = None) -> Pair:
        """Load the pair; where the default one needs a network that is not there, the one that ships, and say so."""
        from specjax.checkpoint import NetworkError
        from specjax.pair_names import EMBEDDED_PAIR

        try:
            return super().load(require_draft=require_draft, mesh=mesh)
        except NetworkError as error:
            if self.target is not None or self.pair is not None:
                raise
            note(f"{error}")
            note(f"Without a network: the pair that ships, {EMBEDDED_PAIR}, which goes on with a simple story.")
            embedded = dataclasses.replace(self, pair=EMBEDDED_PAIR)
            return super(Generate, embedded).load(require_draft=require_draft, mesh=mesh)

    def options(self) -> dict[str, Any]:
        """Return the options of ``specjax.generate``.

        Raises:
            UsageError: a value out of range.
        """
        from specjax.requests import Options

        names = ("gamma", "width", "max_new_tokens", "ignore_eos", "seed", "samples", "logprobs", "top_logprobs",
                 "cache_length", "raw", "check", "require_draft", "trace_full")  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        options |= {
            "sampling": self.sampling(),
            "ban_sequence": flat("--ban-sequence", self.ban_sequence),
            "rule": self.rule,
            "stop": flat("--stop", self.stop),
        }
        options |= {"eos": flat("--eos", self.eos) or None}
        if self.prefix is not None:
            options["prefix"] = _read_text(self.prefix)
        if self.batch_size is not None:
            options["batch_size"] = self.batch_size
        Options(**options)  # before anything is loaded
        return options

    def _show(self) -> int:
        """Print texts as they become final, one prompt after another."""
        prepare_jax()
        options = {**self.options(), "batch_size": 1, "chunk": _STREAM_CHUNK}
        with self.tracing() as trace:
            return self._answer(options | {"trace": trace})

    @contextlib.contextmanager
    def tracing(self) -> Iterator[Callable[[dict[str, Any]], None] | None]:
        """Give what takes the trace's records, or None where none is asked for."""
        if self.trace is None:
            yield None
            return
        with RowWriter(self.trace, overwrite=self.overwrite, report=note) as writer:
            yield writer.write

    def _answer(self, options: dict[str, Any]) -> int:
        from specjax.api import generate
        from specjax.stats import merge_stats

        pair = self.load(require_draft=self.require_draft, mesh=self.mesh)
        screen, meter = _Screen(self.prompts, self.samples), Meter()
        outputs = generate(
            pair, list(self.prompts), on_text=screen.text, on_output=screen.end, on_tokens=meter.add, **options
        )
        note(summary(merge_stats([out.stats for out in outputs]), meter))
        failed = any(out.error for out in outputs)
        if self.compare and not failed:
            note(self._comparison(pair, options))
        return 1 if failed else 0

    def _comparison(self, pair: Pair, options: dict[str, Any]) -> str:
        """Measure the prompts with and without the draft."""
        from specjax.bench import bench, from_texts

        gammas: list[int | Literal["auto"]] = [] if self.gamma is None else [self.gamma]
        options = {name: value for name, value in options.items() if name not in ("gamma", "chunk", "trace")}
        prompts = from_texts(self.prompts, pair.target, raw=self.raw)
        (result,) = bench(pair, prompts, gammas=gammas, repeats=_COMPARED_RUNS, **options)
        rates = [result[side]["decode_tokens_per_second"]["median"] for side in ("speculative", "plain")]
        equality = result["equality"]
        same = (
            f", {equality['num_equal']} of {equality['num_compared']} texts equal" if equality["num_compared"] else ""
        )
        return (
            f"{result['decode_ratio']['median']:.2f} times as fast as without the draft "
            f"({rates[0]:.1f} and {rates[1]:.1f} tokens/s, decoding, medians of {_COMPARED_RUNS}{same})"
        )


def _read_text(path: str) -> str:
    try:
        return Path(path).read_bytes().decode()  # as it is, line ends and all
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"Cannot read the prefix {path}: {error}. Give a text file in UTF-8.") from error


class _Screen:
    """Shows the texts of prompts that run one at a time; each has a heading where there are several."""

    def __init__(self, prompts: tuple[str, ...], samples: int) -> None:
        self._prompts, self._samples = prompts, samples
        self._ended = 0
        self._begun = False

    def text(self, row_id: int | str | None, text: str) -> None:
        """Show text that has become final."""
        self._begin(row_id)
        print(text, end="", flush=True)

    def end(self, output: Output) -> None:
        """Finish a row."""
        if output.error is not None:
            print(flush=True, end="\n" if self._begun else "")
            print(f"specjax: error: prompt {output.id}: {output.error}", file=sys.stderr, flush=True)
        else:
            self._begin(output.id)
            print(flush=True)
        self._begun = False
        self._ended += 1

    def _begin(self, row_id: int | str | None) -> None:
        if self._begun:
            return
        self._begun = True
        if len(self._prompts) * self._samples == 1:
            return
        sample = f", sample {self._ended % self._samples}" if self._samples > 1 else ""
        words = " ".join(self._prompts[int(row_id or 1) - 1].split())
        gap = "\n" if self._ended else ""
        print(f"{gap}[{row_id}{sample}] {words if len(words) <= 60 else words[:57] + '...'}", flush=True)
