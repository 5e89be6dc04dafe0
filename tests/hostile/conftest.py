"""Good tiny checkpoints to spoil: experts apart, stacked, stacked and transposed, and none with a tied head."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

# The helpers here serve bench/hostile.py too; tests are not a package.
sys.path.insert(0, str(Path(__file__).parent))

FAMILIES = ("qwen3_moe", "gpt_oss", "granitemoe", "gemma3_text")


@pytest.fixture(scope="session")
def good_folders(checkpoint: Callable[[str], Path]) -> Sequence[Path]:
    return [checkpoint(family) for family in FAMILIES]
