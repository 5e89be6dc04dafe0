"""The server-sent events of an answer: chunks of chats and completions, and the events of the Responses API."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ...face import Endpoint
from .errors import ApiError
from .live import AnswerPiece, Event, Finished, LiveRequest


class EventWriter(Protocol):
    """One stream, event by event."""

    def begin(self) -> Iterator[bytes]: ...

    def piece(self, piece: AnswerPiece) -> Iterator[bytes]: ...

    def end(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        """`body` is the whole answer."""

    def fail(self, error: ApiError) -> Iterator[bytes]:
        """An error that comes late: it is the last event."""


def event_writer(live: LiveRequest) -> EventWriter:
    return ResponseEvents(live) if live.row.endpoint is Endpoint.RESPONSE else ChunkEvents(live)


def written(writer: EventWriter, event: Event) -> Iterator[bytes]:
    if isinstance(event, ApiError):
        return writer.fail(event)
    return writer.end(event.body) if isinstance(event, Finished) else writer.piece(event)


def as_event(content: Mapping[str, Any], name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


class ChunkEvents:
    """The objects of OpenAI's streams of chats and completions."""

    def __init__(self, live: LiveRequest) -> None:
        self._live = live
        self._chat = live.row.endpoint is Endpoint.CHAT

    def begin(self) -> Iterator[bytes]:
        if self._chat:
            delta = {"role": "assistant", "content": ""}
            choices = range(len(self._live.opened.sequences))
            yield self._chunk(
                [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for index in choices]
            )

    def piece(self, piece: AnswerPiece) -> Iterator[bytes]:
        delta = self._delta(piece.index, piece.reasoning, piece.content)
        yield self._chunk([{**delta, "logprobs": piece.logprobs}])

    def end(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        yield self._chunk([self._last(choice) for choice in body["choices"]])
        if self._live.wanted.usage:
            yield self._chunk([], usage=body["usage"])
        yield b"data: [DONE]\n\n"

    def fail(self, error: ApiError) -> Iterator[bytes]:
        yield as_event(error.as_json())

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        live = self._live
        chunk = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + live.row.id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": live.created,
            "model": live.model,
            "choices": choices,
        }
        return as_event(chunk | more)

    def _delta(self, index: int, reasoning: str, content: str) -> dict[str, Any]:
        if not self._chat:
            return {"index": index, "text": content, "logprobs": None, "finish_reason": None}
        delta = {"content": content} if content else {}
        delta |= {"reasoning_content": reasoning} if reasoning else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _last(self, choice: dict[str, Any]) -> dict[str, Any]:
        """The end of one choice; of an answer that may call functions it is all of it."""
        ended = {**self._delta(choice["index"], "", ""), "finish_reason": choice["finish_reason"]}
        if self._live.row.tools:
            message = choice["message"]
            calls = [{"index": index, **call} for index, call in enumerate(message.get("tool_calls", ()))]
            ended["delta"] = {"content": message["content"]} | ({"tool_calls": calls} if calls else {})
            ended["logprobs"] = choice["logprobs"]
        return ended


class ResponseEvents:
    """Typed events with numbers: each item of the output is added, grows, and is done."""

    def __init__(self, live: LiveRequest) -> None:
        self._begun = live.begun()
        self._number = 0
        # The item that grows, and which of the output it is.
        self._item: dict[str, Any] | None = None
        self._index = -1
        # Log probabilities of tokens whose text has not come yet.
        self._logprobs: list[Any] = []

    def begin(self) -> Iterator[bytes]:
        for kind in ("created", "in_progress"):
            yield self._event(kind, response=self._begun)

    def piece(self, piece: AnswerPiece) -> Iterator[bytes]:
        self._logprobs += (piece.logprobs or {}).get("content", [])
        if piece.reasoning:
            yield from self._grow("reasoning", piece.reasoning)
        if piece.content:
            yield from self._grow("message", piece.content)

    def end(self, body: Mapping[str, Any]) -> Iterator[bytes]:
        for item in body["output"][max(self._index, 0) :]:
            if self._item is None:
                yield from self._add(item)
                yield self._delta(item["arguments"] if "arguments" in item else item["content"][0]["text"])
            elif self._logprobs and item["type"] == "message":
                yield self._delta("")
            yield from self._done(item)
        yield self._event(body["status"], response=body)

    def fail(self, error: ApiError) -> Iterator[bytes]:
        failed = {"code": "server_error" if error.status >= 500 else "invalid_prompt", "message": str(error)}
        yield self._event("failed", response={**self._begun, "status": "failed", "error": failed})

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if self._item is None or self._item["type"] != kind:
            if self._item is not None:
                yield from self._done({**self._item, "status": "completed"})
            yield from self._add(_empty(kind, self._begun["id"]))
        assert self._item is not None
        self._item["content"][0]["text"] += text
        yield self._delta(text)

    def _add(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        self._index += 1
        self._item = {**item, "status": "in_progress"}
        hollow: dict[str, Any] = {"arguments": ""} if "arguments" in item else {"content": []}
        yield self._event("output_item.added", output_index=self._index, item={**self._item, **hollow})
        if "content" in item:
            yield self._of_item("content_part.added", content_index=0, part={**item["content"][0], "text": ""})

    def _delta(self, text: str) -> bytes:
        assert self._item is not None
        if "arguments" in self._item:
            return self._of_item("function_call_arguments.delta", delta=text)
        kind = self._item["content"][0]["type"]
        if self._item["type"] == "reasoning":
            return self._of_item(f"{kind}.delta", content_index=0, delta=text)
        logprobs, self._logprobs = self._logprobs, []
        return self._of_item(f"{kind}.delta", content_index=0, delta=text, logprobs=logprobs)

    def _done(self, item: Mapping[str, Any]) -> Iterator[bytes]:
        if "arguments" in item:
            found = {name: item[name] for name in ("name", "arguments")}
            yield self._of_item("function_call_arguments.done", **found)
        else:
            part = item["content"][0]
            said = {name: part[name] for name in ("text", "logprobs") if name in part}
            yield self._of_item(f"{part['type']}.done", content_index=0, **said)
            yield self._of_item("content_part.done", content_index=0, part=part)
        yield self._event("output_item.done", output_index=self._index, item=item)
        self._item = None

    def _of_item(self, kind: str, **content: Any) -> bytes:
        assert self._item is not None
        return self._event(kind, item_id=self._item["id"], output_index=self._index, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        name = f"response.{kind}"
        event = {"type": name, "sequence_number": self._number, **content}
        self._number += 1
        return as_event(event, name)


def _empty(kind: str, response_id: str) -> dict[str, Any]:
    """An item of the output, as a response has it, without text."""
    name = response_id.removeprefix("resp_")
    if kind == "reasoning":
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        return {"id": f"rs_{name}", "type": kind, "summary": [], "content": [part]}
    part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{name}", "type": kind, "role": "assistant", "content": [part]}
