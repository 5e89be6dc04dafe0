"""The fake device (`tests/support/device/fake_device.py`) refuses and delays what a GPU does: what it lets pass would
be no proof.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from moedge.computing import ALLOCATOR_VARIABLES
from moedge.offload.device import HostMemory
from moedge.offload.errors import is_out_of_memory

MIB = 1 << 20
PAGE = 4096


def lazy(fakes: ModuleType, **options: Any) -> Any:
    """Nothing happens on it until it is waited for."""
    fake = fakes.FakeDevice(**options)
    fake.machine.haste = 0.0
    return fake


def registered(fake: Any, *runs: tuple[int, int]) -> HostMemory:
    """Ten pages, of which runs of pages are page-locked."""
    memory = HostMemory(10 * PAGE)
    for first, last in runs:
        begin = memory.bytes.data_ptr() + first * PAGE
        assert fake.cuda.cudaHostRegister(begin, (last - first) * PAGE, 0) == 0
    return memory


def copy_aside(host: torch.Tensor, there: torch.Tensor) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        there.copy_(host, non_blocking=True)


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "to the host": lambda host, there: host.copy_(there),
    "to the device": lambda host, there: there.copy_(host),
    "to": lambda host, there: host.to(there.device),
    "aside": copy_aside,
}


@pytest.mark.parametrize("runs", [((0, 4), (4, 10)), ((0, 6),)], ids=["two registrations", "not all registered"])
@pytest.mark.parametrize("way", WAYS)
def test_no_copy_crosses_the_border_of_a_registration(
    runs: tuple[tuple[int, int], ...], way: str, fakes: ModuleType
) -> None:
    with fakes.FakeDevice() as fake:
        host = registered(fake, *runs).bytes[3 * PAGE : 7 * PAGE]
        there = fake.device.allocate(len(host))
        with pytest.raises(RuntimeError, match="invalid argument"):
            WAYS[way](host, there)


def test_a_copy_that_nobody_waits_for_wants_page_locked_memory(fakes: ModuleType) -> None:
    with fakes.FakeDevice() as fake, torch.cuda.stream(torch.cuda.Stream()):
        host, there = HostMemory(PAGE).bytes.fill_(3), fake.device.allocate(PAGE)
        with pytest.raises(RuntimeError, match="page-locked"):
            there.copy_(host, non_blocking=True)
        there.copy_(host)
        assert there.max() == 3


def test_registrations_and_page_locked_tensors_share_one_budget(fakes: ModuleType) -> None:
    with fakes.FakeDevice(pin_limit=10 * PAGE) as fake:
        kept = torch.empty(3 * PAGE, dtype=torch.uint8).pin_memory()
        assert kept.is_pinned(), "as powers of two: four pages"
        memory = registered(fake, (0, 6))
        with pytest.raises(RuntimeError, match="out of memory"):
            torch.empty(PAGE, dtype=torch.uint8, pin_memory=True)
        del kept
        assert torch.empty(4 * PAGE, dtype=torch.uint8, pin_memory=True).is_pinned(), "torch keeps what it has pinned"
        assert fake.cuda.cudaHostRegister(memory.bytes.data_ptr() + 8 * PAGE, PAGE, 0) == 2
        assert fake.cuda.cudaHostRegister(memory.bytes.data_ptr() + 5 * PAGE + 9, 8, 0) == 712


@pytest.mark.parametrize("way", ["to", "copy_"])
def test_what_comes_to_the_host_is_late(way: str, fakes: ModuleType) -> None:
    with lazy(fakes) as fake:
        there = torch.full((8,), 7.0, device=fake.torch_device)
        came = torch.empty(8).pin_memory()
        if way == "to":
            came = there.to("cpu", non_blocking=True)
        else:
            came.copy_(there, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        there.fill_(8.0)
        assert not (came == 7.0).any()
        event.synchronize()
        assert (came == 7.0).all()


def test_page_locked_memory_that_is_written_too_early_is_found_out(fakes: ModuleType) -> None:
    with lazy(fakes) as fake:
        host = torch.ones(8).pin_memory()
        host.to(fake.torch_device, non_blocking=True)
        host.zero_()
        with pytest.raises(fakes.simulator.Race, match="overwritten"):
            torch.cuda.synchronize()


def test_memory_is_not_unregistered_under_a_copy(fakes: ModuleType) -> None:
    with lazy(fakes) as fake:
        memory = registered(fake, (0, 10))
        memory.bytes.copy_(fake.device.allocate(10 * PAGE), non_blocking=True)
        with pytest.raises(fakes.simulator.Race, match="unregistered"):
            fake.cuda.cudaHostUnregister(memory.bytes.data_ptr())
        torch.cuda.synchronize()
        fake.cuda.cudaHostUnregister(memory.bytes.data_ptr())


def test_an_error_left_behind_is_told_to_the_next_launch_and_to_no_allocation(fakes: ModuleType) -> None:
    with fakes.FakeDevice(pin_limit=0) as fake:
        assert fake.cuda.cudaHostRegister(1 << 40, PAGE, 0) == 2
        there = torch.empty(4, device=fake.torch_device)
        with pytest.raises(RuntimeError, match="earlier call"):
            there.fill_(1)
        there.fill_(1)


@pytest.mark.parametrize(
    ("total_mib", "said"),
    [(10, "CUBLAS_STATUS_ALLOC_FAILED"), (46, "CUDA error: out of memory"), (54, "CUDA error: out of memory")],
)
def test_libraries_take_what_the_allocator_does_not_know_of(total_mib: int, said: str, fakes: ModuleType) -> None:
    """20 MiB for cuBLAS, and of torch's for its workspace, 8 for products and 6 for attention of a dtype."""

    def compute() -> None:
        torch.mm(x[0, 0], x[0, 0])
        functional.scaled_dot_product_attention(x, x, x)

    with fakes.FakeDevice(total=total_mib * MIB, context=0) as fake:
        x = torch.ones(1, 1, 4, 4, device=fake.torch_device)
        with pytest.raises(RuntimeError, match=said) as told:
            compute()
        assert is_out_of_memory(told.value)
        assert fake.device.context_nbytes == {10: 0, 46: 20, 54: 28}[total_mib] * MIB
    with fakes.FakeDevice(total=60 * MIB, context=0) as fake:
        x = torch.ones(1, 1, 4, 4, device=fake.torch_device)
        compute()


def churn(fake: Any) -> int:
    """Passes of changing shapes, four buffers of which are alive at a time; bytes reserved in the end."""
    generator = torch.Generator().manual_seed(0)
    alive: list[torch.Tensor] = []
    for size in torch.randint(1, 40, (300,), generator=generator).tolist():
        alive = [*alive[-3:], fake.device.allocate(size * MIB // 2)]
    return int(fake.cuda.max_memory_reserved())


def test_segments_of_fixed_sizes_fragment_and_growing_ones_less(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fakes.FakeDevice() as fake:
        growing = churn(fake)
        assert fake.cuda.allocator.most_allocated <= growing
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name)
    with fakes.FakeDevice() as fake:
        fixed = churn(fake)
    assert growing * 5 < fixed * 4


def test_small_and_large_blocks_come_in_segments_and_the_cap_is_hard(
    fakes: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    with fakes.FakeDevice() as fake:
        kept = [fake.device.allocate(1)]
        assert fake.cuda.memory_reserved() == 2 * MIB
        kept.append(fake.device.allocate(2 * MIB))
        assert fake.cuda.memory_reserved() == 22 * MIB
        kept.append(fake.device.allocate(25 * MIB + 1))
        assert fake.cuda.memory_reserved() == 48 * MIB
        fake.device.limit(48 * MIB)
        kept.append(fake.device.allocate(17 * MIB))
        with pytest.raises(torch.OutOfMemoryError):
            fake.device.allocate(2 * MIB)
        del kept[2]
        kept.append(fake.device.allocate(9 * MIB))
        assert fake.cuda.memory_reserved() == 48 * MIB, "what lies idle serves before more is reserved"
