"""Real prose and questions: what Python itself ships, and what people ask."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics

# 16 windows of 384 tokens, of which all but the first are predicted: 6,128.
WINDOW, WINDOWS = 384, 16
ANSWER = 8
# What people ask first. Most cases answer the first 40; a share of all of them is known twice as well.
QUESTIONS = tuple(Path(__file__).with_name("questions.txt").read_text().splitlines())
FEW = 40
FRANCE = 0


def prose() -> str:
    """Paragraphs of Python's language reference: sentences only, without the grammar and the code between them."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    paragraphs = [
        " ".join(part.split()) for part in re.split(r"\n\s*\n", text) if not part.startswith(("   ", "\n   "))
    ]
    sentences = [part for part in dict.fromkeys(paragraphs) if part.endswith(".") and len(part) > 200]
    return "\n\n".join(sentences)


def windows(encode: Callable[[str], list[int]], count: int = WINDOWS, length: int = WINDOW) -> list[list[int]]:
    """The first `count` windows of prose, of `length` tokens each."""
    ids = encode(prose()[: count * length * 12]) if count else []
    assert len(ids) >= count * length
    return [ids[begin : begin + length] for begin in range(0, count * length, length)]


def same_answers(found: list[list[int]], wanted: list[list[int]]) -> int:
    """How many answers begin with the same 8 tokens."""
    return sum(a[:ANSWER] == b[:ANSWER] for a, b in zip(found, wanted, strict=True))
