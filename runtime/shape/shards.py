"""A model as shards: runs of bytes that move as one. Torch-free, so a planner counts exactly what will be allocated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate

from ...quant.formats.format import (
    CODE_BITS,
    EXPERT_FORMATS,
    MIXED_FORMATS,
    OPTION_DTYPES,
    QUANT_FORMATS,
    ROWS,
    FormatError,
    Layout,
    get_format,
)
from ...quant.scratch import scratch_nbytes
from ..settings.errors import SettingError
from .families import EITHER_WAY, SUPPORTED, family
from .model_shape import LayerShape, Matrix, ModelShape
from .read import SHARED, SMALL

# The formats of `--quant`.
FORMATS = tuple(QUANT_FORMATS)
# Those that `auto` considers, from exact to smallest.
AUTO_FORMATS = tuple(name for name, each in QUANT_FORMATS.items() if each.auto)
_NBYTES = {name: each.nbytes((64, 4096), "bfloat16") for name, each in QUANT_FORMATS.items()}
SMALLEST_FORMATS = tuple(name for name, nbytes in _NBYTES.items() if nbytes == min(_NBYTES.values()))
FLOAT_NAMES = {name: each.name for name, each in OPTION_DTYPES.items()}
ITEM_NBYTES = {name: each.nbytes for name, each in OPTION_DTYPES.items()}


# The choice of `--quant` that leaves the codes of a quantized checkpoint as they are.
KEPT = "kept"
# What a kept model has beside kept matrices, in place of codes that no format has: a byte a weight, whose steps are
# some eight times finer than those of 6-bit codes. Floats stay floats.
BESIDE_KEPT = "int8-g32-f16"
# Of a head that is tied to the embedding, where a format is asked for: tokens are looked up in the embedding as it is.
# With a scale per row SmolLM2 would lose half a percent by it (bench/results/log.md).
TIED_HEAD = BESIDE_KEPT
# The bits of a code, by what `--quant` offers.
_CODE_BITS = {name: CODE_BITS[each.codes] or 16 for name, each in QUANT_FORMATS.items()}


def kept_format(shape: ModelShape) -> str | None:
    """The format of most weights of a quantized checkpoint where its codes are kept; None where none can be."""
    numel: Counter[str] = Counter()
    for matrix, count in _counted(shape):
        numel[matrix.kept] += count * matrix.numel
    del numel[""]
    return numel.most_common(1)[0][0] if numel else None


def code_bits(shape: ModelShape) -> int:
    """Bits of a code of most weights in the files; 0 for floats."""
    bits: Counter[int] = Counter()
    for matrix, count in _counted(shape):
        bits[matrix.bits] += count * matrix.numel
    return max(bits, key=lambda each: bits[each], default=0)


def bits_lost(shape: ModelShape, format_name: str) -> int:
    """The bits of most codes in the files (5 or 6) where a format has fewer and none lies between; else 0."""
    bits = code_bits(shape)
    return bits if _CODE_BITS.get(format_name, 8) < bits < 8 else 0


def default_format(shape: ModelShape) -> str:
    """The format of `moedge prepare`: nf4; of a quantized checkpoint what `auto` prefers, which are its own codes where
    a format has them."""
    return offered_formats(shape)[0] if code_bits(shape) else "nf4"


def offered_formats(shape: ModelShape) -> tuple[str, ...]:
    """What `--quant auto` considers, from exact to smallest; the first is taken where it fits.

    Of a quantized checkpoint that is what is kept, before formats of fewer bits. Where nothing can be kept it is int8:
    no code of a file has more bits.
    """
    most, kept = code_bits(shape), kept_format(shape)
    if kept is not None:
        # The smallest also packs what the files hold as floats.
        return (kept, *(name for name in AUTO_FORMATS if _CODE_BITS[name] < most or name == AUTO_FORMATS[-1]))
    return AUTO_FORMATS[1:] if most else AUTO_FORMATS


def all_formats(shape: ModelShape) -> tuple[str, ...]:
    """Every format that a model's weights may be packed in, those of `--quant` and what is kept."""
    kept = kept_format(shape)
    return FORMATS if kept is None else (kept, *FORMATS)


AUTO = "auto"


def open_formats(shape: ModelShape, wanted: str) -> tuple[str, ...]:
    """The weight formats that settings leave open, from exact to smallest; `wanted` is `--quant`, with a plus and
    `--experts` behind it where that is given. Raises SettingError for experts that are not there."""
    quant, _, experts = wanted.partition("+")
    offered = offered_formats(shape) if quant == AUTO else (settled_format(shape, quant),)
    if not experts:
        return offered
    mixed = tuple(name for each in offered if (name := f"{each}+{experts}") in MIXED_FORMATS)
    if not shape.num_experts or not mixed:
        found = "codes that are kept" if shape.num_experts else f"a {shape.model_type} without routed experts"
        raise SettingError(
            f"--experts {experts} packs floats of routed experts, and {found} was found; leave --experts away"
            f"{', or give one of --quant ' + ', '.join(FORMATS) if shape.num_experts else ''}"
        )
    return mixed


def as_found(wanted: str, found: str) -> str:
    """What settings want of a format, where "auto" is what was found: auto+int3 is int8+int3 if that was found."""
    return found if wanted == AUTO else wanted.replace(AUTO, found.partition("+")[0])


def settled_format(shape: ModelShape, wanted: str) -> str:
    """A format that `--quant` names, with "kept" resolved. Raises SettingError where nothing can be kept."""
    if wanted != KEPT:
        return wanted
    kept = kept_format(shape)
    if kept is None:
        raise SettingError("--quant kept: no weight of this checkpoint has codes that a weight format has, too")
    return kept


def _format_of(matrix: Matrix, format_name: str) -> str:
    """The format of a matrix where the model is packed in `format_name`: its own where codes are kept."""
    if matrix.unpacked:
        return "none"
    if format_name in QUANT_FORMATS or format_name in EXPERT_FORMATS or format_name == TIED_HEAD:
        return format_name
    return matrix.kept or (BESIDE_KEPT if matrix.bits else "none")


def layout_for(shape: tuple[int, int], format_name: str, dtype: str, order: str = "") -> Layout:
    """The layout of a matrix [N, K] of `dtype` (torch's name); int8 where the format cannot hold its shape.

    Codes are in `order` if the format has it, else in its own; that changes no byte count.
    """
    chosen = get_format(format_name)
    try:
        same = order in chosen.orders and (order != ROWS or shape[0] % chosen.own_block == 0)
        return (chosen.in_order(order) if same else chosen).layout(shape, dtype)
    except FormatError:
        return get_format("int8").layout(shape, dtype)


# Popular rows of a matrix that stays on the disk, and what its rows are read through.
POPULAR_NBYTES = 16 << 20
READING_NBYTES = 16 << 20


def resident_nbytes(shape: ModelShape, dtype: str) -> int:
    """Bytes that are always in memory: embedding, norms, routers, biases, popular rows of tables on the disk."""
    numel = shape.embedding_numel + shape.resident_numel + sum(layer.resident_numel for layer in shape.layers)
    return numel * ITEM_NBYTES[dtype] + len(shape.tables) * (POPULAR_NBYTES + READING_NBYTES)


def tables_nbytes(shape: ModelShape) -> int:
    """Bytes of matrices that stay on the disk, in the dtype of the files."""
    return sum(table.numel for table in shape.tables) * ITEM_NBYTES[shape.dtype]


def token_rows_nbytes(shape: ModelShape, embedding: str | None = None) -> int:
    """Bytes of the rows that are looked up on the disk for a token: of tables, and of the `embedding` in that dtype
    where it stays there, too."""
    tables = sum(table.per_token * table.cols for table in shape.tables) * ITEM_NBYTES[shape.dtype]
    return tables + (shape.hidden * ITEM_NBYTES[embedding] if embedding else 0)


def workspace_nbytes(shape: ModelShape, format_name: str, dtype: str, deterministic: bool) -> int:
    """Scratch that products with any of the model's matrices need."""
    dense, routed = get_format(format_name).parts
    layouts = [_layout(matrix, dense, dtype) for layer in shape.layers for matrix in layer.dense]
    layouts += [_layout(matrix, routed, dtype) for matrix in _experts(shape)]
    layouts.append(_layout(*(_head(shape, dense) or (_tied(shape), "none")), dtype))
    return max(scratch_nbytes(layout, FLOAT_NAMES[dtype], deterministic) for layout in layouts)


def helper_nbytes(shape: ModelShape, format_name: str, dtype: str, deterministic: bool) -> int:
    """Scratch of a thread that helps: with experts, in deterministic passes with every product."""
    if deterministic:
        return workspace_nbytes(shape, format_name, dtype, deterministic)
    routed = get_format(format_name).parts[1]
    layouts = [_layout(matrix, routed, dtype) for matrix in _experts(shape)]
    return max((scratch_nbytes(layout, FLOAT_NAMES[dtype], deterministic) for layout in layouts), default=0)


def _head(shape: ModelShape, dense: str) -> tuple[Matrix, str] | None:
    """The output head and what it is packed in, beside layers in the format `dense`; None where it is the embedding."""
    if shape.head:
        return shape.head, dense
    return (_tied(shape), TIED_HEAD) if dense != "none" and dense in QUANT_FORMATS else None


def _tied(shape: ModelShape) -> Matrix:
    return Matrix("lm_head", shape.vocab, shape.hidden)


def _matrices(shape: ModelShape) -> Iterator[Matrix]:
    """Every kind of matrix that the checkpoint has for products."""
    if shape.head:
        yield shape.head
    for layer in shape.layers:
        yield from layer.dense
    yield from _experts(shape)


def _experts(shape: ModelShape) -> Iterator[Matrix]:
    """Every kind of matrix of experts."""
    for layer in shape.layers:
        if layer.experts:
            yield from (layer.experts.up, layer.experts.down)


def _layout(matrix: Matrix, format_name: str, dtype: str, order: str = "") -> Layout:
    return layout_for((matrix.rows, matrix.cols), _format_of(matrix, format_name), FLOAT_NAMES[dtype], order)


def _counted(shape: ModelShape) -> Iterator[tuple[Matrix, int]]:
    """The matrices of the layers, each with the number of experts that have it."""
    for layer in shape.layers:
        yield from ((matrix, 1) for matrix in layer.dense)
        if layer.experts:
            yield from ((matrix, layer.experts.count) for matrix in (layer.experts.up, layer.experts.down))


# Shards start and end at multiples of this: direct reads from disk need it, vector loads and pages are faster with it.
SHARD_ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class ShardMatrix:
    """A packed matrix inside a shard; `name` is its module's path in the layer.

    `kept` says that its codes are those of the checkpoint.
    """

    name: str
    layout: Layout
    offset: int
    kept: bool = False

    @property
    def end(self) -> int:
        return self.offset + self.layout.nbytes


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The offset of every matrix in one shard; `nbytes` is a multiple of SHARD_ALIGNMENT."""

    matrices: tuple[ShardMatrix, ...]
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        used = self.matrices[-1].end if self.matrices else 0
        # Kept, because planners ask for it a million times.
        object.__setattr__(self, "nbytes", -(-used // SHARD_ALIGNMENT) * SHARD_ALIGNMENT)


@dataclass(frozen=True, slots=True)
class LayerShards:
    """A layer's dense shard, and the layout that its experts share, so that a run of neighbours is one copy.

    A token asks for `per_token` of the experts.
    """

    dense: ShardLayout
    expert: ShardLayout | None
    num_experts: int
    per_token: int = 0

    @property
    def nbytes(self) -> int:
        return self.dense.nbytes + (self.num_experts * self.expert.nbytes if self.expert else 0)


@dataclass(frozen=True)
class ModelShards:
    """Everything that is packed; `head` is None where it is the embedding itself.

    The dense shards of the first `held` layers never stream: layer 0 has the blocks that others share.
    """

    layers: tuple[LayerShards, ...]
    head: ShardLayout | None
    held: int = 0

    @cached_property
    def dense_order(self) -> tuple[int, ...]:
        """The layers in the order in which their dense shards are held while memory lasts.

        Those that never stream, then others from all over the model: while a held layer computes, the next one that is
        not arrives, and the rings have room for no more than that. By the fractions of their multiples of the golden
        ratio, any last ones of them lie at about equal distances.
        """
        indices = range(len(self.layers))
        return tuple(sorted(indices, key=lambda index: (index >= self.held, -(index * GOLDEN_RATIO % 1))))

    @cached_property
    def held_nbytes(self) -> tuple[int, ...]:
        """Bytes of dense shards by how many of them are held, in that order."""
        return tuple(accumulate((self.layers[index].dense.nbytes for index in self.dense_order), initial=0))

    @cached_property
    def expert_nbytes(self) -> tuple[int, ...]:
        """Bytes of an expert by layer, 0 where there is none."""
        return tuple(layer.expert.nbytes if layer.expert else 0 for layer in self.layers)

    @cached_property
    def most_experts(self) -> int:
        """Experts of the layer that has most."""
        return max((layer.num_experts for layer in self.layers), default=0)

    @cached_property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers) + (self.head.nbytes if self.head else 0)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of the blocks that layers share; 0 where there are none."""
        matrices = self.layers[0].dense.matrices
        return sum(matrix.layout.nbytes for matrix in matrices if matrix.name.startswith(SHARED))

    def packed_nbytes(self) -> dict[str, int]:
        """Bytes of matrices by their actual format."""
        nbytes: Counter[str] = Counter()
        for layout, count in self._counted():
            for matrix in layout.matrices:
                nbytes[matrix.layout.format] += count * matrix.layout.nbytes
        return dict(nbytes)

    def numel(self) -> int:
        """Elements of all packed matrices."""
        shapes = ((matrix.layout.shape, count) for layout, count in self._counted() for matrix in layout.matrices)
        return sum(rows * cols * count for (rows, cols), count in shapes)

    def _counted(self) -> Iterator[tuple[ShardLayout, int]]:
        for layer in self.layers:
            yield layer.dense, 1
            if layer.expert:
                yield layer.expert, layer.num_experts
        if self.head:
            yield self.head, 1


GOLDEN_RATIO = (5**0.5 - 1) / 2


@lru_cache(maxsize=64)
def model_shards(shape: ModelShape, format_name: str, dtype: str, order: str = "") -> ModelShards:
    """The shards of a model packed in a format, to compute in `dtype` (bf16, fp16 or fp32).

    `order` is that of codes (WeightFormat.orders), "" for the format's own; all have the same bytes.
    """
    dense, routed = get_format(format_name).parts
    layers = tuple(_layer_shards(layer, dense, routed, dtype, order) for layer in shape.layers)
    held = int(any(matrix.name.startswith(SHARED) for matrix in shape.layers[0].dense))
    head = _head(shape, dense)
    return ModelShards(layers, _shard((head[0],), head[1], dtype, order) if head else None, held)


def _layer_shards(layer: LayerShape, format_name: str, routed: str, dtype: str, order: str) -> LayerShards:
    dense, experts = _shard(layer.dense, format_name, dtype, order), layer.experts
    if experts is None:
        return LayerShards(dense, None, 0)
    return LayerShards(
        dense, _shard((experts.up, experts.down), routed, dtype, order), experts.count, experts.per_token
    )


def _shard(matrices: tuple[Matrix, ...], format_name: str, dtype: str, order: str) -> ShardLayout:
    packed: list[ShardMatrix] = []
    for matrix in matrices:
        layout = _layout(matrix, format_name, dtype, order)
        offset = packed[-1].end if packed else 0
        packed.append(ShardMatrix(matrix.name, layout, offset, matrix.kept == layout.format))
    return ShardLayout(tuple(packed))


def weights_nbytes(shape: ModelShape, format_name: str, dtype: str) -> int:
    """Bytes of all weights with matrices packed in a format, tables as in the files, and the rest in `dtype`."""
    small = resident_nbytes(shape, dtype) + tables_nbytes(shape)
    return small + model_shards(shape, format_name, dtype).nbytes


def lies_unpacked(shape: ModelShape, format_name: str, dtype: str) -> bool:
    """Whether weights in a format are, byte for byte, runs of the checkpoint's own tensors, so that passes can read
    them there. Headers show it; a store is made by comparing bytes (weights/linking.py)."""
    stored = {each.format for each in shape.stored if each.group != SMALL} or {shape.dtype}
    floats = all(matrix.bits == 0 for matrix in _matrices(shape))
    if format_name != "none" or stored != {dtype} or not floats or shape.model_type not in SUPPORTED:
        return False
    turned = shape.model_type in EITHER_WAY or family(shape.model_type).transposed_experts
    return not (shape.num_experts and turned)


@lru_cache(maxsize=64)
def copied_nbytes(shape: ModelShape, format_name: str, dtype: str) -> int:
    """Bytes that a store of all weights writes: none where they lie in the checkpoint's files as they are."""
    return 0 if lies_unpacked(shape, format_name, dtype) else weights_nbytes(shape, format_name, dtype)


def checkpoint_nbytes(shape: ModelShape) -> int:
    """Bytes of the weights in the files of the checkpoint."""
    return sum(each.nbytes for each in shape.stored) or widened_nbytes(shape)


def widened_nbytes(shape: ModelShape) -> int:
    """Bytes of the weights of the checkpoint in its dtype, which quantized ones are widened to."""
    return shape.parameters * ITEM_NBYTES[shape.dtype]
