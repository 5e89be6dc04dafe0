"""Seam 3: linear layers whose bytes are bound from outside, and a layer list that waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...quant.linear import Compute
from ...quant.scratch import TILE
from ...quant.tensor import PackedTensor


class PackedLinear(nn.Module):
    """Stands where an nn.Linear stood; usable while `packed` is bound to bytes that are there.

    What it makes of rows that stand for no token is zero; the output head, not `per_token`, sees none.
    """

    packed: PackedTensor

    def __init__(self, bias: nn.Parameter | None, compute: Compute, per_token: bool = True) -> None:
        super().__init__()
        self.bias = bias
        self.compute = compute
        self.per_token = per_token

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        count = self.compute.real_rows(len(rows)) if self.per_token else len(rows)
        if count == len(rows):
            out = self.compute.linear(rows, self.packed, self.bias)
        else:
            out = rows.new_empty(len(rows), self.packed.shape[0])
            out[count:].zero_()
            self.compute.linear(rows[:count], self.packed, self.bias, out=out[:count])
        return out.view(*x.shape[:-1], out.shape[-1])


class TiledRows(nn.Module):
    """Runs a module that treats rows [T, D] alike on TILE of them at a time, the last ones padded with zeros.

    A product of as many rows, in the same place, has the same bits for a row whatever the others are; products of 32
    and of 300 rows do not, even in multiples of a tile.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        # Blocks read their router's corrections and scales.
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x: torch.Tensor, *others: Any) -> Any:
        """`others`, such as a router's corrections, are the same for every tile."""
        rows = x.reshape(-1, x.shape[-1])
        outputs = [self._tile(rows[begin : begin + TILE], others) for begin in range(0, len(rows), TILE)]
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))

    def _tile(self, rows: torch.Tensor, others: tuple[Any, ...]) -> Any:
        tile = rows.new_zeros(TILE, rows.shape[1])
        tile[: len(rows)] = rows
        out = self.inner(tile, *others)
        if isinstance(out, torch.Tensor):
            return out[: len(rows)]
        return tuple(part[: len(rows)] for part in out)


class ArrivingLayers(nn.ModuleList):
    """The decoder layers; iterating yields a layer when its bytes are there and frees them when asked for the next.

    transformers' own `for layer in self.layers` drives the stream, so no hook is needed.
    """

    def __init__(self, layers: Iterable[nn.Module], arrivals: Callable[[], Iterator[int]]) -> None:
        super().__init__(layers)
        self._arrivals = arrivals

    def __iter__(self) -> Iterator[nn.Module]:
        for index in self._arrivals():
            yield self._modules[str(index)]

    def __getitem__(self, index: Any) -> Any:
        # transformers slices off layers that a config asks to leave out; moedge's configs never do.
        return self if isinstance(index, slice) else super().__getitem__(index)
