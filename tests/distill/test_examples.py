"""Rows of a file to prompts and completions: which tokens are trained on."""

from __future__ import annotations

import json

import pytest
import tiny
from tokenizers import Tokenizer as Backend

from specjax.distill.examples import Example, Vocabulary, held_out, read_examples, split
from specjax.distill.packing import LABELS, TOKENS, pack
from specjax.errors import UsageError
from specjax.text import Tokenizer, load_tokenizer

FOLDER = tiny.DATA / "tokenizers" / "byte_level"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary(template: str | None = CHATML) -> Vocabulary:
    backend = Backend.from_file(str(FOLDER / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|end|>"])
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    tokenizer = Tokenizer(backend, config=names, template=template)
    return Vocabulary(tokenizer, (backend.token_to_id("<|im_end|>"), backend.token_to_id("<|end|>")), None)


WORDS = vocabulary()


@pytest.fixture
def read(tmp_path):
    def run(*rows, vocabulary=WORDS):
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return read_examples(path, vocabulary)

    return run


def test_case_98_a_completion_of_n_tokens_has_n_labels_the_first_among_them(read):
    (example,) = read({"prompt": "Say it:", "completion": " a b c"})
    completion = example.completion
    assert completion is not None
    packed = pack([example], 64, seed=0)
    (row,) = packed.rows
    assert packed.num_labels == len(completion)
    labelled = [int(row[TOKENS, t + 1]) for t in range(63) if row[LABELS, t]]
    assert labelled == list(completion)


@pytest.mark.parametrize("ends", [0, 1])
def test_case_99_the_end_of_turn_token_is_in_the_loss(read, ends):
    """In a chat it is the template's own, whichever of the end-of-text ids that is, and nothing after it counts."""
    template = CHATML if ends == 0 else CHATML.replace("<|im_end|>", "<|end|>")
    words = vocabulary(template)
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (example,) = read({"messages": chat}, vocabulary=words)
    assert example.completion == (*words.tokenizer.encode_plain("yes"), words.eos_ids[ends])
    assert list(example.prompt) == words.tokenizer.encode_chat(chat[:1])
    packed = pack([example], 64, seed=0)
    (row,) = packed.rows
    last = max(t for t in range(64) if row[LABELS, t])
    assert row[TOKENS, last + 1] == words.eos_ids[ends]
    (text,) = read({"text": "abc"})
    assert text.completion is not None
    assert text.completion[-1] == vocabulary().eos_ids[0]


def test_each_turn_of_the_assistant_is_a_completion(read):
    chat = [{"role": role, "content": words} for role, words in
            (("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("user", "e"))]  # fmt: skip
    found = read({"messages": chat})
    assert [example.completion is None for example in found] == [False, False, True]
    assert len({example.key for example in found}) == 1
    words = vocabulary().tokenizer
    assert list(found[1].prompt) == words.encode_chat(chat[:3])
    assert list(found[2].prompt) == words.encode_chat(chat)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHATML.replace("<|im_end|>", "."), "ends the assistant's turn with none of the end-of-text ids"),
        (CHATML + "{% if not add_generation_prompt %}!{% endif %}", None),
        ("{% if not add_generation_prompt %}!{% endif %}" + CHATML, "cannot be told: give prompt and completion"),
        (None, "no chat template"),
    ],
)
def test_a_template_without_markers_is_handled_or_refused(read, template, message):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    if message is None:
        (example,) = read({"messages": chat}, vocabulary=vocabulary(template))
        assert example.completion == (*vocabulary().tokenizer.encode_plain("yes"), vocabulary().eos_ids[0])
        return
    with pytest.raises(UsageError, match=message):
        read({"messages": chat}, vocabulary=vocabulary(template))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected an object, got a list"),
        ({"id": 3}, "line 2: expected text, prompt or messages, got id"),
        ({"text": 5}, "line 2: text must be text"),
        ({"messages": "hi"}, "line 2: messages must be a list"),
    ],
)
def test_a_bad_line_is_named(read, row, message):
    with pytest.raises(UsageError, match=message):
        read({"text": "good"}, row)


def test_a_text_begins_as_the_tokenizer_begins_texts(read):
    words = vocabulary()
    with_bos = Vocabulary(words.tokenizer, words.eos_ids, 7)
    (example,) = read({"text": "abc", "prompt": "not in it"}, vocabulary=with_bos)
    assert example.prompt == (7,)
    assert example.key == "not in it"
    assert example.begun(2) == (7, *words.tokenizer.encode_plain("abc")[:2])


def test_the_split_is_by_prompt_whatever_the_order():
    examples = [Example(f"prompt {i // 3}", (1,), (i,)) for i in range(300)]
    train, held = split(examples, 0.2)
    assert not {e.key for e in train} & {e.key for e in held}
    assert len(train) + len(held) == 300
    assert 30 <= len(held) <= 90
    assert {e.key for e in split(examples[::-1], 0.2)[1]} == {e.key for e in held}
    assert all(held_out(e.key, 0.3) for e in held)  # a larger share holds out more, never others
    with pytest.raises(UsageError, match="held out for validation"):
        split(examples[:1], 0.5)


def test_the_fixture_has_no_end_of_text_by_itself():
    tokenizer = load_tokenizer(FOLDER)
    assert tokenizer is not None
    assert tokenizer.encode_plain("ab") == tokenizer.spellings("ab")[0]
