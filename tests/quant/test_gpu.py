"""Kernels are used where one has run: an old GPU, no Triton or no compiler are found before a plan is made."""

import pytest
import torch

from moedge.quant.kernels import gpu, trial
from moedge.quant.kernels.gpu import find_gpu, interpreted

HOST = torch.device("cpu")


def test_a_kernel_that_runs_says_that_others_will() -> None:
    assert interpreted()
    found = find_gpu(HOST, (8, 6), 28)
    assert (found.capability, found.processors, found.has_kernels) == ((8, 6), 28, True)


def test_an_old_gpu_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "7.5 and newer, this GPU has 6.1" in find_gpu(HOST, (6, 1), 28).lack
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert "pip install triton" in find_gpu(HOST, (8, 6), 28).lack
    assert not interpreted()


def test_a_kernel_that_does_not_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(place: torch.device) -> bool:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    monkeypatch.setattr(trial, "try_kernel", refuse)
    assert find_gpu(HOST, (8, 6), 28).lack.endswith("Failed to find C compiler.")
    monkeypatch.setattr(trial, "try_kernel", lambda place: False)
    assert "wrong numbers" in find_gpu(HOST, (8, 6), 28).lack
