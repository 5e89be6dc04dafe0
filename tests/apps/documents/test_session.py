"""The session of a person with a folder of invoices (`apps/documents/`): a sample, the night, a power cut, the table;
what scripts get.

The machine is a recorded profile with a GPU; the model is a stand-in that writes the fields of the text that it gets.
"""

import functools
import io
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any, BinaryIO

import jsonschema
import pyarrow.parquet
import pytest

from moedge import computing, plan_report
from moedge.apps.documents import view as documents_view
from moedge.apps.documents.reader_process import ReaderProcess
from moedge.apps.documents.readers.content import Content
from moedge.apps.documents.readers.read import read
from moedge.apps.documents.status import find_rounds
from moedge.apps.reports.job_report import JobReport
from moedge.apps.reports.page import page
from moedge.computing import TorchBuild
from moedge.offload.machine.hardware import Driver
from moedge.offload.machine.profile import save_machine
from moedge.runtime.engine.sequence import FinishReason, Sequence
from moedge.runtime.jobs import encode, job_plan, lifecycle
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs.journal.state import Counts
from moedge.runtime.jobs.summary import KV, Memory, Passes, RunSummary, Seconds, Throughput, TierMemory, summarise_rows
from moedge.runtime.plan.planner import PlanResult
from support import recorded_machine
from support.document_folder import docx, encrypted_pdf, pdf
from support.jobs import documents_oracle, fake_engine
from support.recorded_machine import GIB, NAME, RECORDED

Cli = Callable[..., int]
Said = Callable[..., tuple[int, list[str]]]
DRIVER, TORCH = Driver((13, 0), "580.65"), TorchBuild("2.13.0", (13, 0))
EVENTS = json.loads(files("moedge.cli").joinpath("events.schema.json").read_text())
ASKED = ("--prompt", "Extract the invoice.", "--gpu-mem", "7GiB", "--ram", "20GiB", "--disk", "40GiB")
SCHEMA = {"type": "object", "properties": {name: {"type": ["string", "null"]} for name in ("total", "date", "vat_id")}}


def invoice(sequence: Sequence) -> int:
    """The next byte of the fields that the text has, as JSON."""
    text = bytes(sequence.prompt_ids).decode()
    values = {name: re.search(rf"{name} (\S+)", text) for name in SCHEMA["properties"]}
    answer = json.dumps({name: found and found[1] for name, found in values.items()})
    at = len(sequence.output_ids)
    return ord(answer[at]) if at < len(answer) else documents_oracle.END


class Hook:
    """What happens before pass `at`, counted from now; 0 for never."""

    def __init__(self) -> None:
        self.at = 0
        self.happens: Callable[[list[Sequence]], None] = lambda running: None

    def __call__(self, running: list[Sequence]) -> None:
        self.at -= 1
        if self.at == 0:
            self.happens(running)


def power_cut(running: list[Sequence]) -> None:
    raise SystemExit(137)


def ctrl_c(running: list[Sequence]) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def not_a_number(running: list[Sequence]) -> None:
    """The logits of one row are not finite."""
    running[0].finish(FinishReason.ERROR, "the logits are not finite")


_READING = Lock()


def read_here(process: ReaderProcess, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
    # pdfium may be used by one thread at a time; reader processes have one.
    with _READING:
        return read(file.read(nbytes), name, None, None, lambda page: None)


def measured(counts: Counts) -> RunSummary:
    summary = summarise_rows(counts)
    summary.seconds, summary.throughput = Seconds(0.5, 12.0, 36.0, 48.5), Throughput(410.0, 28.4)
    summary.predicted.generated_tok_s, summary.passes = 31.0, Passes(9, 42.0, 32.0)
    summary.memory = Memory(TierMemory(7 * GIB, 6 * GIB), TierMemory(20 * GIB, 17 * GIB))
    summary.kv = KV("int8", 16, 4096, waste=0.02, prefix_hit_tokens=1012, preemptions=0)
    return summary


@functools.cache
def planned() -> PlanResult:
    with tempfile.TemporaryDirectory() as folder:
        save_machine(RECORDED, Path(folder, "box.json"))
        model, machine = recorded_machine.config_only(Path(folder)), Path(folder, "box.json")
        budgets = {"gpu_mem": "7GiB", "ram": "20GiB", "disk": "40GiB"}
        found = plan_report.plan(model, machine=machine, quant="nf4", **budgets).result
    assert found is not None
    return found


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hook:
    """The stand-in model on the recorded machine, and a folder of twelve invoices, of which two have no text."""
    hook = Hook()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    recorded_machine.config_only(tmp_path)
    result = planned()
    engine = fake_engine.FakeEngine
    monkeypatch.setattr(fake_engine, "FakeEngine", lambda: engine(hook))
    documents_oracle.install(monkeypatch.setattr)
    monkeypatch.setattr(encode, "Grammars", lambda tokenizer, vocab: SimpleNamespace(start=lambda schema: None))
    monkeypatch.setattr(fake_engine, "next_token", invoice)
    monkeypatch.setattr(lifecycle, "plan_job", lambda *_, **__: result)
    monkeypatch.setattr(job_plan, "with_workload", lambda chosen, plan, workload: replace(chosen, plan=plan))
    monkeypatch.setattr(states, "summarise", lambda model, planned, counts, *_: measured(counts))
    monkeypatch.setattr(states.Loaded, "expert_hit_rate", 0.34)
    monkeypatch.setattr(lifecycle, "open_memory", lambda *_: (result.request.budget, None))
    monkeypatch.setattr(job_plan, "find_hardware", lambda folder: RECORDED.hardware)
    for name, found in {"torch": TORCH, "driver": DRIVER, "gpus": RECORDED.hardware.gpus}.items():
        monkeypatch.setattr(computing, f"find_{name}", lambda found=found: found)
    monkeypatch.setattr(ReaderProcess, "read", read_here)
    monkeypatch.setattr(documents_view, "clock", lambda seconds: "05:40")
    write_invoices(tmp_path / "invoices")
    (tmp_path / "invoice.schema.json").write_text(json.dumps(SCHEMA))
    return hook


def write_invoices(folder: Path) -> None:
    (folder / "2024").mkdir(parents=True)
    for number in range(10):
        text = f"total {number}0 date 2024-05-{10 + number}" + (f" vat_id DE{number:020}" if number < 6 else "")
        suffix, content = (".docx", docx("Invoice", text)) if number % 5 == 4 else (".pdf", pdf([text]))
        (folder / "2024" / f"{number}{suffix}").write_bytes(content)
    (folder / "scan.pdf").write_bytes(pdf(["", ""]))
    (folder / "locked.pdf").write_bytes(encrypted_pdf())
    (folder / ".draft.pdf").write_bytes(b"")


@pytest.fixture
def said(cli: Cli, capsys: pytest.CaptureFixture[str]) -> Said:
    """`said(*options)` is the exit code of `moedge docs`, and the lines that it printed."""

    def run(*options: object) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = cli("docs", NAME, "invoices", *ASKED, *options)
        return code, "".join(capsys.readouterr()).splitlines()

    return run


def assert_lines(lines: list[str], *wanted: str) -> None:
    """Every pattern has a line, in this order."""
    left = iter(lines)
    for pattern in wanted:
        assert any(re.fullmatch(pattern, line.strip()) for line in left), "\n".join([pattern, "", *lines])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.slow
def test_a_night_with_a_folder_of_invoices(
    passes: Hook, said: Said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = ("--schema", "invoice.schema.json", "-o", "invoices.parquet", "--until", "07:00")
    code, lines = said(*table, "--try", 5)
    assert code == 3, lines
    assert_lines(
        lines,
        r"2024/2\.pdf",
        r'\{"total": "20", "date": "2024-05-12", "vat_id": "DE0+2"\}',
        r"2024/4\.docx",
    )
    assert_lines(
        lines,
        r"Everything stays on this machine\.",
        r"found 12 files: 10 \.pdf, 2 \.docx; skipped: 1 hidden",
        r"round 1: \d rows?",
        r"plan: GPU, nf4 weights .*; GPU memory budget 7\.00 GiB, RAM budget 20\.00 GiB",
        r"5 rows tried in \d+\.\d s: \d valid against the schema, \d\d tokens in a typical answer",
        r"whole folder, 12 files with [\d.]+ KiB: about \d+ rows with [\d,]+ tokens, at most .*, ready 05:40 "
        r"\(--until 07:00\)",
        r"The same command without --try keeps these answers, and answers the other documents\.",
    )
    assert not (tmp_path / "invoices.parquet").exists()
    # A person at a terminal says yes, and the power fails in the middle of the night.
    passes.at, passes.happens = 60, power_cut
    with monkeypatch.context() as terminal:
        terminal.setattr(sys, "stdin", Terminal("y\n"))
        terminal.setattr(sys.stderr, "isatty", lambda: True)
        code, lines = said(*table, "--try", 5)
    assert code == 137
    assert any("Answer the whole folder now? [Y/n]" in line for line in lines)
    assert not (tmp_path / "invoices.parquet").exists()
    code, lines = said(*table)
    assert code == 3
    assert_lines(
        lines,
        r"found 12 files: 10 \.pdf, 2 \.docx; skipped: 1 hidden",
        r"resuming round 2: [1-9] rows? done, [1-9] to do",
        r"memory +RAM peak 17\.00 GiB of 20\.00 GiB, GPU memory peak 6\.00 GiB of 7\.00 GiB",
        r"12 documents: 10 answered, 2 unreadable; in invoices\.parquet",
        r"fields filled: total 100\.0%, date 100\.0%, vat_id 50\.0% \(low: vat_id\)",
        r"errors: 1 document_encrypted, 1 document_no_text \(invoices\.errors\.jsonl\)",
        r"a page about the job: moedge report invoices\.parquet",
    )
    # Said when all files are read, which may be before the round is resumed.
    assert_lines(lines, r"2 files cannot be asked about: 1 document_encrypted, 1 document_no_text")
    rows = pyarrow.parquet.read_table(tmp_path / "invoices.parquet").to_pylist()
    assert [row["total"] for row in rows if row["error"] is None] == [f"{number}0" for number in range(10)]
    assert "12 documents: 10 answered, 2 unreadable;" in " ".join(report_of(tmp_path).split())
    assert "Rows without vat_id: 2024/4.docx, 2024/6.pdf, 2024/7.pdf" in report_of(tmp_path)
    code, lines = said(*table)
    assert code == 3
    assert not any(line.startswith(("round", "resuming", "plan:")) for line in lines), "there is nothing to do"


def report_of(tmp_path: Path) -> str:
    found = find_rounds(str(tmp_path / "invoices.parquet"))
    assert found is not None
    return page(JobReport.of_documents(found))


def events(lines: list[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in lines]
    for each in found:
        jsonschema.Draft202012Validator(EVENTS).validate(each)
    return found


def test_scripts_get_events_a_summary_and_failed_rows_run_again(passes: Hook, said: Said, tmp_path: Path) -> None:
    passes.at, passes.happens = 5, not_a_number
    asked = ("-o", "out.jsonl", "--schema", "invoice.schema.json")
    code, lines = said(*asked, "--format", "json", "--summary", "run.json")
    assert code == 3
    found = {each["event"]: each for each in events(lines)}
    assert found["folder"]["files"] == 12
    assert found["read"]["errors"] == {"document_encrypted": 1, "document_no_text": 1}
    assert found["finished"]["errors"] == {"document_encrypted": 1, "document_no_text": 1, "numerical_error": 1}
    assert (found["finished"]["ok"], found["finished"]["failed"]) == (9, 3)
    assert {"round", "job", "loaded"} <= found.keys()
    summary = json.loads((tmp_path / "run.json").read_text())
    assert (summary["totals"]["answered"], summary["totals"]["failed"]["numerical_error"]) == (9, 1)
    assert sum(each["rows"]["total"] for each in summary["rounds"]) == 10
    assert "The same command with --failed runs them again." in said(*asked)[1]
    code, lines = said(*asked, "--failed")
    assert code == 3
    assert_lines(
        lines, r"resuming round 1: 9 rows done, 1 to do", r"12 documents: 10 answered, 2 unreadable; in out\.jsonl"
    )
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["answer"]["total"] for row in answers] == [f"{number}0" for number in range(10)]
    code, lines = said(*asked, "--failed", "--format", "json")
    assert [each["event"] for each in events(lines)] == ["folder", "read", "finished"]


def test_commands_for_batches_refuse_a_job_over_documents(
    passes: Hook, said: Said, cli: Cli, capsys: pytest.CaptureFixture[str]
) -> None:
    said("-o", "out.jsonl", "--schema", "invoice.schema.json")
    for command in ("resume", "cancel", "rm", "export", "repair"):
        assert cli("jobs", command, "out.jsonl") == 2
        assert "out.jsonl is a job over documents: its `moedge docs` command resumes it" in capsys.readouterr().err


def test_cut_answers_name_the_limit_and_what_to_do(passes: Hook, said: Said) -> None:
    code, lines = said("-o", "out.jsonl", "--max-tokens", 3)
    assert code == 3, lines
    wanted = r"10 answers reached --max-tokens 3; continue with the same command and --cut --max-tokens 12"
    assert_lines(lines, r"12 documents: 0 answered, 10 cut, 2 unreadable; in out\.jsonl", wanted)


def test_a_sample_for_a_script_is_one_event(passes: Hook, said: Said) -> None:
    code, lines = said("-o", "out.jsonl", "--try", 4, "--format", "json")
    found = {each["event"]: each for each in events(lines)}
    assert code in (0, 3)
    assert len(found["sample"]["rows"]) == 4
    assert found["sample"]["whole"]["rows"] >= 10


@pytest.mark.parametrize(("happens", "code", "begins"), [(ctrl_c, 130, "Interrupted"), (None, 75, r"Stopped \(--max-")])
def test_the_last_lines_of_a_job_that_stops_early_count_every_document(
    passes: Hook, said: Said, tmp_path: Path, happens: Any, code: int, begins: str
) -> None:
    """Some documents are answered, the others wait for an answer."""
    passes.at, passes.happens = 10, happens or passes.happens
    limit = () if happens else ("--max-rows", 3)
    stopped, lines = said("-o", "out.jsonl", "--schema", "invoice.schema.json", *limit)
    assert stopped == code
    last = next(line for line in lines if re.match(begins, line))
    counts = re.search(r"(\d+) of 12 documents done \(out\.partial\.jsonl\); (\d+) without an answer\.", last)
    assert counts is not None, last
    done, waiting = map(int, counts.groups())
    assert (done + waiting, waiting >= 1) == (12, True)
    before = (tmp_path / "out.partial.jsonl").read_text().splitlines()
    assert len(before) == done
    # A run that stops sooner loses no row of the partial output.
    passes.at, passes.happens = 1, ctrl_c
    assert said("-o", "out.jsonl", "--schema", "invoice.schema.json")[0] == 130
    assert set(before) <= set((tmp_path / "out.partial.jsonl").read_text().splitlines())
    assert said("-o", "out.jsonl", "--schema", "invoice.schema.json")[0] == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 10
    assert not (tmp_path / "out.partial.jsonl").exists()
