"""Requests of megabytes to a server in this process (`apps/serve/app.py`, `apps/serve/live.py`): each is answered 400,
in little memory, while others go on.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from moedge.apps.serve.app import Turns
from moedge.apps.serve.errors import ApiError
from moedge.apps.serve.limits import ServerLimits, ServerSettings
from moedge.apps.serve.server import open_server

from .conftest import ENGINE


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def client(checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    folder = tmp_path_factory.mktemp("long")
    settings = ServerSettings(
        str(checkpoint("qwen3_moe")), port=0, folder=folder, options=ENGINE, limits=ServerLimits()
    )
    with open_server(settings) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield OpenAI(base_url=server.url, api_key="not-asked-for", max_retries=0, timeout=300)
        finally:
            server.stop()
            thread.join()


def test_long_prompts_at_once_are_refused_in_little_memory(client: OpenAI) -> None:
    text, found = "the quick (brown) fox_jumps\n" * 270_000, list[type[Exception]]()

    def ask() -> None:
        try:
            client.completions.create(model="any", prompt=text)
        except openai.APIError as error:
            found.append(type(error))

    Path("/proc/self/clear_refs").write_text("5")
    before, threads = status("VmRSS"), [threading.Thread(target=ask) for _ in range(12)]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        begun = time.monotonic()
        health: Any = client._client.get(str(client.base_url).removesuffix("v1/") + "health")
        assert health.status_code == 200
        slowest = max(slowest, time.monotonic() - begun)
    print(f"health: {slowest:.2f} s at most; {(status('VmHWM') - before) >> 20} MiB more")
    # Bodies of 64 MiB in all: the others are told to come again.
    assert set(found) <= {openai.BadRequestError, openai.RateLimitError}
    assert len(found) == 12
    assert openai.BadRequestError in found
    # 12 bodies, at both ends of the connection, and what they are parsed to; each took 1.4 GiB.
    assert status("VmHWM") - before < 1 << 30


@pytest.mark.parametrize(("bodies", "nbytes", "refused"), [(200, 64 << 10, 0), (60, 15 << 19, 58), (1, 64 << 20, 0)])
def test_what_waits_to_be_tokenized_is_bounded(bodies: int, nbytes: int, refused: int) -> None:
    """200 streams of short prompts wait; of sixty prompts of 7.5 MiB, which held up everybody, two do."""
    turns, alone, found = Turns(ServerLimits().waiting_nbytes), [0], list[ApiError]()

    async def read() -> None:
        try:
            async with turns.take(nbytes):
                alone[0] += 1
                assert alone[0] == 1
                await asyncio.sleep(0)
                alone[0] -= 1
        except ApiError as error:
            found.append(error)

    async def all_at_once() -> None:
        await asyncio.gather(*(read() for _ in range(bodies)))
        await read()

    asyncio.run(all_at_once())
    assert len(found) == refused
    assert {(each.status, each.headers["retry-after"]) for each in found} <= {(429, "1")}


@pytest.mark.parametrize("schema", [
    {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(4000)}},
    {"type": "object", "patternProperties": {f"^a{n}.*b$": {"type": "string"} for n in range(60)}},
])  # fmt: skip
def test_a_grammar_that_cannot_be_followed_is_the_request_s_fault(schema: dict[str, Any], client: OpenAI) -> None:
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    try:
        client.chat.completions.create(
            model="any",
            messages=[{"role": "user", "content": "x"}],
            max_tokens=8,
            response_format=asked,  # type: ignore[call-overload]
        )
    except openai.APIStatusError as error:
        status_code = error.status_code
    else:
        status_code = 200
    assert status_code in (200, 400)
