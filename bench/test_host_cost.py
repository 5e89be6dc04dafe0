"""`bench/host_cost.py`: the calls of CUDA that it counts for a streamed expert are those that plans count."""

import argparse

import pytest

from bench.host_cost import measure
from moedge.runtime.plan.presets import ARRIVAL_CALLS

# Events that end with their run of sixteen experts: the stub cannot count those.
ENDED = 5 / 16


def test_plans_count_as_many_calls_as_the_lane_makes() -> None:
    sizes = argparse.Namespace(layers=4, experts=64, tokens=32, ring=64, lane="cuda", repeats=6)
    calls = [float(row["calls of CUDA per expert"]) for row in measure(sizes)]
    assert len(calls) == 6
    assert max(calls) == pytest.approx(ARRIVAL_CALLS - ENDED, abs=0.5)
