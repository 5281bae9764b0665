"""Write a noisy copy of a model: a draft that agrees with its target as often as the noise allows.

python scripts/make_noisy_copy.py --source smollm2-135m --dest noisy --noise 0.05 --seed 0
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from specjax.checkpoint import load_checkpoint, save_folder
from specjax.errors import SpecjaxError


def main(argv: list[str] | None = None) -> int:
    """Parse, copy, print. Every matrix w becomes w + noise * std(w) * normal; vectors stay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", required=True, help="folder, .gguf file, known name or hub id")
    parser.add_argument("--dest", required=True, type=Path, help="folder to write; must not exist")
    parser.add_argument("--noise", type=float, default=0.05, help="in standard deviations of each matrix")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        if args.dest.exists():
            raise SpecjaxError(f"{args.dest} exists already. Choose another folder, or remove it first.")
        source = load_checkpoint(args.source, progress=True)
        params = _noisy(source.params, args.noise, np.random.default_rng(args.seed))
        save_folder(args.dest, source.hf_config, params, source.family, source.config, tokenizer_from=source.folder)
    except SpecjaxError as error:
        print(f"make_noisy_copy: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{args.dest}: {source.name} with noise {args.noise}, seed {args.seed}")
    return 0


def _noisy(tree: dict, noise: float, rng: np.random.Generator) -> dict:
    """Add noise to every matrix; keys in sorted order, so that a seed means one copy."""
    out = {}
    for key in sorted(tree):
        value = tree[key]
        if isinstance(value, dict):
            out[key] = _noisy(value, noise, rng)
            continue
        value = np.asarray(value)
        if value.ndim == 2:
            value = value + np.float32(noise) * value.std() * rng.standard_normal(value.shape, dtype=np.float32)
        out[key] = value
    return out


if __name__ == "__main__":
    sys.exit(main())
