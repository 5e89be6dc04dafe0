"""Rendering of a chat template in a process of its own. Knows limits and restarts; knows nothing of tokens.

The template is a program by the model's publisher: it may loop, allocate without end, or crash its interpreter.
"""

import sys
import time
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from ..settings.errors import TemplateError
from .child import Child, pack, unpack
from .limits import output_limit

RENDER_LIMIT_S = 2.0
_START_LIMIT_S = 60.0
# -P keeps the current folder, which may be the model's, out of the worker's import path.
_COMMAND = (sys.executable, "-P", "-m", "moedge.runtime.text.template_worker")


class TemplateRenderer:
    """Renders messages through one chat template, one conversation at a time, each within `limit_s` of wall time.

    The worker starts with the first render and again after each one that had to be killed; starting is not counted.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, Any], now: datetime, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        hello = {"source": source, "special_tokens": special_tokens, "now": now.isoformat(), "alarm_s": limit_s + 1}
        self._hello = pack(hello)
        self._limit_s = limit_s
        self._child: Child | None = None

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt's text, generation prompt included. Raises `TemplateError`; the next call starts afresh."""
        frame = pack(messages)
        try:
            reply = self._exchange(self._child or self._start(), frame)
        except TimeoutError:
            raise TemplateError(
                f"The chat template ran for more than {self._limit_s:g} s on one row, where a millisecond is usual; "
                "use a checkpoint with another template."
            ) from None
        except (EOFError, OSError, OverflowError, ValueError):
            raise TemplateError(
                "The chat template brought its process down; use a checkpoint with another template."
            ) from None
        if "error" in reply:
            raise TemplateError(
                f"The chat template refused the messages with {reply['error']!r}; change the "
                "messages, or use a checkpoint with another template."
            )
        return reply["text"]

    def close(self) -> None:
        """Ends the worker; a later render starts another."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _exchange(self, child: Child, frame: bytes) -> dict[str, str]:
        # Without an answer, interrupted ones included, the child is ended: a late reply must not reach another row.
        self._child = None
        deadline = time.monotonic() + self._limit_s
        try:
            child.send(frame, deadline)
            # JSON may write one control character in six bytes.
            reply = _checked(unpack(child.receive(deadline, 6 * output_limit(len(frame)) + 4096)))
        except BaseException:
            child.kill()
            raise
        self._child = child
        return reply

    def _start(self) -> Child:
        child = Child(_COMMAND)
        deadline = time.monotonic() + _START_LIMIT_S
        try:
            child.send(self._hello, deadline)
            child.receive(deadline, max_nbytes=64)
        except (EOFError, OSError) as error:
            child.kill()
            raise RuntimeError(
                f"The chat template's process did not start; run `{' '.join(_COMMAND)} < /dev/null` to see why."
            ) from error
        return child


def _checked(reply: Any) -> dict[str, str]:
    # The sender may be under the template's control.
    if not isinstance(reply, dict) or not isinstance(reply.get("text", reply.get("error")), str):
        raise ValueError("the worker's reply has neither text nor error")
    return reply
