"""SentencePiece tokenizers from GGUF: the ids that joining by score gives, and all text back."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import tiny_gguf
from copies import TIED
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specjax.checkpoint.gguf import convert
from specjax.errors import CheckpointError

SPECIAL = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<unk>": 2, "<turn>": 3}
ADDED = ["\n", "\n\n", "  ", "   ", "<b>"]
# By falling score.
PIECES = ["▁t", "he", "▁a", "an", "▁the", "ab", "ba", "aba", "bab", "▁▁▁x", "éé", "ll", "lo", "llo", "ell", "hello"]
CHARS = list("▁theanbxélo,.")
TOKENS = [*SPECIAL, *ADDED, *(f"<0x{i:02X}>" for i in range(256)), *PIECES, *CHARS]
TYPES = [*SPECIAL.values(), *[4] * len(ADDED), *[6] * 256, *[1] * (len(PIECES) + len(CHARS))]
SCORES = [-1000.0] * (len(SPECIAL) + len(ADDED) + 256) + [-float(i) for i in range(len(PIECES) + len(CHARS))]
IDS = {token: i for i, token in enumerate(TOKENS)}


def metadata(prefix: bool = False, **changes: Any) -> dict[str, Any]:
    """A GGUF file's tokenizer."""
    pad = 320 - len(TOKENS)
    types = [5 if prefix and "  " in token else kind for token, kind in zip(TOKENS, TYPES, strict=True)]
    return {
        "tokenizer__ggml__model": "llama",
        "tokenizer__ggml__pre": "default",
        "tokenizer__ggml__tokens": TOKENS + [f"[PAD{i}]" for i in range(pad)],
        "tokenizer__ggml__token_type": types + [5] * pad,
        "tokenizer__ggml__scores": SCORES + [-10000.0] * pad,
        "tokenizer__ggml__merges": None,
        "tokenizer__ggml__bos_token_id": IDS["<bos>"],
        "tokenizer__ggml__eos_token_id": IDS["<eos>"],
        "tokenizer__ggml__unknown_token_id": IDS["<unk>"],
        "tokenizer__ggml__add_space_prefix": prefix,
        **changes,
    }


def load(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[bool, Tokenizer]:
    """The tokenizer without and with a space put first."""
    made = {}
    with pytest.MonkeyPatch.context() as patch:
        for prefix in (False, True):
            place = tmp_path_factory.mktemp("spm")
            patch.setenv("SPECJAX_CACHE", str(place / "cache"))
            made[prefix] = load(convert(tiny_gguf.write(place / "x.gguf", TIED, **metadata(prefix))))
    return made


def by_score(text: str, added: list[str]) -> list[int]:
    """Join neighbours by score, as SentencePiece does; what is matched as it stands never joins."""
    text = text.replace(" ", "▁")
    whole = sorted((token.replace(" ", "▁") for token in added), key=len, reverse=True)
    names = {token.replace(" ", "▁") if TYPES[i] == 4 else token: i for token, i in IDS.items()}
    joined = {token: SCORES[i] for token, i in IDS.items() if TYPES[i] == 1}
    parts: list[tuple[str, bool]] = []
    while text:
        found = next((token for token in whole if text.startswith(token)), None)
        parts.append((found, True) if found else (text[0], False))
        text = text[len(parts[-1][0]) :]
    while True:
        pairs = [
            (-joined[a[0] + b[0]], i)
            for i, (a, b) in enumerate(itertools.pairwise(parts))
            if not a[1] and not b[1] and a[0] + b[0] in joined
        ]
        if not pairs:
            break
        i = min(pairs)[1]
        parts[i : i + 2] = [(parts[i][0] + parts[i + 1][0], False)]
    ids = []
    for part, _ in parts:
        ids += [names[part]] if part in names else [IDS[f"<0x{byte:02X}>"] for byte in part.encode()]
    return ids


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="▁ theabnxélo,.\n<z🙂"))
@example("hello  the   ana\n\n\n<b>ab")
@example("ababababa")
def test_ids_are_those_of_joining_by_score(tokenizers, text: str) -> None:
    got = tokenizers[False].encode(text, add_special_tokens=False).ids
    assert got == by_score(text, ADDED)
    assert tokenizers[False].decode(got) == text.replace("▁", " ")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet=" theabnxélo,.<z🙂", min_size=1))
def test_a_space_is_put_first_where_the_file_says_so(tokenizers, text: str) -> None:
    got = tokenizers[True].encode(text, add_special_tokens=False).ids
    assert got == by_score(" " + text, [])
    assert tokenizers[True].decode(got) == text


def test_special_tokens(tokenizers) -> None:
    tokenizer = tokenizers[False]
    ids = [IDS["<bos>"], IDS["he"], IDS["<turn>"], IDS["he"]]
    assert tokenizer.encode("he<turn>he").ids == ids  # BOS is put first unless the file says otherwise
    assert tokenizer.decode(ids) == "hehe"
    assert tokenizer.token_to_id("  ") is None
    assert tokenizer.id_to_token(IDS["  "]) == "▁▁"  # as the model's own tokenizer.json has it
    assert tokenizer.token_to_id("[PAD0]") is None
    assert tokenizer.get_vocab_size() == len(TOKENS)


def test_ends_and_config(cache, tmp_path) -> None:
    changes = {"tokenizer__ggml__add_bos_token": False, "tokenizer__ggml__add_eos_token": True}
    folder = convert(tiny_gguf.write(tmp_path / "x.gguf", TIED, **metadata(**changes)))
    assert load(folder).encode("he").ids == [IDS["he"], IDS["<eos>"]]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<bos>", "<eos>", "<unk>")


def test_without_byte_pieces(cache, tmp_path) -> None:
    types = [5 if kind == 6 else kind for kind in metadata()["tokenizer__ggml__token_type"]]
    file = tiny_gguf.write(tmp_path / "x.gguf", TIED, **metadata(tokenizer__ggml__token_type=types))
    assert load(convert(file)).encode("hezze", add_special_tokens=False).ids == [IDS["he"], IDS["<unk>"], IDS["e"]]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tokenizer__ggml__scores": None}, "scores are missing"),
        ({"tokenizer__ggml__scores": [0.0] * 5}, "scores are missing"),
        ({"tokenizer__ggml__tokens": ["a"]}, "tokens or token types are missing or do not match"),
        ({"tokenizer__ggml__remove_extra_whitespaces": True}, "remove_extra_whitespaces is not honoured"),
        ({"tokenizer__ggml__add_space_prefix": True}, "pieces of spaces"),
        ({"tokenizer__ggml__token_type": [5 if t == "é" else 1 for t in TOKENS] + [5] * (320 - len(TOKENS))},
         "characters that are no pieces themselves"),
    ],
)  # fmt: skip
def test_refusals(cache, tmp_path, changes: dict, part: str) -> None:
    with pytest.raises(CheckpointError, match=part) as caught:
        convert(tiny_gguf.write(tmp_path / "x.gguf", TIED, **metadata(**changes)))
    assert "\n" not in str(caught.value)
