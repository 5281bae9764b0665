"""Block against rejection on the same drafted blocks, paired.

    python scripts/compare_rules.py --target smollm2-135m --drafts /tmp/near /tmp/mid /tmp/far --gamma 2 4 8

Rows are decoded by the real program at temperature 1 under the rejection rule. For every drafted block, p and q being
known, the expected number of accepted drafts is computed exactly under both rules, given the block:

    rejection   sum_i prod_{j<=i} min(1, p_j / q_j)
    block       sum_i (1 - prod_{j>=i} (1 - h_j))

so the difference has no noise but that of the blocks. Printed: both means, the mean difference with its 95% interval.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from specjax.checkpoint import cache_folder
from specjax.generate import Program, Prompt
from specjax.pair import DEFAULT_DTYPE, Draft, Model, load
from specjax.round import Parts, speculative_round
from specjax.sampling import SamplingParams, distribution, row_key
from specjax.types import Finish
from specjax.verify import RULES, block

PROMPTS = (
    "Write a short story about a fox who finds a map.",
    "Explain how a bicycle stays upright.",
    "Give me a recipe for pancakes.",
    "What should I see in Rome in two days?",
)
console = Console()


def main() -> None:
    """Measure every draft at every gamma."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafts", nargs="+", required=True)
    parser.add_argument("--gamma", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=60, help="per row; four rows")
    parser.add_argument("--dtype", default=DEFAULT_DTYPE)
    args = parser.parse_args()
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    target = load(args.target, "none", dtype=args.dtype, progress=True).target
    table = Table("draft", "gamma", "blocks", "rejection", "block", "block - rejection (95%)", "gain in tokens a round")
    for where in args.drafts:
        draft = load(args.target, where, dtype=args.dtype, require_draft=True).draft
        for gamma in args.gamma:
            token, joint = measure(target, draft, gamma, args.rounds)
            gap = joint - token
            half = 1.96 * gap.std(ddof=1) / np.sqrt(len(gap))
            gain = (1 + joint.mean()) / (1 + token.mean()) - 1
            table.add_row(
                Path(where).name, str(gamma), str(len(gap)), f"{token.mean():.3f}", f"{joint.mean():.3f}",
                f"{gap.mean():+.4f} ± {half:.4f}", f"{gain:+.1%}",
            )  # fmt: skip
    console.print(table)


def measure(target: Model, draft: Draft, gamma: int, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected accepted drafts of each block under rejection and under block."""
    rule = RULES["rejection"]
    program = Program(target.fn, draft.drafter, rule=rule, gamma=gamma, vocab_size=target.vocab_size)
    params = {"target": target.params, "draft": draft.params}
    assert target.tokenizer is not None
    prompts = [target.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS]
    longest = max(len(ids) for ids in prompts) + rounds * (gamma + 1) + 1
    state = program.empty(params, len(prompts), longest)
    for slot, ids in enumerate(prompts):
        prompt = Prompt(ids, longest, (), row_key(0, slot), SamplingParams(temperature=1.0))
        state = program.insert(params, state, prompt, slot)
    parts = Parts(target.fn, draft.drafter, rule, gamma, (gamma + 1,), target.vocab_size)
    step = jax.jit(functools.partial(speculative_round, parts=parts), donate_argnums=1)
    token, joint = [], []
    for _ in range(rounds):
        running = np.asarray(state.finish) == Finish.RUNNING
        state, info = step(params, state)
        by_token, by_block = expected(info.logits, info.proposal, state.sampling)
        token.append(np.asarray(by_token)[running])
        joint.append(np.asarray(by_block)[running])
    return np.concatenate(token), np.concatenate(joint)


@jax.jit
def expected(logits, proposal, sampling) -> tuple[jax.Array, jax.Array]:
    """Return each row's expected number of accepted drafts under both rules, given the drafted block: [B], [B]."""
    p = distribution(logits, sampling).probs
    drafted = proposal.tokens[..., None]
    p_drafted = jnp.take_along_axis(p[:, :-1], drafted, axis=-1)[..., 0]
    q_drafted = jnp.take_along_axis(proposal.probs, drafted, axis=-1)[..., 0]
    token = jnp.sum(jnp.cumprod(jnp.minimum(1.0, p_drafted / q_drafted), axis=1), axis=1)
    end = block.end_probability(p, proposal, block.prefix_weights(p, proposal))
    none_from = jnp.cumprod((1.0 - end)[:, ::-1], axis=1)[:, ::-1]
    return token, jnp.sum(1.0 - none_from, axis=1)


if __name__ == "__main__":
    main()
