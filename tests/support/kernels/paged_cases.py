"""Random paged caches, and attention over them by its definition in float64.

Blocks that no sequence holds, places beyond a sequence's end and scales of both are all ones, which is NaN in every
float format; block tables are padded with ids that do not exist. What is read by mistake shows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from moedge.quant.kernels.product import Launch
from moedge.quant.kv.codec import encode
from moedge.quant.kv.format import VECTOR_FORMATS
from moedge.runtime.attention.kernels.launch import Cached, attend_launches, store_launch
from moedge.runtime.attention.kernels.operands import Cut, Features, Pages, Side, decode_cut, extend_cut

# (past, count) of sequences: nothing, one, around a block of 16 or 32, several blocks; decode takes count 1.
DECODE = ((0, 0), (0, 1), (15, 1), (32, 1), (100, 1))
EXTEND = ((0, 9), (0, 1), (29, 4), (65, 3))
NO_SUCH_BLOCK = 1 << 20


@dataclass(frozen=True)
class Case:
    """Formats are native, int8 or int4. `reach` are the features of an AttentionCall; lengths are (past, count)."""

    keys: str
    values: str
    head_dim: int = 64
    group: int = 4
    block: int = 16
    kv_heads: int = 2
    lengths: tuple[tuple[int, int], ...] = DECODE
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    shift: bool = False
    dtype: torch.dtype = torch.float32
    native: torch.dtype = torch.float32
    device: str = "cpu"


@dataclass
class Cache:
    """A case's tensors: q and out [T, Hq, D], one layer's planes, who holds which block, and the kernel's operands."""

    case: Case
    q: torch.Tensor
    cached: Cached
    tables: list[list[int]]
    features: Features
    out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full(self.q.shape, float("nan"), dtype=self.q.dtype, device=self.q.device)

    @classmethod
    def make(cls, case: Case, seed: int = 0) -> Cache:
        torch.manual_seed(seed)
        num_tokens = sum(count for _, count in case.lengths)
        num_blocks = [-(-sum(length) // case.block) for length in case.lengths]
        free = torch.randperm(sum(num_blocks) + 2).tolist()
        tables = [[free.pop() for _ in range(count)] for count in num_blocks]
        heads = case.kv_heads * case.group
        stored = [[(table, sum(length)) for table, length in zip(tables, case.lengths, strict=True)]] * 2
        sides = [
            random_side(case, kind, lengths, sum(num_blocks) + 2)
            for kind, lengths in zip((case.keys, case.values), stored, strict=True)
        ]
        features = Features(
            0.3,
            case.window,
            case.chunk,
            case.softcap,
            torch.linspace(-2, 3, heads).to(case.device) if case.sinks else None,
            torch.randn(num_tokens, heads).to(case.device) if case.shift else None,
        )
        q = torch.randn(num_tokens, heads, case.head_dim).to(case.device, case.dtype)
        return cls(case, q, Cached(*sides, case.block), tables, features)

    def pages(self, tokens: int) -> Pages:
        """Tiles of `tokens` rows, first ones aligned to the sequence."""
        table = torch.full((len(self.tables), max(map(len, self.tables))), NO_SUCH_BLOCK, dtype=torch.int32)
        for row, blocks in zip(table, self.tables, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        begins = itertools.accumulate((count for _, count in self.case.lengths), initial=0)
        tiles = [
            (index * table.shape[1], begin - past, first, past, past + count)
            for index, (begin, (past, count)) in enumerate(zip(begins, self.case.lengths, strict=False))
            for first in range(past // tokens * tokens, past + count, tokens)
        ]
        device = self.q.device
        return Pages(table.to(device), torch.tensor(tiles, dtype=torch.int32).to(device))

    def run(self, kernel: str, splits: int = 1) -> torch.Tensor:
        """What `decode`, `decode without dot` or `extend` writes into NaN."""
        for launch in self.launches(kernel, splits):
            launch.run()
        return self.out

    def launches(self, kernel: str, splits: int = 1) -> list[Launch]:
        cut = cut_of(kernel, self.case)
        tokens = cut.rows // cut.heads if kernel == "extend" else 1
        return attend_launches(self.q, self.out, self.cached, self.pages(tokens), self.features, cut, splits)

    def reference(self) -> torch.Tensor:
        """[T, Hq, D] in float64, from the codes that are stored."""
        keys, values = (decoded(side) for side in (self.cached.keys, self.cached.values))
        parts, begin = [], 0
        for table, (past, count) in zip(self.tables, self.case.lengths, strict=True):
            rows = slice(begin, begin + count)
            blocks = torch.tensor(table, dtype=torch.long)
            k, v = (x[blocks].transpose(1, 2).flatten(0, 1)[: past + count] for x in (keys, values))
            parts.append(self._attend(rows, past, k, v))
            begin += count
        return torch.cat(parts)

    def _attend(self, rows: slice, past: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, features = self.q[rows].cpu().double(), self.features
        n, num_heads, _ = q.shape
        k, v = (x.repeat_interleave(self.case.group, 1) for x in (k, v))
        products = torch.einsum("qhd,khd->hqk", q, k)
        if features.shift is not None:
            products += features.shift[rows].cpu().double().T.unsqueeze(-1)
        scores = products * features.scale
        if features.softcap is not None:
            scores = features.softcap * torch.tanh(scores / features.softcap)
        row, key = torch.arange(past, past + n)[:, None], torch.arange(len(k))[None, :]
        hidden = key > row
        if features.window is not None:
            hidden = hidden | (key <= row - features.window)
        if features.chunk is not None:
            hidden = hidden | (key // features.chunk != row // features.chunk)
        scores = scores.masked_fill(hidden, float("-inf"))
        if features.sinks is not None:
            sinks = features.sinks.cpu().double()[:, None, None].expand(num_heads, n, 1)
            scores = torch.cat([scores, sinks], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(k)], v)


def cut_of(kernel: str, case: Case, capability: tuple[int, int] = (8, 6)) -> Cut:
    wide = case.dtype == torch.float32
    if kernel == "extend":
        return extend_cut(case.head_dim, case.group, wide, case.keys != case.values)
    capability = (7, 5) if kernel == "decode without dot" else capability
    return decode_cut(capability, case.head_dim, case.group, wide, kind_of(case.keys, case.values))


def kind_of(keys: str, values: str) -> str:
    """The format of keys or values that takes fewer bits."""
    return min(keys, values, key=("int4", "int8", "native").index)


def random_side(case: Case, kind: str, held: list[tuple[list[int], int]], num_blocks: int) -> Side:
    """Random codes and factors in the places that sequences hold, all ones elsewhere; records are apart in memory."""
    tensors = []
    for shape, dtype in planes_of(case, kind):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        # As in a pool: other planes lie between a block's codes and those of the next block.
        raw = torch.full((num_blocks, nbytes + 256), 0xFF, dtype=torch.uint8)
        tensors.append(raw[:, 128 : 128 + nbytes].view(dtype).unflatten(1, shape))
    for part, plane in enumerate(tensors):
        for table, length in held:
            for index, block in enumerate(table):
                places = slice(0, min(case.block, length - index * case.block))
                target = plane[block, :, :, places] if part else plane[block, :, places]
                target.copy_(random_values(target, part, kind))
    # With the same gaps on every device.
    tensors = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=case.device).copy_(x) for x in tensors]
    return Side.of(*tensors, *[None] * (3 - len(tensors)))


def planes_of(case: Case, kind: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
    heads, block, head_dim = case.kv_heads, case.block, case.head_dim
    if kind == "native":
        return [((heads, block, head_dim), case.native)]
    if kind == "int8":
        return [((heads, block, head_dim), torch.int8), ((heads, 1, block), torch.float16)]
    return [((heads, block, head_dim // 2), torch.uint8), *[((heads, 2, block), torch.float16)] * 2]


def random_values(like: torch.Tensor, part: int, kind: str) -> torch.Tensor:
    """Codes (part 0), scales (1) or zeros (2) that make elements of about 1, on both sides of 0."""
    if part == 0 and kind == "native":
        return torch.randn(like.shape)
    if part == 0:
        low, high = (-127, 128) if kind == "int8" else (0, 256)
        return torch.randint(low, high, like.shape)
    if part == 1:
        return torch.rand(like.shape) * (0.02 if kind == "int8" else 0.25) + 0.003
    return -2 * torch.rand(like.shape)


def decoded(side: Side) -> torch.Tensor:
    """[blocks, H, block, D] in float64, by the definition of the formats."""
    codes = side.codes.cpu()
    if side.scales is None:
        return codes.double()
    scales = side.scales.cpu().double().transpose(2, 3)
    if side.zeros is None:
        return codes.double() * scales
    zeros = side.zeros.cpu().double().transpose(2, 3)
    halves = [(codes & 15).double(), (codes >> 4).double()]
    return torch.cat([half * scales[..., g : g + 1] + zeros[..., g : g + 1] for g, half in enumerate(halves)], -1)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.cpu().double() - reference).norm() / reference.norm())


FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "chunk": {"chunk": 24},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": True},
    "shift": {"shift": True, "softcap": 2.0, "sinks": True},
    "all": {"window": 33, "softcap": 5.0, "sinks": True, "shift": True},
}
KINDS = ("native", "int8", "int4")
CODECS = {"native": "fp32", "int8": "int8", "int4": "int4"}
KERNELS = ("decode", "split decode", "decode without dot", "extend")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 4, 5, 8, 16)
BLOCKS = (16, 32, 64)


def on(case: Case, device: str) -> Case:
    return replace(case, device=device)


def check(case: Case, kernel: str, seed: int = 0) -> float:
    """The relative error of a kernel; NaN anywhere makes it NaN."""
    cache = Cache.make(replace(case, lengths=EXTEND if kernel == "extend" else DECODE), seed)
    splits = 4 if kernel == "split decode" else 1
    out = cache.run("decode" if kernel == "split decode" else kernel, splits)
    return relative_error(out, cache.reference())


def store_error(keys: str, values: str, head_dim: int, device: str) -> float:
    """The share of codes, scales and zeros that the store kernel writes otherwise than `quant.kv_codec`."""
    case = Case(keys, values, head_dim, device=device)
    torch.manual_seed(head_dim)
    num_blocks, num_tokens = 4, 37
    cached = Cached(*(random_side(case, kind, [], num_blocks) for kind in (keys, values)), case.block)
    slots = torch.randperm(num_blocks * case.block)[:num_tokens]
    blocks, places = slots // case.block, slots % case.block
    x = [torch.randn(num_tokens, case.kv_heads, head_dim) for _ in range(2)]
    store_launch(*(side.to(device) for side in x), cached, slots.to(device)).run()
    different = total = 0
    for rows, side, kind in zip(x, (cached.keys, cached.values), (keys, values), strict=True):
        for plane, expected in zip(side[:3], encode(rows, VECTOR_FORMATS[CODECS[kind]]), strict=True):
            if plane is None or expected is None:
                continue
            there = plane.cpu()
            found = there[blocks, :, places] if plane is side.codes else there[blocks, :, :, places]
            different += int((found != expected).sum())
            total += expected.numel()
    return different / total
