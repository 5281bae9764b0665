"""Bench suites: what to measure, from a file; every combination of its lists; kept as it goes, so that it can go on."""

from __future__ import annotations

import dataclasses
import importlib.resources
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

import specjax
from specjax.bench import bench, environment, from_texts, lengths_of, num_runs, prompt_record, read_prompts
from specjax.bench_result import BenchPrompt, advice
from specjax.errors import RowError, UsageError
from specjax.outputs import write_text
from specjax.pair import Pair, load
from specjax.report import SCHEMA
from specjax.sampling import SamplingParams


class SuitePair(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One pair, as ``specjax.load`` takes it."""

    target: str | None = None
    draft: str | None = None
    pair: str | None = None


class Suite(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What to measure: every combination of pairs, batch sizes, temperatures, rules, lengths of prompts and gammas.

    Attributes:
        title: in words.
        pairs: targets and drafts; the default pair.
        dtype: of the weights.
        prompts: a file of prompts, beside the suite's own file; or ``texts``.
        texts: prompts, as chats where the model has a template.
        raw: no chat template for ``texts``.
        limit: only the first N prompts.
        gammas: draft lengths, "auto" among them; the pair's own, else 4.
        batch_sizes, temperatures, rules: what their names say; at temperature 0 the first rule alone is measured.
        prompt_tokens: ranges of prompt lengths in tokens, both ends within; none: all prompts together.
        max_new_tokens, ignore_eos, width, seed, repeats: as the options of ``specjax bench``.
        top_k, top_p, min_p: of the rows above temperature 0.
    """

    title: str = ""
    pairs: tuple[SuitePair, ...] = (SuitePair(),)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    prompts: str | None = None
    texts: tuple[str, ...] = ()
    raw: bool = False
    limit: int | None = None
    gammas: tuple[int | Literal["auto"], ...] = ()
    batch_sizes: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    rules: tuple[str, ...] = ("rejection",)
    prompt_tokens: tuple[tuple[int, int], ...] = ()
    max_new_tokens: int = 128
    ignore_eos: bool = False
    width: int | None = None
    seed: int = 0
    repeats: int = 5
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def suite_names() -> list[str]:
    """Return the names of the suites that ship."""
    folder = importlib.resources.files("specjax.configs") / "bench"
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml"))


def read_suite(where: str) -> Suite:
    """Read a suite by name, or from a .toml file.

    Raises:
        UsageError: an unknown name, a file that cannot be read, or a field that is wrong.
    """
    path = Path(where)
    named = path.suffix != ".toml"
    if named and where not in suite_names():
        raise UsageError(f"Suite {where!r} is not known; known: {', '.join(suite_names())}, or pass a .toml file.")
    try:
        folder = importlib.resources.files("specjax.configs") / "bench"
        text = (folder / f"{where}.toml").read_text() if named else path.read_text()
        suite = msgspec.toml.decode(text, type=Suite)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UsageError(f"Suite {where}: {error}. See docs/bench.md for its fields.") from error
    for name in ("pairs", "batch_sizes", "temperatures", "rules"):
        if not getattr(suite, name):
            raise UsageError(f"Suite {where}: {name} is empty; expected at least one, or leave it out.")
    if suite.prompts is not None and not named:
        return msgspec.structs.replace(suite, prompts=str(path.parent / suite.prompts))
    return suite


class Kept(dict[str, Any]):
    """What was measured so far, written to a file, whole, after each thing.

    Args:
        path: the file; None keeps nothing on disk.
        identity: what is measured; a file of another is refused.
        resume: go on with the file, if there is one.

    Raises:
        UsageError: the file is of another run, cannot be read, or is there and not to be resumed.
    """

    def __init__(self, path: Path | None, identity: Any, *, resume: bool):
        super().__init__()
        self._path, self._identity = path, json.loads(json.dumps(identity))
        if path is None or not path.exists():
            return
        if not resume:
            raise UsageError(
                f"{path} holds what an interrupted run measured: pass --resume to go on, --overwrite to drop it."
            )
        try:
            held = json.loads(path.read_text())
            same, measured = held["identity"] == self._identity, held["measured"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"Cannot go on from {path}: {error!r}. Pass --overwrite to drop it.") from error
        if not same:
            raise UsageError(f"{path} is of another run (other settings or another machine): --overwrite drops it.")
        super().update(measured)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if self._path is not None:
            write_text(self._path, json.dumps({"identity": self._identity, "measured": dict(self)}))

    def part(self, name: str) -> Part:
        """Return the things whose names begin with this one."""
        return Part(self, name)


class Part(dict[str, Any]):
    """A part of what is kept, by shorter names."""

    def __init__(self, whole: Kept, name: str):
        self._whole, self._name = whole, f"{name}: "
        super().__init__({key.removeprefix(self._name): value for key, value in whole.items() if self.owns(key)})

    def owns(self, key: str) -> bool:
        """Say whether a name is of this part."""
        return key.startswith(self._name)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._whole[self._name + name] = value


@dataclasses.dataclass(frozen=True)
class Setting:
    """One combination, gamma left out."""

    batch_size: int
    temperature: float
    rule: str
    prompt_tokens: tuple[int, int] | None

    def words(self) -> str:
        """Return it in a few words."""
        lengths = "" if self.prompt_tokens is None else ", prompts of {} to {} tokens".format(*self.prompt_tokens)
        return f"batch {self.batch_size}, temperature {self.temperature:g}, {self.rule}{lengths}"


def settings_of(suite: Suite) -> Iterator[Setting]:
    """Yield the combinations; at temperature 0 rules that lose nothing are one."""
    lengths = suite.prompt_tokens or (None,)
    for batch, temperature, rule, tokens in itertools.product(
        suite.batch_sizes, suite.temperatures, suite.rules, lengths
    ):
        if temperature > 0 or rule == suite.rules[0]:
            yield Setting(batch, temperature, rule, tokens)


def run_suite(
    suite: Suite,
    *,
    form: dict[str, Any] | None = None,
    sampling: SamplingParams | None = None,
    options: dict[str, Any] | None = None,
    more: Sequence[str] = (),
    kept_in: Path | None = None,
    resume: bool = False,
    on_run: Callable[[int, str], None] | None = None,
) -> dict[str, Any]:
    """Measure a suite; see docs/bench.md for the report.

    Args:
        suite: what.
        form: further options of ``specjax.load``.
        sampling: settings of the rows besides those that the suite names.
        options: further options of ``specjax.generate``.
        more: as ``bench`` takes it.
        kept_in: a file that holds what is measured until all is; the caller removes it.
        resume: go on with what it holds.
        on_run: called before each run with the number of runs to come and a few words.

    Raises:
        UsageError: what cannot be measured, or a pair, prompt or setting that is wrong.
    """
    sampling = sampling or SamplingParams()
    _refuse_prompts(suite)
    here = environment(suite.dtype)
    identity = [msgspec.to_builtins(suite), dataclasses.asdict(sampling), repr((form, options)), here]
    run = _Run(suite, sampling, options or {}, more, Kept(kept_in, identity, resume=resume), _Countdown(on_run))
    for number, names in enumerate(suite.pairs):
        began = time.perf_counter()
        pair = load(names.target, names.draft, pair=names.pair, dtype=suite.dtype, require_draft=True, **(form or {}))
        run.pair(number, pair, time.perf_counter() - began)
    return {
        "schema": SCHEMA,
        "specjax": specjax.__version__,
        "settings": {**msgspec.to_builtins(suite), "sampling": dataclasses.asdict(sampling)},
        "environment": here,
        "machine": run.machine(),
        "pairs": run.pairs,
        "results": run.results,
        "advice": run.advice,
    }


class _Run:
    """What comes of a suite, pair by pair.

    Attributes:
        pairs, results, advice: as the report has them.
    """

    def __init__(
        self, suite: Suite, sampling: SamplingParams, options: dict[str, Any], more: Sequence[str], kept: Kept,
        countdown: _Countdown,
    ):  # fmt: skip
        self._suite, self._sampling, self._options, self._more = suite, sampling, options, more
        self._kept, self._countdown = kept, countdown
        self.pairs: list[dict[str, Any]] = []
        self.results: list[dict[str, Any]] = []
        self.advice: list[dict[str, Any]] = []

    def pair(self, number: int, pair: Pair, load_seconds: float) -> None:
        """Measure a pair at every setting."""
        suite = self._suite
        prompts = prompts_of(suite, pair)
        records = [prompt_record(prompt, pair.target) for prompt in prompts]
        head = {"target": pair.target.name, "draft": pair.draft.name}
        self.pairs.append({**head, "load_seconds": load_seconds, "prompts": records})
        todo = [(setting, _chosen(prompts, setting, records)) for setting in settings_of(suite)]
        runs = num_runs(lengths_of(suite.gammas, pair), suite.repeats, self._more)
        left = (len(suite.pairs) - number) * len(todo) * runs
        for setting, chosen in todo:
            self._countdown.left, left = left, left - runs
            found = self._setting(number, pair, setting, chosen)
            where = {**head, **dataclasses.asdict(setting)}
            self.results += [{**where, **result} for result in found]
            if words := advice(found, suite.max_new_tokens):
                self.advice.append({**where, "words": words})

    def _setting(self, number: int, pair: Pair, setting: Setting, prompts: list[BenchPrompt]) -> list[dict[str, Any]]:
        suite = self._suite
        return bench(
            pair, prompts, gammas=suite.gammas, repeats=suite.repeats, more=self._more,
            on_run=self._countdown.say(setting), kept=self._kept.part(f"pair {number}, {setting.words()}"),
            sampling=_sampling(self._sampling, suite, setting.temperature), rule=setting.rule,
            batch_size=setting.batch_size, max_new_tokens=suite.max_new_tokens, ignore_eos=suite.ignore_eos,
            width=suite.width, seed=suite.seed, **self._options,
        )  # fmt: skip

    def machine(self) -> dict[str, Any] | None:
        """Return what the machine can, measured where the parts of a round are."""
        if "parts" not in self._more:
            return None
        if "machine" not in self._kept:
            from specjax.bench_parts import machine

            self._kept["machine"] = machine(self._suite.dtype)
        return self._kept["machine"]


def prompts_of(suite: Suite, pair: Pair) -> list[BenchPrompt]:
    """Return the suite's prompts for a pair."""
    if suite.prompts is not None:
        return read_prompts(suite.prompts, pair.target)[: suite.limit]
    return from_texts(suite.texts, pair.target, raw=suite.raw)[: suite.limit]


def _refuse_prompts(suite: Suite) -> None:
    if bool(suite.texts) == (suite.prompts is not None):
        both = "got both PROMPT and --prompts; give one of them."
        raise UsageError(both if suite.texts else "no prompt: give PROMPT, or --prompts FILE.")
    if suite.limit is not None and suite.limit < 1:
        raise UsageError(f"--limit is {suite.limit}; expected at least 1.")


def _chosen(prompts: list[BenchPrompt], setting: Setting, records: list[dict[str, Any]]) -> list[BenchPrompt]:
    if setting.prompt_tokens is None or not prompts:
        return prompts
    low, high = setting.prompt_tokens
    found = [prompt for prompt, record in zip(prompts, records, strict=True) if low <= record["num_tokens"] <= high]
    if not found:
        lengths = sorted(record["num_tokens"] for record in records)
        raise UsageError(
            f"No prompt has {low} to {high} tokens, but {lengths[0]} to {lengths[-1]}: change prompt_tokens."
        )
    return found


def _sampling(base: SamplingParams, suite: Suite, temperature: float) -> SamplingParams:
    try:
        return dataclasses.replace(
            base, temperature=temperature, top_k=suite.top_k, top_p=suite.top_p, min_p=suite.min_p
        )
    except RowError as error:
        raise UsageError(str(error)) from error


class _Countdown:
    """Says how many runs are to come."""

    def __init__(self, on_run: Callable[[int, str], None] | None):
        self.left = 0
        self._on_run = on_run

    def say(self, setting: Setting) -> Callable[[str], None]:
        """Return what ``bench`` calls before each run of a setting."""

        def on_run(words: str) -> None:
            if self._on_run is not None:
                self._on_run(max(self.left, 1), f"{setting.words()}, {words}")
            self.left -= 1

        return on_run
