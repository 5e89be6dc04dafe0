"""Reasoning, content and calls apart (`runtime/text/chat_stream.py`), whatever the marks, and on every schedule."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from moedge.runtime.text.tokenizer import Tokenizer

Load = Callable[[str], Tokenizer]
Answer = Callable[..., list[dict[str, Any]]]
ASK = {"role": "user", "content": "Is seven prime?"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def ask(*beside: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [ASK, *({"role": "user", "content": text} for text in beside)], "max_tokens": 400, **fields}


def harmony(channel: str, text: str, then: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{channel}<|message|>{text}{then}"


FINAL = harmony("final", "Yes.", "<|return|>")
# Template, what the model writes, and (reasoning, content, tokens of reasoning) of it.
WRITTEN = {
    "the model opens": ("qwen3", "<think>\nHm.\n</think>\n\nYes.<|im_end|>", ("Hm.", "Yes.", 7)),
    "nothing was thought": ("qwen3", "<think>\n\n</think>\n\nYes.<|im_end|>", ("", "Yes.", 4)),
    "no reasoning": ("qwen3", "Yes, <think> is a tag.</think><|im_end|>", (None, "Yes, <think> is a tag.</think>", 0)),
    "the template opens": ("opened", "Hm.\n</think>\n\nYes.<|im_end|>", ("Hm.", "Yes.", 5)),
    "it never ends": ("opened", "Hm.<|im_end|>", ("Hm.", None, 3)),
    "marks are plain text": ("spelled", "Hm.</thought>Yes.<|im_end|>", ("Hm.", "Yes.", 13)),
    "channels": ("harmony", harmony("analysis", "Hm.") + FINAL, ("Hm.", "Yes.", 14)),
    "final alone": ("harmony", FINAL, (None, "Yes.", 0)),
    "a preamble": ("harmony", harmony("analysis", "A") + harmony("commentary", "B") + FINAL, ("A\nB", "Yes.", None)),
    "no channel at all": ("harmony", "Yes.<|return|>", (None, "Yes.", 0)),
    "cut in the reasoning": ("harmony", harmony("analysis", "Hm.", "<|return|>"), ("Hm.", None, None)),
}  # fmt: skip


def parts(body: dict[str, Any]) -> tuple[str | None, str | None, int]:
    message = body["choices"][0]["message"]
    details = body["usage"]["completion_tokens_details"]
    return message.get("reasoning_content"), message["content"], details["reasoning_tokens"]


@pytest.mark.parametrize("name", WRITTEN)
def test_reasoning_is_no_content(answer: Answer, name: str) -> None:
    template, script, wanted = WRITTEN[name]
    (body,) = answer(template, [(ask(), script)])
    found = parts(body)
    assert found[:2] == wanted[:2]
    assert wanted[2] is None or found[2] == wanted[2]
    assert found[2] <= body["usage"]["completion_tokens"]
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_template_that_was_asked_not_to_think_leaves_content_alone(answer: Answer) -> None:
    off = ask(chat_template_kwargs={"enable_thinking": False})
    (body,) = answer("qwen3", [(off, "Yes.<|im_end|>")])
    assert parts(body) == (None, "Yes.", 0)


def test_a_prompt_that_is_continued_is_not_split(answer: Answer) -> None:
    (body,) = answer("qwen3", [({"prompt": "Seven", "max_tokens": 50}, "<think>Hm.</think>Yes.<|im_end|>")])
    assert body["choices"][0]["text"] == "<think>Hm.</think>Yes."
    assert "completion_tokens_details" not in body["usage"]


def test_stop_strings_end_content_only(answer: Answer) -> None:
    script = "<think>\nNo. Stop.\n</think>\n\nYes. Stop. More<|im_end|>"
    (body,) = answer("qwen3", [(ask(stop=["Stop", "\n\n"]), script)])
    assert parts(body)[:2] == ("No. Stop.", "Yes. ")


@pytest.mark.parametrize("limit", [0, 1, 5])
@pytest.mark.parametrize("template", ["qwen3", "opened", "harmony", "spelled"])
def test_reasoning_is_bounded_and_the_answer_goes_on(answer: Answer, load: Load, template: str, limit: int) -> None:
    opening = {"qwen3": "<think>", "harmony": "<|channel|>analysis<|message|>"}.get(template, "")
    (body,) = answer(
        template, [(ask(max_thinking_tokens=limit, max_tokens=80, return_token_ids=True), opening + "x" * 200)]
    )
    reasoning, content, counted = parts(body)
    if template == "harmony" and limit == 0:
        assert reasoning is None
    else:
        assert reasoning == "x" * limit
    # The model would never have ended its reasoning.
    assert content is not None
    assert content.endswith("xxx")
    ids = body["choices"][0]["token_ids"]
    text = "".join(load(template).token_text(token_id).text for token_id in ids)
    closing = {
        "qwen3": "\n</think>\n\n",
        "opened": "</think>",
        "spelled": "</thought>",
        "harmony": "<|end|><|start|>assistant<|channel|>final<|message|>",
    }[template]
    if template == "harmony" and limit == 0:
        assert text.startswith("<|channel|>final<|message|>")
    else:
        assert text.startswith(f"{opening}{'x' * limit}{closing}x")
    assert counted <= limit + 30


def test_reasoning_within_its_bound_is_left_alone(answer: Answer) -> None:
    script = "<think>\nHm.\n</think>\n\nYes.<|im_end|>"
    loose, bound = answer("qwen3", [(ask(), script), (ask("again", max_thinking_tokens=100), script)])
    assert parts(loose) == parts(bound)


MIXED: list[tuple[str, list[dict[str, Any]]]] = [
    (
        template,
        [
            ask(str(index), max_thinking_tokens=index % 5 * 3, temperature=1.0, seed=index, max_tokens=40, **extra)
            for index in range(10)
            for extra in ({}, {"structured_outputs": {"choice": ["yes", "no"]}, "return_token_ids": True})
        ],
    )
    for template in ("qwen3", "opened", "harmony")
]


@pytest.mark.sample("qwen3", "harmony")
@pytest.mark.parametrize(("template", "rows"), MIXED, ids=[template for template, _ in MIXED])
def test_an_answer_does_not_depend_on_its_batch(answer: Answer, template: str, rows: list[dict[str, Any]]) -> None:
    script = {"qwen3": "<think>", "harmony": "<|channel|>analysis<|message|>"}.get(template, "")
    asked = [
        (row | {"messages": [*row["messages"], {"role": "user", "content": str(index)}]}, script)
        for index, row in enumerate(rows)
    ]
    together = answer(template, asked)
    # With few blocks sequences wait or are preempted, with one at a time most of them wait.
    tight, alone = answer(template, asked, blocks=60), answer(template, asked, sequences=1)
    assert together == tight == alone
    assert answer(template, asked, cut=7) == together, "cut in the reasoning or behind it, and continued"
    limited = [body for row, body in zip(rows, together, strict=True) if row.get("max_thinking_tokens") == 3]
    assert all(parts(body)[0] is not None for body in limited)


@pytest.mark.parametrize("template", ["qwen3", "opened", "harmony", "spelled"])
def test_a_form_holds_for_the_content_and_not_for_the_reasoning(answer: Answer, template: str) -> None:
    script = {
        "qwen3": "<think>\nI like {braces}.\n</think>",
        "opened": "I like {braces}.\n</think>",
        "spelled": "I like {braces}.</thought>",
        "harmony": harmony("analysis", "I like {braces}.") + "<|channel|>final<|message|>",
    }[template]
    schema = {"type": "object", "properties": {"prime": {"type": "boolean"}}, "required": ["prime"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    forms = [{"response_format": form}, {"structured_outputs": {"json": schema}}]
    bodies = answer(template, [(ask(str(index), **each), script) for index, each in enumerate(forms)])
    for body in bodies:
        reasoning, content, _ = parts(body)
        assert reasoning == "I like {braces}."
        assert content in ('{"prime":true}', '{"prime":false}', '{"prime": true}', '{"prime": false}') or (
            content is not None and content.replace(" ", "") in ('{"prime":true}', '{"prime":false}')
        )


def test_a_model_that_ends_in_its_reasoning_still_gives_the_form(answer: Answer) -> None:
    """The end token is not taken before an answer that has to have a form."""
    row = ask(structured_outputs={"choice": ["yes", "no"]}, max_thinking_tokens=20)
    for template in ("opened", "harmony"):
        end = {"opened": "<|im_end|>", "harmony": "<|channel|>analysis<|message|><|return|>"}[template]
        (body,) = answer(template, [(row, end)])
        assert parts(body)[1] in ("yes", "no")


def test_a_form_from_the_first_token_where_nothing_is_thought(answer: Answer) -> None:
    forms = {"choice": ["yes", "no"], "regex": r"\d{3}-\d{4}", "grammar": 'start: "a" b\nb: "c" | "d"'}
    off = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 1.0}
    rows = [(ask(name, structured_outputs={name: form}, **off), "") for name, form in forms.items()]
    choice, regex, grammar = (parts(body)[1] for body in answer("qwen3", rows))
    assert choice in ("yes", "no")
    assert regex is not None
    assert [part.isdigit() for part in regex.split("-")] == [True, True]
    assert grammar in ("ac", "ad")


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def test_calls_come_back_as_tool_calls(answer: Answer) -> None:
    thought = "<think>\nLook.\n</think>\n\n"
    rows = [
        (ask("a", tools=[TOOL]), f"{thought}I look.\n{CALL}\n{CALL}<|im_end|>"),
        (ask("b", tools=[TOOL]), f"{CALL}<|im_end|>"),
        (ask("c", tools=[TOOL]), "<tool_call>{broken</tool_call><|im_end|>"),
        (ask("d", tools=[TOOL], tool_choice="none"), f"{CALL}<|im_end|>"),
        (ask("e"), f"{CALL}<|im_end|>"),
    ]
    both, one, broken, none, unasked = (body["choices"][0] for body in answer("qwen3", rows))
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert [call["function"] for call in both["message"]["tool_calls"]] == [function, function]
    assert len({call["id"] for call in both["message"]["tool_calls"]}) == 2
    assert (both["message"]["content"], both["message"]["reasoning_content"]) == ("I look.", "Look.")
    assert (both["finish_reason"], one["finish_reason"]) == ("tool_calls", "tool_calls")
    assert one["message"]["content"] is None
    assert broken["message"]["content"] == "<tool_call>{broken</tool_call>"
    for each in (broken, none, unasked):
        assert "tool_calls" not in each["message"]
        assert each["finish_reason"] == "stop"
    assert none["message"]["content"] == unasked["message"]["content"] == CALL


CITY = {
    "type": "object", "properties": {"city": {"$ref": "#/$defs/city"}}, "required": ["city"],
    "additionalProperties": False, "$defs": {"city": {"enum": ["Rome", "Köln"]}},
}  # fmt: skip
TIME = {"type": "object", "properties": {"at": {"const": "now"}}, "required": ["at"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in (("weather", CITY), ("clock", TIME))
]


def test_a_call_is_forced(answer: Answer) -> None:
    """Whatever the model would rather write, behind its reasoning or at once: one call, whose arguments follow the
    schema of its parameters, which may refer to itself."""
    named = {"type": "function", "function": {"name": "clock"}}
    off = {"chat_template_kwargs": {"enable_thinking": False}, "temperature": 1.0}
    rows = [
        (ask("a", tools=TOOLS, tool_choice="required"), "<think>\nI call nothing.\n</think>"),
        *((ask(str(seed), tools=TOOLS, tool_choice="required", seed=seed, **off), "") for seed in range(8)),
        (ask("b", tools=TOOLS, tool_choice=named, parallel_tool_calls=False, **off), ""),
    ]
    bodies = [body["choices"][0] for body in answer("qwen3", rows)]
    assert {each["finish_reason"] for each in bodies} == {"tool_calls"}
    assert bodies[0]["message"]["reasoning_content"] == "I call nothing."
    calls = [[call["function"] for call in each["message"]["tool_calls"]] for each in bodies]
    assert [len(each) for each in calls] == [1] * len(calls)
    for ((call,),) in zip(calls, strict=True):
        arguments = json.loads(call["arguments"])
        assert arguments in ([{"city": "Rome"}, {"city": "Köln"}] if call["name"] == "weather" else [{"at": "now"}])
    assert calls[-1][0]["name"] == "clock"
    assert {call["name"] for (call,) in calls} == {"weather", "clock"}


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
        " to=functions.weather<|channel|>commentary json<|message|>",
    ],
)
def test_gpt_oss_calls_functions_in_its_commentary(answer: Answer, header: str) -> None:
    script = harmony("analysis", "Look.") + header + '{"city": "Köln"}<|call|>'
    called, unasked = answer("harmony", [(ask("a", tools=[TOOL]), script), (ask("b"), script)])
    choice = called["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["reasoning_content"] == "Look."
    assert unasked["choices"][0]["message"]["content"] == '{"city": "Köln"}'


def test_tools_calls_and_reasoning_reach_the_template(load: Load) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}]
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": calls, "reasoning_content": "Look </think> up."},
        {"role": "tool", "tool_call_id": "c1", "content": "Rain <|im_end|>."},
    ]
    tokenizer = load("qwen3")
    ids = tokenizer.encode_chat(messages, [TOOL])
    text = "".join(tokenizer.token_text(token_id).text for token_id in ids)
    assert '{"name": "weather", "parameters": {"type": "object"}}' in text
    assert '"arguments": {"city": "Bonn"}' in text
    assert "<think>\nLook </think> up.\n</think>\n\n" in text
    assert "tool\nRain <|im_end|>." in text
    (end,) = (token_id for token_id in tokenizer.special_ids if tokenizer.token_text(token_id).text == "<|im_end|>")
    # One ends each message and the list of tools: that of the tool's text is mere text.
    assert ids.count(end) == len(messages) + 1
