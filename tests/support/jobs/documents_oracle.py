"""A job over documents without a model: an engine that answers with the facts that it was asked about."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from moedge.apps.documents import run as api
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs import job_plan, lifecycle, session
from moedge.runtime.jobs.job import Running
from moedge.runtime.text import tokenizer
from support.jobs import fake_engine

_FACT = re.compile(r"K\d+")
END = 0


class OracleText(fake_engine.FakeText):
    def append(self, token_id: int) -> None:
        if token_id != END:
            self.text += chr(token_id)


def oracle(sequence: Sequence) -> int:
    """The next byte of all facts of the prompt, in their order, each once."""
    facts = " ".join(dict.fromkeys(_FACT.findall(bytes(sequence.prompt_ids).decode()))) or "nothing"
    at = len(sequence.output_ids)
    return ord(facts[at]) if at < len(facts) else END


class Stopper(api.DocumentsObserver):
    """Stops the job after a number of passes, or fails in one, as a kill would."""

    def __init__(self, passes: int | None = None, error: type[BaseException] | None = None) -> None:
        self.passes = passes
        self.error = error
        self.rounds = 0

    def loaded(self, loaded: Any) -> None:
        self.rounds += 1

    def after_pass(self, running: Running) -> str | None:
        if self.passes is None:
            return None
        self.passes -= 1
        if self.passes > 0:
            return None
        if self.error is not None:
            raise self.error
        return "stopped by a test"


def for_rounds(chosen: Any, plan: Any, workload: Any) -> Any:
    return SimpleNamespace(
        **vars(chosen) | {"request": SimpleNamespace(**vars(chosen.request) | {"workload": workload})}
    )


class OracleTokenizer(fake_engine.FakeTokenizer):
    eos_token_ids = (END,)

    @classmethod
    def load(cls, folder: Path, now: Any = None) -> Any:
        return super().load(folder, now)


def install(setattr: Callable[[object, str, object], None] = setattr, context: int = 4096) -> None:
    """Puts the oracle where a job over documents looks for a model; `setattr` may be one that is undone later."""
    fake_engine.install(fake_engine.FakeEngine, setattr)
    setattr(fake_engine, "CONTEXT", context)
    setattr(fake_engine, "next_token", oracle)
    setattr(fake_engine, "FakeText", OracleText)
    setattr(fake_engine.FakeTokenizer, "eos_token_ids", (END,))
    load = lifecycle.load_engine

    def with_streams(*arguments: Any, **options: Any) -> Any:
        engine = load(*arguments, **options)
        engine.streamed = SimpleNamespace(
            start_counting=lambda: None,
            nbytes_moved=0,
            experts=SimpleNamespace(stats=SimpleNamespace(layers={}), cache=None),
        )
        return engine

    setattr(lifecycle, "load_engine", with_streams)
    setattr(api, "open_source", session.open_source)
    setattr(job_plan, "with_workload", for_rounds)
    setattr(tokenizer, "Tokenizer", OracleTokenizer)
