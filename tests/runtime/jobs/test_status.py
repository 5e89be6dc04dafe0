"""How a job stands, in OpenAI's words and ours; and finding it again."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types import Batch

from moedge.runtime.jobs.folder import JobFolder, JobLock
from moedge.runtime.jobs.request import ResumeOptions, resumed
from moedge.runtime.jobs.status import JobPhase, JobStatus, cancel, export_now, find_job, jobs, repair_journal
from moedge.runtime.jobs.stop import Limits
from moedge.runtime.settings.errors import BadJournal, JobMismatch, JobNotFound, OutputExists
from moedge.runtime.settings.settings import Budgets

Job = Callable[..., Any]


@pytest.fixture
def folder(job: Job, rows_in: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobFolder:
    """Of a job of ten rows, three of which are done."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    rows_in(10)
    job(limits=Limits(max_rows=3))
    return JobFolder(tmp_path / "out.job")


def status(folder: JobFolder) -> JobStatus:
    return JobStatus.read(folder)


def test_the_batch_object_is_one_to_openais_own_types(folder: JobFolder, job: Job) -> None:
    for state in ("expired", "completed"):
        found = json.loads(json.dumps(status(folder).batch_object()))
        batch = Batch.model_validate(found, strict=True)
        assert batch.status == state
        assert batch.request_counts is not None
        assert batch.request_counts.completed + batch.request_counts.failed == (3 if state == "expired" else 10)
        assert batch.usage is not None
        assert batch.usage.output_tokens > 0
        assert batch.endpoint == "/v1/completions"
        job()
    assert found["output_file_id"].endswith("out.jsonl")
    assert found["error_file_id"].endswith("out.errors.jsonl")


def test_a_job_stands_where_its_last_process_left_it(folder: JobFolder, job: Job, tmp_path: Path) -> None:
    assert status(folder).phase is JobPhase.STOPPED
    assert status(folder).reason == "--max-rows 3 reached"
    lock = JobLock(folder)
    assert status(folder).phase is JobPhase.RUNNING
    assert cancel(folder) == "stopping after the current pass"
    assert status(folder).phase is JobPhase.CANCELLING
    lock.close()
    stopped = job(hook=lambda live: folder.cancel.touch())
    assert stopped.reason == "it was cancelled"
    assert status(folder).phase is JobPhase.CANCELLED
    with pytest.raises(JobMismatch, match="was cancelled; resume it with `moedge jobs resume"):
        job()
    with pytest.raises(OSError, match="broken by hand"):
        job(hook=break_by_hand, resume=ResumeOptions(cancelled=True))
    assert status(folder).phase is JobPhase.INTERRUPTED
    assert job().finished
    assert status(folder).phase is JobPhase.FINISHED
    assert cancel(folder) == "already finished; nothing was cancelled"


def break_by_hand(live: Any) -> None:
    raise OSError("broken by hand")


def test_a_job_is_found_by_id_folder_and_output(folder: JobFolder, tmp_path: Path) -> None:
    job_id = status(folder).job_id
    for name in (job_id, job_id[:4], folder.path, tmp_path / "out.jsonl", os.path.relpath(folder.path)):
        assert find_job(str(name)).path == folder.path
    for name in ("", "nothing", "/", "*", job_id + "0"):
        with pytest.raises(JobNotFound, match="jobs ls"):
            find_job(name)
    assert [each.path for each in jobs(tmp_path / "state")] == [folder.path]
    folder.journal.unlink()
    assert list(jobs(tmp_path / "state")) == []
    assert list((tmp_path / "state" / "moedge" / "jobs").iterdir()) == [], "the link went with the job"


def test_jobs_are_found_in_the_folder_where_one_stands_without_any_state(
    folder: JobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other-state"))
    assert [each.path for each in jobs(tmp_path)] == [folder.path]


def test_what_is_finished_can_be_taken_while_the_job_runs(folder: JobFolder, job: Job, tmp_path: Path) -> None:
    target = tmp_path / "taken.jsonl"
    job(hook=lambda live: target.exists() or export_now(folder, target))
    assert len(target.read_bytes().splitlines()) >= 3
    with pytest.raises(OutputExists):
        export_now(folder, target)


def test_a_resumed_request_is_the_one_that_began_the_job(folder: JobFolder, job: Job, tmp_path: Path) -> None:
    opened = status(folder).state.opened
    request = resumed(opened, folder.input, Budgets(ram="5GiB"), Limits(), ResumeOptions())
    assert request.input == tmp_path / "in.jsonl"
    assert request.budgets == Budgets(ram="5GiB")
    assert json.loads(json.dumps(request.as_json())) == opened["request"]
    names = ("model", "input", "output", "settings", "defaults")
    assert job(**{name: getattr(request, name) for name in names}).finished


def test_j5_a_damaged_journal_is_repaired_and_the_job_goes_on(folder: JobFolder, job: Job, tmp_path: Path) -> None:
    data = folder.journal.read_bytes()
    lines = data.splitlines(keepends=True)
    hurt = next(index for index, line in enumerate(lines) if b"finish_reason" in line)
    folder.journal.write_bytes(data.replace(lines[hurt], lines[hurt].replace(b"finish_reason", b"finish_treason")))
    with pytest.raises(BadJournal, match="moedge jobs repair"):
        job()
    repaired = repair_journal(folder)
    assert (repaired.rows, repaired.lost) == (2, 1)
    assert repaired.damaged.exists()
    assert job().finished
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 9
    assert b"treason" not in (tmp_path / "out.jsonl").read_bytes()
