"""A tokenizer trained on the corpus: byte-level BPE, in the files that a folder in Hugging Face layout has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specjax.checkpoint.files import staged, write_json
from specjax.distill.config import TokenizerSpec


def train_tokenizer(folder: Path, corpus: Iterable[str], spec: TokenizerSpec) -> Path:
    """Train a tokenizer and write ``tokenizer.json``, ``tokenizer_config.json`` and ``generation_config.json``.

    The end-of-text token has id 0 and also begins every text, so that a model is asked for a first word as it was
    trained to give one.

    Args:
        folder: must not exist.
        corpus: texts.
        spec: its size and its end-of-text token. A small corpus gives fewer ids.

    Raises:
        CheckpointError: the folder exists or cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=[spec.eos],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus, trainer)
    eos = backend.token_to_id(spec.eos)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{spec.eos} $A", pair=f"{spec.eos} $A $B", special_tokens=[(spec.eos, eos)]
    )
    with staged(folder) as temp:
        backend.save(str(temp / "tokenizer.json"))
        write_json(
            temp / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": spec.eos, "eos_token": spec.eos,
             "clean_up_tokenization_spaces": False},
        )  # fmt: skip
        write_json(temp / "generation_config.json", {"bos_token_id": eos, "eos_token_id": eos})
    return folder
