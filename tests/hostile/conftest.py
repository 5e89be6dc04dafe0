"""Good tiny checkpoints to spoil: experts apart, stacked, stacked and transposed, and none with a tied head."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

FAMILIES = ("qwen3_moe", "gpt_oss", "granitemoe", "gemma3_text")


@pytest.fixture(scope="session")
def good_folders(checkpoint: Callable[[str], Path]) -> Sequence[Path]:
    return [checkpoint(family) for family in FAMILIES]
