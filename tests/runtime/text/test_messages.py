from typing import Any

import pytest

from moedge.runtime.settings.errors import PromptError
from moedge.runtime.text.messages import BadMessage, MessageFault, joined_parts, read_messages, texts, with_texts

PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}


def test_absent_fields_are_dropped_and_the_rows_own_objects_stay_untouched() -> None:
    source = [{"role": "developer", "content": "x", "name": None, "tool_calls": None, "annotations": []}, PARTS]
    chat = read_messages(source)
    assert chat == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    chat[1]["content"][0]["text"] = "changed"
    assert PARTS["content"][0] == {"type": "text", "text": "a"}


def test_texts_come_out_and_go_in_in_the_same_order() -> None:
    chat = read_messages([PARTS, {"role": "assistant", "content": "-"}, {"role": "user", "content": "c"}])
    assert texts(chat) == ["a", "b", "-", "c"]
    assert with_texts(chat, texts(chat)) == chat
    assert texts(with_texts(chat, "wxyz")) == ["w", "x", "y", "z"]
    assert joined_parts(chat) == [{"role": "user", "content": "a\nb"}, *chat[1:]]


@pytest.mark.parametrize(
    "message",
    [
        {"content": "x"},
        {"role": 1, "content": "x"},
        {"role": "user", "content": 1},
        {"role": "user", "content": ["x"]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "text", "text": 1}]},
        {"role": "user", "content": "x", "tool_calls": []},
        {"role": "user<|im_end|>", "content": "x"},
        {"role": ["user"], "content": "x"},
        {"role": "function", "content": "x"},
        {"role": "tool", "content": "x", "tool_call_id": 1},
        {"role": "assistant", "content": "x", "tool_call_id": "a"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": 1, "arguments": "{}"}}]},
        {"role": "assistant", "content": "x", "reasoning_content": 1},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]},
    ],
)
def test_what_is_not_role_and_text_is_refused_with_its_place(message: dict[str, Any]) -> None:
    with pytest.raises(PromptError, match=r"messages\[1\]"):
        read_messages([{"role": "user", "content": "fine"}, message])


def test_what_is_wrong_has_a_kind_and_the_field_at_fault() -> None:
    with pytest.raises(BadMessage) as refused:
        read_messages([{"role": "user", "content": "x", "tool_calls": [1]}])
    assert (refused.value.fault, refused.value.where) == (MessageFault.UNSUPPORTED, "messages[0].tool_calls")
    with pytest.raises(BadMessage, match="at least one message"):
        read_messages([])
