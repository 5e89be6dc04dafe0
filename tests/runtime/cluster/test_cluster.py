"""A job on a real Ray cluster of this machine; where Ray is not installed, nothing of it is tested."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")

from moedge import run_batch
from support.ray_cluster import MODEL, OPTIONS, Chaos, cluster, kill_one, leave_and_return, write_rows, wrong

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_no_row_is_lost_doubled_or_changed_while_workers_are_killed_and_a_node_leaves(tmp_path: Path) -> None:
    rows, wanted, output = tmp_path / "rows.jsonl", tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 24)
    run_batch(MODEL, rows, wanted, progress=False, **OPTIONS)
    with cluster(nodes=1, head_cpus=1) as found:
        leave, join = leave_and_return(found, seconds=1)
        chaos = Chaos(output, 24, [kill_one(random.Random(0)), leave, join])
        chaos.start()
        summary = run_batch(MODEL, rows, output, progress=False, ray=found.address, **OPTIONS)
        chaos.end()
    assert chaos.done == 3
    assert wrong(output, wanted) == []
    assert sum(each.rows for each in summary.workers) >= 24 - summary.rows.failed


@pytest.mark.slow
def test_the_example_reads_and_writes_parquet(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_parquet.py")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.startswith("20 answers")
