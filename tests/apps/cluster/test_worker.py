"""A row that was in work at one worker (`apps/cluster/worker.py`) goes on at another."""

import io
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from moedge.apps.cluster import worker as workers
from moedge.apps.cluster.leases import LeaseTable
from moedge.apps.cluster.worker import JobFacts, LeasedRow, LoadOrder, Worker, WorkReport
from moedge.runtime.jobs import run as runs
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.state import CutChoice
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.plan.placement import Workload
from moedge.runtime.rows.reader import rows_from
from moedge.runtime.rows.row import Defaults, Row
from moedge.runtime.settings.settings import Budgets, Settings

MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"


def test_what_a_row_has_generated_at_one_worker_is_not_generated_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(workers, "REPORT_SECONDS", 0)
    line = b'{"prompt": "And the king", "max_tokens": 9, "temperature": 0.7, "seed": 5}'
    (row,) = rows_from(io.BufferedReader(io.BytesIO(line)), Defaults(), 1 << 10)  # type: ignore[arg-type]
    assert isinstance(row, Row)
    settings = Settings(deterministic=True, dtype="fp32", kv="fp32", quant="none")
    request = BatchRequest(
        str(MODEL), tmp_path / "in", tmp_path / "out", settings, budgets=Budgets(ram="3GiB", gpu_mem="0")
    )
    worker = Worker(str(MODEL), JobFolder(tmp_path / "worker"))

    def call(job: str, *rows: LeasedRow) -> WorkReport:
        return worker.work(JobFacts(job, "m", datetime(2026, 1, 1)), rows, (), last=True)

    def answer(job: str, begin: LeasedRow) -> tuple[str, int]:
        """And in how many passes."""
        report, passes = call(job, begin), 1
        while not report.done:
            report, passes = call(job), passes + 1
        return report.done[0].line, passes

    try:
        worker.load(LoadOrder(request, Workload(1, 32)))
        new = LeasedRow(row, None, "0" * 16)
        whole, passes = answer("whole", new)
        assert passes == 9
        records = [record for each in (call("left", new), call("left"), call("left")) for record in each.progress]
        tokens = [token_id for record in records for token_id in record[row.index][0].token_ids]
        assert len(tokens) == len(records) == 3
        assert answer("taken over", replace(new, before=[CutChoice(tokens)])) == (whole, 9 - 3)
    finally:
        worker.close()


def test_only_the_progress_of_a_workers_own_row_counts() -> None:
    """Two workers that compute the same row would write each token twice."""
    table = LeaseTable()
    table.add(range(2))
    assert table.lease(1, 2, last=True) == [0, 1]
    assert table.only_holder(1) == 1
    assert table.lease(2, 2, last=True) == [1]
    assert (table.only_holder(0), table.only_holder(1)) == (1, None)
    table.release(1)
    assert table.only_holder(1) == 2
