"""The product stays within its budget of statements (`tests/house/statements.toml`): what nobody has to read is what is
not there.

Counted are `ast.stmt` nodes but docstrings and other bare constants; lines, blanks and comments are no lever.
"""

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = tomllib.loads((Path(__file__).parent / "statements.toml").read_text())
CORE = ("runtime", "offload", "quant", "moe")
ALL = (*CORE, "cli", "api", "apps")


def statements(text: str) -> int:
    nodes = ast.walk(ast.parse(text))
    return sum(isinstance(node, ast.stmt) and not _is_bare_constant(node) for node in nodes)


def _is_bare_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@cache
def of_folder(folder: str) -> int:
    return sum(statements(path.read_text()) for path in (ROOT / folder).rglob("*.py"))


def counted(folders: tuple[str, ...]) -> int:
    return sum(map(of_folder, folders))


def test_the_product_is_within_its_budget() -> None:
    assert counted(CORE) <= BUDGET["core"], "delete, or raise tests/house/statements.toml in a commit that says why"
    assert counted(ALL) <= BUDGET["all"], "delete, or raise tests/house/statements.toml in a commit that says why"


def test_the_budget_is_not_a_promise_of_the_past() -> None:
    """Whoever deletes lowers it: a budget with slack bounds nothing."""
    assert BUDGET["core"] - counted(CORE) < 500
    assert BUDGET["all"] - counted(ALL) < 500


def test_statements_are_counted_and_words_are_not() -> None:
    assert statements('"""Doc."""\nimport a\ndef f():\n    """Doc."""\n    ...\n    if a: return 1\n') == 4
    assert statements("x = 1\n\n\n# a comment\ny = (\n  2,\n)\n") == 2
