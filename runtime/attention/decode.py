"""The new tokens of a pass over the cache, in the order of its pool: what a batch job spends most of its attention on.

Every piece of the pool meets the query of the sequence that it belongs to, all of a stretch in one batched product, in
place; what the pieces of a sequence found is summed up afterwards (split keys as in Flash-Decoding, Dao et al., 2023).
A piece's probabilities are relative to a power of two near its own largest one, so that the weights of the sum are
exact in every dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ...quant.kv.codec import INT4_CODES, Coded
from ...quant.kv.format import VectorFormat
from ...quant.matmul.thread_pool import WorkerPool
from .decode_plan import Decoding, Job, Sums, Sweep
from .protocol import AttentionCall


class Stored(NamedTuple):
    """A layer's keys or values in the cache, as `KVPool.planes` gives them, and their format."""

    planes: Coded
    format: VectorFormat


class CodeScratch:
    """One thread's room for the codes of a job's keys or values, gathered and widened; it only grows."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype = dtype
        self._codes, self._wide, self._dots = (torch.empty(0, dtype=torch.uint8, device=device) for _ in range(3))

    def fetch(self, stored: Stored, job: Job) -> Coded:
        """Codes [n, H, L, D/packed], scales and zeros [n, H, groups, L]: in place where they lie side by side."""
        if job.stretch is not None:
            codes, *others = stored.planes
            here = (None if plane is None else plane[job.stretch] for plane in others)
            return Coded(codes[job.stretch], *here)
        codes, *others = stored.planes
        nbytes = codes[0].numel() * len(job.block_ids) * codes.itemsize
        if len(self._codes) < nbytes:
            self._codes = self._codes.new_empty(nbytes)
        room = self._codes[:nbytes].view(codes.dtype).view(len(job.block_ids), *codes.shape[1:])
        torch.index_select(codes, 0, job.block_ids, out=room)
        count = len(job.owners)
        factors = (None if plane is None else plane.index_select(0, job.block_ids) for plane in others)
        return Coded(_join(room, count, 2), *(None if plane is None else _join(plane, count, 3) for plane in factors))

    def fetch_values(self, stored: Stored, job: Job) -> Coded:
        """The same, zeros at positions that are not seen: what lies there may be NaN, and 0 * NaN is NaN."""
        values = self.fetch(stored, job)
        if job.hidden is None or job.blank is None:
            return values
        codes, *factors = values
        if codes.is_floating_point():
            codes.view(-1, codes.shape[-1]).index_fill_(0, job.blank, 0)
        hidden = job.hidden[:, None, None]
        return Coded(codes, *(None if plane is None else plane.masked_fill(hidden, 0) for plane in factors))

    def widen(self, codes: torch.Tensor, format: VectorFormat, part: int, dtype: torch.dtype) -> torch.Tensor:
        """Part `part` of the elements [n * H, L, D/packed]; a packed code holds as many parts as elements."""
        if codes.dtype == dtype:
            return codes.flatten(0, 1)
        if format.packed > 1:
            codes = codes >> 4 if part else codes & INT4_CODES
        nbytes = codes.numel() * dtype.itemsize
        if len(self._wide) < nbytes:
            self._wide = self._wide.new_empty(nbytes)
        return self._wide[:nbytes].view(dtype).view(codes.shape).copy_(codes).flatten(0, 1)

    def dots(self, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
        """Room for products."""
        nbytes = math.prod(shape) * dtype.itemsize
        if len(self._dots) < nbytes:
            self._dots = self._dots.new_empty(nbytes)
        return self._dots[:nbytes].view(dtype).view(shape)


def scores(q: torch.Tensor, keys: Coded, format: VectorFormat, scratch: CodeScratch) -> torch.Tensor:
    """q [n, H, G, D], float32, times keys: [n, H, G, L] in float32."""
    n, heads, group, _ = q.shape
    total = None
    for part, rows in enumerate(q.chunk(format.packed, -1)):
        wide = scratch.widen(keys.codes, format, part, q.dtype)
        room = scratch.dots((n * heads, group, wide.shape[1]), q.dtype)
        torch.bmm(rows.flatten(0, 1), wide.transpose(1, 2), out=room)
        # A copy in any case: the room is used again.
        dots = room.view(n, heads, group, -1).to(torch.float32, copy=True)
        if keys.scales is not None:
            dots *= keys.scales[:, :, part : part + 1].float()
        if keys.zeros is not None:
            dots.addcmul_(rows.float().sum(-1, keepdim=True), keys.zeros[:, :, part : part + 1].float())
        total = dots if total is None else total.add_(dots)
    assert total is not None
    return total


def weighted_sum(p: torch.Tensor, values: Coded, format: VectorFormat, scratch: CodeScratch, out: torch.Tensor) -> None:
    """Fills out [n, H, G, D] with p [n, H, G, L], float32, times values."""
    for part, target in enumerate(out.chunk(format.packed, -1)):
        wide = scratch.widen(values.codes, format, part, scratch.dtype)
        weights = p if values.scales is None else p * values.scales[:, :, part : part + 1].float()
        room = scratch.dots((len(wide), *weights.shape[2:]), scratch.dtype).copy_(weights.flatten(0, 1))
        if values.zeros is None:
            torch.bmm(room, wide, out=target.flatten(0, 1))
        else:
            shift = (p * values.zeros[:, :, part : part + 1].float()).sum(-1, keepdim=True)
            torch.add(torch.bmm(room, wide).view(target.shape), shift, out=target)


def _join(plane: torch.Tensor, count: int, tokens: int) -> torch.Tensor:
    """[count * m, H, ..., T, ...] with T blocks' tokens at axis `tokens`: m neighbours become one, [count, H, ...]."""
    if len(plane) == count:
        return plane
    apart = plane.view(count, -1, *plane.shape[1:]).movedim(1, tokens)
    return apart.flatten(tokens, tokens + 1)


LOG2E = math.log2(math.e)
# Below every exponent, and finite: differences stay numbers.
NOTHING = -1e30


@dataclass(frozen=True, slots=True)
class Query:
    """One token's queries of each of S sequences, q [S, Hq, D], as they meet stored keys.

    `shift` [S, Hq], scaled, is what scores lack (`KeyFrame.shifts`); None where it does not matter. `sinks` [Hq].
    """

    call: AttentionCall
    q: torch.Tensor
    shift: torch.Tensor | None

    def folded(self, kv_heads: int) -> torch.Tensor:
        """[S, H, G, D] in float32: products have the dtype of their factors, and scores must not be rounded."""
        return self.q.float().view(len(self.q), kv_heads, -1, self.q.shape[-1])

    def exponents(self, products: torch.Tensor, job: Job) -> torch.Tensor:
        """log2 of what softmax sums, from products [n, H, G, L] of a job, which are overwritten."""
        softcap = self.call.softcap
        factor = 1.0 if softcap is not None else LOG2E
        products *= self.call.scale * factor
        if self.shift is not None:
            shift = self.shift * factor
            products += shift.index_select(0, job.owners).view(*products.shape[:3], 1)
        if softcap is not None:
            products.div_(softcap).tanh_().mul_(softcap * LOG2E)
        if job.hidden is not None:
            products.masked_fill_(job.hidden[:, None, None], float("-inf"))
        return products


class DecodeScratch:
    """What the jobs of a sweep leave behind: by place and query head, it only grows."""

    def __init__(self, members: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.codes = [CodeScratch(dtype, device) for _ in range(members)]
        self._parts = torch.empty(0, dtype=dtype, device=device)
        self._exponents = torch.empty(0, device=device)

    def found(self, count: int, kv_heads: int, group: int, dim: int) -> Found:
        shape = (count, kv_heads, group)
        numel = math.prod(shape)
        if len(self._parts) < numel * dim:
            self._parts = self._parts.new_empty(numel * dim)
        if len(self._exponents) < 2 * numel:
            self._exponents = self._exponents.new_empty(2 * numel)
        exponents, totals = self._exponents[: 2 * numel].view(2, *shape)
        return Found(self._parts[: numel * dim].view(*shape, dim), exponents, totals)


@dataclass(frozen=True, slots=True)
class Found:
    """By place: 2^exponents [P, H, G] times parts [P, H, G, D] are sums of p v, times totals [P, H, G] sums of p."""

    parts: torch.Tensor
    exponents: torch.Tensor
    totals: torch.Tensor


@dataclass(frozen=True, slots=True)
class Summed:
    """The same by sequence: 2^exponents [S, Hq] times parts [S, Hq, D] and totals [S, Hq]; parts in float32."""

    parts: torch.Tensor
    exponents: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def of(cls, found: Found, sums: Sums, num_sequences: int) -> Summed:
        count, dim = len(found.parts), found.parts.shape[-1]
        exponents = found.exponents.view(count, -1)
        among = exponents.index_select(0, sums.places)
        highest = among.new_full((num_sequences, among.shape[1]), NOTHING)
        highest.scatter_reduce_(0, sums.owners.unsqueeze(1).expand_as(among), among, "amax")
        weights = among.sub_(highest.index_select(0, sums.owners)).exp2_()
        totals = torch.zeros_like(highest)
        totals.index_add_(0, sums.owners, found.totals.view(count, -1).index_select(0, sums.places).mul_(weights))
        by_place = torch.empty_like(exponents).index_copy_(0, sums.places, weights)
        lanes = sums.lanes
        parts = F.embedding_bag(
            lanes,
            found.parts.view(-1, dim),
            sums.bounds,
            mode="sum",
            per_sample_weights=by_place.view(-1).index_select(0, lanes).to(found.parts.dtype),
        )
        return cls(parts.view(num_sequences, -1, dim).float(), highest, totals)

    def add(self, other: Summed) -> Summed:
        highest = torch.maximum(self.exponents, other.exponents)
        mine, others = torch.exp2(self.exponents - highest), torch.exp2(other.exponents - highest)
        parts = self.parts.mul_(mine.unsqueeze(-1)).addcmul_(other.parts, others.unsqueeze(-1))
        return Summed(parts, highest, self.totals * mine + other.totals * others)

    def normal(self, sinks: torch.Tensor | None) -> torch.Tensor:
        totals = self.totals
        if sinks is not None:
            totals = totals + torch.exp2(sinks.float() * LOG2E - self.exponents)
        return self.parts.div_(totals.unsqueeze(-1))


class Decoder:
    """Threads, and their memory."""

    def __init__(self, crew: WorkerPool, dtype: torch.dtype, device: torch.device | str) -> None:
        self._crew = crew
        self._scratch = DecodeScratch(crew.size, dtype, device)

    def decode(self, query: Query, keys: Stored, values: Stored, plan: Decoding) -> torch.Tensor:
        """[S, Hq, D] in float32."""
        threads = torch.get_num_threads()
        if plan.little:
            torch.set_num_threads(1)
        try:
            return self._decode(query, (keys, values), plan)
        finally:
            torch.set_num_threads(threads)

    def _decode(self, query: Query, stored: tuple[Stored, Stored], plan: Decoding) -> torch.Tensor:
        q = query.folded(stored[0].planes.codes.shape[1])
        total: Summed | None = None
        for sweep in plan.sweeps:
            summed = Summed.of(self._sweep(query, q, stored, sweep), sweep.sums, len(q))
            total = summed if total is None else total.add(summed)
        assert total is not None
        return total.normal(query.call.sinks)

    def _sweep(self, query: Query, q: torch.Tensor, stored: tuple[Stored, Stored], sweep: Sweep) -> Found:
        keys, values = stored
        found = self._scratch.found(sweep.count, *q.shape[1:])

        def work(job: Job, member: int) -> None:
            places, scratch = slice(job.begin, job.end), self._scratch.codes[member]
            products = scores(q.index_select(0, job.owners), scratch.fetch(keys, job), keys.format, scratch)
            p = query.exponents(products, job)
            exponents = torch.amax(p, -1).ceil_()
            p.sub_(exponents.unsqueeze(-1)).exp2_()
            found.exponents[places] = exponents
            torch.sum(p, -1, out=found.totals[places])
            weighted_sum(p, scratch.fetch_values(values, job), values.format, scratch, found.parts[places])

        self._crew.run(sweep.jobs, work)
        return found
