"""Real prose and questions: what Python itself ships, and what people ask first."""

from __future__ import annotations

import re
from collections.abc import Callable
from pydoc_data import topics

# 16 windows of 384 tokens, of which all but the first are predicted: 6,128.
WINDOW, WINDOWS = 384, 16
ANSWER = 8
QUESTIONS = (
    "What is the capital of France?", "What is the capital of Japan?", "What is the largest planet of the sun?",
    "Name three rivers.", "Who wrote Hamlet?", "What is two plus two?", "What colour is the sky on a clear day?",
    "How many days are in a week?", "What is the chemical symbol of gold?", "What do bees make?",
    "Write a sentence about the sea.", "What is the opposite of hot?", "Translate 'good morning' into French.",
    "Which animal barks?", "What is photosynthesis?", "How do I boil an egg?", "What is a prime number?",
    "Explain gravity in one sentence.", "What is the boiling point of water in Celsius?", "Who painted the Mona Lisa?",
    "List four fruits.", "What is the Python programming language?", "Write a Python function that adds two numbers.",
    "What is the speed of light?", "How many continents are there?", "What is the currency of the United Kingdom?",
    "Give me a short poem about autumn.", "What is a noun?", "Who was Albert Einstein?", "What does DNA stand for?",
    "How far is the moon?", "What is the tallest mountain on Earth?", "Why is the sky blue?", "What is a haiku?",
    "Name a famous scientist from Poland.", "What language is spoken in Brazil?", "How can I sleep better?",
    "What is machine learning?", "Suggest a name for a cat.", "What is the square root of 81?",
)  # fmt: skip
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
