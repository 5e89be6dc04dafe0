"""Beside the rows of a job over documents: Markdown files (`apps/documents/table.py`), lists merged by a key
(`apps/documents/merging.py`), an estimate of the folder (`apps/documents/expected.py`).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.documents import table
from moedge.apps.documents.expected import AskedRow, Expected
from moedge.apps.documents.iterate import FoundFile
from moedge.apps.documents.merging import Merged, Merger, Missing
from moedge.apps.documents.question import Prompts, make_question
from moedge.apps.documents.rounds import Answer, Entry
from moedge.apps.documents.run import DocumentsEnded, documents_request
from moedge.apps.documents.schemas import KeyedLists
from moedge.apps.documents.table import Mirror
from moedge.runtime.jobs.summary import summarise_rows
from moedge.runtime.settings.errors import BadArgument, OutputExists
from support.jobs import fake_engine

Ask = Callable[..., DocumentsEnded]
PEOPLE = {"type": "array", "x-key": "name", "items": {"type": "object"}}
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "people": {"anyOf": [PEOPLE, {"type": "null"}]}},
}


def test_answers_are_mirrored_as_markdown_in_the_same_tree(ask: Ask, tmp_path: Path) -> None:
    folder, mirror = tmp_path / "in", tmp_path / "notes"
    (folder / "deep").mkdir(parents=True)
    for name, text in {"a": "K1.", "deep/b\nc": "K2.", "empty": ""}.items():
        (folder / f"{name}.txt").write_text(text)
    ask(folder, mirror=mirror)
    assert {str(path.relative_to(mirror)) for path in mirror.rglob("*.*")} == {"a.txt.md", "deep/b\nc.txt.md"}
    text = (mirror / "a.txt.md").read_text()
    assert text.startswith('---\nsource: "a.txt"\nsha256: "')
    assert text.endswith("---\n\nK1\n")
    (folder / "a.txt").unlink()
    (mirror / "mine.md").write_text("mine")
    ask(folder, mirror=mirror)
    assert {path.name for path in mirror.rglob("*.*")} == {"mine.md", "b\nc.txt.md"}


def test_a_mirror_replaces_no_file_of_somebody_else(ask: Ask, tmp_path: Path) -> None:
    folder, mirror = tmp_path / "in", tmp_path / "notes"
    folder.mkdir()
    mirror.mkdir()
    (folder / "a.txt").write_text("K1.")
    (mirror / "a.txt.md").write_text("mine")
    with pytest.raises(OutputExists, match="is not what this job wrote"):
        ask(folder, mirror=mirror)
    assert (mirror / "a.txt.md").read_text() == "mine"
    for inside in (folder / "notes", tmp_path, folder):
        with pytest.raises(BadArgument, match="must lie beside each other"):
            documents_request("fake", folder, tmp_path / "o.jsonl", {"prompt": "?", "mirror": inside})


def test_chunks_and_fields_of_a_document_are_in_one_file_of_a_mirror(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "notes", tmp_path / "written.json")
    for chunk in (1, 2):
        mirror.add({"id": f"x.pdf#{chunk}", "source": "x.pdf", "text": f"part {chunk}", "chunk": chunk})
    mirror.add({"id": "y", "source": "y" * 300, "text": "{}", "answer": {"title": "A\nB", "sum": 3}})
    mirror.add({"id": "z", "source": "z", "error": {"code": "document_empty"}})
    mirror.finish()
    assert "## x.pdf#1\n\npart 1\n\n## x.pdf#2\n\npart 2\n" in (tmp_path / "notes" / "x.pdf.md").read_text()
    (long,) = (tmp_path / "notes").glob("y*.md")
    assert long.read_text().endswith("- **title**: A B\n- **sum**: 3\n")
    assert len(json.loads((tmp_path / "written.json").read_text())) == 2


def test_files_of_a_mirror_are_listed_once_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, listed = table.write_atomically, list[int]()

    def note(path: Path, data: bytes) -> None:
        listed.append(len(json.loads(data)))
        written(path, data)

    monkeypatch.setattr(table, "write_atomically", note)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "9.md").write_text("mine")
    names = [str(number) for number in range(10)]
    mirror = Mirror(tmp_path / "notes", tmp_path / "written.json", names)
    for name in names[:9]:
        mirror.add({"id": name, "source": name, "text": name})
    mirror.add({"id": "9", "source": "9", "text": "9"})
    with pytest.raises(OutputExists):
        mirror.finish()
    assert listed == [9]
    assert (tmp_path / "notes" / "9.md").read_text() == "mine"


def answer_of(**fields: Any) -> Answer:
    return Answer(json.dumps(fields), "stop", {"prompt_tokens": 1, "completion_tokens": 1})


PARTS = [
    {"title": "One", "people": [{"name": "Ann  Lee", "age": None}, {"name": "Bo", "age": 3}]},
    {"title": "Two", "people": [{"name": "ann lee", "age": 40}, {"name": None, "age": 1}]},
    {"title": "Three", "people": None},
]
TOGETHER = [{"name": "Ann  Lee", "age": 40}, {"name": "Bo", "age": 3}, {"name": None, "age": 1}]


def merger(schema: Any) -> Merger:
    prompts = Prompts(make_question({"prompt": "Who?"}))
    return Merger(prompts, len, 4000, KeyedLists(schema))


def entry() -> Entry:
    facts = {"path": "a.txt", "type": "text", "pages": None, "front_matter": {}}
    return Entry("a.txt", "00", facts, chunks=((0, 1, 0, 0), (1, 2, 0, 0), (2, 3, 0, 0)))


def test_lists_with_a_key_are_put_together_and_left_out_of_merges() -> None:
    found = entry()
    answers = {name: answer_of(**part) for name, part in zip(found.chunk_ids, PARTS, strict=True)}
    missing = merger(SCHEMA).advance(found, answers)  # type: ignore[arg-type]
    assert isinstance(missing, Missing)
    ((merge_id, prompt),) = missing.prompts
    assert '{"title": "Two"}' in prompt
    assert "Bo" not in prompt
    answers[merge_id] = answer_of(title="All", people=[{"name": "invented"}])
    merged = merger(SCHEMA).advance(found, answers)  # type: ignore[arg-type]
    assert isinstance(merged, Merged)
    assert json.loads(merged.answer.text or "") == {"title": "All", "people": TOGETHER}
    assert merged.levels == 1


def test_an_answer_of_such_lists_alone_needs_no_merge() -> None:
    found = entry()
    answers = {name: answer_of(people=part["people"]) for name, part in zip(found.chunk_ids, PARTS, strict=True)}
    merged = merger({"properties": {"people": PEOPLE}}).advance(found, answers)  # type: ignore[arg-type]
    assert isinstance(merged, Merged)
    assert (json.loads(merged.answer.text or ""), merged.levels) == ({"people": TOGETHER}, 0)
    assert not KeyedLists({"properties": {"title": {}}})


def test_a_sample_tells_how_long_the_folder_takes(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = [FoundFile("a.txt", None, 100)]
    expected = Expected.of(sampled)
    expected.add(sampled[0], [AskedRow("a", "", 50)])
    every = expected.among([FoundFile(f"{number}.txt", None, 200) for number in range(10)])
    assert (every.rows, every.tokens) == (10, 1000)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.txt").write_text(f"K{number}.")
    ended = ask(folder, sample=2)
    assert ended.whole is None, "the stand-in engine measures no seconds"

    def measured(counts: Any) -> Any:
        summary = summarise_rows(counts)
        summary.seconds.generate = 4.0
        return summary

    monkeypatch.setattr(fake_engine, "summarise_rows", measured)
    ended = ask(folder, sample=2, out="other.jsonl")
    assert ended.whole is not None
    assert ended.whole.rows == 9
    assert ended.whole.seconds == pytest.approx(4.0 * 9 / 2)
