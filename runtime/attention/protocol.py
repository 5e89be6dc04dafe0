"""The protocol of attention backends, as the model's attention seam uses it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..engine.sequence import Batch, Chunk
from ..kv.pool import KVPool
from ..settings.errors import UnsupportedModel
from ..shape.model_shape import KVGroup


@dataclass(frozen=True, slots=True, eq=False)
class LatentWeights:
    """The matrix [H, N + V, R] that makes keys and values of H heads from latents: its first N rows make keys.

    Queries are [T, H, N + P]: the last P elements are multiplied with the rotated key that all heads share.
    """

    matrix: torch.Tensor
    key_rows: int

    @property
    def value_rows(self) -> int:
        return self.matrix.shape[1] - self.key_rows

    def expand(self, latents: torch.Tensor, rotated: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [L, h, N + P] and values [L, h, V] of some heads, from latents [L, R] and rotated keys [L, P]."""
        matrix = self.matrix[heads]
        both = (latents @ matrix.flatten(0, 1).T).view(len(latents), *matrix.shape[:2])
        shared = rotated.unsqueeze(1).expand(-1, len(matrix), -1)
        return torch.cat([both[..., : self.key_rows], shared], -1), both[..., self.key_rows :]

    def absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, H, N] for latents instead of keys: [T, H, R], with the same products."""
        return torch.bmm(q.transpose(0, 1), self.matrix[:, : self.key_rows]).transpose(0, 1)

    def values_of(self, latents: torch.Tensor) -> torch.Tensor:
        """Values [T, H, V] of averages of latents [T, H, R], one for each head."""
        return torch.bmm(latents.transpose(0, 1), self.matrix[:, self.key_rows :].transpose(1, 2)).transpose(0, 1)


@dataclass(frozen=True, slots=True, eq=False)
class IndexQuery:
    """What the indexer of `layer` made of a pass: q [T, H, D], k [T, 1, D] and weights float32 [T, H]; rows behind the
    batch's tokens are padding.

    Each token attends to `count` tokens. `chosen` are those of rows that were asked for, by the row where their chunk
    begins and the first position: layers behind that have no indexer of their own attend to them, too.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    count: int
    chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The parameters of one layer's attention.

    A token attends to the last `window` tokens, itself included, or to those since the start of its `chunk` of
    positions; to all where both are None. `softcap` c bounds scores to c * tanh(s / c). `sinks` [Hq] are logits that
    enter the softmax and contribute no value. With `latent` weights, keys and values of a pass are latents [T, 1, R]
    and rotated keys [T, 1, P]. With an `index` a token attends to those of them that it chooses.
    """

    layer: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    latent: LatentWeights | None = None
    index: IndexQuery | None = None

    @property
    def is_plain(self) -> bool:
        """Whether softmax takes the scaled scores and nothing else: no softcap, no sinks."""
        return self.softcap is None and self.sinks is None

    def leaves_out(self, length: int) -> bool:
        """Whether the last of `length` tokens attends to some that an indexer chooses."""
        return self.index is not None and length > self.index.count

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


class Store(Protocol):
    def __call__(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer in slots int64 [T]: block id * block + offset."""
        ...


class AttentionBackend(Protocol):
    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores the pass's k, v [T, Hkv, D]; returns attention of q [T, Hq, D] over them and the past, [T, Hq, D]."""
        ...


def is_causal_prefill(call: AttentionCall, chunk: Chunk) -> bool:
    """Whether a chunk is a whole prompt whose rows attend to all rows before them: causal attention without a past."""
    reaches_all = all(reach is None or chunk.count <= reach for reach in (call.window, call.chunk))
    return chunk.past == 0 and chunk.count > 1 and reaches_all and call.is_plain and not call.leaves_out(chunk.count)


def decodes(call: AttentionCall, chunk: Chunk) -> bool:
    """Whether a chunk is one token that attends to all tokens that it can reach."""
    return chunk.count == 1 and not call.leaves_out(chunk.past + 1)


def check_reach(call: AttentionCall, group: KVGroup) -> None:
    """Raises UnsupportedModel unless a layer looks back exactly as far as its cache was planned for."""
    if (call.window or call.chunk) != group.window:
        raise UnsupportedModel(
            f"layer {call.layer} looks back {call.window or call.chunk} tokens, and config.json says {group.window} "
            "(None means all); the cache would be wrong"
        )
