"""Decode attention in torch: split-KV, in the order of the pool (Flash-Decoding, Dao et al., 2023).

One batched matmul multiplies a tile of KV pieces, in place where they are consecutive in the pool, with the queries of
the sequences that own them. A second step reduces the partial results of each sequence. A piece's probabilities are
relative to a power of two near its own largest one, so that the weights of the reduction are exact in every dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...quant.kv.codec import INT4_CODES, Coded
from ...quant.kv.format import VectorFormat
from ...quant.matmul.thread_pool import WorkerPool
from .decode_plan import DecodePlan, Reduction, TileTask, Wave
from .protocol import AttentionCall


class Stored(NamedTuple):
    """A layer's keys or values in the cache, as `KVPool.planes` gives them, and their format."""

    planes: Coded
    format: VectorFormat

    @property
    def width(self) -> int:
        """Elements of a head."""
        return self.planes.codes.shape[-1] * self.format.packed


class CodeScratch:
    """One thread's scratch for the codes of a tile's keys or values, gathered and widened; it only grows."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self._codes, self._wide, self._dots = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(3))

    def fetch(self, stored: Stored, task: TileTask) -> Coded:
        """Codes [n, H, L, D/packed], scales and zeros [n, H, groups, L]; views of the pool where blocks are a range."""
        if task.block_range is not None:
            codes, *others = stored.planes
            factors = (None if plane is None else plane[task.block_range] for plane in others)
            return Coded(codes[task.block_range], *factors)
        codes, *others = stored.planes
        nbytes = codes[0].numel() * len(task.block_ids) * codes.itemsize
        if self._codes.shape[0] < nbytes:
            self._codes = self._codes.new_empty(nbytes)
        gathered = self._codes[:nbytes].view(codes.dtype).view(len(task.block_ids), *codes.shape[1:])
        torch.index_select(codes, 0, task.block_ids, out=gathered)
        count = len(task.owners)
        factors = (None if plane is None else plane.index_select(0, task.block_ids) for plane in others)
        joined = (None if plane is None else _join(plane, count, 3) for plane in factors)
        return Coded(_join(gathered, count, 2), *joined)

    def fetch_values(self, stored: Stored, task: TileTask) -> Coded:
        """As `fetch`, with zeros at masked positions: their bytes may be NaN, and 0 * NaN is NaN."""
        values = self.fetch(stored, task)
        if task.hidden is None or task.blank is None:
            return values
        codes, *factors = values
        if codes.is_floating_point():
            codes.view(-1, codes.shape[-1]).index_fill_(0, task.blank, 0)
        hidden = task.hidden[:, None, None]
        return Coded(codes, *(None if plane is None else plane.masked_fill(hidden, 0) for plane in factors))

    def widen(self, codes: torch.Tensor, format: VectorFormat, part: int, dtype: torch.dtype) -> torch.Tensor:
        """Element number `part` of every code, [n * H, L, D/packed] in `dtype`; codes hold `format.packed` elements."""
        if codes.dtype == dtype:
            return codes.flatten(0, 1)
        if format.packed > 1:
            codes = codes >> 4 if part else codes & INT4_CODES
        nbytes = codes.numel() * dtype.itemsize
        if self._wide.shape[0] < nbytes:
            self._wide = self._wide.new_empty(nbytes)
        return self._wide[:nbytes].view(dtype).view(codes.shape).copy_(codes).flatten(0, 1)

    def dots(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized memory for products."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._dots.shape[0] < nbytes:
            self._dots = self._dots.new_empty(nbytes)
        return self._dots[:nbytes].view(dtype).view(shape)


def scores(q: torch.Tensor, keys: Coded, format: VectorFormat, scratch: CodeScratch) -> torch.Tensor:
    """Multiplies q [n, H, G, D] in float32 with keys: [n, H, G, L] in float32."""
    n, heads, group, _ = q.shape
    total = None
    for part, rows in enumerate(q.chunk(format.packed, -1)):
        wide = scratch.widen(keys.codes, format, part, q.dtype)
        products = scratch.dots((n * heads, group, wide.shape[1]), q.dtype)
        torch.bmm(rows.flatten(0, 1), wide.transpose(1, 2), out=products)
        # Always a copy: the next part overwrites the scratch.
        dots = products.view(n, heads, group, -1).to(torch.float32, copy=True)
        if keys.scales is not None:
            dots *= keys.scales[:, :, part : part + 1].float()
        if keys.zeros is not None:
            dots.addcmul_(rows.float().sum(-1, keepdim=True), keys.zeros[:, :, part : part + 1].float())
        total = dots if total is None else total.add_(dots)
    assert total is not None
    return total


def weighted_sum(p: torch.Tensor, values: Coded, format: VectorFormat, scratch: CodeScratch, out: torch.Tensor) -> None:
    """Fills out [n, H, G, D] with the product of p [n, H, G, L] in float32 and values."""
    for part, target in enumerate(out.chunk(format.packed, -1)):
        wide = scratch.widen(values.codes, format, part, scratch.dtype)
        weights = p if values.scales is None else p * values.scales[:, :, part : part + 1].float()
        factors = scratch.dots((len(wide), *weights.shape[2:]), scratch.dtype).copy_(weights.flatten(0, 1))
        if values.zeros is None:
            torch.bmm(factors, wide, out=target.flatten(0, 1))
        else:
            shift = (p * values.zeros[:, :, part : part + 1].float()).sum(-1, keepdim=True)
            torch.add(torch.bmm(factors, wide).view(target.shape), shift, out=target)


def _join(plane: torch.Tensor, count: int, tokens: int) -> torch.Tensor:
    """Joins every m neighbours of [count * m, H, ..., T, ...] along the axis `tokens` of T tokens: [count, H, ...]."""
    if len(plane) == count:
        return plane
    apart = plane.view(count, -1, *plane.shape[1:]).movedim(1, tokens)
    return apart.flatten(tokens, tokens + 1)


LOG2E = math.log2(math.e)
# Below every exponent, and finite: differences are not NaN.
NOTHING = -1e30


@dataclass(frozen=True, slots=True)
class Query:
    """The queries of one token of each of S sequences, q [S, Hq, D], in the basis of the stored keys.

    `shift` [S, Hq], scaled, is added to the scores (`KeyTransform.shifts`); None where softmax cancels it.
    """

    call: AttentionCall
    q: torch.Tensor
    shift: torch.Tensor | None

    def folded(self, kv_heads: int) -> torch.Tensor:
        """The queries by KV head, [S, H, G, D].

        In float32: products have the dtype of their factors, and scores must not be rounded.
        """
        return self.q.float().view(self.q.shape[0], kv_heads, -1, self.q.shape[-1])

    def exponents(self, products: torch.Tensor, task: TileTask) -> torch.Tensor:
        """Turns the products [n, H, G, L] of a tile, in place, into log2 of the terms that softmax sums."""
        softcap = self.call.softcap
        factor = 1.0 if softcap is not None else LOG2E
        products *= self.call.scale * factor
        if self.shift is not None:
            shift = self.shift * factor
            products += shift.index_select(0, task.owners).view(*products.shape[:3], 1)
        if softcap is not None:
            products.div_(softcap).tanh_().mul_(softcap * LOG2E)
        if task.hidden is not None:
            products.masked_fill_(task.hidden[:, None, None], float("-inf"))
        return products


class DecodeScratch:
    """Scratch of all workers and the partials of one wave; it only grows."""

    def __init__(self, num_workers: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.codes = [CodeScratch(dtype, device) for _ in range(num_workers)]
        self._parts = torch.empty(0, dtype=dtype, device=device)
        self._exponents = torch.empty(0, device=device)

    def partials(self, count: int, kv_heads: int, group: int, dim: int) -> Partials:
        """Uninitialized partials of `count` rows."""
        shape = (count, kv_heads, group)
        numel = math.prod(shape)
        if self._parts.shape[0] < numel * dim:
            self._parts = self._parts.new_empty(numel * dim)
        if self._exponents.shape[0] < 2 * numel:
            self._exponents = self._exponents.new_empty(2 * numel)
        exponents, totals = self._exponents[: 2 * numel].view(2, *shape)
        return Partials(self._parts[: numel * dim].view(*shape, dim), exponents, totals)


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial softmax sums of P pieces.

    The sum of p * v is 2^exponents [P, H, G] * parts [P, H, G, D], the sum of p is 2^exponents * totals [P, H, G].
    """

    parts: torch.Tensor
    exponents: torch.Tensor
    totals: torch.Tensor


@dataclass(frozen=True, slots=True)
class Reduced:
    """Partials reduced to S sequences: exponents and totals [S, Hq], parts [S, Hq, D] in float32."""

    parts: torch.Tensor
    exponents: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def of(cls, partials: Partials, reduction: Reduction, num_sequences: int) -> Reduced:
        count, dim = partials.parts.shape[0], partials.parts.shape[-1]
        exponents = partials.exponents.view(count, -1)
        among = exponents.index_select(0, reduction.rows)
        highest = among.new_full((num_sequences, among.shape[1]), NOTHING)
        highest.scatter_reduce_(0, reduction.owners.unsqueeze(1).expand_as(among), among, "amax")
        weights = among.sub_(highest.index_select(0, reduction.owners)).exp2_()
        totals = torch.zeros_like(highest)
        totals.index_add_(
            0, reduction.owners, partials.totals.view(count, -1).index_select(0, reduction.rows).mul_(weights)
        )
        by_row = torch.empty_like(exponents).index_copy_(0, reduction.rows, weights)
        head_rows = reduction.head_rows
        parts = F.embedding_bag(
            head_rows,
            partials.parts.view(-1, dim),
            reduction.offsets,
            mode="sum",
            per_sample_weights=by_row.view(-1).index_select(0, head_rows).to(partials.parts.dtype),
        )
        return cls(parts.view(num_sequences, -1, dim).float(), highest, totals)

    def add(self, other: Reduced) -> Reduced:
        """The reduction of two waves; overwrites the parts of the first."""
        highest = torch.maximum(self.exponents, other.exponents)
        mine, others = torch.exp2(self.exponents - highest), torch.exp2(other.exponents - highest)
        parts = self.parts.mul_(mine.unsqueeze(-1)).addcmul_(other.parts, others.unsqueeze(-1))
        return Reduced(parts, highest, self.totals * mine + other.totals * others)

    def normalize(self, sinks: torch.Tensor | None) -> torch.Tensor:
        """The output of attention [S, Hq, D]; `sinks` [Hq] enter the softmax and contribute no value."""
        totals = self.totals
        if sinks is not None:
            totals = totals + torch.exp2(sinks.float() * LOG2E - self.exponents)
        return self.parts.div_(totals.unsqueeze(-1))


class Decoder:
    """Runs decode plans on a pool of threads, with scratch that it keeps from pass to pass."""

    def __init__(self, workers: WorkerPool, dtype: torch.dtype, device: torch.device | str) -> None:
        self._workers = workers
        self._scratch = DecodeScratch(workers.size, dtype, device)

    def decode(self, query: Query, keys: Sequence[Stored], values: Stored, plan: DecodePlan) -> torch.Tensor:
        """Attention of S tokens over their cached keys and values: [S, Hq, D] in float32.

        `keys` may be stored in several parts; queries have the elements of the parts one after the other.
        """
        threads = torch.get_num_threads()
        if plan.single_threaded:
            torch.set_num_threads(1)
        try:
            return self._decode(query, keys, values, plan)
        finally:
            torch.set_num_threads(threads)

    def _decode(self, query: Query, keys: Sequence[Stored], values: Stored, plan: DecodePlan) -> torch.Tensor:
        folded = query.folded(values.planes.codes.shape[1])
        parts = list(zip(torch.split(folded, [part.width for part in keys], -1), keys, strict=True))
        total: Reduced | None = None
        for wave in plan.waves:
            reduced = Reduced.of(self._run_wave(query, parts, values, wave), wave.reduction, len(folded))
            total = reduced if total is None else total.add(reduced)
        assert total is not None
        return total.normalize(query.call.sinks)

    def _run_wave(
        self, query: Query, parts: Sequence[tuple[torch.Tensor, Stored]], values: Stored, wave: Wave
    ) -> Partials:
        """`parts` are queries [S, H, G, D] and the stored keys that they are multiplied with."""
        _, kv_heads, group, _ = parts[0][0].shape
        partials = self._scratch.partials(wave.num_rows, kv_heads, group, values.width)

        def work(task: TileTask, worker: int) -> None:
            rows, scratch = slice(task.begin, task.end), self._scratch.codes[worker]
            products = [
                scores(q.index_select(0, task.owners), scratch.fetch(keys, task), keys.format, scratch)
                for q, keys in parts
            ]
            p = query.exponents(reduce(torch.Tensor.add_, products), task)
            exponents = torch.amax(p, -1).ceil_()
            p.sub_(exponents.unsqueeze(-1)).exp2_()
            partials.exponents[rows] = exponents
            torch.sum(p, -1, out=partials.totals[rows])
            weighted_sum(p, scratch.fetch_values(values, task), values.format, scratch, partials.parts[rows])

        self._workers.run(wave.tasks, work)
        return partials
