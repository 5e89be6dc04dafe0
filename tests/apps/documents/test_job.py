"""A job over documents: every file has its row, long ones are merged, and a job that was stopped ends the same."""

import csv
import json
import os
import random
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openpyxl
import pytest

from moedge.apps.documents import job as jobs
from moedge.apps.documents.iterate import FoundFile
from moedge.apps.documents.job import spread
from moedge.apps.documents.run import DocumentsEnded
from moedge.offload.atomic_file import AtomicFile
from moedge.runtime.settings.errors import BadArgument, InputRefused, JobMismatch, OutputExists
from support import document_folder
from support import killing as killing_support
from support.document_folder import BAD, GOOD, pdf
from support.jobs.documents_oracle import Stopper

Ask = Callable[..., DocumentsEnded]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def facts(first: int, last: int) -> str:
    return " ".join(f"K{number}" for number in range(first, last + 1))


def test_every_file_has_exactly_one_row(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    document_folder.make(folder, tmp_path / "outside")
    ended = ask(folder)
    answered, failed = rows(tmp_path / "out.jsonl"), rows(tmp_path / "out.errors.jsonl")
    assert {row["id"]: row["type"] for row in answered} == {name: kind for name, (_, kind, _) in GOOD.items()}
    assert {row["id"]: row["error"]["code"] for row in failed} == {name: code for name, (_, code) in BAD.items()}
    assert len(answered) + len(failed) == len(GOOD) + len(BAD)
    assert all(row["text"] == "nothing" and row["finish_reason"] == "stop" for row in answered)
    report = next(row for row in answered if row["id"] == "report.pdf")
    assert (report["pages"], report["chunks"], report["quant"], len(report["sha256"])) == (2, 1, "none", 64)
    assert (ended.reason, ended.totals.answered, ended.totals.num_failed) == (None, len(answered), len(failed))


def test_a_long_document_is_merged_with_the_pages_that_each_part_covers(ask: Ask, tmp_path: Path) -> None:
    pages = [f"Page {number} says this.\nK{number} is a fact of it.\nMore words follow." for number in range(1, 41)]
    folder = write(tmp_path / "in", short="Only K7 here.")
    (folder / "long.pdf").write_bytes(pdf(pages))
    observer = Stopper()
    ask(folder, observer=observer, chunk_tokens=400, context=1400)
    merged, short = rows(tmp_path / "out.jsonl")
    assert (merged["text"], merged["finish_reason"], short["text"]) == (facts(1, 40), "stop", "K7")
    assert (merged["pages"], "parts" in short) == (40, False)
    assert merged["chunks"] == len(merged["parts"]) > 5
    covered = 0
    for part in merged["parts"]:
        first, last = part["pages"]
        found = [int(fact[1:]) for fact in part["text"].split()]
        assert all(first <= number <= last for number in found), part
        assert part["start"] == covered
        covered = part["end"]
    assert " ".join(part["text"] for part in merged["parts"]) == facts(1, 40)
    assert observer.rounds == 1, "the engine is loaded once for all rounds"


def test_merges_go_to_any_depth(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", long="".join(f"K{number}. Some filler words go here.\n" for number in range(120)))
    ended = ask(folder, chunk_tokens=120, context=1750, max_tokens=600, merge_prompt="{{ text }}")
    (row,) = rows(tmp_path / "out.jsonl")
    assert row["text"] == facts(0, 119)
    assert row["merges"] >= 2
    assert len(ended.rounds) == row["merges"] + 1
    assert row["usage"]["completion_tokens"] > sum(len(part["text"]) for part in row["parts"]) + len(row["text"])


def test_what_cannot_be_merged_is_an_error_row(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", long="".join(f"K{number}. Filler words.\n" for number in range(100)))
    ask(folder, chunk_tokens=600, context=1500, max_tokens=400, merge_prompt="x" * 1050 + "{{ text }}")
    (row,) = rows(tmp_path / "out.errors.jsonl")
    assert row["error"]["code"] == "document_merge_too_long"


def test_long_documents_become_rows_of_chunks_or_errors(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="K1.", long="".join(f"K{number}. Filler words.\n" for number in range(60)))
    ask(folder, out="split.jsonl", each="chunk", chunk_tokens=300)
    split = rows(tmp_path / "split.jsonl")
    assert [row["id"] for row in split] == ["a.txt#1", *(f"long.txt#{n}" for n in range(1, len(split)))]
    assert " ".join(row["text"] for row in split[1:]) == facts(0, 59)
    ask(folder, out="error.jsonl", long="error", chunk_tokens=300)
    assert [row["id"] for row in rows(tmp_path / "error.jsonl")] == ["a.txt"]
    assert rows(tmp_path / "error.errors.jsonl")[0]["error"]["code"] == "document_too_long"
    with pytest.raises(BadArgument, match="--each chunk gives a row"):
        ask(folder, each="chunk", long="error")


def test_one_document_is_a_folder_of_one(ask: Ask, tmp_path: Path) -> None:
    """What lies beside it is not read; what lies in an archive is."""
    folder = write(tmp_path / "in", a="K1.", b="K2.")
    ask(folder / "a.txt")
    assert {row["id"]: row["text"] for row in rows(tmp_path / "out.jsonl")} == {"a.txt": "K1"}
    with zipfile.ZipFile(folder / "two.zip", "w") as archive:
        archive.writestr("c.txt", "K3.")
        archive.writestr("d.txt", "K4.")
    ask(folder / "two.zip", out="zip.jsonl")
    assert {row["id"]: row["text"] for row in rows(tmp_path / "zip.jsonl")} == {
        "two.zip/c.txt": "K3", "two.zip/d.txt": "K4",
    }  # fmt: skip
    with pytest.raises(BadArgument, match="absent does not exist"):
        ask(folder / "absent")


def test_only_what_is_new_or_changed_is_answered(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="K1.", b="K2.", c="K3.")
    ask(folder)
    before = (tmp_path / "out.jsonl").read_bytes()
    again = Stopper()
    ended = ask(folder, observer=again)
    assert (again.rounds, (tmp_path / "out.jsonl").read_bytes()) == (0, before)
    assert (ended.report.new, ended.report.changed, ended.report.removed) == (0, 0, 0)
    write(folder, b="K22.", d="K4.")
    (folder / "a.txt").unlink()
    ended = ask(folder)
    assert (ended.report.new, ended.report.changed, ended.report.removed) == (1, 1, 1)
    assert sum(each.summary.rows.total for each in ended.rounds) == 2
    assert {row["id"]: row["text"] for row in rows(tmp_path / "out.jsonl")} == {
        "b.txt": "K22", "c.txt": "K3", "d.txt": "K4",
    }  # fmt: skip


@pytest.mark.parametrize("error", [None, RuntimeError])
def test_a_job_that_was_stopped_ends_with_the_same_bytes(
    ask: Ask, tmp_path: Path, error: type[BaseException] | None
) -> None:
    long = "".join(f"K{number}. Filler words.\n" for number in range(40))
    folder = write(tmp_path / "in", a="K1.", b=long, c="K3. " * 30, empty="")
    options = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300}
    ask(folder, out="whole.jsonl", **options)
    for passes in (1, 40, 130, 200):
        out = f"stopped{passes}.jsonl"
        try:
            ended = ask(folder, out=out, observer=Stopper(passes, error), **options)
            assert ended.reason == "stopped by a test"
            assert not (tmp_path / out).exists()
            assert (tmp_path / out).with_suffix(".partial.jsonl").exists()
        except RuntimeError:
            assert error is not None
        ask(folder, out=out, **options)
        assert (tmp_path / out).read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
        assert (tmp_path / out).with_suffix(".errors.jsonl").read_bytes() == (
            tmp_path / "whole.errors.jsonl"
        ).read_bytes()
        assert not (tmp_path / out).with_suffix(".partial.jsonl").exists()


def test_limits_stop_a_job_over_all_its_rounds(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **{f"f{number}": f"K{number}." for number in range(5)})
    ended = ask(folder, max_rows=2)
    assert ended.reason == "--max-rows 2 reached"
    assert len(rows(tmp_path / "out.partial.jsonl")) == 2
    assert (ended.totals.answered, ended.totals.pending) == (2, 3)


@pytest.mark.parametrize("out", ["out.csv", "out.xlsx"])
def test_tables_show_the_source_what_was_asked_for_and_the_error(out: str, ask: Ask, tmp_path: Path) -> None:
    """Where an answer comes from, in all its columns, is in lines of JSON."""
    ask(write(tmp_path / "in", a="K1.", b=""), out=out)
    wanted = [["source", "text", "error"], ["a.txt", "K1", None], ["b.txt", None, "document_empty: the file is empty"]]
    if out.endswith("xlsx"):
        sheet = openpyxl.load_workbook(tmp_path / out).worksheets[0]
        assert [[cell.value for cell in row] for row in sheet.iter_rows()] == wanted
        return
    with (tmp_path / out).open(newline="") as file:
        assert [[cell or None for cell in row] for row in csv.reader(file)] == wanted


def test_another_question_needs_another_output(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="K1.")
    ask(folder)
    with pytest.raises(JobMismatch, match="another question: prompt differ"):
        ask(folder, prompt="What else?")
    (tmp_path / "out.jsonl").write_text("mine")
    write(folder, b="K2.")
    with pytest.raises(OutputExists, match="is not what this job wrote"):
        ask(folder)
    (tmp_path / "other.jsonl").write_text("mine")
    with pytest.raises(OutputExists, match="is not overwritten"):
        ask(folder, out="other.jsonl")
    (tmp_path / "none").mkdir()
    with pytest.raises(InputRefused, match="has no file to read"):
        ask(tmp_path / "none", out="none.jsonl")


def test_another_question_reads_nothing_again(ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "in", a="K1.")
    ask(folder, cache=tmp_path / "cache")
    # Whatever is read again is another text.
    monkeypatch.setattr("moedge.apps.documents.iterate._content", None)
    ask(folder, out="second.jsonl", prompt="What else?", cache=tmp_path / "cache")
    assert rows(tmp_path / "second.jsonl")[0]["text"] == "K1"


def test_the_output_may_be_in_the_folder_of_the_documents(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="K1.", empty="")
    for _ in range(2):
        ended = ask(folder, out="in/out.jsonl")
        assert (ended.report.num_files, ended.totals.answered) == (2, 1)


def test_a_sample_is_answered_and_kept(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", **{f"f{number}": f"K{number}." for number in range(5)})
    ask(folder, sample=2, prompt="A first try?")
    ended = ask(folder, sample=2)
    assert len(ended.sample) == 2
    assert not (tmp_path / "out.jsonl").exists()
    ended = ask(folder)
    assert sum(each.summary.rows.total for each in ended.rounds) == 3
    assert [row["text"] for row in rows(tmp_path / "out.jsonl")] == [f"K{number}" for number in range(5)]


def test_a_sample_is_spread_over_types_and_sizes() -> None:
    files = [FoundFile(f"{size}.{kind}", None, size) for kind in ("pdf", "txt") for size in range(1, 9)]
    chosen = [each.path for each in spread(files, 4)]
    assert sorted(path.split(".")[1] for path in chosen) == ["pdf", "pdf", "txt", "txt"]
    assert sorted(path.split(".")[0] for path in chosen) == ["3", "3", "5", "5"]
    assert spread(files, 99) == files
    # Types that are seldom are left out where there are more types than files to try.
    seldom = [FoundFile("a.bin", None, 1), *files]
    assert [each.path for each in spread(seldom, 2)] == ["5.pdf", "5.txt"]


def test_prompts_have_what_is_known_of_a_document(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "a.md").write_text("---\nnumber: K5\n---\nText K1.")
    (folder / "b.pdf").write_bytes(pdf(["K2 here"]))
    prompt = "{{ text }} {{ front_matter.number }} {{ path }} K{{ chunks }}{{ chunk }} {{ page }}/{{ pages }}"
    ask(folder, prompt=prompt)
    (row,) = rows(tmp_path / "out.jsonl")
    assert (row["id"], row["text"]) == ("a.md", "K1 K5 K11")
    (failed,) = rows(tmp_path / "out.errors.jsonl")
    assert (failed["id"], failed["error"]["code"]) == ("b.pdf", "missing_parameter")
    with pytest.raises(BadArgument, match="--prompt uses txt; known are chunk"):
        ask(folder, prompt="{{ txt }}")


def test_a_prompt_that_leaves_no_tokens_is_an_error_of_its_documents(ask: Ask, tmp_path: Path) -> None:
    folder = write(tmp_path / "in", a="K1.")
    ask(folder, prompt="x" * 5000)
    assert rows(tmp_path / "out.errors.jsonl")[0]["error"]["code"] == "context_length_exceeded"
    assert jobs.MAX_CHUNK_TOKENS > 4096


@pytest.mark.slow
def test_four_hundred_pages_and_two_megabytes_are_merged(ask: Ask, tmp_path: Path) -> None:
    pages = [f"Page {number}.\n" + "Filler line.\n" * 30 + f"K{number} at its end." for number in range(1, 401)]
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "book.pdf").write_bytes(pdf(pages))
    filler = "This sentence says nothing of interest at all, as most do. " * 160
    (folder / "text.txt").write_text("".join(f"{filler}\nK{number} is said once.\n\n" for number in range(220)))
    ask(folder, chunk_tokens=16_000, context=24_000, max_tokens=4000)
    book, text = rows(tmp_path / "out.jsonl")
    assert (book["text"], text["text"]) == (facts(1, 400), facts(0, 219))
    for part in book["parts"]:
        found = [int(fact[1:]) for fact in part["text"].split()]
        assert set(range(part["pages"][0] + 1, part["pages"][1])) <= set(found)
        assert all(part["pages"][0] <= number <= part["pages"][1] for number in found)
    assert text["parts"][-1]["end"] == (folder / "text.txt").stat().st_size


def killed_at(number: int) -> Callable[[AtomicFile], None]:
    """`AtomicFile.publish` of a process that is killed before (even numbers) or behind one of its calls."""
    publish, count = AtomicFile.publish, 0

    def step() -> None:
        nonlocal count
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    def killing(file: AtomicFile) -> None:
        step()
        publish(file)
        step()

    return killing


def test_a_job_that_is_killed_at_any_moment_ends_with_the_same_bytes(ask: Ask, tmp_path: Path) -> None:
    folder, generator = tmp_path / "in", random.Random(3)
    folder.mkdir()
    wanted = document_folder.make_many(folder, tmp_path / "outside", count=55, long_nbytes=6000)
    # What it is in another process is tested by itself, and takes long.
    for name in ("zip_bomb.docx", "sparse.txt", "entity_bomb.docx"):
        (folder / name).unlink()
        del wanted[name]
    options = {"chunk_tokens": 600, "context": 1600, "max_tokens": 500}
    begun = time.perf_counter()
    ask(folder, out="whole.jsonl", **options)
    seconds = time.perf_counter() - begun
    kills = sum(killing_support.killed(lambda: ask(folder, **options), generator.random() * seconds) for _ in range(3))
    assert kills
    ask(folder, **options)
    found = rows(tmp_path / "out.jsonl") + rows(tmp_path / "out.errors.jsonl")
    assert {row["source"]: row.get("error", {}).get("code", "") for row in found} == wanted
    assert len(found) == len(wanted)
    for suffix in (".jsonl", ".errors.jsonl"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


@pytest.mark.slow
def test_a_job_that_is_killed_around_any_file_that_it_publishes_ends_with_the_same_bytes(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "".join(f"K{number}. Filler words.\n" for number in range(40))
    folder = write(tmp_path / "in", a="K1.", b=long, empty="")
    options = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300, "cache": tmp_path / "cache"}
    ask(folder, out="whole.jsonl", **options)
    publish, kills = AtomicFile.publish, 0
    for number in range(100):
        out = f"killed{number}.jsonl"
        monkeypatch.setattr(AtomicFile, "publish", killed_at(number))
        process = killing_support.start(lambda out=out: ask(folder, out=out, **options))
        status = os.waitpid(process, 0)[1]
        monkeypatch.setattr(AtomicFile, "publish", publish)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        ask(folder, out=out, **options)
        for suffix in (".jsonl", ".errors.jsonl"):
            found, wanted = (tmp_path / out).with_suffix(suffix), (tmp_path / "whole.jsonl").with_suffix(suffix)
            assert found.read_bytes() == wanted.read_bytes(), number
    assert kills > 10
