"""What a job over documents holds in memory for each file (`apps/documents/iterate.py`, `apps/documents/rounds.py`): a
few dozen bytes, and the rest stays on disk.
"""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.apps.documents.iterate import FoundFile, FoundFiles
from moedge.apps.documents.rounds import Entry, IndexedEntries, LineOffsets, RowAnswers

COUNT = 3000
NAMES = ["a", "b/c.txt", "b/two\nlines", "caf\u00e9", "\udcff\udc80.bin", "", "z" * 300]


def nbytes_of(make: Callable[[], object]) -> float:
    """Bytes that stay for each of COUNT things."""
    tracemalloc.start()
    try:
        made = make()
        found, _ = tracemalloc.get_traced_memory()
        assert made
        return found / COUNT
    finally:
        tracemalloc.stop()


def files(names: list[str]) -> FoundFiles:
    found = FoundFiles()
    for nbytes, name in enumerate(names):
        found.append(FoundFile(name, None, nbytes))
    return found


def test_packed_files_are_those_that_were_found() -> None:
    found, plain = files(NAMES), [FoundFile(name, None, nbytes) for nbytes, name in enumerate(NAMES)]
    assert list(found) == plain
    assert found[-2:] == plain[-2:]
    assert [found[-each] for each in range(1, len(plain) + 1)] == plain[::-1]
    assert found.index(plain[3]) == 3
    with pytest.raises(IndexError):
        found[len(plain)]


def test_a_file_takes_little_more_than_its_path() -> None:
    names = [f"folder/{number:06}.txt" for number in range(COUNT)]
    assert nbytes_of(lambda: files(names)) < len(names[0]) + 24


def test_an_answer_takes_no_memory_of_its_own(tmp_path: Path) -> None:
    ids, path = [f"{'0' * 20}.0.{number}" for number in range(COUNT)], tmp_path / "answers.jsonl"
    path.write_text("".join(f'{{"id":"{each}","text":"an answer"}}\n' for each in ids))
    assert nbytes_of(lambda: RowAnswers([path])) < 64
    found = RowAnswers([path, tmp_path / "missing"])
    assert all(each in found for each in ids)
    assert found[ids[-1]].text == "an answer"
    assert f"{'0' * 20}.1.0" not in found
    with pytest.raises(KeyError):
        found["no such row"]


def test_entries_are_found_by_their_documents_in_the_file_that_was(tmp_path: Path) -> None:
    path = tmp_path / "index.jsonl"
    path.write_bytes(b"".join(Entry(name, f"hash of {name}").dumped() + b"\n" for name in NAMES[:4]))
    found = IndexedEntries(path)
    other = tmp_path / "new.jsonl"
    other.write_bytes(Entry("a", "another hash").dumped() + b"\n")
    other.replace(path)
    assert [found.sha256(name) for name in (*NAMES[:4], "d")] == [*(f"hash of {name}" for name in NAMES[:4]), None]
    assert len(found) == 4
    found.close()
    none = IndexedEntries(tmp_path / "missing")
    assert (len(none), none.sha256("a")) == (0, None)


def test_of_two_lines_with_one_name_the_later_one_is_found(tmp_path: Path) -> None:
    first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
    first.write_text("".join(json.dumps({"id": str(number), "text": f"old {number}"}) + "\n" for number in range(100)))
    second.write_text(json.dumps({"id": "7", "text": "new"}) + "\n")
    answers = RowAnswers([first, second])
    assert [answers[each].text for each in ("6", "7", "8")] == ["old 6", "new", "old 8"]
    assert "100" not in answers


def test_names_that_are_no_text_and_lines_far_into_late_files_are_found() -> None:
    names = [*NAMES, *map(str, range(2000))]
    found = LineOffsets((name, (number << 48) + (1 << 40)) for number, name in enumerate(names))
    assert [found.find(name) for name in names] == [(number << 48) + (1 << 40) for number in range(len(names))]
    assert (len(found), found.find("none")) == (len(names), None)
