"""A pair on the toy with a tokenizer of eight letters, for calls from prompts to texts."""

from __future__ import annotations

import dataclasses

import tiny as t
import tokenizers
import toys

from specjax.pair import Pair
from specjax.sampling import SamplingParams
from specjax.text import Tokenizer

VOCAB = 8
LETTERS = "abcdefgh"
TABLE = toys.table(VOCAB, seed=4, sharpness=1.5)
DRAFT = toys.noisy(TABLE, 1.0, seed=5)
HOT = SamplingParams(temperature=1.0)


def letters() -> Tokenizer:
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[])
    )
    backend.decoder = tokenizers.decoders.Fuse()
    return Tokenizer(backend)


TOKENIZER = letters()


@dataclasses.dataclass(frozen=True)
class Fn(toys.MarkovFn):
    """A Markov model that the pair builder takes for a decoder."""

    dtype: str = "float32"

    @property
    def config(self):
        return dataclasses.replace(t.tiny().fn.config, max_positions=64, vocab_size=self.vocab)


def pair(draft="model", *, table=TABLE, draft_table=DRAFT, eos=(), bos=None, tokenizer=TOKENIZER) -> Pair:
    target = t.Tiny(Fn(VOCAB), table)  # type: ignore[arg-type]
    small = t.Tiny(Fn(VOCAB), draft_table) if draft == "model" else draft  # type: ignore[arg-type]
    return t.pair(target, small, tokenizer=tokenizer, vocab=VOCAB, eos=eos, bos=bos)


def text_of(ids) -> str:
    return "".join(LETTERS[i] for i in ids)
