"""`moedge serve` in a process of its own (`apps/serve/server.py`, `apps/serve/engine_thread.py`): clients beside a
batch, kills, and stops by signal.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI

COMPLETION = "/v1/completions"
KEY = "the key of this test"
OPTIONS = (
    "--ram", "3GiB", "--gpu-mem", "0", "--dtype", "fp32", "--quant", "none", "--kv", "fp32", "--deterministic",
    "--max-sequences", "32", "--max-model-len", "300", "--port", "0",
)  # fmt: skip


class Server:
    """`moedge serve` on the same folder each time."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._command = [
            sys.executable,
            "-m",
            "moedge",
            "serve",
            str(model),
            "--state-dir",
            str(folder / "served"),
            *OPTIONS,
        ]
        self._environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "MOEDGE_API_KEY": KEY}
        self.errors = ""

    @contextmanager
    def running(self, last: signal.Signals) -> Iterator[OpenAI]:
        process = subprocess.Popen(self._command, stderr=subprocess.PIPE, text=True, env=self._environment)
        assert process.stderr is not None
        before = []
        try:
            for line in process.stderr:
                before.append(line)
                if found := re.match(r"listening on (\S+);", line):
                    yield OpenAI(base_url=found[1], api_key=KEY, max_retries=2, timeout=600)
                    break
            else:
                raise AssertionError("".join(before))
        finally:
            process.send_signal(last)
            self.errors = process.stderr.read()
            self.code = process.wait()


@pytest.fixture
def server(checkpoint: Callable[[str], Path], tmp_path: Path) -> Server:
    return Server(checkpoint("qwen3_moe"), tmp_path)


def rows(count: int, max_tokens: int) -> bytes:
    lines = [
        {
            "custom_id": str(index),
            "method": "POST",
            "url": COMPLETION,
            "body": {"prompt": f"row {index}", "max_tokens": max_tokens, "ignore_eos": True},
        }
        for index in range(count)
    ]
    return "".join(json.dumps(each) + "\n" for each in lines).encode()


def begin(client: OpenAI, data: bytes) -> str:
    file = client.files.create(file=("rows.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h").id


def at_least(client: OpenAI, batch_id: str, completed: int) -> Any:
    while (batch := client.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing"):
        if batch.request_counts.completed >= completed:
            break
    return batch


def answers(client: OpenAI, batch: Any) -> dict[str, str]:
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    found = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in lines}
    assert len(found) == len(lines), "a row twice"
    return found


def streamed(client: OpenAI, index: int) -> str:
    pieces = client.completions.create(
        model="any", prompt=f"row {index}", max_tokens=10, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join(choice.text for piece in pieces for choice in piece.choices)


@pytest.mark.slow
def test_200_streams_beside_a_batch_are_complete_and_the_batch_loses_nothing(server: Server) -> None:
    with server.running(signal.SIGINT) as client:
        batch_id = begin(client, rows(300, 60))
        at_least(client, batch_id, 1)
        with ThreadPoolExecutor(200) as pool:
            texts = list(pool.map(lambda index: streamed(client, index), range(200)))
        batch = at_least(client, batch_id, 300)
        assert (batch.status, batch.request_counts.completed) in (
            ("completed", 300),
            ("in_progress", 300),
            ("finalizing", 300),
        )
        while batch.status != "completed":
            batch = client.batches.retrieve(batch_id)
        found = answers(client, batch)
        assert set(found) == set(map(str, range(300)))
        # Deterministic: a stream says what the same row of the batch says. Its last token may be a part of a character.
        assert all(texts)
        differing = [
            index for index, text in enumerate(texts) if not found[str(index)].startswith(text.rstrip("\ufffd"))
        ]
        assert not differing, [(texts[index], found[str(index)]) for index in differing[:3]]
    assert server.code == 130


@pytest.mark.slow
def test_a_batch_survives_ten_kills_of_the_server_with_every_row_once(server: Server) -> None:
    batch_id, before = "", 0
    for kill in range(10):
        with server.running(signal.SIGKILL) as client:
            batch_id = batch_id or begin(client, rows(600, 100))
            batch = at_least(client, batch_id, before + 1 + 5 * kill)
            assert batch.status == "in_progress"
            before = batch.request_counts.completed
    with server.running(signal.SIGTERM) as client:
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            assert batch.status in ("in_progress", "finalizing", "validating")
        assert batch.request_counts.to_dict() == {"total": 600, "completed": 600, "failed": 0}
        assert set(answers(client, batch)) == set(map(str, range(600)))
    assert server.code == 143


@pytest.mark.slow
def test_ctrl_c_ends_after_the_pass_and_the_next_server_resumes(server: Server) -> None:
    with server.running(signal.SIGINT) as client:
        batch_id = begin(client, rows(200, 100))
        before = at_least(client, batch_id, 1).request_counts.completed
        stream = iter(client.completions.create(model="any", prompt="x", max_tokens=250, stream=True))
        next(stream)
    assert server.code == 130
    assert "Traceback" not in server.errors
    with pytest.raises((APIError, OSError)):
        list(stream)
    with server.running(signal.SIGINT) as client:
        assert at_least(client, batch_id, before).request_counts.completed >= before
        while (batch := client.batches.retrieve(batch_id)).status != "completed":
            pass
        assert len(answers(client, batch)) == 200


@pytest.mark.slow
def test_two_servers_do_not_share_a_folder(server: Server) -> None:
    with server.running(signal.SIGINT):
        again = subprocess.run(server._command, env=server._environment, capture_output=True, text=True, check=False)
    assert again.returncode == 6
    assert "is in use by another process" in again.stderr
