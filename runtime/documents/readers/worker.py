"""The process in which files are read: `python -m moedge.runtime.documents.readers.worker`.

It gets the bytes of one file after the other on stdin and answers on stdout; it opens no document, writes no file, and
can open no socket. It ends with its parent.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ...text.template import pack, read_body, unpack
from .content import ReadCode, ReadFailure
from .read import OwnReader, load_own, read

_MOST_FILES = 64


def confine(memory_nbytes: int) -> None:
    """Gives up for good: memory beyond `memory_nbytes` more than now, writing of files, core dumps, sockets."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    address_space = pages * resource.getpagesize() + memory_nbytes
    for limit, value in (
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _MOST_FILES),
    ):
        resource.setrlimit(limit, (value, value))
    sys.addaudithook(_refuse_sockets)


def _refuse_sockets(event: str, arguments: tuple[Any, ...]) -> None:
    if event.startswith("socket."):
        raise PermissionError("readers of documents open no sockets")


class Answers:
    """Answers frames of one parent."""

    def __init__(self, hello: dict[str, Any], sink: BinaryIO) -> None:
        """Raises ValueError for a reader of the user's own that is not there."""
        if hello["reader"] is not None:
            sys.path.append(hello["folder"])
        self._own: OwnReader | None = load_own(hello["reader"]) if hello["reader"] else None
        self._languages = hello["languages"]
        self._max_nbytes = hello["output_nbytes"]
        self._alarm_s = hello["alarm_s"]
        self._sink = sink

    def send(self, answer: dict[str, Any]) -> None:
        # The parent keeps the limit; the alarm ends an endless reader whose parent is gone.
        signal.setitimer(signal.ITIMER_REAL, self._alarm_s)
        self._sink.write(pack(answer))
        self._sink.flush()

    def answer(self, data: bytes, name: str) -> dict[str, Any]:
        try:
            content = read(data, name, self._own, self._languages, lambda page: self.send({"page": page}))
            nbytes = sum(len(page.encode()) for page in content.pages)
        except ReadFailure as failure:
            return {"code": failure.code, "message": failure.message}
        except MemoryError:
            return {"code": ReadCode.MEMORY_LIMIT, "message": ""}
        except RecursionError:
            return {"code": ReadCode.DAMAGED, "message": "it is nested too deep"}
        if nbytes > self._max_nbytes:
            limit = f"its text has {nbytes:,} bytes; at most {self._max_nbytes:,} are taken"
            return {"code": ReadCode.TOO_LARGE, "message": limit}
        return {"content": asdict(content)}


def main() -> None:
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    # What a parser prints must not come between two frames.
    sys.stdout = sys.stderr
    hello = read_body(source)
    if hello is None:
        return
    given = unpack(hello)
    try:
        answers = Answers(given, sink)
    except ValueError as error:
        sink.write(pack({"error": str(error)[:500]}))
        sink.flush()
        return
    # Readers of tables import numpy, whose threads, one for each core, take buffers beyond the limit.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    confine(given["memory_nbytes"])
    answers.send({"ready": True})
    while (body := read_body(source)) is not None:
        request = unpack(body)
        signal.setitimer(signal.ITIMER_REAL, given["alarm_s"])
        answers.send(answers.answer(source.read(request["nbytes"]), request["name"]))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
