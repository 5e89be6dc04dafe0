"""Rows that max_tokens cut: counted, kept with their tokens (`runtime/jobs/journal/state.py`), and continued as if they
had never been cut (`runtime/jobs/session.py`).
"""

import json
import os
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from matrix import kills
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs.journal.state import CutChoice, Done, decode_done, encode_done, read_state
from moedge.runtime.jobs.request import BatchRequest, ResumeOptions
from moedge.runtime.jobs.stop import Limits
from moedge.runtime.rows.row import Defaults
from support import killing

NUM_ROWS = 60
SHORT, LONG = Defaults(max_tokens=5), Defaults(max_tokens=23)
CONTINUE = ResumeOptions(cut_to=LONG.max_tokens, drift=("max_tokens",))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Short and chat rows, one in three with several choices."""
    lines: list[dict[str, Any]] = []
    for row in range(NUM_ROWS):
        body = {"temperature": 0.5, "seed": row, "n": 1 + row % 3}
        if row % 2:
            lines.append({"id": f"r{row}", "prompt": f"row {row}", **body})
        else:
            chat = {"messages": [{"role": "user", "content": f"row {row}"}], **body}
            lines.append({"custom_id": f"r{row}", "method": "POST", "url": "/v1/chat/completions", "body": chat})
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def answers(path: Path) -> list[str]:
    """Lines of output without the time of the job."""
    return [re.sub(r'"created":\d+', "", line) for line in path.read_text().splitlines()]


def test_the_tokens_of_a_cut_row_are_read_back_from_its_record() -> None:
    choices = (CutChoice([1, 2], [[1, -0.1234567891234567, 1, [[1, -float("inf")]]]]), CutChoice([3], []))
    done = Done(3, False, 1, 3, "0" * 16, '{"a":",\\"choices\\":"}', {"length": 2}, 1, choices)
    assert decode_done(encode_done(done, 9)) == done
    brief = decode_done(encode_done(done, 9), with_line=False)
    assert brief is not None
    assert (brief.cut, brief.choices, brief.line) == (1, (), "")


def test_cut_rows_are_counted_and_end_as_those_of_an_uncut_run(
    job: Callable[..., Any], rows: Path, tmp_path: Path
) -> None:
    first = job(defaults=SHORT)
    assert (first.summary.rows.cut, first.summary.rows.failed) == (NUM_ROWS, 0)
    assert first.summary.rows.finish_reasons == {"length": 2 * NUM_ROWS}
    assert job(defaults=SHORT).finished, "the same command continues nothing"
    job(defaults=SHORT, resume=CONTINUE, limits=Limits(max_rows=7))
    last = job(defaults=SHORT, resume=CONTINUE)
    job(defaults=LONG, output=tmp_path / "whole.jsonl")
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
    assert last.summary.rows.finish_reasons == {"length": 2 * NUM_ROWS}
    assert last.summary.tokens.generated == 2 * NUM_ROWS * LONG.max_tokens, "the shorter answers no longer count"


def test_a_cut_answer_that_cannot_grow_stays_as_it_is(job: Callable[..., Any], rows: Path, tmp_path: Path) -> None:
    """More tokens than the context has."""
    job(defaults=SHORT)
    before = (tmp_path / "out.jsonl").read_text()
    ended = job(defaults=SHORT, resume=ResumeOptions(cut_to=1 << 20))
    assert ended.summary.rows.cut == NUM_ROWS
    assert (tmp_path / "out.jsonl").read_text() == before


def test_killed_while_cut_rows_are_continued_every_row_is_there_once(
    rows: Path, tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "datetime", kills.OneDay)
    fake.install(lambda: fake.FakeEngine(pass_seconds=0.002), monkeypatch.setattr)
    request = partial(BatchRequest, "fake", rows)
    killing.finish(lambda: fake.run(request(tmp_path / "whole.jsonl", defaults=LONG)))
    killing.finish(lambda: fake.run(request(tmp_path / "out.jsonl", defaults=SHORT)))
    going_on = request(tmp_path / "out.jsonl", defaults=SHORT, resume=CONTINUE)
    generator, count = random.Random(int(os.environ.get("KILL_SEED", "1"))), 0
    while count < 12 and killing.killed(lambda: fake.run(going_on), generator.uniform(0, 0.15)):
        count += 1
        state = read_state(tmp_path / "out.job" / "journal")
        assert state.counts.ok == NUM_ROWS, "a cut answer stays until its continuation replaces it"
    killing.finish(lambda: fake.run(going_on))
    assert count
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
