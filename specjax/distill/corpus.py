"""Everything that a run reads: the target, the tokenizer, rows to train on and prompts to validate with."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from specjax.checkpoint.files import read_json, write_json
from specjax.checkpoint.hf import CONFIG, TOKENIZER_FILES, special_ids
from specjax.distill import responses, validate
from specjax.distill.config import Recipe
from specjax.distill.examples import Example, Vocabulary, held_out, read_examples, split, texts
from specjax.distill.packing import pack
from specjax.distill.shards import Shards, write_shards
from specjax.distill.student import Base, ModelStudent, Student
from specjax.distill.tokenizer import train_tokenizer
from specjax.errors import CheckpointError, UsageError
from specjax.pair import Model, load_model
from specjax.text import load_tokenizer
from specjax.types import Params

Say = Callable[[str], None]


class Corpus:
    """A run's data.

    Args:
        recipe: what to read.
        folder: of the run: shards and a trained tokenizer are kept there.
        say: called with lines of news.

    Raises:
        UsageError: data or tokenizer cannot be used.
        CheckpointError: the teacher cannot be read.
    """

    def __init__(self, recipe: Recipe, folder: Path, say: Say):
        self._recipe, self._folder, self._say = recipe, folder, say
        self._data = Path(recipe.data).expanduser().resolve()
        if not self._data.is_file():
            raise UsageError(
                f"The data {self._data} is not a file; expected JSON Lines (data in the recipe, or --data)."
            )
        self._shards: dict[str, Shards] = {}
        self.target: Model | None = None
        if recipe.has_teacher:
            self.target = load_model(recipe.teacher, dtype=recipe.teacher_dtype, progress=True)
        self.base = self._base()
        self.vocabulary = Vocabulary(self.base.tokenizer, self.base.eos_ids, self.base.bos_id)

    def _base(self) -> Base:
        recipe = self._recipe
        if self.target is not None:
            from specjax.checkpoint import inspect_checkpoint

            folder, target = inspect_checkpoint(recipe.teacher).folder, self.target
            if target.tokenizer is None:
                raise UsageError(f"{recipe.teacher} has no tokenizer: a draft is trained on its texts.")
            return Base(target, target.tokenizer, target.vocab_size, target.eos_ids, target.bos_id, folder)
        folder = self._folder / "tokenizer"
        if recipe.tokenizer is None:
            folder = Path(recipe.student.init).expanduser()
        elif not folder.is_dir():
            train_tokenizer(folder, texts(self._data), recipe.tokenizer)
        tokenizer = load_tokenizer(folder)
        if tokenizer is None:
            raise CheckpointError(f"{folder} has no tokenizer.")
        eos, bos = special_ids(folder, read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {})
        return Base(None, tokenizer, tokenizer.vocab_size, eos, bos, folder)

    @cached_property
    def _examples(self) -> tuple[list[Example], list[Example]]:
        return split(read_examples(self._data, self.vocabulary), self._recipe.validation.share)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self._data.read_bytes()).hexdigest()

    def shards(self, name: str) -> Shards:
        """Return the rows of source "data" or "teacher", made once and kept in the run's folder.

        Raises:
            UsageError: there is nothing to make them of.
        """
        if name in self._shards:
            return self._shards[name]
        recipe, seed = self._recipe, self._recipe.responses.seed
        about = {
            "source": name, "data": self._digest, "vocabulary": self._vocabulary_digest, "teacher": recipe.teacher,
            "length": recipe.train.length, "share": recipe.validation.share,
            "responses": msgspec.structs.asdict(recipe.responses) if name == "teacher" else {"seed": seed},
        }  # fmt: skip
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
        kept = Path(recipe.shards).expanduser().resolve() if recipe.shards else self._folder / "data"
        folder = kept / f"{name}-{digest}"
        if not folder.is_dir():
            examples = self._examples[0] if name == "data" else self._answered()
            packed = pack(examples, recipe.train.length, seed=seed)
            if not packed.num_labels:
                raise UsageError(f"{self._data} has no completions to train on: use a mix of teacher or student.")
            write_shards(folder, packed, about)
        found = self._shards[name] = Shards(folder)
        self._say(
            f"{name}: {len(found)} rows of {recipe.train.length}, {found.manifest['labels']:,} tokens to train on"
        )
        return found

    @cached_property
    def _vocabulary_digest(self) -> str:
        path = self.base.folder / "tokenizer.json"
        return hashlib.sha256(path.read_bytes()).hexdigest()

    def _answered(self) -> list[Example]:
        """Return the teacher's answers to the training prompts, and to those that it writes itself."""
        assert self.target is not None
        spec, seed = self._recipe.responses, self._recipe.responses.seed
        prompts = unique(self._examples[0], spec.prompt_tokens)[: spec.limit or None]
        if spec.written:
            written = responses.write_prompts(self.target, self.vocabulary, spec, seed=seed + 1)
            prompts += [example for example in written if not held_out(example.key, self._recipe.validation.share)]
        self._say(f"teacher: answering {len(prompts)} prompts")
        return responses.answer(self.target, prompts, spec, seed=seed)

    def draw_folder(self, draw: int) -> Path:
        """Return where a draw of the student is kept."""
        return self._folder / "data" / f"student-{draw:05d}"

    def draw(self, student: Student, params: Callable[[], Params], draw: int) -> Shards:
        """Return the student's answers of one draw: other prompts in each.

        Raises:
            UsageError: the student does not decode by itself.
        """
        folder = self.draw_folder(draw)
        if folder.is_dir():
            shutil.rmtree(folder)  # of a run that was resumed from before it
        if not isinstance(student, ModelStudent):
            raise UsageError("Only a model writes texts by itself: leave student out of the mix.")
        recipe, spec = self._recipe, self._recipe.responses
        prompts = unique(self._examples[0], spec.prompt_tokens)
        rng = np.random.default_rng([recipe.train.seed, draw])
        chosen = [prompts[i] for i in rng.permutation(len(prompts))[: spec.prompts_per_draw]]
        dtype = recipe.train.dtype
        answered = responses.answer(student.model(params(), dtype), chosen, spec, seed=recipe.train.seed + draw)
        packed = pack(answered, recipe.train.length, seed=draw)
        write_shards(folder, packed, {"source": "student", "draw": draw})
        return Shards(folder)

    def held_rows(self) -> np.ndarray:
        """Return the held-out texts, packed; none where the file has prompts only."""
        return self._held.rows

    @cached_property
    def _held(self):
        train = self._recipe.train
        return pack(self._examples[1], train.length, seed=0)

    def validation_prompts(self) -> list[tuple[int, ...]]:
        """Return held-out prompts for the decoder."""
        recipe = self._recipe
        room = self.target.max_positions if self.target else recipe.train.length
        found = validate.prompts_of(self._examples[1], recipe.validation, recipe.responses.prompt_tokens)
        return [prompt for prompt in found if 0 < len(prompt) < room]

    def head_ids(self, count: int) -> np.ndarray | None:
        """Return the ``count`` tokens that are trained on most often, and the end-of-text ids; None for 0.

        Raises:
            UsageError: more than there are.
        """
        if not count:
            return None
        size = self.base.vocab_size
        if count > size:
            raise UsageError(f"student.head_ids is {count}; the vocabulary has {size}.")
        source = "data" if self._recipe.mixes[0].data else "teacher"
        frequency = self.shards(source).counts(size)
        frequency[list(self.base.eos_ids)] = frequency.max() + 1
        return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)

    def counts(self) -> dict[str, Any]:
        """Return what the card says of the data."""
        train, held = self._examples
        found: dict[str, Any] = {"rows_to_train_on": len(train), "rows_held_out": len(held)}
        found |= {f"tokens_of_{name}": f"{shards.manifest['labels']:,}" for name, shards in self._shards.items()}
        return found

    def describe_steps(self, folder: Path, student: Student) -> None:
        """Put config and tokenizer beside the checkpoints of a model, so that a step is a WHERE like another."""
        if not isinstance(student, ModelStudent):
            return
        write_json(folder / CONFIG, student.hf_config)
        for name in TOKENIZER_FILES:
            if (self.base.folder / name).is_file():
                shutil.copyfile(self.base.folder / name, folder / name)


def unique(examples: list[Example], prompt_tokens: int) -> list[Example]:
    """Return one example for each different prompt, in their order."""
    return list({example.begun(prompt_tokens): example for example in reversed(examples)}.values())[::-1]
