"""What other clients of OpenAI's batches send (`transcripts.json`) to the routes (`apps/serve/app.py`), and what they
read of the replies.

Recorded of litellm (`create_file`, `create_batch`, `retrieve_batch`, `file_content` and others, `responses`) and of
autobatcher with `completion_window="24h"`, and then without; it validates each answer by OpenAI's own types.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Batch, FileDeleted, FileObject
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from moedge.apps.serve.server import RunningServer

TRANSCRIPTS = json.loads((Path(__file__).parent / "transcripts.json").read_text())
TYPES = {"/v1/chat/completions": ChatCompletion, "/v1/responses": Response}


class Replay:
    """Requests as they were recorded, with the ids of this server in the places of those that were met then."""

    def __init__(self, client: OpenAI, url: str) -> None:
        self._http = client._client
        self._root = url.removesuffix("/v1")
        self._ids: dict[str, str] = {}
        self._asked: dict[str, dict[str, Any]] = {}

    def send(self, request: dict[str, Any]) -> Any:
        path, body = self._here(request["path"]), self._here(request["body"])
        reply = self._http.request(
            request["method"], self._root + path, content=body.encode(), headers=request["headers"]
        )
        assert reply.status_code == request["status"], reply.text
        found = READ[request["reply"]](reply, self)
        if request["reply"] == "completed batch" and found.status != "completed":
            assert found.status in ("validating", "in_progress", "finalizing")
            time.sleep(0.05)
            return self.send(request)
        self._ids |= {name: getattr(found, field) for name, field in request.get("binds", {}).items()}
        if request["method"] == "POST" and "jsonl" in body:
            rows = [json.loads(each) for each in body.splitlines() if each.startswith('{"custom_id"')]
            self._asked |= {row["custom_id"]: row for row in rows}
        return found

    def answers(self, reply: Any) -> None:
        """As autobatcher reads them: each line by the id that it sent, its body by the type of its endpoint."""
        lines = [json.loads(each) for each in reply.text.strip().split("\n")]
        assert lines
        for line in lines:
            row = self._asked.pop(line["custom_id"])
            assert (line["error"], line["response"]["status_code"]) == (None, 200)
            answer: Any = TYPES[row["url"]].model_validate(line["response"]["body"])
            text = answer.output_text if isinstance(answer, Response) else answer.choices[0].message.content
            assert isinstance(text, str)

    def end(self) -> None:
        assert not self._asked, "rows without an answer"

    def _here(self, text: str) -> str:
        for name, own in self._ids.items():
            text = text.replace("{" + name + "}", own)
        return text


def of_type(kind: Any) -> Callable[[Any, Replay], Any]:
    return lambda reply, replay: kind.model_validate(reply.json())


def page_of(kind: Any) -> Callable[[Any, Replay], Any]:
    def read(reply: Any, replay: Replay) -> Any:
        found = reply.json()
        each = [kind.model_validate(item) for item in found["data"]]
        assert (found["object"], found["first_id"], found["last_id"]) == ("list", each[0].id, each[-1].id)
        assert isinstance(found["has_more"], bool)
        return each

    return read


def error(reply: Any, replay: Replay) -> Any:
    found = reply.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found


READ: dict[str, Callable[[Any, Replay], Any]] = {
    "file": of_type(FileObject),
    "batch": of_type(Batch),
    "completed batch": of_type(Batch),
    "answers": lambda reply, replay: replay.answers(reply),
    "files": page_of(FileObject),
    "batches": page_of(Batch),
    "deleted file": of_type(FileDeleted),
    "response": of_type(Response),
    "error": error,
}


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript["client"].split()[0])
def test_what_a_client_sent_is_answered_with_what_it_reads(
    client: OpenAI, served: RunningServer, transcript: dict[str, Any]
) -> None:
    replay = Replay(client, served.url)
    replies = {request["path"]: replay.send(request) for request in transcript["requests"]}
    replay.end()
    assert len(replies) > 5


def test_a_response_in_the_background_is_refused_in_a_sentence_that_names_it(
    client: OpenAI, served: RunningServer
) -> None:
    """What autobatcher asks for where no completion window was given."""
    [flex] = [each for each in TRANSCRIPTS[1]["requests"] if each["path"] == "/v1/responses"]
    refused = Replay(client, served.url).send(flex)
    assert (refused["param"], refused["code"]) == ("background", "unsupported_parameter")
    assert "no response is kept" in refused["message"]
