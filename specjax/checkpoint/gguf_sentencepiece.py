"""A SentencePiece BPE tokenizer, rebuilt from what GGUF keeps of it: pieces, scores and types.

SentencePiece joins, again and again, the two neighbours whose joint piece has the highest score. GGUF has no merges, so
they are read off the vocabulary: every way to cut a piece into two pieces, ranked by the score of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.errors import CheckpointError

SPACE = "\u2581"
_REFUSED = ("precompiled_charsmap", "remove_extra_whitespaces")


def build(
    tokens: list[str], kinds: dict[str, set[int]], get: Callable[[str], Any], source: Path, post_processor: Any
) -> Any:
    """Return the tokenizer.

    Args:
        tokens: pieces by id.
        kinds: ids by kind: "normal", "added" (matched before anything else), "special" (of those, the ones that
            are no text), and "unused".
        get: metadata by key; None when absent.
        source: the GGUF file, for messages.
        post_processor: puts BOS and EOS where they belong.

    Raises:
        CheckpointError: scores that are missing, or a normalisation that is not honoured.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    scores = get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise CheckpointError(f"{source}: the tokenizer's scores are missing or do not match its tokens.")
    for key in _REFUSED:
        if get(f"tokenizer.ggml.{key}"):
            raise CheckpointError(f"{source}: tokenizer.ggml.{key} is not honoured. Use the model's own folder.")
    # A piece that is matched as it stands is kept with plain spaces in GGUF, and with marks everywhere else.
    names = [token.replace(" ", SPACE) if i in kinds["added"] else token for i, token in enumerate(tokens)]
    vocab = {name: i for i, name in enumerate(names) if i not in kinds["unused"]}
    ranked = [(names[i], scores[i]) for i in sorted(kinds["normal"])]
    pieces = {name for name, _ in ranked}
    if lost := sorted({char for name in pieces for char in name} - pieces):
        raise CheckpointError(
            f"{source}: the tokenizer has pieces with characters that are no pieces themselves ({lost[:5]}), "
            "which cannot be honoured. Use the model's own folder."
        )
    prefix = get("tokenizer.ggml.add_space_prefix") is not False
    spaced = [names[i] for i in sorted(kinds["added"] - kinds["special"]) if SPACE in names[i]]
    if prefix and spaced:
        raise CheckpointError(
            f"{source}: pieces of spaces that are matched as they stand ({spaced[:3]}) cannot be honoured together "
            "with a space put first. Use the model's own folder."
        )
    unknown = get("tokenizer.ggml.unknown_token_id")
    model = models.BPE(
        vocab=vocab,
        merges=_merges(ranked, vocab, pieces),
        unk_token=None if unknown is None else names[unknown],
        fuse_unk=True,
        byte_fallback=all(f"<0x{byte:02X}>" in vocab for byte in range(256)),
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    stages = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*stages, decoders.Strip(" ", 1, 0)] if prefix else stages)
    if post_processor is not None:
        tokenizer.post_processor = post_processor
    tokenizer.add_tokens(
        [
            # Text is matched after its spaces are marked; what is no text, before. A space put first would be put
            # before the pieces to match, too.
            AddedToken(names[i], special=i in kinds["special"], normalized=not (prefix or i in kinds["special"]))
            for i in sorted(kinds["added"])
        ]
    )
    return tokenizer


def _merges(ranked: list[tuple[str, float]], vocab: dict[str, int], pieces: set[str]) -> list[tuple[str, str]]:
    """Return every cut of a piece into two, the highest score first."""
    found = []
    for name, score in ranked:
        for cut in range(1, len(name)):
            left, right = name[:cut], name[cut:]
            if left in pieces and right in pieces:
                found.append((-score, vocab[left], vocab[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]
