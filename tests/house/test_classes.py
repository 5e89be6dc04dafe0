"""A public class name stands once in the product, from `quant/` to `api/`: who reads it anywhere knows which it is."""

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOORS = ("quant", "offload", "moe", "runtime", "apps", "cli", "api")


def twice(root: Path) -> Mapping[str, list[str]]:
    """Names of public classes that stand in several files, with these."""
    found = defaultdict(list)
    for floor in FLOORS:
        for path in sorted((root / floor).rglob("*.py")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(str(path.relative_to(root)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_no_public_class_name_stands_twice() -> None:
    assert twice(ROOT) == {}


def test_one_that_does_is_noticed(tmp_path: Path) -> None:
    for name in ("moe/a.py", "cli/b.py"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("class Chunk: ...\nclass _Part: ...\n")
    assert twice(tmp_path) == {"Chunk": ["moe/a.py", "cli/b.py"]}
