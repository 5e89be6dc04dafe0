"""Cut answers of documents that are continued (`apps/documents/run.py`, `moedge docs --cut`): the output is that
of a job that had the larger --max-tokens from the start, whatever depended on a cut answer.
"""

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.documents.run import DocumentsEnded, run_documents
from moedge.apps.documents.status import find_rounds
from moedge.runtime.settings.errors import BadArgument, JobMismatch
from support import killing
from support.jobs.documents_oracle import Stopper

Ask = Callable[..., DocumentsEnded]
MODEL = Path(__file__).parents[3] / "examples" / "tiny_moe" / "model"
# Bytes are tokens: a fact has three or four. Parts leave room for the largest of the limits below.
OPTIONS = {"chunk_tokens": 300, "context": 2400}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of one part and of several, whose parts have few facts and many; one of them changes its parts where
    the limit leaves less of the context."""
    folder = tmp_path / "in"
    folder.mkdir()
    filler = "Some filler words go here. " * 8
    texts = {
        "short": "K1.", "facts": "".join(f"K{n} " for n in range(60)), "empty": "",
        "parts": "".join(f"K{n}. Filler words.\n" for n in range(40)),
        "tail": f"{filler}\n" * 4 + "".join(f"K{n} " for n in range(50)),
        "sparse": f"{filler}\nK7\n" * 5, "each": "".join(f"{filler}\nK{n}\n" for n in range(10, 15)),
    }  # fmt: skip
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def outputs(tmp_path: Path, out: str) -> list[bytes]:
    return [(tmp_path / f"{out}{suffix}").read_bytes() for suffix in (".jsonl", ".errors.jsonl")]


def rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}


@pytest.mark.parametrize(
    "options", [{}, {"each": "chunk"}, {"chunk_tokens": None, "context": 900}], ids=["merged", "split", "by context"]
)
def test_a_continued_job_is_one_that_had_the_larger_limit(
    options: dict[str, Any], ask: Ask, tmp_path: Path, folder: Path
) -> None:
    given = {**OPTIONS, **options}
    ask(folder, out="whole.jsonl", max_tokens=400, **given)
    first = ask(folder, max_tokens=8, **given)
    before = outputs(tmp_path, "out")
    assert first.totals.cut
    assert ask(folder, max_tokens=8, **given).rounds == (), "the same command continues nothing"
    ask(folder, max_tokens=40, cut=True, **given)
    assert outputs(tmp_path, "out") != before
    last = ask(folder, max_tokens=400, cut=True, **given)
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")
    assert (last.totals.cut, last.totals.pending) == (0, 0)
    again = ask(folder, max_tokens=400, cut=True, **given)
    assert (again.rounds, outputs(tmp_path, "out")) == ((), outputs(tmp_path, "whole"))


def test_only_merges_of_answers_that_grew_are_asked_again(ask: Ask, tmp_path: Path, folder: Path) -> None:
    """Every part of `sparse` and `each` says one short fact, which no limit cut: their merges stay, and that of `each`,
    which says all of them, is continued."""
    ask(folder, max_tokens=8, **OPTIONS)
    (begun,) = (tmp_path / "out.job" / "rounds").iterdir()
    merges = {row.split(".")[0] for row in rows(begun / "0002.jsonl")}
    ask(folder, max_tokens=400, cut=True, **OPTIONS)
    asked = {row.split(".")[0] for row in rows(begun / "0003.jsonl")}
    assert len(merges) == len(asked) + 2
    assert asked < merges
    assert {row["finish_reason"] for row in rows(begun / "0003.answers.jsonl").values()} == {"stop"}
    kept = {row.split(".")[0]: each["finish_reason"] for row, each in rows(begun / "0002.answers.jsonl").items()}
    assert {kept[each] for each in asked} == {"length"}, "a merge of answers that grew is not continued"
    assert {kept[each] for each in merges - asked} == {"stop"}
    assert all(len(rows(path)) for path in begun.glob("????.jsonl"))
    chunks = [row for path in begun.glob("????.jsonl") for row in rows(path) if row.split(".")[1] == "0"]
    assert len(chunks) == len(set(chunks)) == len(rows(begun / "0001.jsonl")), "no part is asked about twice"


@pytest.mark.sample("3-None", "60-RuntimeError")
@pytest.mark.parametrize("error", [None, RuntimeError])
@pytest.mark.parametrize("passes", [3, 20, 60, 150, 300])
def test_a_stop_costs_nothing_and_what_never_ran_gets_the_larger_limit(
    passes: int, error: type[BaseException] | None, ask: Ask, tmp_path: Path, folder: Path
) -> None:
    ask(folder, out="whole.jsonl", max_tokens=400, **OPTIONS)
    # The first run leaves rows that no run has begun.
    ask(folder, max_tokens=8, max_rows=3, **OPTIONS)
    try:
        ended = ask(folder, max_tokens=400, cut=True, observer=Stopper(passes=passes, error=error), **OPTIONS)
        assert ended.reason == "stopped by a test"
    except RuntimeError:
        assert error is not None
    (folder / "new.txt").write_text("K5 " * 9 + "".join(f"K{n} " for n in range(30)))
    ask(folder, out="whole.jsonl", max_tokens=400, **OPTIONS)
    # Without --cut, the job goes on with its new limit.
    ended = ask(folder, max_tokens=400, **OPTIONS)
    assert ended.reason is None
    assert ask(folder, max_tokens=400, cut=True, **OPTIONS).totals.cut == 0
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")


def test_killed_while_answers_are_continued_it_ends_with_the_same_bytes(ask: Ask, tmp_path: Path, folder: Path) -> None:
    ask(folder, out="whole.jsonl", max_tokens=400, **OPTIONS)
    ask(folder, max_tokens=8, **OPTIONS)
    begun, generator, kills = time.perf_counter(), random.Random(5), 0
    ask(folder, out="other.jsonl", max_tokens=8, **OPTIONS)
    seconds = time.perf_counter() - begun
    for _ in range(4):
        going_on = generator.random() * seconds
        kills += killing.killed(lambda: ask(folder, max_tokens=400, cut=True, **OPTIONS), going_on)
    assert kills
    ask(folder, max_tokens=400, cut=True, **OPTIONS)
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")


def test_whoever_continues_may_go_back_and_no_answer_is_lost(ask: Ask, tmp_path: Path, folder: Path) -> None:
    """A limit that leaves no room for a prompt makes every document an error: a smaller one finds its answers."""
    ask(folder, max_tokens=8, **OPTIONS)
    assert ask(folder, max_tokens=2395, cut=True, **OPTIONS).totals.answered == 0
    ask(folder, max_tokens=400, cut=True, **OPTIONS)
    ask(folder, out="whole.jsonl", max_tokens=400, **OPTIONS)
    assert outputs(tmp_path, "out") == outputs(tmp_path, "whole")


def test_what_cannot_be_continued_is_refused(ask: Ask, tmp_path: Path, folder: Path) -> None:
    ask(folder, max_tokens=20, **OPTIONS)
    before = outputs(tmp_path, "out"), (tmp_path / "out.job" / "question.json").read_bytes()
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (JobMismatch, r"max_tokens 20 -> 400 differ.*add --cut", {"max_tokens": 400}),
        (JobMismatch, r"max_tokens 20 -> 8 differ.*out.jsonl\.$", {"max_tokens": 8, "cut": True}),
        (JobMismatch, "prompt differ", {"max_tokens": 400, "cut": True, "prompt": "What else?"}),
        (BadArgument, "2400 leaves nothing of the model's context, 2400", {"max_tokens": 2400, "cut": True}),
        (BadArgument, "give one of them", {"max_tokens": 400, "cut": True, "sample": 2}),
    ]  # fmt: skip
    for error, says, given in refused:
        with pytest.raises(error, match=says):
            ask(folder, **{**OPTIONS, **given})
    assert (outputs(tmp_path, "out"), (tmp_path / "out.job" / "question.json").read_bytes()) == before
    ask(folder, max_tokens=400, cut=True, **OPTIONS)
    with pytest.raises(JobMismatch, match=r"max_tokens 400 -> 20 differ.*out.jsonl\.$"):
        ask(folder, max_tokens=20, **OPTIONS)
    found = find_rounds(str(tmp_path / "out.jsonl"))
    assert found is not None
    assert found.num_rows > len(list(folder.iterdir())), "all rounds of a continued job are found"


BIBLE = (
    "And God said to Moses, Tell the people of Israel that they go out of the land. "
    "And Moses went and told the people all the words of the Lord. "
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked",
    [
        {"prompt": "Tell of it."},
        {"task": "extract", "fields": "name, old: boolean"},
        {"prompt": "Tell of it.", "temperature": 0.8, "seed": 3},
    ],
    ids=["text", "schema", "sampled"],
)
def test_tokens_of_a_model_are_those_of_an_uncut_job(asked: dict[str, Any], tmp_path: Path) -> None:
    """Of one part, and of several with merges, on the bundled model."""
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "short.txt").write_text(BIBLE)
    (folder / "long.txt").write_text("\n\n".join(BIBLE * (1 + number % 2) for number in range(6)))
    given = {**asked, "chunk_tokens": 120, "deterministic": True, "dtype": "fp32", "ram": "2GiB", "progress": False}

    def answered(out: str, **more: Any) -> DocumentsEnded:
        return run_documents(MODEL, folder, tmp_path / out, **given, **more)

    first = answered("cut.jsonl", max_tokens=6)
    assert first.totals.cut == 2
    answered("cut.jsonl", max_tokens=20, cut=True)
    # With other batches than those of the uncut job.
    answered("cut.jsonl", max_tokens=60, cut=True)
    whole = answered("whole.jsonl", max_tokens=60, max_sequences=3)
    written = [tmp_path / f"whole{suffix}" for suffix in (".jsonl", ".errors.jsonl")]
    for each in written:
        found = each.with_name(each.name.replace("whole", "cut"))
        assert found.exists() == each.exists()
        assert not each.exists() or found.read_bytes() == each.read_bytes()
    assert whole.totals.answered, "JSON is complete at the larger limit"
    assert any(row["chunks"] > 2 and row["merges"] for row in rows(written[0]).values())
