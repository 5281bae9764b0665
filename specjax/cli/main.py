"""The command ``specjax``: parse, run one command, turn what goes wrong into one line and an exit code."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union

import tyro
from tyro.conf import DisallowNone, FlagCreatePairsOff, subcommand

from specjax import __version__
from specjax.cli.bench import Bench
from specjax.cli.check import Check
from specjax.cli.convert import Convert
from specjax.cli.distill import Distill
from specjax.cli.fetch import Fetch
from specjax.cli.generate import Generate
from specjax.cli.plan import Plan
from specjax.cli.score import Score
from specjax.cli.tune import Tune
from specjax.cli.verify import Verify
from specjax.errors import SpecjaxError, Terminated

FAILED = 1
WRONG_CALL = 2
STOPPED = 75
INTERRUPTED = 130
BROKEN_PIPE = 141

_ANSI = re.compile(r"\x1b\[[0-9;]*m")

_ABOUT = (
    f"Lossless speculative decoding for JAX, version {__version__} (--version). "
    "'specjax COMMAND --help' lists a command's options."
)
# A new command is one file, a line here and its name.
_NAMES = ("generate", "score", "fetch", "bench", "check", "convert", "verify", "tune", "plan", "distill")
_COMMANDS = Union[  # noqa: UP007
    Annotated[Generate, subcommand("generate")],
    Annotated[Score, subcommand("score")],
    Annotated[Fetch, subcommand("fetch")],
    Annotated[Bench, subcommand("bench")],
    Annotated[Check, subcommand("check")],
    Annotated[Convert, subcommand("convert")],
    Annotated[Verify, subcommand("verify")],
    Annotated[Tune, subcommand("tune")],
    Annotated[Plan, subcommand("plan")],
    Annotated[Distill, subcommand("distill")],
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, without the program's name; the process's own by default.

    Returns:
        The exit code: 0 all went well, 1 some rows failed or something broke, 2 a wrong call, 75 stopped (to be
        resumed), 130 interrupted, 141 the reader of standard output went away.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["--version"]:
        print(f"specjax {__version__}")
        return 0
    debug = "--debug" in argv
    with _one_line_warnings():
        try:
            command = _parse(argv)
            code = command if isinstance(command, int) else command.run()
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            _say("interrupted.", debug)
            return INTERRUPTED
        except Terminated:
            _say("stopped.", debug)
            return STOPPED
        except BrokenPipeError:
            return _quiet_end()
        except SpecjaxError as error:
            if isinstance(error.__cause__, BrokenPipeError):
                return _quiet_end()
            _say(str(error), debug)
            return error.exit_code
        except Exception as error:
            _say(_unexpected(error), debug)
            return FAILED


def _parse(argv: list[str]) -> Any:
    """Return the command with its options, or an exit code: help was shown, or the call is wrong."""
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(_COMMANDS, prog="specjax", description=_ABOUT, args=argv,
                            config=(FlagCreatePairsOff, DisallowNone))  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            return 0
        _say(_first_words(box.getvalue(), argv), False)
        return WRONG_CALL


def _first_words(box: str, argv: list[str]) -> str:
    """Return what a box of the parser says, below its title and above its first rule, as one line."""
    lines = [line.strip().strip("│").strip() for line in _ANSI.sub("", box).strip().splitlines()]
    body = lines[1 if lines[:1] and lines[0].startswith("╭") else 2 :]  # drawn with lines, or with dashes
    said: list[str] = []
    for text in body:
        if not text.strip("─-╰╯") or text == "Got errors:":
            break
        said.append(text)
    message = " ".join(said).rstrip(".")
    stray = message.removeprefix("Unrecognized options: ")
    command = argv[0] if argv and argv[0] in _NAMES else ""
    if stray != message and command and not stray.startswith("-"):
        message += " (values without an option stand together, before the options or after --)"
    return f"{message or 'the arguments cannot be read'}. See 'specjax {command + ' ' if command else ''}--help'."


def _unexpected(error: Exception) -> str:
    message = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if "RESOURCE_EXHAUSTED" in message:
        return f"out of memory: {message} Try a smaller --batch-size or --cache-length."
    return f"{type(error).__name__}: {message} (--debug shows where; please report it)"


def _say(message: str, debug: bool) -> None:
    if debug and sys.exc_info()[0] is not None:
        traceback.print_exc()
    with contextlib.suppress(BrokenPipeError):
        print(f"specjax: error: {' '.join(message.split())}", file=sys.stderr, flush=True)


def _quiet_end() -> int:
    """Leave without the complaint that Python makes when it flushes a closed pipe at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return BROKEN_PIPE


@contextlib.contextmanager
def _one_line_warnings() -> Iterator[None]:
    """Show each warning as one line, each text once."""
    seen: set[str] = set()

    def show(message, category, filename, lineno, file=None, line=None):
        text = " ".join(str(message).split())
        if text not in seen:
            seen.add(text)
            print(f"specjax: warning: {text}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


if __name__ == "__main__":
    sys.exit(main())
