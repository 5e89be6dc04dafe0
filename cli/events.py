"""What a job does as JSON lines on stdout, for scripts. events.schema.json beside this file describes every line."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

from .tolerant import TolerantStream

SCHEMA = "moedge.events/2"


class Events:
    """Prints events, or nothing where nobody asked for them."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self._stream = TolerantStream(sys.stdout) if wanted else None

    def emit(self, event: str, **facts: Any) -> None:
        if self._stream is None:
            return
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"schema": SCHEMA, "event": event, "at": at, **facts}, allow_nan=False)
        self._stream.write(line + "\n")
        # A line at a time, whatever the pipe: whoever reads it wants to know now.
        self._stream.flush()
