"""Product code imports every dependency that pyproject.toml declares, so that an install brings nothing unused."""

import ast
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

# Packages whose module has another name.
MODULES = {"python_pptx": "pptx", "beautifulsoup4": "bs4", "pyyaml": "yaml"}
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
