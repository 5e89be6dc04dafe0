"""Attention over every KV format agrees with float64 over the same codes, whatever a model asks of it."""

from typing import Any

import pytest
import torch

from moedge.quant.kv.codec import Coded
from moedge.quant.kv.format import KV_FORMATS
from moedge.runtime.attention.decode import Reduced
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.torch_backend import TorchAttention
from moedge.runtime.engine.batch import pack
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.shape.model_shape import KVGroup

LENGTHS = (1, 31, 75, 32, 130, 2)
# (query heads, KV heads, head size): every head size and group size that models have, each once.
SHAPES = [(2, 2, 64), (8, 2, 80), (5, 1, 96), (16, 1, 128), (4, 2, 256)]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "chunk": {"chunk": 48},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0},
    "all": {"window": 33, "softcap": 5.0, "sinks": True},
}


def in_float64(coded: Coded, blocks: list[int], length: int) -> torch.Tensor:
    """[H, length, D] of the codes of some blocks, by the format's definition alone."""
    codes, scales, zeros = (None if plane is None else plane[blocks] for plane in coded)
    assert codes is not None
    values = codes.double()
    if zeros is not None:
        values = torch.cat([codes % 16, codes // 16], -1).double()
    if scales is not None:
        per_group = values.shape[-1] // scales.shape[2]
        values = values * scales.double().transpose(2, 3).repeat_interleave(per_group, -1)
        if zeros is not None:
            values = values + zeros.double().transpose(2, 3).repeat_interleave(per_group, -1)
    return values.transpose(0, 1).flatten(1, 2)[:, :length]


def reference(
    call: AttentionCall, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pool: KVPool
) -> torch.Tensor:
    """q [n, Hq, D] over keys, values [H, n, D], in the frame that they are stored in: [n, Hq, D]."""
    n, num_heads, _ = q.shape
    group, q = num_heads // len(keys), q.double()
    scores = torch.zeros(num_heads, n, n, dtype=torch.float64)
    turned = q if pool.key_transform is None else q @ pool.key_transform.rotation.double()
    for head in range(num_heads):
        scores[head] = turned[:, head] @ keys[head // group].T
        if pool.key_transform is not None:
            scores[head] += (q[:, head] @ pool.key_transform.offsets[1, head // group].double()).unsqueeze(1)
    scores *= call.scale
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    row, key = torch.arange(n)[:, None], torch.arange(n)[None, :]
    hidden = (key > row) | (key <= row - (call.window or n)) | (key // (call.chunk or n) != row // (call.chunk or n))
    scores = scores.masked_fill(hidden, float("-inf"))
    if call.sinks is not None:
        scores = torch.cat([scores, call.sinks.double().view(-1, 1, 1).expand(-1, n, 1)], -1)
    p = scores.softmax(-1)[..., :n]
    return torch.stack([p[head] @ values[head // group] for head in range(num_heads)], 1)


class Setup:
    """Ragged sequences over a pool of two layers full of NaN, attended in chunks of each sequence."""

    def __init__(
        self, shape: tuple[int, int, int], kv_format: str, tiled: bool, features: str = "plain", block: int = 32
    ) -> None:
        self.num_heads, kv_heads, dim = shape
        asked = FEATURES[features]
        reach = asked.get("window") or asked.get("chunk")
        spec = KVSpec(KVGroup((0, 1), kv_heads, dim, reach), kv_format, block)
        num_blocks = sum(spec.blocks_for(length) for length in LENGTHS)
        torch.manual_seed(3)
        self.pool = KVPool(spec, num_blocks, key_offsets=torch.randn(2, kv_heads, dim) * 3, tiled=tiled)
        self.pool.memory.bytes.fill_(0xFF)
        self.cache = KVCache([self.pool])
        self.attention = TorchAttention(self.cache, torch.float32, tiled)
        self.sequences = [Sequence([7] * length, SamplingParams(1)) for length in LENGTHS]
        self.q = [torch.randn(length, self.num_heads, dim) for length in LENGTHS]
        bias = self.pool.key_transform.offsets[1] if self.pool.key_transform else 0
        self.k = [torch.randn(length, kv_heads, dim) + bias for length in LENGTHS]
        self.v = [torch.randn(length, kv_heads, dim) + 0.3 for length in LENGTHS]
        sinks = torch.linspace(-2, 3, self.num_heads) if asked.get("sinks") else None
        self.call = AttentionCall(1, dim**-0.5, **(asked | {"sinks": sinks}))

    def run(self, chunk: int, together: bool = True) -> list[torch.Tensor]:
        outs = [torch.full_like(q, float("nan")) for q in self.q]
        while pending := [sequence for sequence in self.sequences if sequence.num_pending]:
            chosen = [(s, min(chunk, s.num_pending)) for s in (pending if together else pending[-1:])]
            for sequence, count in chosen:
                assert self.cache.grow(sequence.table, sequence.table.num_tokens + count)
            batch = pack(chosen)
            rows = [(self.sequences.index(c.sequence), slice(c.past, c.past + c.count)) for c in batch.chunks]
            q, k, v = (torch.cat([x[index][part] for index, part in rows]) for x in (self.q, self.k, self.v))
            out = self.attention.attend(self.call, q, k, v, batch)
            for piece, (index, part) in zip(batch.chunks, rows, strict=True):
                outs[index][part] = out[piece.begin : piece.end]
                self.store(piece.sequence, piece.count)
        return outs

    def store(self, sequence: Sequence, count: int) -> None:
        """What follows a pass; nothing is freed, so that all that was stored can be compared."""
        sequence.table.num_tokens += count

    def wanted(self) -> list[torch.Tensor]:
        planes = self.pool.planes(1)
        return [
            reference(self.call, q, *(in_float64(side, s.table.blocks[0], len(q)) for side in planes), self.pool)
            for s, q in zip(self.sequences, self.q, strict=True)
        ]


def worst(outs: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(float((a.double() - b).norm() / b.norm()) for a, b in zip(outs, wanted, strict=True))


@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int8/int4", "int4"])
@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
def test_decode_and_prefill_agree_with_float64(kv_format: str, name: str, shape: tuple[int, int, int]) -> None:
    """Chunks of one row are decode's path, longer ones a prompt's; 130 rows cross a tile, 9 rows do not end with it."""
    for chunk, tiled in ((1, False), (9, False), (200, False), (200, True)):
        setup = Setup(shape, kv_format, tiled, name)
        assert worst(setup.run(chunk), setup.wanted()) < 2e-6, (chunk, tiled)


@pytest.mark.numerics
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("kv_format", ["bf16", "fp16"])
def test_narrow_native_formats_and_other_blocks(kv_format: str, block: int) -> None:
    """Arithmetic in fp32 over a cache in 16 bits: what is stored is what is attended over."""
    for chunk in (1, 50):
        setup = Setup((8, 2, 64), kv_format, False, "all", block)
        assert worst(setup.run(chunk), setup.wanted()) < 2e-6


@pytest.mark.numerics
@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_tiled_attention_has_the_same_bits_in_every_chunking(kv_format: str, name: str) -> None:
    """Rotation and codes included: neither chunks nor neighbours nor blocks are a numeric variable."""
    wanted = Setup((8, 2, 80), kv_format, True, name).run(200)
    for block, chunk, together in ((16, 1, True), (64, 5, False), (32, 50, True)):
        outs = Setup((8, 2, 80), kv_format, True, name, block).run(chunk, together)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), (block, chunk, together)


def test_a_dropped_shift_is_seen() -> None:
    """Negative control: with sinks, scores that lack the keys' offset are wrong, so the test above can fail."""
    setup = Setup((8, 2, 64), "int8", False, "sinks")
    assert setup.pool.key_transform is not None
    setup.pool.key_transform.shifts = lambda layer, q: torch.zeros(len(q), 8)  # type: ignore[method-assign]
    assert worst(setup.run(1), setup.wanted()) > 1e-3


@pytest.mark.numerics
@pytest.mark.parametrize("block", [8, 32])
@pytest.mark.parametrize("kv_format", ["fp32", "int8", "int4"])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_reductions_of_many_small_waves(name: str, kv_format: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With scratch for one piece at a time the result is the same."""
    for limit in ("TILE_NUMEL", "PARTIALS_NBYTES"):
        monkeypatch.setattr(f"moedge.runtime.attention.decode_plan.{limit}", 0)
    added, add = [], Reduced.add
    monkeypatch.setattr(Reduced, "add", lambda self, other: (added.append(1), add(self, other))[1])
    setup = Setup((8, 2, 64), kv_format, False, name, block)
    assert worst(setup.run(1), setup.wanted()) < 2e-6
    assert len(added) >= sorted(LENGTHS)[-2], "two sequences, a piece or more each, in as many passes"
