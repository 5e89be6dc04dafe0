"""What does a job cost beside its engine, in time and in memory, and does it grow with the rows?

    python -m bench.job_scale [--rows 200000] [--small 1000] [--at 200]

Runs a small and then a large job with the fake engine of the tests, in one process of its own: the growth of the peak
resident memory, and the time outside of the engine's passes, phase by phase and as a share of a job that does --at rows
a second. Then a job that really does --at rows a second, for ten seconds, and the share that was measured in it: its
caches are cold after every pass.
"""

import argparse

from support.jobs.job_scale import measure


def report(rows: int, small: int, rows_per_second: float, seconds: float) -> None:
    few, many = measure(small, rows)
    print(f"{'rows':>8} {'peak MiB':>9} {'seconds':>8} {'us/row outside the engine':>26} {'of which CPU':>13}")
    for count, found in ((small, few), (rows, many)):
        outside, cpu = (found[name] / count * 1e6 for name in ("outside", "cpu_outside"))
        print(f"{count:8} {found['peak'] / 2**20:9.1f} {found['seconds']:8.1f} {outside:26.1f} {cpu:13.1f}")
    print("us/row of CPU: " + ", ".join(f"{phase} {cpu / rows * 1e6:.1f}" for phase, cpu in many["cpu"].items()))
    print(f"growth {(many['peak'] - few['peak']) / 1e6:.1f} MB for {rows - small} rows")
    share, cpu_share = (many[name] / rows * rows_per_second for name in ("outside", "cpu_outside"))
    print(f"share of a job of {rows_per_second:.0f} rows/s: {share:.2%}, on a core of its own {cpu_share:.2%}")
    (paced,) = measure(int(seconds * rows_per_second), rows_per_second=rows_per_second)
    print(f"measured in one of {paced['seconds']:.1f} s: {paced['outside'] / paced['seconds']:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--small", type=int, default=1000)
    parser.add_argument("--at", type=float, default=200.0, help="rows per second of the job whose share is asked for")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the job takes that really does as many")
    arguments = parser.parse_args()
    report(arguments.rows, arguments.small, arguments.at, arguments.seconds)
