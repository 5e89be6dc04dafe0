"""Texts to tokens and back, chats, and where answers end (`runtime/text/`), as the model's own vocabulary and template
have them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moedge.runtime.source.model_source import open_source
from moedge.runtime.text.tokenizer import Tokenizer as Ours
from support.real.definition import Stock
from support.real.text import QUESTIONS, prose

pytestmark = pytest.mark.real
TEXTS = (
    "In 2026, 17 of 1,024 items cost $3.50 each (±0.5 %).",
    "def f(x: int) -> int:\n    return x * 2\n\n\n",
    "it's we'll I'M",
    "naïve café, Grüße, 日本語, \u0663\u0664 \u00b2 \u2163",
    "a  b   c\t\td\r\n e \n\n\n f",
    "\U0001f642 e\u0301 \u200b\u00a0x",
    "  leading, trailing  ",
    "",
)


@pytest.fixture(scope="module")
def ours(model: Path) -> Any:
    with open_source(str(model)) as source, Ours.load(source.folder) as tokenizer:
        yield tokenizer


@pytest.fixture(scope="module")
def own(model: Path) -> Tokenizer:
    """The vocabulary as `tokenizers` has it, with the text splitting of SmolLM: single digits, then GPT-2's words."""
    import gguf

    fields = gguf.GGUFReader(model).fields
    tokens, merges = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, pairs))
    words = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_tokens_are_those_of_the_vocabulary(ours: Ours, own: Tokenizer) -> None:
    """Digits of other scripts, too: transformers splits them as letters (`\u0663` took the space before it)."""
    for text in [*TEXTS, *QUESTIONS, *prose().split("\n\n")]:
        ids = own.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == text


def test_chats_are_those_of_the_template(ours: Ours, reference: Stock) -> None:
    system = [{"role": "system", "content": "Answer in one word."}, {"role": "user", "content": "Why?"}]
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "?"},
    ]
    for messages in (system, turns, [{"role": "user", "content": QUESTIONS[0]}]):
        text = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        wanted = reference.tokenizer.encode(text, add_special_tokens=False)
        assert ours.encode_chat(messages) == wanted
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
