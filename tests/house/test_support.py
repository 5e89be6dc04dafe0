"""Tests share code by one path only (`tests/support/`), never take any from bench, and long runs continue where they
were interrupted (`tests/matrix/state.py`).
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from matrix.state import Part, run_parts

ROOT = Path(__file__).parents[2]
# The line by which benchmarks reach tests/support, and tests whose subject is the path itself.
# And a module whose text was changed, which is loaded from where it was written.
ALLOWED = {
    "bench/__init__.py", "tests/quant/test_bitsandbytes_kernels.py", "tests/quant/test_bitsandbytes_cuda.py",
    "tests/support/seeded_bugs.py",
}  # fmt: skip
HACK = re.compile(r"sys\.path\.(insert|append|extend)|sys\.path\[.*\] =|spec_from_file_location")


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()


def test_nobody_else_changes_the_path() -> None:
    found = {name for name, text in sources("tests", "bench") if HACK.search(text)}
    assert found - {"tests/house/test_support.py"} == ALLOWED


# Whatever draws without a seed: what it found could not be made to happen again.
UNSEEDED = re.compile(r"\bos\.urandom\(|\bsecrets\.|Random\(\)|default_rng\(\)|\brandom\.(random|uniform|shuffle)\(")


def unseeded(text: str) -> list[str]:
    own = "random: Random" in text or "random: random.Random" in text
    return [] if own else [line.strip() for line in text.splitlines() if UNSEEDED.search(line)]


def test_every_draw_of_a_test_has_a_seed() -> None:
    assert {name: found for name, text in sources("tests") if (found := unseeded(text))} == {}
    assert unseeded("x = os.urandom(3)\ny = random.Random(3).random()\nz = random.random()") == [
        "x = os.urandom(3)", "z = random.random()"
    ]  # fmt: skip


def test_tests_import_nothing_from_bench() -> None:
    """Those of real weights do: bench fetches and makes the models that they are about."""
    for name, text in sources("tests"):
        if name.startswith("tests/real/"):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [one for one in names if one.split(".")[0] == "bench"], name


def test_an_interrupted_run_continues_and_a_part_that_failed_runs_again(tmp_path: Path) -> None:
    ran: list[str] = []
    fails = {"b"}

    def part(name: str) -> Part:
        def check() -> list[str]:
            ran.append(name)
            if name == "c" and "c" in fails:
                raise KeyboardInterrupt
            return ["wrong"] if name in fails else []

        return Part(name, check)

    parts = [part(name) for name in "abcd"]
    fails.add("c")
    with pytest.raises(KeyboardInterrupt):
        run_parts("run", parts, tmp_path, code="1")
    fails.remove("c")
    assert run_parts("run", parts, tmp_path, code="1") == ["run: b: wrong"]
    assert ran == [*"abc", *"bcd"], "what passed is skipped"
    assert run_parts("run", parts, tmp_path, code="2") == ["run: b: wrong"]
    assert ran[6:] == [*"abcd"], "other code has passed nothing"
    fails.clear()
    assert run_parts("run", parts, tmp_path, code="2") == []
    assert ran[10:] == ["b"]
    assert not list(tmp_path.iterdir()), "a run that has passed begins anew"
    assert run_parts("run", parts, tmp_path, code="2") == []
    assert ran[11:] == [*"abcd"]


def test_a_state_that_was_cut_off_is_none(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"code": "1", "pas')
    ran: list[str] = []
    assert run_parts("run", [Part("a", lambda: ran.append("a") or [])], tmp_path, code="1") == []
    assert ran == ["a"]
