"""What a server keeps on disk (`apps/serve/files.py`, `apps/serve/batches.py`), without an engine: full disks, records
of others, and the bytes of all uploads.
"""

import asyncio
import errno
import json
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from moedge.apps.serve.app import Service, Turns, make_app
from moedge.apps.serve.batches import BatchQueue
from moedge.apps.serve.counts import ServerCounts
from moedge.apps.serve.files import FileStore
from moedge.apps.serve.limits import ServerLimits, ServerSettings
from moedge.apps.serve.server import _most_connections
from moedge.offload.errors import ExitCode, exit_code_of
from moedge.runtime.settings.errors import OutputRefused

BATCH = {"endpoint": "/v1/completions", "completion_window": "24h"}


class Answer(NamedTuple):
    status: int
    body: Any


class Server:
    """The routes on a folder, whose engine never comes."""

    def __init__(self, folder: Path, limits: ServerLimits) -> None:
        folder.mkdir(exist_ok=True)
        engine: Any = SimpleNamespace(counts=ServerCounts(), died=Future(), num_live=0, broken=False, ready=Future())
        self.engine = engine
        self.files = FileStore(folder, limits)
        self.batches = BatchQueue(folder, self.files, engine, ServerSettings("model", limits=limits))
        unused: Any = None
        self.app = make_app(Service("model", 0, unused, engine, unused, self.files, self.batches, limits, Turns(1)))

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        return self.send(method, path, b"" if body is None else json.dumps(body).encode(), "application/json")

    def upload(self, data: bytes) -> Answer:
        parts = [b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="rows.jsonl"\r\n\r\n' + data]
        form = b"".join(b"--x\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--x--\r\n"
        return self.send("POST", "/v1/files", form, "multipart/form-data; boundary=x")

    def send(self, method: str, path: str, body: bytes, kind: str) -> Answer:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", kind.encode())]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        asyncio.run(self.app(scope, receive, send))  # type: ignore[arg-type]
        return Answer(sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent[1:])))


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`full("open", 2)`: every call from the second on of a function of `os` finds no space."""
    with ExitStack() as undone:

        def begin(name: str, first: int, number: int = errno.ENOSPC) -> None:
            real, calls = getattr(os, name), iter(range(1, 1 << 30))

            def fail(*arguments: Any, **named: Any) -> Any:
                if next(calls) >= first:
                    raise OSError(number, os.strerror(number))
                return real(*arguments, **named)

            context = undone.enter_context(pytest.MonkeyPatch.context())
            context.setattr(os, name, fail)

        begin.end = undone.close  # type: ignore[attr-defined]
        yield begin


CALLS = ("open", "pwrite", "fsync", "replace")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO, errno.EROFS])
@pytest.mark.parametrize(("call", "first"), [*((call, 1) for call in CALLS), ("fsync", 2)])
def test_j6_a_batch_that_finds_no_room_leaves_no_ghost(
    call: str, first: int, number: int, tmp_path: Path, full: Any
) -> None:
    """Also where the record has its name already, and only the folder could not be synchronized."""
    server = Server(tmp_path, ServerLimits())
    file_id = (server.upload(b"{}\n")).body["id"]
    full(call, first, number)
    answer = server.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": file_id})
    assert answer.status == 507
    assert answer.body["error"]["code"] == "insufficient_storage"
    full.end()
    assert server.batches.list() == []
    assert [path.name for path in (tmp_path / "batches").iterdir() if path.suffix == ".json"] == []
    answer = server.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": file_id})
    assert answer.status == 200
    assert [each["id"] for each in server.batches.list()] == [answer.body["id"]]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EIO])
@pytest.mark.parametrize("call", CALLS)
def test_j6_an_upload_that_finds_no_room_leaves_nothing(call: str, number: int, tmp_path: Path, full: Any) -> None:
    server = Server(tmp_path, ServerLimits())
    for first in range(1, 6):
        full(call, first, number)
        answer = server.upload(b"x" * 100_000)
        full.end()
        if answer.status == 200:
            break
        assert answer.status == 507
        assert server.files.list(None) == []
        assert [path.name for path in (tmp_path / "files").iterdir() if path.suffix == ".json"] == []
    assert answer.status == 200
    assert server.files.get(answer.body["id"]).bytes == 100_000
    assert [path for path in (tmp_path / "files").iterdir() if path.suffix == ".tmp"] == []


def test_j6_a_cancellation_that_finds_no_room_is_none(tmp_path: Path, full: Any) -> None:
    server = Server(tmp_path, ServerLimits())
    file_id = (server.upload(b"{}\n")).body["id"]
    batch_id = (server.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": file_id})).body["id"]
    full("open", 1)
    assert (server.ask("POST", f"/v1/batches/{batch_id}/cancel")).status == 507
    full.end()
    assert server.batches.get(batch_id)["status"] == "validating"
    assert (server.ask("POST", f"/v1/batches/{batch_id}/cancel")).body["status"] == "cancelling"


@pytest.mark.parametrize("refused", [False, True])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EMFILE, errno.EDQUOT, errno.EROFS])
def test_j6_a_batch_that_runs_out_of_something_is_left_to_be_resumed(
    number: int, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, died = Server(tmp_path, ServerLimits()), list[BaseException]()
    file_id = (server.upload(b"{}\n")).body["id"]
    server.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": file_id})

    def fails(*arguments: Any) -> Any:
        try:
            raise OSError(number, os.strerror(number))
        except OSError as error:
            if not refused:
                raise
            # As a job's folder is refused that cannot be made.
            raise OutputRefused(f"cannot be created ({error.strerror})") from None

    monkeypatch.setattr("moedge.apps.serve.batches._BatchRun.run", fails)
    monkeypatch.setattr(server.batches, "_request", lambda batch: None)
    server.batches.died = died.append
    server.engine.ready.set_result(None)
    server.batches.start()
    server.batches.close()
    assert [exit_code_of(each) for each in died] == [ExitCode.GAVE_OUT]
    again = BatchQueue(tmp_path, server.files, server.engine, ServerSettings("model"))
    assert [each["status"] for each in again.list()] == ["validating"]
    assert not again._waiting.empty()


BAD = ["", "{", "[]", "7", "null", "{}", '{"id": "file-000000000000000000000000"}', '{"id": 7}', "[" * 100_000, "\x00"]


@pytest.mark.parametrize("content", BAD)
def test_one_bad_record_is_set_aside_and_named(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = Server(tmp_path, ServerLimits())
    kept, spoiled = [(before.upload(b"{}\n")).body["id"] for _ in range(2)]
    batch = (before.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": kept})).body["id"]
    (tmp_path / "files" / f"{spoiled}.json").write_text(content)
    (tmp_path / "batches" / "batch_000000000000000000000000.json").write_text(content)
    after = Server(tmp_path, ServerLimits())
    assert [each.id for each in after.files.list(None)] == [kept]
    assert [each["id"] for each in after.batches.list()] == [batch]
    said = capsys.readouterr().err
    assert f"{spoiled}.json cannot be read" in said
    assert "batch_000000000000000000000000.json cannot be read" in said
    # What a client sent is not thrown away for it.
    assert (tmp_path / "files" / f"{spoiled}.jsonl").read_bytes() == b"{}\n"
    assert (tmp_path / "files" / f"{spoiled}.json.bad").is_file()
    assert [each.id for each in Server(tmp_path, ServerLimits()).files.list(None)] == [kept]


def test_a_record_of_a_newer_server_is_read(tmp_path: Path) -> None:
    before = Server(tmp_path, ServerLimits())
    kept = (before.upload(b"{}\n")).body["id"]
    batch = (before.ask("POST", "/v1/batches", body={**BATCH, "input_file_id": kept})).body["id"]
    for path in (tmp_path / "files" / f"{kept}.json", tmp_path / "batches" / f"{batch}.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "a_field_of_tomorrow": {"x": 1}}))
    after = Server(tmp_path, ServerLimits())
    assert [each.id for each in after.files.list(None)] == [kept]
    assert [each["id"] for each in after.batches.list()] == [batch]


def test_all_uploads_together_are_bounded(tmp_path: Path) -> None:
    server = Server(tmp_path, ServerLimits(stored_nbytes=250_000))
    answers = [server.upload(b"x" * 100_000) for _ in range(3)]
    assert [each.status for each in answers] == [200, 200, 507]
    assert "delete some" in answers[2].body["error"]["message"]
    server.files.delete(answers[0].body["id"])
    assert (server.upload(b"x" * 100_000)).status == 200


@pytest.mark.parametrize("limits", [ServerLimits(queued=2), ServerLimits(batches=2)], ids=["unfinished", "all"])
def test_batches_are_counted(limits: ServerLimits, tmp_path: Path) -> None:
    server = Server(tmp_path, limits)
    body = {**BATCH, "input_file_id": server.upload(b"{}\n").body["id"]}
    answers = [server.ask("POST", "/v1/batches", body=body) for _ in range(3)]
    assert [each.status for each in answers] == [200, 200, 429]
    assert answers[2].body["error"]["code"] == "too_many_batches"


def test_chats_are_counted(tmp_path: Path) -> None:
    server = Server(tmp_path, ServerLimits(chats=2))
    server.engine.num_live = 2
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert server.ask("POST", path, body={}).status == 429


def test_a_disk_error_that_is_no_lack_is_still_a_bug(tmp_path: Path, full: Any) -> None:
    server = Server(tmp_path, ServerLimits())
    full("open", 1, errno.EBADF)
    with pytest.raises(OSError, match="Bad file descriptor"):
        server.upload(b"{}")


def test_half_of_the_descriptors_stay_for_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: asked.append(limits))
    monkeypatch.setattr("resource.getrlimit", lambda kind: (160, 160))
    assert _most_connections(ServerLimits()) == 80
    monkeypatch.setattr("resource.getrlimit", lambda kind: (256, 1 << 20))
    assert (_most_connections(ServerLimits()), asked[-1]) == (1000, (4096, 1 << 20))
