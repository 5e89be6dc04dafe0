"""Rows run while files are still being read: nobody waits for a slow file, and the output is that of a job that did."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from moedge.apps.documents import feed
from moedge.apps.documents.document import Document, UnreadDocument
from moedge.apps.documents.feed import AskedRow, Expected, GrowingFile, Reading
from moedge.apps.documents.file_walk import FoundFile
from moedge.apps.documents.iterate import read_as_completed
from moedge.apps.documents.reader_process import ReadOptions
from moedge.apps.documents.readers.content import Content
from moedge.apps.documents.readers.read import read
from moedge.apps.documents.rounds import Entry, EntryLog, Rounds
from moedge.apps.documents.run import DocumentsEnded
from moedge.runtime.jobs.folder import JobFolder
from moedge.runtime.jobs.job import Running
from moedge.runtime.jobs.journal.state import read_state
from moedge.runtime.rows.reader import RowIndex
from moedge.runtime.settings.errors import SettingError
from support.jobs.documents_oracle import Stopper

Ask = Callable[..., DocumentsEnded]
LONG = "".join(f"K{number}. Filler words.\n" for number in range(40))
OPTIONS = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300, "workers": 2}


class Reader:
    """Reads `slow` only once it may."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: str = "a0.txt") -> None:
        self.may = threading.Event()
        self.slow = slow
        self.fails: BaseException | None = None
        # The fixture puts its own reader there when a job starts.
        monkeypatch.setattr("moedge.apps.documents.iterate.ReaderProcess", lambda options: self)

    def read(self, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
        if name == self.slow:
            assert self.may.wait(20)
            if self.fails is not None:
                raise self.fails
        return read(file.read(nbytes), name, None, None, lambda page: None)

    def close(self) -> None:
        self.may.set()


class Releaser(Stopper):
    """Lets the slow file be read once `rows` rows have answers; stops, or fails, some passes later."""

    def __init__(self, reader: Reader, rows: int, **stop: Any) -> None:
        super().__init__(**stop)
        self.reader, self.answered_before, self._rows = reader, 0, rows

    def after_pass(self, running: Running) -> str | None:
        counts = running.session.journal.state.counts
        if not self.reader.may.is_set():
            self.answered_before = counts.rows
            if counts.rows < self._rows:
                return None
            self.reader.may.set()
        return super().after_pass(running)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(feed, "READ_FIRST", 1)
    folder = tmp_path / "in"
    folder.mkdir()
    texts = {"a0": LONG, "b1": "K1.", "c2": LONG.replace("K", "K9"), "d3": "K3. " * 30, "e4": ""}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def files(tmp_path: Path, out: str) -> list[bytes]:
    return [(tmp_path / f"{out}{suffix}").read_bytes() for suffix in (".jsonl", ".errors.jsonl")]


def test_rows_run_while_a_file_is_read_and_the_output_is_the_same(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(folder, out="whole.jsonl", **OPTIONS)
    reader = Reader(monkeypatch)
    observer = Releaser(reader, rows=4)
    ended = ask(folder, out="fed.jsonl", observer=observer, **OPTIONS)
    assert observer.answered_before >= 4
    assert files(tmp_path, "fed") == files(tmp_path, "whole")
    fed, *merges = ended.rounds
    assert fed.summary.stalls.rows is not None
    assert fed.summary.stalls.rows > 0
    assert all(each.summary.stalls.rows is None for each in merges)
    assert ended.report.new == 5


@pytest.mark.parametrize("error", [None, RuntimeError])
@pytest.mark.parametrize("passes", [1, 12, 60])
def test_a_job_that_was_stopped_while_it_read_ends_with_the_same_bytes(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, passes: int,
    error: type[BaseException] | None,
) -> None:  # fmt: skip
    ask(folder, out="whole.jsonl", **OPTIONS)
    reader = Reader(monkeypatch)
    try:
        ended = ask(folder, observer=Releaser(reader, rows=2, passes=passes, error=error), **OPTIONS)
        assert ended.reason == "stopped by a test"
        assert (tmp_path / "out.partial.jsonl").exists()
    except RuntimeError:
        assert error is not None
    (round_file,) = (tmp_path / "out.job" / "rounds").glob("*/0001.jsonl")
    before = round_file.read_bytes()
    # What a kill leaves of a row that was being appended.
    round_file.write_bytes(before + b'{"id":"torn')
    reader.may.set()
    ask(folder, **OPTIONS)
    assert files(tmp_path, "out") == files(tmp_path, "whole")
    assert round_file.read_bytes().startswith(before)


def test_the_journal_knows_rows_before_they_run(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    ask(folder, observer=Releaser(reader, rows=2), **OPTIONS)
    (first,) = (tmp_path / "out.job" / "rounds").glob("*/0001.answers.job")
    state = read_state(JobFolder(first).journal)
    begun = b"".join(line for line in (first / "journal").read_bytes().splitlines() if b'"kind":"extend"' in line)
    assert state.finished
    assert begun.count(b'"num_rows"') >= 1
    assert state.num_rows == len((first.parent / "0001.jsonl").read_text().splitlines())


def test_rows_that_come_while_a_finished_round_is_published_get_another(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(folder, **OPTIONS)
    (first,) = (tmp_path / "out.job" / "rounds").glob("*/0001.answers.jsonl")
    # As after a kill between the last answer and the export.
    first.unlink()
    (folder / "z9.txt").write_text("K77.")
    reader = Reader(monkeypatch, slow="z9.txt")

    class Publisher(Stopper):
        @contextmanager
        def working(self) -> Iterator[None]:
            reader.may.set()
            yield

    ended = ask(folder, observer=Publisher(), **OPTIONS)
    assert (ended.totals.pending, ended.totals.answered) == (0, 5)
    assert '"text":"K77"' in (tmp_path / "out.jsonl").read_text()


def test_what_is_not_read_yet_is_pending(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    ended = ask(folder, observer=Releaser(reader, rows=99, passes=1), max_rows=1, **OPTIONS)
    assert ended.reason == "--max-rows 1 reached"
    assert ended.totals.answered + ended.totals.num_failed + ended.totals.pending == 5
    assert not (tmp_path / "out.job" / "documents.jsonl").exists()


def test_what_ends_the_reading_ends_the_job_behind_the_rows_so_far(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    reader.fails = SettingError("no such reader")
    with pytest.raises(SettingError, match="no such reader"):
        ask(folder, observer=Releaser(reader, rows=2), **OPTIONS)
    reader.fails = None
    ask(folder, **OPTIONS)
    ask(folder, out="whole.jsonl", **OPTIONS)
    assert files(tmp_path, "out") == files(tmp_path, "whole")


def test_rows_longer_than_was_expected_are_planned_for_in_a_later_round(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "READ_FIRST", 1)
    folder = tmp_path / "in"
    folder.mkdir()
    # Few words in many bytes, and many words in few.
    (folder / "a.html").write_text(f"<html><!--{'-' * 9000}--><p>K1</p></html>")
    (folder / "b.html").write_text(f"<html><p>{'K2 filler. ' * 60}</p></html>")
    reader = Reader(monkeypatch, slow="b.html")
    observer = Releaser(reader, rows=1)
    ended = ask(folder, observer=observer, context=2000, workers=2)
    texts = (tmp_path / "out.jsonl").read_text()
    assert ('"text":"K1"' in texts, '"text":"K2"' in texts) == (True, True)
    assert [each.summary.rows.total for each in ended.rounds] == [1, 1]
    assert ended.report.new == 2


def test_a_slow_file_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FoundFile(f"{number}.txt", None, 1) for number in range(30)]
    for each in found:
        (tmp_path / each.path).write_text("x")
    reader, stop = Reader(monkeypatch, slow="0.txt"), threading.Event()
    seen = []
    for number, _ in read_as_completed(tmp_path, enumerate(found), ReadOptions(), None, 2, stop):
        seen.append(number)
        if len(seen) == 29:
            reader.may.set()
    assert seen[-1] == 0
    assert sorted(seen) == list(range(30))
    stop.set()
    assert list(read_as_completed(tmp_path, enumerate(found), ReadOptions(), None, 2, stop)) == []


class Gate:
    """Reads `first` files at once, and the others when it is opened."""

    def __init__(self, first: int, count: int) -> None:
        self.opened = threading.Event()
        self._first, self._count = first, count

    def read(self, stop: threading.Event) -> Iterator[tuple[int, Document]]:
        for number in range(self._count):
            assert number < self._first or self.opened.wait(20)
            yield number, Document(f"{number}.txt", f"{number:02}", "text", "text")


def ask_once(found: Document | UnreadDocument) -> tuple[Entry, list[AskedRow]]:
    return Entry(found.source, found.sha256), [AskedRow(found.sha256, "?", 1)]


@pytest.fixture
def rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rounds:
    monkeypatch.setattr(feed, "READ_FIRST", 2)
    monkeypatch.setattr(feed, "ROWS_AHEAD", 4)
    return Rounds(tmp_path / "rounds")


def reading_of(rounds: Rounds, tmp_path: Path, count: int) -> Reading:
    found = [FoundFile(f"{number}.txt", None, 1) for number in range(count)]
    return Reading(rounds, rounds.answers(), found, EntryLog(tmp_path, count))


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_files_are_read_as_rows_are_taken(rounds: Rounds, tmp_path: Path) -> None:
    reading, gate = reading_of(rounds, tmp_path, 20), Gate(3, 20)
    with reading.running(gate.read, ask_once):
        assert reading.next_round(lambda done, total: None) is not None
        reading.took(0)
        gate.opened.set()
        for taken in (0, 1, 7):
            reading.took(taken)
            wait_until(lambda taken=taken: reading.num_read == taken + 4)  # type: ignore[misc]
            time.sleep(0.02)
            assert (reading.num_read, reading.done) == (taken + 4, False)
        reading.took(19)
        wait_until(lambda: reading.done)
        assert reading.complete


def test_all_is_read_while_no_row_runs(rounds: Rounds, tmp_path: Path) -> None:
    reading, gate = reading_of(rounds, tmp_path, 20), Gate(3, 20)
    with reading.running(gate.read, ask_once):
        assert reading.next_round(lambda done, total: None) is not None
        reading.took(0)
        gate.opened.set()
        wait_until(lambda: reading.num_read == 4)
        with reading.paused():
            pass
        wait_until(lambda: reading.done)


def test_rows_of_an_earlier_run_are_not_in_the_way_of_reading_on(rounds: Rounds, tmp_path: Path) -> None:
    first = reading_of(rounds, tmp_path, 30)
    with first.running(Gate(30, 30).read, ask_once):
        assert first.next_round(lambda done, total: None, every=True) is not None
    second, gate = reading_of(rounds, tmp_path, 60), Gate(30, 60)
    with second.running(gate.read, ask_once):
        begun = second.next_round(lambda done, total: None)
        assert begun == rounds.first
        with second.paused():
            pass
        assert second.grown(wait=False) is None
        gate.opened.set()
        wait_until(lambda: second.num_read == 34)
        second.took(60)
        wait_until(lambda: second.done)
    assert len((begun.rows if begun else tmp_path).read_bytes().splitlines()) == 60


@pytest.mark.parametrize("passes", [5, 30])
def test_a_job_that_reads_little_ahead_ends_with_the_same_bytes(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    ask(folder, out="whole.jsonl", **OPTIONS)
    monkeypatch.setattr(feed, "ROWS_AHEAD", 1)
    ended = ask(folder, observer=Stopper(passes=passes), **OPTIONS)
    assert ended.reason == "stopped by a test"
    ask(folder, **OPTIONS)
    assert files(tmp_path, "out") == files(tmp_path, "whole")


def test_a_file_that_grows_is_the_same_after_a_kill(tmp_path: Path) -> None:
    path, index = tmp_path / "rows.jsonl", RowIndex()
    file = GrowingFile(path)
    assert list(file.ids()) == []
    file.note_in(index)
    file.append(AskedRow("a", "one", 1))
    file.append(AskedRow("b", "two\n", 1))
    whole = file.sync()
    file.close()
    path.write_bytes(path.read_bytes() + b'{"id":"c","pro')
    again = GrowingFile(path)
    assert list(again.ids()) == ["a", "b"]
    assert again.sync() == whole
    assert len(index) == 2
    offset, nbytes = index.span(1)
    assert path.read_bytes()[offset : offset + nbytes] == b'{"id":"b","prompt":"two\\n"}'
    again.close()


def test_what_all_files_come_to_follows_from_some_of_each_type() -> None:
    found = [FoundFile(f"{number}.txt", None, 100) for number in range(10)]
    found += [FoundFile(f"{number}.pdf", None, 1000) for number in range(4)]
    expected = Expected.of(found)
    expected.add(found[0], [AskedRow("a", "", 50)])
    expected.add(found[10], [AskedRow("b", "", 20), AskedRow("c", "", 30)])
    assert (expected.rows, expected.tokens) == (10 + 4 * 2, 10 * 50 + 4 * 50)
    assert (expected.longest, expected.longest_of(10_000), expected.longest_of(60)) == (50, 100, 60)
    workload = expected.workload(max_tokens=7, longest=100)
    assert (workload.sequences, workload.longest, workload.generated_tokens) == (18, 107, 126)
