"""What stands before every route: keys, names of hosts, sizes and seconds. An ASGI middleware, and uvicorn's protocol
with limits on the seconds that headers may take and that an answer may wait for its reader."""

import asyncio
import hmac
import json
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .counts import ServerCounts
from .errors import ApiError
from .limits import LOOPBACK, ServerLimits

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Says nothing but that the server answers.
_OPEN_PATHS = ("/health",)
_UPLOADS = "/v1/files"
# Of browsers: a page of this server, or an address that a person typed.
_OWN_SITES = ("", "same-origin", "none")
# As many bodies of this size as there may be requests are not counted.
_SMALL_NBYTES = 64 << 10
# Of a body that is refused: clients that write all of it before they read would see a reset instead of the answer.
_MOST_DROPPED_NBYTES, _DROPPING_SECONDS = 16 << 20, 2.0


class RequestGate:
    """Refuses what no route should see, in the API's own shape."""

    def __init__(self, app: App, key: str | None, limits: ServerLimits, counts: ServerCounts) -> None:
        """Without a key only this machine may ask, and no page of a browser."""
        self._counts = counts
        self._app = app
        self._key = None if key is None else key.encode()
        self._limits = limits
        self._num_open = 0
        self._bodies = _Bodies(limits)
        self._rates = RequestRates(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._num_open += 1
        guarded = _Guarded(scope, receive, send, self._limits, self._bodies)
        try:
            self._check(scope)
            guarded.check_length()
            await self._app(scope, guarded.receive, guarded.send)
        except ApiError as error:
            self._counts.refused(error)
            await guarded.refuse(error)
        finally:
            guarded.end()
            self._num_open -= 1

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        if self._num_open > self._limits.requests:
            message = "too many requests are open; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
        self._rates.take((scope.get("client") or ("",))[0])
        if self._key is None:
            _refuse_other_hosts(headers)
        elif scope["path"] not in _OPEN_PATHS:
            self._check_key(headers.get(b"authorization", b""))

    def _check_key(self, header: bytes) -> None:
        kind, _, key = header.partition(b" ")
        assert self._key is not None
        # Compared whether or not the kind is right: the seconds say nothing of the key.
        same = hmac.compare_digest(key.strip(), self._key)
        if not same or kind.lower() != b"bearer":
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")


class RequestRates:
    """A token bucket for each address: full with `burst` tokens, of which a request takes one."""

    def __init__(self, limits: ServerLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        # Tokens and when they were counted, the address that asked last at the end.
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, address: str) -> None:
        """Raises ApiError where the bucket is empty."""
        limits, now = self._limits, self._clock()
        tokens, counted = self._buckets.pop(address, (float(limits.burst), now))
        tokens = min(limits.burst, tokens + (now - counted) * limits.requests_per_second)
        self._buckets[address] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self._buckets) > limits.clients:
            self._buckets.popitem(last=False)
        if tokens < 1:
            seconds = math.ceil((1 - tokens) / limits.requests_per_second)
            message = f"more than {limits.requests_per_second:g} requests a second; try again in {seconds} s"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=seconds)


def _refuse_other_hosts(headers: dict[bytes, bytes]) -> None:
    """A page of another site that a browser on this machine shows may send requests here, also under its own name."""
    host, origin, site = (headers.get(name, b"").decode("latin-1") for name in (b"host", b"origin", b"sec-fetch-site"))
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdecimal() else host
    # Another port of this machine is another site: whoever serves there would act for the user.
    found = host if name.strip("[]") not in LOOPBACK else origin if origin not in ("", f"http://{host}") else ""
    if not found and site not in _OWN_SITES:
        found = f"sec-fetch-site: {site}"
    if found:
        message = (
            f"without an API key only this machine's programs and this server's own pages may ask; found {found[:64]!a}"
        )
        raise ApiError(403, message, code="forbidden")


class _Bodies:
    """The large bodies of all open requests, which are in memory; uploads go to disk as they come."""

    def __init__(self, limits: ServerLimits) -> None:
        self._most = limits.bodies_nbytes
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Raises ApiError where bodies would have more than they may."""
        if self._nbytes + nbytes > self._most:
            message = f"open requests have up to {self._most:,} bytes; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", retry_after=1)
        self._nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        self._nbytes -= nbytes


class _Guarded:
    """One request: its body within bytes and seconds, and its answer taken in time."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ServerLimits, bodies: _Bodies) -> None:
        self._bodies = None if scope["path"] == _UPLOADS else bodies
        upload = scope["path"] == _UPLOADS and scope["method"] == "POST"
        # A form has its boundaries beside the file.
        self._most_nbytes = limits.upload_nbytes + (1 << 16) if upload else limits.body_nbytes
        self._scope = scope
        self._receive = receive
        self._send = send
        self._idle_seconds = limits.idle_seconds
        seconds = limits.upload_seconds if upload else limits.body_seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._nbytes = self._held = 0
        self._whole = False
        self._answered = self._dropping = False

    def check_length(self) -> None:
        for name, value in self._scope["headers"]:
            if name == b"content-length":
                if not value.isdigit() or int(value[:20]) > self._most_nbytes:
                    raise self._too_large()
                # Before the first byte: of many that come at once, those that fit are read whole.
                self._hold(int(value))

    def _hold(self, nbytes: int) -> None:
        """Counts a body of `nbytes`, unless it is small or counted already."""
        if self._bodies is not None and nbytes > max(self._held, _SMALL_NBYTES):
            self._bodies.take(nbytes - self._held)
            self._held = nbytes

    async def receive(self) -> Message:
        if self._whole:
            # Only the end of the connection comes.
            return await self._receive()
        left = self._deadline - asyncio.get_running_loop().time()
        try:
            message = await asyncio.wait_for(self._receive(), max(0.0, min(self._idle_seconds, left)))
        except TimeoutError:
            raise ApiError(408, "the body came too slowly", code="timeout") from None
        self._nbytes += len(message.get("body", b""))
        if self._nbytes > self._most_nbytes:
            raise self._too_large()
        self._hold(self._nbytes)
        self._whole = not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        self._answered = True
        if message["type"] == "http.response.start" and not self._whole and message["status"] >= 400:
            self._dropping = True
            message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
        if self._dropping and message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drop()
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _drop(self) -> None:
        """Reads what is left of the body, within bounds; the connection ends then."""
        nbytes = 0
        with suppress(TimeoutError):
            while not self._whole and nbytes < _MOST_DROPPED_NBYTES:
                message = await asyncio.wait_for(self._receive(), _DROPPING_SECONDS)
                nbytes += len(message.get("body", b""))
                self._whole = not message.get("more_body", False)

    def end(self) -> None:
        """The request has its answer, or nobody waits for it."""
        if self._bodies is not None:
            self._bodies.give_back(self._held)

    async def refuse(self, error: ApiError) -> None:
        assert not self._answered
        body = json.dumps(error.as_json()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._most_nbytes:,} bytes", code="request_too_large")


def bounded_protocol(limits: ServerLimits) -> type[H11Protocol]:
    """uvicorn's protocol; a connection ends where headers are not complete in time, where nobody reads its answer, and
    without a request where there are too many."""

    held: dict[H11Protocol, None] = {}

    class BoundedProtocol(H11Protocol):
        _headers: asyncio.TimerHandle | None = None
        _reader: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            held[self] = None
            if len(held) > limits.connections:
                # The oldest without a request, if need be this one: who holds connections keeps nobody out.
                next((each for each in held if _idle(each)), self).transport.abort()
            self._expect()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reader = self.loop.call_later(limits.idle_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reader = _forget(self._reader)

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers, self._reader = _forget(self._headers), _forget(self._reader)
            held.pop(self, None)
            super().connection_lost(exc)

        def _expect(self) -> None:
            if self.conn.their_state is not h11.IDLE:
                self._headers = _forget(self._headers)
            elif self._headers is None:
                self._headers = self.loop.call_later(limits.header_seconds, self.transport.close)

    return BoundedProtocol


def _idle(protocol: H11Protocol) -> bool:
    """Whether a connection has no request that is read or answered."""
    answered = protocol.cycle is None or protocol.cycle.response_complete
    return answered and not protocol.transport.is_closing()


def _forget(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancels a timer; returns the one that is left, which is none."""
    if timer is not None:
        timer.cancel()
    return None
