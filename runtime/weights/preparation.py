"""Packs a checkpoint into shards, a layer at a time and a few experts at a time, into memory or into a store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import sqrt
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.errors import BadCheckpoint
from ...offload.store.manifest import HEAD_FILE, LinkedShard, LinkedTensor, layer_file
from ...offload.store.writer import NewShardFile, StoreWriter
from ...offload.stream.stream import HEAD, ShardKey
from ...quant.error_feedback import ErrorFeedback
from ...quant.formats.format import CALIBRATED, FormatError, Layout, row_chunks
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.scratch import wide_columns
from ...quant.tensor import CODECS, PackedTensor, fill, pack_into, torch_dtype
from ..model import PreTrainedModel
from ..model.definition import LayerAssembly
from ..model.dequantize import WIDENING_NBYTES, planes_of_rows
from ..model.loading import CheckpointLoader, refuse_nonfinite
from ..plan.candidate import SLACK_NBYTES
from ..settings.errors import DoesNotFit, SettingError
from ..settings.settings import MIB, process_nbytes
from ..settings.stages import Advance
from ..shape.model_shape import LayerShape, ModelShape
from ..shape.quantized import ModelTensors
from ..shape.read import EXPERTS, group_of
from ..shape.shards import ITEM_NBYTES, LayerShards, ModelShards, ShardLayout, ShardMatrix, resident_nbytes
from .importance import Importance
from .memory import WeightMemory

if TYPE_CHECKING:
    from .linking import Linker, ShardRun


@dataclass(frozen=True, slots=True)
class MemoryLayerSink:
    """Takes one layer's shards in memory: each context gives uint8 bytes to fill and keeps them if it ends without an
    error. It finds no experts itself: all are packed."""

    memory: WeightMemory
    index: int
    find: None = None

    def dense(self) -> AbstractContextManager[torch.Tensor]:
        return self.memory.fill(ShardKey(self.index))

    def expert(self, index: int) -> AbstractContextManager[torch.Tensor]:
        return self.memory.fill(ShardKey(self.index, index))


class MemorySink:
    """Takes packed shards, layer by layer, experts in order, in memory: for plans that leave nothing on disk."""

    def __init__(self, memory: WeightMemory) -> None:
        self._memory = memory

    def has_layer(self, index: int) -> bool:
        return False

    @contextmanager
    def layer(self, index: int, shards: LayerShards) -> Iterator[MemoryLayerSink]:
        yield MemoryLayerSink(self._memory, index)

    def head(self, nbytes: int) -> AbstractContextManager[torch.Tensor]:
        return self._memory.fill(HEAD)


class CannotLink(Exception):
    """Some experts of a layer lie in the files as they are packed, and others do not: all weights must be copied."""


def _opaque(layout: ShardLayout, *shards: LinkedShard) -> LinkedTensor:
    shape = (layout.nbytes,) if len(shards) == 1 else (len(shards), layout.nbytes)
    return LinkedTensor("U8", shape, shards)


class StoreLayerSink:
    """Takes one layer's shards into a file of a store; all experts are packed in the same buffer.

    With a `linker` its file begins when the first expert shows whether experts are copied.
    """

    def __init__(
        self,
        writer: StoreWriter,
        index: int,
        shards: LayerShards,
        opened: ExitStack,
        linker: Linker | None,
        limit: Callable[[int], object],
    ) -> None:
        # Whether it has found experts between the first and the last itself, so that they need not be packed.
        self.find = None if linker is None else self._find_experts
        self._writer = writer
        self._limit = limit
        self._linker = linker
        self._index = index
        self._shards = shards
        self._opened = opened
        self._dense: LinkedShard | torch.Tensor | None = None
        self._experts: list[LinkedShard] = []
        # Where the first expert lies in the files, and whether others were named after it.
        self._first: list[ShardRun] = []
        self._inferred = False
        self._file: NewShardFile | None = None
        self._expert = torch.empty(shards.expert.nbytes if shards.expert else 0, dtype=torch.uint8)

    @contextmanager
    def dense(self) -> Iterator[torch.Tensor]:
        shard = torch.empty(self._shards.dense.nbytes, dtype=torch.uint8)
        yield shard
        self._dense = shard
        if self._linker is None:
            self._file = self._begin(self._shards.num_experts)
        elif runs := self._linker.find(self._shards.dense, shard, self._linker.dense(self._index)):
            self._dense = self._linker.link(runs, shard)

    @contextmanager
    def expert(self, index: int) -> Iterator[torch.Tensor]:
        yield self._expert
        layout, count, found = self._shards.expert, self._shards.num_experts, None
        assert layout is not None
        copied = self._file is not None and not self._experts
        if self._linker is not None and not copied:
            runs = self._linker.find(layout, self._expert, self._linker.expert(self._index, index, count))
            found = None if runs is None else self._linker.link(runs, self._expert)
            if self._inferred and runs != self._linker.of_expert(self._first, index):
                raise CannotLink(f"layer {self._index} expert {index} lies in the files otherwise than those before it")
            if index == 0:
                self._first = runs or []
        if self._file is None:
            self._file = self._begin(0 if found else count)
        if found is not None:
            self._experts.append(found)
        elif self._experts:
            raise CannotLink(f"layer {self._index} expert {index}")
        else:
            self._file.write("experts", index, self._expert.numpy().data)

    def _find_experts(self, experts: range, compute: ParallelMatmul) -> bool:
        """Whether the experts lie in the files as the first one does, and are named there, read but not packed."""
        linker = self._linker
        if linker is None or not self._first or experts.start == 0 or experts.stop == self._shards.num_experts:
            return False
        runs = {index: found for index in experts if (found := linker.of_expert(self._first, index))}
        named: dict[int, LinkedShard | None] = {}

        def name(index: int, _: object) -> None:
            named[index] = linker.link(runs[index])

        if len(runs) == len(experts):
            compute.parallel_for(experts, name)
        shards = [shard for index in experts if (shard := named.get(index)) is not None]
        if len(shards) < len(experts):
            return False
        self._experts += shards
        self._inferred = True
        return True

    def finish(self) -> None:
        """Names what was found, in the layer's file."""
        file = self._file or self._begin(0)
        if isinstance(self._dense, LinkedShard):
            file.linked["dense"] = _opaque(self._shards.dense, self._dense)
        if self._experts:
            assert self._shards.expert is not None
            shape = (len(self._experts), self._shards.expert.nbytes)
            file.linked["experts"] = LinkedTensor("U8", shape, tuple(self._experts))

    def _begin(self, num_experts: int) -> NewShardFile:
        expert = self._shards.expert.nbytes if self._shards.expert else 0
        dense = len(self._dense) if isinstance(self._dense, torch.Tensor) else 0
        if nbytes := dense + num_experts * expert:
            self._limit(self._writer.nbytes_written + nbytes)
        file = self._opened.enter_context(self._writer.layer(self._index, dense, num_experts, expert))
        if isinstance(self._dense, torch.Tensor):
            if dense:
                file.write("dense", 0, self._dense.numpy().data)
            self._dense = None
        return file


class StoreSink:
    """Takes packed shards into a store, as MemorySink does in memory; one shard is in memory at a time.

    With a `linker` only what is not in the checkpoint's files is copied. `limit` is called with the bytes of the store
    before shards are copied, and raises where these are too many.
    """

    def __init__(
        self,
        writer: StoreWriter,
        shards: ModelShards,
        linker: Linker | None = None,
        limit: Callable[[int], object] = lambda nbytes: None,
    ) -> None:
        self._limit = limit
        self._writer = writer
        self._linker = linker
        self._shards = shards

    def has_layer(self, index: int) -> bool:
        return self._writer.has(layer_file(index))

    @contextmanager
    def layer(self, index: int, shards: LayerShards) -> Iterator[StoreLayerSink]:
        with ExitStack() as opened:
            sink = StoreLayerSink(self._writer, index, shards, opened, self._linker, self._limit)
            yield sink
            sink.finish()

    @contextmanager
    def head(self, nbytes: int) -> Iterator[torch.Tensor]:
        shard = torch.empty(nbytes, dtype=torch.uint8)
        yield shard
        if self._writer.has(HEAD_FILE):
            return
        found, layout = None, self._shards.head
        assert layout is not None
        if self._linker is not None and (runs := self._linker.find(layout, shard, self._linker.dense(None))):
            found = self._linker.link(runs, shard)
        if found is None:
            self._limit(self._writer.nbytes_written + nbytes)
            self._writer.write_head(shard.numpy().data)
        else:
            self._writer.link_head(_opaque(layout, found))


# A larger window is not faster.
WINDOW_NBYTES = 128 << 20
# The copies of a window of experts: as in the files, with joined matrices, and stacked for transformers.
WINDOW_COPIES = 3


def window_nbytes(shape: ModelShape, shards: ModelShards, dtype: str, budget: int) -> int:
    """Bytes of experts to convert together when weights are packed within `budget` bytes of host memory.

    Raises DoesNotFit where a part that is converted whole does not fit: one expert, a layer's linears, the head.
    """
    item = ITEM_NBYTES[dtype]
    embedding = shape.embedding_numel * item
    stays = process_nbytes() + SLACK_NBYTES + resident_nbytes(shape, dtype) - embedding + widening_nbytes(shape)
    layers = max(_layer_nbytes(*pair, item) for pair in zip(shape.layers, shards.layers, strict=True))
    head = (shape.head.numel * item if shape.head else 0) + (shards.head.nbytes if shards.head else 0)
    smallest = stays + max(layers, embedding + head)
    if budget < smallest:
        raise DoesNotFit(
            f"{budget // MIB:,} MiB of host memory are too little to pack this model: the smallest that works is "
            f"--ram {-(-smallest // MIB)}MiB, of which {stays // MIB:,} MiB are for the process and small parameters"
        )
    one_expert = max((layer.experts.numel * item for layer in shape.layers if layer.experts), default=0)
    return min(WINDOW_NBYTES, one_expert + (budget - stays - layers) // WINDOW_COPIES)


def widening_nbytes(shape: ModelShape) -> int:
    """The most bytes while a quantized matrix is widened, beside the result: as in the files, its scales and zero
    points in float32, and the rows that are computed together."""
    return 2 * shape.widened_nbytes + WIDENING_NBYTES if shape.widened_nbytes else 0


def _layer_nbytes(layer: LayerShape, packed: LayerShards, item: int) -> int:
    """The most bytes while a layer is packed: its unpacked linears, and packed ones or an expert with its copies."""
    dense = sum(matrix.numel for matrix in layer.dense) * item
    if layer.experts is None or packed.expert is None:
        return dense + packed.dense.nbytes
    experts = WINDOW_COPIES * layer.experts.numel * item + packed.expert.nbytes
    return dense + max(packed.dense.nbytes, experts)


SAMPLED = 8


class PackingLoss:
    """What weights of a quantized checkpoint lose where they are packed again.

    Sums squares of weights and of their errors by group of tensors, such as experts. Every eighth piece of a large
    matrix is compared: all of them would take as long as packing.
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, group: str, weight: torch.Tensor, packed: PackedTensor) -> None:
        """`weight` [N, K] is what the checkpoint means and `packed` what was made of it."""
        layout, sums = packed.layout, self._sums[group]
        for rows in islice(row_chunks(layout.shape, layout.row_block), None, None, SAMPLED):
            exact = weight[rows].float()
            planes, made = packed.rows(rows), torch.empty_like(exact, memory_format=torch.contiguous_format)
            lines = -(-len(exact) // layout.row_block) * layout.row_block
            CODECS[layout.codes, layout.order].unpack(planes, made, exact.new_empty(lines, wide_columns(layout)))
            sums[0] += float(made.sub_(exact).square_().sum(dtype=torch.float64))
            sums[1] += float(exact.square_().sum(dtype=torch.float64))

    @property
    def by_group(self) -> Mapping[str, float]:
        """|packed - weight| / |weight|, in the L2 norm over all weights of a group; 0 for weights of 0."""
        return {group: sqrt(error / whole) if whole else 0.0 for group, (error, whole) in self._sums.items()}


Added = Callable[[ShardMatrix, torch.Tensor, PackedTensor], None]


def pack_shard(
    where: str,
    layout: ShardLayout,
    weights: list[torch.Tensor],
    shard: torch.Tensor,
    compute: ParallelMatmul,
    packed: Added | None = None,
    importance: Sequence[ErrorFeedback | torch.Tensor] = (),
) -> None:
    """Fills `shard`, uint8 [layout.nbytes], with `weights` in the layout's order, each [N, K], on `compute`'s threads.

    `packed` is called with each matrix, `importance` says how much errors of its columns count. Raises BadCheckpoint,
    naming the matrix, for weights that are NaN or infinite.
    """
    for at, (matrix, weight) in enumerate(zip(layout.matrices, weights, strict=True)):
        try:
            columns = importance[at] if importance else None
            made = _pack(matrix, weight.detach(), shard[matrix.offset : matrix.end], compute, columns)
        except FormatError as error:
            raise BadCheckpoint(f"{where}.{matrix.name}: {error}") from None
        if packed is not None and not matrix.kept:
            packed(matrix, weight.detach(), made)
    if layout.matrices:
        # The bytes after the last plane are also written to disk and included in the checksum.
        shard[layout.matrices[-1].end :].zero_()


def _pack(
    matrix: ShardMatrix,
    weight: torch.Tensor,
    buffer: torch.Tensor,
    compute: ParallelMatmul,
    importance: ErrorFeedback | torch.Tensor | None,
) -> PackedTensor:
    if matrix.kept:
        return fill(planes_of_rows(weight, matrix.layout), matrix.layout, buffer)
    # transformers keeps a few matrices in float32 where a model is loaded in float16: those of indexers.
    rounded = weight.to(torch_dtype(matrix.layout.dtype))
    if isinstance(importance, ErrorFeedback):
        rounded = importance.moved(rounded, matrix.layout, compute.for_each)
        importance = importance.importance
    return pack_into(rounded, matrix.layout, buffer, compute.for_each, importance)


def _windows(count: int, window: int, ends_apart: bool) -> Iterator[range]:
    """All experts in order, at most `window` at a time; the first and the last alone if `ends_apart`."""
    ends = min(1, count - 1) if ends_apart else 0
    yield from (range(each, each + 1) for each in range(ends))
    yield from (range(begin, min(begin + window, count - ends)) for begin in range(ends, count - ends, window))
    yield from (range(each, each + 1) for each in range(count - ends, count))


def _kept(layout: ShardLayout) -> dict[str, Layout]:
    return {matrix.name: matrix.layout for matrix in layout.matrices if matrix.kept}


class Preparation:
    """Packs a checkpoint; afterwards the model has its resident parameters, and packed modules without bytes."""

    def __init__(
        self,
        model: PreTrainedModel,
        checkpoint: Checkpoint,
        compute: ParallelMatmul,
        window_nbytes: int = WINDOW_NBYTES,
        tensors: ModelTensors | None = None,
        importance: Importance | None = None,
    ) -> None:
        """`window_nbytes` of experts, in the model's dtype, are converted together; their copies take more.

        `tensors` are the model's where the checkpoint holds some of them quantized, `importance` is of its experts.
        """
        self.layers: list[LayerAssembly] = []
        self._model = model
        self._checkpoint = checkpoint
        self._loader = CheckpointLoader(model, checkpoint, model.dtype, tensors)
        self._compute = compute
        self._window_nbytes = window_nbytes
        self._importance = importance
        self.loss = PackingLoss()
        self._quantized = bool(tensors and tensors.quantized)

    def run(
        self,
        shards: ModelShards,
        sink: MemorySink | StoreSink,
        advance: Advance = lambda nbytes: None,
        *,
        head_first: bool = False,
    ) -> None:
        """Packs all layers and the head into `sink`; `advance` is called with the bytes of each shard.

        `head_first`: the head is packed while nothing else is in memory. It is the largest matrix, and is there twice
        meanwhile: a plan that fills its budget has no bytes for that at the end.
        """
        self._loader.check()
        packed = {matrix.layout.format for layer in shards.layers if layer.expert for matrix in layer.expert.matrices}
        if self._importance is None and (found := sorted(packed & CALIBRATED)):
            raise SettingError(
                f"--experts {found[0]} is useless without a text that says which columns matter; run"
                f" `moedge prepare MODEL --experts {found[0]} --calibrate FILE`, and give the folder that it makes"
            )
        if head_first:
            self._run_rest(shards, sink, advance)
        for index, layer in enumerate(self._model.get_decoder().layers):
            assembly = LayerAssembly(layer, shards.layers[index], self._compute)
            self._loader.load_dense(index, layer, _kept(shards.layers[index].dense))
            if not sink.has_layer(index):
                with sink.layer(index, assembly.shards) as layer_sink:
                    layout = assembly.shards.dense
                    weights = [assembly.linears[matrix.name].weight for matrix in layout.matrices]
                    with layer_sink.dense() as shard:
                        pack_shard(f"layer {index}", layout, weights, shard, self._compute, self._measure)
                    advance(assembly.shards.dense.nbytes)
                    self._pack_experts(index, assembly, layer_sink, advance)
            else:
                advance(assembly.shards.nbytes)
            assembly.install()
            self.layers.append(assembly)
        if head_first:
            refuse_nonfinite(self._model)
        else:
            self._run_rest(shards, sink, advance)
        if not self._checkpoint.unchanged():
            raise BadCheckpoint(f"{self._checkpoint.folder}: a weight file changed while it was read; start again")

    def _run_rest(self, shards: ModelShards, sink: MemorySink | StoreSink, advance: Advance) -> None:
        """Loads what is outside of layers, and packs the head."""
        self._loader.load_rest()
        refuse_nonfinite(self._model)
        if shards.head is not None:
            self._pack_head(shards.head, sink)
            advance(shards.head.nbytes)

    def _pack_experts(
        self, index: int, assembly: LayerAssembly, sink: MemoryLayerSink | StoreLayerSink, advance: Advance
    ) -> None:
        layout, count = assembly.shards.expert, assembly.shards.num_experts
        if layout is None:
            return
        numel = sum(rows * cols for rows, cols in (matrix.layout.shape for matrix in layout.matrices))
        window = max(1, self._window_nbytes // (numel * self._model.dtype.itemsize))
        measure = partial(self._measure, group=EXPERTS)
        importance = list(self._importance.of(index)) if self._importance else []
        for experts in _windows(count, window, sink.find is not None):
            if sink.find is not None and sink.find(experts, self._compute):
                advance(layout.nbytes * len(experts))
                continue
            up, down = self._loader.load_experts(index, assembly.experts, assembly.up_name, experts, _kept(layout))
            for expert in experts:
                weights = [up[expert - experts.start], down[expert - experts.start]]
                with sink.expert(expert) as shard:
                    columns = importance[expert] if importance else ()
                    where = f"layer {index} expert {expert}"
                    pack_shard(where, layout, weights, shard, self._compute, measure, columns)
                advance(layout.nbytes)

    def _measure(self, matrix: ShardMatrix, weight: torch.Tensor, packed: PackedTensor, group: str = "") -> None:
        if self._quantized and matrix.layout.format != "none":
            self.loss.add(group or group_of(matrix.name), weight, packed)

    def _pack_head(self, layout: ShardLayout, sink: MemorySink | StoreSink) -> None:
        head = self._model.get_output_embeddings()
        with sink.head(layout.nbytes) as shard:
            pack_shard("output", layout, [head.weight], shard, self._compute)
        head.weight = nn.Parameter(head.weight.detach().to("meta"), requires_grad=False)
