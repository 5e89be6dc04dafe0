"""What the server has counted since it started: answers and their seconds, rows, and errors by code."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate

from ...face import Counts, Sequence
from .errors import ApiError

# Seconds: a token of a model in memory takes milliseconds, an answer of one that is read from disk an hour.
BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0,
    1800.0, 3600.0,
)  # fmt: skip


class Histogram:
    """How many observations lie up to each of `BUCKETS` and above, and their sum."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """(the bucket's upper end as Prometheus writes it, how many observations are at most that)."""
        ends = (*(f"{end:g}" for end in BUCKETS), "+Inf")
        return zip(ends, accumulate(self._counts), strict=True)


class ServerCounts:
    """Methods may be called from any thread; `lock` is for readers that want numbers of one moment."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        # By what is measured, then by endpoint.
        self.seconds: dict[str, dict[str, Histogram]] = {
            name: {} for name in ("request_duration", "time_to_first_token", "time_per_output_token")
        }
        self.rows: Counter[str] = Counter(answered=0, failed=0)
        self.row_errors: Counter[str] = Counter()
        self.request_errors: Counter[str] = Counter()

    def answered(self, endpoint: str, arrived: float, sequences: Iterable[Sequence]) -> None:
        """A request that has its whole answer; it `arrived` at this monotonic second."""
        clocks = [(sequence.clock, len(sequence.output_ids)) for sequence in sequences]
        with self.lock:
            self._observe("request_duration", endpoint, max(clock.ended for clock, _ in clocks) - arrived)
            self._observe("time_to_first_token", endpoint, min(clock.first_token for clock, _ in clocks) - arrived)
            for clock, tokens in clocks:
                if tokens > 1:
                    self._observe("time_per_output_token", endpoint, (clock.ended - clock.first_token) / (tokens - 1))

    def refused(self, error: ApiError) -> None:
        """A request that got an error."""
        with self.lock:
            self.request_errors[error.code or str(error.status)] += 1

    def add_rows(self, now: Counts, before: Counts) -> None:
        """What a batch has counted since `before`."""
        with self.lock:
            self.rows.update(answered=now.ok - before.ok, failed=now.failed - before.failed)
            self.row_errors.update(now.codes - before.codes)

    def _observe(self, name: str, endpoint: str, seconds: float) -> None:
        self.seconds[name].setdefault(endpoint, Histogram()).observe(seconds)
