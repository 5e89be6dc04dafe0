"""README's table and picture show what was recorded."""

import json
import math
from pathlib import Path
from xml.etree import ElementTree

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
    speeds = [speed for found in picture.best(one).values() for speed in found.values()]
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


def test_the_axis_holds_every_bar_and_has_few_lines() -> None:
    for most in (0.3, 3.0, 9.99, 10.0, 142.0, 4999.0):
        step = picture.tick_step(most)
        assert 4 <= most / step < 10
        assert step / 10 ** math.floor(math.log10(step)) in (1, 2, 5)


def test_a_picture_is_of_its_record_alone(tmp_path: Path) -> None:
    drawn = []
    for speed in (9.0, 9.0, 8.0):
        picture.draw(record("a <b>", moedge={1: 3.0, 8: speed}, **{"llama.cpp x": {1: 2.5}}), tmp_path / "one.svg")
        drawn.append((tmp_path / "one.svg").read_text())
    assert drawn[0] == drawn[1] != drawn[2]
    tree = ElementTree.fromstring(drawn[0])
    bars = tree.iter("{http://www.w3.org/2000/svg}rect")
    heights = {each.get("class"): float(each.get("height", 0)) for each in bars if each.get("height") != "12"}
    assert heights["moedge"] > heights["llama"] > 0
