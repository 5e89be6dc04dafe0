"""What JSON schemas cost: 500 rows of the demo model with a schema, and the same tokens without one.

    python -m bench.structured

Both jobs have the same prompts, settings and number of tokens per row: the second one generates, with no end token,
exactly as many as the first one did. They run in turns; the figure is the median ratio of their tokens per second.
Every answer is checked with jsonschema.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jsonschema

from moedge.runtime.jobs.job import Measured, Running
from moedge.runtime.jobs.request import BatchRequest
from moedge.runtime.jobs.session import Checked
from moedge.runtime.settings.settings import Settings

Row = dict[str, Any]
NAMES = ("Moses", "Aaron", "David", "Saul", "Jonah", "Ruth", "Esther", "Job", "Daniel", "Peter", "Paul", "Mary")


def strict(**properties: Any) -> Row:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text(most: int) -> Row:
    return {"type": "string", "minLength": 1, "maxLength": most}


AGE = {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 120}, {"type": "null"}]}
# All of them bounded: a number of any length is one that a small model may never end, and what is cut is no answer.
SCHEMAS = [
    strict(name=text(20), deeds={"type": "array", "items": text(30), "minItems": 1, "maxItems": 4}),
    strict(kind={"enum": ["king", "prophet", "judge", "other"]}, old={"type": "boolean"}, verse=text(120)),
    strict(chapter={"type": "integer", "minimum": 1, "maximum": 150}, summary=text(160)),
    strict(who=strict(name=text(9), age=AGE), at={"anyOf": [text(20), strict(x=text(5))]}),
    strict(date={"type": "string", "format": "date"}, code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}$"}),
]  # fmt: skip


def rows(count: int, max_tokens: int) -> list[Row]:
    return [
        {
            "id": f"row-{index}",
            "messages": [{"role": "user", "content": f"Tell of {NAMES[index % len(NAMES)]}."}],
            "temperature": 0.7 if index % 5 else 0.0,
            "max_tokens": max_tokens,
            "return_token_ids": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMAS[index % len(SCHEMAS)]},
            },
        }
        for index in range(count)
    ]


def unconstrained(row: Row, answer: Row) -> Row:
    free = {name: value for name, value in row.items() if name != "response_format"}
    return free | {"max_tokens": len(answer["token_ids"]), "ignore_eos": True}


def run(model: Path, job: list[Row], max_sequences: int) -> tuple[list[Row], float]:
    """The answers, and tokens per second of the passes."""

    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(json.dumps(row) + "\n" for row in job))
        with Checked.open(BatchRequest(str(model), source, output, Settings(max_sequences=max_sequences))) as checked:
            running = Running(Measured.of(checked).plan().load())
            for _ in running.passes():
                pass
            rate = running.end().summary.throughput.generated_tok_s or 0.0
        return [json.loads(line) for line in output.read_text().splitlines()], rate


def is_valid(row: Row, answer: Row) -> bool:
    schema = row["response_format"]["json_schema"]["schema"]
    try:
        jsonschema.validate(json.loads(answer["text"]), schema)
    except (ValueError, TypeError, jsonschema.ValidationError):
        return False
    return answer["finish_reason"] == "stop"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=500)
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--max-sequences", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    job, ratios = rows(arguments.rows, arguments.max_tokens), []
    with as_file(files("moedge.demo")) as bundle:
        for _ in range(arguments.repeats):
            answers, rate = run(bundle / "model", job, arguments.max_sequences)
            free = [unconstrained(row, answer) for row, answer in zip(job, answers, strict=True)]
            _, free_rate = run(bundle / "model", free, arguments.max_sequences)
            ratios.append(rate / free_rate)
            num_valid = sum(map(is_valid, job, answers))
            num_tokens = sum(len(answer["token_ids"]) for answer in answers)
            print(
                f"{num_valid} of {len(job)} valid; {num_tokens:,} tokens; "
                f"{rate:,.0f} tokens/s with schemas, {free_rate:,.0f} without: {ratios[-1]:.1%}",
                flush=True,
            )
    print(f"median: {statistics.median(ratios):.1%} of the unconstrained speed")


if __name__ == "__main__":
    main()
