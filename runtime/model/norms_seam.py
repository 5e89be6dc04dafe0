"""Seam 4: norms over a large pass go piece by piece, so that what they compute on their way stays in the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# Numbers that a norm takes at a time. transformers writes a norm as five operations, each of which goes through all of
# its rows and keeps what it finds in float32: 4 MiB here, of a heap that keeps them, or what a heap that returns large
# buffers does not take for one (offload/heap.py). Measured over 4,096 tokens of 2,048 numbers (docs/performance.md).
PIECE_NUMEL = 1 << 20
SMALL_PIECE_NUMEL = 1 << 17


def norm_in_pieces(model: nn.Module, most: int = PIECE_NUMEL) -> int:
    """Lets every norm of `model` that treats rows alike take at most `most` numbers at once; returns how many do.

    A row's bits stay the same: each is computed alone. Modules stay where they are, with their names and parameters.
    """
    norms = [module for module in model.modules() if _treats_rows_alike(module)]
    for norm in norms:
        norm.forward = _in_pieces(norm.forward, most)
    return len(norms)


def _treats_rows_alike(module: nn.Module) -> bool:
    """Norms over the last axis: by their name, as families bring their own, and with parameters of that axis alone."""
    name = type(module).__name__
    if (
        not name.endswith("Norm")
        or name.startswith(("Batch", "Group", "Instance"))
        or any(True for _ in module.children())
    ):
        return False
    return all(parameter.dim() == 1 for parameter in module.parameters())


def _in_pieces(whole: Callable[..., torch.Tensor], most: int) -> Callable[..., torch.Tensor]:
    def forward(x: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        if others or named or x.numel() <= most or not x.is_contiguous():
            return whole(x, *others, **named)
        rows = x.view(-1, x.shape[-1])
        pieces = iter(torch.split(rows, max(1, most // x.shape[-1])))
        first = whole(next(pieces))
        out = first.new_empty(rows.shape)
        begin = len(first)
        out[:begin] = first
        for piece in pieces:
            out[begin : begin + len(piece)] = whole(piece)
            begin += len(piece)
        return out.view(x.shape)

    return forward
