"""What can be known of a GPU's kernels before one is tried, and how a self-test that fails is told."""

import pytest
import torch

from moedge.quant.kernels import gpu
from moedge.quant.kernels.gpu import Gpu, Lacks, interpreted, lack_of, triton_lack
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.tuning import FORMATS
from moedge.quant.matmul import grouped_selftest as selftest
from moedge.quant.matmul.grouped_selftest import ProductCase
from moedge.quant.tensor import dtype_name

HOST = torch.device("cpu")


def test_an_old_gpu_and_a_missing_triton_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert interpreted()
    assert triton_lack((8, 6)) == ""
    assert "7.5 and newer, this GPU has 6.1" in triton_lack((6, 1))
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    assert "pip install triton" in triton_lack((8, 6))
    assert not interpreted()


def test_a_self_test_says_what_is_wrong_or_what_was_raised() -> None:
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
    assert set(Lacks.everything("why").reasons) == {"attention", "cache", "experts", "sampling"}


@pytest.mark.parametrize(
    ("capability", "fast"), [((7, 5), False), ((7, 0), False), ((8, 0), True), ((12, 0), True), ((0, 0), True)]
)
def test_bfloat16_is_slow_before_its_tensor_cores(capability: tuple[int, int], fast: bool) -> None:
    assert Gpu(capability, 1).computes_bf16 == fast


# gpt-oss and GLM-4.5-Air have such widths, their last columns less than a tile or a group of them. Cases of float32
# follow below.
@pytest.mark.sample("160x96-bfloat16")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("widths", [(288, 160), (160, 96)], ids=["288x160", "160x96"])
def test_products_that_are_right_pass_their_self_test(widths: tuple[int, int], dtype: torch.dtype) -> None:
    assert selftest.wrong_grouped(HOST, dtype, [widths]) == ""


# Every gate, with biases too, and both sizes of tiles; the fast lane has each once, and each format.
CASES = [
    pytest.param(case, id=case.name, marks=[] if turn == at else pytest.mark.slow)
    for turn, name in enumerate(FORMATS)
    for at, case in enumerate(
        (
            ProductCase(name, (3, 20), gathered=True, gate=Gate("silu")),
            ProductCase(name, (3, 20), gathered=False, gate=None),
            ProductCase(name, (70,), gathered=True, gate=Gate("clamped_swiglu", alternating=True)),
            ProductCase(name, (70,), gathered=True, gate=Gate("gelu_tanh"), rows=96, columns=192),
        )
    )
]


@pytest.mark.parametrize("case", CASES)
def test_every_launch_of_experts_agrees_with_its_definition(case: ProductCase) -> None:
    assert selftest.product_error(case, HOST, torch.float32) < 1e-4


def test_the_self_test_launches_both_products_of_every_layer_of_experts() -> None:
    found = {(case.format, case.rows, case.columns) for case in selftest.product_cases([(2880, 1440)])}
    assert found == {(name, *shape) for name in FORMATS for shape in ((2880, 2880), (2880, 1440))}
