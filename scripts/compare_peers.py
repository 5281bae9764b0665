"""Tokens per second beside other libraries: the same checkpoint, prompts and dtype, in one process.

Extras: peers (transformers), llama (llama.cpp).

    python scripts/compare_peers.py --prompts scripts/prompts/copy.jsonl --dtype bfloat16 --repeats 5
    python scripts/compare_peers.py --prompts rows.jsonl --draft FOLDER --gguf smollm2.gguf

Greedy, one prompt at a time, past EOS, all sides warmed up. ``plain`` is each side without a draft; ``lookup`` is
transformers' and llama.cpp's prompt lookup and this package's n-gram, at the same number of drafted tokens;
``assisted`` is a draft model (--draft). llama.cpp's Python binding runs a GGUF of the same weights (--gguf, which
``specjax convert`` writes); it is left out, and that is said, where the binding is not installed or does not run here.
Whole calls are timed, prefill included, in turns. Outputs are compared token by token with transformers' plain ones;
libraries round differently, so the place of the first difference is reported, not judged.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specjax import generate
from specjax.bench import BenchPrompt, read_prompts
from specjax.checkpoint import cache_folder
from specjax.pair import Model, load
from specjax.requests import prompt_ids
from specjax.sampling import SamplingParams

Ids = list[int]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="a name or a folder in Hugging Face layout")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", help="a draft model in Hugging Face layout, for the assisted sides")
    parser.add_argument("--gguf", type=Path, help="the target as GGUF, for llama.cpp")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--gamma", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, help="the figures as JSON")
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    target = load(args.target, "none", dtype=args.dtype, progress=True).target
    prompts = [prompt_of(prompt, target) for prompt in read_prompts(args.prompts, target)[: args.limit]]
    sides = {**theirs(args), **llama(args), **ours(args)}
    times: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[Ids]] = {}
    for turn in track(range(args.repeats + 1), "measuring", console=Console(file=sys.stderr), transient=True):
        for name, run in sides.items():
            began = time.perf_counter()
            texts[name] = [run(ids) for ids in prompts]
            if turn:
                times[name].append(time.perf_counter() - began)
    report(args, times, texts)


def prompt_of(prompt: BenchPrompt, target: Model) -> Ids:
    """Return a prompt's ids."""
    return prompt_ids(prompt.row, target)


def ours(args: argparse.Namespace) -> dict[str, Callable[[Ids], Ids]]:
    """Return this package's ways to continue a prompt."""
    found = {}
    drafts = [("specjax plain", "none"), ("specjax lookup", "ngram")]
    if args.draft:
        drafts.append(("specjax assisted", args.draft))
    for name, draft in drafts:
        pair = load(args.target, draft, dtype=args.dtype)

        def run(ids: Ids, pair=pair) -> Ids:
            whole = SamplingParams(min_new_tokens=args.max_new_tokens)  # as transformers keeps a text from ending
            return generate(pair, [ids], gamma=args.gamma, max_new_tokens=args.max_new_tokens, sampling=whole)[0].ids

        found[name] = run
    return found


def theirs(args: argparse.Namespace) -> dict[str, Callable[[Ids], Ids]]:
    """Return transformers' ways to continue a prompt."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM  # pyright: ignore[reportMissingImports]
    from transformers.utils import logging  # pyright: ignore[reportMissingImports]

    logging.set_verbosity_error()
    folder = cache_folder() / "models" / args.target
    where = folder if folder.is_dir() else args.target
    model = AutoModelForCausalLM.from_pretrained(where, dtype=getattr(torch, args.dtype)).eval()
    found = {}
    ways: list[tuple[str, dict[str, Any]]] = [
        ("transformers plain", {}),
        ("transformers lookup", {"prompt_lookup_num_tokens": args.gamma}),
    ]
    if args.draft:
        draft = AutoModelForCausalLM.from_pretrained(args.draft, dtype=getattr(torch, args.dtype)).eval()
        draft.generation_config.num_assistant_tokens = args.gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        ways.append(("transformers assisted", {"assistant_model": draft}))
    for name, options in ways:

        def run(ids: Ids, options: dict[str, Any] = options) -> Ids:
            with torch.inference_mode():
                out = model.generate(
                    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                    max_new_tokens=args.max_new_tokens, min_new_tokens=args.max_new_tokens, pad_token_id=0,
                    temperature=None, top_p=None, top_k=None, **options,
                )  # fmt: skip
            return out[0, len(ids) :].tolist()

        found[name] = run
    return found


def llama(args: argparse.Namespace) -> dict[str, Callable[[Ids], Ids]]:
    """Return llama.cpp's ways to continue a prompt, by its Python binding; none where it cannot be had."""
    if args.gguf is None:
        return {}
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama.cpp is left out: its binding (llama-cpp-python) is not installed.", file=sys.stderr)
        return {}
    # A build for another processor ends with an illegal instruction, which takes its process with it.
    tried = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], verbose=False).eval([1])",
            args.gguf,
        ],
        capture_output=True,
    )
    if tried.returncode:
        print(f"llama.cpp is left out: it does not run here (exit code {tried.returncode}).", file=sys.stderr)
        return {}
    from llama_cpp import Llama  # pyright: ignore[reportMissingImports]
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding  # pyright: ignore[reportMissingImports]

    found = {}
    for name, draft in (("llama.cpp plain", None), ("llama.cpp lookup", LlamaPromptLookupDecoding(3, args.gamma))):
        model = Llama(str(args.gguf), n_ctx=2048, n_threads=os.cpu_count(), draft_model=draft,
                      logits_all=draft is not None, verbose=False)  # fmt: skip

        def run(ids: Ids, model=model) -> Ids:
            model.reset()
            tokens = model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0)
            return list(itertools.islice(tokens, args.max_new_tokens))

        found[name] = run
    return found


def report(args: argparse.Namespace, times: dict[str, list[float]], texts: dict[str, list[Ids]]) -> None:
    """Print the table; write the JSON."""
    rows, base = [], statistics.median(times["transformers plain"])
    table = Table("way", "tokens/s (median)", "min to max", "to transformers plain", "texts as transformers plain")
    wanted = texts["transformers plain"]
    for name, spent in times.items():
        count = sum(len(ids) for ids in texts[name])
        equal = sum(a == b for a, b in zip(texts[name], wanted, strict=True))
        first = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            for a, b in zip(texts[name], wanted, strict=True)
        ]
        row = {
            "way": name,
            "tokens_per_second": count / statistics.median(spent),
            "lowest": count / max(spent),
            "highest": count / min(spent),
            "ratio": base / statistics.median(spent) * count / sum(len(ids) for ids in wanted),
            "num_equal": equal,
            "first_difference": first,
        }
        rows.append(row)
        table.add_row(name, f"{row['tokens_per_second']:.1f}", f"{row['lowest']:.1f} to {row['highest']:.1f}",
                      f"{row['ratio']:.2f}", f"{equal}/{len(wanted)}")  # fmt: skip
    Console().print(table)
    if args.output:
        args.output.write_text(json.dumps({"dtype": args.dtype, "ways": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
