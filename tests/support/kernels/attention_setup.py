"""Ragged sequences over a cache, attended chunk by chunk, and their attention in float64 by the formats' definition."""

from typing import Any

import torch

from moedge.quant.kernels.gpu import Gpu
from moedge.quant.kv.codec import Coded
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.torch_backend import TorchAttention
from moedge.runtime.attention.triton_backend import TritonAttention
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup

LENGTHS = (1, 31, 75, 32, 130, 2)
AMPERE, TURING = Gpu((8, 6), 28), Gpu((7, 5), 14)
# Short: the interpreter takes its time. With chunks of 17 every kernel gets some rows.
SHORT_LENGTHS = (1, 18, 35, 2)
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
        self.sequences = [Sequence([7] * length, SequenceSampling(1)) for length in LENGTHS]
        self.q = [torch.randn(length, self.num_heads, dim) for length in LENGTHS]
        bias = self.pool.key_transform.offsets[1] if self.pool.key_transform else 0
        self.k = [torch.randn(length, kv_heads, dim) + bias for length in LENGTHS]
        self.v = [torch.randn(length, kv_heads, dim) + 0.3 for length in LENGTHS]
        sinks = torch.linspace(-2, 3, self.num_heads) if asked.get("sinks") else None
        self.call = AttentionCall(1, dim**-0.5, **(asked | {"sinks": sinks}))

    def run(self, chunk: int, together: bool = True, last: int | None = None) -> list[torch.Tensor]:
        """The attention of all rows; with `last`, only so many rows of each sequence come in chunks, after the others
        came at once."""
        outs = [torch.full_like(q, float("nan")) for q in self.q]
        while pending := [sequence for sequence in self.sequences if sequence.num_pending]:
            waiting = pending if together else pending[-1:]
            chosen = [(s, max(min(chunk, s.num_pending), s.num_pending - (last or s.num_pending))) for s in waiting]
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


class TritonSetup(Setup):
    """The sequences of `Setup`, shorter, before the Triton backend."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        kv_format: str,
        tiled: bool = False,
        features: str = "plain",
        gpu: Gpu = AMPERE,
        block: int = 32,
        lengths: tuple[int, ...] = SHORT_LENGTHS,
    ) -> None:
        super().__init__(shape, kv_format, tiled, features, block)
        self.sequences = [Sequence([7] * length, SequenceSampling(1)) for length in lengths]
        for name in ("q", "k", "v"):
            rows = torch.cat(getattr(self, name))
            setattr(self, name, [rows[index : index + length] for index, length in enumerate(lengths)])
        self.attention = TritonAttention(self.cache, torch.float32, tiled, gpu)


class NativeSetup(Setup):
    """The sequences of `Setup` before the CPU kernels, in float32 or bfloat16."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        kv_format: str,
        tiled: bool = False,
        features: str = "plain",
        block: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(shape, kv_format, tiled, features, block)
        for name in ("q", "k", "v"):
            setattr(self, name, [x.to(dtype) for x in getattr(self, name)])
        self.attention = TorchAttention(self.cache, dtype, tiled, native=True)
