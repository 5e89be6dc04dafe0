"""The run summary against its schema, and every key against its documentation."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from moedge.runtime.jobs.summary import (
    KV,
    Experts,
    Forecast,
    KVBytes,
    Latency,
    Memory,
    Moved,
    Passes,
    Percentiles,
    Predicted,
    Rows,
    RunSummary,
    Seconds,
    Stalls,
    Throughput,
    TierMemory,
    Tokens,
    Utilisation,
    Weights,
    json_schema,
)

SCHEMA = json_schema()
FREE = ("model", "plan", "rows.finish_reasons", "rows.errors", "experts.modes", "weights.requested", "weights.packed")


def bare() -> RunSummary:
    return RunSummary(version="1", rows=Rows(3, 2, 1), tokens=Tokens(10, 20))


def full() -> RunSummary:
    times = Percentiles(0.1, 0.2, 0.3)
    tier = TierMemory(1 << 30, 1 << 29)
    return RunSummary(
        version="1",
        rows=Rows(3, 2, 1),
        tokens=Tokens(10, 20),
        command="moedge run",
        model={"id": "a"},
        plan={"tokens_per_pass": 3},
        seconds=Seconds(0.5, 1.0, 2.0, 3.5),
        throughput=Throughput(5.0, 10.0),
        predicted=Predicted(2.0, 5.0, 10.0, 3.0, 2.0, "disk", 1, 2, 3),
        latency=Latency(times, times, times),
        passes=Passes(3, 10.0, 2.0),
        bytes=Moved(1, 2, 0.5, 1.0),
        stalls=Stalls(0.5, 0.25),
        utilisation=Utilisation(0.5, 1.0, 0.0),
        memory=Memory(tier, tier, tier),
        kv=KV("int8", 32, 10, 512.0, KVBytes(8, 4, 2, 1, 1, 1, 3), 0.1, 5, 2, 1, 64),
        experts=Experts(
            1, 8, 100, 0.9, [0.9], 0.5, 10, 2, {"all": 3}, 5, 0.1, Forecast("look-ahead", 0.5, 0.5, 7, 0.1)
        ),
        weights=Weights({"nf4": 5}, {"nf4": 4, "none": 1}),
    )


def leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and path not in FREE:
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path


@pytest.mark.parametrize("summary", [bare(), full()], ids=["bare", "full"])
def test_a_summary_written_to_a_file_fits_the_schema(tmp_path: Path, summary: RunSummary) -> None:
    path = tmp_path / "run.json"
    for _ in range(2):
        summary.write(path)
    assert list(tmp_path.iterdir()) == [path]
    found = json.loads(path.read_text())
    jsonschema.validate(found, SCHEMA, jsonschema.Draft202012Validator)
    assert found["schema"] == "moedge.run/10"


def fixed(value: dict[str, Any], path: str = "") -> Iterator[dict[str, Any]]:
    """Every object of a summary whose keys the schema fixes."""
    yield value
    for key, inner in value.items():
        if isinstance(inner, dict) and (inner_path := f"{path}.{key}".lstrip(".")) not in FREE:
            yield from fixed(inner, inner_path)


def test_the_schema_requires_every_key_and_allows_no_other() -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    whole = full().as_dict()
    for inner in list(fixed(whole)):
        for key in list(inner):
            value = inner.pop(key)
            assert not validator.is_valid(whole), key
            inner[key] = value
        inner["surprise"] = None
        assert not validator.is_valid(whole)
        del inner["surprise"]
    assert validator.is_valid(whole)


def test_what_was_not_measured_is_null_and_a_missing_device_too() -> None:
    found = bare().as_dict()
    assert found["memory"]["device"] is None
    assert found["kv"]["waste"] is None
    assert found["latency"]["ttft_s"] == {"p50": None, "p95": None, "p99": None}
    with_device = {f"memory.device.{key}" for key in ("budget", "peak")}
    assert set(leaves(found)) - {"memory.device"} == set(leaves(full().as_dict())) - with_device


def test_a_number_that_is_none_is_refused_and_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    summary = bare()
    summary.seconds.total = math.nan
    with pytest.raises(ValueError, match="JSON compliant"):
        summary.write(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_every_key_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    page = page.partition("\n## The run summary\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    documented = [name for row in rows for name in row.replace("`", "").replace(" ", "").split(",")]
    assert sorted(documented) == sorted({*leaves(full().as_dict()), *leaves(bare().as_dict())})
