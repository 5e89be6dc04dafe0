"""The routes of OpenAI's API, as a FastAPI application. What they share with nobody is in gate.py and live.py."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from ...face import Endpoint, InvalidRow, LoadedModel, is_exhausted, parse_object
from .batches import BatchQueue
from .counts import ServerCounts
from .engine_thread import EngineThread
from .errors import ApiError, not_found, of_failure, refused
from .files import BATCH, FileStore, StoredFile, UploadForm, checked_name, page
from .limits import ServerLimits
from .live import Event, Finished, LiveRequest, RequestReader
from .metrics import CONTENT_TYPE, metrics_text
from .streams import event_writer, written

_MOST_LISTED = 10_000
_PIECE_NBYTES = 1 << 18
# Seconds between two looks at whether a client that waits for a whole answer is still there.
_LOOK_SECONDS = 2.0


class Turns:
    """Bodies are read and tokenized one at a time; those that wait have at most `most_nbytes` in all."""

    def __init__(self, most_nbytes: int) -> None:
        self._most = most_nbytes
        self._nbytes = 0
        self._free = asyncio.Semaphore(1)

    @asynccontextmanager
    async def take(self, nbytes: int) -> AsyncIterator[None]:
        """Raises ApiError where too much waits already; a body alone never does."""
        if self._nbytes and self._nbytes + nbytes > self._most:
            message = f"{self._nbytes:,} bytes of other requests wait to be tokenized; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
        self._nbytes += nbytes
        try:
            async with self._free:
                yield
        finally:
            self._nbytes -= nbytes


@dataclass(frozen=True, slots=True)
class Service:
    """Everything that routes use; `model` is the name that clients see."""

    model: str
    created: int
    loaded: LoadedModel
    engine: EngineThread
    reader: RequestReader
    files: FileStore
    batches: BatchQueue
    limits: ServerLimits
    turns: Turns


def make_app(service: Service) -> FastAPI:
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.counts = service.engine.counts
    app.add_exception_handler(ApiError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_route)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(OSError, _exhausted)
    app.add_exception_handler(Exception, _failed)
    _add_models(app, service)
    _add_files(app, service)
    _add_batches(app, service)
    _add_answers(app, service)
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.app.state.counts.refused(error)
    return JSONResponse(error.as_json(), error.status, error.headers)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    return await _refuse(request, ApiError(error.status_code, message, code="unknown_url"))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)


async def _exhausted(request: Request, error: Exception) -> Response:
    if not is_exhausted(error):
        raise error
    message = f"the server's disk or memory gives out ({error}); try again later"
    return await _refuse(request, ApiError(507, message, code="insufficient_storage"))


async def _failed(request: Request, error: Exception) -> Response:
    """uvicorn prints the traceback."""
    return await _refuse(request, ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def _add_models(app: FastAPI, service: Service) -> None:
    shown = {"id": service.model, "object": "model", "created": service.created, "owned_by": "moedge"}

    # On the loop: no request that works in a thread may keep them waiting.
    @app.get("/health")
    async def health() -> Response:
        if service.engine.died.done():
            raise ApiError(503, "the engine has ended", code="stopping")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        num_files = len(service.files.list(None))
        text = metrics_text(service.loaded, service.engine, service.batches.counts(), num_files)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    @app.get("/v1/models")
    def models() -> Response:
        return JSONResponse({"object": "list", "data": [shown]})

    @app.get("/v1/models/{name:path}")
    def model(name: str) -> Response:
        if name != service.model:
            raise not_found("model", name)
        return JSONResponse(shown)


def _add_files(app: FastAPI, service: Service) -> None:
    files = service.files

    @app.post("/v1/files")
    async def upload(request: Request) -> Response:
        return JSONResponse((await _upload(request, files)).as_json())

    @app.get("/v1/files")
    def listed(request: Request) -> Response:
        return _listed(request, [each.as_json() for each in files.list(request.query_params.get("purpose"))])

    @app.get("/v1/files/{file_id}")
    def retrieve(file_id: str) -> Response:
        return JSONResponse(files.get(file_id).as_json())

    @app.get("/v1/files/{file_id}/content")
    def content(file_id: str) -> Response:
        # Opened before the answer begins: what fails behind its head cannot be said any more.
        try:
            file = files.path(files.get(file_id)).open("rb")
        except FileNotFoundError:
            raise not_found("content of the file", file_id) from None
        length = {"Content-Length": str(os.fstat(file.fileno()).st_size)}
        return StreamingResponse(_pieces(file), media_type="application/octet-stream", headers=length)

    @app.delete("/v1/files/{file_id}")
    def delete(file_id: str) -> Response:
        found = files.get(file_id)
        if service.batches.uses(found.id):
            raise ApiError(409, f"an unfinished batch reads {found.id}; cancel it first", code="file_in_use")
        files.delete(found.id)
        return JSONResponse({"id": found.id, "object": "file", "deleted": True})


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while data := file.read(_PIECE_NBYTES):
            yield data


async def _upload(request: Request, files: FileStore) -> StoredFile:
    """Writes the file while it comes."""
    file_id, upload = files.upload()
    try:
        with upload:
            form = UploadForm(request.headers.get("content-type", ""), upload.write)
            async for data in request.stream():
                form.add(data)
            form.end()
            if form.filename is None:
                raise refused("the form has no file", "file", "missing_parameter")
            if form.fields.get("purpose") != BATCH:
                raise refused(f'purpose must be "{BATCH}"', "purpose")
            return await run_in_threadpool(files.keep, file_id, upload, checked_name(form.filename))
    finally:
        files.end_upload(upload)


def _listed(request: Request, objects: list[dict[str, Any]]) -> Response:
    """One page of a list: `limit` objects behind the one whose id is `after`."""
    limit, after = request.query_params.get("limit", "100"), request.query_params.get("after")
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MOST_LISTED:
        raise refused(f"limit must be a number from 1 to {_MOST_LISTED:,}", "limit")
    found = [objects[index] for index in page([each["id"] for each in objects], after, int(limit))]
    ends = {"first_id": found[0]["id"] if found else None, "last_id": found[-1]["id"] if found else None}
    more = bool(found) and found[-1]["id"] != objects[-1]["id"]
    return JSONResponse({"object": "list", "data": found, **ends, "has_more": more})


def _add_batches(app: FastAPI, service: Service) -> None:
    batches = service.batches

    @app.post("/v1/batches")
    async def create(request: Request) -> Response:
        body = _object(await request.body())
        return JSONResponse(await run_in_threadpool(batches.create, body))

    @app.get("/v1/batches")
    def listed(request: Request) -> Response:
        return _listed(request, batches.list())

    @app.get("/v1/batches/{batch_id}")
    def retrieve(batch_id: str) -> Response:
        return JSONResponse(batches.get(batch_id))

    @app.post("/v1/batches/{batch_id}/cancel")
    def cancel(batch_id: str) -> Response:
        return JSONResponse(batches.cancel(batch_id))


def _object(data: bytes) -> dict[str, Any]:
    """Raises ApiError for a body that is no JSON object."""
    try:
        return parse_object(data)
    except InvalidRow as error:
        raise of_failure(error.failure) from None


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(request, service, Endpoint.CHAT)

    @app.post("/v1/completions")
    async def completion(request: Request) -> Response:
        return await _answer(request, service, Endpoint.COMPLETION)

    @app.post("/v1/responses")
    async def response(request: Request) -> Response:
        return await _answer(request, service, Endpoint.RESPONSE)


async def _answer(request: Request, service: Service, endpoint: Endpoint) -> Response:
    if service.engine.num_live >= service.limits.chats:
        message = "too many requests wait for an answer; try again later"
        raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
    body, arrived = await request.body(), time.monotonic()
    # One at a time, and in a thread of its own: the pool's threads are for what is short.
    async with service.turns.take(len(body)):
        live = await run_in_threadpool(service.reader.open, body, endpoint)
    live.arrived = arrived
    events = _Events(live)
    service.engine.submit(live)
    if live.wanted.stream:
        return StreamingResponse(_stream(events, service.engine.counts), media_type="text/event-stream")
    return await _whole(request, events)


class _Events:
    """What the engine's thread says of a request, in this loop."""

    def __init__(self, live: LiveRequest) -> None:
        self.live = live
        self.queue: asyncio.Queue[Event] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:
            # Nobody listens once the loop has ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self.queue.put_nowait, event)

        live.emit = emit


async def _whole(request: Request, events: _Events) -> Response:
    try:
        while True:
            try:
                event = await asyncio.wait_for(events.queue.get(), _LOOK_SECONDS)
            except TimeoutError:
                if await request.is_disconnected():
                    return Response(status_code=499)
                continue
            if isinstance(event, ApiError):
                raise event
            if isinstance(event, Finished):
                return JSONResponse(event.body)
    finally:
        events.live.cancel()


async def _stream(events: _Events, counts: ServerCounts) -> AsyncIterator[bytes]:
    """Server-sent events; an error that comes late is one of them."""
    event: Event | None = None
    try:
        writer = event_writer(events.live)
        for data in writer.begin():
            yield data
        while not isinstance(event, Finished | ApiError):
            event = await events.queue.get()
            if isinstance(event, ApiError):
                counts.refused(event)
            for data in written(writer, event):
                yield data
    finally:
        events.live.cancel()
