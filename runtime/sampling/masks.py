"""Which tokens rows may take: bits over the vocabulary, and what they do to logits. Knows no grammar."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """`bits` uint8 [M, N] for the M `rows` of a pass that are masked: token t is bit t % 8 of byte t // 8, 1 allows it.

    8 * N is at least the vocabulary.
    """

    rows: list[int]
    bits: Tensor


def forbid(logits: Tensor, bits: Tensor) -> None:
    """Sets to -inf, in place, every logit [R, V] whose bit [R, N] is 0."""
    # A table of bytes, read eight at a time as one integer: expanding bits by shifts takes eight times the reads.
    table = (torch.arange(256).unsqueeze(-1) >> torch.arange(8)).bitwise_and_(1).eq_(0).to(torch.bool)
    eights = table.view(torch.int64).squeeze(-1).to(logits.device)
    forbidden = eights[bits.to(logits.device).long()].view(torch.bool)
    logits.masked_fill_(forbidden[:, : logits.shape[-1]], -torch.inf)
