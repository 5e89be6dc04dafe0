"""The house stands: imports run downhill, every package is listed, no file or function outgrows its room."""

import ast
import statistics
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = {"quant": 1, "offload": 1, "moe": 2, "runtime": 3, "cli": 4}
MAX_FILE_LINES, MEDIAN_FILE_LINES = 600, 120
MAX_FUNCTION_LINES, MEDIAN_FUNCTION_LINES = 60, 8
MAX_PARAMETERS = 8


def sources() -> list[Path]:
    return sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def imported_folders(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, top folder) of every import of our own, type-only ones included."""
    parts = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - node.level + 1]
            target = (*base, *(node.module or "").split("."))
            yield from ((node.lineno, name) for name in [target[0] or node.names[0].name])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "moedge":
            yield node.lineno, (node.module or "").split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (
                (node.lineno, name.name.split(".")[1]) for name in node.names if name.name.startswith("moedge.")
            )


def uphill(paths: list[Path], root: Path) -> list[str]:
    breaches = []
    for path in paths:
        own = path.relative_to(root).parts[0]
        for line, other in imported_folders(path, root):
            if other != own and FLOORS[other] >= FLOORS[own]:
                breaches.append(f"{path.relative_to(root)}:{line} imports {other}")
    return breaches


def listed_packages(pyproject: Path) -> set[str]:
    return set(tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["packages"])


def packages_on_disk(root: Path) -> set[str]:
    found = (path.parent.relative_to(root).parts for floor in FLOORS for path in (root / floor).rglob("__init__.py"))
    return {".".join(("moedge", *parts)) for parts in found}


def test_imports_run_downhill() -> None:
    assert uphill(sources(), ROOT) == []


def test_an_uphill_import_is_seen(tmp_path: Path) -> None:
    for floor in FLOORS:
        (tmp_path / floor).mkdir()
    bad = tmp_path / "quant" / "bad.py"
    bad.write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..runtime.engine import Engine\n")
    sibling = tmp_path / "offload" / "bad.py"
    sibling.write_text("from ..quant import format\n")
    assert uphill([bad, sibling], tmp_path) == ["quant/bad.py:3 imports runtime", "offload/bad.py:1 imports quant"]


def test_every_package_is_listed() -> None:
    assert listed_packages(ROOT / "pyproject.toml") == packages_on_disk(ROOT) | {"moedge.demo", "moedge.demo.model"}


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            assert (node.end_lineno or 0) - node.lineno < MAX_FUNCTION_LINES, node.name
            # A command's parameters are its options: they are the user's vocabulary, not a signature to keep short.
            if path.parent.name != "cli":
                assert len(node.args.args) + len(node.args.kwonlyargs) <= MAX_PARAMETERS + 1, node.name


def test_the_typical_file_and_function_are_short() -> None:
    files = [path.read_text() for path in sources()]
    functions = [
        (node.end_lineno or 0) - node.lineno + 1
        for text in files
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    assert statistics.median(text.count("\n") for text in files) <= MEDIAN_FILE_LINES
    assert statistics.median(functions) <= MEDIAN_FUNCTION_LINES


def test_source_uses_relative_imports() -> None:
    """Absolute ones would import a module twice when Python runs in the repository's root."""
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] not in {"moedge", *FLOORS}, f"{path}:{node.lineno}"
