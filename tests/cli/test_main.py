"""What every command shares: help at once, one line for what goes wrong, exit codes."""

import os
import subprocess
import sys

import pytest

import specjax as package
from specjax.cli import main as main_module
from specjax.errors import SpecjaxError

HEAVY = "jax jaxlib flax orbax numpy tokenizers huggingface_hub safetensors jinja2 rich".split()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["bench", "--help"], ["--version"]])
def test_help_loads_nothing_heavy(arguments):
    code = (
        "import sys, specjax.cli.main as m; code = m.main(sys.argv[1:]);"
        f"print('LOADED', code, *sorted({{name.split('.')[0] for name in sys.modules}} & set({HEAVY!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["LOADED", "0"]
    assert done.stderr == ""


def test_python_m_specjax_is_the_command_line():
    done = subprocess.run([sys.executable, "-m", "specjax", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"specjax {package.__version__}\n"


def test_help_lists_every_command_and_option(specjax):
    commands = specjax("--help")
    assert (commands.code, commands.err) == (0, "")
    assert all(name in commands.out for name in ("generate", "score", "fetch", "bench", "--version"))
    options = specjax("generate", "--help").out
    served = """--raw --input --output --target --draft --pair --require-draft --gamma --width --rule --max-new-tokens
        --temperature --stop --eos --ignore-eos --seed --samples --logprobs --batch-size --cache-length --dtype --check
        --overwrite --debug""".split()
    assert [name for name in served if name not in options] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "{generate, score, fetch, bench, check, convert, verify, tune, plan, distill}"),
        (["decode"], "decode"),
        (["generate", "a", "--top-m", "5"], "--top-m"),
        (["generate", "a", "--resume"], "--resume needs --output"),
        (["generate", "a", "--gamma", "four"], "--gamma"),
        (["generate", "a", "--gamma"], "--gamma"),
        (["generate", "a", "--gamma", "None"], "--gamma"),
        (["generate", "a", "--dtype", "float16"], "bfloat16"),
        (["generate", "a", "--raw", "b"], "before the options or after --"),
        (["generate", "a", "--eos", "x"], "--eos"),
        (["generate"], "give PROMPT, or --input"),
        (["generate", "a", "--input", "x.jsonl"], "both PROMPT and --input"),
        (["generate", "--input", "x.jsonl", "--raw"], "--raw is for PROMPT"),
        (["generate", "--input", "nowhere.jsonl"], "Cannot read the input nowhere.jsonl"),
        (["generate", "a", "--stop", "--raw"], "--stop needs a value"),
        (["generate", "a", "--eos", "1", "--ignore-eos"], "both --eos and --ignore-eos"),
        (["generate", "a", "--draft", "none", "--require-draft"], "--require-draft"),
        (["generate", "a", "--logprobs"], "add --output"),
        (["generate", "a", "--batch-size", "2"], "add --output"),
        (["generate", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "a", "--temperature", "nan"], "temperature is nan"),
        (["generate", "a", "--rule", "guess"], "known: greedy, rejection"),
        (["generate", "a", "--target", "nothing-known"], "Known names: smollm2-135m, tiny"),
        (["generate", "a", "--pair", "nothing-known"], "known: smollm2, tiny"),
        (["generate", "a", "--target", "x", "--pair", "smollm2"], "both a target and a pair"),
        (["generate", "a", "--target", "./nowhere"], "./nowhere does not exist"),
        (["score"], "--input"),
        (["fetch"], "NAME"),
        (["fetch", "nothing-known"], "Known names: smollm2-135m"),
        (["bench"], "give PROMPT, or --prompts FILE"),
        (["bench", "a", "--prompts", "x.jsonl"], "both PROMPT and --prompts"),
        (["bench", "a", "--limit", "0"], "--limit is 0"),
    ],
)
def test_a_wrong_call_is_one_line(specjax, arguments, words):
    done = specjax(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("specjax: error: ")
    assert done.err.count("\n") == 1
    assert words in done.err


class Fails:
    """A command that ends with an error."""

    def __init__(self, error: BaseException):
        self.error = error

    def run(self) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "interrupted."),
        (SpecjaxError("the disk is full."), 1, "the disk is full."),
        (KeyError("a"), 1, "KeyError: 'a' (--debug shows where; please report it)"),
        (ValueError("two\nlines"), 1, "ValueError: two (--debug shows where; please report it)"),
        (RuntimeError("RESOURCE_EXHAUSTED: 5 GB."), 1,
         "out of memory: RESOURCE_EXHAUSTED: 5 GB. Try a smaller --batch-size or --cache-length."),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_line(specjax, monkeypatch, error, code, line):
    monkeypatch.setattr(main_module, "_parse", lambda argv: Fails(error))
    done = specjax("generate")
    assert (done.code, done.out, done.err) == (code, "", f"specjax: error: {line}\n")


def test_debug_shows_where(specjax, monkeypatch):
    monkeypatch.setattr(main_module, "_parse", lambda argv: Fails(SpecjaxError("the disk is full.")))
    done = specjax("generate", "--debug")
    assert "Traceback" in done.err
    assert done.err.endswith("specjax: error: the disk is full.\n")


def test_warnings_are_one_line_each_text_once(specjax, monkeypatch):
    class Warns:
        def run(self) -> int:
            import warnings

            for text in ("a\nb", "a\nb", "c"):
                warnings.warn(text, UserWarning, stacklevel=1)
            return 0

    monkeypatch.setattr(main_module, "_parse", lambda argv: Warns())
    assert specjax("generate").err == "specjax: warning: a b\nspecjax: warning: c\n"


def test_a_reader_that_goes_away_ends_the_command_quietly(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt_ids": [5]}\n')
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "specjax", "generate", "--input", str(rows), "--target", str(model)]
    with os.fdopen(writing, "w") as out:
        done = subprocess.run([*command, "--max-new-tokens", "2"], stdout=out, stderr=subprocess.PIPE, text=True,
                              env={**os.environ, "SPECJAX_CACHE": str(tmp_path)})  # fmt: skip
    assert (done.returncode, done.stderr) == (141, "")
