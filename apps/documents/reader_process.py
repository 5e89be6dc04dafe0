"""Reads files in a process that is replaced after a fault, after a limit, and after 200 files. Knows no folder."""

import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, BinaryIO

from ...face import Child, errors, pack, unpack
from .readers.content import WAITING, Content, ReadCode, ReadFailure

# Files that one process reads: whatever a parser leaks goes with the process.
FILES_PER_PROCESS = 200
_START_LIMIT_S = 60.0
_PIECE_NBYTES = 1 << 20
# Pages that Tesseract reads count as progress; a file has at most this many.
_MOST_PROGRESS = 20_000
# -P keeps the current folder out of the import path; a reader of the user's own gets it behind everything else.
_COMMAND = (sys.executable, "-P", "-m", "moedge.apps.documents.readers.worker")


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What one file may take: its own bytes, the memory of its reader, seconds of a processor (and four times as many
    by the clock, for each page that Tesseract reads), and bytes of text."""

    file_nbytes: int = 256 << 20
    memory_nbytes: int = 2 << 30
    seconds: float = 60.0
    text_nbytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """`reader` is `module:function` of a reader of the user's own; `languages` are Tesseract's, None for no OCR."""

    reader: str | None = None
    languages: str | None = "eng"
    limits: ReadLimits = ReadLimits()


class ReaderProcess:
    """One file at a time. The process starts with the first file, and again when it had to end."""

    def __init__(self, options: ReadOptions) -> None:
        self._options = options
        self._child: Child | None = None
        self._busy: Child | None = None
        self._num_files = 0

    def read(self, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
        """The text of the `nbytes` of a file whose sha256 is `digest`. Raises ReadFailure, SettingError."""
        with self._asked() as child:
            self._send(child, file, nbytes, name, digest, unpack=False)
            answer = self._receive(child)
        self._refuse(answer)
        found = answer["content"]
        return Content(**{**found, "pages": tuple(found["pages"]), "notes": tuple(found["notes"])})

    def members(self, file: BinaryIO, nbytes: int, name: str, digest: str) -> Generator[tuple[str, bytes], None, None]:
        """(path below it, bytes) of the files that lie in a container. Raises the same, behind those that it has."""
        with self._asked() as child:
            self._send(child, file, nbytes, name, digest, unpack=True)
            while "member" in (answer := self._receive(child)):
                limits = self._options.limits
                data = child.receive(time.monotonic() + WAITING * limits.seconds, limits.memory_nbytes)
                yield answer["member"], data
        self._refuse(answer)

    @contextmanager
    def _asked(self) -> Iterator[Child]:
        """The process, for one file; without its last answer, interrupted ones included, it is ended: a late one must
        not reach another file. Raises ReadFailure."""
        if self._num_files >= FILES_PER_PROCESS:
            self.close()
        child, self._child = self._child or self._started(), None
        self._busy = child
        seconds = self._options.limits.seconds
        too_long = f"reading it took more than {seconds:g} s; read it with --reader, or leave it out with --exclude"
        try:
            yield child
        except TimeoutError:
            child.kill()
            raise ReadFailure(ReadCode.TIME_LIMIT, too_long) from None
        except (EOFError, OSError, OverflowError, ValueError):
            if child.kill() in (-signal.SIGPROF, -signal.SIGALRM):
                raise ReadFailure(ReadCode.TIME_LIMIT, too_long) from None
            message = "its reader crashed, as it does for damaged files and where memory ends; open and save it again"
            raise ReadFailure(ReadCode.CRASHED, message) from None
        except BaseException:
            child.kill()
            raise
        finally:
            self._busy = None
        self._num_files += 1
        self._child = child

    def close(self) -> None:
        """Ends the process, and whatever another thread reads in it; the next file starts another."""
        child, self._child = self._child, None
        self._num_files = 0
        for each in (child, self._busy):
            if each is not None:
                each.kill()

    def _refuse(self, answer: dict[str, Any]) -> None:
        """Raises ReadFailure for an answer that is one."""
        if "code" not in answer:
            return
        code, message = ReadCode(answer["code"]), answer["message"]
        if code is ReadCode.MEMORY_LIMIT:
            # What the parser still holds would count against the next file.
            self.close()
            message = f"reading it takes more than {self._options.limits.memory_nbytes >> 20:,} MiB of memory"
        raise ReadFailure(code, message)

    def _send(self, child: Child, file: BinaryIO, nbytes: int, name: str, digest: str, unpack: bool) -> None:
        deadline = time.monotonic() + WAITING * self._options.limits.seconds
        child.send(pack({"name": name, "nbytes": nbytes, "unpack": unpack}), deadline)
        sent, hashed = 0, sha256()
        while data := file.read(min(_PIECE_NBYTES, nbytes - sent)):
            child.send(data, deadline)
            hashed.update(data)
            sent += len(data)
        if sent != nbytes or hashed.hexdigest() != digest:
            raise ReadFailure(ReadCode.CHANGED, "it was written to while it was read; run the command again")

    def _receive(self, child: Child) -> dict[str, Any]:
        limits = self._options.limits
        # JSON may write one character in six bytes.
        most = 6 * limits.text_nbytes + (1 << 20)
        for _ in range(_MOST_PROGRESS):
            answer = unpack(child.receive(time.monotonic() + WAITING * limits.seconds, most))
            if not isinstance(answer, dict):
                raise ValueError("the answer is not an object")
            if "page" not in answer:
                return answer
        raise ValueError("too many pages")

    def _started(self) -> Child:
        """A machine that stands still, or has no memory for a moment, keeps one process from starting, not the job."""
        with suppress(EOFError, OSError):
            return self._start()
        try:
            return self._start()
        except (EOFError, OSError) as error:
            raise errors.SettingError(
                "the process that reads documents did not start, tried twice "
                f"({error or 'it ended at once'}); run `{' '.join(_COMMAND)} < /dev/null` to see why"
            ) from error

    def _start(self) -> Child:
        limits, options = self._options.limits, self._options
        hello = {
            "reader": options.reader, "folder": os.getcwd(), "languages": options.languages,
            "memory_nbytes": limits.memory_nbytes, "output_nbytes": limits.text_nbytes, "seconds": limits.seconds,
        }  # fmt: skip
        child = Child(_COMMAND)
        deadline = time.monotonic() + _START_LIMIT_S
        try:
            child.send(pack(hello), deadline)
            answer = unpack(child.receive(deadline, max_nbytes=4096))
        except (EOFError, OSError):
            child.kill()
            raise
        if "error" in answer:
            child.kill()
            raise errors.BadArgument(f"--reader {answer['error']}; give module:function, importable from this folder")
        return child
