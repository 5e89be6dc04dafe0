"""A job over documents without a model."""

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from moedge.apps.documents import run as api
from moedge.apps.documents.reader_process import ReaderProcess
from moedge.apps.documents.readers.containers import members
from moedge.apps.documents.readers.content import Content
from moedge.apps.documents.readers.read import read
from support.jobs.documents_oracle import Stopper, install


def read_here(process: ReaderProcess, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
    return read(file.read(nbytes), name, None, None, lambda page: None)


def unpacked_here(
    process: ReaderProcess, file: BinaryIO, nbytes: int, name: str, digest: str
) -> Generator[tuple[str, bytes], None, None]:
    yield from members(file.read(nbytes), name)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., api.DocumentsEnded]:
    """`ask(folder, **options)` runs the whole job with an engine that answers with the facts K1, K2... of a prompt.

    `context` is the model's, in bytes, which are its tokens.
    """

    def run(
        folder: Path,
        out: str = "out.jsonl",
        observer: api.DocumentsObserver | None = None,
        context: int = 4096,
        **options: Any,
    ) -> api.DocumentsEnded:
        install(monkeypatch.setattr, context)
        # Processes are tested by themselves: here their start would take most of the time.
        monkeypatch.setattr(ReaderProcess, "read", read_here)
        monkeypatch.setattr(ReaderProcess, "members", unpacked_here)
        given = {"prompt": "Which facts?", "max_tokens": 200, "workers": 1, **options}
        request = api.documents_request("fake", folder, tmp_path / out, given)
        return api.run_documents_job(request, observer or Stopper())

    return run
