"""Product code imports every dependency that `pyproject.toml` declares, so that an install brings nothing unused."""

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

# Packages whose module has another name.
MODULES = {"python_pptx": "pptx", "beautifulsoup4": "bs4", "pyyaml": "yaml"}
# Releases with a known hole in what is used, and the advisory; fixed in the next release.
HOLES = {
    "jinja2": ("3.1.5", "CVE-2025-27516"), "lxml": ("6.0.4", "CVE-2026-41066"),
    "starlette": ("1.3.0", "CVE-2026-54283"),
    "h11": ("0.14.0", "CVE-2025-43859"), "python-multipart": ("0.0.29", "CVE-2026-53539"),
}  # fmt: skip
ROOT = Path(__file__).parents[2]
FLOORS = ("quant", "offload", "moe", "runtime", "apps", "cli", "api")


def imported(sources: list[str]) -> set[str]:
    """The first names of all absolute imports, those by `import_module` included."""
    found: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found.add(node.module.split(".")[0])
            elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
                found |= {str(arg.value).split(".")[0] for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def unused(requirements: list[str], modules: set[str]) -> list[str]:
    """Requirements whose module is not among `modules`: the own name with `_` for `-`, or the one in MODULES."""
    names = [Requirement(line).name.lower().replace("-", "_") for line in requirements]
    return [name for name in names if MODULES.get(name, name) not in modules]


def product_imports() -> set[str]:
    return imported([path.read_text() for floor in FLOORS for path in (ROOT / floor).rglob("*.py")])


def test_every_declared_dependency_is_imported_by_product_code() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for name, lines in project["optional-dependencies"].items()
        if name not in ("test", "bench", "all")
        for line in lines
    ]
    assert len(project["dependencies"]) > 5
    assert unused([*project["dependencies"], *extras], product_imports()) == []


def test_an_unused_dependency_is_noticed() -> None:
    modules = imported(
        [
            "import numpy.random",
            "def f():\n    from huggingface_hub import constants",
            "from . import x",
            "import_module('rich.text')",
        ]
    )
    assert modules == {"numpy", "huggingface_hub", "rich"}
    assert unused(["numpy>=1", "Jinja2>=3", "huggingface-hub", "pytest"], modules) == ["jinja2", "pytest"]


@pytest.mark.parametrize("name", HOLES)
def test_no_release_with_a_known_hole_may_be_installed(name: str) -> None:
    """The floor is in pyproject.toml with its advisory, in the oldest environment, and in force here."""
    release, advisory = HOLES[name]
    text = (ROOT / "pyproject.toml").read_text()
    lines = [line for line in re.findall(r'"([^"\n]+)"', text) if re.match(rf"{name}\b[^\[]*[<>=]", line)]
    found = [Requirement(line) for line in lines]
    assert found
    assert not any(each.specifier.contains(release) for each in found)
    beside = text[: text.index(lines[0])].splitlines()[-4:]
    assert advisory in " ".join(line for line in beside if line.strip().startswith("#")), (
        "the comment names the advisory"
    )
    pinned = (ROOT / "tests" / "matrix" / "oldest.txt").read_text()
    assert not re.search(rf"^{name}==", pinned, re.MULTILINE)
    assert all(each.specifier.contains(importlib.metadata.version(name)) for each in found)
