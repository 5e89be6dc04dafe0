"""How fast a job is going and how long it will take. Arithmetic for whoever shows progress."""

from __future__ import annotations

import time

from ..offload.memory import host_resident
from .metrics import Metrics


class Pace:
    """Rates over the last `window_s` seconds; the time left from the share of rows that are done."""

    def __init__(self, total: int, window_s: float = 5.0) -> None:
        self.total = total
        self.done = 0
        self.prompt_tok_s = 0.0
        self.generated_tok_s = 0.0
        self._window_s = window_s
        self._begun = time.monotonic()
        self._mark = (self._begun, 0, 0)

    def update(self, done: int, metrics: Metrics) -> None:
        now = time.monotonic()
        since, prompt, generated = self._mark
        self.done = done
        if now - since >= self._window_s or since == self._begun:
            seconds = max(now - since, 1e-9)
            self.prompt_tok_s = (metrics.prompt_tokens - prompt) / seconds
            self.generated_tok_s = (metrics.generated_tokens - generated) / seconds
            self._mark = (now, metrics.prompt_tokens, metrics.generated_tokens)

    @property
    def seconds_left(self) -> float | None:
        """None before the first row is done."""
        if not self.done:
            return None
        return (time.monotonic() - self._begun) / self.done * (self.total - self.done)

    @property
    def resident_nbytes(self) -> int:
        return host_resident()
