"""`docs/tables/models.md` and `runtime/shape/families.py` say the same."""

import json
from pathlib import Path

from moedge.runtime.shape.families import DENSE, MOE, WANTING
from support.models_page import page, verdicts

PAGE = Path(__file__).parents[2] / "docs" / "tables" / "models.md"


def test_every_supported_family_works_with_the_newest_release() -> None:
    found = verdicts(PAGE)
    assert {family for family in (*MOE, *DENSE) if found.get(family, [""])[-1] != "works"} == set()


def test_every_refused_family_is_listed_with_its_reason() -> None:
    found = verdicts(PAGE)
    wanted = {family: [reason] for reason, members in WANTING.items() for family in members}
    assert {family: cells for family, cells in found.items() if family not in (*MOE, *DENSE)} == wanted


def test_the_page_is_read_as_it_was_written(tmp_path: Path) -> None:
    for release, result in (("5.1", "refused: a | b"), ("5.2", "works")):
        (tmp_path / f"{release}.json").write_text(json.dumps({"llama": result}))
    (tmp_path / "page.md").write_text(page(sorted(tmp_path.glob("*.json"))))
    found = verdicts(tmp_path / "page.md")
    assert found["llama"] == ["refused: a / b", "works"]
    assert found["qwen3"] == ["not run", "not run"]
