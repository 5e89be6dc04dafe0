"""A job on a real Ray cluster of this machine; where Ray is not installed, nothing of it is tested."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("ray")

from moedge import run_batch, run_documents
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.settings.errors import ClusterFailed
from support.ray_cluster import MODEL, OPTIONS, Chaos, cluster, kill_one, leave_and_return, write_rows, wrong

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_no_row_is_lost_doubled_or_changed_while_workers_are_killed_and_a_node_leaves(tmp_path: Path) -> None:
    rows, wanted, output = tmp_path / "rows.jsonl", tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 200)
    run_batch(MODEL, rows, wanted, progress=False, **OPTIONS)
    with cluster(nodes=1, head_cpus=1) as found:
        leave, join = leave_and_return(found, seconds=1)
        chaos = Chaos(output, 200, [kill_one(random.Random(0)), leave, join])
        chaos.start()
        summary = run_batch(MODEL, rows, output, progress=False, ray=found.address, **OPTIONS)
        chaos.end()
    assert chaos.done == 3
    assert wrong(output, wanted) == []
    assert sum(each.rows for each in summary.workers) >= 200 - summary.rows.failed


@pytest.mark.slow
def test_a_job_whose_process_is_killed_is_resumed_on_a_cluster_and_here(tmp_path: Path) -> None:
    rows, wanted, output = tmp_path / "rows.jsonl", tmp_path / "wanted.jsonl", tmp_path / "out.jsonl"
    write_rows(rows, 120)
    run_batch(MODEL, rows, wanted, progress=False, **OPTIONS)
    options = ["--ram", "1GiB", "--gpu-mem", "0", "--ray", "local"]
    formats = ["--deterministic", "--quant", "none", "--max-sequences", "8", "--tokens-per-pass", "64"]
    command("batch", MODEL, rows, "-o", output, *options, *formats, stop=(signal.SIGKILL, answered(output, 1)))
    here = read_state(JobFolder(output.with_suffix(".job")).journal).counts.rows
    assert 0 < here < 120
    # Ctrl-C: the pass ends, and all answers are kept.
    found = command("jobs", "resume", output, *options, stop=(signal.SIGINT, answered(output, here + 1)))
    assert (found.returncode, found.stdout) == (130, "")
    assert "Resume with" in found.stderr
    found = command("jobs", "resume", output, "--ram", "1GiB", "--gpu-mem", "0")
    # Of the 120 rows, every 17th fails.
    assert (found.returncode, found.stdout) == (3, "")
    assert wrong(output, wanted) == []


def answered(output: Path, rows: int) -> Callable[[], bool]:
    """Whether so many rows have their answers in the journal."""
    folder = JobFolder(output.with_suffix(".job"))
    return lambda: folder.journal.exists() and read_state(folder.journal).counts.rows >= rows


def command(*arguments: object, stop: tuple[int, Callable[[], bool]] | None = None) -> subprocess.CompletedProcess[str]:
    """`moedge` in a process of its own; gets a signal when it is time."""
    line = [sys.executable, "-m", "moedge", *map(str, arguments)]
    two = os.environ | {"MOEDGE_RAY_WORKERS": "2"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=two) as process:
        while stop is not None and not stop[1]():
            assert process.poll() is None
            time.sleep(0.02)
        if stop is not None:
            os.kill(process.pid, stop[0])
        out, err = process.communicate()
    return subprocess.CompletedProcess(line, process.returncode, out, err)


@pytest.mark.slow
def test_documents_are_answered_by_a_cluster_as_here(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(" ".join(f"Fact {number} {each}." for each in range(4 + 30 * number)))
    given = {**OPTIONS, "prompt": "What is this?", "max_tokens": 8, "chunk_tokens": 64, "progress": False}
    here = run_documents(MODEL, folder, tmp_path / "here.jsonl", **given)
    there = run_documents(MODEL, folder, tmp_path / "there.jsonl", ray="local", ray_workers=2, **given)
    assert there.totals == here.totals
    # Prompts of 64 tokens and merges of their answers.
    assert len(there.rounds) > 1
    rows = [json.loads(line) for line in (tmp_path / "there.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"{number}.txt" for number in range(6)]
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.slow
def test_workers_on_which_the_job_does_not_fit_are_left_out_by_name(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", 3)
    given = {**OPTIONS, "ram": "1MiB"}
    left_out = r"no worker of the cluster can take part: .+:\d+: 1 MiB of host memory is too little"
    with pytest.raises(ClusterFailed, match=left_out) as found:
        run_batch(MODEL, tmp_path / "rows.jsonl", tmp_path / "out.jsonl", progress=False, ray="local", **given)
    assert found.value.exit_code == 6


@pytest.mark.slow
def test_the_example_reads_and_writes_parquet(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ray_parquet.py")]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert found.stdout.startswith("20 answers")
