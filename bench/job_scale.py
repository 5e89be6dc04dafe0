"""What does a job cost beside its engine, in time and in memory, and does it grow with the rows?

    python bench/job_scale.py [--rows 200000] [--small 1000] [--at 200]

Runs a small and then a large job with the fake engine of the tests, in one process of its own: the growth of the peak
resident memory, and the time outside of the engine's passes, phase by phase and as a share of a job that does --at rows
a second. Then a job that really does --at rows a second, for ten seconds, and the share that was measured in it: its
caches are cold after every pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "jobs"))

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
    import fake_engine

    from moedge.offload.memory import host_peak
    from moedge.runtime.jobs.job import Measured
    from moedge.runtime.jobs.request import BatchRequest
    from moedge.runtime.jobs.session import Checked

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
        running = measured.plan().load().run()
        for _ in running.passes():
            pass
        clock.phase("run", (engine.seconds_in_steps, engine.cpu_seconds_in_steps))
        running.end()
    clock.phase("export")
    answered = sum(1 for _ in (folder / "out.jsonl").open("rb"))
    if answered != rows:
        raise SystemExit(f"{answered} of {rows} rows were answered")
    outside = sum(clock.seconds.values())
    return {
        "seconds": outside + engine.seconds_in_steps,
        "outside": outside,
        "cpu_outside": sum(clock.cpu.values()),
        "cpu": clock.cpu,
        "peak": host_peak(),
    }


def write_rows(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for row in range(rows):
            messages = [{"role": "user", "content": f"{row:0400d}"}]
            file.write(json.dumps({"id": f"row-{row}", "messages": messages, "max_tokens": TOKENS_PER_ROW}) + "\n")


def measure(*rows: int, rows_per_second: float = 0.0) -> list[dict[str, Any]]:
    """Jobs of so many rows one after the other, in a process of their own; the peak of each is of all before it too."""
    command = [sys.executable, __file__, "--work", *map(str, rows), "--at", str(rows_per_second)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [json.loads(line) for line in found.splitlines()]


def report(rows: int, small: int, rows_per_second: float) -> None:
    few, many = measure(small, rows)
    print(f"{'rows':>8} {'peak MiB':>9} {'seconds':>8} {'us/row outside the engine':>26} {'of which CPU':>13}")
    for count, found in ((small, few), (rows, many)):
        outside, cpu = (found[name] / count * 1e6 for name in ("outside", "cpu_outside"))
        print(f"{count:8} {found['peak'] / 2**20:9.1f} {found['seconds']:8.1f} {outside:26.1f} {cpu:13.1f}")
    print("us/row of CPU: " + ", ".join(f"{phase} {cpu / rows * 1e6:.1f}" for phase, cpu in many["cpu"].items()))
    print(f"growth {(many['peak'] - few['peak']) / 1e6:.1f} MB for {rows - small} rows")
    share, cpu_share = (many[name] / rows * rows_per_second for name in ("outside", "cpu_outside"))
    print(f"share of a job of {rows_per_second:.0f} rows/s: {share:.2%}, on a core of its own {cpu_share:.2%}")
    (paced,) = measure(int(10 * rows_per_second), rows_per_second=rows_per_second)
    print(f"measured in one of {paced['seconds']:.1f} s: {paced['outside'] / paced['seconds']:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--at", type=float, default=200.0, help="rows per second of the job whose share is asked for")
    parser.add_argument("--work", type=int, nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is None:
        report(arguments.rows, arguments.small, arguments.at)
    for count in arguments.work or ():
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(work(Path(name), count, arguments.at)))
