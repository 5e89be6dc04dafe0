"""The stream's simulator and its seeded bugs: modules beside the tests, which cannot import each other."""

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest


def load(name: str) -> ModuleType:
    spec = util.spec_from_file_location(name, Path(__file__).parent / "stream" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def simulator() -> ModuleType:
    return load("simulator")


@pytest.fixture(scope="session")
def seeded_bugs(simulator: ModuleType) -> ModuleType:
    return load("seeded_bugs")
