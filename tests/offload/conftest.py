"""The stream's simulator and its seeded bugs."""

from types import ModuleType

import pytest

from support.stream import seeded_bugs as bugs
from support.stream import simulator as machine


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    return machine


@pytest.fixture(scope="session")
def seeded_bugs() -> ModuleType:
    return bugs
