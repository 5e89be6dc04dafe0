"""The journal by itself: what is written is read back, damage is told from a torn tail. Cases J4, J5, J7, J15, J17."""

import errno
import io
import json
import os
import random
import sqlite3
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moedge.runtime.jobs.journal import journal as committer_file
from moedge.runtime.jobs.journal.journal import Journal, repair
from moedge.runtime.jobs.journal.state import (
    HEAD_NBYTES,
    VERSION,
    Done,
    Ending,
    JobState,
    Kind,
    decode_done,
    encode,
    encode_done,
    frame,
    read_state,
    replay,
)
from moedge.runtime.settings.errors import BadJournal, JournalFailed, OtherVersion

NUM_ROWS = 40


def done(row: int, failed: bool = False) -> Done:
    return Done(row, failed, row, 2 * row, f"{row:016x}", json.dumps({"id": str(row), "text": "\u2028" * (row % 5)}))


def write(path: Path, rows: range = range(NUM_ROWS)) -> Path:
    """A journal of two processes, the second of which did not say that it stopped; synchronized row by row."""
    with Journal.create(path, {"num_rows": NUM_ROWS}) as journal:
        journal.start(Ending.NONE)
        for row in rows:
            if row == NUM_ROWS // 2:
                journal.stop("half")
                journal.start(Ending.NONE)
            journal.begin([row])
            journal.done(done(row, failed=row % 9 == 0))
            journal.sync()
    return path


def answers(path: Path) -> dict[int, Done]:
    state, found = read_state(path), {}
    with path.open("rb") as file:
        for row, offset in state.answered():
            file.seek(offset)
            found[row] = decode_done(file.readline()[HEAD_NBYTES:-1])
    return found


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "journal")
    assert answers(path) == {row: done(row, failed=row % 9 == 0) for row in range(NUM_ROWS)}
    state = read_state(path)
    assert state.finished
    assert state.running
    assert (state.counts.ok, state.counts.failed) == (35, 5)
    assert state.counts.generated_tokens == 2 * sum(range(NUM_ROWS))
    with Journal(path) as journal:
        assert journal.num_torn_nbytes == 0
        assert journal.state.failed_rows == list(range(0, NUM_ROWS, 9))


@given(st.text(), st.integers(0, 2**40), st.booleans(), st.integers(0, 9), st.integers(0, 9))
def test_an_answer_comes_back_byte_for_byte(text: str, synced: int, failed: bool, cached: int, reasoning: int) -> None:
    line = json.dumps({"id": text, "answer": '"answer":', "x": text})
    record = Done(3, failed, 1, 2, "0" * 16, line, cached_tokens=cached, reasoning_tokens=reasoning)
    payload = encode_done(record, synced)
    assert decode_done(payload) == record
    assert json.loads(payload)["answer"] == json.loads(line)
    assert payload.isascii()


def test_j4_a_torn_tail_is_cut_off_and_every_record_before_it_kept(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole").read_bytes()
    path, generator = tmp_path / "journal", random.Random(4)
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    torn = 0
    for trial in range(2000):
        cut = generator.randint(ends[1], len(whole))
        kept = max(end for end in ends if end <= cut)
        _, scan = replay(io.BytesIO(whole[:cut]))
        assert (scan.end, scan.torn_nbytes, scan.corrupt) == (kept, cut - kept, False)
        torn += scan.torn_nbytes > 0
        if trial % 20 == 0:
            path.write_bytes(whole[:cut])
            with Journal(path) as journal:
                assert journal.num_torn_nbytes == cut - kept
                assert path.stat().st_size == kept
    assert torn > 1500


def test_j4_of_rows_that_are_written_at_once_those_before_the_tear_are_kept(tmp_path: Path) -> None:
    path, calls = tmp_path / "journal", []
    with Journal.create(path, {"num_rows": NUM_ROWS}) as journal, pytest.MonkeyPatch.context() as patch:
        begin, pwrite = path.stat().st_size, os.pwrite
        patch.setattr(os, "pwrite", lambda *arguments: calls.append(arguments) or pwrite(*arguments))
        journal.done(*map(done, range(9)))
        journal.done()
        assert len(calls) == 1
        assert journal.state.counts == read_state(path).counts
    assert answers(path) == {row: done(row) for row in range(9)}
    whole = path.read_bytes()
    for end in range(begin, len(whole)):
        path.write_bytes(whole[:end])
        assert answers(path) == {row: done(row) for row in range(whole[begin:end].count(b"\n"))}


def test_j4_without_the_repair_the_next_record_would_be_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the tail is really in the way."""
    path = write(tmp_path / "journal", range(10))
    path.write_bytes(path.read_bytes() + b"0bad")
    monkeypatch.setattr(os, "ftruncate", lambda descriptor, length: None)
    with Journal(path) as journal:
        journal._records.end = path.stat().st_size
        journal.done(done(30))
    assert 30 not in answers(path)


@pytest.mark.parametrize("trials", [500, pytest.param(4000, marks=pytest.mark.slow)])
def test_j5_damage_in_the_middle_is_refused_and_no_wrong_answer_ever_accepted(trials: int, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole").read_bytes()
    right = answers(tmp_path / "whole")
    path, generator = tmp_path / "journal", random.Random(5)
    refused = repaired = 0
    for trial in range(trials):
        damaged = bytearray(whole)
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            _, scan = replay(io.BytesIO(damaged))
        except (BadJournal, OtherVersion):
            refused += 1
            continue
        if scan.corrupt or scan.end == 0:
            refused += 1
            if trial % 10 == 0:
                with pytest.raises(BadJournal):
                    Journal(path)
                repaired += repair_keeps_only_right(path, right)
            continue
        # Only the tail may be given up: nobody was told yet that it is on disk.
        assert scan.torn_nbytes < 600
        assert answers(path).items() <= right.items()
    assert refused > 0.9 * trials
    assert repaired > 0.075 * trials


def repair_keeps_only_right(path: Path, right: dict[int, Done]) -> bool:
    try:
        result = repair(path)
    except BadJournal:
        return False
    found = answers(path)
    assert found.items() <= right.items()
    assert len(found) == result.rows >= NUM_ROWS - 3
    with Journal(path) as journal:
        assert not list(journal.state.pending()) or result.lost
    return True


def test_j5_a_record_that_was_moved_or_dropped_is_damage(tmp_path: Path) -> None:
    lines = write(tmp_path / "whole").read_bytes().splitlines(keepends=True)
    path = tmp_path / "journal"
    for wrong in (lines[:9] + lines[10:], [*lines[:9], lines[10], lines[9], *lines[11:]], lines[:9] + lines[8:]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(BadJournal, match="damaged at byte"):
            Journal(path)


def test_a_second_answer_to_a_row_is_refused(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "journal", {"num_rows": 3}) as journal:
        journal.done(done(1))
        with pytest.raises(BadJournal, match="second answer"):
            journal.done(done(1))


def test_a_retry_opens_failed_rows_and_no_others(tmp_path: Path) -> None:
    path = write(tmp_path / "journal")
    with Journal(path) as journal:
        with pytest.raises(BadJournal, match="has not failed"):
            journal.state.apply(0, encode(Kind.RETRY, 0, {"rows": [1]}))
        journal.retry([0, 9])
        assert list(journal.state.pending()) == [0, 9]
        journal.done(done(9))
    state = read_state(path)
    assert list(state.pending()) == [0]
    assert state.failed_rows == [18, 27, 36]
    assert answers(path)[9] == done(9)
    assert repair(path).rows == NUM_ROWS


@pytest.mark.parametrize("call", range(1, 8))
def test_j7_a_failed_fdatasync_is_never_tried_again(tmp_path: Path, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    confirmed = [0]
    with pytest.raises((JournalFailed, OSError)):
        write_nine(tmp_path / "journal", confirmed)
    assert len(calls) == call
    assert confirmed[-1] == max(0, call - 3)
    monkeypatch.undo()
    assert read_state(tmp_path / "journal").counts.ok >= confirmed[-1]


def write_nine(path: Path, confirmed: list[int]) -> None:
    with Journal.create(path, {"num_rows": 9}) as journal:
        journal.start(Ending.NONE)
        for row in range(9):
            journal.done(done(row))
            journal.sync()
            confirmed.append(journal.committed.ok)


def test_j15_a_slow_disk_delays_what_counts_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk answers when it is told to: meanwhile every row is taken, and one sync serves them all."""
    answered, calls = threading.Event(), []

    def slow(descriptor: int) -> None:
        calls.append(descriptor)
        answered.wait()

    with Journal.create(tmp_path / "journal", {"num_rows": NUM_ROWS}) as journal:
        monkeypatch.setattr(os, "fdatasync", slow)
        journal.done(done(0))
        while not calls:
            time.sleep(0.001)
        for row in range(1, NUM_ROWS):
            journal.begin([row])
            journal.done(done(row))
        assert journal.committed.ok == 0
        assert len(calls) == 1
        answered.set()
        journal.sync()
        assert journal.committed.ok == NUM_ROWS
        assert len(calls) == 2, "group commit: one sync for all rows that came meanwhile"


def test_j17_a_journal_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    newer = VERSION + 1
    for version, words in ((newer, f"newer moedge: its version is {newer}"), (1, "older moedge: its version is 1")):
        path.write_bytes(frame(encode(Kind.OPEN, 0, {"version": version, "num_rows": 1}), 0))
        for read in (Journal, repair):
            with pytest.raises(OtherVersion, match=words):
                read(path)
    state = JobState()
    state.apply(0, encode(Kind.OPEN, 0, {"version": 2, "num_rows": 1}))
    state.apply(1, encode_done(done(0), 0))
    assert state.counts.ok == 1
    with pytest.raises(OtherVersion, match="newer moedge: this one knows no record of kind 'dance'"):
        state.apply(2, b'{"kind":"dance","synced":0}')


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    for data in (b"", b"{}\n", b"00000000 {}\n", random.Random(0).randbytes(100)):
        (tmp_path / "journal").write_bytes(data)
        with pytest.raises(BadJournal):
            Journal(tmp_path / "journal")
        with pytest.raises(BadJournal):
            read_state(tmp_path / "journal")


class SqliteJournal:
    """What a journal is for, in thirty lines and a library: the differential oracle."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()
        self._base.execute("create table if not exists answers (row integer primary key, failed, line)")

    def _open(self) -> None:
        self._base = sqlite3.connect(self._path, isolation_level=None)

    def done(self, record: Done) -> None:
        self._base.execute("insert into answers values (?, ?, ?)", (record.row, record.failed, record.line))

    def retry(self, rows: list[int]) -> None:
        self._base.executemany("delete from answers where row = ?", [(row,) for row in rows])

    def reopen(self) -> None:
        self._base.close()
        self._open()

    def answers(self) -> list[tuple[int, int, str]]:
        return list(self._base.execute("select row, failed, line from answers order by row"))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["done", "fail", "retry", "reopen", "begin"]), st.integers(0, 11))))
def test_any_history_leaves_the_answers_that_sqlite_has(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("history")
    journal, oracle = Journal.create(folder / "journal", {"num_rows": 12}), SqliteJournal(folder / "base")
    for step, row in history:
        if step in ("done", "fail") and row in journal.state.pending():
            journal.done(done(row, step == "fail"))
            oracle.done(done(row, step == "fail"))
        elif step == "retry":
            failed = journal.state.failed_rows
            journal.retry(failed)
            oracle.retry(failed)
        elif step == "begin":
            journal.begin([row])
        elif step == "reopen":
            journal.close()
            oracle.reopen()
            journal = Journal(folder / "journal")
        assert journal.state.failed_rows == [row for row, failed, _ in oracle.answers() if failed]
    journal.close()
    found = [(row, int(each.failed), each.line) for row, each in answers(folder / "journal").items()]
    assert found == oracle.answers()


@pytest.fixture(autouse=True)
def _no_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_file, "LINGER_SECONDS", 0.0)


def test_activations_that_were_auto_in_older_journals_were_never_rounded() -> None:
    state = JobState()
    identity = {"quant": "int4", "compute": "auto"}
    state.apply(0, encode(Kind.OPEN, 0, {"version": VERSION, "num_rows": 1, "identity": identity}))
    assert state.opened["identity"] == {"quant": "int4", "compute": "float"}
