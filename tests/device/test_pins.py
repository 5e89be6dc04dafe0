"""What is page-locked of each arena of host memory is what the plan has for it (`runtime/plan/memory_ledger.py`), and
within four fifths of what the machine allows.
"""

from contextlib import closing
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from moedge.offload.device import HostMemory, PinBudget
from moedge.offload.machine.hardware import Hardware
from moedge.offload.machine.profile import Machine, PinLimit
from moedge.quant.kernels.upload import RING_NBYTES
from moedge.runtime.kv.cache import ParkingMemory
from moedge.runtime.loading.engine_loader import load_engine
from moedge.runtime.loading.machine_memory import limit_pins
from moedge.runtime.plan.memory_ledger import HOST_KV, PARKED, RINGS, STAGED, MemoryLedger
from moedge.runtime.weights import streaming as lanes

PAGE = 4096
ITEMS = (STAGED, RINGS, PARKED, HOST_KV)


def parked(tiny: Any, plan: Any) -> Any:
    """With room for as many parked blocks as the cache has."""
    return replace(plan, parked_blocks=plan.kv_blocks)


PLANS = {
    "held": lambda tiny, device, host_kv: tiny.plan(device, 1.0),
    "streamed": lambda tiny, device, host_kv: tiny.plan(device, 0.0),
    "three tiers": lambda tiny, device, host_kv: tiny.three_tiers(device),
    "parked": lambda tiny, device, host_kv: parked(tiny, tiny.plan(device, 0.0)),
    "parked, three tiers": lambda tiny, device, host_kv: parked(tiny, tiny.three_tiers(device)),
    "host KV": lambda tiny, device, host_kv: host_kv.hosted(tiny, tiny.plan(device, 0.0), 2, 2, 2),
    "host KV, three tiers": lambda tiny, device, host_kv: host_kv.hosted(tiny, tiny.three_tiers(device), 2, 2, 2),
}


def planned(plan: Any, tiny: Any) -> dict[str, int]:
    """Bytes to be page-locked by arena; without a disk, the host has no rings."""
    arenas = MemoryLedger.of(plan, tiny.source.shape).tiers["host"].arenas
    found = {name: arenas[name].planned for name in ITEMS if name in arenas}
    return found if plan.staging.disk_nbytes else {**found, RINGS: 0}


def page_locked(loaded: Any, fake: Any) -> dict[str, int]:
    """Bytes that are registered by arena, found by their addresses."""

    def within(*memories: torch.Tensor) -> int:
        runs = [(memory.data_ptr(), memory.data_ptr() + memory.numel()) for memory in memories]
        registered = fake.cuda.registered.items()
        return sum(nbytes for at, nbytes in registered if any(begin <= at < end for begin, end in runs))

    pins = loaded.streamed._lanes._pins
    found = {
        STAGED: within(loaded.streamed.memory.slab.bytes),
        RINGS: within(*(ring.bytes for ring, _ in pins.rings)) if pins else 0,
        PARKED: within(*(piece.bytes for piece in loaded.parking._pieces)),
    }
    if loaded.host_kv is not None:
        memory = loaded.host_kv._memory
        found[HOST_KV] = within(memory.slab.bytes, *(buffer.bytes for buffer in memory.buffers))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_each_arena_is_page_locked_as_planned(name: str, case: Any, fakes: ModuleType, host_kv: ModuleType) -> None:
    tiny, fake = host_kv.many(case("qwen3_moe")), fakes.FakeDevice()
    plan = PLANS[name](tiny, fake.device, host_kv)
    with fake, closing(load_engine(tiny.source, plan, tiny.store if plan.streams else None, fake.device)) as loaded:
        wanted = planned(plan, tiny)
        assert page_locked(loaded, fake) == wanted
        assert fake.cuda.nbytes_pinned == fake.device.pins.taken == RING_NBYTES + sum(wanted.values())
    assert not fake.cuda.registered
    assert fake.device.pins.taken == RING_NBYTES


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_no_arena_goes_beyond_four_fifths_of_the_limit(
    share: float, name: str, case: Any, fakes: ModuleType, host_kv: ModuleType
) -> None:
    """The machine would give all; cohorts are page-locked whole or refused."""
    tiny, fake = host_kv.many(case("qwen3_moe")), fakes.FakeDevice()
    plan = PLANS[name](tiny, fake.device, host_kv)
    wanted = planned(plan, tiny)
    most = RING_NBYTES + int(share * sum(wanted.values()))
    limit_pins(fake.device, Machine(Hardware("", 1, 1, (), ""), 1.0, pin=PinLimit(-(-most * 5 // 4), True)))
    store = tiny.store if plan.streams else None
    with fake:
        try:
            loaded = load_engine(tiny.source, plan, store, fake.device)
        except MemoryError:
            assert HOST_KV in wanted
            assert fake.device.pins.taken == RING_NBYTES
            return
        with closing(loaded):
            found = page_locked(loaded, fake)
            assert all(found[each] <= nbytes or each == RINGS for each, nbytes in wanted.items())
            assert RING_NBYTES + sum(found.values()) == fake.cuda.nbytes_pinned <= most


def _a_block_more(patch: pytest.MonkeyPatch) -> None:
    allocate = ParkingMemory._allocate
    patch.setattr(ParkingMemory, "_allocate", lambda self, count, *rest: allocate(self, count + (count > 0), *rest))


def _rings_too(patch: pytest.MonkeyPatch) -> None:
    """Rings are page-locked where the slab suffices."""
    patch.setattr(lanes._Pins, "__init__", _with_rings(lanes._Pins.__init__))


def _with_rings(make: Any) -> Any:
    def made(self: Any, memory: Any, staging: Any, *keys: Any) -> None:
        make(self, memory, staging, *keys)
        ring = HostMemory(PAGE)
        self.rings.append((ring, ring.pin(self.device)))

    return made


def _no_budget(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinBudget, "allows", lambda self, nbytes: True)


BUGS = {"a block more": (_a_block_more, "parked"), "rings too": (_rings_too, "streamed")}


@pytest.mark.parametrize("bug", BUGS)
def test_an_arena_that_is_larger_is_found(
    bug: str, case: Any, fakes: ModuleType, host_kv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant, name = BUGS[bug]
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_each_arena_is_page_locked_as_planned(name, case, fakes, host_kv)


def test_a_budget_that_is_not_asked_is_found(
    case: Any, fakes: ModuleType, host_kv: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    _no_budget(monkeypatch)
    with pytest.raises(AssertionError):
        test_no_arena_goes_beyond_four_fifths_of_the_limit(0.3, "streamed", case, fakes, host_kv)
