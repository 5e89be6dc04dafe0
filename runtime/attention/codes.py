"""Products of queries with keys, and of probabilities with values, straight over the cache's codes.

Scales and zeros are taken out of the products. With k = c * s + z for every key, q · k = s (q · c) + z sum(q), and with
v = c * s + z for every value, the sum of p v is that of (p s) c and of p z. So codes are only widened, never multiplied
one by one, and everything is float32. S heads, those of all sequences, m query rows per head, C keys of D elements.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ...quant.kv_codec import INT4_CODES, Coded
from ...quant.kv_format import VectorFormat
from ..kv.pool import take_blocks
from .decode_runs import BlockRun


class Stored(NamedTuple):
    """A layer's keys or values in the cache, as `KVPool.planes` gives them, and their format."""

    planes: Coded
    format: VectorFormat

    def heads(self, heads: slice) -> Stored:
        """The same of some KV heads."""
        codes, *others = self.planes
        scales, zeros = (None if plane is None else plane[:, heads] for plane in others)
        return Stored(Coded(codes[:, heads], scales, zeros), self.format)


class CodeScratch:
    """Room for the codes of one run of blocks, and for them widened."""

    def __init__(self, numel: int, device: torch.device | str = "cpu") -> None:
        """`numel` elements (heads * keys * head size) at most."""
        self.numel = numel
        self._codes = torch.empty(4 * numel, dtype=torch.uint8, device=device)
        self._wide = torch.empty(numel, device=device)

    def gather(self, stored: Stored, seen: BlockRun) -> Coded:
        """Whole blocks, head by head, sequence by sequence: codes [S, C, D/packed], scales and zeros [S, groups, C].

        The latter in float32. What a token does not see is 0 where it might be NaN otherwise.
        """
        codes = stored.planes.codes
        _, heads, block, width = codes.shape
        shape = (heads, seen.block_ids.numel(), block, width)
        room = take_blocks(
            codes, seen.block_ids.flatten(), self._codes.view(codes.dtype)[: math.prod(shape)].view(shape)
        )
        if seen.blank is not None and codes.is_floating_point():
            room.flatten(1, 2).index_fill_(1, seen.blank, 0)
        scales, zeros = (None if plane is None else _gather_plane(plane, seen) for plane in stored.planes[1:])
        return Coded(room.view(heads * len(seen.block_ids), -1, width), scales, zeros)

    def widen(self, codes: torch.Tensor, format: VectorFormat, part: int) -> torch.Tensor:
        """Part `part` of the elements as float32 [S, C, D/packed]; a packed code holds as many parts as elements."""
        wide = self._wide[: codes.numel()].view(codes.shape)
        if format.packed > 1:
            codes = codes >> 4 if part else codes & INT4_CODES
        return wide.copy_(codes)


def scores(q: torch.Tensor, keys: Coded, format: VectorFormat, scratch: CodeScratch) -> torch.Tensor:
    """q [S, m, D] float32, scaled already, times keys: [S, m, C]."""
    total = None
    for part, rows in enumerate(q.chunk(format.packed, -1)):
        dots = torch.bmm(rows, scratch.widen(keys.codes, format, part).transpose(1, 2))
        if keys.scales is not None:
            dots.mul_(keys.scales[:, part : part + 1])
        if keys.zeros is not None:
            dots.addcmul_(rows.sum(-1, keepdim=True), keys.zeros[:, part : part + 1])
        total = dots if total is None else total.add_(dots)
    assert total is not None
    return total


def weighted_sum(p: torch.Tensor, values: Coded, format: VectorFormat, scratch: CodeScratch) -> torch.Tensor:
    """p [S, m, C] float32 times values: [S, m, D]."""
    parts = []
    for part in range(format.packed):
        weights = p if values.scales is None else p * values.scales[:, part : part + 1]
        summed = torch.bmm(weights, scratch.widen(values.codes, format, part))
        if values.zeros is not None:
            summed += torch.bmm(p, values.zeros[:, part].unsqueeze(-1))
        parts.append(summed)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def _gather_plane(plane: torch.Tensor, seen: BlockRun) -> torch.Tensor:
    """[num_blocks, H, groups, block] -> [S, groups, C]."""
    num_sequences, num_blocks = seen.block_ids.shape
    _, heads, groups, block = plane.shape
    taken = plane.index_select(0, seen.block_ids.flatten()).view(num_sequences, num_blocks, heads, groups, block)
    found = taken.permute(2, 0, 3, 1, 4).float().reshape(heads, num_sequences, groups, num_blocks * block)
    if seen.hidden is not None:
        found = found.masked_fill(seen.hidden, 0.0)
    return found.flatten(0, 1)
