"""README's table and picture show what was recorded."""

import json
from pathlib import Path

import pytest

from bench import ROOT, picture

RECORDS = sorted((Path(ROOT) / "docs" / "measurements").glob("*.json"))


def record(title: str, **engines: dict[int, float]) -> picture.Record:
    return {
        "title": title, "processor": "a processor", "cores": 2, "date": "2026-11-01",
        "contenders": [
            {"title": name, "tokens_per_second": {str(one): {"prompt": 1.0, "generated": at[one]} for one in at}}
            for name, at in engines.items()
        ],
    }  # fmt: skip


def test_the_readme_shows_the_records() -> None:
    records = [json.loads(file.read_text()) for file in RECORDS]
    readme = (Path(ROOT) / "README.md").read_text()
    assert records
    assert picture.with_table(readme, records) == readme
    performance = (Path(ROOT) / "docs" / "dev" / "performance.md").read_text()
    assert picture.with_tables(performance, records) == performance
    drawn = (Path(ROOT) / "docs" / "under-a-ceiling.svg").read_text()
    one = picture.shown(records)[0]
    # Only these two have labels.
    labelled = (found for engine, found in picture.best(one).items() if engine in ("moedge", "llama.cpp"))
    speeds = [speed for found in labelled for speed in found.values()]
    assert speeds
    assert all(f">{picture.speed(speed)}<" in drawn for speed in speeds)
    assert one["date"] in drawn


def test_each_engine_counts_with_its_best_setting() -> None:
    one = record("a", **{"moedge none": {1: 2.0, 8: 9.0}, "moedge int4": {1: 3.0}, "llama.cpp x": {1: 250.4}})
    assert picture.best(one) == {"moedge": {1: 3.0, 8: 9.0}, "llama.cpp": {1: 250.4}}
    assert picture.table([one]).splitlines()[2:] == ["| a, moedge | 3.0 | 9.0 |", "| a, llama.cpp | 250 | - |"]


def test_a_page_without_the_comments_is_refused() -> None:
    with pytest.raises(SystemExit, match="no lines"):
        picture.with_table("text", [record("a")])


def test_the_same_records_give_the_same_picture(tmp_path: Path) -> None:
    records = [record("a", moedge={1: 3.0, 8: 9.0}), record("b", moedge={1: 1.0})]
    for name in ("one.svg", "two.svg"):
        picture.draw(records, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
