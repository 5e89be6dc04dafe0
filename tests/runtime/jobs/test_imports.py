"""Reading rows starts at once: none of the heavy packages is imported for it."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "pydantic", "typer", "jinja2")


def test_the_contracts_of_rows_import_nothing_heavy() -> None:
    code = (
        "import pkgutil, sys, moedge.runtime.jobs as jobs\n"
        "from moedge.runtime.jobs import status, summary\n"
        "from moedge.runtime.rows import answer_formats, preflight\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split() == []
