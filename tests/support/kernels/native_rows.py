"""Sequences over a paged cache whose last tokens the CPU kernels attend with, and their attention in float64."""

from typing import NamedTuple

import torch

from moedge.quant.matmul.thread_pool import WorkerPool
from moedge.runtime.attention.native_rows import RowAttention, RowQuery
from moedge.runtime.attention.protocol import AttentionCall
from moedge.runtime.attention.torch_backend import stored
from moedge.runtime.engine.sequence import Sequence, pack
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup

from .attention_setup import in_float64


class Rows(NamedTuple):
    """Sequences of some lengths over a pool full of NaN, whose last tokens are computed."""

    pool: KVPool
    call: AttentionCall
    q: torch.Tensor
    sequences: list[Sequence]

    @classmethod
    def make(
        cls,
        shape: tuple[int, int, int],
        kv_format: str,
        lengths: list[int],
        block: int,
        dtype: torch.dtype,
        **asked: object,
    ) -> "Rows":
        heads, kv_heads, dim = shape
        generator = torch.Generator().manual_seed(11)
        window = asked.get("window") or asked.get("chunk")
        spec = KVSpec(KVGroup((0,), kv_heads, dim, window), kv_format, block)
        counts = [spec.blocks_for(length) for length in lengths]
        pool = KVPool(spec, sum(counts), tiled=True)
        pool.memory.bytes.fill_(0xFF)
        order, sequences = torch.randperm(sum(counts), generator=generator).tolist(), []
        for length, count in zip(lengths, counts, strict=True):
            sequence = Sequence([0] * length, SequenceSampling(1))
            sequence.table.blocks, order = [order[:count]], order[count:]
            sequence.table.num_tokens = length - 1
            at = torch.arange(length)
            k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
            pool.write(0, torch.tensor(sequence.table.blocks[0])[at // block], at % block, k, v + 0.2)
            sequences.append(sequence)
        q = torch.randn(len(lengths), heads, dim, generator=generator).to(dtype)
        return cls(pool, AttentionCall(0, dim**-0.5, **asked), q, sequences)  # type: ignore[arg-type]

    def run(self, chosen: list[int] | None = None, threads: int = 2) -> torch.Tensor:
        """The attention of some sequences, in that order: all where `chosen` is None."""
        chosen = list(range(len(self.sequences))) if chosen is None else chosen
        rows = RowAttention(KVCache([self.pool]), self.q.dtype, WorkerPool(threads))
        plan = rows.plan(self.call, pack([(self.sequences[index], 1) for index in chosen]), 0)
        assert plan is not None
        q = self.q[chosen]
        out = torch.full_like(q, float("nan"))
        keys, values = stored(self.pool, 0)
        rows.attend(RowQuery.of(self.call, self.pool, 0, q), [keys], values, plan, out)
        return out

    def wanted(self) -> torch.Tensor:
        """By definition, in float64."""
        parts, group = [], self.q.shape[1] // self.pool.spec.group.kv_heads
        for q, sequence in zip(self.q.double(), self.sequences, strict=True):
            length = sequence.table.num_tokens + 1
            keys, values = (
                in_float64(side, sequence.table.blocks[0], length)[:, self.call.first_visible(length - 1) :]
                for side in self.pool.planes(0)
            )
            transform = self.pool.key_transform
            turned = q if transform is None else q @ transform.rotation.double()
            scores = torch.einsum("hd,hkd->hk", turned, keys.repeat_interleave(group, 0)) * self.call.scale
            if self.call.softcap:
                scores = torch.tanh(scores / self.call.softcap) * self.call.softcap
            sinks = torch.empty(len(scores), 0) if self.call.sinks is None else self.call.sinks.double()[:, None]
            p = torch.cat([scores, sinks], 1).softmax(-1)[:, : scores.shape[1]]
            parts.append(torch.einsum("hk,hkd->hd", p, values.repeat_interleave(group, 0)))
        return torch.stack(parts)
