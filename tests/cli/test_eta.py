"""Rates and the forecast of a job (`cli/views/eta.py`), against a machine whose every pass takes what it is told."""

import pytest

from moedge.cli.views.eta import Eta, Work
from moedge.runtime.engine.engine import Metrics


class Machine:
    """`live` sequences of `length` tokens each, one token a pass; they may have had `limit`."""

    def __init__(self, rows: int, live: int, length: int, limit: int, pass_seconds: float = 1.0) -> None:
        self.now, self.metrics, self.live, self.rows = 0.0, Metrics(), live, rows
        self.length, self.limit, self.pass_seconds = length, limit, pass_seconds
        work = Work(rows, 0, 0, rows * limit, tokens_per_pass=4096)
        self.pace = Eta(work, window_s=5.0, clock=lambda: self.now)

    def run(self, passes: int) -> None:
        for _ in range(passes):
            self.now += self.pass_seconds
            self.metrics.passes += 1
            self.metrics.generated_tokens += self.live
            if self.metrics.passes % self.length == 0:
                self.metrics.finished_tokens += self.live * self.length
                self.metrics.finished_limit += self.live * self.limit
            done = self.metrics.passes // self.length * self.live
            self.pace.update(done, 0, self.metrics)

    @property
    def really_left(self) -> float:
        return (self.rows / self.live * self.length - self.metrics.passes) * self.pass_seconds


def test_nothing_is_said_before_the_first_pass_and_a_bound_after_it() -> None:
    machine = Machine(rows=1000, live=10, length=20, limit=100)
    assert machine.pace.seconds_left is None
    machine.run(1)
    left = machine.pace.seconds_left
    assert left is not None
    assert left == pytest.approx(1000 * 100 / 10, rel=0.01), "answers may be as long as they may be"


def test_what_is_done_is_counted_in_tokens() -> None:
    """Ten sequences of 20 tokens, and no row is done: with half of their tokens, half of this job of ten rows is."""
    machine = Machine(rows=10, live=10, length=20, limit=20)
    machine.run(10)
    assert machine.pace.done == 0
    assert machine.pace.share == pytest.approx(0.5, abs=0.1)
    machine.run(9)
    assert 0.8 < machine.pace.share < 1
    machine.run(1)
    assert machine.pace.share == 1


def test_rows_of_earlier_runs_count_as_rows() -> None:
    metrics, now = Metrics(), [0.0]
    pace = Eta(Work(100, 80, prompt_tokens=0, max_generated_tokens=2000, tokens_per_pass=100), 1.0, lambda: now[0])
    pace.update(80, 0, metrics)
    assert pace.share == 0.8
    now[0], metrics.passes, metrics.generated_tokens = 5.0, 50, 1000
    pace.update(80, 0, metrics)
    assert pace.tokens_left == 1000
    assert pace.share == pytest.approx(0.9)


def test_the_forecast_learns_how_long_answers_are() -> None:
    machine = Machine(rows=1000, live=10, length=20, limit=100)
    machine.run(41)
    assert machine.pace.seconds_left == pytest.approx(machine.really_left, rel=0.05)


def test_short_answers_that_finish_first_do_not_make_the_others_short() -> None:
    machine = Machine(rows=400, live=250, length=400, limit=400)
    machine.run(63)
    machine.metrics.finished_tokens += 27
    machine.metrics.finished_limit += 400
    machine.run(5)
    assert machine.pace.seconds_left == pytest.approx(400 * 400 / 250 - 68, rel=0.1)


def test_the_forecast_follows_a_machine_that_slows_down() -> None:
    machine = Machine(rows=1000, live=10, length=20, limit=100)
    machine.run(41)
    machine.pass_seconds = 3.0
    machine.run(60)
    assert machine.pace.seconds_left == pytest.approx(machine.really_left, rel=0.1)


def test_prompts_that_fill_passes_count_too() -> None:
    now, metrics = [0.0], Metrics()
    pace = Eta(Work(100, 0, prompt_tokens=100_000, max_generated_tokens=100, tokens_per_pass=1000), 5.0, lambda: now[0])
    for _ in range(10):
        now[0] += 2
        metrics.passes += 1
        metrics.prompt_tokens += 999
        metrics.generated_tokens += 1
        pace.update(0, 0, metrics)
    assert pace.seconds_left == pytest.approx(180, rel=0.03)
    assert pace.prompt_tok_s == pytest.approx(999 / 2)


def test_time_passes_between_two_passes() -> None:
    machine = Machine(rows=1000, live=10, length=20, limit=20)
    machine.run(21)
    before = machine.pace.seconds_left
    machine.now += 30
    assert before is not None
    assert machine.pace.seconds_left == pytest.approx(before - 30)
    machine.now += 1e6
    assert machine.pace.seconds_left == 0
