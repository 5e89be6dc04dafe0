"""Rows that were cut on purpose and continued by `jobs resume --cut` (`runtime/jobs/session.py`) give the tokens of an
uncut run, with `--deterministic`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Rows = list[dict[str, Any]]
MODEL = Path(__file__).parents[2] / "examples" / "tiny_moe" / "model"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
KINDS: Rows = [
    {},
    {"temperature": 0.9, "n": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 0.9, "stop": [" the", "and God"]},
    {"temperature": 0.7, "top_p": 0.9, "ignore_eos": True},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}},
]


def row(number: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"Tell of Moses, {number}."}], **KINDS[number % len(KINDS)]}
    if number % 4:
        return {"id": str(number), "return_token_ids": True, **body}
    chat = {**body, "logprobs": True, "top_logprobs": 2}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": chat}


def answers(path: Path) -> list[str]:
    """Lines without the time of the job."""
    return [re.sub(r'"created":\d+', "", line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(("count", "dtype"), [(6, "fp32"), pytest.param(500, "bf16", marks=pytest.mark.slow)])
def test_cut_rows_end_as_those_of_an_uncut_run(
    count: int, dtype: str, cli: Callable[..., int], rows_file: Callable[[Path, Rows], Path], tmp_path: Path
) -> None:
    source = rows_file(tmp_path / "in.jsonl", [row(number) for number in range(count)])
    batch = ["batch", MODEL, source, "--dtype", dtype, "--deterministic", "-q"]
    cut, whole = tmp_path / "cut.jsonl", tmp_path / "whole.jsonl"
    assert cli(*batch, "--max-tokens", 4, "-o", cut) == 3, "JSON that was cut is an error row"
    errors = [json.loads(line) for line in (tmp_path / "cut.errors.jsonl").read_text().splitlines()]
    assert errors
    assert "incomplete_output" in json.dumps(errors[0])
    # With other batches than those of the uncut run.
    resume = ["jobs", "resume", cut, "--cut", "-q", "--max-tokens"]
    cli(*resume, 9)
    code = cli(*resume, 28)
    assert cli(*batch, "--max-tokens", 28, "-o", whole, "--max-sequences", max(5, count // 20)) == code
    assert answers(cut) == answers(whole)
    assert len(answers(whole)) > count // 2
