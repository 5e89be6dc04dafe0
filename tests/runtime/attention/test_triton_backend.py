"""The Triton backend agrees with float64 over what the cache holds, on every GPU that it would be chosen for."""

import dataclasses
import os
from collections import Counter
from inspect import signature
from typing import Any

import pytest
import torch

from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kernels.product import Launch
from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.attention import protocol
from moedge.runtime.attention.protocol import AttentionCall, Fresh
from moedge.runtime.attention.triton_backend import FreshAttention, TritonAttention, find_varlen, read_back
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.allocator import NO_BLOCK
from support.kernels.attention_setup import AMPERE, TURING, Setup, TritonSetup, worst

pytestmark = pytest.mark.skipif(os.environ["TRITON_INTERPRET"] == "0", reason="these caches are in host memory")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel ran, attention with and without tensor cores and splits told apart."""
    counts: Counter[str] = Counter()
    run = Launch.run

    def count(self: Launch) -> None:
        name = self.kernel.fn.__name__
        if name == "attend_pages":
            geometry, target = self.arguments[-1], self.arguments[1]
            name += f"{'' if geometry.dot else ' without dot'}{' split' if target.sums is not None else ''}"
        counts[name] += 1
        run(self)

    monkeypatch.setattr(Launch, "run", count)
    return counts


# Every format with every feature is in test_paged_kernels.py; here, which kernels a pass takes.
@pytest.mark.sample("int8-all-shape2-sm86", "bf16-chunk-shape1-sm75")
@pytest.mark.parametrize("gpu", [AMPERE, TURING], ids=["sm86", "sm75"])
@pytest.mark.parametrize(
    ("kv_format", "name", "shape"),
    [
        ("fp32", "window", (4, 2, 64)),
        ("bf16", "chunk", (4, 1, 80)),
        ("int8", "all", (5, 1, 64)),
        ("int8/int4", "plain", (4, 2, 80)),
        ("int4", "sinks", (2, 2, 64)),
        ("int4", "softcap", (4, 1, 128)),
    ],
)
def test_prompts_in_chunks_and_single_tokens_agree_with_float64(
    kv_format: str, name: str, shape: tuple[int, int, int], gpu: Gpu, launched: Counter[str]
) -> None:
    setup = TritonSetup(shape, kv_format, features=name, gpu=gpu)
    assert worst(setup.run(17), setup.wanted()) < 2e-6
    # Three passes: the last rows of 18 and 35 tokens, and 1 and 2 of themselves, take decode.
    assert launched["store_tokens"] == 3
    if gpu is TURING:
        assert launched["attend_pages without dot"] == 3
        assert launched["attend_pages"] == 0
    else:
        assert launched["attend_pages"] >= 4
        assert launched["attend_pages without dot"] == 0


def test_a_long_sequence_is_split(launched: Counter[str]) -> None:
    setup = TritonSetup((4, 1, 64), "int8", lengths=(260,))
    # All but the last token first.
    assert worst(setup.run(259), setup.wanted()) < 2e-6
    assert launched["attend_pages split"] == launched["merge_splits"] == 1


def test_tiled_attention_has_the_same_bits_in_every_chunking(launched: Counter[str]) -> None:
    def setup() -> TritonSetup:
        return TritonSetup((4, 1, 64), "int4", tiled=True, features="all", lengths=(35, 2))

    wanted = setup().run(200)
    outs = setup().run(17, together=False)
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    assert set(launched) == {"store_tokens", "attend_pages"}


class TrimmedSetup(TritonSetup):
    """Gives blocks back behind the window, and lets whoever might take them next write NaN there at once."""

    def store(self, sequence: Sequence, count: int) -> None:
        self.cache.store(sequence.table, count)
        allocator = self.cache.groups[0].allocator
        for block_id in range(allocator.num_blocks):
            if not allocator.references(block_id):
                self.pool.memory.put(block_id, torch.full((self.pool.spec.block_nbytes,), 0xFF, dtype=torch.uint8))


@pytest.mark.sample("sm86-fp32", "sm75-int4")
@pytest.mark.parametrize("kv_format", ["fp32", "int4"])
@pytest.mark.parametrize("gpu", [AMPERE, TURING], ids=["sm86", "sm75"])
def test_blocks_that_were_given_back_behind_the_window_are_never_read(
    kv_format: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In passes of 20 rows, and one of a single token.
    options: dict[str, Any] = {"features": "window", "gpu": gpu, "block": 16, "lengths": (61, 44)}
    wanted = TritonSetup((4, 1, 64), kv_format, **options).run(20)

    def upload_far(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Who reads what a table has in place of a freed block gets no byte of the pool: the process would end."""
        return x.masked_fill(x == NO_BLOCK, 1 << 20) if x.dim() == 2 and x.shape[1] != 5 else x

    monkeypatch.setattr(protocol, "upload", upload_far)
    setup = TrimmedSetup((4, 1, 64), kv_format, **options)
    outs = setup.run(20)
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    assert [sequence.table.blocks[0].count(NO_BLOCK) for sequence in setup.sequences] == [2, 1]


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_reading_back_is_what_the_pool_says_it_stores(kv_format: str) -> None:
    setup = Setup((4, 2, 64), kv_format, tiled=False)
    k, v = setup.k[2], setup.v[2]
    slots = torch.randperm(len(setup.pool.memory) * 32)[: len(k)]
    setup.pool.write(1, slots // 32, slots % 32, k, v)
    for found, wanted in zip(
        read_back(setup.pool, 1, slots, torch.float32), setup.pool.as_stored(1, k, v), strict=True
    ):
        assert torch.equal(found, wanted)


def test_fresh_prompts_take_one_ragged_call_where_torch_has_it() -> None:
    """torch's function runs on GPUs only; what stands in for it takes the same arguments and computes the same."""
    real, seen = find_varlen(), []
    assert real is not None

    def varlen(*arguments: Any, **options: Any) -> torch.Tensor:
        bound = signature(real).bind(*arguments, **options).arguments
        assert bound["window_size"] == (-1, 0)
        # An argument since torch 2.12.
        assert bound["enable_gqa"] if "enable_gqa" in signature(real).parameters else "enable_gqa" not in bound
        seen.append(bound["cu_seq_q"].tolist())
        return apart.attend(call, bound["query"], bound["key"], bound["value"], prompts)

    # The words that are asked for must be seen as the real function's.
    varlen.__signature__ = signature(real)  # type: ignore[attr-defined]
    prompts = Fresh(torch.arange(12), torch.tensor([0, 3, 12], dtype=torch.int32), [3, 9])
    call, apart = AttentionCall(0, 0.3), FreshAttention(None)
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    out = FreshAttention(varlen).attend(call, q, k, v, prompts)
    assert seen == [[0, 3, 12]]
    assert torch.equal(out, apart.attend(call, q, k, v, prompts))


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "flash"),
    [
        ((8, 0), torch.bfloat16, 128, True),
        ((7, 5), torch.float16, 128, False),
        ((9, 0), torch.float32, 128, False),
        ((9, 0), torch.float16, 320, False),
        ((9, 0), torch.float16, 100, False),
    ],
)
def test_flash_attention_is_for_what_it_supports(
    capability: tuple[int, int], dtype: torch.dtype, head_dim: int, flash: bool
) -> None:
    assert (FreshAttention.for_gpu(capability, dtype, head_dim)._varlen is not None) == flash


def test_prompts_in_bf16_take_no_flash_attention_without_a_gpu() -> None:
    setup = TritonSetup((4, 2, 64), "bf16", gpu=AMPERE)
    setup.attention = TritonAttention(setup.cache, torch.bfloat16, False, AMPERE)
    for name in ("q", "k", "v"):
        setattr(setup, name, [x.bfloat16() for x in getattr(setup, name)])
    assert worst(setup.run(64), setup.wanted()) < 0.01


def test_no_word_of_a_call_is_left_out() -> None:
    """A feature that a call learns to ask for must reach the kernels: add it there, then here."""
    words = {field.name for field in dataclasses.fields(AttentionCall)}
    # `latent` and `index` are for LatentAttention alone, `blocks` for BlockAttention: no kernel of these computes them.
    assert words == {"layer", "scale", "window", "chunk", "softcap", "sinks", "latent", "index", "blocks"}
