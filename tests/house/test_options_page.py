"""`docs/tables/options.md` is what the declarations of options (`runtime/settings/options.py`) make of it, and no
option is declared anywhere else.
"""

import ast
from pathlib import Path

from support.options_page import PAGE, page

ROOT = Path(__file__).parents[2]


def test_the_page_of_options_is_that_of_their_declarations() -> None:
    assert PAGE.read_text() == page(), "write it anew: cd tests && python -m support.options_page"


def test_no_command_hands_on_its_locals() -> None:
    for path in (ROOT / "cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "locals"), path
