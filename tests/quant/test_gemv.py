"""The choice of kernels (`quant/matmul/matmul.py`) is measured; both that it is between give the same product."""

import itertools

import pytest
import torch

from moedge.quant.formats import bitsandbytes_kernels, int4
from moedge.quant.formats.format import TILES, get_format
from moedge.quant.matmul import matmul as gemv_max_rows
from moedge.quant.matmul import tiled
from moedge.quant.matmul.matmul import (
    ALL_ROWS,
    FUSED_ROWS,
    GEMV_ROWS,
    MOST_GEMV_ROWS,
    Matmul,
    Workspace,
    kernel_order,
    measure_gemv_max_rows,
)
from moedge.quant.native import library
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import pack

pytestmark = pytest.mark.numerics


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "available", lambda: False)
    monkeypatch.setattr(library, "available", lambda: False)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["none", "nf4-f32", "mxfp4", "int4"])
def test_formats_without_such_a_kernel_have_nothing_to_choose(name: str) -> None:
    assert measure_gemv_max_rows(name) == {}


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("name", ["int8", "int4-g32-f16"])
def test_the_meeting_point_follows_the_times(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name != "int8" and not int4.has_kernel():
        assert measure_gemv_max_rows(name) == {}
        return
    threads = torch.get_num_threads()
    for seconds, rows in (((2.0, 1.0), 8), ((1.0, 2.0), 32), ((1.0, 99.0), MOST_GEMV_ROWS), ((99.0, 1.0), 1)):
        times = iter(seconds)
        monkeypatch.setattr(gemv_max_rows, "_best_seconds", lambda run, times=times: (run(), next(times))[1])
        assert measure_gemv_max_rows(name) == {get_format(name).codes: rows}
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


@pytest.mark.parametrize("name", ["int8", "int4", "mxfp4"])
def test_times_do_not_decide_whether_rows_are_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, a loaded model once did not round the rows of prompts and rounded those of single tokens."""
    if not tiled.has_kernel():
        pytest.skip("no kernel of the library multiplies in tiles")
    # Kernels on codes are slow.
    times = itertools.cycle([9.0, 1.0])
    monkeypatch.setattr(gemv_max_rows, "_best_seconds", lambda run: next(times))
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(size, 192, generator=generator).bfloat16() for size in (128, 300))
    packed = pack(weight, name, kernel_order(name, torch.bfloat16, "cpu"))
    limits = measure_gemv_max_rows(name, integer=True)
    compute = Matmul(Workspace(scratch_nbytes(packed.layout, "bfloat16", False)), integer=True, gemv_max_rows=limits)
    found = compute.linear(rows, packed).double()
    groups = rows.double().view(300, -1, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    rounded = ((groups / scale).round() * scale).flatten(1)
    meant = packed.dequantize(torch.empty(128, 192)).double().T
    wanted, others = rounded @ meant, rows.double() @ meant
    assert (found - wanted).norm() < 0.003 * wanted.norm()
    assert (others - wanted).norm() > 0.004 * wanted.norm(), "or nothing would show"
