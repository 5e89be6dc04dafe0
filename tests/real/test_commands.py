"""Each command (`cli/`, `apps/`) once on the real model, as a person would type it."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from openai import OpenAI

from support.real.definition import Stock
from support.real.text import QUESTIONS

pytestmark = pytest.mark.real
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
COMMON = ("--ram", "4GiB", "--gpu-mem", "0", "--quant", "none")
KEY = "the key of this test"
# A question, and what the model says with its weights as they are or in int8; it does so whatever computes them, while
# it names the capital of France in English or in French by the last bit of a logit in bf16.
ASKED = QUESTIONS.index("What is the capital of Japan?")
TOKYO = "The capital of Japan is Tokyo."


def moedge(*arguments: object, codes: tuple[int, ...] = (0,), variables: Mapping[str, str] | None = None) -> str:
    """What a command printed; it must end well."""
    words = [sys.executable, "-m", "moedge", *map(str, arguments)]
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode in codes, done.stderr
    return done.stdout


def test_run_answers_a_question(model: Path) -> None:
    said = moedge("run", model, QUESTIONS[ASKED], *COMMON, "--temperature", "0", "--max-tokens", "32")
    assert said.strip() == TOKYO


def test_batch_answers_every_row_and_ends_where_the_model_does(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [
        {"id": str(index), "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 48}
        for index, question in enumerate(QUESTIONS[ASKED : ASKED + 8])
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "answers.jsonl"
    moedge("batch", model, rows, "-o", out, *COMMON[:4], "--quant", "int8", variables={"MOEDGE_COMPUTE": "float"})
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["id"] for answer in answers] == [line["id"] for line in lines]
    assert answers[0]["text"] == TOKYO
    assert answers[0]["finish_reason"] == "stop"
    assert not any("<|im_" in answer["text"] for answer in answers)
    assert {answer["finish_reason"] for answer in answers} == {"stop", "length"}


@pytest.mark.slow
def test_documents_give_the_fields_asked_for(model: Path, tmp_path: Path) -> None:
    """Of two invoices; an answer that a model this small does not end is a failed row, and says so (exit code 3)."""
    out = tmp_path / "invoices.csv"
    folder, fields = EXAMPLES / "documents" / "invoices", "number, date: date, total: number"
    moedge("docs", model, folder, "-o", out, "--task", "extract", "--fields", fields, *COMMON, codes=(0, 3))
    with out.open() as file:
        table = {row["source"]: row for row in csv.DictReader(file)}
    assert set(table) == {"2024-017.html", "2024-021.txt"}
    answered = [row for row in table.values() if not row["error"]]
    assert answered
    for row in answered:
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", row["date"])
        assert float(row["total"]) > 0
    assert {row["error"].partition(":")[0] for row in table.values()} <= {"", "incomplete_output"}


@pytest.mark.slow
def test_the_server_answers_as_the_batch_does(model: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "moedge",
        "serve",
        str(model),
        "--port",
        "0",
        "--state-dir",
        str(tmp_path),
        *COMMON,
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"MOEDGE_API_KEY": KEY})
    assert process.stderr is not None
    try:
        address = next(found[1] for line in process.stderr if (found := re.match(r"listening on (\S+);", line)))
        client = OpenAI(base_url=address, api_key=KEY, timeout=600)
        messages = [{"role": "user", "content": QUESTIONS[ASKED]}]
        answer = client.chat.completions.create(
            model="any",
            messages=messages,
            temperature=0,
            max_tokens=32,  # type: ignore[arg-type]
        )
        assert answer.choices[0].message.content == TOKYO
        assert answer.choices[0].finish_reason == "stop"
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate()


@pytest.mark.slow
@torch.inference_mode()
def test_eval_chooses_what_transformers_does(model: Path, reference: Stock, tmp_path: Path) -> None:
    """Which of four halves ends a verse: the likeliest, and the likeliest for its length."""
    out, folder = tmp_path / "results.json", EXAMPLES / "evaluation"
    tasks = ("--tasks", "second_half", "--include-path", folder, "--dtype", "fp32", "--kv", "fp32")
    moedge("eval", model, *tasks, "--json", out, *COMMON)
    results = json.loads(out.read_text())["results"]["second_half"]
    reference.define("none", "float", "fp32", "fp32")
    rows = [json.loads(line) for line in (folder / "second_half.jsonl").read_text().splitlines()]
    right, right_for_length = 0, 0
    for row in rows:
        begin = len(reference.tokenizer.encode(row["context"]))
        likely = []
        for choice in row["choices"]:
            ids = torch.tensor(reference.tokenizer.encode(f"{row['context']} {choice}"))
            logprobs = reference.model(ids[None]).logits[0, begin - 1 : -1].log_softmax(-1)
            likely.append(float(logprobs.gather(1, ids[begin:, None]).sum()))
        by_length = [each / len(choice) for each, choice in zip(likely, row["choices"], strict=True)]
        right += likely.index(max(likely)) == row["answer"]
        right_for_length += by_length.index(max(by_length)) == row["answer"]
    found = [results[f"{metric},none"] for metric in ("acc", "acc_norm")]
    assert found == pytest.approx([right / len(rows), right_for_length / len(rows)])
