"""The Responses API over HTTP (`apps/serve/streams.py`), asked with OpenAI's client: what a chat would have answered,
whole, in events, by a schema, with calls and reasoning, and in batches.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from moedge.apps.serve.errors import ApiError
from moedge.apps.serve.live import AnswerPiece
from moedge.apps.serve.server import RunningServer
from moedge.apps.serve.streams import ResponseEvents

from .conftest import running
from .test_api import content, line, polled, upload

RESPONSES, CHAT = "/v1/responses", "/v1/chat/completions"
ASKED: dict[str, Any] = {"model": "any", "temperature": 0}
TALK: list[Any] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Good day."},
    {"role": "user", "content": "Tell of the sea."},
]
THINKS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% if tools %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m.reasoning_content }}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n{# </think> #}"
)
PARAMETERS: dict[str, Any] = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip


class Mood(BaseModel):
    happy: bool
    about: Literal["sea", "bread"]


@pytest.fixture(scope="module")
def thinker(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a model that begins every answer within its reasoning, and calls functions."""
    folder = tmp_path_factory.mktemp("thinks")
    model = Path(shutil.copytree(checkpoint("qwen3_moe"), folder / "model"))
    (model / "chat_template.jinja").write_text(THINKS)
    with running(model, folder / "server") as server, OpenAI(base_url=server.url, api_key="-", timeout=300) as client:
        yield client


def chat(client: OpenAI, messages: Any, **more: Any) -> Any:
    return client.chat.completions.create(**ASKED, messages=messages, **more)


def test_a_response_is_the_answer_of_the_chat_with_the_same_messages(client: OpenAI) -> None:
    found = client.responses.create(**ASKED, input="Hello", max_output_tokens=12, metadata={"night": "one"})
    same = chat(client, [{"role": "user", "content": "Hello"}], max_tokens=12)
    assert found.output_text == same.choices[0].message.content
    assert found.usage is not None
    counted = (same.usage.prompt_tokens, same.usage.completion_tokens, same.usage.total_tokens)
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == counted
    assert found.incomplete_details is not None
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.metadata, found.store) == ({"night": "one"}, False)
    assert Response.model_validate(found.to_dict()) == found, "nothing that the type requires is missing"


def test_instructions_are_the_system_message_and_items_are_messages(client: OpenAI) -> None:
    """A stored answer, its parts in OpenAI's form, is sent back as it came."""
    parts = [{"type": "input_text", "text": "Hello"}]
    stored = {
        "id": "msg_1", "type": "message", "role": "assistant", "status": "completed",
        "content": [{"type": "output_text", "text": "Good day.", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    items: Any = [{"role": "user", "content": parts}, stored, TALK[2]]
    found = client.responses.create(**ASKED, input=items, instructions="Be brief.", max_output_tokens=9)
    same = chat(client, [{"role": "system", "content": "Be brief."}, *TALK], max_tokens=9)
    assert found.output_text == same.choices[0].message.content
    assert found.usage is not None
    assert found.usage.input_tokens == same.usage.prompt_tokens
    assert found.instructions == "Be brief."


def events_of(client: OpenAI, **asked: Any) -> list[Any]:
    return list(client.responses.create(**ASKED, stream=True, **asked))


def put_together(events: list[Any]) -> Response:
    """Checks that each event is what OpenAI's type says, numbered, and that the pieces are the whole."""
    for number, event in enumerate(events):
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
        assert event.sequence_number == number
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    whole = events[-1].response
    assert events[-1].type == f"response.{whole.status}"
    assert {event.response.id for event in events if hasattr(event, "response")} == {whole.id}
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [each.to_dict() for each in done] == [each.to_dict() for each in whole.output]
    added = [(event.output_index, event.item.id) for event in events if event.type == "response.output_item.added"]
    assert added == [(index, item.id) for index, item in enumerate(whole.output)]
    for item in whole.output:
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        pieces = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert pieces == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert isinstance(whole, Response)
    return whole


def test_a_stream_has_openais_events_and_adds_up_to_the_whole_response(client: OpenAI) -> None:
    asked: dict[str, Any] = {"input": TALK, "max_output_tokens": 12}
    whole = client.responses.create(**ASKED, **asked)
    events = events_of(client, **asked)
    found = put_together(events)
    assert found.output_text == whole.output_text
    assert sum(event.type == "response.output_text.delta" for event in events) > 3, "not all of it at the end"
    assert found.usage is not None
    assert whole.usage is not None
    assert found.usage.output_tokens == whole.usage.output_tokens
    with client.responses.stream(**ASKED, **asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(texts) == whole.output_text


def test_logprobs_are_those_of_the_chat_whole_and_in_pieces(client: OpenAI) -> None:
    more: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    asked: dict[str, Any] = {"input": "Hello", "max_output_tokens": 10, **more}
    same = chat(client, TALK[:1], max_tokens=10, logprobs=True, top_logprobs=2).choices[0].logprobs
    expected = [each.model_dump() for each in same.content]
    part: Any = client.responses.create(**ASKED, **asked).output[0].content[0]  # type: ignore[union-attr]
    assert [each.model_dump() for each in part.logprobs] == expected
    events = events_of(client, **asked)
    put_together(events)
    pieces = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.to_dict() for each in pieces] == expected


def test_a_pydantic_schema_is_followed_whole_and_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"input": "Are you happy?", "text_format": Mood, "max_output_tokens": 60}
    found = client.responses.parse(**ASKED, **asked)
    assert isinstance(found.output_parsed, Mood)
    assert (found.status, found.text.format.type) == ("completed", "json_schema")  # type: ignore[union-attr]
    same = client.chat.completions.parse(
        **ASKED, messages=[{"role": "user", "content": "Are you happy?"}], response_format=Mood, max_tokens=60
    )
    assert same.choices[0].message.parsed == found.output_parsed
    with client.responses.stream(**ASKED, **asked) as stream:
        assert stream.get_final_response().output_parsed == found.output_parsed


@pytest.mark.parametrize(("status", "code"), [(503, "server_error"), (400, "invalid_prompt")])
def test_an_error_that_comes_late_is_a_response_that_failed(client: OpenAI, status: int, code: str) -> None:
    begun = client.responses.create(**ASKED, input="Hello", max_output_tokens=1).to_dict()
    writer = ResponseEvents(SimpleNamespace(begun=lambda: {**begun, "output": []}))  # type: ignore[arg-type]
    sent = b"".join((*writer.begin(), *writer.piece(AnswerPiece(0, "", "He")), *writer.fail(ApiError(status, "Gone."))))
    events = [json.loads(each.partition(b"data: ")[2]) for each in sent.split(b"\n\n")[:-1]]
    failed = TypeAdapter(ResponseStreamEvent).validate_python(events[-1])
    assert (failed.type, failed.sequence_number) == ("response.failed", len(events) - 1)
    assert failed.response.error is not None
    assert (failed.response.status, failed.response.error.code) == ("failed", code)
    assert failed.response.error.message == "Gone."


@pytest.mark.parametrize("thoughts", [0, 6])
def test_reasoning_is_an_item_before_the_message(thinker: OpenAI, thoughts: int) -> None:
    """Of a chat it is `reasoning_content`; where the answer never began there is no message."""
    more: dict[str, Any] = {"extra_body": {"max_thinking_tokens": thoughts} if thoughts else {}}
    same = chat(thinker, TALK, max_tokens=30, **more)
    whole = thinker.responses.create(**ASKED, input=TALK, max_output_tokens=30, **more)
    found = put_together(events_of(thinker, input=TALK, max_output_tokens=30, **more))
    for each in (whole, found):
        assert [item.type for item in each.output] == (["reasoning", "message"] if thoughts else ["reasoning"])
        assert each.output[0].content[0].text == same.choices[0].message.reasoning_content  # type: ignore
        assert each.output_text == (same.choices[0].message.content or "")
        assert each.usage is not None
        counted = same.usage.completion_tokens_details.reasoning_tokens
        assert each.usage.output_tokens_details.reasoning_tokens == counted > 0


def test_functions_are_called_and_their_outputs_answered(thinker: OpenAI) -> None:
    function = {"name": "weather", "parameters": PARAMETERS}
    tool: Any = {"type": "function", **function}
    named: Any = {"type": "function", "name": "weather"}
    more: dict[str, Any] = {"extra_body": {"max_thinking_tokens": 4}}
    asked: dict[str, Any] = {"input": TALK, "tools": [tool], "max_output_tokens": 90, **more}
    same = chat(
        thinker, TALK, tools=[{"type": "function", "function": function}], max_tokens=90,
        tool_choice={"type": "function", "function": {"name": "weather"}}, **more,
    )  # fmt: skip
    found = thinker.responses.create(**ASKED, **asked, tool_choice=named)
    streamed = put_together(events_of(thinker, **asked, tool_choice="required"))
    expected = same.choices[0].message.tool_calls[0].function
    for each in (found, streamed):
        assert [item.type for item in each.output] == ["reasoning", "function_call"]
        call: Any = each.output[1]
        assert (call.name, json.loads(call.arguments)) == ("weather", json.loads(expected.arguments))
        assert call.call_id.startswith("call_")
    back: Any = [*TALK, *found.output, {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}]
    answer = thinker.responses.create(**ASKED, input=back, max_output_tokens=30, **more)
    told = [
        *TALK,
        same.choices[0].message.to_dict(),
        {"role": "tool", "tool_call_id": "c", "content": "Rain."},
    ]
    alike = chat(thinker, told, max_tokens=30, **more)
    assert answer.output_text == alike.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.input_tokens == alike.usage.prompt_tokens


IMAGE = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]}]
REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "an earlier response": ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
    "to be stored": ({"store": True}, "store", "not supported"),
    "in the background": ({"background": True}, "background", "not supported"),
    "a conversation": ({"conversation": "conv_1"}, "conversation", "not supported"),
    "a stored prompt": ({"prompt": {"id": "pmpt_1"}}, "prompt", "not supported"),
    "an image": ({"input": IMAGE}, "input[0].content[0]", "'input_image' are not supported, only text"),
    "a search of the web": ({"tools": [{"type": "web_search"}]}, "tools[0]", "not supported, only function"),
    "an item by name": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "not supported"),
    "a summary": ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported"),
    "sources": ({"include": ["file_search_call.results"]}, "include", "only 'message.output_text.logprobs'"),
    "cut where it is long": ({"truncation": "auto"}, "truncation", "not supported"),
    "a chat's name": ({"max_tokens": 5}, "max_tokens", "did you mean max_output_tokens?"),
    "too long": ({"max_output_tokens": 10_000}, "", "lower max_output_tokens"),
    "no input": ({"input": None}, "input", "input is missing"),
    "no items": ({"input": []}, "input", "not empty"),
    "a bad schema": ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}},
                     "text.format", "JSON schema is refused"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "is missing"),
    "an effort": ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "one of none, minimal"),
    "stop and a form": ({"stop": "a", "text": {"format": {"type": "json_object"}}}, "stop", "JSON text.format"),
    "logprobs unasked": ({"top_logprobs": 2}, "top_logprobs", "in include"),
    "arguments": ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "no"}]},
                  "input[0].arguments", "JSON object"),
    "stream is text": ({"stream": "yes"}, "stream", "true or false"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_response_cannot_be_is_refused_in_a_sentence_with_the_field(client: OpenAI, name: str) -> None:
    body, param, said = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/responses", body={"model": "any", "input": "Hello", **body}, cast_to=object)
    assert (refused.value.param or "") == param
    assert said in str(refused.value)


def test_what_would_keep_a_response_is_not_there(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")


def test_a_request_that_does_not_say_how_long_gets_what_fits(client: OpenAI) -> None:
    found = client.responses.create(model="any", input="x" * 340, extra_body={"ignore_eos": True})
    assert found.usage is not None
    assert found.usage.total_tokens == 400


def test_a_batch_of_responses_answers_as_one_of_chats(client: OpenAI, served: RunningServer) -> None:
    talks = [TALK[:1], TALK]
    fields: dict[str, Any] = {"temperature": 0.8, "seed": 3}
    of_responses = "".join(
        line(f"r{index}", RESPONSES, input=talk, max_output_tokens=8, **fields) for index, talk in enumerate(talks)
    )
    of_chats = "".join(
        line(f"r{index}", CHAT, messages=talk, max_tokens=8, **fields) for index, talk in enumerate(talks)
    )
    bad = line("kept", RESPONSES, input="Hello", store=True)
    batches = [
        client.batches.create(input_file_id=upload(client, text), endpoint=url, completion_window="24h")  # type: ignore
        for text, url in ((of_responses + bad, RESPONSES), (of_chats, CHAT), (of_responses, CHAT))
    ]
    responses, chats, mixed = (polled(client, batch) for batch in batches)
    assert (responses.status, responses.endpoint) == ("completed", RESPONSES)
    assert responses.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    found = [Response.model_validate(row["response"]["body"]) for row in content(client, responses.output_file_id)]
    same = [row["response"]["body"]["choices"][0] for row in content(client, chats.output_file_id)]
    assert [each.output_text for each in found] == [each["message"]["content"] for each in same]
    [error] = content(client, responses.error_file_id)
    assert error["response"]["body"]["error"]["param"] == "store"
    assert mixed.status == "failed"
    assert "make a batch for each" in mixed.errors.data[0].message
