"""The fake device, the simulator's seeded bugs, and tiny models to run."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge.computing import ALLOCATOR, ALLOCATOR_VARIABLES
from moedge.runtime.loading.prepare import prepare
from moedge.runtime.sampling.kernel import RowSizes, draw
from moedge.runtime.settings.settings import Budgets
from moedge.runtime.source.model_source import open_source
from moedge.runtime.weights import key_offsets
from support.device import expert_modes, fake_device
from support.device import host_cost as costs
from support.device import host_kv as hosted
from support.device import segments as reserved
from support.device import tiny_engine as tiny
from support.stream import seeded_bugs


@pytest.fixture(scope="session")
def fakes() -> ModuleType:
    return fake_device


@pytest.fixture(scope="session")
def host_cost() -> ModuleType:
    return costs


@pytest.fixture(scope="session")
def host_kv() -> ModuleType:
    return hosted


@pytest.fixture(scope="session")
def modes() -> ModuleType:
    return expert_modes


@pytest.fixture(scope="session")
def bugs() -> ModuleType:
    return seeded_bugs


@pytest.fixture(scope="session")
def segments() -> ModuleType:
    return reserved


@pytest.fixture(scope="session")
def tiny_engine() -> ModuleType:
    return tiny


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
                importance = tiny_engine.importance_for(quant)
                prepare(source, store, quant, "fp32", Budgets().on_cpu(), importance=importance)
                made[family, quant] = tiny_engine.Case(source, store, tiny_engine.exact(quant))
            return made[family, quant]

        yield make


@pytest.fixture(autouse=True, scope="module")
def what_the_interpreter_can_bear() -> Iterator[None]:
    """Fewer tokens for the offsets of keys, and narrow chunks for the kernel that draws: each is measured or tried at
    every load, and the interpreter takes a second for what a device does in a millisecond.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_offsets, "MAX_TOKENS", 5)
        patch.setattr(draw, "__defaults__", (RowSizes(128, 128),))
        yield


@pytest.fixture(autouse=True)
def segments_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command line settles it."""
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.setenv(name, ALLOCATOR)
