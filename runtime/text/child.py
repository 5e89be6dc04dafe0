"""A child process that is sent frames and answers with frames, each before a deadline. Knows not what they say."""

import json
import os
import select
import subprocess
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

HEADER_NBYTES = 4


def pack(content: object) -> bytes:
    """Raises UnicodeEncodeError if a string in `content` has no UTF-8 form."""
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return len(body).to_bytes(HEADER_NBYTES, "big") + body


def read_body(source: BinaryIO) -> bytes | None:
    """The next frame's body from a blocking stream, undecoded; None when the stream has ended."""
    header = source.read(HEADER_NBYTES)
    if len(header) < HEADER_NBYTES:
        return None
    nbytes = int.from_bytes(header, "big")
    body = source.read(nbytes)
    return body if len(body) == nbytes else None


def unpack(body: bytes) -> Any:
    return json.loads(body)


_READ_NBYTES = 1 << 20


class Child:
    """`command` with frames on its stdin and stdout; its stderr is dropped, for it may carry hostile text.

    Deadlines are readings of `time.monotonic()`. Past one, `send` and `receive` raise TimeoutError; a child that is
    gone is an OSError or EOFError. After any of them the child is of no more use: `kill` it.
    """

    def __init__(self, command: Sequence[str]) -> None:
        # Its own process group: Ctrl-C on the terminal is the parent's to answer.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink = self._process.stdin.fileno()
        self._source = self._process.stdout.fileno()
        os.set_blocking(self._sink, False)
        os.set_blocking(self._source, False)

    def send(self, frame: bytes, deadline: float) -> None:
        unsent = memoryview(frame)
        while unsent:
            _wait(self._sink, select.POLLOUT, deadline)
            unsent = unsent[os.write(self._sink, unsent) :]

    def receive(self, deadline: float, max_nbytes: int) -> bytes:
        """One frame's body. Raises OverflowError before reading a body of more than `max_nbytes`."""
        nbytes = int.from_bytes(self._read(HEADER_NBYTES, deadline), "big")
        if nbytes > max_nbytes:
            raise OverflowError(f"a frame of {nbytes} bytes where at most {max_nbytes} were expected")
        return self._read(nbytes, deadline)

    def _read(self, nbytes: int, deadline: float) -> bytes:
        body = bytearray()
        while len(body) < nbytes:
            _wait(self._source, select.POLLIN, deadline)
            chunk = os.read(self._source, min(nbytes - len(body), _READ_NBYTES))
            if not chunk:
                raise EOFError("the child ended")
            body += chunk
        return bytes(body)

    def kill(self) -> None:
        """Ends the process at once, whatever it is doing."""
        self._process.kill()
        with self._process:
            self._process.wait()


def _wait(descriptor: int, event: int, deadline: float) -> None:
    # Not select(): it fails for descriptors above 1023, and an engine may hold thousands of files open.
    poll = select.poll()
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError("the child did not keep its deadline")
