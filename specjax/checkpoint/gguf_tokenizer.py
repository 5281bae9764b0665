"""A GGUF file's tokenizer metadata, rebuilt as the files of a Hugging Face folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specjax.checkpoint import gguf_sentencepiece
from specjax.checkpoint.files import write_json
from specjax.errors import CheckpointError

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPECIAL_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before byte-level BPE.

    Attributes:
        pattern: the regular expression of a Split before the byte level, or None for GPT-2's own.
        digits: each digit stands alone.
        nfc: text is NFC-normalised first.
        whole_words: a word that is a token is taken as it is, whatever the merges say.
        add_bos: whether BOS is put first when the metadata does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _cl100k(numbers: str) -> str:
    """The pattern that Llama 3 and Qwen 2 share but for the length of a run of digits."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + numbers
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = PreTokenizer(pattern=_cl100k(r"\p{N}{1,3}"), whole_words=True, add_bos=True)
_QWEN2 = PreTokenizer(pattern=_cl100k(r"\p{N}"), nfc=True)

# By tokenizer.ggml.pre. "default" is what a converter writes when it does not know: not in here, since
# nobody can say which text it would cut wrongly.
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "gpt-2": PreTokenizer(),
    "gpt2": PreTokenizer(),
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": dataclasses.replace(_QWEN2, add_bos=True),
}


def write_tokenizer(folder: Path, get: Callable[[str], Any], source: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, generation_config.json and the chat template.

    Writes only generation_config.json when the file has no tokenizer at all.

    Args:
        folder: where to.
        get: metadata by key; None when absent.
        source: the GGUF file, for messages.

    Raises:
        CheckpointError: a tokenizer model or pre-tokenizer that is not known, or metadata that is inconsistent.
    """
    model = get("tokenizer.ggml.model")
    generation: dict[str, Any] = {}
    if (bos := get("tokenizer.ggml.bos_token_id")) is not None:
        generation["bos_token_id"] = int(bos)
    stops = [get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if eos := list(dict.fromkeys(int(i) for i in stops if i is not None)):
        generation["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    write_json(folder / "generation_config.json", generation)
    if model in (None, "none", "no_vocab"):
        return
    if model not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{source}: tokenizer model {model!r} is not supported from GGUF; supported: gpt2 (byte-level BPE) and "
            "llama (SentencePiece BPE). Use the model's folder in Hugging Face layout instead."
        )
    tokens, types = get("tokenizer.ggml.tokens"), get("tokenizer.ggml.token_type")
    if not tokens or (types is not None and len(types) != len(tokens)):
        raise CheckpointError(f"{source}: the tokenizer's tokens or token types are missing or do not match.")
    types = types or [_NORMAL] * len(tokens)
    if model == "llama":
        kinds = {
            "normal": _ids(types, _NORMAL),
            "added": _ids(types, _UNKNOWN, _CONTROL, _USER_DEFINED),
            "special": _ids(types, _UNKNOWN, _CONTROL),
            "unused": _ids(types, _UNUSED),
        }
        post = _post_processor(tokens, True, get)
        gguf_sentencepiece.build(tokens, kinds, get, source, post).save(str(folder / "tokenizer.json"))
    else:
        _byte_level(tokens, types, get, source).save(str(folder / "tokenizer.json"))
    _write_config(folder, tokens, get)


def _ids(types: list[int], *wanted: int) -> set[int]:
    return {i for i, kind in enumerate(types) if kind in wanted}


def _byte_level(tokens: list[str], types: list[int], get: Callable[[str], Any], source: Path) -> Any:
    name = get("tokenizer.ggml.pre")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise CheckpointError(
            f"{source}: pre-tokenizer {name!r} is not supported; known: {', '.join(PRE_TOKENIZERS)}. "
            "Use the model's folder in Hugging Face layout instead."
        )
    merges = get("tokenizer.ggml.merges")
    if merges is None:
        raise CheckpointError(f"{source}: the tokenizer's merges are missing.")
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    # Unused entries pad the embedding; they are no part of the vocabulary.
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    try:
        pairs = [_split_merge(merge) for merge in merges]
        bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre.whole_words)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{source}: the tokenizer's merges do not fit its tokens ({error}).") from error
    tokenizer = Tokenizer(bpe)
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    stages: list[Any] = []
    if pre.digits:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        stages.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    stages.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(stages)
    tokenizer.decoder = decoders.ByteLevel()
    byte_level = processors.ByteLevel(trim_offsets=False)
    ends = _post_processor(tokens, pre.add_bos, get)
    tokenizer.post_processor = byte_level if ends is None else processors.Sequence([byte_level, ends])
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _split_merge(merge: str) -> tuple[str, str]:
    left, right = merge[:1], merge[1:]
    head, _, tail = right.partition(" ")
    return left + head, tail


def _post_processor(tokens: list[str], default_bos: bool, get: Callable[[str], Any]) -> Any:
    """Return what puts BOS first and EOS last where the metadata asks for them; None where it does not."""
    from tokenizers import processors

    ends: dict[str, int] = {}
    template = ["$A"]
    add_bos = get("tokenizer.ggml.add_bos_token")
    bos, eos = get("tokenizer.ggml.bos_token_id"), get("tokenizer.ggml.eos_token_id")
    if (default_bos if add_bos is None else add_bos) and bos is not None:
        template.insert(0, "$BOS")
        ends["$BOS"] = int(bos)
    if get("tokenizer.ggml.add_eos_token") and eos is not None:
        template.append("$EOS")
        ends["$EOS"] = int(eos)
    if not ends:
        return None
    names = {mark: tokens[i] for mark, i in ends.items()}
    single = [names.get(part, part) for part in template]
    pair = [*single, *(names[p] + ":1" if p in names else "$B:1" for p in template)]
    return processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(names[mark], i) for mark, i in ends.items()]
    )


def _write_config(folder: Path, tokens: list[str], get: Callable[[str], Any]) -> None:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL_KEYS.items():
        index = get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            config[name] = tokens[index]
    for key in ("add_bos_token", "add_eos_token"):
        if (value := get(f"tokenizer.ggml.{key}")) is not None:
            config[key] = bool(value)
    if template := get("tokenizer.chat_template"):
        config["chat_template"] = template
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")
    write_json(folder / "tokenizer_config.json", config)
