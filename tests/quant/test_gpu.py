"""What can be known of a GPU's kernels before one is tried, and how a trial that fails is told."""

import pytest
import torch

from moedge.quant.kernels import gpu, trial
from moedge.quant.kernels.gpu import Gpu, Lacks, interpreted, lack_of, triton_lack
from moedge.quant.kernels.operands import Gate

HOST = torch.device("cpu")


def test_an_old_gpu_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    assert triton_lack((8, 6)) == ""
    assert "7.5 and newer, this GPU has 6.1" in triton_lack((6, 1))
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert "pip install triton" in triton_lack((8, 6))
    assert not interpreted()


def test_a_trial_says_what_is_wrong_or_what_was_raised() -> None:
    def no_compiler() -> str:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    def nested() -> str:
        try:
            raise AttributeError("'int' object has no attribute '_flatten_ir'")
        except AttributeError as error:
            raise ValueError("at 36:11:\n    sums = ...\n           ^") from error

    assert lack_of(lambda: "") == ""
    assert lack_of(lambda: "decode over int8") == "Triton's kernels give wrong numbers here: decode over int8"
    assert lack_of(no_compiler).endswith("RuntimeError: Failed to find C compiler.")
    assert lack_of(nested).endswith("AttributeError: 'int' object has no attribute '_flatten_ir'")


def test_reasons_are_those_of_families_that_lack_something() -> None:
    assert Gpu((8, 6), 28).lacks.reasons == {}
    assert Lacks(experts="why").reasons == {"experts": "why"}
    assert set(Lacks.everything("why").reasons) == {"attention", "cache", "experts"}


@pytest.mark.parametrize(
    ("capability", "fast"), [((7, 5), False), ((7, 0), False), ((8, 0), True), ((12, 0), True), ((0, 0), True)]
)
def test_bfloat16_is_slow_before_its_tensor_cores(capability: tuple[int, int], fast: bool) -> None:
    assert Gpu(capability, 1).computes_bf16 == fast


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_trial_of_products_finds_nothing_wrong_with_right_ones(dtype: torch.dtype) -> None:
    assert trial.try_products(HOST, dtype) == ""


def test_the_trial_of_products_covers_formats_gates_and_tiles() -> None:
    cases = list(trial.product_cases())
    for name in ("none", "int8", "nf4"):
        gates = [case.gate for case in cases if case.format == name]
        assert None in gates
        assert Gate("silu") in gates
    assert {max(case.counts) > 64 for case in cases} == {True, False}
