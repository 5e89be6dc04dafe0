"""A device's share: what others had when it was opened is not ours, what lies outside the allocator is."""

from typing import Any

import pytest
import torch

from moedge.offload.device import CONTEXT_NBYTES, Device, find_device

GIB = 1 << 30
MIB = 1 << 20


class Driver:
    """torch.cuda of a device of 8 GiB."""

    def __init__(self, others: int, context: int) -> None:
        self.others, self.context = others, context
        self.reserved = self.most = 0
        self.calls: list[Any] = []

    def mem_get_info(self) -> tuple[int, int]:
        return 8 * GIB - self.others - self.context - self.reserved, 8 * GIB

    def memory_reserved(self) -> int:
        return self.reserved

    def max_memory_reserved(self) -> int:
        return self.most

    def empty_cache(self) -> None:
        self.calls.append("empty")

    def reset_peak_memory_stats(self) -> None:
        self.calls.append("reset")

    def set_per_process_memory_fraction(self, fraction: float) -> None:
        self.calls.append(fraction)


def device(driver: Driver) -> Device:
    return Device(torch.device("cuda", 0), driver, lambda: None)


def test_alone_everything_is_ours_and_the_context_counts() -> None:
    driver = Driver(0, 300 * MIB)
    ours = device(driver)
    assert (ours.total, ours.available, ours.context_nbytes) == (8 * GIB, 8 * GIB, 300 * MIB)
    driver.reserved = driver.most = GIB
    driver.context += 100 * MIB  # kernels that were loaded since
    driver.reserved = 0
    assert ours.peak == GIB + 400 * MIB


def test_what_others_have_is_left_out_as_far_as_it_cannot_be_a_context() -> None:
    """Case M9 of the failure table: what others have when a run begins."""
    ours = device(Driver(3 * GIB, 300 * MIB))
    assert ours.available == 5 * GIB + CONTEXT_NBYTES - 300 * MIB
    assert ours.context_nbytes == CONTEXT_NBYTES


@pytest.mark.parametrize(("nbytes", "fraction"), [(2 * GIB, 0.25), (80 * GIB, 1.0)])
def test_a_limit_is_torch_s_own_and_counts_peaks_anew(nbytes: int, fraction: float) -> None:
    driver = Driver(0, 0)
    device(driver).limit(nbytes)
    assert driver.calls == ["empty", "reset", fraction]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_without_cuda_there_is_none() -> None:
    assert find_device() is None
