"""Files of every type become text (`apps/documents/iterate.py`, `apps/documents/readers/`), and everything that can be
wrong with one is the error of that file alone.
"""

import io
import os
import stat
import subprocess
import sys
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from moedge.apps.documents.document import Document, UnreadDocument
from moedge.apps.documents.iterate import find_files, iter_documents
from moedge.apps.documents.reader_process import ReaderProcess, ReadLimits, ReadOptions
from moedge.apps.documents.readers import content
from moedge.apps.documents.unpacking import Unpacked
from moedge.runtime.settings.errors import BadArgument, InputUnreadable, SettingError
from moedge.runtime.text.template import Child
from support import document_folder
from support.document_folder import BAD, GOOD, INSIDE, SKIPPED, pdf

# Options of tests that expect faults: what takes long here must not take a minute.
QUICK = ReadOptions(limits=ReadLimits(memory_nbytes=256 << 20, seconds=30.0))
OWN_READER = """
import os, time
def read(data, name):
    if name == "loop.own": time.sleep(1000)
    if name == "crash.own": os.abort()
    if name == "bomb.own": return [b"x" * (1 << 34)]
    if name == "flood.own": return "x" * (1 << 21)
    if name == "call.own":
        import socket
        socket.create_connection(("127.0.0.1", 9))
    if name == "write.own":
        with open("written", "w") as file: file.write("x")
    if name == "raise.own": raise KeyError("broken")
    if name == "number.own": return 7
    if name.endswith(".own"): return [name, "page two"]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("documents")
    (root / "in").mkdir()
    document_folder.make(root / "in", root / "outside")
    return root / "in"


@pytest.fixture(scope="module")
def read(folder: Path) -> dict[str, Document | UnreadDocument]:
    found = list(iter_documents(folder, options=QUICK, workers=1))
    sources = [each.source for each in found if each.source not in INSIDE]
    assert sources == sorted(sources, key=_parts)
    return {each.source: each for each in found}


def _parts(source: str) -> list[bytes]:
    return [os.fsencode(part) for part in source.split("/")]


def test_i14_every_file_is_accounted_for_exactly_once(folder: Path, read: dict[str, object], tmp_path: Path) -> None:
    with closing(Unpacked(folder, tmp_path, QUICK)) as unpacked:
        found = list(find_files(folder, unpacked=unpacked))
    assert len({each.path for each in found}) == len(found)
    assert {each.path: each.skipped for each in found if each.skipped} == SKIPPED
    assert {each.name for each in found if not each.skipped} == set(read) == {*GOOD, *BAD}


@pytest.mark.parametrize("name", GOOD, ids=ascii)
def test_a_file_becomes_text(read: dict[str, Document | UnreadDocument], name: str) -> None:
    found, (_, kind, piece) = read[name], GOOD[name]
    assert isinstance(found, Document)
    assert found.type == kind
    assert piece in found.text


@pytest.mark.parametrize("name", BAD)
def test_i13_a_file_without_text_says_why(read: dict[str, Document | UnreadDocument], name: str) -> None:
    found = read[name]
    assert isinstance(found, UnreadDocument)
    assert (found.code, len(found.message) > 10) == (BAD[name][1], True)


def test_pages_are_kept(read: dict[str, Document | UnreadDocument]) -> None:
    report, deck, notes = read["report.pdf"], read["deck.pptx"], read["notes.md"]
    assert isinstance(report, Document)
    assert isinstance(deck, Document)
    assert isinstance(notes, Document)
    assert (report.num_pages, deck.num_pages, notes.num_pages) == (2, 2, None)
    start = report.text.index("Second")
    assert report.pages(start, start + 6) == (2, 2)
    assert report.pages(0, len(report.text)) == (1, 2)
    assert notes.front_matter == {"title": "Notes", "date": "2024-05-01"}
    assert "evil" not in GOOD["page.html"][0].decode().split("<body>")[1]
    page, mail = read["page.html"], read["offer.eml"]
    assert isinstance(page, Document)
    assert isinstance(mail, Document)
    assert "evil" not in page.text
    assert page.front_matter == {"title": "Page"}
    assert (mail.front_matter["from"], mail.front_matter["attachments"]) == ("Jörg <j@example.org>", ["offer.pdf"])


def test_globs_choose_files(folder: Path) -> None:
    def chosen(**globs: list[str]) -> set[str]:
        return {each.path for each in find_files(folder, **globs) if not each.skipped}

    assert chosen(include=["*.md", "sub/*"]) == {"notes.md", "of_pdfs.md", "sub/deeper/inner.txt"}
    assert chosen(include=["*.pdf"], exclude=["*cut*", "l*", "scan*"]) == {
        "report.pdf",
        "really_text.pdf",
        "from_printer.pdf",
    }
    with pytest.raises(InputUnreadable, match="absent does not exist"):
        list(find_files(folder / "absent"))


def test_what_jobs_wrote_beside_documents_is_none_of_them(tmp_path: Path) -> None:
    """The folder of a job says which files are its own: those of its name with a suffix that outputs have."""
    outputs = ("old.csv", "old.errors.jsonl", "old.partial.jsonl", "more.v2.xlsx")
    for name in (*outputs, "old.txt", "other.csv", "old.v2.csv", "more.csv"):
        (tmp_path / name).write_text("text")
    for name in ("old.job", "more.v2.job"):
        (tmp_path / name).mkdir()
    found = {each.path: each.skipped for each in find_files(tmp_path)}
    assert {name for name, why in found.items() if why == "of a job"} == {*outputs, "old.job", "more.v2.job"}
    assert {name for name, why in found.items() if why is None} == {"old.txt", "other.csv", "old.v2.csv", "more.csv"}


@pytest.mark.slow
def test_faults_of_a_reader_are_errors_of_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_reader.py").write_text(OWN_READER)
    names = ["bomb", "call", "crash", "flood", "loop", "number", "raise", "write", "zzz"]
    for name in names:
        (tmp_path / f"{name}.own").write_text("content")
    (tmp_path / "zzz.txt").write_text("read by another")
    monkeypatch.chdir(tmp_path)
    limits = ReadLimits(memory_nbytes=512 << 20, seconds=4.0, text_nbytes=1 << 20, file_nbytes=1000)
    options = ReadOptions("own_reader:read", limits=limits)
    (tmp_path / "huge.own").write_bytes(bytes(1001))
    found = list(iter_documents(tmp_path, include=["*.own", "*.txt"], options=options, workers=1))
    outcome = {each.source.split(".")[0]: str(each.code) for each in found if isinstance(each, UnreadDocument)}
    assert outcome == {
        "bomb": "document_memory_limit", "call": "document_unreadable", "crash": "document_crashed",
        "flood": "document_too_large", "huge": "document_too_large", "loop": "document_time_limit",
        "number": "document_unreadable", "raise": "document_unreadable", "write": "document_unreadable",
    }  # fmt: skip
    read = {each.source: each for each in found if isinstance(each, Document)}
    assert read["zzz.own"].text == "zzz.own\n\npage two"
    assert (read["zzz.own"].num_pages, read["zzz.txt"].text) == (2, "read by another")
    with pytest.raises(BadArgument, match="--reader nowhere:read"):
        list(iter_documents(tmp_path, options=ReadOptions("nowhere:read"), workers=1))


@pytest.mark.parametrize("now", [b"test", b"te"], ids=["other", "shorter"])
def test_a_file_that_changes_while_it_is_read_is_an_error(now: bytes) -> None:
    process, digest = ReaderProcess(ReadOptions(languages=None)), sha256(b"text").hexdigest()
    try:
        with pytest.raises(content.ReadFailure) as caught:
            process.read(io.BytesIO(now), 4, "a.txt", digest)
        assert caught.value.code is content.ReadCode.CHANGED
        assert process.read(io.BytesIO(b"text"), 4, "a.txt", digest).pages == ("text",)
    finally:
        process.close()


@pytest.mark.slow
def test_processes_are_replaced_after_their_share_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pid_reader.py").write_text("import os\ndef read(data, name): return str(os.getpid())\n")
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moedge.apps.documents.reader_process.FILES_PER_PROCESS", 2)
    found = list(iter_documents(tmp_path, include=["*.txt"], options=ReadOptions("pid_reader:read"), workers=1))
    pids = [each.text for each in found if isinstance(each, Document)]
    assert [pids[0] == pids[1], pids[1] == pids[2], pids[2] == pids[3]] == [True, False, True]
    assert str(os.getpid()) not in pids


def test_what_was_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, cache = tmp_path / "in", tmp_path / "cache"
    files.mkdir()
    (files / "a.txt").write_text("some text")
    (files / "b.pdf").write_bytes(BAD["locked.pdf"][0])
    first = list(iter_documents(files, cache=cache, workers=1))

    def never(*_: object) -> None:
        raise AssertionError("a file is read again")

    monkeypatch.setattr(ReaderProcess, "read", never)
    (files / "a.txt").rename(files / "c.txt")
    again = list(iter_documents(files, cache=cache, workers=1))
    assert [each.source for each in again] == ["b.pdf", "c.txt"]
    assert isinstance(again[1], Document)
    assert isinstance(first[0], Document)
    assert (again[1].text, again[1].sha256) == (first[0].text, first[0].sha256)
    for entry in cache.rglob("*.json"):
        entry.write_bytes(entry.read_bytes()[:-3])
    with pytest.raises(AssertionError, match="read again"):
        list(iter_documents(files, cache=cache, workers=1))


def test_scans_are_read_by_tesseract_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "tesseract"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\nprint(sys.stdin.buffer.read(15).split()[0], sys.argv[4])\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    files = tmp_path / "in"
    files.mkdir()
    (files / "scan.pdf").write_bytes(pdf(["", "typed", ""]))
    options = ReadOptions(languages="deu")
    (found,) = iter_documents(files, options=options, workers=1)
    assert isinstance(found, Document)
    assert found.text.split() == ["b'P5'", "deu", "typed", "b'P5'", "deu"]
    assert found.pages(found.text.index("typed"), found.text.index("typed") + 5) == (2, 2)
    assert found.notes == ("2 of 3 pages read by Tesseract",)
    (found,) = iter_documents(files, options=ReadOptions(languages=None), workers=1)
    assert found.notes == ("2 of 3 pages have no text (pages 1, 3)",) if isinstance(found, Document) else False


def test_i13_archives_are_refused_by_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MAX_ENTRIES", 1)
    with pytest.raises(content.ReadFailure, match="the archive has 5 entries"):
        content.open_zip(GOOD["letter.docx"][0])


def test_readers_start_no_threads_of_openblas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with many cores their buffers are beyond the limit on memory, where tables make numpy load."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")
    monkeypatch.chdir(tmp_path)
    source = "import os\n\ndef read(data, name):\n    return os.environ['OPENBLAS_NUM_THREADS']\n"
    (tmp_path / "threads_reader.py").write_text(source)
    (tmp_path / "a.txt").write_text("x")
    options = ReadOptions("threads_reader:read")
    (found,) = iter_documents(tmp_path, include=["a.txt"], options=options, workers=1)
    assert isinstance(found, Document)
    assert found.text == "1"


def _late_starts(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The first `count` starts of a process take too long."""
    start, late = ReaderProcess._start, iter(range(count))

    def started(process: ReaderProcess) -> Child:
        if next(late, None) is not None:
            raise TimeoutError
        return start(process)

    monkeypatch.setattr(ReaderProcess, "_start", started)


def test_a_process_that_starts_too_late_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _late_starts(monkeypatch, 1)
    (tmp_path / "a.txt").write_text("x")
    (found,) = iter_documents(tmp_path, workers=1)
    assert isinstance(found, Document)
    assert found.text == "x"


def test_processes_that_never_start_are_an_error_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _late_starts(monkeypatch, 2)
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(SettingError, match="did not start, tried twice"):
        list(iter_documents(tmp_path, workers=1))


def test_reading_loads_no_torch() -> None:
    code = (
        "import sys, moedge.apps.documents.iterate, moedge.apps.documents.readers.worker\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
