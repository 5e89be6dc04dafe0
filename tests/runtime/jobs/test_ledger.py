"""A job that is resumed is the job that was started (`runtime/jobs/session.py`): cases I12, J8, J9, J10, J13, J14 of
the failure table.
"""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.offload.errors import ExitCode, exit_code_of
from moedge.quant.native import library
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import lifecycle
from moedge.runtime.jobs import request as requests
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs import stop as ending
from moedge.runtime.jobs.folder import JobFolder, JobLock
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.jobs.request import BatchRequest, ResumeOptions, pin_settings
from moedge.runtime.jobs.run import FileRows
from moedge.runtime.jobs.session import Checked
from moedge.runtime.jobs.stop import Limits
from moedge.runtime.rows.answer_formats import Answers
from moedge.runtime.rows.row import Defaults
from moedge.runtime.sampling.params import FinishReason
from moedge.runtime.settings.errors import BadArgument, InputChanged, JobInUse, JobMismatch, OutputExists, OutputRefused
from moedge.runtime.settings.settings import Budgets, Settings
from moedge.runtime.weights.key_offsets import FILE, KeyOffsets

Job = Callable[..., Any]
Outputs = Callable[[], dict[str, bytes]]
THREE = Limits(max_rows=3)


@pytest.fixture
def begun(job: Job, rows_in: Callable[[int], Path], tmp_path: Path) -> JobFolder:
    """A job of ten rows, three of which are done."""
    rows_in(10)
    assert job(limits=THREE).reason == "--max-rows 3 reached"
    return JobFolder(tmp_path / "out.job")


def test_the_same_request_goes_on_under_other_budgets(begun: JobFolder, job: Job, outputs: Outputs) -> None:
    assert [json.loads(line)["id"] for line in outputs()["out.partial.jsonl"].splitlines()] == ["r0", "r1", "r2"]
    seen: list[int] = []
    done = job(
        hook=lambda live: seen.extend(sequence.prompt_ids[-1] for sequence in live),
        budgets=Budgets(ram="9GiB"),
        settings=Settings(tokens_per_pass=7, max_sequences=2),
    )
    assert done.finished
    assert set(seen) == set(b"3456789"), "no row was computed twice"
    assert list(outputs()) == ["out.jsonl", "out.errors.jsonl"] or set(outputs()) == {"out.jsonl", "out.errors.jsonl"}
    assert len(outputs()["out.jsonl"].splitlines()) == 9


def test_a_finished_job_does_nothing_when_it_is_started_again(job: Job, rows_in: Any, outputs: Outputs) -> None:
    rows_in(5)
    job()
    first = outputs()
    again = job(hook=lambda live: pytest.fail("a pass was run"))
    assert again.finished
    assert outputs() == first


def test_a_lost_output_is_written_again_and_a_changed_one_is_kept(
    job: Job, rows_in: Any, outputs: Outputs, tmp_path: Path
) -> None:
    rows_in(5)
    job()
    first = outputs()
    (tmp_path / "out.jsonl").unlink()
    job()
    assert outputs() == first
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(OutputExists, match="not what this job wrote"):
        job()
    assert outputs()["out.jsonl"] == b"precious"


OTHER: dict[str, tuple[dict[str, Any], str]] = {
    "max_tokens": ({"defaults": Defaults(max_tokens=9)}, " max_tokens 256 -> 9. "),
    "temperature": ({"defaults": Defaults(max_tokens=256, temperature=0.5)}, " temperature 0.0 -> 0.5. "),
    "seed": ({"defaults": Defaults(max_tokens=256, seed=1)}, " seed 0 -> 1. "),
    "stop": ({"defaults": Defaults(max_tokens=256, stop=("x",))}, " stop [] -> ['x']. "),
    "quant": ({"settings": Settings(quant="nf4")}, " quant none -> nf4. "),
    "dtype": ({"settings": Settings(dtype="bf16")}, " dtype fp32 -> bf16. "),
    "kv": ({"settings": Settings(kv="bf16")}, " kv fp32 -> bf16. "),
    "deterministic": ({"settings": Settings(deterministic=True)}, " deterministic False -> True. "),
    "lenient": ({"lenient": True}, " lenient False -> True. "),
}


@pytest.mark.parametrize("name", OTHER)
def test_j10_what_would_change_answers_is_refused_by_name(name: str, begun: JobFolder, job: Job) -> None:
    change, sentence = OTHER[name]
    before = begun.journal.read_bytes()
    with pytest.raises(JobMismatch) as refused:
        job(**change)
    assert sentence in str(refused.value)
    assert str(refused.value).count(" -> ") == 1, "nothing else differs"
    assert begun.journal.read_bytes() == before
    job(**change, resume=ResumeOptions(drift=(name,)))


def test_a_setting_that_no_job_records_cannot_be_accepted(begun: JobFolder, job: Job) -> None:
    before = begun.journal.read_bytes()
    with pytest.raises(BadArgument, match=r"--accept-drift bogus: .* temperature"):
        job(resume=ResumeOptions(drift=("seed", "bogus")))
    assert begun.journal.read_bytes() == before
    new = begun.path.parent / "new.jsonl"
    with pytest.raises(BadArgument, match=r"--accept-drift bogus: .* temperature"):
        job(output=new, resume=ResumeOptions(drift=("bogus",)))
    job(output=new, resume=ResumeOptions(drift=("kv", "versions")))


@pytest.mark.parametrize(
    ("name", "patched"),
    [("model", "_model"), ("tokenizer", "_text"), ("versions", "version")],
)
def test_j10_so_is_another_model_tokenizer_or_version(
    name: str, patched: str, begun: JobFolder, job: Job, monkeypatch: pytest.MonkeyPatch, fake: ModuleType
) -> None:
    install = fake.install

    def install_other(*arguments: Any) -> None:
        install(*arguments)
        monkeypatch.setattr(requests, patched, lambda *_: "other")

    monkeypatch.setattr(fake, "install", install_other)
    with pytest.raises(JobMismatch, match=f": {name} .* -> "):
        job()
    assert job(resume=ResumeOptions(drift=(name,))).finished


def test_j10_another_attention_backend_is_said_and_refused_where_bits_are_promised(
    job: Job, rows_in: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake: ModuleType
) -> None:
    rows_in(10)
    exact = {"settings": Settings(deterministic=True), "output": tmp_path / "exact.jsonl"}
    for asked in ({}, exact):
        assert list(job(limits=THREE, **asked).session.notes) == []
    monkeypatch.setattr(fake, "BACKEND", "native")
    with pytest.raises(JobMismatch, match=r" attention torch -> native.*--accept-drift attention"):
        job(**exact)
    for asked in ({}, exact | {"resume": ResumeOptions(drift=("attention",))}):
        ended = job(**asked)
        assert ended.finished
        (note,) = ended.session.notes
        assert note.startswith("attention is computed by native, and was by torch when the job began")


def test_j10_a_job_whose_activations_were_rounded_goes_on_where_that_is_not_possible(
    job: Job, rows_in: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, fake: ModuleType
) -> None:
    rows_in(10)
    monkeypatch.setattr(fake, "COMPUTE", "int8")
    assert list(job(limits=THREE).session.notes) == []
    monkeypatch.setattr(fake, "COMPUTE", "float")
    ended = job()
    assert ended.finished
    (note,) = ended.session.notes
    assert note.startswith("compute is float, and was int8 when the job began")


def test_j10_a_resumed_job_keeps_its_arithmetic_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = {"dtype": "bf16", "quant": "int4", "kv": "int8", "compute": "int8", "deterministic": False}
    for available, compute in ((True, "int8"), (False, "auto")):
        monkeypatch.setattr(library, "available", lambda here=available: here)
        assert pin_settings(Settings(), {"identity": identity}).compute == compute
    whole = identity | {"quant": "int8"}
    assert pin_settings(Settings(), {"identity": whole}).compute == "int8", "torch multiplies these"


def test_j10_key_offsets_are_kept_with_the_job_and_others_are_refused_by_name(
    begun: JobFolder, job: Job, monkeypatch: pytest.MonkeyPatch, fake: ModuleType
) -> None:
    """What is measured can differ from one device to the next; the job's own copy does not."""
    install, used = fake.install, []

    def install_with(measured: float) -> None:
        def load_engine(source: Any, plan: Any, *, key_offsets: Any, **_: Any) -> Any:
            used.append(key_offsets or KeyOffsets({0: torch.full((1, 2), measured)}))
            return fake.fake_loaded(fake.FakeEngine(), used[-1])

        def install_other(*arguments: Any) -> None:
            install(*arguments)
            monkeypatch.setattr(lifecycle, "load_engine", load_engine)

        monkeypatch.setattr(fake, "install", install_other)

    limits = Limits(max_rows=1)
    for measured in (1.0, 2.0):
        install_with(measured)
        job(limits=limits)
    assert used[0].digest == used[1].digest, "the second run takes the job's own"
    (begun.path / FILE).write_bytes(b"damaged")
    before = begun.journal.read_bytes()
    with pytest.raises(JobMismatch, match=f"key_offsets {used[0].digest} -> "):
        job(limits=limits)
    assert begun.journal.read_bytes() == before
    install_with(1.0)
    job(limits=limits)
    install_with(2.0)
    (begun.path / FILE).unlink()
    assert job(resume=ResumeOptions(drift=("key_offsets",))).finished


def test_j10_every_setting_that_shapes_answers_is_in_the_identity() -> None:
    from dataclasses import fields

    recorded = set(Defaults.__dataclass_fields__) | set(requests.RESOLVED)
    speed = {"tokens_per_pass", "max_sequences", "speculate", "host_kv", "cpu_experts", "cpu_attention"}
    assert {field.name for field in fields(Settings)} - speed <= recorded


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (
            lambda lines: [lines[0].replace(b"row 0", b"row x"), *lines[1:]],
            "line 1 differs from the row that was answered",
        ),
        (lambda lines: lines[1:], "line 1 differs from the row that was answered"),
        (lambda lines: [lines[0].replace(b"r0", b"new"), *lines], "line 1 differs from the row that was answered"),
        (lambda lines: lines[:1], "has 1 row, and row 2 was answered"),
        (lambda lines: [*lines[:9], lines[9].replace(b"row 9", b"row x")], "no answer yet"),
    ],
)
def test_i12_an_input_that_changed_is_refused_and_the_row_is_named(
    change: Callable[[list[bytes]], list[bytes]], where: str, begun: JobFolder, job: Job, tmp_path: Path
) -> None:
    source = tmp_path / "in.jsonl"
    before = source.read_bytes()
    source.write_bytes(b"".join(change(before.splitlines(keepends=True))))
    with pytest.raises(InputChanged, match=where):
        job()
    source.write_bytes(before)
    assert job().finished


def test_i12_a_row_that_changes_while_the_job_runs_stops_it(job: Job, rows_in: Any, tmp_path: Path) -> None:
    source = rows_in(200)
    before = source.read_bytes()

    def edit(live: Any) -> None:
        # In place, as an editor that keeps the file does.
        with source.open("r+b") as file:
            file.write(before.replace(b"row", b"sow"))

    with pytest.raises(InputChanged, match=r"line .* was changed while the job ran"):
        job(hook=edit)
    source.write_bytes(before)
    assert job().finished


@pytest.mark.parametrize("replaced", [False, True])
def test_i12_an_input_that_changed_meanwhile_is_not_exported(
    replaced: bool, job: Job, rows_in: Any, outputs: Outputs, tmp_path: Path
) -> None:
    source = rows_in(5)
    before = source.read_bytes()

    def append(live: Any) -> None:
        if replaced:
            source.unlink()
        source.write_bytes(before + b" \n")

    with pytest.raises(InputChanged, match="no answer yet"):
        job(hook=append)
    assert outputs().keys() <= {"out.partial.jsonl"}, "what was answered meanwhile is no output"
    source.write_bytes(before)
    assert job(hook=lambda live: pytest.fail("nothing is left to compute")).finished
    assert len(outputs()["out.jsonl"].splitlines()) == 4


def test_i12_a_touched_input_is_the_same(begun: JobFolder, job: Job, tmp_path: Path) -> None:
    os.utime(tmp_path / "in.jsonl", (1, 1))
    assert job(hook=lambda live: os.utime(tmp_path / "in.jsonl", (2, 2))).finished


def test_j8_a_second_process_is_refused_at_once_and_writes_nothing(begun: JobFolder, job: Job) -> None:
    lock = JobLock(begun)
    before = {path.name: path.read_bytes() for path in begun.path.iterdir()}
    assert begun.locked
    with pytest.raises(JobInUse, match=rf"in use by another process \(process {os.getpid()} on "):
        job()
    assert {path.name: path.read_bytes() for path in begun.path.iterdir()} == before
    lock.close()
    assert not begun.locked
    assert job().finished


def test_j8_of_many_that_start_at_once_one_runs(tmp_path: Path) -> None:
    folder, start = JobFolder(tmp_path / "out.job"), threading.Barrier(8)
    holders: list[int] = []
    most: list[int] = []
    errors: list[BaseException] = []

    def race() -> None:
        start.wait()
        for _ in range(60):
            try:
                lock = JobLock(folder)
            except JobInUse:
                continue
            except BaseException as error:
                errors.append(error)
                return
            holders.append(1)
            most.append(len(holders))
            holders.pop()
            folder.remove_unbegun()
            lock.close()

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert set(most) == {1}
    assert not folder.path.exists()


def test_j8_a_lock_goes_with_the_process_that_was_killed(begun: JobFolder, job: Job) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from moedge.runtime.jobs.folder import JobFolder, JobLock\n"
        "lock = JobLock(JobFolder(Path(sys.argv[1]))); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, begun.path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert job().finished


@pytest.mark.parametrize("call", ["ftruncate", "pwrite"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_j6_a_lock_that_finds_no_room_gives_out_and_is_let_go(
    call: str, number: int, begun: JobFolder, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as failing:
        failing.setattr(os, call, full)
        with pytest.raises(OSError, match=f"{os.strerror(number)}.*lock") as caught:
            JobLock(begun)
    assert exit_code_of(caught.value) is ExitCode.GAVE_OUT
    assert job().finished


def test_j9_another_job_for_the_same_output_is_refused(begun: JobFolder, job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text('{"id":"a","prompt":"b"}\n')
    with pytest.raises(InputChanged, match="not the input that job"):
        job(input=other)
    # Their error files would have one name.
    with pytest.raises(JobMismatch, match=r"belongs to the output .*out\.jsonl"):
        job(output=tmp_path / "out.txt")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("missing/out.jsonl", "create it first"),
        ("x" * 250 + ".jsonl", "shorter output name|cannot be an output"),
        ("x" * 245 + ".jsonl", "shorter output name"),
        ("a\0b.jsonl", "cannot be an output"),
        ("out.job", ".job names the folder of a job"),
        ("in.jsonl/out.jsonl", "does not exist"),
        ("x/" * 3000 + "out.jsonl", "cannot be an output"),
    ],
)
def test_j14_a_place_that_cannot_be_written_is_refused_early(
    name: str, what: str, job: Job, rows_in: Any, tmp_path: Path
) -> None:
    rows_in(3)
    with pytest.raises(OutputRefused, match=what):
        job(output=tmp_path / name, hook=lambda live: pytest.fail("a pass was run"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["ö ü\u2028.jsonl", "-o", "a b'c\".jsonl", "\udcff.jsonl", "*?[x].jsonl", "out"])
def test_j14_odd_names_work(name: str, job: Job, rows_in: Any, tmp_path: Path) -> None:
    rows_in(3)
    job(output=tmp_path / name)
    assert (tmp_path / name).read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_j14_a_folder_that_cannot_be_made_is_refused(
    error: int, job: Job, rows_in: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_in(3)

    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OutputRefused, match="cannot be created"):
        job()


def test_j14_a_folder_of_a_job_that_is_a_link_or_a_file_is_refused(job: Job, rows_in: Any, tmp_path: Path) -> None:
    rows_in(3)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out.job").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputRefused, match="is a link"):
        job()
    (tmp_path / "out.job").unlink()
    (tmp_path / "out.job").write_text("a file")
    with pytest.raises(OutputRefused, match="is a file"):
        job()


def test_a_refused_job_leaves_nothing_behind(job: Job, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{oops\n")
    from moedge.runtime.settings.errors import InputRefused

    with pytest.raises(InputRefused):
        job()
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_failed_rows_are_run_again_and_only_those(job: Job, rows_in: Any, outputs: Outputs) -> None:
    rows_in(8)

    def spoil(live: Any) -> None:
        for sequence in live:
            if sequence.prompt_ids == list(b"row 5"):
                sequence.finish(FinishReason.ERROR, "no number")

    job(hook=spoil)
    failed = [json.loads(line)["id"] for line in outputs()["out.errors.jsonl"].splitlines()]
    assert failed == ["r2", "r5"]
    seen: set[bytes] = set()
    job(hook=lambda live: seen.update(bytes(each.prompt_ids) for each in live), resume=ResumeOptions(failed=True))
    assert seen == {b"row 5"}
    assert [json.loads(line)["id"] for line in outputs()["out.errors.jsonl"].splitlines()] == ["r2"]
    assert [json.loads(line)["id"] for line in outputs()["out.jsonl"].splitlines()] == [
        f"r{row}" for row in range(8) if row != 2
    ]


def test_the_error_file_goes_when_no_row_failed_in_the_end(job: Job, tmp_path: Path, outputs: Outputs) -> None:
    (tmp_path / "in.jsonl").write_text('{"id":"a","prompt":"b","max_tokens":2}\n')
    job(hook=lambda live: live[0].finish(FinishReason.ERROR, "no number"))
    assert set(outputs()) == {"out.jsonl", "out.errors.jsonl"}
    assert outputs()["out.jsonl"] == b""
    job(resume=ResumeOptions(failed=True))
    assert set(outputs()) == {"out.jsonl"}


def test_of_rows_that_end_in_one_pass_those_before_a_fault_keep_their_answers(
    job: Job, tmp_path: Path, outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"id": str(row), "prompt": "x", "max_tokens": 2}) for row in range(6)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    answer = Answers.answer

    def faulty(self: Answers, row: Any, completions: Any) -> str:
        if row.index == 4:
            raise ZeroDivisionError
        return answer(self, row, completions)

    monkeypatch.setattr(Answers, "answer", faulty)
    with pytest.raises(ZeroDivisionError):
        job()
    monkeypatch.setattr(Answers, "answer", answer)
    state = read_state(tmp_path / "out.job" / "journal")
    assert (state.counts.ok, list(state.pending())) == (4, [4, 5])
    job()
    assert [json.loads(line)["id"] for line in outputs()["out.jsonl"].splitlines()] == list("012345")


def test_too_many_failures_stop_the_job(job: Job, tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(row), "prompt": "x", "max_tokens": 1 + row}) for row in range(50)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def spoil(live: Any) -> None:
        for sequence in live[:1]:
            sequence.finish(FinishReason.ERROR, "no number")

    stopped = job(hook=spoil, limits=Limits(max_failures="10%"))
    assert stopped.reason is not None
    assert "--max-failures allows 5" in stopped.reason
    assert 5 < stopped.session.journal.state.counts.failed < 50


def out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel does, and what it says of it."""
    count = ending.memory_kills() + 1
    Path(os.environ["FAKE_VMSTAT"]).write_text(f"nr_free_pages 1\noom_kill {count}\n")
    os.kill(os.getpid(), signal.SIGKILL)


DEATHS: dict[str, Callable[[Any], Any]] = {
    "segmentation fault": lambda _: os.kill(os.getpid(), signal.SIGSEGV),
    "abort": lambda _: os.abort(),
    "exit": lambda _: ctypes.CDLL(None).exit(3),
    "out of memory": out_of_memory,
    "a bug": lambda _: 1 / 0,
    "an exit in Python": lambda _: sys.exit(0),
}


@pytest.mark.parametrize("death", DEATHS)
def test_j13_a_row_that_kills_the_process_every_time_becomes_an_error_row(
    death: str, job: Job, rows_in: Any, outputs: Outputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "_VMSTAT", tmp_path / "vmstat")
    monkeypatch.setenv("FAKE_VMSTAT", str(tmp_path / "vmstat"))
    rows_in(60)

    def kill(live: Any) -> None:
        if any(sequence.prompt_ids == list(b"row 33") for sequence in live):
            DEATHS[death](monkeypatch)

    for _ in range(3):
        assert in_child(lambda: job(hook=kill)) != 0
        assert "out.jsonl" not in outputs()
    assert in_child(lambda: job(hook=kill)) == 0, "two crashes with others, one alone"
    failed = [json.loads(line) for line in outputs()["out.errors.jsonl"].splitlines()]
    assert [(row["id"], row["error"]["code"]) for row in failed] == [
        ("r2", "unsupported_parameter"), ("r33", "worker_crashed"),
    ]  # fmt: skip
    assert len(outputs()["out.jsonl"].splitlines()) == 58


def in_child(work: Callable[[], Any]) -> int:
    """The status of a copy of this process that does `work` and ends."""
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = 1
        with suppress(Exception, SystemExit):
            work()
            code = 0
        os._exit(code)
    return os.waitpid(process, 0)[1]


def test_j13_power_cuts_and_clean_stops_make_no_suspects(
    begun: JobFolder, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    for boot in range(9):
        # Every round ends with the power; each process that stops cleanly comes before it.
        monkeypatch.setattr(ending, "boot_id", lambda boot=boot: f"boot {boot}")
        monkeypatch.setattr("moedge.runtime.jobs.session.boot_id", lambda boot=boot: f"boot {boot}")
        with pytest.raises(KeyboardInterrupt):
            job(hook=interrupt)
        in_child(lambda: job(hook=lambda live: os.kill(os.getpid(), signal.SIGKILL)))
    monkeypatch.setattr(ending, "boot_id", lambda: "the last boot")
    with pytest.raises(KeyboardInterrupt):
        job(hook=interrupt)
    assert read_state(begun.journal).suspects == {}
    assert job().finished


def interrupt(live: Any) -> None:
    raise KeyboardInterrupt


def test_j13_a_row_that_is_killed_from_outside_is_not_condemned_for_it(
    job: Job, rows_in: Any, outputs: Outputs, begun: JobFolder
) -> None:
    """Negative control: nine kills, always with the same rows in work."""
    for _ in range(9):
        in_child(lambda: job(hook=lambda live: os.kill(os.getpid(), signal.SIGKILL)))
    assert read_state(begun.journal).suspects == {}
    job()
    assert len(outputs()["out.jsonl"].splitlines()) == 9


def test_j13_innocent_suspects_are_answered_and_run_with_others_no_more(
    job: Job, rows_in: Any, outputs: Outputs
) -> None:
    """Twice the process crashes whatever runs; then nothing is wrong with any row."""
    rows_in(20)
    for _ in range(2):
        in_child(lambda: job(hook=lambda live: os.abort()))
    together: list[int] = []
    job(hook=lambda live: together.append(len(live)))
    assert set(together) == {1}
    assert len(outputs()["out.jsonl"].splitlines()) == 19


def test_a_job_runs_on_an_engine_that_somebody_else_loaded_and_keeps(
    rows_in: Callable[[int], Path], fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows_in(10)
    fake.install(lambda: pytest.fail("another engine is loaded"), monkeypatch.setattr)
    closed: list[bool] = []
    for module, name in ((sessions, "open_source"), (lifecycle, "open_memory"), (lifecycle, "plan_job")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("the model or memory is opened again"))
    given = fake.given_model(fake.FakeEngine(), lambda: closed.append(True))
    for name in ("one", "two"):
        request = BatchRequest("fake", tmp_path / "in.jsonl", tmp_path / f"{name}.jsonl")
        with Checked.open(request, given) as checked:
            running = states.Running(states.Measured.of(checked).plan().load())
            for _ in running.passes():
                pass
            assert running.end().finished
    assert [each["id"] for each in map(json.loads, (tmp_path / "two.jsonl").read_text().splitlines())]
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()
    assert closed == []


def test_an_engine_that_would_answer_otherwise_is_refused_for_a_job_that_was_begun(
    begun: JobFolder, fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.install(fake.FakeEngine, monkeypatch.setattr)
    given = fake.given_model(fake.FakeEngine(), lambda: None)
    request = BatchRequest("fake", tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    with Checked.open(request, given) as checked:
        assert states.Running(states.Measured.of(checked).plan().load())
    given.policy.plan.quant = given.chosen.plan.quant = "nf4"
    with Checked.open(request, given) as checked, pytest.raises(JobMismatch, match=r"quant none -> nf4\."):
        states.Measured.of(checked).plan()


def test_a_source_may_have_no_row_now_and_one_later(
    rows_in: Callable[[int], Path], fake: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As a source would that gets rows while the job runs: it is asked again after every pass."""

    class LateRows(FileRows):
        asked = 0

        def take(self, most: int, alone: bool) -> Any:
            self.asked += 1
            return () if self.asked % 3 else super().take(1, alone)

    rows_in(10)
    fake.install(fake.FakeEngine, monkeypatch.setattr)
    monkeypatch.setattr(states, "FileRows", LateRows)
    assert fake.run(BatchRequest("fake", tmp_path / "in.jsonl", tmp_path / "out.jsonl")).finished
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 9
