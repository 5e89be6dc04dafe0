"""How many workers a cluster gets, with what of each node (`apps/cluster/workers.py`), and what their numbers add up to
(`runtime/jobs/report.py`).
"""

from typing import Any

import pytest

from moedge.apps.cluster.workers import ClusterSize
from moedge.runtime.engine.engine import Metrics
from moedge.runtime.jobs.journal.state import Counts
from moedge.runtime.jobs.report import merge_summaries
from moedge.runtime.jobs.summary import Memory, Moved, Rows, RunSummary, Seconds, TierMemory, Tokens


def node(cpus: float, gpus: float = 0, address: str = "a") -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}, "NodeManagerAddress": address}


@pytest.mark.parametrize(
    ("nodes", "wanted", "use_gpus", "size"),
    [
        ([node(8)], None, False, ClusterSize(1, 8, 0, 1)),
        ([node(8)], 4, False, ClusterSize(4, 2, 0, 4)),
        ([node(8, address="a"), node(6, address="b")], None, False, ClusterSize(2, 6, 0, 1)),
        ([node(16, 2, "a"), node(16, 2, "b")], None, True, ClusterSize(4, 8, 1, 2)),
        ([node(16, 2)], None, False, ClusterSize(1, 16, 0, 1)),
        ([node(1), node(1), node(1)], None, True, ClusterSize(3, 1, 0, 3)),
        ([], None, False, ClusterSize(1, 1, 0, 1)),
    ],
)
def test_workers_are_one_for_a_gpu_or_a_node(
    nodes: list[dict[str, Any]], wanted: int | None, use_gpus: bool, size: ClusterSize
) -> None:
    assert ClusterSize.of(nodes, wanted, use_gpus) == size


def summary(disk: int, peak: int) -> RunSummary:
    memory = Memory(host=TierMemory(100, peak))
    return RunSummary("1", Rows(0, 0, 0), Tokens(0, 0), bytes=Moved(disk_to_host=disk), memory=memory)


def test_numbers_of_workers_add_up_and_the_dead_have_no_memory() -> None:
    metrics = Metrics(passes=4, pass_tokens=40, pass_sequences=8, prompt_tokens=20, generated_tokens=10)
    seconds = Seconds(generate=2.0)
    found = merge_summaries([summary(5, 70).without_memory(), summary(15, 30)], metrics, Counts(), seconds)
    assert (found.bytes.disk_to_host, found.bytes.disk_per_token) == (20, 2.0)
    assert found.memory.host == TierMemory(100, 30)
    assert (found.throughput.prompt_tok_s, found.throughput.generated_tok_s) == (10.0, 5.0)
    assert (found.passes.tokens_mean, found.passes.sequences_mean) == (10.0, 2.0)
