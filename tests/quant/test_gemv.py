"""The choice of kernels (`quant/matmul/matmul.py`) is measured; both that it is between give the same product."""

import pytest
import torch

from moedge.quant.formats import bitsandbytes_kernels, int4
from moedge.quant.formats.format import TILES
from moedge.quant.matmul import matmul as gemv_max_rows
from moedge.quant.matmul import tiled
from moedge.quant.matmul.matmul import ALL_ROWS, FUSED_ROWS, GEMV_ROWS, MOST_GEMV_ROWS, measure_gemv_max_rows

pytestmark = pytest.mark.numerics


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "available", lambda: False)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["none", "nf4-f32", "mxfp4"])
def test_formats_without_such_a_kernel_have_nothing_to_choose(name: str) -> None:
    assert measure_gemv_max_rows(name) == {}


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_meeting_point_follows_the_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "int4" and not int4.has_kernel():
        assert measure_gemv_max_rows(name) == {}
        return
    threads = torch.get_num_threads()
    for seconds, rows in (((2.0, 1.0), 8), ((1.0, 2.0), 32), ((1.0, 99.0), MOST_GEMV_ROWS), ((99.0, 1.0), 1)):
        times = iter(seconds)
        monkeypatch.setattr(gemv_max_rows, "_best_seconds", lambda run, times=times: (run(), next(times))[1])
        assert measure_gemv_max_rows(name) == {name: rows}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(("name", "order"), [("nf4", "nf4"), ("mxfp4", TILES)])
def test_a_fused_product_is_taken_as_far_as_times_say(name: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of the kernel and of dequantizing for few rows, then for many."""
    if name == "nf4":
        monkeypatch.setattr(tiled, "available", lambda: False)
    if not (bitsandbytes_kernels.has_fused() if name == "nf4" else tiled.has_kernel()):
        assert measure_gemv_max_rows(name) == {}
        return
    for seconds, rows in (
        ((1.0, 4.0, 10.0, 10.0), ALL_ROWS),
        ((1.0, 4.0, 10.0, 9.0), GEMV_ROWS + (FUSED_ROWS - GEMV_ROWS) * 3 // 4),
        ((2.0, 1.0, 10.0, 1.0), GEMV_ROWS),
    ):
        times = iter(seconds)
        monkeypatch.setattr(gemv_max_rows, "_best_seconds", lambda run, times=times: (run(), next(times))[1])
        assert measure_gemv_max_rows(name) == {order: rows}
