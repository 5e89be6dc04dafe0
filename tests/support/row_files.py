"""JSON lines, written and read: the inputs and outputs of jobs."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def write_rows(path: Path, rows: Iterable[dict[str, Any]], **options: Any) -> Path:
    """`options` are json.dumps'; returns `path`."""
    path.write_text("".join(json.dumps(row, **options) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> Rows:
    return [json.loads(line) for line in path.read_text().splitlines()]
