"""A served batch, and an upload by itself, whose server's k-th call to the system fails (`apps/serve/batches.py`,
`apps/serve/files.py`): a 5xx in words or a documented end, and nothing lost or half there.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from moedge.offload.errors import ExitCode
from support.failing_calls import ERRORS, ROOT, Commands, Ended, Fault, build

MODEL = ROOT / "examples" / "tiny_moe" / "model"
ROWS = 4
LIMIT_S = 300.0


def rows() -> bytes:
    body = {"prompt": "And", "max_tokens": 3, "ignore_eos": True}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    return "".join(json.dumps({"custom_id": str(index), **line}) + "\n" for index in range(ROWS)).encode()


class Client:
    """Uploads rows, has them answered and reads the answers; what is answered with 5xx is asked for again."""

    def __init__(self, address: str) -> None:
        self._api = OpenAI(base_url=address, api_key="not-asked-for", max_retries=0, timeout=LIMIT_S)

    def ask(self, call: Callable[[OpenAI], Any]) -> Any:
        for _ in range(4):
            try:
                return call(self._api)
            except openai.InternalServerError as error:
                if error.status_code == 500:
                    raise AssertionError(error.message) from None
        raise AssertionError("refused again and again")

    def batch(self) -> Any:
        """The one that there is, or a new one."""
        found = self.ask(lambda api: api.batches.list()).data
        if found:
            assert len(found) == 1, "a ghost"
            return found[0]
        file = self._upload()
        return self.ask(
            lambda api: api.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        )

    def _upload(self) -> Any:
        return self.ask(lambda api: api.files.create(file=("rows.jsonl", rows()), purpose="batch"))

    def uploads(self) -> dict[str, str]:
        """Uploads rows once more; what the server then has of each upload, the same once: a part would be another."""
        self._upload()
        files = self.ask(lambda api: api.files.list()).data
        return {self.ask(lambda api, which=each.id: api.files.content(which)).text: "whole" for each in files}

    def answers(self) -> dict[str, str]:
        batch, deadline = self.batch(), time.monotonic() + LIMIT_S
        while batch.status in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline:
            time.sleep(0.02)
            batch = self.ask(lambda api, which=batch.id: api.batches.retrieve(which))
        assert batch.status == "completed", batch
        lines = self.ask(lambda api: api.files.content(batch.output_file_id)).text.splitlines()
        found = [json.loads(line) for line in lines]
        answered = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in found}
        assert len(answered) == len(found) == ROWS, "a row twice, or lost"
        return answered


Ask = Callable[[Client], dict[str, str]]


class Server:
    """`moedge serve` on a folder, with and without a fault."""

    def __init__(self, commands: Commands, folder: Path) -> None:
        self.commands, self.work = commands, folder
        self._command = ("serve", MODEL, "--state-dir", folder, "--port", "0", "--ram", "2GiB", "--gpu-mem", "0",
                         "--deterministic", "--max-model-len", "64", "--max-sequences", "4")  # fmt: skip

    def run(self, ask: Ask, fault: Fault | None = None) -> tuple[Ended, dict[str, str], str]:
        """How the server ended, what was asked, and what went wrong with the client, where the server lived on."""
        ended: list[Ended] = []
        thread = threading.Thread(target=lambda: ended.append(self.commands.run(self._command, fault)))
        before = self.commands.said
        before.unlink(missing_ok=True)
        thread.start()
        answers, wrong = dict[str, str](), ""
        try:
            while not ended and not (found := re.search(r"listening on (\S+);", said(before))):
                time.sleep(0.02)
            if not ended and found:
                answers = ask(Client(found[1]))
        except openai.APIError as error:
            wrong = f"no answer: {error!r}"
        except AssertionError as error:
            wrong = str(error)
        # A server that ends takes its time.
        thread.join(LIMIT_S if wrong.startswith("no answer") else 0.1)
        if not ended:
            os.kill(self.commands.process, signal.SIGINT)
        thread.join()
        return ended[0], answers, "" if ended[0].code != ExitCode.INTERRUPTED else wrong


def said(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("failing")
    variables = {f"XDG_{kind.upper()}_HOME": str(folder / kind) for kind in ("state", "cache", "config")}
    with Commands(build(folder), folder, variables) as commands:
        yield Server(commands, folder / "served")


def tried(server: Server, call: str, every: int, ask: Ask = Client.answers) -> Iterator[str]:
    shutil.rmtree(server.work, ignore_errors=True)
    # Counts all calls, and none fails.
    ended, reference, wrong = server.run(ask, Fault(call, 1 << 30, errno.EIO, str(server.work)))
    assert reference, ended.said
    assert not wrong, ended.said
    count, codes = ended.counted, Counter[int | None]()
    for last in range(1, count + 1, every):
        shutil.rmtree(server.work, ignore_errors=True)
        number = ERRORS[call][last % len(ERRORS[call])]
        what = f"{call} {last} of {count}, {errno.errorcode[number]}"
        ended, found, wrong = server.run(ask, Fault(call, last, number, str(server.work)))
        codes[ended.code] += 1
        faults = [f"{what}: {wrong or found}"] if wrong or (found and found != reference) else []
        if ended.code in (None, ExitCode.BUG) or "Traceback" in ended.said:
            faults.append(f"{what}: exit code {ended.code}: {ended.said[-1500:]}")
        ended, found, wrong = server.run(ask)
        if wrong or found != reference:
            faults.append(f"{what}: then {wrong or found}, exit code {ended.code}: {ended.said[-500:]}")
        # Now and not at the end: a run of every k takes long.
        print(*faults, sep="\n", end="", flush=True)
        yield from faults
    print(f"{call}: {codes.total()} of {count} calls failed, exit codes {dict(codes)}")


def test_a_server_whose_call_fails_loses_no_row(server: Server) -> None:
    assert list(tried(server, "rename", 21)) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ERRORS)
def test_a_server_whose_every_call_fails_loses_no_row(call: str, server: Server) -> None:
    assert list(tried(server, call, 1)) == []


@pytest.mark.slow
@pytest.mark.parametrize("call", ERRORS)
def test_an_upload_whose_every_call_fails_leaves_no_part(call: str, server: Server) -> None:
    assert list(tried(server, call, 1, Client.uploads)) == []
