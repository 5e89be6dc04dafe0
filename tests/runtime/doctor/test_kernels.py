"""Kernels are tried, and one that is wrong or broken is told from one that works."""

import pytest
import torch

from moedge.quant.formats import bitsandbytes_kernels
from moedge.quant.formats.format import FORMATS
from moedge.quant.kernels import trial
from moedge.quant.matmul.parallel import ParallelMatmul
from moedge.runtime.doctor import kernels
from moedge.runtime.doctor.finding import Verdict


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_s_product_is_right_here(name: str) -> None:
    assert kernels.product_error(name, "cpu") < kernels._TOLERANCE / 2


def test_what_works_is_well() -> None:
    assert kernels.check_bitsandbytes("cpu").verdict is Verdict.OK
    assert kernels.check_formats("cpu").verdict is Verdict.OK


def test_a_kernel_that_is_wrong_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ParallelMatmul.linear
    monkeypatch.setattr(ParallelMatmul, "linear", lambda self, x, packed: right(self, x, packed).roll(1, 0))
    assert "wrong by" in kernels.check_bitsandbytes("cpu").found
    assert kernels.check_formats("cpu").verdict is Verdict.FAIL


def test_a_library_that_does_not_load_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("libbitsandbytes_cpu.so: cannot open shared object file\nand more")

    monkeypatch.setattr(bitsandbytes_kernels, "dequantize_nf4", broken)
    monkeypatch.setattr(kernels, "product_error", broken)
    finding = kernels.check_bitsandbytes("cpu")
    assert finding.verdict is Verdict.FAIL
    assert finding.found.endswith("OSError: libbitsandbytes_cpu.so: cannot open shared object file")


def test_triton_s_kernel_is_right_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    assert trial.try_kernel("cpu")


@pytest.mark.parametrize(
    ("error", "verdict", "fix"),
    [
        (ImportError("No module named 'triton'"), Verdict.WARN, "pip install triton"),
        (RuntimeError("Failed to find C compiler"), Verdict.WARN, "apt install gcc"),
    ],
)
def test_a_triton_that_does_not_work_costs_speed(error: Exception, verdict: Verdict, fix: str) -> None:
    def run() -> bool:
        raise error

    finding = kernels.check_triton(run)
    assert finding.verdict is verdict
    assert fix in finding.fix


def test_a_triton_that_computes_wrong_numbers_is_in_the_way() -> None:
    assert kernels.check_triton(lambda: False).verdict is Verdict.FAIL


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_a_gpu_that_torch_does_not_see_is_in_the_way() -> None:
    assert kernels.check_gpu().verdict is Verdict.FAIL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_all_is_tried() -> None:
    findings = [kernels.check_gpu(), kernels.check_bitsandbytes("cuda"), kernels.check_formats("cuda")]
    assert Verdict.FAIL not in {finding.verdict for finding in findings}
    assert kernels.check_triton().verdict is not Verdict.FAIL
