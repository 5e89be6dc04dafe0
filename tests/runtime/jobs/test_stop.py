"""When a job stops on purpose (`runtime/jobs/stop.py`). Case J11 of the failure table: clocks that jump."""

import os
import time
from collections.abc import Iterator
from datetime import datetime, timedelta

import pytest

from moedge.runtime.jobs import stop as limits_file
from moedge.runtime.jobs.stop import Limits, StopRule, steady
from moedge.runtime.settings.errors import BadLimit


@pytest.fixture
def berlin() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "CET-1CEST,M3.5.0,M10.5.0/3"
    time.tzset()
    yield
    os.environ.pop("TZ")
    if before is not None:
        os.environ["TZ"] = before
    time.tzset()


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize(
    ("now", "until", "hours"),
    [
        ("2026-06-01 22:00", "07:00", 9),
        ("2026-06-01 06:00", "07:00", 1),
        ("2026-06-01 07:00", "07:00", 24),
        ("2026-03-28 22:00", "07:00", 8),  # the night that has an hour less
        ("2026-10-24 22:00", "07:00", 10),  # and the one that has an hour more
        ("2026-12-31 23:59", "00:00", 1 / 60),
    ],
)
def test_until_is_the_next_time_that_clocks_show_it(now: str, until: str, hours: float) -> None:
    seconds = Limits(until=until).seconds_until(datetime.fromisoformat(now))
    assert seconds is not None
    assert seconds / 3600 == pytest.approx(hours)


@pytest.mark.parametrize("until", ["7", "25:00", "07:60", "", "tomorrow", "07:00:00"])
def test_what_is_no_time_of_day_is_refused(until: str) -> None:
    with pytest.raises(BadLimit, match="such as 07:00"):
        StopRule(Limits(until=until))


def test_j11_a_wall_clock_that_jumps_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, steadily = datetime(2026, 6, 1, 22), [1000.0]

    class Clock(datetime):
        jump = timedelta()

        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return now + cls.jump

    monkeypatch.setattr(limits_file, "datetime", Clock)
    rule = StopRule(Limits(until="07:00"), clock=lambda: steadily[0])
    for jump in (timedelta(days=-365), timedelta(days=1)):
        Clock.jump = jump
        assert rule.reason(0, 10) is None
    steadily[0] += 9 * 3600 - 1
    assert rule.reason(0, 10) is None
    steadily[0] += 1
    assert rule.reason(0, 10) == "--until 07:00"


def test_j11_the_clock_of_deadlines_goes_on_in_suspend() -> None:
    assert abs(steady() - time.clock_gettime(time.CLOCK_BOOTTIME)) < 1


@pytest.mark.parametrize(
    ("text", "rows", "allowed"), [("10", 1000, 10), ("0", 10, 0), ("5%", 1000, 50), ("0.5%", 1000, 5), ("100%", 7, 7)]
)
def test_failures_are_a_number_or_a_share(text: str, rows: int, allowed: int) -> None:
    rule = StopRule(Limits(max_failures=text))
    assert rule.reason(allowed, rows) is None
    assert f"--max-failures allows {allowed:,}" in str(rule.reason(allowed + 1, rows))


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "%", "", "1e3", "nan%", "5 %", "200%", "100.5%"])
def test_what_is_no_number_of_failures_is_refused(text: str) -> None:
    with pytest.raises(BadLimit, match="10 or 5%"):
        StopRule(Limits(max_failures=text))
