"""A stream whose reader may go away: a closed terminal or a broken pipe must not end a job that runs all night."""

from __future__ import annotations

from typing import TextIO


class TolerantStream:
    """What rich and print need of a text stream; after the first failure nothing is written any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        self.encoding = stream.encoding

    def write(self, text: str) -> int:
        if not self._gone:
            try:
                self._stream.write(text)
            except OSError:
                self._gone = True
        return len(text)

    def flush(self) -> None:
        if not self._gone:
            try:
                self._stream.flush()
            except OSError:
                self._gone = True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
