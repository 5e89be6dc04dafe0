"""The house (`docs/dev/design.md`) stands: imports run downhill, nothing runs in circles, no file or function outgrows
its room.
"""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.import_graph import DOORS, ImportGraph, circles

ROOT = Path(__file__).parents[2]
FLOORS = {"quant": 1, "offload": 1, "moe": 2, "runtime": 3, "api": 4, "cli": 5, "apps": 6}
# The floors inside runtime, from the ground up: a folder imports folders of lower lines only, or its own.
RUNTIME = [
    {"settings"},
    {"text", "shape"},
    {"sampling", "kv"},
    {"rows"},
    {"engine", "jobs.journal", "attention.kernels"},
    {"attention", "model.recurrent"},
    {"model", "plan"},
    {"model.fused", "weights", "source"},
    {"loading"},
    {"calibration"},
    {"jobs"},
    {"evaluation"},
]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8


@cache
def house() -> ImportGraph:
    return ImportGraph(ROOT, tuple(FLOORS))


def floor_of(folder: str) -> tuple[int, int]:
    """(floor of the house, floor inside runtime); raises KeyError for a folder that has none."""
    top, _, inner = folder.partition(".")
    if top == "moedge":
        # The doors of the package: nobody imports them.
        return len(FLOORS) + 1, 0
    if top != "runtime" or not inner:
        return FLOORS[top], 0
    floors = {name: number for number, names in enumerate(RUNTIME, 1) for name in names}
    return FLOORS[top], floors[inner]


def uphill(graph: ImportGraph) -> list[str]:
    breaches = []
    for folder, imported in sorted(graph.folders.items()):
        for other in sorted(imported):
            same_top = folder.split(".")[0] == other.split(".")[0]
            inside = same_top and folder.split(".")[0] != "runtime"
            if not inside and floor_of(other) >= floor_of(folder):
                breaches.append(f"{folder} imports {other}")
    return breaches


def listed_packages(pyproject: Path) -> set[str]:
    return set(tomllib.loads(pyproject.read_text())["tool"]["setuptools"]["packages"])


def test_imports_run_downhill() -> None:
    assert uphill(house()) == []


def test_no_files_and_no_folders_import_in_circles() -> None:
    assert circles(house().files) == []
    assert circles(house().folders) == []


def test_the_package_imports_nothing_of_the_product_until_a_name_is_used() -> None:
    """Every import of a module runs `api/__init__.py` first: what it imported by itself would be below everything."""
    body = ast.parse((ROOT / "api" / "__init__.py").read_text()).body
    assert [node.module for node in body if isinstance(node, ast.ImportFrom) and node.level] == []
    assert {module for module, path in house().paths.items() if house().folder(module) == "moedge"} == DOORS


def make_house(root: Path, files: dict[str, str]) -> ImportGraph:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.write_text(text)
    for floor in FLOORS:
        (root / floor).mkdir(exist_ok=True)
        (root / floor / "__init__.py").touch()
    return ImportGraph(root, tuple(FLOORS))


def test_an_uphill_import_is_seen(tmp_path: Path) -> None:
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..runtime.engine.engine import Engine\n"
    files = {"runtime/engine/engine.py": "Engine = 1\n", "runtime/kv/cache.py": "from ..engine import engine\n"}
    made = make_house(tmp_path, {"quant/bad.py": typed, "offload/bad.py": "from ..quant import bad\n", **files})
    assert uphill(made) == [
        "offload imports quant",
        "quant imports runtime.engine",
        "runtime.kv imports runtime.engine",
    ]


def test_modules_of_the_package_itself_have_a_floor(tmp_path: Path) -> None:
    files = {
        "api/llm.py": "from .cli.main import main\nfrom .runtime.jobs import job\n",
        "api/ray.py": "from .apps.cluster.model import Model\n",
        "apps/cluster/model.py": "from ... import LLM\nfrom ...llm import Model\n",
        "cli/main.py": "from ..ray import Model\nimport moedge.llm\n",
        "moe/expert.py": "from .. import LLM\n",
        "runtime/jobs/job.py": "from ... import llm\nfrom moedge.llm import LLM\n",
    }
    made = make_house(tmp_path, files)
    assert uphill(made) == ["api imports cli", "cli imports moedge", "moe imports moedge", "runtime.jobs imports api"]
    assert made.files["cli.main"] == {"api.ray", "api.llm"}


def test_circles_of_files_and_of_folders_are_seen(tmp_path: Path) -> None:
    files = {"moe/a.py": "from . import b\n", "moe/b.py": "def f():\n    from .a import x\n"}
    folders = {
        "quant/c.py": "from .kernels.d import e\n",
        "quant/kernels/d.py": "from moedge.quant.f import g\n",
        "quant/f.py": "",
    }
    made = make_house(tmp_path, files | folders)
    assert circles(made.files) == [{"moe.a", "moe.b"}]
    assert circles(made.folders) == [{"quant", "quant.kernels"}]


def test_every_folder_of_runtime_has_a_floor_and_none_of_its_files_is_loose() -> None:
    folders = {folder.removeprefix("runtime.") for folder in house().folders if folder.startswith("runtime.")}
    assert folders == set().union(*RUNTIME)
    assert [path.name for path in (ROOT / "runtime").glob("*.py")] == ["__init__.py"]


def test_every_package_is_listed() -> None:
    folders = {module for module, path in house().paths.items() if path.name == "__init__.py"}
    # The folder api is moedge itself.
    on_disk = {"moedge" if folder == "api" else f"moedge.{folder}" for folder in folders}
    assert listed_packages(ROOT / "pyproject.toml") == on_disk | {"moedge.demo", "moedge.demo.model"}


def outgrown(path: Path) -> Iterator[str]:
    text = path.read_text()
    if (lines := text.count("\n")) > MAX_FILE_LINES:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            if (lines := (node.end_lineno or 0) - node.lineno) >= MAX_FUNCTION_LINES:
                yield f"{path}: {node.name} has {lines} lines"
            # A command's parameters are its options: they are the user's vocabulary, not a signature to keep short.
            parameters = len(node.args.args) + len(node.args.kwonlyargs)
            if parameters > MAX_PARAMETERS + 1 and path.parent.name != "cli" and path.name != "command.py":
                yield f"{path}: {node.name} takes {parameters} parameters"


def test_files_and_functions_stay_small() -> None:
    assert [each for path in house().paths.values() for each in outgrown(path)] == []


def test_source_uses_relative_imports() -> None:
    """Absolute ones would import a module twice when Python runs in the repository's root."""
    for path in house().paths.values():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").split(".")[0] not in {"moedge", *FLOORS}, f"{path}:{node.lineno}"
