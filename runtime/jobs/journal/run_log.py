"""How the runs of a job went, for its report: when, at what rate, in how much memory, and the numbers at their ends.

Nothing but a report reads it: a job goes on where it cannot be written, and answers never depend on it.
"""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

# A run has about this many samples at most, however long it takes: they become rarer.
_MOST_SAMPLES = 1000
_LEAST_SECONDS = 1.0


class RunRecord(StrEnum):
    """`begin` is the first record of a run, `end` its last one, which a killed run does not have."""

    BEGIN, SAMPLE, END = "begin", "sample", "end"


class RunLog:
    """Appends the records of one run to a file of JSON lines; `clock` counts its seconds."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._begun = clock()
        self._next = 0.0

    def begin(self, **facts: Any) -> None:
        """With the command line, where the job was started by one."""
        self._begun, self._next = self._clock(), 0.0
        self._append(RunRecord.BEGIN, {"command": command_line(), "cwd": os.getcwd(), **facts})

    def sample(self, facts: Callable[[], Mapping[str, Any]], last: bool = False) -> None:
        """Now and then, what `facts` says; `last` does so in any case."""
        seconds = self._clock() - self._begun
        if seconds >= self._next or last:
            self._next = seconds + max(_LEAST_SECONDS, seconds / (_MOST_SAMPLES / 4))
            self._append(RunRecord.SAMPLE, {"s": round(seconds, 2), **facts()})

    def end(self, **facts: Any) -> None:
        self._append(RunRecord.END, facts)

    def _append(self, record: RunRecord, facts: Mapping[str, Any]) -> None:
        with suppress(OSError), self._path.open("ab") as file:
            file.write(json.dumps({"record": record, **facts}, separators=(",", ":")).encode() + b"\n")


# The variables whose values may be written into a file that is handed on: no key is among them.
SHOWN_VARIABLES = frozenset(
    f"MOEDGE_{name}"
    for name in (
        "ATTENTION", "CHAT_TEMPLATE_KWARGS", "COMPUTE", "CPU_ATTENTION", "CPU_EXPERTS", "CSV_BOM", "CSV_SAFE",
        "DETERMINISTIC", "DISK", "DISK_DIR",
        "DTYPE", "EXPERTS", "GPU_MEM", "HOSTED", "HOST_KV", "ISA", "JOB_DIR", "KV", "LENIENT", "MAX_FAILURES",
        "MAX_SEQUENCES", "MAX_THINKING_TOKENS", "MAX_TOKENS", "PRICE", "PROFILE", "PROGRESS", "QUANT", "RAM",
        "RAY_WORKERS", "REASONING_EFFORT", "SEED", "SPECULATE", "STREAM", "TEMPERATURE", "TOKENS_PER_PASS",
        "UNTIL", "WATTS",
    )
)  # fmt: skip


def command_line() -> str | None:
    """The command that runs, and the variables that it reads, for a shell and without any key; None for a program of
    somebody else's."""
    program = Path(sys.argv[0])
    # `python -m moedge` runs the file in api/, or in the installed package.
    if program.name not in ("moedge", "__main__.py"):
        return None
    options = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name in SHOWN_VARIABLES]
    before = ("", *sys.argv[1:])
    typed = [each for last, each in pairwise(before) if last != _KEY and each.partition("=")[0] != _KEY]
    return " ".join([*map(shlex.quote, options), shlex.join(["moedge", *typed])])


_KEY = "--api-key"
