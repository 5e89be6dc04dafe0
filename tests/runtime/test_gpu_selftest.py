"""Triton kernels beside their definition (`runtime/loading/selftest.py`, `runtime/attention/selftest.py`), for the
arithmetic, the heads and the experts of a run.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kernels.product import Launch
from moedge.runtime.attention.selftest import DECODE, EXTEND, HeadCase, wrong_attention, wrong_store
from moedge.runtime.attention.triton_backend import TritonAttention, store_by_kernel
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.loading.selftest import KernelNeeds, usable_kernels, usual_needs
from moedge.runtime.shape.model_shape import KVGroup

HOST = torch.device("cpu")
AMPERE, TURING = Gpu((8, 6), 28), Gpu((7, 5), 14)


def needs(dtype: str, head_dim: int) -> KernelNeeds:
    return KernelNeeds(dtype, ((1, 2, head_dim, None),))


def device(capability: tuple[int, int], cleared: list[bool] | None = None) -> Any:
    return SimpleNamespace(
        torch_device=HOST,
        capability=capability,
        processors=28,
        is_real=False,
        clear_error=lambda: (cleared or []).append(True),
    )


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 80])
@pytest.mark.parametrize("gpu", [AMPERE, TURING], ids=["sm86", "sm75"])
def test_nothing_is_found_wrong_with_right_kernels(gpu: Gpu, head_dim: int) -> None:
    lacks = usable_kernels(device(gpu.capability), needs("fp32", head_dim)).lacks
    assert set(lacks.reasons) == ({"experts"} if gpu is TURING else set())


def test_a_kernel_that_writes_nothing_or_where_it_should_not_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Launch.run

    def elsewhere(self: Launch) -> None:
        run(self)
        self.arguments[2].codes[0, 0, 0, 0] += 1

    heads = [HeadCase(KVGroup((0,), 2, 64, None), kv, 4) for kv in ("fp16", "int8")]

    def stored() -> list[bool]:
        return [wrong_store(each, torch.float16, store_by_kernel, HOST) is not None for each in heads]

    assert stored() == [False, False]
    with monkeypatch.context() as patch:
        patch.setattr(Launch, "run", elsewhere)
        assert stored()[0]
    monkeypatch.setattr(Launch, "run", lambda self: None)
    assert stored() == [True, True]
    found = wrong_attention(heads[0], torch.float16, triton(torch.float16), DECODE, HOST)
    assert found is not None
    assert found.what == "attention (decode) of 2 x 4 heads of 64 over fp16"
    lacks = usable_kernels(device((8, 6)), needs("fp16", 64)).lacks
    assert all("wrong numbers" in reason for reason in lacks)


def triton(dtype: torch.dtype, gpu: Gpu = AMPERE) -> Callable[[KVCache], TritonAttention]:
    return lambda cache: TritonAttention(cache, dtype, False, gpu, HOST, stores_by_kernel=False)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["fp32", "int8", "int4", "int8/int4"])
@pytest.mark.parametrize("gpu", [AMPERE, TURING], ids=["sm86", "sm75"])
# SmolLM2 and gpt-oss.
@pytest.mark.parametrize(("kv_heads", "queries", "dim", "window"), [(3, 3, 64, None), (8, 8, 64, 128)])
def test_attention_of_published_heads_is_right(
    kv: str, gpu: Gpu, kv_heads: int, queries: int, dim: int, window: int | None
) -> None:
    heads = HeadCase(KVGroup((0,), kv_heads, dim, window), kv, queries)
    passes = (*DECODE, *EXTEND) if gpu is AMPERE else DECODE
    assert wrong_attention(heads, torch.float32, triton(torch.float32, gpu), passes, HOST) is None


def test_an_error_of_cuda_does_not_hit_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Launch) -> None:
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(Launch, "run", refuse)
    cleared = [True]
    lacks = usable_kernels(device((8, 6), cleared), needs("bf16", 64)).lacks
    assert len(cleared) == 5
    assert all("out of memory" in reason for reason in lacks)


def test_heads_that_no_kernel_is_cut_for_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda self: None)
    lacks = usable_kernels(device((8, 6)), needs("bf16", 512)).lacks
    assert set(lacks.reasons) == {"experts", "sampling"}


def test_the_usual_arithmetic_is_what_the_gpu_is_fast_at() -> None:
    assert [usual_needs(device(capability)).dtype for capability in ((7, 5), (8, 0))] == ["fp16", "bf16"]


def test_on_a_gpu_without_tensor_cores_products_of_experts_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(Launch, "run", lambda self: launched.append(self.kernel.fn.__name__))
    lacks = usable_kernels(device((7, 5)), needs("fp16", 64)).lacks
    assert "from compute capability 8.0 on, this GPU has 7.5" in lacks.experts
    assert set(launched) == {"attend_pages", "merge_splits", "store_tokens", "draw_rows"}
