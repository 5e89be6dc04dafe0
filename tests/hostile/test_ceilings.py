"""Rows that ask for much, at the smallest budget that moedge names (`runtime/plan/`): the ceiling holds, watched from
outside.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.tiny_families import save_tiny

# A dense model, mixtures with and without shared experts, sinks and windows, latents, states of recurrent layers.
FAMILIES = ("qwen3", "qwen3_moe", "gpt_oss", "gemma3_text", "deepseek_v3", "qwen3_next", "mixtral", "granitemoe")
FORMATS = ("none", "int8", "int4", "mxfp4")
TEXT = "the quick (brown) fox_jumps\n"


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Name three."}], "max_tokens": 12, **more}


def schema(content: dict[str, Any]) -> dict[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": content}})


ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": "hi", "max_tokens": 2},
    {"prompt": TEXT * 150_000, "max_tokens": 2},
    {"prompt": TEXT * 2, "max_tokens": 16, "logprobs": 20},
    chat(logprobs=True, top_logprobs=20),
    chat(n=64, temperature=1.0),
    chat(n=16, temperature=1.0, logprobs=True, top_logprobs=20),
    schema({"enum": [f"label {index}" for index in range(3_000)]}),
    schema({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(100)}}),
    schema({"type": "array", "items": {"type": "integer"}}),
    chat(structured_outputs={"regex": "[a-z]{1,200}( [0-9]{1,50}){1,20}"}),
    chat(stop=[f"stop {index}" for index in range(4)]),
    chat(logit_bias={str(token): 1 for token in range(300)}),
    {"messages": [{"role": "user", "content": "Why?"}] * 5, "max_tokens": 4},
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("ceilings")

    def model(family: str) -> Path:
        folder = root / family
        if not folder.exists():
            save_tiny(family, folder)
        return folder

    return model


def line(index: int, body: dict[str, Any]) -> dict[str, Any]:
    """A row in the form of OpenAI's batches, which has fields that short rows lack."""
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": str(index), "method": "POST", "url": url, "body": {"model": "x", **body}}


def watched(command: list[str]) -> tuple[int, str, int]:
    """Exit code, stderr, and the most bytes that the process had resident, as the system saw it."""
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        found, most = psutil.Process(process.pid), 0
        while process.poll() is None:
            try:
                most = max(most, found.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.01)
        assert process.stderr is not None
        return process.wait(), process.stderr.read(), most


@pytest.mark.sample("mixtral-int8")
@pytest.mark.parametrize("quant", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_ask_for_much_keep_to_the_smallest_budget(
    family: str,
    quant: str,
    models: Callable[[str], Path],
    tmp_path: Path,
    cli: Callable[..., int],
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    rows.write_text("".join(json.dumps(line(index, body)) + "\n" for index, body in enumerate(ROWS)))
    command = [sys.executable, "-m", "moedge", "batch", str(models(family)), str(rows), "-o", str(out), "--gpu-mem",
               "0", "--quant", quant, "--lenient", "-q", "--disk-dir", str(tmp_path / "stores"), "--ram"]  # fmt: skip
    cli(*command[3:], "64MiB")
    named = re.findall(r"--ram (\d+)MiB", capsys.readouterr().err)
    assert named
    code, said, most = watched([*command, f"{named[-1]}MiB"])
    print(f"{family} {quant}: {most >> 20} of {named[-1]} MiB, exit code {code}")
    assert code in (0, 3), said[-2000:]
    assert most <= int(named[-1]) << 20
    paths = (out, out.with_suffix(".errors.jsonl"))
    answers = [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]
    assert Counter(answer["custom_id"] for answer in answers) == {str(index): 1 for index in range(len(ROWS))}
    bodies = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
    refused = {row: body["error"]["code"] for row, body in bodies.items() if "error" in body}
    print(refused)
    assert refused["1"] == "context_length_exceeded"
    assert "0" not in refused
    assert len(refused) < len(ROWS) / 2
