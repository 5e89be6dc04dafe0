"""A job over documents reads its folder, then runs rows: what stops it on the way costs no answer, and no byte."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from moedge.apps.documents.expected import AskedRow, Expected
from moedge.apps.documents.iterate import FoundFile, read_as_completed
from moedge.apps.documents.reader_process import ReadOptions
from moedge.apps.documents.readers.content import Content
from moedge.apps.documents.readers.read import read
from moedge.apps.documents.run import DocumentsEnded
from moedge.runtime.settings.errors import SettingError
from support.jobs.documents_oracle import Stopper

Ask = Callable[..., DocumentsEnded]
LONG = "".join(f"K{number}. Filler words.\n" for number in range(40))
OPTIONS = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300, "workers": 2}


class Reader:
    """Reads `slow` only once it may, or fails there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow: str = "a0.txt") -> None:
        self.may = threading.Event()
        self.slow = slow
        self.fails: BaseException | None = None
        # The fixture puts its own reader there when a job starts.
        monkeypatch.setattr("moedge.apps.documents.iterate.ReaderProcess", lambda options: self)

    def read(self, file: BinaryIO, nbytes: int, name: str, digest: str) -> Content:
        if name == self.slow:
            if self.fails is not None:
                raise self.fails
            assert self.may.wait(20)
        return read(file.read(nbytes), name, None, None, lambda page: None)

    def close(self) -> None:
        self.may.set()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    texts = {"a0": LONG, "b1": "K1.", "c2": LONG.replace("K", "K9"), "d3": "K3. " * 30, "e4": ""}
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def files(tmp_path: Path, out: str) -> list[bytes]:
    return [(tmp_path / f"{out}{suffix}").read_bytes() for suffix in (".jsonl", ".errors.jsonl")]


@pytest.mark.sample("1-None", "12-RuntimeError", "60-None")
@pytest.mark.parametrize("error", [None, RuntimeError])
@pytest.mark.parametrize("passes", [1, 12, 60])
def test_a_job_that_was_stopped_ends_with_the_same_bytes_and_asks_no_row_twice(
    ask: Ask, tmp_path: Path, folder: Path, passes: int, error: type[BaseException] | None
) -> None:
    whole = ask(folder, out="whole.jsonl", **OPTIONS)
    try:
        ended = ask(folder, observer=Stopper(passes=passes, error=error), **OPTIONS)
        assert ended.reason == "stopped by a test"
        assert (tmp_path / "out.partial.jsonl").exists()
    except RuntimeError:
        assert error is not None
    (begun,) = (tmp_path / "out.job" / "rounds").glob("*/0001.jsonl")
    before = begun.read_bytes()
    (folder / "f5.txt").write_text("K77.")
    ask(folder, out="whole.jsonl", **OPTIONS)
    ask(folder, **OPTIONS)
    assert files(tmp_path, "out") == files(tmp_path, "whole")
    assert begun.read_bytes() == before
    asked = [line for path in begun.parent.glob("????.jsonl") for line in path.read_text().splitlines()]
    assert len(asked) == len(set(asked)) == sum(each.summary.rows.total for each in whole.rounds) + 1


def test_what_ends_the_reading_ends_the_job_before_a_row_runs_and_the_next_run_reads_on(
    ask: Ask, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Reader(monkeypatch)
    reader.fails = SettingError("no such reader")
    with pytest.raises(SettingError, match="no such reader"):
        ask(folder, **OPTIONS)
    assert not list((tmp_path / "out.job" / "rounds").glob("*/*.jsonl"))
    assert not (tmp_path / "out.job" / "documents.jsonl").exists()
    reader.fails = None
    reader.may.set()
    ask(folder, **OPTIONS)
    ask(folder, out="whole.jsonl", **OPTIONS)
    assert files(tmp_path, "out") == files(tmp_path, "whole")


def test_what_has_no_answer_yet_is_pending(ask: Ask, tmp_path: Path, folder: Path) -> None:
    ended = ask(folder, max_rows=1, **OPTIONS)
    assert ended.reason == "--max-rows 1 reached"
    assert ended.totals.answered + ended.totals.num_failed + ended.totals.pending == 5
    assert ended.report.new == 5


def test_a_slow_file_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FoundFile(f"{number}.txt", None, 1) for number in range(30)]
    for each in found:
        (tmp_path / each.path).write_text("x")
    reader, stop = Reader(monkeypatch, slow="0.txt"), threading.Event()
    seen = []
    for number, _ in read_as_completed(tmp_path, tmp_path, enumerate(found), ReadOptions(), None, 2, stop):
        seen.append(number)
        if len(seen) == 29:
            reader.may.set()
    assert seen[-1] == 0
    assert sorted(seen) == list(range(30))
    stop.set()
    assert list(read_as_completed(tmp_path, tmp_path, enumerate(found), ReadOptions(), None, 2, stop)) == []


def test_what_all_files_come_to_follows_from_some_of_each_type() -> None:
    found = [FoundFile(f"{number}.txt", None, 100) for number in range(10)]
    found += [FoundFile(f"{number}.pdf", None, 1000) for number in range(4)]
    expected = Expected.of(found)
    expected.add(found[0], [AskedRow("a", "", 50)])
    expected.add(found[10], [AskedRow("b", "", 20), AskedRow("c", "", 30)])
    assert (expected.rows, expected.tokens) == (10 + 4 * 2, 10 * 50 + 4 * 50)
