"""Benchmarks: `python -m bench.NAME --help`, from the repository's root.

The line below is the one by which they reach what they share with the tests, the packages `support` and `matrix`.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(1, str(ROOT / "tests"))
