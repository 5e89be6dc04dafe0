"""Attention over one pass alone, without a cache, that notes what keys look like."""

from __future__ import annotations

import torch

from ..batch import Batch
from .kernel import attend_rows, visibility
from .protocol import AttentionCall


class KeyMeans:
    """For passes of one short chunk without a past; `means` [H, D] by layer are those of the last pass."""

    def __init__(self) -> None:
        self.means: dict[int, torch.Tensor] = {}

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        self.means[call.layer] = k.float().mean(0).cpu()
        mask = visibility(call, range(len(q)), range(len(q)), k)
        return attend_rows(call, q.contiguous(), k.transpose(0, 1), v.transpose(0, 1), mask)
