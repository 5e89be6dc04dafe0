"""The rate of a job and when it will be ready, for whoever shows progress. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, NamedTuple, Self

from ...moe.running_mean import RunningMean
from ...offload.memory import host_resident

if TYPE_CHECKING:
    from ...runtime.engine.engine import Metrics
    from ...runtime.jobs.job import Running

# The weight of the newest window in what a pass takes: a machine that slows down shows within a minute.
_NEWEST = 0.3


@dataclass(frozen=True, slots=True)
class Work:
    """The remaining work of a run: rows of the job, answered rows, and the most tokens to compute."""

    rows: int
    done: int
    prompt_tokens: int
    max_generated_tokens: int
    tokens_per_pass: int

    @classmethod
    def of(cls, running: Running) -> Self:
        planned, done = running.planned, running.session.claim.num_done
        prompt, generated = planned.workload.prompt_tokens or 0, planned.workload.generated_tokens or 0
        return cls(running.num_rows, done, prompt, generated, planned.plan.tokens_per_pass)


class _Counters(NamedTuple):
    """The sums that rates are made of."""

    passes: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0


class Eta:
    """Rates over the last `window_s` seconds, and a forecast that every pass corrects.

    Time is passes times seconds per pass: a pass costs about the same whatever it carries. How many are left follows
    from the tokens left: a pass holds `tokens_per_pass` at most, and each sequence in it makes one. The length of
    answers is learned from finished ones; before the first they are taken to be as long as they may be.
    `hit_rate` is that of streamed experts; None if all are held. `workers` are those of a cluster; None without one.
    """

    def __init__(self, work: Work, window_s: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = work.rows
        self.done = work.done
        self.failed = 0
        self.prompt_tok_s = 0.0
        self.generated_tok_s = 0.0
        self.hit_rate: float | None = None
        self.workers: int | None = None
        self._work = work
        self._window_s = window_s
        self._clock = clock
        self._mark = (clock(), _Counters())
        self._pass_seconds = RunningMean(_NEWEST)
        self._sequences = 1.0
        self._left: float | None = None
        # Computed in this run, of prompts and generated, and those that are expected to be.
        self.tokens = 0
        self.tokens_left: int | None = None

    def update(self, done: int, failed: int, metrics: Metrics, hit_rate: float | None = None) -> None:
        """After every pass: rows done and failed of the job, and the sums over the passes of this run."""
        self.hit_rate = hit_rate
        now = self._clock()
        since, before = self._mark
        self.done, self.failed = done, failed
        self.tokens = metrics.prompt_tokens + metrics.generated_tokens
        first = self._pass_seconds.value is None
        if metrics.passes == before.passes or (now - since < self._window_s and not first):
            return
        seconds, passes = max(now - since, 1e-9), metrics.passes - before.passes
        self.prompt_tok_s = (metrics.prompt_tokens - before.prompt_tokens) / seconds
        self.generated_tok_s = (metrics.generated_tokens - before.generated_tokens) / seconds
        self._pass_seconds.observe(seconds / passes)
        self._sequences = max(1.0, (metrics.generated_tokens - before.generated_tokens) / passes)
        # The sums as they are now.
        self._mark = (now, _Counters(metrics.passes, metrics.prompt_tokens, metrics.generated_tokens))
        self._left = self._forecast(metrics)

    @property
    def share(self) -> float:
        """How much of the job is done, by tokens: rows of earlier runs count as rows, those of this run by the tokens
        that were computed and are expected. 1 only with the last row."""
        if self.done >= self.total:
            return 1.0
        if self.tokens_left is None:
            return self.done / self.total
        left = 1 - self._work.done / self.total
        return min(1 - left + left * self.tokens / max(1, self.tokens + self.tokens_left), 0.999)

    @property
    def seconds_left(self) -> float | None:
        """None before the first pass."""
        if self._left is None:
            return None
        return max(0.0, self._left - (self._clock() - self._mark[0]))

    @property
    def resident_nbytes(self) -> int:
        return host_resident()

    def _forecast(self, metrics: Metrics) -> float:
        """Seconds from now, with what is known now; counts the tokens that are left."""
        finished, most = metrics.finished_limit, self._work.max_generated_tokens
        share = self._expected_share(metrics)
        # Answers that outlived the mean are not done: on average they take half of what such answers still may.
        running = metrics.generated_tokens - metrics.finished_tokens
        generate = max((most - finished) * share - running, (most - finished - running) * share / 2, 0.0)
        prompt = max(0, self._work.prompt_tokens - metrics.prompt_tokens)
        self.tokens_left = round(generate + prompt)
        passes = max(generate / self._sequences, (generate + prompt) / self._work.tokens_per_pass)
        return passes * (self._pass_seconds.value or 0.0)

    def _expected_share(self, metrics: Metrics) -> float:
        """The expected length of an answer, as a share of the longest that it may become.

        The first answers to finish are short ones. So the mean length of finished answers is a lower bound, beside the
        maximum likelihood estimate for lengths of which most are unknown yet (right-censored, exponential).
        """
        if not metrics.finished_limit:
            return 1.0
        mean = metrics.finished_tokens / metrics.finished_limit
        likely = metrics.generated_tokens / metrics.finished_limit
        return max(mean, likely * (1 - exp(-1 / likely)))
