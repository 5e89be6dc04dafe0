"""`import support_path` puts tests/ on the path: the one line by which a benchmark reaches tests/support."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
