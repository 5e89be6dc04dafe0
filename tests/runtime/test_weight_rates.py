"""Rates of every format (`runtime/calibration/pass_rates.py`) are work over time, from matrices that are in no cache
when they come again.
"""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moedge.quant.formats.format import QUANT_FORMATS
from moedge.quant.matmul.matmul import ParallelMatmul
from moedge.quant.tensor import PackedTensor
from moedge.runtime.calibration import pass_rates as measuring


def test_every_format_and_row_count_has_a_rate_and_matrices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "ROWS", (1, 8))
    monkeypatch.setattr(measuring, "POOL_NBYTES", 20 << 20)
    monkeypatch.setattr(measuring, "_SECONDS", 0.001)
    # An engine divides kernels on codes among as many threads.
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    multiplied: list[tuple[str, int, int]] = []
    right = ParallelMatmul.linear

    def linear(self: ParallelMatmul, x: Tensor, packed: PackedTensor, out: Tensor) -> Tensor:
        assert self.num_workers == 3
        multiplied.append((packed.layout.format, len(x), packed.planes[0].data_ptr()))
        return right(self, x, packed, out=out)

    monkeypatch.setattr(ParallelMatmul, "linear", linear)
    rates = measuring.weight_rates()
    assert set(rates) == {*QUANT_FORMATS, *(f"{name}xint8" for name in measuring.integer_formats())}
    assert {tuple(by_rows) for by_rows in rates.values()} == {(1, 8)}
    assert all(rate > 1e6 for by_rows in rates.values() for rate in by_rows.values())
    for before, after in pairwise(multiplied):
        assert before[:2] != after[:2] or before[2] != after[2]
    assert not torch.is_inference(torch.ones(1))
