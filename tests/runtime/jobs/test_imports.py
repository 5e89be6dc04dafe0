"""Reading rows (`runtime/rows/`) starts at once: none of the heavy packages is imported for it."""

import subprocess
import sys

HEAVY = ("torch", "transformers", "numpy", "pydantic", "typer", "jinja2")


def test_the_contracts_of_rows_import_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from moedge.runtime.rows import answer_formats, preflight\n"
        "from moedge.runtime.jobs import status, summary\n"
        f"print(*[name for name in {HEAVY} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert found.stdout.split() == []
