"""What every attention backend offers to the model's attention seam."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ..engine.batch import Batch, Chunk
from ..kv.pool import KVPool
from ..settings.errors import UnsupportedModel
from ..shape.model_shape import KVGroup


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What the model asks of one layer's attention.

    A token sees the last `window` tokens, itself included, or those since the start of its `chunk` of positions; None
    for all. `softcap` c bounds scores to c*tanh(s/c).
    `sinks` [Hq] are logits that take part in the softmax and lead to nothing.
    """

    layer: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are softmax's input as they are, and keys alone share it."""
        return self.softcap is None and self.sinks is None

    def first_visible(self, position: int) -> int:
        """The first position that a token looks back to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


class Store(Protocol):
    def __call__(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer in slots int64 [T]: block id * block + place."""
        ...


class AttentionBackend(Protocol):
    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores the pass's k, v [T, Hkv, D] and returns what q [T, Hq, D] reads of them and the past: [T, Hq, D]."""
        ...


def sees_itself_only(call: AttentionCall, chunk: Chunk) -> bool:
    """Whether a chunk is a whole prompt whose rows see all rows before them, and nothing else: plainly causal."""
    reaches_all = all(reach is None or chunk.count <= reach for reach in (call.window, call.chunk))
    return chunk.past == 0 and chunk.count > 1 and reaches_all and call.is_plain


def check_reach(call: AttentionCall, group: KVGroup) -> None:
    """Raises UnsupportedModel unless a layer looks back as far as its cache was planned for."""
    if (call.window or call.chunk) != group.window:
        raise UnsupportedModel(
            f"layer {call.layer} looks back {call.window or call.chunk} tokens, and config.json says {group.window} "
            "(none for all); the cache would be wrong"
        )
