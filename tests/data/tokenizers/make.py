"""Makes the tiny tokenizers beside this file: ``python tests/data/tokenizers/make.py``.

byte_level: BPE over bytes, as GPT-2, Llama 3, Qwen and SmolLM2 have it; merges cut inside characters.
sentencepiece: byte fallback and a strip at the start, as Llama 2 and Mistral have it; BOS on raw text.
metaspace: byte fallback and a Metaspace decoder.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

HERE = Path(__file__).parent
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {{- "[INST] " + message.content + " [/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- " " + message.content + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant\\nroles are supported") }}
    {%- endif %}
{%- endfor %}"""


def byte_level() -> Tokenizer:
    """Build the byte-level one."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {char: i for i, char in enumerate(["<|im_start|>", "<|im_end|>", *sorted(split.alphabet())])}
    merges = []
    for left, right in [("h", "e"), (" ", "he"), ("l", "l"), ("he", "ll"), ("hell", "o"), (" ", " ")]:
        merges.append((left.replace(" ", "Ġ"), right.replace(" ", "Ġ")))
    for text in ("你", "好", "🙂"):
        units = split.pre_tokenize_str(text)[0][0]
        merges.append((units[0], units[1]))  # ends inside the character
    units = split.pre_tokenize_str("你好")[0][0]
    merges.append((units[2], units[3]))  # the end of one character and the start of the next
    for left, right in merges:
        vocab.setdefault(left + right, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>"), AddedToken("<|im_end|>")])
    tokenizer.add_tokens([AddedToken("▁ñ x", normalized=False)])  # added, not special: shown, not in bytes
    return tokenizer


def sentencepiece(*, metaspace: bool = False) -> Tokenizer:
    """Build the one with byte fallback, with either decoder."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [("h", "e"), ("▁", "he"), ("▁", "a"), ("l", "l"), ("▁", "▁")]
    for piece in ["▁", *"helo.,a[]/INST你", *(left + right for left, right in merges)]:
        vocab.setdefault(piece, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<x y>", normalized=False)])
    return tokenizer


def write(name: str, tokenizer: Tokenizer, config: dict, template: str | None = None) -> None:
    """Write a folder; the template goes into the config, or into a file of its own."""
    folder = HERE / name
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str())) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    if template:
        (folder / "chat_template.jinja").write_text(template)


if __name__ == "__main__":
    chat = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    write("byte_level", byte_level(), {**chat, "chat_template": CHATML})
    named = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": {"content": "</s>"}}
    write("sentencepiece", sentencepiece(), {**named, "chat_template": "not this one"}, template=INST)
    write("metaspace", sentencepiece(metaspace=True), {"bos_token": "<s>", "eos_token": "</s>"})
