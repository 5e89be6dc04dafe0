"""What rows in work have generated is kept (`runtime/jobs/run.py`, `runtime/jobs/journal/journal.py`): a stop on
purpose loses no token, a kill no more than the passes since the last record, and answers are those of a run without.
"""

import json
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from matrix import kills
from moedge.runtime.jobs import run as runs
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs.job import Measured, Running
from moedge.runtime.jobs.journal.state import JournalScan, decode_progress, read_state
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.jobs.session import Checked, Ended
from moedge.runtime.rows.row import Defaults
from moedge.runtime.settings.settings import Budgets, Settings
from support import killing

ROOT = Path(__file__).parents[3]
NUM_ROWS, TOKENS = 40, 23
NEEDED = TOKENS * sum(1 + row % 3 for row in range(NUM_ROWS))


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sessions, "datetime", kills.OneDay)


@pytest.fixture
def request_to(tmp_path: Path) -> Callable[[str], BatchRequest]:
    """A job of rows of which two in three have several choices, with its output's name."""
    path = tmp_path / "in.jsonl"
    lines = [{"id": f"r{row}", "prompt": f"row {row}", "seed": row, "n": 1 + row % 3} for row in range(NUM_ROWS)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lambda name: BatchRequest("fake", path, tmp_path / name, defaults=Defaults(max_tokens=TOKENS))


def run(request: BatchRequest, passes: int | None = None) -> Ended:
    """The whole job, or so many of its passes and then a stop on purpose."""
    with Checked.open(request) as checked:
        running = Running(Measured.of(checked).plan().load())
        for index, _ in enumerate(running.passes()):
            if index + 1 == passes and not running.session.finished:
                return running.end("a test wants it")
        return running.end()


def install(fake: ModuleType, monkeypatch: pytest.MonkeyPatch, hook: Callable[[list[Any]], None]) -> None:
    fake.install(lambda: fake.FakeEngine(hook), monkeypatch.setattr)


def answers(path: Path) -> list[str]:
    return [re.sub(r'"created":\d+', "", line) for line in path.read_text().splitlines()]


def test_a_job_that_is_stopped_again_and_again_generates_no_token_twice(
    request_to: Callable[[str], BatchRequest], tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    generated: list[int] = []
    install(fake, monkeypatch, lambda live: generated.append(len(live)))
    run(request_to("whole.jsonl"))
    assert sum(generated) == NEEDED
    generated.clear()
    draw, stops = random.Random(0), 0
    while not run(request_to("out.jsonl"), draw.randrange(1, 9)).session.finished:
        stops += 1
        state = read_state(tmp_path / "out.job" / "journal")
        assert sum(each.tokens for each in state.unfinished.values()) == sum(generated) - state.counts.generated_tokens
    assert stops > 10
    assert sum(generated) == NEEDED
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
    assert not read_state(tmp_path / "out.job" / "journal").unfinished


def test_a_kill_costs_what_came_behind_the_last_record(
    request_to: Callable[[str], BatchRequest], tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, draw, num_kills = tmp_path / "log", random.Random(1), 0
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)

    def work(name: str, passes: int) -> Callable[[], object]:
        left = [passes]

        def hook(live: list[Any]) -> None:
            with log.open("a") as file:
                print(len(live), file=file)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

        def run_it() -> None:
            install(fake, monkeypatch, hook)
            run(request_to(name))

        return run_it

    killing.finish(work("whole.jsonl", -1))
    log.unlink()
    while os.WIFSIGNALED(os.waitpid(killing.start(work("out.jsonl", draw.randrange(2, 12))), 0)[1]):
        num_kills += 1
        assert num_kills < 100, "it does not get on"
    assert num_kills > 10
    # A killed pass was counted and gave nothing.
    assert NEEDED < sum(map(int, log.read_text().split())) <= NEEDED + num_kills * fake.LIVE
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")


def test_a_journal_that_ends_at_any_byte_gives_the_same_answers(
    request_to: Callable[[str], BatchRequest], tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)
    install(fake, monkeypatch, lambda live: None)
    run(request_to("whole.jsonl"))
    run(request_to("out.jsonl"), 30)
    folder, kept = tmp_path / "out.job", tmp_path / "kept"
    shutil.copytree(folder, kept)
    journal, draw = (kept / "journal").read_bytes(), random.Random(2)
    first = journal.index(b"\n") + 1
    for _ in range(25):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        for left in tmp_path.glob("out*.jsonl"):
            left.unlink()
        (folder / "journal").write_bytes(journal[: draw.randrange(first, len(journal))])
        assert run(request_to("out.jsonl")).session.finished
        assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")


def test_every_token_is_recorded_once(
    request_to: Callable[[str], BatchRequest], tmp_path: Path, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none between two records: the bytes of a journal are bounded."""
    monkeypatch.setattr(runs, "PROGRESS_SECONDS", 0)
    install(fake, monkeypatch, lambda live: None)
    for _ in range(3):
        run(request_to("out.jsonl"), 7)
    unfinished, found = read_state(tmp_path / "out.job" / "journal").unfinished, Counter[int]()
    with (tmp_path / "out.job" / "journal").open("rb") as file:
        for _, payload in JournalScan(file):
            if payload.startswith(b'{"kind":"progress"'):
                row = json.loads(payload)["row"]
                found[row] += sum(len(choice.token_ids) for choice in decode_progress(payload))
    assert {row: each.tokens for row, each in unfinished.items()} == {row: found[row] for row in unfinished}
    # Three times seven passes, each with a token of every choice that ran.
    assert found == {row: 3 * 7 * (1 + row % 3) for row in found}


BODIES: list[dict[str, Any]] = [
    {"prompt": "In the beginning", "temperature": 0.8, "seed": 3, "logprobs": 2, "n": 2},
    {"prompt": "And the king said", "temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"prompt": "Once upon", "prompt_logprobs": 1, "logprobs": 1, "stop": ["the"], "min_tokens": 14},
    {"prompt": "And it came to pass", "structured_outputs": {"regex": "[a-z]{6}( [a-z]{5}){9}"}, "max_tokens": 64},
]


def test_a_real_engine_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Random streams, penalties, log-probabilities, grammars and several choices."""
    rows = tmp_path / "in.jsonl"
    line = {"method": "POST", "url": "/v1/completions"}
    lines = [{"custom_id": str(row), **line, "body": body} for row, body in enumerate(BODIES)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def request(name: str) -> BatchRequest:
        return BatchRequest(
            str(ROOT / "examples/tiny_moe/model"), rows, tmp_path / name, defaults=Defaults(max_tokens=24),
            settings=Settings(deterministic=True, dtype="fp32", kv="fp32", quant="none"),
            budgets=Budgets(ram="3GiB", gpu_mem="0"),
        )  # fmt: skip

    whole = run(request("whole.jsonl"))
    assert whole.summary.rows.ok == len(BODIES)
    first, second, last = (run(request("out.jsonl"), passes) for passes in (5, 6, None))
    assert answers(tmp_path / "out.jsonl") == answers(tmp_path / "whole.jsonl")
    assert whole.summary.tokens.resumed == first.summary.tokens.resumed == 0
    prompts = whole.summary.tokens.prompt
    assert second.summary.tokens.resumed >= prompts
    assert last.summary.tokens.resumed >= second.summary.tokens.resumed
