"""A job over documents without a model: an engine that answers with the facts that it was asked about."""

import re
from typing import Any

from moedge.runtime.api import documents as api
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs.job import Running
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
