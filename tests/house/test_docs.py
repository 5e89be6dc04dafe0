"""What the docs say of the contracts is what the code does."""

import dataclasses
import re
from pathlib import Path

from moedge.cli.options.exit_codes import OF_ERROR, ExitCode
from moedge.runtime.shape.model_shape import ModelShape

DOCS = Path(__file__).parents[2] / "docs"


def table_rows(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text().splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in rows if not set(row[0]) <= {"-"}]


def test_every_exit_code_is_documented() -> None:
    documented = {(row[0], row[1]) for row in table_rows("exit-codes.md")[1:]}
    assert documented == {(str(code.value), code.name) for code in ExitCode}


def test_a_refusal_is_never_ok_a_bug_or_a_partial_success() -> None:
    assert not {ExitCode.OK, ExitCode.BUG, ExitCode.SOME_ROWS_FAILED} & set(OF_ERROR.values())


def test_every_field_of_the_shape_is_documented() -> None:
    documented = [row[0] for row in table_rows("model-shape.md")[1:]]
    assert documented == [field.name for field in dataclasses.fields(ModelShape)]


def test_nothing_in_the_repository_names_a_path_of_one_machine() -> None:
    pattern = re.compile(r"(?<![\w.])/(work|home/\w+|root)/")
    root = DOCS.parent
    for path in [*root.glob("*.md"), *DOCS.rglob("*.md"), *(root / "bench").rglob("*.py"), root / "pyproject.toml"]:
        assert not pattern.search(path.read_text()), path


def test_every_promise_of_bits_is_a_test_that_exists() -> None:
    promises = table_rows("exactness.md")[1:]
    seen = [row for row in promises if len(row) == 5]
    assert len(seen) > 15
    for what, default, deterministic, test, setting in seen:
        if default == deterministic == "not promised":
            assert (test, setting) == ("", ""), what
            continue
        file, name = test.split("::")
        assert f"def {name}(" in (DOCS.parent / file).read_text(), test
        assert re.match("deterministic; |default; |both", setting), f"{test}: no setting"


def test_every_fault_of_memory_and_settings_is_made_to_happen() -> None:
    rows = table_rows("faults.md")[1:]
    assert [row[0] for row in rows] == [*(f"M{n}" for n in range(1, 11)), *(f"K{n}" for n in range(1, 6))]
    for case, *_, seen_by in rows:
        named = re.findall(r"(tests/[\w/]+\.py)::(test_\w+)", seen_by)
        assert named, case
        for file, test in named:
            text = (DOCS.parent / file).read_text()
            assert f"def {test}(" in text
            assert re.search(rf"\b{case}\b", text, re.IGNORECASE) or f"_{case.lower()}_" in text, (
                f"{file} names no {case}"
            )
