"""Who reads a module finds its tests (`tests/`, `bench/`): a test file has its name, or says which paths it tests."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What a test file can have the name of: folders and modules, those of the CPU library too.
MODULES = {"", ".py", ".cpp", ".h"}


@cache
def names_of_modules(folder: Path) -> set[str]:
    return {path.stem for path in folder.rglob("*") if path.suffix in MODULES}


def has_name_of_a_module(test: Path, root: Path) -> bool:
    """Whether it is that of a module or folder, below the folder of the product that the test's folder mirrors."""
    parts = test.relative_to(root).parts
    mirrored = root / (parts[1] if parts[0] == "tests" else parts[0])
    return test.stem.removeprefix("test_") in names_of_modules(mirrored)


def said_paths(test: Path) -> list[str]:
    """Paths in backticks in the first paragraph of the docstring, other test files excepted."""
    first = (ast.get_docstring(ast.parse(test.read_text())) or "").partition("\n\n")[0]
    named = re.findall(r"`(\w[\w./-]*)`", first)
    return [name for name in named if ("/" in name or "." in name) and not Path(name).name.startswith("test_")]


def astray(root: Path) -> dict[str, str]:
    """Test files of a repository that do not lead to what they test, each with what is wrong."""
    wrong: dict[str, str] = {}
    for test in sorted(path for folder in ("tests", "bench") for path in (root / folder).rglob("test_*.py")):
        named = said_paths(test)
        if gone := [name for name in named if "/" in name and not (root / name).exists()]:
            wrong[str(test.relative_to(root))] = f"names what is not there: {', '.join(gone)}"
        elif not has_name_of_a_module(test, root) and not any((root / name).exists() for name in named):
            wrong[str(test.relative_to(root))] = (
                "has no module's name, and its docstring begins without a path in backticks"
            )
    return wrong


def test_every_test_file_leads_to_what_it_tests() -> None:
    assert astray(ROOT) == {}


def test_a_test_file_that_names_nothing_or_what_is_gone_is_noticed(tmp_path: Path) -> None:
    for folder in ("runtime/kv", "cli", "tests/runtime", "bench"):
        (tmp_path / folder).mkdir(parents=True)
    for module in ("runtime/kv/cache.py", "cli/plan.py", "bench/scale.py"):
        (tmp_path / module).touch()
    tests = {
        "tests/runtime/test_cache.py": "",
        "tests/runtime/test_windows.py": '"""Windows (`runtime/kv/cache.py`).\n\nMore."""',
        "tests/runtime/test_folder.py": '"""All of `runtime/kv/`."""',
        "bench/test_scale.py": "",
        "tests/runtime/test_silent.py": '"""Windows.\n\nOf `runtime/kv/cache.py`, said too late."""',
        "tests/runtime/test_gone.py": '"""Of `runtime/kv/gone.py` and `runtime/kv/cache.py`."""',
        "tests/runtime/test_plan.py": '"""A module of another folder has this name."""',
        "tests/runtime/test_neighbour.py": '"""As `tests/runtime/test_cache.py`."""',
    }
    for name, text in tests.items():
        (tmp_path / name).write_text(text)
    assert list(astray(tmp_path)) == [
        f"tests/runtime/test_{name}.py" for name in ("gone", "neighbour", "plan", "silent")
    ]
