"""The report of a job (`apps/reports/`): a page that loads nothing, with the figures that the job recorded, and its
text escaped.
"""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.documents.run import DocumentsEnded
from moedge.apps.documents.status import DocumentsJob, collect_rounds, find_rounds
from moedge.apps.reports import page as report_page
from moedge.apps.reports.job_report import JobReport, read_runs
from moedge.apps.reports.page import ChartLine, heat_map, over_time, page
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal import run_log
from moedge.runtime.jobs.journal.run_log import RunLog
from moedge.runtime.jobs.status import JobPhase, jobs
from support.jobs.documents_oracle import Stopper

Ask = Callable[..., DocumentsEnded]
LONG = "".join(f"K{number}. Filler words.\n" for number in range(40))
OPTIONS: dict[str, Any] = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300}


class Page(HTMLParser):
    """The tags and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [(name, value or "") for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in {"a": "K1.", "b": LONG, "<script>alert(1)<": "", "c": "K3. " * 30}.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def job_of(tmp_path: Path) -> DocumentsJob:
    found = find_rounds(str(tmp_path / "out.jsonl"))
    assert found is not None
    return found


def test_the_page_of_a_job_over_documents_has_its_figures_and_loads_nothing(
    ask: Ask, tmp_path: Path, folder: Path
) -> None:
    ended = ask(folder, prompt="<b>Which</b> facts?", **OPTIONS)
    report = JobReport.of_documents(job_of(tmp_path))
    text = page(report)
    found = Page(text)
    assert found.links == [("href", (folder / name).as_uri()) for name in ("a.txt", "b.txt", "c.txt")]
    assert "a.txtK1\n" in found.text
    assert "script" not in found.tags
    assert "<b>Which</b> facts?" in found.text
    assert not re.search(r"url\(|@import|https?://", text)
    assert "<script>alert(1)<.txt" in found.text
    rows = sum(each.summary.rows.total for each in ended.rounds)
    assert (report.counts.rows, report.num_rows) == (rows, rows)
    assert f"of {rows} rows answered" in found.text
    outcomes = f"{ended.totals.documents} documents: {ended.totals.outcomes['answered']} answered, 1 unreadable"
    assert outcomes in " ".join(found.text.split())
    assert [(each.code, each.count) for each in report.failures] == [("document_empty", 1)]
    assert "Rows over time" not in text
    assert report.rows_over_time()[-1].value == rows
    assert report.status == "finished"


def test_field_rates_are_those_of_the_summary(ask: Ask, tmp_path: Path, folder: Path) -> None:
    ask(folder, **OPTIONS)
    path = tmp_path / "out.job" / "summary.json"
    summary = json.loads(path.read_bytes())
    summary["totals"] |= {"structured": 8, "filled": {"<i>total": 8, "vat": 5}}
    path.write_text(json.dumps(summary))
    found = Page(page(JobReport.of_documents(job_of(tmp_path))))
    assert "<i>total100.0 %" in found.text.replace("\n", "")
    assert "vat62.5 %" in found.text.replace("\n", "")


def test_a_job_that_was_killed_is_reported_with_what_there_is(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(report_page, "_SHORT", 0.0)
    with pytest.raises(RuntimeError):
        ask(folder, observer=Stopper(20, RuntimeError), **OPTIONS)
    job = job_of(tmp_path)
    assert job.phase is JobPhase.INTERRUPTED
    report = JobReport.of_documents(job)
    text = page(report)
    assert report.summaries == []
    assert "Documents</h2>" not in text
    assert "Rows over time" in text
    ask(folder, **OPTIONS)
    again = JobReport.of_documents(job_of(tmp_path))
    assert len(again.runs) > len(report.runs)
    assert again.rows_over_time()[-1].value == again.num_rows
    seconds = [point.seconds for point in again.rows_over_time()]
    assert seconds == sorted(seconds)


def test_the_list_of_jobs_has_the_whole_job_and_not_its_rounds(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    ended = ask(folder, **OPTIONS)
    assert len(ended.rounds) > 1
    (whole,) = collect_rounds(jobs(tmp_path / "nowhere"))
    assert whole.path == (tmp_path / "out.job").resolve()
    job = DocumentsJob.read(tmp_path / "out.job")
    assert (job.output, job.phase, len(job.rounds)) == (tmp_path / "out.jsonl", JobPhase.FINISHED, len(ended.rounds))
    by_id = find_rounds(job.job_id)
    assert by_id is not None
    assert by_id.path == whole.path
    found = job.batch_object()
    assert found["status"] == "completed"
    assert found["request_counts"] == {"total": job.num_rows, "completed": job.num_rows, "failed": 0}
    assert isinstance(next(iter(collect_rounds([JobFolder(tmp_path / "other.job")]))), JobFolder)


def test_the_log_of_a_run_has_few_records_however_long_it_takes(tmp_path: Path) -> None:
    now = 0.0
    log = RunLog(tmp_path / "runs.jsonl", clock=lambda: now)
    log.begin(rows=3)
    for _ in range(20_000):
        log.sample(lambda: {"done": 1})
        now += 5.0
    log.end(reason=None)
    with (tmp_path / "runs.jsonl").open("ab") as file:
        file.write(b'{"record":"begin","rows":3}\n{"record":"sam')
    first, second = read_runs(tmp_path / "runs.jsonl")
    assert 100 < len(first.samples) < 2000
    assert (first.begin["rows"], first.end) == (3, {"reason": None})
    assert (second.samples, second.end) == ([], {})
    unwritable = RunLog(tmp_path / "no" / "runs.jsonl")
    unwritable.begin()


def test_charts_are_marked_at_round_numbers() -> None:
    chart = over_time("A <chart>", [ChartLine([(0, 0), (10, 87)])], lambda value: f"{value:g}!")
    assert re.findall(r">(\d+)!<", chart) == ["0", "25", "50", "75", "100"]
    assert 'aria-label="A &lt;chart&gt;"' in chart
    heat = heat_map("Heat", [[0.0, 0.5], [1.0]])
    assert [int(level) for level in re.findall(r'class="heat-(\d)"', heat)] == [0, 4, 7]
    assert heat.count("z") == 3
