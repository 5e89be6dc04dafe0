"""Jobs with the fake engine, measured beside their engine: time, CPU time and memory. A program, for `measure`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from moedge.apps.reports.job_report import JobReport
from moedge.apps.reports.page import page
from moedge.offload.memory import host_peak
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.job import Measured, Running
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.jobs.session import Checked
from moedge.runtime.jobs.status import JobStatus
from support.jobs import fake_engine

TESTS = Path(__file__).parents[2]
TOKENS_PER_ROW = 8


class Clock:
    """Seconds and seconds of CPU, phase by phase, less those of the engine."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._last = self._now()

    def phase(self, name: str, engine: tuple[float, float] = (0.0, 0.0)) -> None:
        """Ends here; of its time `engine` took this much."""
        now = self._now()
        self.seconds[name], self.cpu[name] = (
            end - begin - less for end, begin, less in zip(now, self._last, engine, strict=True)
        )
        self._last = now

    @staticmethod
    def _now() -> tuple[float, float]:
        return time.perf_counter(), time.process_time()


def work(folder: Path, rows: int, rows_per_second: float) -> dict[str, Any]:
    """One job in this process; `rows_per_second` 0 is as fast as it goes."""

    engine = fake_engine.FakeEngine(
        pass_seconds=fake_engine.LIVE / TOKENS_PER_ROW / rows_per_second if rows_per_second else 0.0
    )
    fake_engine.install(lambda: engine)
    write_rows(folder / "in.jsonl", rows)
    clock = Clock()
    with Checked.open(BatchRequest("fake", folder / "in.jsonl", folder / "out.jsonl")) as checked:
        clock.phase("check")
        measured = Measured.of(checked)
        clock.phase("measure")
        running = Running(measured.plan().load())
        for _ in running.passes():
            pass
        clock.phase("run", (engine.seconds_in_steps, engine.cpu_seconds_in_steps))
        running.end()
    clock.phase("export")
    outside, cpu_outside, peak = dict(clock.seconds), dict(clock.cpu), host_peak()
    answered = sum(1 for _ in (folder / "out.jsonl").open("rb"))
    if answered != rows:
        raise SystemExit(f"{answered} of {rows} rows were answered")
    return {
        "seconds": sum(outside.values()) + engine.seconds_in_steps,
        "outside": sum(outside.values()),
        "cpu_outside": sum(cpu_outside.values()),
        "cpu": cpu_outside,
        "peak": peak,
        "job_nbytes": sum(path.stat().st_size for path in (folder / "out.job").iterdir()),
        "later": look_again(folder),
    }


def look_again(folder: Path) -> dict[str, float]:
    """CPU seconds of what comes after a job: the same command, `moedge jobs show`, `moedge report`."""
    clock = Clock()
    with Checked.open(BatchRequest("fake", folder / "in.jsonl", folder / "out.jsonl")) as checked:
        if not checked.finished:
            raise SystemExit("the job is not finished")
        checked.publish()
    clock.phase("again")
    JobStatus.read(JobFolder(folder / "out.job")).batch_object()
    clock.phase("show")
    page(JobReport.of_batch(JobFolder(folder / "out.job")))
    clock.phase("report")
    return clock.cpu


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for row in range(rows):
            messages = [{"role": "user", "content": f"{row:0400d}"}]
            file.write(json.dumps({"id": f"row-{row}", "messages": messages, "max_tokens": TOKENS_PER_ROW}) + "\n")


def measure(*rows: int, rows_per_second: float = 0.0) -> list[dict[str, Any]]:
    """Jobs of so many rows one after the other, in a process of their own; the peak of each is of all before it too."""
    command = [sys.executable, "-m", "support.jobs.job_scale", str(rows_per_second), *map(str, rows)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=TESTS).stdout
    return [json.loads(line) for line in found.splitlines()]


if __name__ == "__main__":
    for count in sys.argv[2:]:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(work(Path(name), int(count), float(sys.argv[1]))))
