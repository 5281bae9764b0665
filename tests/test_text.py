"""The tokenizer, the chat template, streaming decode and stop strings, on three tiny tokenizers."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.errors import CheckpointError, RowError
from specjax.text import StopFinder, Tokenizer, load_tokenizer

FOLDERS = Path(__file__).parent / "data" / "tokenizers"
USER = [{"role": "user", "content": "hello"}]


def backend(name: str):
    from tokenizers import Tokenizer as Backend

    return Backend.from_file(str(FOLDERS / name / "tokenizer.json"))


def load(name: str) -> Tokenizer:
    tokenizer = load_tokenizer(FOLDERS / name)
    assert tokenizer is not None
    return tokenizer


def with_decoder(build) -> Tokenizer:
    """Return the byte-fallback tokenizer with another decoder."""
    from tokenizers import decoders

    changed = backend("metaspace")
    changed.decoder = build(decoders)
    return Tokenizer(changed)


TOKENIZERS = {
    "byte-level": load("byte_level"),
    "sentencepiece": load("sentencepiece"),
    "always": load("metaspace"),
    "first": with_decoder(lambda d: d.Sequence([d.ByteFallback(), d.Metaspace(prepend_scheme="first")])),
    "never": with_decoder(lambda d: d.Sequence([d.ByteFallback(), d.Metaspace(prepend_scheme="never")])),
    "strip two": with_decoder(
        lambda d: d.Sequence([d.Sequence([d.Replace("▁", " "), d.ByteFallback()]), d.Fuse(), d.Strip(" ", 2, 0)])
    ),
    "no strip": with_decoder(lambda d: d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse()])),
    "byte-level, fused": with_decoder(lambda d: d.Sequence([d.ByteLevel(), d.Fuse()])),
    "no decoder": with_decoder(lambda d: None),
    # These cannot be cut into pieces: a later token changes what is before it.
    "word pieces": with_decoder(lambda d: d.WordPiece(prefix="l", cleanup=True)),
    "cleanup": with_decoder(lambda d: d.Sequence([d.Fuse(), d.Replace("▁.", ".")])),
}
STREAMED = [name for name in TOKENIZERS if name not in ("word pieces", "cleanup")]


def interesting_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Ids of real text, lone byte tokens, spaces, special tokens and ids of no token, mixed."""
    texts = ["hello 你好🙂 he", "  hello", " he . a", "🙂", "<x y>▁ñ x"]
    runs = [tokenizer.encode(text) for text in texts]
    few = sorted({token_id for run in runs for token_id in run})
    one = st.one_of(st.sampled_from(few), st.integers(0, tokenizer.vocab_size + 2))
    parts = st.lists(st.one_of(st.lists(one, max_size=6), st.sampled_from(runs)), max_size=4)
    return parts.map(lambda lists: [token_id for ids in lists for token_id in ids])


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_split_streams_the_full_decode(name):
    tokenizer = TOKENIZERS[name]

    @settings(max_examples=60, deadline=None)
    @given(interesting_ids(tokenizer), st.lists(st.integers(0, 5), max_size=12))
    def check(ids, sizes):
        whole, stream, shown, place = tokenizer.decode(ids), tokenizer.stream(), "", 0
        for size in [*sizes, len(ids)]:
            shown += stream.push(ids[place : place + size])
            place += size
            assert whole.startswith(shown)
            assert shown + stream.tail == tokenizer.decode(ids[:place])
        assert shown + stream.flush() == whole

    check()


def test_chunks_of_a_sentencepiece_tokenizer_joined_keep_their_spaces():
    """Case 44."""
    tokenizer = load("sentencepiece")
    text = "he said hello  he .  a"
    ids, stream = tokenizer.encode(text), tokenizer.stream()
    chunks = [stream.push([token_id]) for token_id in ids]
    assert "".join(chunks) + stream.flush() == tokenizer.decode(ids) == text


@pytest.mark.parametrize("name", STREAMED)
def test_text_comes_while_ids_come(name):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("hello he. a")
    before_last = tokenizer.stream().push(ids[:-1])
    assert before_last
    assert before_last == tokenizer.decode(ids[:-1])


def test_a_character_in_parts_waits_for_its_last_byte():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("你🙂a")
    stream = tokenizer.stream()
    assert [stream.push([i]) for i in ids] == ["", "你", "", "", "🙂", "a"]
    cut = tokenizer.stream()
    assert cut.push(ids[:4]) == "你"
    assert cut.flush() == "\ufffd"


def test_a_byte_run_is_not_shown_and_then_taken_back():
    tokenizer = TOKENIZERS["sentencepiece"]
    good = tokenizer.encode("好")[1:]
    assert [tokenizer.decode([i]) for i in good] != ["好"]
    bad = [*good, tokenizer.encode("好")[-1]]
    assert tokenizer.decode(good) == "好"
    assert "好" not in tokenizer.decode(bad)  # the library makes the whole run U+FFFD
    stream = tokenizer.stream()
    assert stream.push(bad) == ""
    assert stream.flush() == tokenizer.decode(bad)


def test_a_flushed_stream_takes_no_more():
    stream = TOKENIZERS["byte-level"].stream()
    stream.push([40])
    stream.flush()
    assert stream.flush() == ""
    with pytest.raises(RuntimeError, match="flushed"):
        stream.push([41])


def run_finder(tokenizer: Tokenizer, ids: list[int], stops: list[str], sizes: list[int]) -> tuple[str, StopFinder, str]:
    """Return the text streamed before the flush, the finder and all the text."""
    finder, shown, place = StopFinder(stops, tokenizer.stream()), "", 0
    for size in [*sizes, len(ids)]:
        shown += finder.push(ids[place : place + size])
        place += size
    whole = shown + finder.flush()
    assert finder.text == whole
    return shown, finder, whole


@pytest.mark.parametrize("name", ["byte-level", "sentencepiece", "always", "cleanup"])
def test_stops_are_where_the_decoded_text_says(name):
    tokenizer = TOKENIZERS[name]
    stops = st.lists(st.sampled_from(["e", "he", "lo", "llo ", "你", "你好", "🙂", " ", "o 你", "l好"]), max_size=3)

    @settings(max_examples=80, deadline=None)
    @given(interesting_ids(tokenizer), stops, st.lists(st.integers(0, 5), max_size=12))
    def check(ids, stops, sizes):
        _, finder, text = run_finder(tokenizer, ids, stops, sizes)
        for place in range(len(ids)):
            seen = tokenizer.decode(ids[: place + 1])
            ends = [(seen.find(stop) + len(stop), seen.find(stop), stop) for stop in stops if stop in seen]
            if ends:
                _, start, stop = min(ends)
                assert (text, finder.stop, finder.stop_index) == (seen[:start], stop, place)
                return
        assert (text, finder.stop, finder.stop_index) == (tokenizer.decode(ids), None, None)

    check()


def test_a_stop_in_the_middle_of_a_block():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("hello. he hello")
    finder = StopFinder([". h"], tokenizer.stream())
    assert finder.push(ids) == "hello"
    assert finder.flush() == ""
    kept = ids[: finder.stop_index + 1]
    assert tokenizer.decode(kept) == "hello. he"  # ids keep the token that completes the stop
    assert tokenizer.decode(kept[:-1]) == "hello."


def test_a_one_character_stop_in_the_first_token_of_a_block():
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("hello he he he he")
    finder = StopFinder(["e"], tokenizer.stream())
    assert finder.push(ids) == "h"
    assert finder.stop_index == 0
    assert finder.push(ids) == ""
    assert finder.stop_index == 0


def test_what_may_begin_a_stop_is_kept_back():
    tokenizer = TOKENIZERS["byte-level"]
    finder = StopFinder(["heh", "ea"], tokenizer.stream())
    spell = [tokenizer.encode(char)[0] for char in "hhea"]
    assert [finder.push([i]) for i in spell] == ["", "h", "", "h"]
    assert finder.stop == "ea"
    finder = StopFinder(["heh"], tokenizer.stream())
    assert [finder.push([i]) for i in spell] == ["", "h", "", "hea"]
    finder = StopFinder(["heh"], tokenizer.stream())
    assert finder.push(spell[:3]) + "|" + finder.flush() == "h|he"


@pytest.mark.parametrize("stop", ["", "a\ufffd"])
def test_stops_that_cannot_be_found_are_refused(stop):
    with pytest.raises(ValueError, match="stop string"):
        StopFinder([stop], TOKENIZERS["byte-level"].stream())


def test_raw_text_has_the_tokenizers_own_special_tokens():
    assert load("sentencepiece").encode("he")[0] == 1
    assert load("sentencepiece").encode("") == [1]
    assert load("byte_level").encode("") == []
    assert load("byte_level").decode(load("byte_level").encode("<|im_start|>he<|im_end|>")) == "he"


@pytest.mark.parametrize(("name", "bos", "wanted"), [("sentencepiece", "<s>", 1), ("byte_level", "<|im_start|>", 0)])
def test_add_bos_token_is_honoured(name, bos, wanted):
    for add in (True, False):
        tokenizer = Tokenizer(backend(name), config={"bos_token": bos, "add_bos_token": add})
        assert tokenizer.encode("hello he").count(wanted) == int(add)


def test_truncation_and_padding_in_the_file_are_off():
    cut = backend("byte_level")
    cut.enable_truncation(3)
    cut.enable_padding(length=8)
    assert Tokenizer(cut).decode(Tokenizer(cut).encode("hello he a")) == "hello he a"
    assert len(Tokenizer(cut).encode("a")) == 1


def test_sizes_and_names():
    tokenizer = load("byte_level")
    assert tokenizer.vocab_size == backend("byte_level").get_vocab_size() == 269
    assert (tokenizer.bos_id, load("sentencepiece").bos_id, Tokenizer(backend("metaspace")).bos_id) == (0, 1, None)
    assert (tokenizer.has_template, load("metaspace").has_template) == (True, False)


def test_text_that_is_no_unicode_is_a_row_error():
    with pytest.raises(RowError, match="character 1"):
        load("byte_level").encode("a\udcff")


def test_differences_name_the_ids():
    ours = load("byte_level")
    assert ours.differences(load("byte_level")) == []
    content = json.loads((FOLDERS / "byte_level" / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["hello"], vocab["Ġhe"] = vocab["Ġhe"], vocab["hello"]
    from tokenizers import Tokenizer as Backend

    swapped = Tokenizer(Backend.from_str(json.dumps(content)))
    assert swapped.vocab_size == ours.vocab_size
    first, second = sorted((vocab["hello"], vocab["Ġhe"]))
    assert ours.differences(swapped) == [f"id {first}: 'Ġhe' and 'hello'", f"id {second}: 'hello' and 'Ġhe'"]
    assert ours.differences(swapped, limit=1)[1:] == ["and 1 other ids"]
    more = backend("byte_level")
    more.add_tokens(["extra"])
    assert ours.differences(Tokenizer(more)) == ["id 269: no token and 'extra'"]
    assert Tokenizer(more).differences(ours) == ["id 269: 'extra' and no token"]


def test_chat_golden():
    assert load("byte_level").render_chat(USER) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [*USER, {"role": "assistant", "content": "he"}, {"role": "user", "content": "a"}]
    assert load("sentencepiece").render_chat(turns) == "<s>[INST] hello [/INST] he</s>[INST] a [/INST]"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_a_templated_prompt_has_the_template_bos_only(name):
    tokenizer = load(name)
    ids = tokenizer.encode_chat(USER)
    assert ids == backend(name).encode(tokenizer.render_chat(USER), add_special_tokens=False).ids
    assert ids[0] == tokenizer.bos_id
    assert ids[1] != tokenizer.bos_id
    if name == "sentencepiece":
        assert ids.count(tokenizer.bos_id) == 1
        assert tokenizer.encode(tokenizer.render_chat(USER)).count(tokenizer.bos_id) == 2


def chat(template, messages=USER, **config) -> str:
    return Tokenizer(backend("metaspace"), config={"chat_template": template, **config}).render_chat(messages)


def test_template_forms():
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ bos_token }}|"}]
    assert chat(named) == "D|"
    assert chat(named, bos_token={"content": "<s>"}) == "D<s>|"
    assert chat(named[:1]) == "T"
    with pytest.raises(RowError, match=r"named ones \['tool_use', 'x'\]"):
        chat([named[0], {"name": "x", "template": "X"}])
    with pytest.raises(CheckpointError, match="name and template"):
        chat(["text"])


def test_template_environment():
    cut = "{% if loop.index > 1 %}\n{% break %}\n{% endif %}\n"
    block = "  {% for m in messages %}\n  " + cut + "{{ m.content }}\n{% endfor %}\n!"
    assert chat(block, USER * 3) == "hello\n!"
    assert chat("{% generation %}{{ messages[0].content }}{% endgeneration %}.") == "hello."
    assert chat("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == json.dumps(
        [{"role": "user", "content": "<é>"}], ensure_ascii=False
    )
    assert chat("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert chat("{{ tools is none }}{{ add_generation_prompt }}") == "TrueTrue"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no\nsystem') }}", "refuses these messages: no system"),
        ("{% if %}", "cannot be read"),
        ("{{ messages[0].content + 1 }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses these messages"),
    ],
)
def test_template_faults_are_one_line(template, message):
    with pytest.raises(RowError, match=message) as caught:
        chat(template)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "at least one"),
        (["hello"], r"messages\[0\] must be an object"),
        ([*USER, {"role": "user"}], r"messages\[1\].content must be text, got None"),
        ([{"role": 1, "content": ""}], r"messages\[0\].role must be text, got 1"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "x" * 99}]}],
            r"content must be text, got .{57}\.\.\.\.$",
        ),
        ([{**USER[0], "tool_calls": []}], "'tool_calls'"),
    ],
)
def test_messages_of_the_wrong_form(messages, message):
    with pytest.raises(RowError, match=message):
        load("byte_level").encode_chat(messages)


def test_fields_that_the_template_uses_reach_it():
    assert chat("{{ messages[0].name }}", [{**USER[0], "name": "Ada"}]) == "Ada"


def test_no_template_says_what_to_do():
    with pytest.raises(RowError, match="--raw"):
        load("metaspace").encode_chat(USER)


def test_loading_a_folder(tmp_path):
    assert load_tokenizer(tmp_path) is None
    shutil.copytree(FOLDERS / "byte_level", tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer_config.json").unlink()
    plain = load_tokenizer(str(tmp_path))
    assert plain is not None
    assert (plain.has_template, plain.bos_id) == (False, None)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}')
    (tmp_path / "chat_template.json").write_text('{"chat_template": "{{ bos_token }}!"}')
    old = load_tokenizer(tmp_path)
    assert old is not None
    assert (old.bos_id, old.render_chat(USER)) == (0, "<|im_start|>!")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", b'{"model": '),
        ("tokenizer_config.json", b'{"bos'),
        ("tokenizer_config.json", b"[1]"),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_broken_file_is_named(tmp_path, file, content):
    shutil.copytree(FOLDERS / "byte_level", tmp_path, dirs_exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
