"""Code for OpenAI's API, run against the server (`apps/serve/app.py`): files, batches, chats, completions, and their
errors.
"""

import json
import time
from typing import Any

import openai
import pytest
from openai import OpenAI

from moedge.apps.serve.server import RunningServer
from moedge.runtime.jobs.status import JobStatus, jobs

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "Hello"}]


def line(name: str, url: str, **body: Any) -> str:
    row = {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-4o-mini", **body}}
    return json.dumps(row) + "\n"


def completions(count: int, max_tokens: int) -> str:
    return "".join(
        line(f"row-{index}", COMPLETION, prompt=f"In the beginning {index}", max_tokens=max_tokens, ignore_eos=True)
        for index in range(count)
    )


def upload(client: OpenAI, text: str, name: str = "rows.jsonl") -> str:
    return client.files.create(file=(name, text.encode()), purpose="batch").id


def begin(client: OpenAI, text: str, url: str = COMPLETION) -> Any:
    return client.batches.create(input_file_id=upload(client, text), endpoint=url, completion_window="24h")


def polled(client: OpenAI, batch: Any, *statuses: str) -> Any:
    while (now := client.batches.retrieve(batch.id)).status not in (*statuses, "completed", "failed", "cancelled"):
        time.sleep(0.05)
    return now


def content(client: OpenAI, file_id: str) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(file_id).text.splitlines()]


def test_a_batch_is_uploaded_created_polled_and_downloaded(client: OpenAI, served: RunningServer) -> None:
    rows = "".join(line(f"c{index}", CHAT, messages=QUESTION, max_tokens=6) for index in range(5))
    rows += line("bad", CHAT, messages=QUESTION, max_tokens=10_000)
    file = client.files.create(file=("questions.jsonl", rows.encode()), purpose="batch")
    assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(rows), "questions.jsonl", "batch")
    assert client.files.content(file.id).text == rows
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "one"}
    )
    assert (batch.object, batch.metadata, batch.errors) == ("batch", {"night": "one"}, None)
    done = polled(client, batch)
    assert (done.status, done.input_file_id) == ("completed", file.id)
    assert done.request_counts.to_dict() == {"total": 6, "completed": 5, "failed": 1}
    answers = content(client, done.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"c{index}" for index in range(5)]
    assert {each["response"]["body"]["object"] for each in answers} == {"chat.completion"}
    assert done.usage.output_tokens == sum(each["response"]["body"]["usage"]["completion_tokens"] for each in answers)
    [error] = content(client, done.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert client.files.retrieve(done.output_file_id).purpose == "batch_output"
    assert done.id in [each.id for each in client.batches.list(limit=1)], "pages are followed to their end"
    assert done.output_file_id in [each.id for each in client.files.list(purpose="batch_output", limit=1)]
    # It is a job like any other.
    assert f"{done.id}.jsonl" in {JobStatus.read(folder).output.name for folder in jobs()}
    assert client.files.delete(done.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(done.output_file_id)


def test_a_batch_is_cancelled_after_its_pass_and_keeps_its_answers(client: OpenAI) -> None:
    batch = begin(client, completions(200, 60))
    waiting = begin(client, completions(3, 5))
    while not (now := polled(client, batch, "in_progress")).request_counts.completed:
        assert now.status in ("validating", "in_progress")
    assert client.batches.cancel(waiting.id).status == "cancelling"
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = polled(client, batch)
    assert done.status == "cancelled"
    assert 0 < done.request_counts.completed < 200 == done.request_counts.total
    assert len(content(client, done.output_file_id)) == done.request_counts.completed
    ended = polled(client, waiting)
    assert (ended.status, ended.output_file_id) == ("cancelled", None)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("text", "url", "found"),
    [
        ("no json\n", CHAT, "Expecting value"),
        ("", CHAT, "contains no rows"),
        (line("a", CHAT, messages=QUESTION), COMPLETION, "1 line of file-"),
    ],
    ids=["no JSON", "empty", "another endpoint"],
)
def test_a_file_that_is_none_fails_its_batch(client: OpenAI, text: str, url: str, found: str) -> None:
    done = polled(client, begin(client, text, url))
    assert (done.status, done.output_file_id) == ("failed", None)
    [error] = done.errors.data
    assert found in error.message
    assert "/" not in error.message.replace(CHAT, "").replace(COMPLETION, ""), "no path of the server is shown"


def test_every_line_that_is_wrong_has_an_entry(client: OpenAI) -> None:
    """The first twenty of them, and then how many more there are; no advice about an option that HTTP has not."""
    good = line("a", CHAT, messages=QUESTION)
    done = polled(client, begin(client, good + "no json\n" + good.replace('"a"', '"b"') + "[]\n" * 40, CHAT))
    entries = done.errors.data
    assert [(each.line, each.code) for each in entries[:2]] == [(2, "invalid_json_line"), (4, "invalid_json_line")]
    assert (entries[-1].line, entries[-1].message) == (None, f"{41 - len(entries) + 1} more lines are wrong")
    assert not any("--lenient" in each.message for each in entries)


def test_chats_are_answered_beside_a_batch_whole_and_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "any", "messages": QUESTION, "max_tokens": 20, "temperature": 0}
    # From the second request on the prompt is in the cache, which usage tells.
    _, alone = (client.chat.completions.create(**asked) for _ in range(2))
    batch = begin(client, completions(20, 60))
    polled(client, batch, "in_progress")
    beside = client.chat.completions.create(**asked)
    assert beside.choices[0].message.content == alone.choices[0].message.content
    assert beside.usage == alone.usage
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(each.choices[0].delta.content or "" for each in pieces if each.choices)
    assert text == alone.choices[0].message.content
    assert [each.choices[0].finish_reason for each in pieces if each.choices][-1] == alone.choices[0].finish_reason
    assert pieces[-1].usage == alone.usage
    assert client.batches.retrieve(batch.id).status == "in_progress", "the batch was to run beside"
    done = polled(client, batch)
    assert done.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert len(content(client, done.output_file_id)) == 20


def test_cached_tokens_are_those_of_the_prefix_cache(client: OpenAI) -> None:
    """Of the second request with the same beginning, its whole blocks; of a batch's rows, what was shared."""
    asked: dict[str, Any] = {"model": "any", "prompt": "Once there were rivers " * 8, "max_tokens": 3, "temperature": 0}
    found = [client.completions.create(**asked, n=count).usage for count in (1, 1, 2)]
    cached = [each.prompt_tokens_details.cached_tokens for each in found if each and each.prompt_tokens_details]
    assert found[0] is not None
    assert cached[0] < cached[1] == cached[2] < found[0].prompt_tokens
    rows = "".join(line(f"r{index}", COMPLETION, prompt=asked["prompt"], max_tokens=2) for index in range(4))
    done = polled(client, begin(client, rows))
    assert done.usage.input_tokens_details.cached_tokens == 4 * cached[1]
    # The answers themselves are those of the rows alone.
    answers = content(client, done.output_file_id)
    assert all("prompt_tokens_details" not in each["response"]["body"]["usage"] for each in answers)


def test_completions_have_several_samples_whole_and_in_pieces(client: OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "any", "prompt": ["In the", "And the"], "n": 2, "max_tokens": 8, "temperature": 0.9, "seed": 4
    }  # fmt: skip
    whole = client.completions.create(**asked, logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert all(choice.logprobs and len(choice.logprobs.tokens or ()) <= 8 for choice in whole.choices)
    texts = [""] * 4
    for piece in client.completions.create(**asked, stream=True):
        for choice in piece.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(client: OpenAI) -> None:
    """Put together, token by token; offsets of completions go on from piece to piece."""
    chat: dict[str, Any] = {
        "model": "any", "messages": QUESTION, "max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**chat).choices[0].logprobs
    pieces = [piece.choices[0] for piece in client.chat.completions.create(**chat, stream=True)]
    found = [token for piece in pieces if piece.logprobs for token in piece.logprobs.content or ()]
    assert whole is not None
    assert [each.model_dump() for each in found] == [each.model_dump() for each in whole.content or ()]
    assert sum(piece.logprobs is not None for piece in pieces) > 3, "not all of them at the end"
    asked: dict[str, Any] = {
        "model": "any", "prompt": "In the", "n": 2, "max_tokens": 8, "temperature": 0.9, "seed": 4, "logprobs": 2,
    }  # fmt: skip
    wholes = client.completions.create(**asked).choices
    parts: list[list[Any]] = [[], []]
    for piece in client.completions.create(**asked, stream=True):
        for choice in piece.choices:
            if choice.logprobs is not None:
                parts[choice.index].append(choice.logprobs)
    for each, pieces_of_it in zip(wholes, parts, strict=True):
        assert each.logprobs is not None
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [value for part in pieces_of_it for value in getattr(part, name)]
            assert joined == getattr(each.logprobs, name), name


def test_a_request_that_does_not_say_how_long_gets_what_fits(client: OpenAI) -> None:
    answer = client.completions.create(model="any", prompt="x" * 380, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 400


def test_a_client_that_leaves_takes_its_sequence_along(client: OpenAI, served: RunningServer) -> None:
    stream = client.completions.create(
        model="any", prompt="In", max_tokens=390, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    while value(client, "moedge_requests") or value(client, "moedge_running_sequences"):
        time.sleep(0.05)


def plain(client: OpenAI, path: str) -> str:
    """The text of a route beside those of the API."""
    return client._client.get(str(client.base_url).removesuffix("/v1/") + path).text


def value(client: OpenAI, name: str) -> float:
    text = plain(client, "/metrics")
    [found] = [each.split()[1] for each in text.splitlines() if each.split()[0] == name]
    return float(found)


def test_models_health_and_metrics(client: OpenAI) -> None:
    [model] = client.models.list()
    assert client.models.retrieve(model.id) == model
    assert plain(client, "/health") == '{"status":"ok"}'
    before = value(client, "moedge_generated_tokens_total")
    client.completions.create(model="any", prompt="In", max_tokens=5, extra_body={"ignore_eos": True})
    assert value(client, "moedge_generated_tokens_total") == before + 5
    text = plain(client, "/metrics")
    assert 'moedge_memory_budget_bytes{tier="host"} 3221225472' in text


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "unknown field": ({"messages": QUESTION, "max_token": 3}, "max_token"),
    "too long": ({"messages": QUESTION, "max_tokens": 10_000}, ""),
    "stream is text": ({"messages": QUESTION, "stream": "yes"}, "stream"),
    "a role of its own": ({"messages": [{"role": "robot", "content": "x"}]}, ""),
    "temperature": ({"messages": QUESTION, "temperature": -1}, "temperature"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_answered_is_refused_with_the_field(client: OpenAI, name: str) -> None:
    body, param = BAD[name]
    with pytest.raises(openai.BadRequestError) as refused:
        client.post("/chat/completions", body={"model": "any", **body}, cast_to=object)
    assert set(refused.value.body or {}) == {"message", "type", "param", "code"}  # type: ignore[arg-type]
    assert param in str(refused.value.param or refused.value)


HALF = {"content": b"--a\r\n", "headers": {"content-type": "multipart/form-data; boundary=a"}}
NAMED = {"files": {"file": ("a\u2028b", b"x")}, "data": {"purpose": "batch"}}
ELSEWHERE = {"json": {"endpoint": CHAT, "completion_window": "24h", "input_file_id": "../lock"}}
HOSTILE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "path in a file's id": ("get", "/files/..%2f..%2fetc%2fpasswd", {}, 404),
    "path in a content's id": ("get", "/files/..%2f..%2flock/content", {}, 404),
    "another suffix": ("get", "/files/file-0123456789abcdef01234567.json", {}, 404),
    "path in a batch's id": ("get", "/batches/..%2ffiles", {}, 404),
    "cancel nothing": ("post", "/batches/batch_0123/cancel", {}, 404),
    "delete a path": ("delete", "/files/..%2flock", {}, 404),
    "unknown route": ("get", "/nothing", {}, 404),
    "wrong method": ("delete", "/models", {}, 405),
    "no JSON": ("post", "/batches", {"content": b"{"}, 400),
    "a list": ("post", "/batches", {"content": b"[]"}, 400),
    "deep": ("post", "/chat/completions", {"content": b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"}, 400),
    "NaN": ("post", "/chat/completions", {"content": b'{"temperature": NaN}'}, 400),
    "twice the same key": ("post", "/batches", {"content": b'{"endpoint": 1, "endpoint": 2}'}, 400),
    "no UTF-8": ("post", "/batches", {"content": b'{"a": "\xff"}'}, 400),
    "large body": ("post", "/chat/completions", {"content": b" " * 20_001}, 413),
    "large file": ("post", "/files", {"files": {"file": b"x" * 200_001}, "data": {"purpose": "batch"}}, 413),
    "no form": ("post", "/files", {"content": b"x"}, 415),
    "half a form": ("post", "/files", HALF, 400),
    "no file": ("post", "/files", {"files": {"other": b"x"}, "data": {"purpose": "batch"}}, 400),
    "no purpose": ("post", "/files", {"files": {"file": b"x"}}, 400),
    "name with a newline": ("post", "/files", NAMED, 400),
    "file of another id": ("post", "/batches", ELSEWHERE, 404),
    "no endpoint": ("post", "/batches", {"json": {"endpoint": "/v1/embeddings", "completion_window": "24h"}}, 400),
    "list of nothing": ("get", "/files?limit=-1", {}, 400),
    "after nothing": ("get", "/batches?after=x", {}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_requests_are_refused_in_the_shape_of_the_api(client: OpenAI, served: RunningServer, name: str) -> None:
    method, path, options, status = HOSTILE[name]
    answer = client._client.request(method, served.url + path, **options)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert plain(client, "/health") == '{"status":"ok"}'


def test_the_name_of_a_file_is_no_path(client: OpenAI) -> None:
    file = client.files.create(file=("../../etc/passwd", b"x"), purpose="batch")
    assert client.files.content(file.id).text == "x"
    assert client.files.delete(file.id).deleted


def test_a_file_that_a_batch_reads_is_kept(client: OpenAI) -> None:
    batch = begin(client, completions(100, 200))
    with pytest.raises(openai.ConflictError):
        client.files.delete(batch.input_file_id)
    client.batches.cancel(batch.id)
    polled(client, batch)
    assert client.files.delete(batch.input_file_id).deleted


def upload_most(client: OpenAI, kept: list[str]) -> None:
    while len(kept) < 50:
        kept.append(upload(client, "x"))


def test_files_are_counted(client: OpenAI) -> None:
    kept: list[str] = []
    with pytest.raises(openai.RateLimitError) as refused:
        upload_most(client, kept)
    assert refused.value.code == "too_many_files"
    for file_id in kept:
        client.files.delete(file_id)
    client.files.delete(upload(client, "x"))
