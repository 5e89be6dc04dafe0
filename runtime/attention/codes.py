"""Products of queries with keys, and of probabilities with values, straight over the cache's codes.

Scales and zeros are taken out of the products. With k = c * s + z for every key, q · k = s (q · c) + z sum(q), and with
v = c * s + z for every value, the sum of p v is that of (p s) c and of p z. So codes are only widened, never multiplied
one by one: small integers, exact in every dtype. n pieces, H KV heads, G query heads each, L keys of D elements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...quant.kv_codec import INT4_CODES, Coded
from ...quant.kv_format import VectorFormat
from .sweeps import Job


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
