"""What stands before the routes, with nothing behind it: keys, hosts, sizes, and clients that are slow on purpose."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvicorn

from moedge.apps.serve.counts import ServerCounts
from moedge.apps.serve.errors import ApiError
from moedge.apps.serve.gate import RequestGate, RequestRates, bounded_protocol
from moedge.apps.serve.limits import ServerLimits, ServerSettings
from moedge.runtime.settings.errors import BadArgument

PATIENT = ServerLimits(upload_nbytes=1 << 20, body_nbytes=1000, requests=3)
# Longer for headers: a busy machine needs time to send them.
IMPATIENT = replace(PATIENT, header_seconds=1.5, idle_seconds=0.5)
KEY = "a key of many characters"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers the number of bytes of the body; behind /large it sends 64 MB."""
    nbytes, more = 0, True
    try:
        while more:
            message = await receive()
            nbytes, more = nbytes + len(message.get("body", b"")), message.get("more_body", False)
    except ApiError as error:
        await send({"type": "http.response.start", "status": error.status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(error.as_json()).encode()})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(1000 if scope["path"] == "/large" else 0):
        await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        # What is sent to a client that has gone does not wait.
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"%d" % nbytes})


@contextmanager
def running(key: str | None, limits: ServerLimits = PATIENT) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            RequestGate(echo, key, limits, ServerCounts()),
            http=bounded_protocol(limits),
            ws="none",
            lifespan="off",
            log_level="critical",
            timeout_graceful_shutdown=1,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(None) as found:
        yield found


@pytest.fixture(scope="module")
def hurried() -> Iterator[int]:
    """With seconds that are soon over."""
    with running(None, IMPATIENT) as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[int]:
    with running(KEY) as found:
        yield found


def head(path: str = "/", host: str = "127.0.0.1", method: str = "POST", **headers: object) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def exchange(port: int, *pieces: bytes) -> bytes:
    """Everything that comes back until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as opened:
        for piece in pieces:
            opened.sendall(piece)
        answer = b""
        try:
            while data := opened.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split()[1])


def error_of(answer: bytes) -> dict[str, Any]:
    error = json.loads(answer[answer.index(b'{"error') : answer.rindex(b"}") + 1])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_what_is_small_and_comes_in_time_passes(port: int) -> None:
    answer = exchange(port, head(Content_Length=5, Connection="close"), b"12", b"345")
    assert status_of(answer) == 200
    assert answer.partition(b"\r\n\r\n")[2] == b"1\r\n5\r\n0\r\n\r\n"


def test_headers_that_do_not_end_close_the_connection(hurried: int) -> None:
    assert exchange(hurried, b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
    assert exchange(hurried) == b"", "a connection without any request too"


def test_headers_without_end_are_refused(port: int) -> None:
    assert status_of(exchange(port, b"POST / HTTP/1.1\r\nX: " + b"x" * 100_000)) in (400, 431)


def test_a_body_that_does_not_come_is_refused(hurried: int) -> None:
    answer = exchange(hurried, head(Content_Length=100), b"only this")
    assert status_of(answer) == 408
    assert error_of(answer)["code"] == "timeout"


@pytest.mark.parametrize(("path", "limit"), [("/", "body_seconds"), ("/v1/files", "upload_seconds")])
def test_a_body_that_trickles_is_refused_when_its_time_is_over(path: str, limit: str) -> None:
    with (
        running(None, replace(PATIENT, **{limit: 0.5})) as port,
        socket.create_connection(("127.0.0.1", port), timeout=0.05) as opened,
    ):
        opened.sendall(head(path, Content_Length=1000))
        answer = b""
        for _ in range(999):
            opened.sendall(b"x")
            with suppress(TimeoutError):
                answer = opened.recv(65536)
                break
    assert status_of(answer) == 408


@pytest.mark.sample("said", "in chunks")
@pytest.mark.parametrize("pieces", [
    (head(Content_Length=1001),),
    (head(Content_Length="9" * 18),),
    (head(Transfer_Encoding="chunked"), b"400\r\n" + b"x" * 1024 + b"\r\n"),
    (head("/v1/files", Content_Length=(1 << 20) + (1 << 16) + 1),),
], ids=["said", "said, by far", "in chunks", "an upload"])  # fmt: skip
def test_a_body_that_is_too_large_is_refused(port: int, pieces: tuple[bytes, ...]) -> None:
    answer = exchange(port, *pieces)
    assert status_of(answer) == 413
    assert error_of(answer)["code"] == "request_too_large"


def test_an_upload_may_be_larger_than_other_bodies(port: int) -> None:
    assert status_of(exchange(port, head("/v1/files", Content_Length=2000, Connection="close"), b"x" * 2000)) == 200


def write_until_dropped(opened: socket.socket) -> None:
    """A connection that has ended refuses what is written."""
    while True:
        opened.sendall(b"x")


def test_a_reader_that_does_not_read_is_dropped(hurried: int) -> None:
    with socket.create_connection(("127.0.0.1", hurried), timeout=120) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        opened.sendall(head("/large", method="GET"))
        with pytest.raises(OSError):
            write_until_dropped(opened)


def test_other_hosts_and_pages_of_other_sites_are_refused_without_a_key(port: int) -> None:
    for answer in (
        exchange(port, head(host="attacker.example", Content_Length=0)),
        exchange(port, head(Origin="https://attacker.example", Content_Length=0)),
        exchange(port, head(Origin="null", Content_Length=0)),
    ):
        assert status_of(answer) == 403
        assert error_of(answer)["code"] == "forbidden"
    for host in ("localhost:8000", "[::1]:8000", "127.0.0.1"):
        assert status_of(exchange(port, head(host=host, Content_Length=0, Connection="close"))) == 200


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"]
)
def test_a_wrong_key_is_refused(locked: int, header: str) -> None:
    answer = exchange(locked, head(Authorization=header, Content_Length=0))
    assert status_of(answer) == 401
    assert error_of(answer)["code"] == "invalid_api_key"


def test_the_key_opens_every_host_and_health_needs_none(locked: int) -> None:
    options = {"Content_Length": 0, "Connection": "close"}
    assert status_of(exchange(locked, head(host="box.example", Authorization=f"Bearer {KEY}", **options))) == 200
    assert status_of(exchange(locked, head("/health", host="box.example", **options))) == 200


def test_a_client_gets_its_rate_and_is_told_when_to_come_again() -> None:
    now = [100.0]
    rates = RequestRates(replace(PATIENT, requests_per_second=0.25, burst=3, clients=2), clock=lambda: now[0])
    for _ in range(3):
        rates.take("a")
    with pytest.raises(ApiError, match=r"more than 0\.25 requests a second; try again in 4 s") as refused:
        rates.take("a")
    assert refused.value.headers == {"retry-after": "4"}
    rates.take("b")
    now[0] += 4
    rates.take("a")
    with pytest.raises(ApiError):
        rates.take("a")
    # Of the addresses that asked, the last two are known: c takes the place of b.
    rates.take("c")
    with pytest.raises(ApiError):
        rates.take("a")


def test_too_many_requests_a_second_are_refused_in_the_shape_of_the_api() -> None:
    with running(None, replace(PATIENT, requests_per_second=0.001, burst=2)) as port:
        answers = [exchange(port, head(Content_Length=0, Connection="close")) for _ in range(3)]
    assert [status_of(each) for each in answers] == [200, 200, 429]
    assert error_of(answers[2])["code"] == "rate_limit_exceeded"
    assert error_of(answers[2])["type"] == "rate_limit_error"
    assert b"\r\nretry-after: 1000\r\n" in answers[2].lower()


def test_requests_are_counted(port: int) -> None:
    opened = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(3)]
    for each in opened:
        each.sendall(head(Content_Length=10) + b"x")
    # Until all three have come in.
    while status_of(answer := exchange(port, head(Content_Length=0, Connection="close"))) != 429:
        assert status_of(answer) == 200
    assert error_of(answer)["code"] == "rate_limit_exceeded"
    for each in opened:
        each.close()
    while status_of(exchange(port, head(Content_Length=0, Connection="close"))) == 429:
        pass


@pytest.mark.parametrize(
    ("host", "key"), [("0.0.0.0", None), ("192.0.2.1", None), ("127.0.0.1", "short"), ("0.0.0.0", "é" * 20)]
)
def test_a_server_that_others_reach_needs_a_key(host: str, key: str | None) -> None:
    with pytest.raises(BadArgument, match="key"):
        ServerSettings("model", host=host, key=key).check()
    ServerSettings("model", host=host, key=KEY).check()


@pytest.mark.parametrize("headers", [
    {"Origin": "http://localhost:3000"}, {"Origin": "https://localhost:8000"}, {"Origin": "http://localhost"},
    {"Origin": "chrome-extension://localhost"}, {"Origin": "http://127.0.0.1:8000"},
    {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
], ids=str)  # fmt: skip
def test_pages_of_other_ports_and_schemes_are_other_sites(headers: dict[str, str], port: int) -> None:
    answer = exchange(port, head(host="localhost:8000", Content_Length=0, **headers))
    assert status_of(answer) == 403
    assert error_of(answer)["code"] == "forbidden"


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://localhost:8000"}, {"Sec_Fetch_Site": "same-origin"}, {"Sec_Fetch_Site": "none"}]
)
def test_pages_of_this_server_are_let_in(headers: dict[str, str], port: int) -> None:
    whole = head(host="localhost:8000", Content_Length=0, Connection="close", **headers)
    assert status_of(exchange(port, whole)) == 200


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_client_that_writes_before_it_reads_sees_why_it_is_refused(framing: str, port: int) -> None:
    body = b"x" * (4 << 20)
    begin = head(Content_Length=len(body)) if framing == "length" else head(Transfer_Encoding="chunked")
    end = b"" if framing == "length" else b"\r\n0\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as opened:
        opened.sendall(begin + (b"" if framing == "length" else b"%x\r\n" % len(body)) + body + end)
        answer = opened.recv(65536)
    assert status_of(answer) == 413


def test_open_bodies_are_counted_together() -> None:
    whole = (head(Content_Length=90_000, Connection="close"), b"x" * 90_000)
    chunked = (head(Transfer_Encoding="chunked", Connection="close"), b"%x\r\n" % 90_000 + whole[1] + b"\r\n0\r\n\r\n")
    small = (head(Content_Length=60_000, Connection="close"), b"x" * 60_000)
    with running(None, replace(PATIENT, body_nbytes=100_000, bodies_nbytes=150_000)) as port:
        opened = socket.create_connection(("127.0.0.1", port), timeout=120)
        opened.sendall(head(Content_Length=100_000) + b"x")
        while status_of(answer := exchange(port, *whole)) != 429:
            assert status_of(answer) == 200
        assert error_of(answer)["code"] == "rate_limit_exceeded"
        assert status_of(exchange(port, *chunked)) == 429
        assert status_of(exchange(port, *small)) == 200
        opened.close()
        # What is gone is given back.
        while status_of(exchange(port, *whole)) == 429:
            pass
        assert status_of(exchange(port, *chunked)) == 200


def test_connections_without_a_request_make_room_for_others() -> None:
    """Half-open ones of one client, far more than are held: no other client waits, and no descriptor is lost."""
    with running(None, replace(PATIENT, connections=8)) as port:
        held = []
        for _ in range(100):
            held.append(socket.create_connection(("127.0.0.1", port), timeout=120))
            held[-1].sendall(b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        for _ in range(20):
            assert status_of(exchange(port, head(Content_Length=0, Connection="close"))) == 200
        for each in held:
            each.close()


def test_a_connection_with_a_request_is_kept_when_there_are_too_many() -> None:
    options = {"Content_Length": 0, "Connection": "close"}
    with (
        running(None, replace(PATIENT, connections=4)) as port,
        socket.create_connection(("127.0.0.1", port), timeout=120) as asking,
    ):
        asking.sendall(head(Content_Length=5, Connection="close") + b"12")
        # Once this is answered, the other has been read.
        assert status_of(exchange(port, head(**options))) == 200
        idle = [socket.create_connection(("127.0.0.1", port), timeout=120) for _ in range(30)]
        assert status_of(exchange(port, head(**options))) == 200
        asking.sendall(b"345")
        assert status_of(asking.recv(65536)) == 200
        for each in idle:
            each.close()
