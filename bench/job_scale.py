"""What does a job cost beside its engine, in time and in memory, and does it grow with the rows?

    python bench/job_scale.py [--rows 200000] [--small 1000] [--at 200]

Runs a small and a large job with the fake engine of the tests, each in a process of its own: the growth of the peak
resident memory, and the time outside of the engine's passes as a share of a job that does --at rows a second. Then a
job that really does --at rows a second, for ten seconds, and the share that was measured in it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "jobs"))

TOKENS_PER_ROW = 8


def work(folder: Path, rows: int, rows_per_second: float) -> dict[str, float]:
    """One job in this process; `rows_per_second` 0 is as fast as it goes."""
    import fake_engine

    from moedge.offload.memory import host_peak
    from moedge.runtime.jobs.request import BatchRequest

    pass_seconds = fake_engine.LIVE / TOKENS_PER_ROW / rows_per_second if rows_per_second else 0.0
    engines: list[fake_engine.FakeEngine] = []

    def engine() -> fake_engine.FakeEngine:
        engines.append(fake_engine.FakeEngine(pass_seconds=pass_seconds))
        return engines[-1]

    fake_engine.install(engine)
    begun, cpu_begun = time.perf_counter(), time.process_time()
    fake_engine.run(BatchRequest("fake", folder / "in.jsonl", folder / "out.jsonl"))
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu_begun
    answered = sum(1 for _ in (folder / "out.jsonl").open("rb"))
    if answered != rows:
        raise SystemExit(f"{answered} of {rows} rows were answered")
    return {
        "seconds": seconds,
        "outside": seconds - engines[0].seconds_in_steps,
        "cpu_outside": cpu_seconds - engines[0].cpu_seconds_in_steps,
        "peak": host_peak(),
    }


def measure(rows: int, rows_per_second: float = 0.0) -> dict[str, float]:
    """The same in a process of its own, because a peak never goes down again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "in.jsonl").open("w") as file:
            for row in range(rows):
                messages = [{"role": "user", "content": f"{row:0400d}"}]
                file.write(json.dumps({"id": f"row-{row}", "messages": messages, "max_tokens": TOKENS_PER_ROW}) + "\n")
        command = [sys.executable, __file__, "--work", str(folder), "--rows", str(rows), "--at", str(rows_per_second)]
        return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def report(rows: int, small: int, rows_per_second: float) -> None:
    few, many = measure(small), measure(rows)
    print(f"{'rows':>8} {'peak MiB':>9} {'seconds':>8} {'us/row outside the engine':>26} {'of which CPU':>13}")
    for count, found in ((small, few), (rows, many)):
        outside, cpu = (found[name] / count * 1e6 for name in ("outside", "cpu_outside"))
        print(f"{count:8} {found['peak'] / 2**20:9.1f} {found['seconds']:8.1f} {outside:26.1f} {cpu:13.1f}")
    print(f"growth {(many['peak'] - few['peak']) / 1e6:.1f} MB for {rows - small} rows")
    share, cpu_share = (many[name] / rows * rows_per_second for name in ("outside", "cpu_outside"))
    print(f"share of a job of {rows_per_second:.0f} rows/s: {share:.2%}, on a core of its own {cpu_share:.2%}")
    paced = measure(int(10 * rows_per_second), rows_per_second)
    print(f"measured in one of {paced['seconds']:.1f} s: {paced['outside'] / paced['seconds']:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--at", type=float, default=200.0, help="rows per second of the job whose share is asked for")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is None:
        report(arguments.rows, arguments.small, arguments.at)
    else:
        print(json.dumps(work(arguments.work, arguments.rows, arguments.at)))
