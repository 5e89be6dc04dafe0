"""Objects are whole when they are made, in every folder of the product from `quant/` to `api/`: no attribute is born
outside `__init__`.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("quant", "offload", "moe", "runtime", "apps", "cli", "api")
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def assigned(function: ast.AST) -> set[str]:
    """Names of the attributes of `self` that a method sets."""
    return {
        node.attr
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def declared(owner: ast.ClassDef) -> set[str]:
    """What the body and the constructors of a class name; a property that can be set is a method, and named too."""
    names: set[str] = set()
    for node in owner.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef):
            names |= {node.name} | (assigned(node) if node.name in {"__init__", "__post_init__"} else set())
    return names


def late(text: str) -> Iterator[str]:
    for owner in ast.walk(ast.parse(text)):
        if isinstance(owner, ast.ClassDef):
            known = declared(owner)
            for method in owner.body:
                if isinstance(method, ast.FunctionDef):
                    yield from (f"{owner.name}.{name} in {method.name}" for name in sorted(assigned(method) - known))


def test_no_attribute_is_born_outside_of_init() -> None:
    assert [f"{path}: {each}" for path in SOURCES for each in late(path.read_text())] == []


def test_one_that_is_born_late_is_noticed() -> None:
    """As a job had them when it was one class: `measure` made what `load` needed."""
    text = "class R:\n def __init__(self): self.a = 1\n def measure(self):\n  self.a = 2\n  self.size, self.b[0] = 1, 2"
    assert list(late(text)) == ["R.size in measure"]
