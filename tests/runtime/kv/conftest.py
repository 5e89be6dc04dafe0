"""The cache's state machine and its broken variants: modules beside the tests, which cannot import each other."""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    spec = util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cache_machine() -> ModuleType:
    return load("cache_machine")


@pytest.fixture(scope="session")
def broken_caches(cache_machine: ModuleType) -> ModuleType:
    return load("broken_caches")
