"""The command line, run in this process as a person would run it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.row_files import read_rows, write_rows

Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("batch", ...)` is the exit code; "MOEDGE_NAME=value" sets a variable for this call, as in a shell."""
    from moedge.cli.main import main

    def call(*arguments: object) -> int:
        texts = [str(each) for each in arguments]
        variables = [each for each in texts if each.startswith("MOEDGE_")]
        with monkeypatch.context() as patch:
            for name, _, value in (each.partition("=") for each in variables):
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["moedge", *(each for each in texts if each not in variables)])
            with pytest.raises(SystemExit) as ended:
                main()
        return int(ended.value.code or 0)

    return call


@pytest.fixture
def rows_file() -> Callable[[Path, list[dict[str, Any]]], Path]:
    return write_rows


@pytest.fixture
def rows_of() -> Callable[[Path], list[dict[str, Any]]]:
    return read_rows
