"""Whatever call is the last one, a job (`runtime/jobs/journal/`, `runtime/jobs/session.py`) that is started again ends
with the same bytes. Cases J2, J3, J6, J7, J16.
"""

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.offload.atomic_file import AtomicFile
from moedge.offload.errors import ExitCode, exit_code_of
from moedge.runtime.jobs.journal import journal as committer_file
from moedge.runtime.jobs.journal.journal import Journal
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.jobs.outputs import AnswerStream
from moedge.runtime.settings.errors import BadJournal, ExportFailed, JournalFailed, OutputExists, OutputRefused

NUM_ROWS = 12
Outputs = dict[str, bytes]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_file, "LINGER_SECONDS", 0.0)


@pytest.fixture
def reference(job: Callable[..., Any], rows_in: Callable[[int], Path], tmp_path: Path) -> Outputs:
    """What an uninterrupted job writes; `in.jsonl` is there from now on."""
    rows_in(NUM_ROWS)
    out = tmp_path / "reference" / "out.jsonl"
    out.parent.mkdir()
    job(output=out)
    return {path.name: path.read_bytes() for path in out.parent.glob("*.jsonl")}


def crash(job: Callable[..., Any], disk: Any, patched: Any, crash_type: Any) -> tuple[bool, int]:
    """(whether the job ended before the disk did, how many rows had been confirmed)."""
    confirmed, journals, real = 0, [], Journal.done

    def spied(self: Journal, *records: Any) -> None:
        journals.append(self)
        real(self, *records)

    def look(live: list[Any]) -> None:
        nonlocal confirmed
        if journals:
            confirmed = journals[-1].committed.ok + journals[-1].committed.failed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "done", spied)
        try:
            with patched(disk):
                job(hook=look)
        except crash_type:
            return False, confirmed
        except JournalFailed as error:
            # The committer died with the process, or the journal really failed.
            if not isinstance(error.__cause__, crash_type):
                raise
            return False, confirmed
    return True, confirmed


def clean(tmp_path: Path) -> None:
    for path in sorted(tmp_path.glob("out*"), reverse=True):
        if path.is_dir():
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        else:
            path.unlink()


# In the fast lane processes are killed at odd calls, and the power fails at even ones.
@pytest.mark.sample("2")
@pytest.mark.parametrize("step", [1, 2])
def test_j2_j16_killed_at_every_call_the_job_ends_with_the_same_bytes(
    step: int,
    job: Callable[..., Any],
    reference: Outputs,
    outputs: Callable[[], Outputs],
    disk_faults: ModuleType,
    tmp_path: Path,
) -> None:
    kinds: set[str] = set()
    for last in range(1, 1000, step):
        disk = disk_faults.Disk(last)
        ended, _ = crash(job, disk, disk_faults.patched, disk_faults.Crash)
        if ended:
            break
        kinds.add(disk.calls[last - 1])
        for name, data in outputs().items():
            # Of the two files that are there at a kill each is whole: the old one or the new one.
            assert name == "out.partial.jsonl" or data == reference[name]
        job()
        assert outputs() == reference, f"after a crash at call {last}, {disk.calls[last - 1]}"
        clean(tmp_path)
    assert last > 30
    # Every second call may pass over what is called once or twice: how many calls come before it is a matter of time.
    assert kinds >= {"create", "write", "fsync", "fdatasync", "mkdir"} | ({"rename", "unlink"} if step == 1 else set())


@pytest.mark.sample("2")
@pytest.mark.parametrize("step", [1, 2])
def test_j3_the_power_fails_at_every_call_and_no_confirmed_row_is_lost(
    step: int,
    job: Callable[..., Any],
    reference: Outputs,
    outputs: Callable[[], Outputs],
    disk_faults: ModuleType,
    tmp_path: Path,
) -> None:
    generator, most_confirmed = random.Random(3), 0
    for last in range(step, 1000, step):
        disk = disk_faults.Disk(last)
        ended, confirmed = crash(job, disk, disk_faults.patched, disk_faults.Crash)
        if ended:
            break
        disk.lose(generator)
        most_confirmed = max(most_confirmed, confirmed)
        assert rows_kept(tmp_path) >= confirmed
        job()
        assert outputs() == reference, f"after the power failed at call {last}, {disk.calls[last - 1]}"
        clean(tmp_path)
    assert most_confirmed > 0


def rows_kept(tmp_path: Path) -> int:
    """As a new process would find them."""
    path = tmp_path / "out.job" / "journal"
    if not path.exists():
        return 0
    with Journal(path):
        pass
    return read_state(path).counts.rows


def skip_fdatasync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(committer_file.os, "fdatasync", lambda descriptor: None)


def publish_unsynced(patch: pytest.MonkeyPatch) -> None:
    def publish(self: AtomicFile) -> None:
        self.flush()
        self._close()
        os.replace(self.hidden, self.path)

    patch.setattr(AtomicFile, "publish", publish)


@pytest.mark.parametrize("broken", [skip_fdatasync, publish_unsynced])
def test_j3_a_job_that_skips_its_synchronizing_is_caught(
    broken: Callable[[pytest.MonkeyPatch], None],
    job: Callable[..., Any],
    reference: Outputs,
    outputs: Callable[[], Outputs],
    disk_faults: ModuleType,
    tmp_path: Path,
) -> None:
    """Negative control: each of the two kinds of synchronizing is needed, and this test would say so."""
    caught = 0
    for seed in range(3):
        generator = random.Random(seed)
        for last in range(10, 80):
            disk = disk_faults.Disk(last)
            with disk_faults.patched(disk), pytest.MonkeyPatch.context() as patch:
                broken(patch)
                ended, confirmed = crash(job, disk, no_patch, disk_faults.Crash)
            disk.lose(generator)
            try:
                kept = rows_kept(tmp_path)
                job()
                caught += kept < confirmed or outputs() != reference
            except (OutputExists, JournalFailed, BadJournal):
                caught += 1
            clean(tmp_path)
            if ended or caught:
                break
    assert caught > 0


def no_patch(disk: Any) -> Any:
    from contextlib import nullcontext

    return nullcontext()


# In the fast lane one error comes at odd calls, and the other at even ones.
@pytest.mark.sample("ENOSPC-odd", "EIO-even")
@pytest.mark.parametrize(("first", "step"), [(1, 1), (1, 2), (2, 2)], ids=["every", "odd", "even"])
@pytest.mark.parametrize(
    ("fault", "short"),
    [(errno.ENOSPC, True), (errno.EIO, False), (errno.EMFILE, False), (errno.EROFS, False), (errno.EDQUOT, False)],
    ids=["ENOSPC", "EIO", "EMFILE", "EROFS", "EDQUOT"],
)
def test_j6_j7_an_error_at_every_call_stops_the_job_resumable(
    fault: int,
    short: bool,
    first: int,
    step: int,
    job: Callable[..., Any],
    reference: Outputs,
    outputs: Callable[[], Outputs],
    disk_faults: ModuleType,
    tmp_path: Path,
) -> None:
    errors: set[type[BaseException]] = set()
    codes: set[ExitCode] = set()
    for last in range(first, 1000, step):
        disk = disk_faults.Disk(last, fault=fault, short=short)
        try:
            with disk_faults.patched(disk):
                job()
        except (JournalFailed, ExportFailed, OutputRefused, OSError) as error:
            errors.add(type(error))
            codes.add(exit_code_of(error))
            assert "out.jsonl" not in outputs() or outputs()["out.jsonl"] == reference["out.jsonl"]
        if disk.faults == 0:
            break
        job()
        assert outputs() == reference, f"after error {fault} at call {last}, {disk.calls[last - 1]}"
        clean(tmp_path)
    assert last > 30
    assert {JournalFailed, ExportFailed} <= errors
    assert codes <= {ExitCode.GAVE_OUT, ExitCode.USAGE}


def test_j6_a_full_disk_saves_the_row_and_the_stop_in_the_room_of_the_ballast(
    job: Callable[..., Any], rows_in: Callable[[int], Path], outputs: Callable[[], Outputs], tmp_path: Path
) -> None:
    rows_in(NUM_ROWS)
    real, full, ballast = os.pwrite, [False], tmp_path / "out.job" / "ballast"

    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        if full[0] and ballast.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data, offset)

    def fill(live: list[Any]) -> None:
        full[0] = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(JournalFailed, match=r"No space left.*Free some disk space"):
            job(hook=fill)
    state = read_state(tmp_path / "out.job" / "journal")
    assert state.stopped is not None, "the stop was recorded"
    assert state.counts.rows > 0, "the row that met the full disk is kept"
    assert outputs().keys() <= {"out.partial.jsonl"}
    job()
    assert len(outputs()["out.jsonl"].splitlines()) == NUM_ROWS - 1


def test_a_full_disk_stops_the_copy_of_answers_with_every_answer_safe(
    job: Callable[..., Any], rows_in: Callable[[int], Path], outputs: Callable[[], Outputs], tmp_path: Path
) -> None:
    rows_in(NUM_ROWS)

    def upto(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerStream, "upto", upto)
        with pytest.raises(ExportFailed, match=r"partial\.jsonl could not be written .No space left"):
            job()
    job()
    assert len(outputs()["out.jsonl"].splitlines()) == NUM_ROWS - 1


@pytest.mark.sample("293")
@pytest.mark.parametrize("apart", [97, 293])
def test_j6_a_disk_that_is_full_at_any_byte_of_the_journal_leaves_a_job_that_goes_on(
    apart: int, job: Callable[..., Any], reference: Outputs, outputs: Callable[[], Outputs], tmp_path: Path
) -> None:
    """With no ballast to fall back on: what fits is kept, the rest is computed again."""
    real, stopped = os.pwrite, 0
    job()
    journal = (tmp_path / "out.job" / "journal").read_bytes()
    clean(tmp_path)
    # From behind the first record on: the file is created with it or not at all.
    for room in range(journal.index(b"\n") + 1, len(journal), apart):

        def pwrite(descriptor: int, data: Any, offset: int, room: int = room) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("lock") or offset + len(data) <= room:
                return real(descriptor, data, offset)
            if offset >= room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, bytes(data)[: room - offset], offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            patch.setattr(os, "posix_fallocate", no_room)
            with pytest.raises(JournalFailed, match="Free some disk space"):
                job()
        stopped += 1
        with (tmp_path / "out.job" / "journal").open("rb") as file:
            assert file.read().endswith(b"\n"), "the record that did not fit was taken back"
        job()
        assert outputs() == reference
        clean(tmp_path)
    assert stopped > 15 * 97 // apart


def no_room(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
