"""Does the stream keep its order under adversarial timing, and would we notice if it did not?

Runs the production stream in the simulator: the correct code on every tier, 10,000 seeds each, then every seeded bug
until it is found, 1,000 seeds at most. With 0 failures of N the rate is below 3/N with 95 % confidence.
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from matrix.state import Part
from support.stream import seeded_bugs, simulator

TIERS = ("host", "device", "staged")
SCHEDULES, CHUNK, LIMIT = 10_000, 2500, 1000
QUICK_SCHEDULES, QUICK_BUGS = 150, 8


def parts(quick: bool) -> Iterator[Part]:
    last, chunk = (QUICK_SCHEDULES, QUICK_SCHEDULES) if quick else (SCHEDULES, CHUNK)
    for tiers in TIERS:
        for begin, end in pairwise(range(0, last + 1, chunk)):
            yield Part(f"{tiers}, schedules {begin} to {end}", partial(correct_code_faults, tiers, range(begin, end)))
    for bug in seeded_bugs.BUGS[:: len(seeded_bugs.BUGS) // QUICK_BUGS] if quick else seeded_bugs.BUGS:
        yield Part(f"{bug.name}, {bug.kind.__doc__}", partial(bug_faults, bug))


def correct_code_faults(tiers: str, seeds: range) -> list[str]:
    """Seeds at which the correct code raced, hung or read wrong bytes."""
    num_arrived, faults = 0, []
    for seed in seeds:
        try:
            num_arrived += simulator.run(seed, tiers).num_arrived
        except (simulator.Race, simulator.Deadlock, ValueError) as error:
            faults.append(f"seed {seed}: {type(error).__name__}: {error}")
    if not num_arrived:
        faults.append("nothing arrived")
    return faults


def bug_faults(bug: seeded_bugs.Bug) -> list[str]:
    return [] if bug.schedules_until_found(LIMIT) else [f"not found in {LIMIT} schedules"]
