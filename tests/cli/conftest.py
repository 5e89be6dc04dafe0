"""The command line, run in this process as a person would run it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("batch", ...)` is the exit code."""
    from moedge.cli.main import main

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["moedge", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def rows_file() -> Callable[[Path, list[dict[str, Any]]], Path]:
    return write_rows


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, Any]]]:
    return read_rows
