"""Attention of single rows with the library's CPU kernels (quant/native), which read blocks where they lie.

A row's bits depend on its query and its past alone: neither on other rows nor on threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import addressof
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from ...quant.kv.codec import Coded
from ...quant.kv.format import VectorFormat
from ...quant.matmul.thread_pool import WorkerPool
from ...quant.native.calls import Kernel, attention_kernels, attention_scratch_nbytes
from ...quant.native.library import CONSTANTS, ENUMS, NativeAttention, NativeAttentionStep, NativeVectors
from ..engine.sequence import Batch, TokenChunk
from ..kv.cache import KVCache
from ..kv.pool import KVPool
from .choice import CHUNK_SCORES, PARTIALS_NBYTES, SINGLE_THREAD_NUMEL
from .protocol import AttentionCall, check_reach, decodes

Ints = npt.NDArray[np.int32]
ROWS, SPLIT, FORMATS = CONSTANTS["rows"], CONSTANTS["split"], ENUMS["format"]
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
# Items of every thread, so that all end at about the same time.
_ITEMS_PER_WORKER = 8


def computes(call: AttentionCall, chunk: TokenChunk) -> bool:
    """Whether the kernels compute a chunk of a pass whose bits may depend on other rows: one that decodes, or a short
    one of a prompt."""
    length = chunk.past + chunk.count
    return decodes(call, chunk) or (chunk.count * length <= CHUNK_SCORES and not call.leaves_out(length))


class Stored(NamedTuple):
    """A layer's keys or values in the cache, as `KVPool.planes` gives them, and their format."""

    planes: Coded
    format: VectorFormat

    @property
    def width(self) -> int:
        """Elements of a head."""
        return self.planes.codes.shape[-1] * self.format.packed


@dataclass(frozen=True, slots=True)
class Wave:
    """Runs of rows [n, 4] (table, row, count, position) that are computed together.

    `pieces` [m, 2] are pairs of a run and a split of its past, where each is an item of its own; None where a run is.
    """

    runs: Ints
    pieces: Ints | None

    @property
    def num_items(self) -> int:
        """Items of one KV head."""
        return len(self.runs) if self.pieces is None else len(self.pieces)


@dataclass(frozen=True, slots=True, eq=False)
class RowPlan:
    """The rows of a pass that the kernels compute in one layer group.

    `tables` [chunks, blocks] are padded with zeros, `runs` as in `Wave`. `numel` elements of keys are read. `rows`
    are those of the chunks in the pass.
    """

    call: AttentionCall
    tables: Ints
    runs: Ints
    kv_heads: int
    dim: int
    numel: int
    rows: torch.Tensor

    def waves(self, group: int, workers: int) -> Iterator[Wave]:
        """Pasts are split where there are too few rows for all threads; `group` query heads have one KV head."""
        if len(self.runs) * self.kv_heads >= _ITEMS_PER_WORKER * workers // 2:
            return iter([Wave(self.runs, None)])
        piece = 4 * self.kv_heads * group * ROWS * (self.dim + 2)
        return _split(self.call, self.runs, max(1, PARTIALS_NBYTES // piece))


@dataclass(frozen=True, slots=True, eq=False)
class RowQuery:
    """The queries q [T, Hq, D] of a pass.

    `rotated`: the stored keys are, and the kernels rotate the queries; else they are in the basis of the keys already.
    `shift` [T, Hq], scaled, is added to the scores; None where softmax cancels it.
    """

    call: AttentionCall
    q: torch.Tensor
    shift: torch.Tensor | None = None
    rotated: bool = False

    @classmethod
    def of(cls, call: AttentionCall, pool: KVPool, layer: int, q: torch.Tensor) -> Self:
        """The queries of the group's `layer`-th layer."""
        transform = pool.key_transform
        if transform is None:
            return cls(call, q)
        shift = None if call.is_plain else transform.shifts(layer, q).mul_(call.scale)
        # The kernels know Hadamard matrices only.
        rotates = q.shape[-1].bit_count() == 1
        return cls(call, q if rotates else pool.queries(q), shift, rotates)


class RowAttention:
    """Calls the kernels on a pool of threads, with scratch that it keeps from pass to pass.

    `dtype` is that of activations: only bfloat16 is computed with products of bfloat16 and of integers.
    """

    def __init__(self, cache: KVCache, dtype: torch.dtype, workers: WorkerPool) -> None:
        self._cache = cache
        self._exact = dtype != torch.bfloat16
        self._workers = workers
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._partials = torch.empty(0)
        self._plans: WeakKeyDictionary[Batch, dict[tuple[int, str], RowPlan | None]] = WeakKeyDictionary()

    def plan(self, call: AttentionCall, batch: Batch, group: int, rows: str = "few") -> RowPlan | None:
        """What the kernels compute of a pass; None where that is nothing.

        `rows` are the "few" of chunks that `computes` names; those that decode, "gathered" in a tensor of their own; or
        "all".
        """
        plans, key = self._plans.setdefault(batch, {}), (group, rows)
        if key not in plans:
            takes = decodes if rows == "gathered" else computes
            chosen = [chunk for chunk in batch.chunks if rows == "all" or takes(call, chunk)]
            plans[key] = self._make(call, chosen, group, rows == "gathered") if chosen else None
        return plans[key]

    def attend(self, query: RowQuery, keys: Sequence[Stored], values: Stored, plan: RowPlan, out: torch.Tensor) -> None:
        """Fills the plan's rows of out [T, Hq, D], contiguous, with the attention of the query's rows over the cache.

        `keys` may be stored in several parts; queries have the elements of the parts one after the other.
        """
        arguments, kept = arguments_of(query, keys, values, plan, out)
        arguments.exact = self._exact
        arguments.block = self._cache.block
        kept.append(self._reserve(arguments, self._workers.size))
        single = plan.numel <= SINGLE_THREAD_NUMEL
        for wave in plan.waves(arguments.group, self._workers.size):
            self._run(arguments, wave, single)

    def _make(self, call: AttentionCall, chunks: Sequence[TokenChunk], group: int, gathered: bool) -> RowPlan:
        spec = self._cache.pools[group].spec
        tables = [chunk.sequence.table.blocks[group] for chunk in chunks]
        padded = np.zeros((len(tables), max(map(len, tables))), np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        rows = [row for chunk in chunks for row in range(chunk.begin, chunk.end)]
        gathered_at = accumulate((chunk.count for chunk in chunks), initial=0)
        first = list(gathered_at) if gathered else [chunk.begin for chunk in chunks]
        runs = [run for index, chunk in enumerate(chunks) for run in _runs(index, first[index], chunk)]
        visible = sum(chunk.past + chunk.count - call.first_visible(chunk.past) for chunk in chunks)
        numel = visible * spec.group.kv_heads * spec.group.head_dim
        sizes = (spec.group.kv_heads, spec.group.head_dim, numel)
        return RowPlan(call, padded, np.array(runs, np.int32), *sizes, torch.tensor(rows))

    def _reserve(self, arguments: NativeAttention, threads: int) -> torch.Tensor:
        nbytes = _aligned(attention_scratch_nbytes(arguments)) * threads + 64
        if self._scratch.shape[0] < nbytes:
            self._scratch = self._scratch.new_empty(nbytes)
        return self._scratch

    def _run(self, arguments: NativeAttention, wave: Wave, single: bool) -> None:
        attend, reduce = attention_kernels()
        self._point(arguments, wave)
        self._share(arguments, attend, wave.num_items * arguments.kv_heads, single)
        if wave.pieces is not None:
            self._share(arguments, reduce, len(wave.runs) * arguments.kv_heads, single)

    @property
    def memory(self) -> tuple[int, int]:
        """The addresses of scratch and of partial results, which change when these grow."""
        return self._scratch.data_ptr(), self._partials.data_ptr()

    def point(self, arguments: NativeAttention, wave: Wave, threads: int) -> tuple[int, int]:
        """Lets the kernels compute a wave on `threads` threads: the address of their scratch, and the bytes of each."""
        self._point(arguments, wave)
        scratch = self._reserve(arguments, threads)
        return _aligned(scratch.data_ptr()), _aligned(attention_scratch_nbytes(arguments))

    def _point(self, arguments: NativeAttention, wave: Wave) -> None:
        arguments.rows = wave.runs.ctypes.data
        arguments.num_pieces = 0
        if wave.pieces is not None:
            arguments.partial_stride = ROWS * arguments.group * (arguments.values.width + 2)
            numel = len(wave.pieces) * arguments.kv_heads * arguments.partial_stride
            if self._partials.shape[0] < numel:
                self._partials = self._partials.new_empty(numel)
            arguments.num_pieces, arguments.pieces = len(wave.pieces), wave.pieces.ctypes.data
            arguments.partials = self._partials.data_ptr()

    def _share(self, arguments: NativeAttention, kernel: Kernel, items: int, single: bool) -> None:
        """Computes all items, several at a time on every thread."""
        nbytes = _aligned(attention_scratch_nbytes(arguments))
        base = _aligned(self._scratch.data_ptr())
        if single or self._workers.size == 1:
            kernel(arguments, 0, items, base)
            return
        size = max(1, items // (self._workers.size * _ITEMS_PER_WORKER))
        ranges = [(begin, min(items, begin + size)) for begin in range(0, items, size)]

        def work(job: tuple[int, int], worker: int) -> None:
            kernel(arguments, *job, base + worker * nbytes)

        self._workers.run(ranges, work)


def _aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // 64) * 64


def _runs(table: int, row: int, chunk: TokenChunk) -> Iterator[tuple[int, int, int, int]]:
    """The rows of a chunk, which begin at `row`, in runs of at most ROWS: (table, row, count, position)."""
    for first in range(0, chunk.count, ROWS):
        yield table, row + first, min(ROWS, chunk.count - first), chunk.past + first


def _split(call: AttentionCall, runs: Ints, most: int) -> Iterator[Wave]:
    """Waves of at most `most` pieces, or one run."""
    begin = 0
    while begin < len(runs):
        pieces: list[tuple[int, int]] = []
        end = begin
        while end < len(runs):
            _, _, count, position = runs[end].tolist()
            splits = range(call.first_visible(position) // SPLIT, (position + count - 1) // SPLIT + 1)
            if pieces and len(pieces) + len(splits) > most:
                break
            pieces += [(end - begin, split) for split in splits]
            end += 1
        yield Wave(np.ascontiguousarray(runs[begin:end]), np.array(pieces, np.int32))
        begin = end


def arguments_of(
    query: RowQuery, keys: Sequence[Stored], values: Stored, plan: RowPlan, out: torch.Tensor
) -> tuple[NativeAttention, list[torch.Tensor]]:
    """The arguments of the kernels, and tensors that must live as long."""
    call, q = query.call, query.q.contiguous()
    kept = [q]
    arguments = NativeAttention()
    for index, part in enumerate(keys):
        arguments.keys[index] = _vectors(part)
    arguments.values = _vectors(values)
    arguments.num_parts = len(keys)
    arguments.kv_heads = values.planes.codes.shape[1]
    arguments.group = q.shape[1] // arguments.kv_heads
    arguments.window, arguments.chunk = call.window or 0, call.chunk or 0
    arguments.scale, arguments.softcap = call.scale, call.softcap or 0.0
    for name, tensor in (("sinks", call.sinks), ("shift", query.shift)):
        if tensor is not None:
            kept.append(tensor.float().contiguous())
            setattr(arguments, name, kept[-1].data_ptr())
    arguments.tables, arguments.table_width = plan.tables.ctypes.data, plan.tables.shape[1]
    arguments.queries, arguments.out = q.data_ptr(), out.data_ptr()
    arguments.rotated = query.rotated
    arguments.query_format, arguments.out_format = FORMATS[_NAMES[q.dtype]], FORMATS[_NAMES[out.dtype]]
    return arguments, kept


def stored(pool: KVPool, layer: int) -> tuple[Stored, Stored]:
    """Keys and values of the group's `layer`-th layer."""
    keys, values = (Stored(*side) for side in zip(pool.planes(layer), pool.formats, strict=True))
    return keys, values


def _vectors(stored: Stored) -> NativeVectors:
    planes: Coded = stored.planes
    addresses = (0 if plane is None else plane.data_ptr() for plane in planes)
    return NativeVectors(*addresses, FORMATS[stored.format.name], stored.width)


# Items that every thread takes at most, so that all end at about the same time.
_TURNS = 8


class AttentionSteps:
    """The arguments of two steps for every layer, ATTEND and REDUCE, and where a pass stores keys and values.

    Keys and values are bfloat16 in the cache. All layers read the queries q [T, Hq, D] and write out [T, Hq, D], in
    memory that stays; `begin` sets what changes from pass to pass.
    """

    def __init__(
        self,
        rows: RowAttention,
        cache: KVCache,
        calls: Sequence[AttentionCall],
        q: torch.Tensor,
        out: torch.Tensor,
        threads: int,
    ) -> None:
        self._rows, self._cache, self._calls, self._threads = rows, cache, calls, threads
        self._q, self._out = q, out
        self._arguments: list[NativeAttention] = []
        # Tensors that live as long as this, and those of the running pass.
        self._forever: list[torch.Tensor] = []
        self._kept: list[object] = []
        self._waves: dict[int, tuple[RowPlan, Wave]] = {}
        self.attend, self.reduce = ([NativeAttentionStep() for _ in calls] for _ in range(2))
        self._groups = [cache.layer_indices[call.layer].group for call in calls]
        for call, group in zip(calls, self._groups, strict=True):
            check_reach(call, cache.pools[group].spec.group)

    def codes(self, index: int) -> tuple[int, int]:
        """The addresses of keys and values in the cache, [blocks, H, block, D], of the index-th layer."""
        where = self._cache.layer_indices[self._calls[index].layer]
        keys, values = self._cache.pools[where.group].planes(where.index)
        return keys.codes.data_ptr(), values.codes.data_ptr()

    @property
    def block(self) -> int:
        return self._cache.block

    def begin(self, batch: Batch) -> list[int] | None:
        """Gets ready for a pass; the addresses of its slots int64 [T], by layer. None if it has other rows."""
        self._waves, slots = {}, {}
        for call, group in zip(self._calls, self._groups, strict=True):
            if group in self._waves:
                continue
            plan = self._rows.plan(call, batch, group)
            if plan is None or len(plan.rows) < batch.num_tokens:
                return None
            waves = list(plan.waves(self._q.shape[1] // plan.kv_heads, self._threads))
            if len(waves) > 1:
                return None
            self._waves[group], slots[group] = (plan, waves[0]), self._slots(batch, group)
        self._kept = list(slots.values())
        memory = None
        # Memory that one layer makes grow is at another address for those before it.
        while memory != self._rows.memory:
            memory = self._rows.memory
            for index in range(len(self._calls)):
                self._point(index)
        return [slots[group].ctypes.data for group in self._groups]

    def _slots(self, batch: Batch, group: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        block = self._cache.block
        tables = (chunk.sequence.table.blocks[group] for chunk in batch.chunks)
        return np.array(
            [
                table[position // block] * block + position % block
                for chunk, table in zip(batch.chunks, tables, strict=True)
                for position in range(chunk.past, chunk.past + chunk.count)
            ],
            np.int64,
        )

    def _point(self, index: int) -> None:
        """Sets what the index-th layer reads of the pass."""
        plan, wave = self._waves[self._groups[index]]
        if index == len(self._arguments):
            self._arguments.append(self._make(index, plan))
        arguments = self._arguments[index]
        arguments.tables, arguments.table_width = plan.tables.ctypes.data, plan.tables.shape[1]
        base, nbytes = self._rows.point(arguments, wave, self._threads)
        items = wave.num_items * plan.kv_heads
        reduced = 0 if wave.pieces is None else len(wave.runs) * plan.kv_heads
        at_once = max(1, items // (self._threads * _TURNS))
        for step, count, many in ((self.attend[index], items, at_once), (self.reduce[index], reduced, 1)):
            step.attention, step.items, step.at_once = addressof(arguments), count, many
            step.scratch, step.thread_nbytes = base, nbytes

    def _make(self, index: int, plan: RowPlan) -> NativeAttention:
        call = self._calls[index]
        where = self._cache.layer_indices[call.layer]
        pool = self._cache.pools[where.group]
        keys, values = stored(pool, where.index)
        arguments, kept = arguments_of(RowQuery(call, self._q), [keys], values, plan, self._out)
        arguments.exact, arguments.block = False, self._cache.block
        # The sinks, in float32.
        self._forever += kept
        return arguments


def stores_plainly(pool: KVPool) -> bool:
    """Whether keys and values are in the cache as they are in bfloat16."""
    planes = [side.codes for side in pool.planes(0)]
    plain = pool.key_transform is None and not pool.quantized and not pool.spec.group.is_latent
    return plain and all(codes.dtype == torch.bfloat16 and codes.is_contiguous() for codes in planes)
