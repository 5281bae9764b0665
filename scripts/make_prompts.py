"""Prompts for distillation, most of them in the target's own words.

Two rounds through `specjax generate`: first the model writes the user's turn after an opening of ours (the template up
to there is its prompt), then it answers what it wrote.

    python scripts/make_prompts.py openings --target smollm2-135m --rows 3000 --output openings.jsonl
    specjax generate --target smollm2-135m --draft none --batch-size 64 --input openings.jsonl --output written.jsonl
    python scripts/make_prompts.py chats --openings openings.jsonl --written written.jsonl --output chats.jsonl
    specjax generate --target smollm2-135m --draft none --batch-size 64 --input chats.jsonl --output answers.jsonl
    python scripts/make_prompts.py join --chats chats.jsonl --answers answers.jsonl --output corpus.jsonl

`stories` writes the prompts of the tiny pair's corpus, answered and joined in the same way. Every row's text follows
from --seed. Nothing is taken from elsewhere, and nothing that models are measured on is in here.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.checkpoint.where import resolve
from specjax.text import load_tokenizer

# What a user's turn begins with, by kind; the model goes on from there.
OPENINGS = {
    "question": ("Who ", "Who was the first ", "When did ", "When was ", "Where is ", "Where did ", "What is the ",
                 "What does ", "How many ", "How do you ", "Which country ", "Why do ", "Is it true that "),
    "writing": ("Write a ", "Write an email ", "Compose a ", "Describe ", "Imagine you are ", "Tell me a story about ",
                "Write a poem about ", "Draft a ", "Rewrite the following ", "Pretend to be ", "Act as a "),
    "explaining": ("Explain ", "What are the differences between ", "Discuss ", "In the field of ", "How does ",
                   "Provide insights into ", "List ", "Give me three ", "What are the main causes of ", "Compare "),
    "arithmetic": ("A farmer has ", "Tom has ", "A train travels ", "If a box holds ", "Sara buys ", "There are ",
                   "A shop sells ", "Each week, ", "Calculate ", "Solve for x: ", "In a class of ", "Maria earns $"),
    "code": ("Write a Python function that ", "Develop a program that ", "Implement ", "Write a SQL query ",
             "Fix this code:\n", "Write a JavaScript function to ", "How can I sort ", "Write a regular expression "),
    "translation": ("Translate German to English: Die ", "Translate German to English: Der ",
                    "Translate German to English: Ich ", "Translate German to English: In ",
                    "Translate German to English: Das ", "Translate French to English: La ",
                    "Translate Spanish to English: El ", "Translate to English: "),
    "extraction": ("Evaluate the following reviews on a scale of 1 to 5:\n", "Extract the names from this text: ",
                   "Read this paragraph and ", "Given these categories, ", "Identify the "),
    "summary": ("Summarize: ", "Summarize: The ", "Summarize: A ", "Summarize: Police ", "Summarize: It was ",
                "Summarize: Scientists ", "Give a short summary of this article: "),
    "context": ("The ", "In 19", "During the ", "Although ", "Some researchers state that ", "Many people ",
                "The history of "),
}  # fmt: skip
_LONG = ("summary", "context", "extraction")
# A passage that the model wrote becomes a user's turn with one of these behind it.
_ABOUT = ("\n\nWhat is this text mainly about?", "\n\nAnswer from the text above: who is it about?",
          "\n\nAccording to this text, why did it happen?", "\n\nWhat does the text say about it?",
          "\n\nQuestion: when did it happen?\nAnswer:", "\n\nList the main points.")  # fmt: skip
_HEROES = ("cat", "dog", "rabbit", "bear", "mouse", "bird", "frog", "duck", "fox", "horse", "girl", "boy", "farmer",
           "grandmother", "king", "turtle", "bee", "cow", "kitten", "puppy")  # fmt: skip
_THINGS = ("ball", "box", "hat", "boat", "flower", "book", "apple", "cake", "kite", "key", "shell", "lamp", "drum",
           "leaf", "stone", "bell", "cup", "star", "nest", "coat")  # fmt: skip
_PLACES = ("garden", "forest", "kitchen", "market", "park", "school", "field", "village", "river", "snow")
_THEMES = ("sharing", "being kind", "a rainy day", "going to bed", "losing something and finding it", "helping",
           "saying sorry", "a new friend", "being brave", "working together", "a birthday",
           "learning to swim")  # fmt: skip
_STORIES = (
    "Write a very short story for small children about a {hero} and a {thing}. Use simple words.",
    "Write a simple bedtime story about a {hero} who finds a {thing} in the {place}.",
    "Tell me a short children's story about a {hero}, a {other} and {theme}.",
    "Write a short story for a four year old about a {hero} and {theme}.",
)
_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)  # of answers: drafts are asked at 0 and above


def main() -> None:
    """Write one file of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("openings", "stories"):
        made = kinds.add_parser(kind)
        made.add_argument("--rows", type=int, required=True)
        made.add_argument("--seed", type=int, default=0)
        if kind == "openings":
            made.add_argument("--target", required=True)
    chats = kinds.add_parser("chats")
    chats.add_argument("--openings", required=True)
    chats.add_argument("--written", required=True)
    joined = kinds.add_parser("join")
    joined.add_argument("--chats", required=True)
    joined.add_argument("--answers", required=True)
    for command in kinds.choices.values():
        command.add_argument("--output", required=True)
    given = parser.parse_args()
    if Path(given.output).exists():
        sys.exit(f"{given.output} exists; give another --output.")
    makers = {"openings": _openings, "stories": _stories, "chats": _chats, "join": _joined}
    rows = list(makers[given.kind](given))
    Path(given.output).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{len(rows)} rows in {given.output}")


def _openings(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield raw prompts: the template up to the user's turn, and an opening."""
    tokenizer = load_tokenizer(resolve(given.target))
    if tokenizer is None or not tokenizer.has_template:
        sys.exit(f"{given.target} has no chat template; expected one to write a user's turn in.")
    before = tokenizer.render_chat([{"role": "user", "content": "\0"}]).split("\0")[0]
    names = list(OPENINGS)
    for i in range(given.rows):
        kind = names[i % len(names)]
        # The model begins with its own space: after one of ours few tokens are likely.
        opening = random.Random(f"{given.seed} {i}").choice(OPENINGS[kind]).rstrip(" ")
        yield {
            "id": f"{kind}-{i}", "prompt": before + opening, "temperature": 0.7, "seed": given.seed,
            "max_new_tokens": 200 if kind in _LONG else 60,
        }  # fmt: skip


def _chats(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield chats of one user's turn, for the model to answer; turns that it did not end are cut to whole sentences."""
    openings = {row["id"]: row["prompt"] for row in _read(given.openings)}
    for row in _read(given.written):
        if row["finish_reason"] == "error":
            continue
        rng = random.Random(row["id"])
        kind = row["id"].split("-")[0]
        opening = openings[row["id"]].rsplit("user\n", 1)[-1]
        turn = (opening + row["text"]).strip()
        if row["finish_reason"] == "length":
            turn = turn[: max(turn.rfind(mark) for mark in ".?!") + 1] or turn
        if kind == "context":
            turn += rng.choice(_ABOUT)
        if len(turn) < 12:
            continue
        yield {
            "id": row["id"], "messages": [{"role": "user", "content": turn}],
            "temperature": rng.choice(_TEMPERATURES), "max_new_tokens": 128, "seed": 1,
        }  # fmt: skip


def _stories(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for i in range(given.rows):
        rng = random.Random(f"{given.seed} {i}")
        hero, other = rng.sample(_HEROES, 2)
        words = {"hero": hero, "other": other, "thing": rng.choice(_THINGS), "place": rng.choice(_PLACES)}
        content = rng.choice(_STORIES).format(theme=rng.choice(_THEMES), **words)
        yield {
            "id": f"story-{given.seed}-{i}", "messages": [{"role": "user", "content": content}],
            "temperature": rng.choice((0.5, 0.7)), "max_new_tokens": 250, "seed": given.seed,
        }  # fmt: skip


def _joined(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    chats = {row["id"]: row for row in _read(given.chats)}
    for row in _read(given.answers):
        if row["finish_reason"] == "error" or not row["text"].strip():
            continue
        chat = chats[row["id"]]
        answer = {"role": "assistant", "content": row["text"]}
        yield {
            "id": row["id"], "messages": [*chat["messages"], answer], "temperature": chat["temperature"],
            "ended": row["finish_reason"] == "eos",
        }  # fmt: skip


def _read(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


if __name__ == "__main__":
    main()
