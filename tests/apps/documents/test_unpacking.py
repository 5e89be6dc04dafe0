"""What lies in archives and mails is unpacked once, is chosen by the same globs, and can neither lead out of the folder
nor fill the disk (`apps/documents/unpacking.py`)."""

import errno
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from moedge.apps.documents import unpacking
from moedge.apps.documents.iterate import find_files, iter_documents
from moedge.apps.documents.reader_process import ReaderProcess, ReadOptions
from moedge.apps.documents.unpacking import Unpacked
from support.document_folder import mail_with, zipped


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def unpacked(folder: Path, tmp_path: Path) -> Iterator[Unpacked]:
    with closing(Unpacked(folder, tmp_path / "spool", ReadOptions())) as found:
        yield found


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The containers that a process was asked to unpack."""
    names, stock = [], ReaderProcess.members

    def members(self: ReaderProcess, file: BinaryIO, nbytes: int, name: str, digest: str) -> Any:
        names.append(name)
        return stock(self, file, nbytes, name, digest)

    monkeypatch.setattr(ReaderProcess, "members", members)
    return names


def paths(unpacked: Unpacked, name: str) -> list[str]:
    return [each.path for each in unpacked.members(name)]


def test_a_container_is_unpacked_again_when_it_changed_or_a_file_is_torn(
    folder: Path, unpacked: Unpacked, count: list[str], tmp_path: Path
) -> None:
    (folder / "a.zip").write_bytes(zipped({"x.txt": "long enough", "m.eml": mail_with("M", "text", y_txt=b"y")}))
    every = ["a.zip/x.txt", "a.zip/m.eml", "a.zip/m.eml/y.txt"]
    assert paths(unpacked, "a.zip") == every
    assert paths(unpacked, "a.zip") == every
    assert count == ["a.zip", "a.zip/m.eml"]
    torn = next(each for each in (tmp_path / "spool").iterdir() if each.read_bytes() == b"long enough")
    torn.write_bytes(b"")
    assert paths(unpacked, "a.zip") == every
    assert (torn.read_bytes(), len(count)) == (b"long enough", 4)
    (folder / "a.zip").write_bytes(zipped({"z.txt": "new"}))
    assert paths(unpacked, "a.zip") == ["a.zip/z.txt"]


def test_globs_choose_what_lies_in_a_container(folder: Path, unpacked: Unpacked) -> None:
    (folder / "a.zip").write_bytes(
        zipped({"x.txt": "x", "sub/y.pdf": "y", "sub/m.eml": mail_with("M", "t", z_txt=b"z")})
    )
    (folder / "b.txt").write_text("b")

    def chosen(**globs: list[str]) -> set[str]:
        return {each.path for each in find_files(folder, unpacked=unpacked, **globs) if not each.skipped}

    mail = {"a.zip/sub/m.eml", "a.zip/sub/m.eml/z.txt"}
    assert chosen() == {"a.zip/x.txt", "a.zip/sub/y.pdf", "b.txt", *mail}
    assert chosen(include=["*.txt"]) == {"a.zip/x.txt", "a.zip/sub/m.eml/z.txt", "b.txt"}
    assert chosen(include=["*.eml"]) == mail
    assert chosen(include=["a.zip"], exclude=["sub/*", "*.eml"]) == {"a.zip/x.txt", "a.zip/sub/y.pdf"}
    assert chosen(exclude=["*.zip"]) == {"b.txt"}
    skipped = {each.path: each.skipped for each in find_files(folder, include=["b.*"], unpacked=unpacked)}
    assert skipped["a.zip/x.txt"] == "not included"


@pytest.mark.parametrize("name", ["../../up.txt", "/etc/up.txt", "..\\..\\up.txt", "a/../../\x1b[2Jup.txt", "."])
def test_a_name_leads_nowhere_else(folder: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that a reader sends which was taken over."""

    def members(*_: object) -> Generator[tuple[str, bytes], None, None]:
        yield name, b"content"

    monkeypatch.setattr(ReaderProcess, "members", members)
    (folder / "a.zip").write_bytes(b"PK")
    before = {each for each in tmp_path.rglob("*") if "spool" not in each.parts}
    with closing(Unpacked(folder, tmp_path / "spool", ReadOptions())) as unpacked:
        (found,) = unpacked.members("a.zip")
    assert found.path.isprintable()
    assert ".." not in found.path.split("/")
    assert {each for each in tmp_path.rglob("*") if "spool" not in each.parts} == before
    assert all(each.parent == tmp_path / "spool" for each in (tmp_path / "spool").rglob("*"))


def test_what_lies_in_one_file_is_bounded(folder: Path, unpacked: Unpacked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 3)
    inner = zipped({f"{number}.txt": "text" for number in range(3)})
    (folder / "a.zip").write_bytes(zipped({"inner.zip": inner, "b.txt": "b"}))
    # What is too much is a document that says so, and what was unpacked before stays.
    assert paths(unpacked, "a.zip") == ["a.zip/inner.zip", "a.zip/inner.zip/0.txt", "a.zip/b.txt"]
    monkeypatch.setattr(unpacking, "MAX_MEMBERS", 100)
    monkeypatch.setattr(unpacking, "MAX_NBYTES", 5)
    (folder / "b.zip").write_bytes(zipped({"1.txt": "12345", "2.txt": "6"}))
    assert paths(unpacked, "b.zip") == ["b.zip", "b.zip/1.txt"]


def test_a_full_disk_is_no_fault_of_the_file(folder: Path, unpacked: Unpacked, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.zip").write_bytes(zipped({"x.txt": "x"}))

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            unpacked.members("a.zip")
    assert paths(unpacked, "a.zip") == ["a.zip/x.txt"]


def test_attachments_of_a_mail_that_could_not_be_opened_are_an_error(
    folder: Path, unpacked: Unpacked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mail itself may be read a moment later, and nobody would know what is missing."""
    (folder / "a.eml").write_bytes(b"Subject: a\n\ntext")
    (folder / "a.zip").write_bytes(zipped({"x.txt": "x"}))

    def fails(path: Path) -> BinaryIO:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(unpacking, "opened", fails)
        assert paths(unpacked, "a.eml") == ["a.eml", "a.eml/attachments"]
        assert paths(unpacked, "a.zip") == ["a.zip"], "an archive says so itself"
    with pytest.raises(FileNotFoundError):
        unpacking.opened_document(folder, "a.eml/attachments", folder.parent / "spool")
    assert paths(unpacked, "a.eml") == ["a.eml"]


def test_a_member_that_is_gone_is_an_error_of_it_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.zip").write_bytes(zipped({"x.txt": "x", "y.txt": "y"}))
    stock = unpacking.opened

    def opened(path: Path) -> BinaryIO:
        if path.parent != folder and path.read_bytes() == b"x":
            path.unlink()
        return stock(path)

    monkeypatch.setattr(unpacking, "opened", opened)
    gone, there = iter_documents(folder, workers=1)
    assert (gone.source, getattr(gone, "code", None)) == ("a.zip/x.txt", "document_unreadable")
    assert getattr(there, "text", None) == "y"
