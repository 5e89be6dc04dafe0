"""What every attention backend offers to the model's attention seam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the model asks of one layer's attention.

    A token sees the last `window` tokens, itself included; None for all. `softcap` c bounds scores to c*tanh(s/c).
    `sinks` [Hq] are logits that take part in the softmax and lead to nothing.
    """

    layer: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class AttentionBackend(Protocol):
    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores the pass's k, v [T, Hkv, D] and returns what q [T, Hq, D] reads of them and the past: [T, Hq, D]."""
        ...
