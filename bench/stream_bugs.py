"""Does the stream keep its order under the most unkind timing, and would we notice if it did not?

    python bench/stream_bugs.py [--schedules 10000] [--limit 1000] [--first-seed 0]

Runs the production stream in the simulator beside its tests: the correct code on every tier for --schedules seeds
each, then every seeded bug until it is found, --limit seeds at most. Exits 1 when the correct code fails once or a
bug is not found. With 0 failures of N the rate is below 3/N with 95 % confidence.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "offload" / "stream"))

import seeded_bugs
import simulator

TIERS = ("host", "device", "staged")


def check_correct(tiers: str, seeds: range) -> int:
    """Prints what the correct code did; returns how many schedules failed."""
    begin, num_arrived, failed = time.perf_counter(), 0, []
    for seed in seeds:
        try:
            num_arrived += simulator.run(seed, tiers).num_arrived
        except (simulator.Race, simulator.Deadlock, ValueError) as error:
            failed.append((seed, error))
    seconds = time.perf_counter() - begin
    print(f"{tiers:8} {len(seeds):8} schedules {num_arrived:9} arrivals {len(failed):4} failed {seconds:6.1f} s")
    for seed, error in failed[:5]:
        print(f"    seed {seed}: {type(error).__name__}: {error}")
    return len(failed)


def check_bug(bug: seeded_bugs.Bug, limit: int) -> bool:
    """Prints when and how often the bug shows; returns whether it was found."""
    found = bug.schedules_until_found(limit)
    share = sum(bug.shows(seed) for seed in range(limit // 5)) / (limit // 5)
    when = "NOT FOUND" if found is None else f"schedule {found}"
    print(f"{bug.tiers:7} {bug.kind.__name__:20} {when:12} {share:4.0%} of runs  {bug.kind.__doc__}")
    return found is not None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.schedules)
    num_failed = sum(check_correct(tiers, seeds) for tiers in TIERS)
    num_found = sum(check_bug(bug, arguments.limit) for bug in seeded_bugs.BUGS)
    print(f"{num_failed} schedules of the correct code failed; {num_found} of {len(seeded_bugs.BUGS)} bugs found")
    sys.exit(num_failed > 0 or num_found < len(seeded_bugs.BUGS))


if __name__ == "__main__":
    main()
