"""What is tried: every kernel in every format, for the arithmetic and the heads of a run."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kernels.launch import Launch
from moedge.runtime.attention import trial
from moedge.runtime.loading.isolated_trial import KernelNeeds
from moedge.runtime.loading.kernel_trial import try_kernels, usual_needs

HOST = torch.device("cpu")
AMPERE, TURING = Gpu((8, 6), 28), Gpu((7, 5), 14)


def device(capability: tuple[int, int], cleared: list[bool] | None = None) -> Any:
    return SimpleNamespace(
        torch_device=HOST,
        capability=capability,
        processors=28,
        is_real=False,
        clear_error=lambda: (cleared or []).append(True),
    )


def test_every_kernel_is_tried_in_every_format_on_the_gpus_that_it_is_for() -> None:
    cases = list(trial.attention_cases(AMPERE, torch.bfloat16, frozenset({64, 128})))
    found = {(case.kernel, case.kv, case.head_dim) for case in cases}
    formats = ("bf16", "int8", "int4", "int8/int4")
    kernels = ("decode", "split", "extend")
    assert found == {(kernel, kv, head) for kernel in kernels for kv in formats for head in (64, 128)}
    older = trial.attention_cases(TURING, torch.float16, frozenset({64}))
    assert {case.kernel for case in older} == {"decode", "split"}


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("gpu", [AMPERE, TURING], ids=["sm86", "sm75"])
def test_the_trial_finds_nothing_wrong_with_right_kernels(gpu: Gpu, head_dim: int) -> None:
    lacks = try_kernels(device(gpu.capability), KernelNeeds("fp32", frozenset({head_dim}))).lacks
    assert set(lacks.reasons) == ({"experts"} if gpu is TURING else set())


def test_a_kernel_that_writes_nothing_or_where_it_should_not_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launch.run

    def elsewhere(self: Launch) -> None:
        run(self)
        self.arguments[2].codes[0, 0, 0, 0] += 1

    assert trial.stored_error("int8", 64, HOST, torch.float16) <= trial.STORED_TOLERANCE
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", elsewhere)
        assert "storing fp32" in trial.try_storing(HOST, torch.float32, frozenset({64}))
    monkeypatch.setattr(Launch, "run", lambda self: None)
    assert "storing fp16" in trial.try_storing(HOST, torch.float16, frozenset({64}))
    assert "decode over fp16" in trial.try_attention(HOST, AMPERE, torch.float16, frozenset({64}))
    lacks = try_kernels(device((8, 6)), KernelNeeds("fp16", frozenset({64}))).lacks
    assert all("wrong numbers" in reason for reason in lacks)


def test_an_error_of_cuda_does_not_hit_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Launch) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(Launch, "run", refuse)
    cleared = [True]
    lacks = try_kernels(device((8, 6), cleared), KernelNeeds("bf16", frozenset({64}))).lacks
    assert len(cleared) == 4
    assert all("out of memory" in reason for reason in lacks)


def test_heads_that_no_kernel_is_cut_for_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda self: None)
    lacks = try_kernels(device((8, 6)), KernelNeeds("bf16", frozenset({512}))).lacks
    assert set(lacks.reasons) == {"experts"}


def test_the_usual_arithmetic_is_what_the_gpu_is_fast_at() -> None:
    assert [usual_needs(device(capability)).dtype for capability in ((7, 5), (8, 0))] == ["fp16", "bf16"]


def test_on_a_gpu_without_tensor_cores_products_of_experts_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(Launch, "run", lambda self: launched.append(self.kernel.fn.__name__))
    lacks = try_kernels(device((7, 5)), KernelNeeds("fp16", frozenset({64}))).lacks
    assert "from compute capability 8.0 on, this GPU has 7.5" in lacks.experts
    assert set(launched) == {"attend_pages", "store_tokens"}
