"""Jobs on the command line: stopping, going on, events. Cases J1 and J12 of the failure table, and a dying disk."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import jsonschema
import pytest

from moedge.cli.views.jobs_view import print_jobs
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.jobs.status import JobStatus
from support.forked import Forked, forked

Rows = list[dict[str, Any]]
Cli = Callable[..., int]
SCHEMA = json.loads(files("moedge.cli").joinpath("events.schema.json").read_text())


@pytest.fixture
def source(rows_file: Callable[[Path, Rows], Path], tmp_path: Path) -> Path:
    """Twelve rows, the last of which fails."""
    rows: Rows = [{"id": str(i), "prompt": f"row {i}", "max_tokens": 4 + i, "ignore_eos": True} for i in range(11)]
    return rows_file(tmp_path / "in.jsonl", [*rows, {"id": "odd", "prompt": "x", "echo": True}])


@pytest.fixture
def batch(checkpoint: Callable[[str], Path], source: Path, tmp_path: Path) -> list[object]:
    return ["batch", checkpoint("llama"), source, "-o", tmp_path / "out.jsonl"]


def events(text: str) -> Rows:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    found = [json.loads(line) for line in text.splitlines()]
    for event in found:
        validator.validate(event)
    return found


def test_the_same_command_goes_on_and_jobs_tell_of_it(
    batch: list[object], cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert cli(*batch, "--max-rows", 4, "--tokens-per-pass", 64) == 75
    assert "Resume with the same command" in capsys.readouterr().err
    assert cli("jobs", "ls") == 0
    listed = capsys.readouterr().out
    assert "stopped" in listed
    header, line = listed.splitlines()
    assert header.split() == ["ID", "STATUS", "DONE", "FAILED", "STARTED", "MODEL", "OUTPUT"]
    assert "4/12" in line
    job_id = line.split()[0]
    for width in (40, 60, 80, 200):
        print_jobs([JobStatus.read(JobFolder(tmp_path / "out.job"))] * 2, width)
        shown = capsys.readouterr().out.splitlines()
        assert len(shown) == 3
        assert all(len(each) <= width for each in shown)
        assert shown[1].split()[:3] == [job_id, "stopped", "4/12"]
        assert shown[1].rstrip().endswith(".jsonl")
    assert cli("jobs", "show", job_id) == 0
    assert "4 answered, 0 failed, 8 to do" in capsys.readouterr().out
    assert cli("jobs", "export", job_id[:5], "-o", tmp_path / "now.jsonl") == 0
    assert len((tmp_path / "now.jsonl").read_text().splitlines()) == 4
    capsys.readouterr()
    assert cli("jobs", "cancel", job_id) == 0
    assert cli(*batch) == 2
    assert "was cancelled" in capsys.readouterr().err
    assert cli("jobs", "resume", job_id, "--max-rows", 1, "-q") == 75
    assert cli(*batch, "--ram", "3GiB", "--max-sequences", 3) == 3
    assert "resuming job" in capsys.readouterr().err
    assert cli("jobs", "resume", job_id, "--failed", "-q") == 3
    assert cli(*batch) == 3
    assert "11 answers in" in capsys.readouterr().err
    assert cli(*batch, "--max-tokens", 9) == 2
    assert "max_tokens 256 -> 9" in capsys.readouterr().err
    assert cli(*batch, "--max-tokens", 9, "--temperature", 1) == 2
    refused = capsys.readouterr().err
    assert "max_tokens 256 -> 9, temperature 0.0 -> 1.0" in refused
    assert "--overwrite" in refused
    assert cli("jobs", "export", job_id) == 0
    assert "the job is finished" in capsys.readouterr().out
    assert not (tmp_path / "out.partial.jsonl").exists()
    assert cli("jobs", "show", job_id) == 0
    shown = capsys.readouterr().out
    assert f"model                  {batch[1]}" in shown
    assert "1 unsupported_parameter" in shown
    assert cli("jobs", "show", tmp_path / "out.jsonl", "--json") == 0
    assert json.loads(capsys.readouterr().out)["status"] == "completed"
    assert cli("jobs", "repair", job_id) == 0
    assert cli("jobs", "show", "nothing") == 2


def test_a_job_is_resumed_on_a_cluster_that_answers_or_here(
    batch: list[object], cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli(*batch, "--max-rows", 4, "-q") == 75
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli("jobs", "resume", tmp_path / "out.jsonl", "--ray", "10.0.0.5:6379") == 6
    assert "--ray needs Ray, which is not installed" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    for name in ("ray.util", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    assert cli("jobs", "resume", tmp_path / "out.jsonl", "--ray", "nonsense", "MOEDGE_RAY_WORKERS=2") == 6
    assert "--ray nonsense: no cluster answers there" in capsys.readouterr().err
    assert cli("jobs", "resume", tmp_path / "out.jsonl", "-q") == 3


def test_events_fit_their_schema_and_the_page_names_every_key(
    batch: list[object], cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moedge.cli.views.progress.EventProgress.interval_s", 0.0)
    assert cli(*batch, "--format", "json", "--max-rows", 2) == 75
    first = capsys.readouterr()
    assert first.err == ""
    assert cli(*batch, "--format", "json") == 3
    second = events(capsys.readouterr().out)
    assert cli(*batch, "--format", "json") == 3
    third = events(capsys.readouterr().out)
    names = [event["event"] for event in (*events(first.out), *second)]
    assert [name for name in names if name != "progress"] == [
        "job", "loaded", "stopped", "job", "loaded", "finished",
    ]  # fmt: skip
    assert [event["event"] for event in third] == ["finished"]
    progress = [event for event in second if event["event"] == "progress"]
    assert progress
    assert [event["done"] for event in progress] == sorted(event["done"] for event in progress)
    page = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    page = page.partition("\n## Events\n")[2].partition("\n## ")[0]
    for kind in SCHEMA["oneOf"]:
        for key in kind["required"]:
            assert f"`{key}`" in page, key


def until_passes(process: Forked, tmp_path: Path) -> None:
    for line in process.stderr:
        if line.startswith("loaded"):
            break
    journal = tmp_path / "out.job" / "journal"
    while b'"begin"' not in journal.read_bytes():
        time.sleep(0.01)


@pytest.fixture
def endless(batch: list[object], rows_file: Callable[[Path, Rows], Path]) -> list[object]:
    """A job of thousands of passes."""
    rows: Rows = [{"id": str(i), "prompt": "x", "max_tokens": 100, "ignore_eos": True} for i in range(240)]
    rows_file(Path(str(batch[2])), rows)
    return [*batch, "--max-sequences", 1]


def test_j12_a_second_signal_leaves_at_once_and_the_job_goes_on(
    endless: list[object], cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with forked(endless, tmp_path) as process:
        until_passes(process, tmp_path)
        # Both are there before another pass can end.
        for number in (signal.SIGSTOP, signal.SIGHUP, signal.SIGINT, signal.SIGCONT):
            os.kill(process.pid, number)
        said = process.stderr.read()
    assert process.wait() in (130, 143)
    assert "rows done" not in said, "it ended as after one signal"
    assert not (tmp_path / "out.jsonl").exists()
    assert cli(*endless, "--max-rows", 1) == 75
    assert "resuming job" in capsys.readouterr().err


def test_j12_a_signal_before_the_passes_stops_at_once_and_leaves_nothing(endless: list[object], tmp_path: Path) -> None:
    with forked(endless, tmp_path) as process:
        process.stderr.readline()
        os.kill(process.pid, signal.SIGTERM)
        process.stderr.read()
    assert process.wait() == 143
    assert not (tmp_path / "out.jsonl").exists()


def test_j12_nohup_stays_in_force_and_a_closed_terminal_ends_no_job(batch: list[object], tmp_path: Path) -> None:
    """SIGHUP was ignored when it began, and whoever read its messages is gone: SIGPIPE."""
    with forked(batch, tmp_path, variables={"MOEDGE_PROGRESS": "bar"}, ignored=[signal.SIGHUP]) as process:
        # The settings, and the device.
        process.stderr.readline()
        process.stderr.readline()
        process.stderr.close()
        os.kill(process.pid, signal.SIGHUP)
    assert process.wait() == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 11


DYING_DISK = """
import sys, threading
from dataclasses import replace
from moedge.cli.main import main
from moedge.offload.stream.reader_lane import DirectFile
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import lifecycle
from moedge.runtime.jobs.job import Running
from moedge.runtime.jobs.stop import StallGuard
from moedge.runtime.plan.placement import minimum
from moedge.runtime.shape.shards import model_shards

def broken(): raise OSError(5, "Input/output error")
def stuck(): threading.Event().wait()

spoil, read, passes, dying = globals()[sys.argv.pop(1)], DirectFile.read, Running.passes, []

def dying_read(*arguments):
    if dying:
        spoil()
    read(*arguments)

def three_passes_and_more(run):
    for index, _ in enumerate(passes(run)):
        if index == 2:
            dying.append(True)
        yield

def streaming(source, *arguments, plan_job=lifecycle.plan_job, **others):
    planned = plan_job(source, *arguments, **others)
    shards = model_shards(source.shape, planned.plan.quant, planned.plan.dtype)
    plan = replace(planned.plan, placement=minimum(shards))
    return replace(planned, plan=plan)

lifecycle.plan_job = streaming
DirectFile.read, Running.passes = dying_read, three_passes_and_more
StallGuard.__init__.__defaults__ = (0.5, *StallGuard.__init__.__defaults__[1:])
main()
"""


@pytest.mark.parametrize(
    ("spoil", "code", "cause", "where"),
    [
        pytest.param("broken", 8, "Input/output error", "StreamBroken", marks=pytest.mark.slow),
        ("stuck", 75, "nothing was computed and no byte moved", "reader_lane.py"),
    ],
)
def test_a_disk_that_dies_stops_the_job_resumable_with_its_cause(
    spoil: str, code: int, cause: str, where: str, batch: list[object], cli: Cli, tmp_path: Path
) -> None:
    """Under a model whose every weight but the head is read from disk in every pass."""
    dying = [spoil, *batch, "--disk-dir", tmp_path / "stores", "-q"]
    with forked(dying, tmp_path, DYING_DISK) as process:
        said = process.stderr.read()
    assert process.wait() == code, said
    assert cause in said
    assert "Traceback" not in said
    stacks = (tmp_path / "out.job" / "stacks").read_text()
    assert where in stacks
    assert "most recent call first" in stacks
    state = read_state(tmp_path / "out.job" / "journal")
    assert state.stopped is not None, "the stop was recorded, so no row is suspected"
    assert cli(*batch, "-q") == 3
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 11


@pytest.fixture
def prose(rows_file: Callable[[Path, Rows], Path], tmp_path: Path) -> Path:
    rows: Rows = [{"id": str(i), "prompt": f"row {i}", "max_tokens": 3, "ignore_eos": True} for i in range(3)]
    return rows_file(tmp_path / "prose.jsonl", rows)


def test_the_last_line_names_the_command_that_continues_cut_rows(
    checkpoint: Callable[[str], Path], prose: Path, cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    batch = ["batch", checkpoint("llama"), prose, "-o", tmp_path / "out.jsonl"]
    assert cli(*batch, "--summary", tmp_path / "s.json") == 0, "a cut row is no failed row"
    said = capsys.readouterr().err.splitlines()
    labels = [line.split()[0] for line in said if line.split()[0] in ("rows", "speed", "time", "memory", "tokens")]
    assert labels == ["rows", "speed", "time", "memory"]
    assert any("3 answered (3 length), 0 failed" in line for line in said)
    command = said[-1].partition("moedge ")[2].split()
    assert command[-3:] == ["--cut", "--max-tokens", "12"]
    assert json.loads((tmp_path / "s.json").read_text())["rows"]["finish_reasons"] == {"length": 3}
    assert cli("jobs", "resume", command[2], "--cut") == 2, "it needs --max-tokens"
    capsys.readouterr()
    assert cli(*command, "-v") == 0
    said = capsys.readouterr().err.splitlines()
    assert any(line.startswith("KV cache") for line in said)
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [12, 12, 12]
    assert cli(*batch) == 0
    assert "is already finished" in capsys.readouterr().err
    assert cli(*batch, "--max-tokens", 999) == 2
    refused = capsys.readouterr().err
    assert "--cut --max-tokens 999" in refused
    assert "--accept-drift" not in refused, "a finished job has nothing to continue"


def test_rows_that_are_appended_to_the_input_are_added_and_edits_are_refused(
    checkpoint: Callable[[str], Path], prose: Path, cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = ["batch", checkpoint("llama"), prose, "-o", tmp_path / "out.jsonl"]
    assert cli(*batch, "--max-rows", 1) == 75
    text = prose.read_text()
    prose.write_text(text + '{"id": "new", "prompt": "x", "max_tokens": 2}\n')
    capsys.readouterr()
    assert cli(*batch) == 0
    assert "1 row done, 3 to do (1 of them new)" in capsys.readouterr().err
    prose.write_text(prose.read_text() + '{"id": "newer", "prompt": "x", "max_tokens": 2}\n')
    assert cli(*batch, "-q") == 0, "also of a finished job"
    answers = [json.loads(line)["id"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answers == ["0", "1", "2", "new", "newer"]
    grown = prose.read_text()
    for changed in (grown.replace("row 1", "row 9"), text, grown.rstrip("\n")[:-1] + ', "x-a": 1}\n{"prompt": "y"}\n'):
        prose.write_text(changed)
        assert cli(*batch) == 7
    prose.write_text(text)
    assert cli(*batch, "--overwrite", "-q") == 0
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 3


def test_overwrite_and_rm_remove_only_what_a_job_wrote(
    checkpoint: Callable[[str], Path], prose: Path, cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = ["batch", checkpoint("llama"), prose, "-o", tmp_path / "out.jsonl", "-q"]
    (tmp_path / "out.jsonl").write_text("mine")
    assert cli(*batch, "--overwrite") == 2
    assert (tmp_path / "out.jsonl").read_text() == "mine"
    (tmp_path / "out.jsonl").unlink()
    assert cli(*batch, "--max-rows", 1) == 75
    assert cli("jobs", "rm", tmp_path / "out.job") == 2
    assert "would be lost" in capsys.readouterr().err
    assert cli(*batch) == 0
    answers = (tmp_path / "out.jsonl").read_text()
    (tmp_path / "out.jsonl").write_text(answers + "edited by hand\n")
    assert cli(*batch, "--overwrite", "--max-tokens", 2) == 2
    assert (tmp_path / "out.job" / "journal").exists()
    (tmp_path / "out.jsonl").unlink()
    assert cli("jobs", "rm", tmp_path / "out.job") == 2, "the journal has the only copy"
    (tmp_path / "out.jsonl").write_text(answers)
    assert cli("jobs", "rm", tmp_path / "out.job") == 0
    assert not (tmp_path / "out.job").exists()
    assert (tmp_path / "out.jsonl").read_text() == answers
    (tmp_path / "old.job").mkdir()
    (tmp_path / "old.job" / "journal").write_text("of another version")
    assert cli("jobs", "rm", tmp_path / "old.job") != 0
    assert cli("jobs", "rm", tmp_path / "old.job", "--force") == 0
    assert not (tmp_path / "old.job").exists()


def test_names_of_a_job_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    from moedge.cli.views.jobs_view import _print_facts

    _print_facts({"model": "a\x1b]0;owned\x07\x1b[2Jb", "output": Path("c\x9b31md\u202e")})
    printed = capsys.readouterr().out
    assert "\\x1b]0;owned\\x07\\x1b[2Jb" in printed
    assert "c\\x9b31md\\u202e" in printed


def test_a_job_that_goes_away_while_jobs_are_listed_is_left_out(
    cli: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from moedge.runtime.jobs import status

    monkeypatch.setattr(status, "jobs", lambda: [JobFolder(tmp_path / "gone.job")])
    monkeypatch.setattr("moedge.apps.documents.hooks.collect_rounds", lambda found: found)
    assert cli("jobs", "ls") == 0
