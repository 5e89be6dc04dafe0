"""Kernels are tried, and one that is wrong or broken is told from one that works."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.apps.doctor import kernels
from moedge.apps.doctor.host import Verdict
from moedge.offload.device import find_device
from moedge.quant.formats import bitsandbytes_kernels
from moedge.quant.formats.format import QUANT_FORMATS
from moedge.quant.kernels import gpu
from moedge.quant.kernels.gpu import Gpu, Lacks
from moedge.quant.matmul.matmul import ParallelMatmul
from moedge.quant.native import library
from moedge.runtime.loading import selftest


@pytest.mark.parametrize("name", QUANT_FORMATS)
def test_every_format_s_product_is_right_here(name: str) -> None:
    assert kernels.product_error(name, "cpu") < kernels._TOLERANCE / 2


def test_what_works_is_well() -> None:
    assert kernels.check_bitsandbytes("cpu").verdict is Verdict.OK


@pytest.mark.slow
def test_the_bundled_model_is_right_in_every_format() -> None:
    finding = kernels.check_formats()
    assert (finding.verdict, finding.found) == (
        Verdict.OK, "the bundled model is right in none, int8, int4, nf4, mxfp4"
    )  # fmt: skip


def test_what_a_processor_without_the_fused_product_costs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bitsandbytes_kernels, "has_fused", lambda: False)
    finding = kernels.check_bitsandbytes("cpu")
    assert finding.verdict is Verdict.OK
    assert "without AVX512-BF16 nf4 is dequantized first" in finding.found


def test_what_the_library_of_cpu_kernels_is_worth_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "lack", lambda: f"it was not built ({library.BUILD})")
    finding = kernels.check_native()
    assert finding.verdict is Verdict.WARN
    assert "not used: it was not built; torch computes attention instead" in finding.found


def test_a_kernel_that_is_wrong_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ParallelMatmul.linear
    monkeypatch.setattr(ParallelMatmul, "linear", lambda self, x, packed: right(self, x, packed).roll(1, 0))
    assert "wrong by" in kernels.check_bitsandbytes("cpu").found


def test_a_library_that_does_not_load_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError("libbitsandbytes_cpu.so: cannot open shared object file\nand more")

    monkeypatch.setattr(bitsandbytes_kernels, "dequantize_nf4", broken)
    monkeypatch.setattr(kernels, "product_error", broken)
    finding = kernels.check_bitsandbytes("cpu")
    assert finding.verdict is Verdict.FAIL
    assert finding.found.endswith("OSError: libbitsandbytes_cpu.so: cannot open shared object file")


def device(capability: tuple[int, int]) -> Any:
    """What a self-test asks of one; its tensors are in host memory."""
    return SimpleNamespace(place=torch.device("cpu"), capability=capability, processors=28, clear_error=lambda: None)


def lacking(monkeypatch: pytest.MonkeyPatch, lacks: Lacks) -> None:
    monkeypatch.setattr(selftest, "usable_kernels", lambda found, needs: Gpu(found.capability, 28, lacks))


def test_kernels_that_run_are_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, Lacks())
    (finding,) = kernels.check_kernels(device((8, 6)))
    assert finding.verdict is Verdict.OK
    assert "attention, cache, experts, sampling compiled and passed their tests" in finding.found


@pytest.mark.parametrize("family", Lacks._fields)
@pytest.mark.parametrize(
    ("reason", "fix"), [("Failed to find C compiler", "apt install gcc"), ("wrong numbers", "Triton that belongs")]
)
def test_a_family_that_does_not_run_costs_speed(
    family: str, reason: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(monkeypatch, Lacks()._replace(**{family: reason}))
    broken, working = kernels.check_kernels(device((8, 6)))
    assert broken.verdict is Verdict.WARN
    assert f"those for {family}, slower. {reason}" in broken.found
    assert fix in broken.fix
    assert working.verdict is Verdict.OK
    assert family not in working.found


def test_an_old_gpu_and_fp16_on_one_without_bf16_are_said() -> None:
    arithmetic, old = kernels.check_kernels(device((6, 1)))
    assert "dtype is fp16: compute capability 6.1" in arithmetic.found
    assert "7.5 and newer, this GPU has 6.1" in old.found


def test_without_triton_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    (finding,) = kernels.check_kernels(device((8, 6)))
    assert (finding.verdict, finding.fix) == (Verdict.WARN, "pip install triton")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is there")
def test_a_gpu_that_torch_does_not_see_is_in_the_way() -> None:
    assert kernels.check_gpu().verdict is Verdict.FAIL


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_all_is_tried() -> None:
    findings = [kernels.check_gpu(), kernels.check_bitsandbytes("cuda"), kernels.check_formats("cuda")]
    assert Verdict.FAIL not in {finding.verdict for finding in findings}
    found = find_device()
    assert found is not None
    assert {finding.verdict for finding in kernels.check_kernels(found)} == {Verdict.OK}
