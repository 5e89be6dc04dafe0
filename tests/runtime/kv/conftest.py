"""The cache's state machine and its broken variants."""

from types import ModuleType

import pytest

from support.kv import broken_caches as variants
from support.kv import cache_machine as machine


@pytest.fixture(scope="session")
def cache_machine() -> ModuleType:
    return machine


@pytest.fixture(scope="session")
def broken_caches() -> ModuleType:
    return variants
