"""Rows from bytes, without a file."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.runtime.rows.reader import rows_from
from moedge.runtime.rows.row import Defaults, Row, RowFailure
from support.jobs import disk_faults as faults
from support.jobs import fake_engine

Rows = list[Row | RowFailure]


def read_bytes(data: bytes, max_line_nbytes: int = 1 << 16, **defaults: Any) -> Rows:
    stream = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return list(rows_from(stream, Defaults(**defaults), max_line_nbytes))


def read_object(value: Any, **defaults: Any) -> Row | RowFailure:
    (row,) = read_bytes(json.dumps(value).encode(), **defaults)
    return row


@pytest.fixture(scope="session")
def read() -> Callable[..., Rows]:
    """`read(data)` is every row of a file with these bytes."""
    return read_bytes


@pytest.fixture(scope="session")
def chat() -> Callable[..., Any]:
    """`chat(temperature=1)` is the row of a batch line for the chat endpoint with these fields."""

    def make(**body: Any) -> Row | RowFailure:
        body = {"messages": [{"role": "user", "content": "Hi"}], **body}
        return read_object({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})

    return make


@pytest.fixture(scope="session")
def complete() -> Callable[..., Any]:
    """As `chat`, for the completions endpoint."""

    def make(**body: Any) -> Row | RowFailure:
        body = {"prompt": "Once", **body}
        return read_object({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body})

    return make


@pytest.fixture(scope="session")
def short() -> Callable[..., Any]:
    """`short(prompt="a", n=2)` is the row of a short line with these fields."""

    def make(**line: Any) -> Row | RowFailure:
        return read_object(line)

    return make


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """A batch job without a model: see support/jobs/fake_engine.py."""
    return fake_engine


@pytest.fixture(scope="session")
def disk_faults() -> ModuleType:
    return faults


@pytest.fixture
def job(fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`job(hook=None, **request)` runs a batch job over `in.jsonl` with the fake engine, in this process."""

    def run(hook: Callable[[Any], None] | None = None, **changes: Any) -> Any:
        from moedge.runtime.jobs.request import BatchRequest

        fake.install(lambda: fake.FakeEngine(hook), monkeypatch.setattr)
        request = {"model": "fake", "input": tmp_path / "in.jsonl", "output": tmp_path / "out.jsonl", **changes}
        return fake.run(BatchRequest(**request))

    return run


@pytest.fixture
def rows_in(tmp_path: Path) -> Callable[[int], Path]:
    """`rows_in(20)` writes that many short rows, the third of which fails, to `in.jsonl`."""

    def write(count: int) -> Path:
        path = tmp_path / "in.jsonl"
        with path.open("w") as file:
            for row in range(count):
                extra = {"echo": True} if row == 2 else {}
                line = {"id": f"r{row}", "prompt": f"row {row}", "max_tokens": 1 + row % 7, **extra}
                file.write(json.dumps(line) + "\n")
        return path

    return write


@pytest.fixture
def outputs(tmp_path: Path) -> Callable[[], dict[str, bytes]]:
    """The two output files as they are, by name; absent ones are left out."""

    def read() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in tmp_path.glob("out*.jsonl")}

    return read
