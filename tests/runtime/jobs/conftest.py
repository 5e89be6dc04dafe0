"""Rows from bytes, without a file."""

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from moedge.runtime.jobs.reader import rows_from
from moedge.runtime.jobs.rows import BadRow, Defaults, Row

Rows = list[Row | BadRow]


def read_bytes(data: bytes, max_line_nbytes: int = 1 << 16, **defaults: Any) -> Rows:
    stream = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    return list(rows_from(stream, Defaults(**defaults), max_line_nbytes))


def read_object(value: Any, **defaults: Any) -> Row | BadRow:
    (row,) = read_bytes(json.dumps(value).encode(), **defaults)
    return row


@pytest.fixture(scope="session")
def read() -> Callable[..., Rows]:
    """`read(data)` is every row of a file with these bytes."""
    return read_bytes


@pytest.fixture(scope="session")
def chat() -> Callable[..., Any]:
    """`chat(temperature=1)` is the row of a batch line for the chat endpoint with these fields."""

    def make(**body: Any) -> Row | BadRow:
        body = {"messages": [{"role": "user", "content": "Hi"}], **body}
        return read_object({"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body})

    return make


@pytest.fixture(scope="session")
def complete() -> Callable[..., Any]:
    """As `chat`, for the completions endpoint."""

    def make(**body: Any) -> Row | BadRow:
        body = {"prompt": "Once", **body}
        return read_object({"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body})

    return make


@pytest.fixture(scope="session")
def short() -> Callable[..., Any]:
    """`short(prompt="a", n=2)` is the row of a short line with these fields."""

    def make(**line: Any) -> Row | BadRow:
        return read_object(line)

    return make
