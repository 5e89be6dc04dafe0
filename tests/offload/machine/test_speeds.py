"""Measuring gives plausible numbers, takes no more than it says, and leaves nothing behind."""

import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moedge.offload.machine import speeds
from moedge.offload.machine import speeds as link_module
from moedge.offload.machine.profile import Disk, Link, PinLimit
from moedge.offload.machine.speeds import (
    FINEST_NBYTES,
    best_seconds,
    measure_disk,
    measure_memory,
    measure_rates,
    probe_pin_limit,
)

MIB = 1 << 20


def test_every_way_to_read_a_disk_is_tried_and_nothing_remains(tmp_path: Path) -> None:
    before = os.listdir("/proc/self/fd")
    found = measure_disk(tmp_path, 16 * MIB, 0.005, (MIB, 2 * MIB), (1, 3))
    assert found is not None
    ways = [(read.block_nbytes, read.threads, read.random) for read in found.reads]
    assert ways == list(itertools.product((MIB, 2 * MIB), (1, 3), (False, True)))
    assert found.nbytes == 16 * MIB
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_file_s_blocks_are_read_in_turns_and_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "ORDERS", (False,))
    offsets: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return buffers[0].nbytes

    monkeypatch.setattr(speeds.os, "preadv", preadv)
    found = measure_disk(tmp_path, 16 * MIB, 0.01, (MIB,), (3,))
    assert found is not None
    assert set(offsets) == set(range(0, 16 * MIB, MIB))


def test_random_reads_jump_and_take_whole_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "ORDERS", (True,))
    offsets: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return buffers[0].nbytes

    monkeypatch.setattr(speeds.os, "preadv", preadv)
    found = measure_disk(tmp_path, 64 * MIB, 0.01, (MIB,), (1,))
    assert found is not None
    assert set(offsets) <= set(range(0, 64 * MIB, MIB))
    following = sum(after == before + MIB for before, after in itertools.pairwise(offsets))
    assert following < len(offsets) / 8


class Usage(NamedTuple):
    free: int


def test_a_quarter_of_the_free_space_is_used_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds.shutil, "disk_usage", lambda folder: Usage(50 * MIB))
    found = measure_disk(tmp_path, 12 * MIB, 0.001, (4 * MIB,), (1,))
    assert found is not None
    assert found.nbytes == 12 * MIB
    assert measure_disk(tmp_path, 64 * MIB, 0.001, (4 * MIB,), (1,)) is None


def test_a_file_system_without_direct_reads_is_measured_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(speeds.os, "open", refuse)
    found = measure_disk(tmp_path, 4 * MIB, 0.001, (MIB,), (1,))
    assert isinstance(found, Disk)
    assert not found.direct


def test_an_error_while_reading_is_not_a_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(speeds.os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output"):
        measure_disk(tmp_path, 4 * MIB, 0.001, (MIB,), (2,))
    assert list(tmp_path.iterdir()) == []


def test_rates_are_work_over_the_fastest_run() -> None:
    made: list[int] = []

    def sleeping(rows: int) -> Callable[[], None]:
        made.append(rows)
        return lambda: time.sleep(0.002)

    rates = measure_rates({"a": sleeping, "b": sleeping}, (1, 10), 1000, 0.01)
    assert made == [1, 10, 1, 10]
    assert {name: list(by_rows) for name, by_rows in rates.items()} == {"a": [1, 10], "b": [1, 10]}
    assert 0 < rates["a"][1] <= 1000 / 0.002
    assert 0 < rates["b"][10] <= 10 * 1000 / 0.002


def test_a_slow_case_runs_twice_and_the_first_run_does_not_count() -> None:
    pauses = iter((0.02, 0.001))
    assert best_seconds(lambda: time.sleep(next(pauses)), seconds=0) >= 0.001
    assert list(pauses) == []


def test_memory_is_read_at_some_speed() -> None:
    assert measure_memory(4 * MIB) > 1e6


class Pins:
    """Registers memory up to a limit that counts everything registered."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held: dict[int, int] = {}
        self.largest = 0
        self.refusals = 0

    def register(self, address: int, nbytes: int) -> bool:
        self.largest = max(self.largest, nbytes)
        if sum(self.held.values()) + nbytes > self.limit:
            self.refusals += 1
            return False
        self.held[address] = nbytes
        return True

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.mark.parametrize("limit", [0, 64_000_000, 1 << 30, 500_000_000, float("inf")])
def test_the_pin_limit_is_found_from_below_and_all_is_given_back(limit: float) -> None:
    """Case M7 of the failure table."""
    pins = Pins(limit)
    found = probe_pin_limit(pins.register, pins.unregister, 2 << 30)
    assert found.refused == (limit < 2 << 30)
    assert max(0, min(limit, 2 << 30) - FINEST_NBYTES) <= found.nbytes <= limit
    assert pins.held == {}
    assert pins.largest <= 256 * MIB


def test_the_probe_asks_for_no_more_than_it_may() -> None:
    assert probe_pin_limit(Pins(float("inf")).register, lambda _: None, 300 * MIB) == PinLimit(300 * MIB, False)


def test_a_probe_that_breaks_gives_back_what_it_held() -> None:
    pins = Pins(float("inf"))

    def breaks(address: int, nbytes: int) -> bool:
        if len(pins.held) == 2:
            raise RuntimeError("device lost")
        return pins.register(address, nbytes)

    with pytest.raises(RuntimeError, match="device lost"):
        probe_pin_limit(breaks, pins.unregister, 2 << 30)
    assert pins.held == {}


class Cuda:
    """torch.cuda with numbers of our own; `pins` is what cudaHostRegister asks."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins
        self.calls: list[str] = []

    def cudart(self) -> Any:
        return self

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0 if self.pins.register(address, nbytes) else 2

    def cudaHostUnregister(self, address: int) -> int:
        self.pins.unregister(address)
        return 0

    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset_peak")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Cuda]:
    """`fake_cuda(limit)` stands for the device from now on."""

    def install(limit: float) -> Cuda:
        cuda = Cuda(Pins(limit))
        monkeypatch.setattr(link_module, "_cuda", lambda: cuda)
        monkeypatch.setattr(link_module, "swallow_cuda_error", lambda: cuda.calls.append("clear"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        return cuda

    return install


@pytest.mark.parametrize(("limit", "pinned"), [(0, False), (float("inf"), True)])
def test_the_link_is_measured_pinned_where_that_is_granted(
    limit: float, pinned: bool, fake_cuda: Callable[[float], Cuda]
) -> None:
    cuda = fake_cuda(limit)
    link = link_module.measure_link(MIB, "cpu")
    assert isinstance(link, Link)
    assert (link.pinned_bytes_s is not None) == pinned
    assert cuda.pins.held == {}
    assert cuda.calls == ["clear"] * (not pinned) + ["empty_cache", "reset_peak"]


def test_a_refusal_to_pin_is_cleared_before_anyone_meets_it(fake_cuda: Callable[[float], Cuda]) -> None:
    cuda = fake_cuda(64_000_000)
    assert link_module.measure_pin_limit(256 * MIB) == PinLimit(48 * MIB, True)
    assert cuda.calls == ["clear"] * cuda.pins.refusals != []
    assert cuda.pins.held == {}


def test_memory_of_a_device_is_measured_by_what_it_reads_and_writes(fake_cuda: Callable[[float], Cuda]) -> None:
    cuda = fake_cuda(0)
    rate = link_module.measure_device_memory(MIB, "cpu")
    assert rate is not None
    assert rate > 1e6
    assert cuda.calls == ["empty_cache", "reset_peak"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_without_a_device_nothing_is_said_of_one() -> None:
    assert (
        link_module.measure_link(MIB)
        is link_module.measure_pin_limit(MIB)
        is link_module.measure_device_memory(MIB)
        is None
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_device_s_link_and_pin_limit_are_measured_and_leave_nothing() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    link, pin = link_module.measure_link(64 * MIB), link_module.measure_pin_limit(512 * MIB)
    assert link is not None
    assert link.pinned_bytes_s is None or link.pinned_bytes_s > 1e8
    assert pin is not None
    assert torch.cuda.memory_reserved() <= before
    assert torch.ones(4, device="cuda").sum().item() == 4
