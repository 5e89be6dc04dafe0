"""`moedge` in processes of their own, each forked from one that has imported what is large: signals, and what ends a
process, without the seconds that a new interpreter takes. It is started once a session.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

COMMAND = "from moedge.cli.main import main; main()"
IMPORTED = ["torch", "transformers.modeling_utils", "transformers.models.llama.modeling_llama", "moedge.batch",
            "moedge.cli.main", "moedge.runtime.jobs.lifecycle", "moedge.runtime.loading.engine_loader",
            "support.frozen"]  # fmt: skip
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)


class Forked:
    """A process that runs, or has ended; `stderr` is what it prints there."""

    def __init__(self, process: Any, stderr: TextIO) -> None:
        self._process = process
        self.stderr = stderr

    @property
    def pid(self) -> int:
        found: int = self._process.pid
        return found

    def wait(self) -> int:
        """Its exit code; that of a signal that has ended it is negative."""
        self._process.join()
        code: int = self._process.exitcode
        return code


@contextmanager
def forked(
    arguments: Sequence[object],
    folder: Path,
    code: str = COMMAND,
    variables: Mapping[str, str] | None = None,
    ignored: Sequence[signal.Signals] = (),
) -> Iterator[Forked]:
    """Runs `code`, or a command, with these arguments and variables; `folder` gets a pipe. Waits for its end."""
    pipe = folder / f"stderr-{len(list(folder.iterdir()))}"
    os.mkfifo(pipe)
    texts = [str(each) for each in arguments]
    process = CONTEXT.Process(target=_work, args=(texts, str(pipe), code, {**os.environ, **(variables or {})}, ignored))
    process.start()
    with pipe.open() as stderr:
        pipe.unlink()
        try:
            yield Forked(process, stderr)
        finally:
            process.join()


def _work(
    arguments: list[str], pipe: str, code: str, variables: Mapping[str, str], ignored: Sequence[signal.Signals]
) -> None:
    os.environ.clear()
    os.environ.update(variables)
    # As a terminal has them, whoever ignores them here: a shell's background jobs do.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    os.dup2(os.open(pipe, os.O_WRONLY), 2)
    sys.argv = ["moedge", *arguments]
    exec(code, {"__name__": "__main__"})
