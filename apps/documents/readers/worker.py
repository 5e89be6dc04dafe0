"""The process in which files are read: `python -m moedge.apps.documents.readers.worker`.

It gets the bytes of one file after the other on stdin and answers on stdout; it opens no document, writes no file, and
can open no socket, native code included (`shut_in`). It ends with its parent.
"""

import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from ....face import pack, read_body, shut_in, unpack
from .containers import members
from .content import WAITING, ReadCode, ReadFailure
from .pdf import tesseract
from .read import OwnReader, load_own, read

_MOST_FILES = 64


def confine(memory_nbytes: int, languages: str | None, own: OwnReader | None) -> None:
    """Gives up for good: memory beyond `memory_nbytes` more than now, writing, sockets, other processes.

    Modules stay readable, the folder of the user's own reader among them, and Tesseract can be started for scans.
    """
    module = getattr(sys.modules.get(getattr(own, "__module__", "")), "__file__", None)
    readable = [Path(module).parent] if own is not None and module else []
    shut_in(memory_nbytes, _MOST_FILES, readable, tesseract() if languages else ())


class ReaderWorker:
    """Answers frames of one parent."""

    def __init__(self, hello: dict[str, Any], sink: BinaryIO) -> None:
        """Raises ValueError for a reader of the user's own that is not there."""
        if hello["reader"] is not None:
            sys.path.append(hello["folder"])
        self.own: OwnReader | None = load_own(hello["reader"]) if hello["reader"] else None
        self.languages = hello["languages"]
        self._max_nbytes = hello["output_nbytes"]
        self._seconds = hello["seconds"]
        self._sink = sink

    def send(self, answer: dict[str, Any]) -> None:
        self.limit_seconds()
        self._sink.write(pack(answer))
        self._sink.flush()

    def limit_seconds(self) -> None:
        """Of the processor; those of the clock end a reader that waits and whose parent is gone."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        signal.setitimer(signal.ITIMER_REAL, WAITING * self._seconds + 1)

    def answer(self, data: bytes, name: str, unpack: bool) -> dict[str, Any]:
        """The last frame about a file; those of its pages or, with `unpack`, of its members are sent before it."""
        try:
            if unpack:
                for path, member in members(data, name):
                    self.send({"member": path})
                    self._sink.write(pack(member))
                return {"unpacked": True}
            content = read(data, name, self.own, self.languages, lambda page: self.send({"page": page}))
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
        answers = ReaderWorker(given, sink)
    except ValueError as error:
        sink.write(pack({"error": str(error)[:500]}))
        sink.flush()
        return
    # Readers of tables import numpy, whose threads, one for each core, take buffers beyond the limit.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    confine(given["memory_nbytes"], answers.languages, answers.own)
    answers.send({"ready": True})
    while (body := read_body(source)) is not None:
        request = unpack(body)
        answers.limit_seconds()
        answers.send(answers.answer(source.read(request["nbytes"]), request["name"], request["unpack"]))
        for kind in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(kind, 0)


if __name__ == "__main__":
    main()
