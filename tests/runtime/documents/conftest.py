"""A job over documents without a model."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from moedge.runtime.api import documents as api
from moedge.runtime.documents.reader_process import ReaderProcess
from moedge.runtime.documents.readers.content import Content
from moedge.runtime.documents.readers.read import read
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import job_plan, session
from moedge.runtime.text import tokenizer
from support.jobs import fake_engine
from support.jobs.documents_oracle import END, OracleText, Stopper, oracle


def read_here(process: ReaderProcess, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
    return read(file.read(nbytes), name, None, None, lambda page: None)


def for_rounds(chosen: Any, plan: Any, workload: Any) -> Any:
    return SimpleNamespace(**vars(chosen) | {"request": SimpleNamespace(**vars(chosen.request), workload=workload)})


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
        fake_engine.install(fake_engine.FakeEngine, monkeypatch.setattr)
        monkeypatch.setattr(fake_engine, "CONTEXT", context)
        monkeypatch.setattr(fake_engine, "next_token", oracle)
        monkeypatch.setattr(fake_engine, "FakeText", OracleText)
        monkeypatch.setattr(fake_engine.FakeTokenizer, "eos_token_ids", (END,))
        load = states.load_engine

        def with_streams(*arguments: Any, **options: Any) -> Any:
            engine = load(*arguments, **options)
            engine.streamed = SimpleNamespace(start_counting=lambda: None, nbytes_moved=0)
            return engine

        class Tokenizer(fake_engine.FakeTokenizer):
            @classmethod
            def load(cls, folder: Path, now: Any = None) -> Any:
                return super().load(folder, now)

        monkeypatch.setattr(states, "load_engine", with_streams)
        # Processes are tested by themselves: here their start would take most of the time.
        monkeypatch.setattr(ReaderProcess, "read", read_here)
        monkeypatch.setattr(api, "open_source", session.open_source)
        monkeypatch.setattr(job_plan, "with_workload", for_rounds)
        monkeypatch.setattr(tokenizer, "Tokenizer", Tokenizer)
        given = {"prompt": "Which facts?", "max_tokens": 200, "workers": 1, **options}
        request = api.documents_request("fake", folder, tmp_path / out, given)
        return api.run_documents_job(request, observer or Stopper())

    return run
