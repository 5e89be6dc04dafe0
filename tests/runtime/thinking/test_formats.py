"""Which marks are found, from what the tokenizer has and what the template says (`runtime/text/chat_stream.py`)."""

import pytest

from moedge.runtime.text.chat_stream import Harmony, StreamOptions, ThinkMarks, find_format, open_stream
from moedge.runtime.text.stream import decoding

from .conftest import CHANNELS, CHATML, bytes_tokenizer

FOUND = {
    "Qwen": (CHATML, ["<think>", "</think>"], r"'<think>\n' + x + '\n</think>\n\n'", "<think>", "\n</think>\n\n"),
    "Mistral": (["[THINK]", "[/THINK]"], [], "{{ '[THINK]' + x + '[/THINK]' }}", "[THINK]", "[/THINK]"),
    "Seed": ([], ["<seed:think>", "</seed:think>"], "<seed:think></seed:think>", "<seed:think>", "</seed:think>"),
    "any name": ([], ["<foo:think>", "</foo:think>"], "<foo:think></foo:think>", "<foo:think>", "</foo:think>"),
    "Gemma": (["<|channel>", "<channel|>"], [], "<|channel>thought\n<channel|>", "<|channel>", "\n<channel|>"),
    "used before unused": (["[THINK]", "[/THINK]"], ["<think>", "</think>"], "[THINK] [/THINK]", "[THINK]", "[/THINK]"),
    "not in the template": ([], ["<think>", "</think>"], "{{ messages }}", "<think>", "</think>"),
    "mere text": ([], [], "<reasoning></reasoning>", "<reasoning>", "</reasoning>"),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_marks_are_those_of_tokenizer_and_template(name: str) -> None:
    special, marks, template, begin, closing = FOUND[name]
    backend = bytes_tokenizer(special, marks)
    template = template.replace("\n", "\\n")
    found = find_format(backend, template, lambda text: backend.encode(text).ids)
    assert isinstance(found, ThinkMarks)
    assert found.begin == begin
    assert backend.decode(list(found.closing_ids), skip_special_tokens=False) == closing
    assert (found.begin_id is None) == (name == "mere text")


@pytest.mark.parametrize(
    ("special", "marks", "template"),
    [
        (CHATML, [], "{{ messages }}"),
        (CHATML, ["<think>"], "<think>"),
        ([], ["</think>"], "</think>"),
        ([], [], ""),
        (["<|start|>", "<|end|>"], [], "<|start|><|end|>"),
    ],
)
def test_half_a_pair_is_no_mark(special: list[str], marks: list[str], template: str) -> None:
    backend = bytes_tokenizer(special, marks)
    assert find_format(backend, template, lambda text: backend.encode(text).ids) is None


def test_channels_need_their_tokens_and_a_template_that_writes_them() -> None:
    backend = bytes_tokenizer(CHANNELS, [])
    found = find_format(backend, "<|channel|>", lambda text: backend.encode(text).ids)
    assert isinstance(found, Harmony)
    closing = backend.decode(list(found.closing_ids), skip_special_tokens=False)
    assert closing == "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert found.stop_ids == {backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")}


def test_a_label_is_no_reasoning_and_special_marks_leave_no_text() -> None:
    backend = bytes_tokenizer(["<|channel>", "<channel|>"], [])
    found = find_format(backend, "<|channel>thought <channel|>", lambda text: backend.encode(text).ids)
    assert found is not None
    for prompt, script in (
        ("Q", "<|channel>thought\nHm.<channel|>Yes."),
        ("Q<|channel>thought\n", "Hm.<channel|>Yes."),
    ):
        stream = open_stream(found, decoding(backend), backend.encode(prompt).ids, StreamOptions())
        shown = ""
        for token_id in backend.encode(script).ids:
            stream.append(token_id)
            shown += stream.take()
        stream.finish()
        assert (stream.reasoning, stream.text) == ("Hm.", "Yes.")
        assert (shown + stream.take()).endswith("Hm.\n\nYes.")


def test_a_character_that_the_bound_cuts_becomes_a_replacement_and_no_content() -> None:
    backend = bytes_tokenizer([], ["<think>", "</think>"])
    found = find_format(backend, "<think></think>", lambda text: backend.encode(text).ids)
    assert found is not None
    stream = open_stream(found, decoding(backend), backend.encode("Q<think>").ids, StreamOptions(max_thinking_tokens=1))
    for token_id in backend.encode("é").ids[:1]:
        stream.append(token_id)
    while stream.forced is not None:
        stream.append(stream.forced)
    for token_id in backend.encode("Yes").ids:
        stream.append(token_id)
    stream.finish()
    assert (stream.reasoning, stream.text) == ("\ufffd", "Yes")
