"""What our own engine writes: answers of the teacher or the student, and prompts that the teacher makes up."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from specjax.api import generate
from specjax.distill.config import ResponseSpec
from specjax.distill.examples import Example, Vocabulary
from specjax.errors import UsageError
from specjax.pair import Draft, Model, Pair, no_draft
from specjax.sampling import SamplingParams

_MARK = "\x07specjax\x07"  # stands for the user's words in a template; no template has it


@functools.cache
def _plain() -> Draft:
    """Return one and the same draft, so that programs are compiled once."""
    return no_draft()


def answer(model: Model, examples: Sequence[Example], spec: ResponseSpec, *, seed: int) -> list[Example]:
    """Return the examples with answers of a model in the place of their completions.

    Args:
        model: teacher or student; it decodes plainly.
        examples: whose prompts are answered: of a text, its first tokens.
        spec: how.
        seed: of the draws.

    Raises:
        UsageError: no prompt could be answered.
    """
    greedy = round(spec.greedy_share * len(examples))
    rows = [
        {"id": i, "prompt_ids": list(example.begun(spec.prompt_tokens)),
         "temperature": 0.0 if i < greedy else spec.temperature}
        for i, example in enumerate(examples)
    ]  # fmt: skip
    found = generate(
        Pair(model, _plain()), rows, max_new_tokens=spec.max_new_tokens, batch_size=spec.batch_size, seed=seed,
        sampling=SamplingParams(temperature=1.0), gamma=0,
    )  # fmt: skip
    answered = [
        Example(examples[i].key, tuple(rows[i]["prompt_ids"]), tuple(out.ids))
        for i, out in enumerate(found)
        if out.error is None and out.ids
    ]
    if not answered:
        reason = next((out.error for out in found if out.error), "no tokens came out")
        raise UsageError(f"None of {len(rows)} prompts was answered: {reason}")
    return answered


def write_prompts(model: Model, vocabulary: Vocabulary, spec: ResponseSpec, *, seed: int) -> list[Example]:
    """Return prompts that the teacher writes itself: it goes on from its template up to the user's words.

    Without a template it begins texts, whose first tokens are the prompts.

    Raises:
        UsageError: the template does not show where the user's words stand.
    """
    tokenizer = vocabulary.tokenizer
    start = vocabulary.start
    if tokenizer.has_template:
        before, mark, _ = tokenizer.render_chat([{"role": "user", "content": _MARK}]).partition(_MARK)
        if not mark:
            raise UsageError("The chat template does not show the user's words: give prompts in a file instead.")
        start = tuple(tokenizer.encode_plain(before))
    if not start:
        raise UsageError("The teacher has nothing to begin a prompt with: no template and no BOS.")
    asked = dataclasses.replace(SamplingParams(), temperature=spec.written_temperature)
    rows = [{"id": f"written {i}", "prompt_ids": list(start)} for i in range(spec.written)]
    found = generate(
        Pair(model, _plain()), rows, max_new_tokens=spec.max_new_tokens, batch_size=spec.batch_size, seed=seed,
        sampling=asked, gamma=0,
    )  # fmt: skip
    prompts = {}
    for out in found:
        text = (out.text or "").strip()
        if out.error is not None or not text:
            continue
        if tokenizer.has_template:
            ids = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
        else:
            ids = (*start, *out.ids[: spec.prompt_tokens])
        prompts[text] = Example(text, ids, None)
    return list(prompts.values())
