"""Attention over the paged cache agrees with its definition in float64, in whatever chunks a prompt comes."""

import pytest
import torch

from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.torch_backend import TorchAttention
from moedge.runtime.engine.sequence import Batch, Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.model_shape import KVGroup

pytestmark = pytest.mark.numerics

HEADS, KV_HEADS, DIM = 8, 2, 16
LENGTHS = (1, 31, 75, 32, 130)


def reference(call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence, by definition: q [n, Hq, D], k, v [n, Hkv, D]."""
    q, k, v = q.double(), k.double(), v.double()
    n, group = len(q), q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    hidden = (distance < 0) | (distance >= (call.window or n))
    if call.chunk:
        chunks = torch.arange(n) // call.chunk
        hidden |= chunks[:, None] != chunks[None, :]
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        sinks = call.sinks.double().view(-1, 1, 1).expand(-1, n, 1)
        scores = torch.cat([scores, sinks], -1)
    p = scores.softmax(-1)[..., :n]
    return torch.einsum("hqk,khd->qhd", p, v.repeat_interleave(group, 1))


class Setup:
    """Sequences of LENGTHS tokens with random q, k, v, attended in chunks over a cache full of NaN."""

    def __init__(self, block: int, tiled: bool, kv_format: str = "fp32", reach: int | None = None) -> None:
        spec = KVSpec(KVGroup((0, 1), KV_HEADS, DIM, reach), kv_format, block)
        pool = KVPool(spec, sum(spec.blocks_for(length) for length in LENGTHS))
        pool.memory.bytes.fill_(0xFF)
        self.cache = KVCache([pool])
        self.attention = TorchAttention(self.cache, torch.float32, tiled)
        torch.manual_seed(1)
        self.sequences = [Sequence([7] * length, SequenceSampling(1)) for length in LENGTHS]
        self.q = [torch.randn(length, HEADS, DIM) for length in LENGTHS]
        self.k = [torch.randn(length, KV_HEADS, DIM) for length in LENGTHS]
        self.v = [torch.randn(length, KV_HEADS, DIM) for length in LENGTHS]

    def run(self, call: AttentionCall, chunk: int, together: bool) -> list[torch.Tensor]:
        outs = [torch.full_like(q, float("nan")) for q in self.q]
        while pending := [s for s in self.sequences if s.num_pending]:
            self._pass(call, pending if together else pending[:1], chunk, outs)
        return outs

    def _pass(self, call: AttentionCall, sequences: list[Sequence], chunk: int, outs: list[torch.Tensor]) -> None:
        counts = [min(chunk, sequence.num_pending) for sequence in sequences]
        for sequence, count in zip(sequences, counts, strict=True):
            assert self.cache.grow(sequence.table, sequence.table.num_tokens + count)
        batch = pack(list(zip(sequences, counts, strict=True)))
        q, k, v = (self._rows(batch, x) for x in (self.q, self.k, self.v))
        out = self.attention.attend(call, q, k, v, batch)
        for part in batch.chunks:
            index = self.sequences.index(part.sequence)
            outs[index][part.past : part.past + part.count] = out[part.begin : part.end]
            part.sequence.table.num_tokens += part.count

    def _rows(self, batch: Batch, tensors: list[torch.Tensor]) -> torch.Tensor:
        rows = [tensors[self.sequences.index(c.sequence)][c.past : c.past + c.count] for c in batch.chunks]
        return torch.cat(rows)


CALLS = {
    "plain": AttentionCall(1, DIM**-0.5),
    "window": AttentionCall(1, 0.3, window=20),
    "sinks": AttentionCall(1, 0.3, sinks=torch.linspace(-2, 3, HEADS)),
    "chunk": AttentionCall(1, 0.3, chunk=20),
    "softcap": AttentionCall(1, 0.9, softcap=2.0),
    "all": AttentionCall(1, 0.9, window=33, softcap=5.0, sinks=torch.linspace(-2, 3, HEADS)),
}


# Every feature with and without tiles, and every chunking with both.
@pytest.mark.sample(
    "plain-1-fast", "plain-7-tiled", "window-7-fast", "window-200-tiled", "sinks-200-fast", "sinks-1-tiled",
    "chunk-1-fast", "chunk-7-tiled", "softcap-7-fast", "softcap-200-tiled", "all-200-fast", "all-1-tiled",
)  # fmt: skip
@pytest.mark.parametrize("tiled", [False, True], ids=["fast", "tiled"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
@pytest.mark.parametrize("name", CALLS)
def test_any_chunking_agrees_with_float64(name: str, chunk: int, tiled: bool) -> None:
    call = CALLS[name]
    setup = Setup(32, tiled, reach=call.window or call.chunk)
    outs = setup.run(call, chunk, together=True)
    for out, q, k, v in zip(outs, setup.q, setup.k, setup.v, strict=True):
        wanted = reference(call, q, k, v)
        assert (out.double() - wanted).norm() / wanted.norm() < 2e-6


@pytest.mark.sample("chunk", "all")
@pytest.mark.parametrize("name", CALLS)
def test_tiled_attention_has_the_same_bits_in_every_chunking_and_block_size(name: str) -> None:
    """The exactness contract: neither chunks, nor neighbours, nor blocks are a numeric variable."""
    call = CALLS[name]
    reach = call.window or call.chunk
    wanted = Setup(32, tiled=True, reach=reach).run(call, 200, together=True)
    for block, chunk, together in ((16, 1, True), (64, 5, False), (32, 16, True), (32, 50, False)):
        outs = Setup(block, tiled=True, reach=reach).run(call, chunk, together)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), (block, chunk, together)


def test_a_cache_planned_for_another_reach_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"layer 1 looks back 20 tokens, and config\.json says None"):
        Setup(32, tiled=True).run(CALLS["window"], 200, together=True)


def test_fast_attention_does_not_promise_bits() -> None:
    """Negative control: without tiles the chunking shows in the last bits, so the test above can fail."""
    wanted = Setup(32, tiled=False).run(CALLS["plain"], 200, together=True)
    outs = Setup(32, tiled=False).run(CALLS["plain"], 5, together=True)
    assert not all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
@pytest.mark.parametrize("tiled", [False, True], ids=["fast", "tiled"])
def test_prompts_attend_over_keys_and_values_as_stored(kv_format: str, tiled: bool) -> None:
    """The cache is strict: a whole prompt sees the same rounded keys as its continuation would."""
    setup = Setup(32, tiled, kv_format)
    outs = setup.run(CALLS["plain"], 200, together=True)
    pool = setup.cache.pools[0]
    for out, q, k, v in zip(outs, setup.q, setup.k, setup.v, strict=True):
        wanted = reference(CALLS["plain"], q, *pool.as_stored(1, k, v))
        assert (out.double() - wanted).norm() / wanted.norm() < 2e-6
