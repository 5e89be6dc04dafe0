"""Slabs (`offload/device.py`) have the size that was asked for; as much of them is pinned as the machine allows, and
nothing stays behind.
"""

import mmap
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.device import MIN_PIN_NBYTES, PIN_CHUNK_NBYTES, PinBudget, Pinned, address_of, allocate

MIB = 1 << 20
ADDRESS = 1 << 40


@pytest.mark.parametrize("nbytes", [1, 4096, 5 * MIB + 4096])
def test_a_slab_has_exactly_its_size(nbytes: int) -> None:
    memory = allocate(nbytes)
    assert len(memory) == nbytes
    assert address_of(memory) % 4096 == 0
    memory[nbytes - 1] = 7
    assert memory[nbytes - 1] == 7


def test_a_kernel_without_huge_pages_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    assert len(allocate(8192)) == 8192


@pytest.mark.parametrize("limit", [0, 64 * MIB, 1024 * MIB, float("inf")])
@pytest.mark.parametrize("nbytes", [4096, 600 * MIB + 4096, 1500 * MIB])
def test_as_much_is_pinned_as_the_machine_allows(simulator: ModuleType, limit: float, nbytes: int) -> None:
    cuda = simulator.Cuda(simulator.Machine(0), limit)
    pinned = Pinned(cuda, ADDRESS, nbytes, cuda.clear_error)
    most = min(nbytes, limit)
    assert most - MIN_PIN_NBYTES < pinned.nbytes <= most
    assert pinned.nbytes == sum(cuda.registered.values())
    assert all(size <= PIN_CHUNK_NBYTES for size in cuda.registered.values())
    assert not cuda.stale_error, "a refusal's error must not wait for the next kernel"
    pinned.close()
    assert cuda.registered == {}
    assert pinned.nbytes == 0


@given(st.integers(0, 700 * MIB), st.integers(1, 700 * MIB), st.sampled_from([0, 100, 300, 999]))
def test_no_copy_reads_from_two_registrations(begin: int, nbytes: int, limit_mib: int) -> None:
    class Runtime:
        def __init__(self) -> None:
            self.registered: list[tuple[int, int]] = []

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            if address + nbytes > ADDRESS + limit_mib * MIB:
                return 2
            self.registered.append((address - ADDRESS, address - ADDRESS + nbytes))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    runtime = Runtime()
    pinned = Pinned(runtime, ADDRESS, 1400 * MIB, lambda: None)
    regions = [*runtime.registered, (pinned.nbytes, 1400 * MIB)]
    position = begin
    for first, last in pinned.pieces(begin, begin + nbytes):
        assert first == position
        assert last > first
        assert sum(low < last and first < high for low, high in regions) == 1
        position = last
    assert position == begin + nbytes


SIZES = st.lists(st.sampled_from([1, 3, 40, 100, 300, 600]), min_size=1, max_size=40)


@given(SIZES, st.sampled_from([0, 1, 100, 300, 900, 1 << 20]), st.sampled_from([None, 0, 700]))
def test_registrations_meet_where_shards_do(sizes_mib: list[int], limit_mib: int, most_mib: int | None) -> None:
    registered: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            if sum(registered.values()) + nbytes > limit_mib * MIB:
                return 2
            registered[address - ADDRESS] = nbytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del registered[address - ADDRESS]
            return 0

    cuts = [MIB * sum(sizes_mib[: index + 1]) for index in range(len(sizes_mib))]
    budget = PinBudget(None if most_mib is None else most_mib * MIB)
    pinned = Pinned(Runtime(), ADDRESS, cuts[-1], lambda: None, budget, cuts)
    assert {begin + nbytes for begin, nbytes in registered.items()} <= set(cuts)
    for begin, end in zip([0, *cuts], cuts, strict=False):
        assert list(pinned.pieces(begin, end)) == [(begin, end)]
    allowed = min([limit_mib, *([] if most_mib is None else [most_mib])]) * MIB
    assert budget.taken == pinned.nbytes == sum(registered.values()) <= allowed
    left = [cut for cut in cuts if cut > pinned.nbytes]
    rest = allowed - pinned.nbytes
    assert not left or rest < max(MIN_PIN_NBYTES, left[0] - pinned.nbytes)
    pinned.close()
    assert (budget.taken, registered) == (0, {})
