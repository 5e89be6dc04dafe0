"""The fake device, the simulator's seeded bugs, and tiny models to run: modules beside the tests."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.runtime.loading.prepare import prepare
from moedge.runtime.settings.budgets import Budgets
from moedge.runtime.settings.process import ALLOCATOR, ALLOCATOR_VARIABLES
from moedge.runtime.source.model_source import open_source

HERE = Path(__file__).parent


def load(name: str, path: Path) -> ModuleType:
    if name not in sys.modules:
        spec = util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    return load("fake_device", HERE / "fake_device.py")


@pytest.fixture(scope="session")
def host_cost() -> ModuleType:
    return load("host_cost", HERE / "host_cost.py")


@pytest.fixture(scope="session")
def modes() -> ModuleType:
    return load("expert_modes", HERE / "expert_modes.py")


@pytest.fixture(scope="session")
def bugs(fakes: ModuleType) -> ModuleType:
    return load("seeded_bugs", HERE.parent / "offload" / "stream" / "seeded_bugs.py")


@pytest.fixture(scope="session")
def tiny_engine() -> ModuleType:
    return load("tiny_engine", HERE / "tiny_engine.py")


@pytest.fixture(scope="session")
def case(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, tiny_engine: ModuleType
) -> Iterator[Callable[..., Any]]:
    """`case(family, quant)` is a tiny model with a store, made once a session."""
    made: dict[tuple[str, str], Any] = {}
    with ExitStack() as opened:

        def make(family: str, quant: str = "none") -> Any:
            if (family, quant) not in made:
                source = opened.enter_context(open_source(str(checkpoint(family))))
                store = tmp_path_factory.mktemp("store") / family
                prepare(source, store, quant, "fp32", Budgets())
                made[family, quant] = tiny_engine.Case(source, store, tiny_engine.exact(quant))
            return made[family, quant]

        yield make


@pytest.fixture(autouse=True)
def segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line settles it."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, ALLOCATOR)
