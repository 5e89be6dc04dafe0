"""The protocol of attention backends, as the attention seam uses it, and where tokens of a pass are in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple, Protocol, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch

from ...quant.kernels.upload import upload
from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from ..settings.errors import UnsupportedModel
from ..shape.model_shape import KVGroup
from .kernels.operands import Pages


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
class TokenBlocks:
    """Blocks of `size` tokens that an indexer chooses `most` of; tokens behind the last whole block are always chosen.

    `keys` makes keys [n, D] of the first n blocks of a sequence from those of their tokens [n * size, D].
    """

    size: int
    most: int
    keys: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class IndexQuery:
    """What the indexer of `layer` made of a pass: q [T, H, D], k [T, 1, D] and weights float32 [T, H]; rows behind the
    batch's tokens are padding.

    It may choose whole `blocks` of tokens. Each token attends to `count` tokens. `chosen` are those of rows that were
    asked for, by the row where their chunk begins and the first position: layers behind that have no indexer of their
    own attend to them, too.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    weights: torch.Tensor
    count: int
    blocks: TokenBlocks | None = None
    chosen: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BlockQuery:
    """What the indexer of `layer` made of a pass where it chooses blocks of `block` tokens: q [T, H, D] for H KV heads,
    and k [T, 1, D]; rows behind the batch's tokens are padding.

    Each token attends to `blocks` of them, of which `local` end with its own.
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    block: int
    blocks: int
    local: int

    @property
    def count(self) -> int:
        """Tokens of the longest sequence of which nothing is left out."""
        return self.block * self.blocks


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The parameters of one layer's attention.

    A token attends to the last `window` tokens, itself included, or to those since the start of its `chunk` of
    positions; to all where both are None. `softcap` c bounds scores to c * tanh(s / c). `sinks` [Hq] are logits that
    enter the softmax and contribute no value. With `latent` weights, keys and values of a pass are latents [T, 1, R]
    and rotated keys [T, 1, P]. With an `index` a token attends to those of them that it chooses, and to blocks of keys
    with `blocks`.
    """

    layer: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    latent: LatentWeights | None = None
    index: IndexQuery | None = None
    blocks: BlockQuery | None = None

    @property
    def is_plain(self) -> bool:
        """Whether softmax takes the scaled scores and nothing else: no softcap, no sinks."""
        return self.softcap is None and self.sinks is None

    def leaves_out(self, length: int) -> bool:
        """Whether the last of `length` tokens attends to some that an indexer chooses."""
        chosen = self.index or self.blocks
        return chosen is not None and length > chosen.count

    def first_visible(self, position: int) -> int:
        """The first position that the token at `position` attends to."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


class StoreFunction(Protocol):
    def __call__(self, pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores k, v [T, H, D] of the group's `layer`-th layer in slots int64 [T]: block id * block + offset."""


def store_by_torch(pool: KVPool, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """A `StoreFunction` of torch's operations, on any device."""
    pool.write(layer, slots // pool.spec.block, slots % pool.spec.block, k, v)


class AttentionBackend(Protocol):
    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> torch.Tensor:
        """Stores the pass's k, v [T, Hkv, D]; returns attention of q [T, Hq, D] over them and the past, [T, Hq, D]."""


def is_causal_prefill(call: AttentionCall, chunk: TokenChunk) -> bool:
    """Whether a chunk is a whole prompt whose rows attend to all rows before them: causal attention without a past."""
    reaches_all = all(reach is None or chunk.count <= reach for reach in (call.window, call.chunk))
    return chunk.past == 0 and chunk.count > 1 and reaches_all and call.is_plain and not call.leaves_out(chunk.count)


def decodes(call: AttentionCall, chunk: TokenChunk) -> bool:
    """Whether a chunk is a generated token, with drafted ones behind it, that attend to all tokens that they can
    reach."""
    return chunk.decodes and not call.leaves_out(chunk.past + chunk.count)


def check_reach(call: AttentionCall, group: KVGroup) -> None:
    """Raises UnsupportedModel unless a layer looks back exactly as far as its cache was planned for."""
    if (call.window or call.chunk) != group.window:
        raise UnsupportedModel(
            f"layer {call.layer} looks back {call.window or call.chunk} tokens, and config.json says {group.window} "
            "(None means all); the cache would be wrong"
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GroupSlots:
    """The slots [T] of a pass in one layer group, also as block ids and offsets, and a block table per chunk."""

    slots: torch.Tensor
    block_ids: torch.Tensor
    offsets: torch.Tensor
    tables: dict[TokenChunk, torch.Tensor]

    @classmethod
    def of(cls, batch: Batch, group: int, block: int, device: torch.device | str) -> Self:
        tables = {chunk: torch.tensor(chunk.sequence.table.blocks[group]) for chunk in batch.chunks}
        slots = slots_of(batch.chunks, group, block)
        return cls(
            slots.to(device),
            (slots // block).to(device),
            (slots % block).to(device),
            {chunk: table.to(device) for chunk, table in tables.items()},
        )


def slots_of(chunks: Sequence[TokenChunk], group: int, block: int) -> torch.Tensor:
    """The slots, block id * block + offset, of a pass in one layer group: int64 [T]."""
    slots = np.empty(chunks[-1].end if chunks else 0, np.int64)
    for chunk in chunks:
        blocks, past = chunk.sequence.table.blocks[group], chunk.past
        if chunk.count == 1:
            # Most chunks of most passes: arrays of one element would take ten times as long.
            slots[chunk.begin] = blocks[past // block] * block + past % block
        else:
            positions = np.arange(past, past + chunk.count)
            slots[chunk.begin : chunk.end] = np.array(blocks)[positions // block] * block + positions % block
    return torch.from_numpy(slots)


def padded_tables(chunks: Sequence[TokenChunk], group: int) -> torch.Tensor:
    """The block tables of the chunks in one layer group, padded with -1: int32 [B, max blocks]."""
    tables = [chunk.sequence.table.blocks[group] for chunk in chunks]
    padded = np.full((len(tables), max(map(len, tables), default=0)), -1, np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return torch.from_numpy(padded)


class PassSlots:
    """The slots of passes, by layer group, as long as their batches are there."""

    def __init__(self, cache: KVCache, device: torch.device | str) -> None:
        self._cache = cache
        self._device = device
        self._groups: WeakKeyDictionary[Batch, list[GroupSlots]] = WeakKeyDictionary()

    def of(self, batch: Batch, group: int) -> GroupSlots:
        if batch not in self._groups:
            self._groups[batch] = [
                GroupSlots.of(batch, index, self._cache.block, self._device) for index in range(len(self._cache.pools))
            ]
        return self._groups[batch][group]


class Division(NamedTuple):
    """The chunks of a pass, as indices in the batch, by what computes them.

    `fresh` are prompts without a past, `decode` single tokens, of which the longest sequence has `longest` tokens, and
    `extend` the rest.
    """

    fresh: tuple[int, ...]
    decode: tuple[int, ...]
    extend: tuple[int, ...]
    longest: int


class Fresh(NamedTuple):
    """The rows [n] of whole prompts in a pass, one prompt after the other.

    Prompt i has rows bounds[i] to bounds[i + 1] of them, int32 [B + 1], which are counts[i].
    """

    rows: torch.Tensor
    bounds: torch.Tensor
    counts: list[int]


class PassPages:
    """One layer group's part of a pass, made once and used by all its layers.

    `slots` int64 [T] is block id * block + offset of every token; `table` int32 [B, max blocks] is padded with -1.
    A chunk's number is its index in the batch, which is its row of the table.
    """

    def __init__(self, batch: Batch, group: int, block: int, device: torch.device) -> None:
        self.chunks = batch.chunks
        self.device = device
        self.slots = upload(slots_of(batch.chunks, group, block), device)
        self.table = upload(padded_tables(batch.chunks, group), device)
        self._divisions: dict[object, Division] = {}
        self._tiled: dict[object, Pages] = {}
        self._fresh: dict[object, Fresh] = {}

    def divide(self, call: AttentionCall, tiled: bool) -> Division:
        """Which chunks are computed how for such a call; where `tiled`, all of them are `extend`."""
        kind = (call.window, call.chunk, call.is_plain)
        if kind not in self._divisions:
            parts: dict[str, list[int]] = {"fresh": [], "decode": [], "extend": []}
            for index, chunk in enumerate(self.chunks):
                parts[_kind_of(call, chunk, tiled)].append(index)
            fresh, decode, extend = map(tuple, parts.values())
            self._divisions[kind] = Division(
                fresh, decode, extend, max((self.chunks[index].past + 1 for index in decode), default=0)
            )
        return self._divisions[kind]

    def tiled(self, chunks: tuple[int, ...], tokens: int) -> Pages:
        """Tiles of `tokens` rows that cover the chunks.

        Tiles start at multiples of `tokens` in the sequence, so that a row's index in its tile does not depend on how
        its prompt was cut into chunks.
        """
        key = (tokens, chunks)
        if key not in self._tiled:
            tiles = torch.tensor([tile for index in chunks for tile in self._tiles(index, tokens)], dtype=torch.int32)
            self._tiled[key] = Pages(self.table, upload(tiles, self.device))
        return self._tiled[key]

    def fresh(self, chunks: tuple[int, ...]) -> Fresh:
        """The rows of chunks that are whole prompts."""
        if chunks not in self._fresh:
            chosen = [self.chunks[index] for index in chunks]
            rows = chain.from_iterable(range(chunk.begin, chunk.end) for chunk in chosen)
            counts = [chunk.count for chunk in chosen]
            bounds = torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
            numbers = torch.tensor(list(rows))
            self._fresh[chunks] = Fresh(upload(numbers, self.device), upload(bounds, self.device), counts)
        return self._fresh[chunks]

    def _tiles(self, index: int, tokens: int) -> list[tuple[int, int, int, int, int]]:
        chunk = self.chunks[index]
        begin, end = chunk.past, chunk.past + chunk.count
        starts = range(begin // tokens * tokens, end, tokens)
        row = index * self.table.shape[1]
        return [(row, chunk.begin - chunk.past, first, begin, end) for first in starts]


def _kind_of(call: AttentionCall, chunk: TokenChunk, tiled: bool) -> str:
    if tiled:
        return "extend"
    if chunk.count == 1:
        return "decode"
    return "fresh" if is_causal_prefill(call, chunk) else "extend"
