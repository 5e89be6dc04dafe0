"""What a job learns before it starts. Cases I1, I9 and I12 of the failure table."""

import gzip
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.runtime.rows import preflight as preflight_file
from moedge.runtime.rows.preflight import preflight
from moedge.runtime.rows.reader import read_rows
from moedge.runtime.rows.row import Defaults, RowFailure

GOOD = b'{"prompt":"a"}'
BODY = b'{"messages":[{"role":"user","content":"a"}]}'
CHAT = b'{"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":' + BODY + b"}"
UNSUPPORTED = b'{"prompt":"a","echo":true}'
MALFORMED = b'{"prompt":'


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(*lines: bytes) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_bytes(b"\n".join(lines))
        return path

    return make


def test_rows_are_counted_by_kind_and_by_what_is_wrong_with_them(write: Callable[..., Path]) -> None:
    path = write(GOOD, CHAT, b"", UNSUPPORTED, MALFORMED, CHAT)
    report = preflight(path, Defaults())
    assert report.rows == {"short": 1, "chat": 1}
    assert report.num_rows == 5
    assert [problems.total for problems in (report.file_problems, report.line_problems, report.row_problems)] == [
        0,
        2,
        1,
    ]
    assert report.num_rows == len(list(read_rows(path, Defaults())))


def test_i1_a_malformed_line_refuses_a_strict_job_and_names_its_line(write: Callable[..., Path]) -> None:
    report = preflight(write(GOOD, b"", MALFORMED), Defaults())
    assert report.refused()
    assert not report.refused(lenient=True)
    assert "line 3: invalid_json_line: " in report.report()
    assert "--lenient" in report.report()
    assert "--lenient" not in report.report(lenient=True)


def test_i9_a_duplicate_id_refuses_a_strict_job(write: Callable[..., Path]) -> None:
    report = preflight(write(CHAT, CHAT), Defaults())
    assert report.refused()
    assert [error.code for error in report.line_problems.first] == ["duplicate_id"]


def test_a_row_that_cannot_be_run_refuses_nothing(write: Callable[..., Path]) -> None:
    report = preflight(write(GOOD, UNSUPPORTED), Defaults())
    assert not report.refused()
    assert "line 2: unsupported_parameter: echo " in report.report()


@pytest.mark.parametrize("data", [b"", b"\n\r\n \t\n", "{}".encode("utf-16")])
def test_a_file_without_rows_is_refused_however_lenient(write: Callable[..., Path], data: bytes) -> None:
    report = preflight(write(data), Defaults())
    assert report.refused(lenient=True)
    first, *more = report.report().splitlines()
    assert first.endswith("contains no rows") if not more else more[0].startswith("file: ")
    assert bool(more) is (b"{" in data), "an empty file is said in a sentence"


def test_the_first_problems_are_listed_and_the_others_counted(write: Callable[..., Path]) -> None:
    report = preflight(write(*[UNSUPPORTED] * 30, *[MALFORMED] * 25), Defaults())
    listed = report.report().splitlines()
    assert listed[0].endswith(": 55 rows: 0 valid, 55 invalid")
    assert len(listed) == 1 + 20 + 20 + 1 + 1
    assert [line.split(": ")[0] for line in listed[1:41]] == [f"line {row}" for row in (*range(1, 21), *range(31, 51))]
    assert all(line.endswith("(this row only)") for line in listed[1:21])
    assert all(line.endswith("(stops the job)") for line in listed[21:41])
    assert listed[41] == "... and 15 more"


@pytest.mark.parametrize(
    "data", [GOOD, gzip.compress(GOOD * 100_000, mtime=0), gzip.compress(GOOD * 100, mtime=0)[:50], b"\xff\xfe" * 9999]
)
def test_i12_the_fingerprint_is_of_the_whole_file_as_stored(write: Callable[..., Path], data: bytes) -> None:
    path = write(data)
    found = preflight(path, Defaults()).fingerprint
    assert (found.nbytes, found.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert found.mtime_ns == path.stat().st_mtime_ns


@pytest.mark.parametrize("change", ["append", "edit", "replace", "touch"])
def test_i12_a_changed_file_is_told_from_a_touched_one(write: Callable[..., Path], change: str) -> None:
    path = write(GOOD, GOOD)
    before = preflight(path, Defaults()).fingerprint
    os.utime(path, ns=(before.mtime_ns + 1, before.mtime_ns + 1))
    if change == "append":
        path.write_bytes(path.read_bytes() + b"\n" + GOOD)
    elif change == "edit":
        path.write_bytes(path.read_bytes().replace(b"a", b"b"))
        os.utime(path, ns=(before.mtime_ns, before.mtime_ns))
    elif change == "replace":
        path.unlink()
        path.write_bytes(GOOD)
    after = preflight(path, Defaults()).fingerprint
    assert after != before
    assert after.same_content(before) is (change == "touch")


def test_i12_a_file_that_grows_while_it_is_read_is_refused(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(GOOD, GOOD)

    def growing(*args: Any, **keywords: Any) -> Any:
        yield from rows_from(*args, **keywords)
        path.write_bytes(path.read_bytes() + b"\n" + GOOD)

    rows_from = preflight_file.rows_from
    assert not preflight(path, Defaults()).refused()
    monkeypatch.setattr(preflight_file, "rows_from", growing)
    report = preflight(path, Defaults())
    assert report.refused(lenient=True)
    assert "input_changed" in report.report()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_a_few_hundred_bytes_per_row_whatever_the_rows_hold(tmp_path: Path) -> None:
    """In a process of its own, because a peak never goes down again."""
    num_rows = 20_000
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for i in range(num_rows):
            file.write(f'{{"id":"{i:0200d}","prompt":"{i:0500d}"}}\n')
    code = (
        "import sys; from moedge.runtime.rows.preflight import *\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) * 1024\n"
        "before = peak(); report = preflight(sys.argv[1], Defaults())\n"
        "print(report.num_rows, report.refused(), peak() - before)"
    )
    found = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True, text=True)
    counted, refused, nbytes = found.stdout.split()
    assert (counted, refused) == (str(num_rows), "False")
    assert 16 * num_rows < int(nbytes) < 250 * num_rows


def test_lenient_rows_are_the_preflights_rows_and_later_duplicates_are_the_errors(write: Callable[..., Path]) -> None:
    rows = list(read_rows(write(CHAT, MALFORMED, CHAT), Defaults()))
    assert [isinstance(row, RowFailure) for row in rows] == [False, True, True]
    assert [row.index for row in rows] == [0, 1, 2]
