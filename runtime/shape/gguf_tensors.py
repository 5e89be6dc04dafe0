"""The weights of a model whose tensors a GGUF file has. Torch-free.

Stacked experts become one weight each where published checkpoints have them one by one, so that they are read one by
one. Only rows are put in another order while they are codes: blocks are runs of a row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import DTYPES, FORMATS, OPTION_DTYPES
from .config import ModelConfig
from .gguf_names import NAMINGS, Naming, Order, WeightPart
from .quantization import WHOLE
from .quantized import ModelTensors, QuantizedWeight
from .read import is_convolution, is_extra_layer

# Floats, by the dtype of safetensors, and blocks of codes that gguf.quants dequantizes.
FLOATS = ("F32", "F16", "BF16")
BLOCKS = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS",
    "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
# The weight formats that have the codes and scales of blocks as they are.
_KEPT = {"Q8_0": "int8-g32-f16", "Q4_0": "int4-g32-f16", "Q4_K": "q4_k", "MXFP4": "mxfp4-e8m0"}
_OPTIONS = {each.safetensors: name for name, each in OPTION_DTYPES.items()}
# What weights of blocks are counted as, and computed from.
_WIDENED = DTYPES["bfloat16"]
# Rotary factors are part of the configuration.
_COMPUTED = ("rope_freqs.weight",)
_LAYER = re.compile(r"blk\.(\d{1,4})\.(.+)")


@dataclass(frozen=True, slots=True)
class GgufWeight(QuantizedWeight):
    """A weight of a GGUF file; `numbers` is the type of its blocks, and `bits` is 0 where it holds floats.

    `sources` are the tensors whose rows make it up in the order of `rows`, `expert` the slice of stacked ones that it
    is. For the other fields see gguf_names.WeightPart. The last dimension of a `vector` counts as its rows.
    """

    sources: tuple[str, ...] = ()
    expert: int | None = None
    rows: Order = ()
    columns: Order = ()
    flipped: tuple[int, ...] = ()
    vector: bool = False
    added: float = 0.0
    logarithm: bool = False


def gguf_tensors(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> ModelTensors:
    """The weights of the config's model. Raises BadCheckpoint for tensors that it does not have."""
    weights: dict[str, QuantizedWeight] = {}
    for weight in _weights(config, entries):
        if weights.setdefault(weight.entry.name, weight) is not weight:
            raise BadCheckpoint(f"{described(weight.entry.name)} is in the file twice, under two names")
    return ModelTensors({name: weight.entry for name, weight in weights.items()}, weights)


def _weights(config: ModelConfig, entries: Mapping[str, TensorEntry]) -> Iterator[GgufWeight]:
    naming = NAMINGS[config.family.model_type]
    for name, entry in entries.items():
        if entry.dtype not in (*FLOATS, *BLOCKS):
            raise BadCheckpoint(
                f"{described(entry.name)} is {entry.dtype}, wanted one of {', '.join((*FLOATS, *BLOCKS))}"
            )
        match = _LAYER.fullmatch(name)
        # Layers at the end only predict further tokens.
        if name in _COMPUTED or (match and is_extra_layer(config, int(match[1]))):
            continue
        for part in _parts(naming, match[2] if match else name, match is not None, config, entries, name):
            prefix = f"{naming.prefix}.{int(match[1])}." if match else ""
            sources = _sources(name, part, entries)
            weights = _stack(config, sources, replace(part, name=prefix + part.name))
            # Embedding and head are floats in memory.
            yield from weights if match else (replace(weight, kept="") for weight in weights)


def _parts(
    naming: Naming, rest: str, in_layer: bool, config: ModelConfig, entries: Mapping[str, TensorEntry], name: str
) -> tuple[WeightPart, ...]:
    """What a tensor becomes; its name is that of the weight, with its kind."""
    names = naming.layer if in_layer else naming.outside
    part, _, kind = rest.rpartition(".")
    key = rest if rest in names else part
    if key not in names or (key == part and kind not in ("weight", "bias")):
        raise BadCheckpoint(f"{described(name)} is no tensor of a model of family {config.family.model_type}")
    found = names[key]
    if found is None:
        owners = (own for own, each in names.items() if isinstance(each, WeightPart) and part in each.joined)
        wanted = [f"{name.removesuffix(rest)}{owner.removesuffix(f'.{kind}')}.{kind}" for owner in owners]
        if not any(each in entries for each in wanted):
            raise BadCheckpoint(f"{described(name)} is there, and {wanted[0]} is missing")
        return ()
    every = (WeightPart(found),) if isinstance(found, str) else found if isinstance(found, tuple) else (found,)
    added = -1.0 if kind == "weight" and naming.less_one(part) else 0.0
    named = (each if each.whole else replace(each, name=f"{each.name}.{kind}") for each in every)
    return tuple(replace(each, added=added) for each in named)


def _sources(name: str, part: WeightPart, entries: Mapping[str, TensorEntry]) -> list[TensorEntry]:
    """A tensor and those that are joined with it."""
    head, _, kind = name.rpartition(".")
    names = [name, *(f"{head.rpartition('.')[0]}.{each}.{kind}" for each in part.joined)]
    if missing := [each for each in names if each not in entries]:
        raise BadCheckpoint(f"{described(missing[0])} is missing, and {described(name)} is there")
    return [entries[each] for each in names]


def _stack(config: ModelConfig, sources: list[TensorEntry], part: WeightPart) -> Iterator[GgufWeight]:
    if ".E." not in part.name:
        yield _weight(config, sources, part)
        return
    count, shape = config.num_experts, sources[0].shape
    if len(shape) != 3 or shape[0] != count:
        raise BadCheckpoint(f"{described(sources[0].name)} is {list(shape)}, wanted the matrices of {count} experts")
    first = _weight(config, sources, replace(part, name=part.name.replace(".E.", ".0.")), expert=0)
    yield first
    for expert in range(1, shape[0]):
        entry = first.entry._replace(name=part.name.replace(".E.", f".{expert}."))
        yield replace(first, entry=entry, expert=expert)


def _shape(
    config: ModelConfig, sources: list[TensorEntry], part: WeightPart, expert: int | None
) -> tuple[tuple[int, ...], bool, Order, Order]:
    """The shape that a weight has, whether its last dimension counts as rows, and the order of rows and columns."""
    shapes = [source.shape if expert is None else source.shape[1:] for source in sources]
    if part.flipped:
        if any(len(shape) != 3 for shape in shapes):
            raise BadCheckpoint(f"{described(sources[0].name)} is {list(shapes[0])}, wanted matrices of all heads")
        shapes = [_merged(shape, index in part.flipped) for index, shape in enumerate(shapes)]
    vector = len(shapes[0]) == 1 or sources[0].name.endswith(".bias")
    axis = -1 if vector else -2
    # All dimensions but that of rows.
    others = {(shape[:axis], shape[len(shape) + axis + 1 :], len(shape)) for shape in shapes}
    if len(others) > 1:
        found = " and ".join(f"{described(source.name)} {list(source.shape)}" for source in sources)
        raise BadCheckpoint(f"{found} do not join: but for their rows they are of different shapes")
    total = sum(shape[axis] for shape in shapes)
    rows = _checked(part.rows(config, total) if part.rows else (), total, sources[0])
    columns = _checked(part.columns(config, shapes[0][-1]) if part.columns else (), shapes[0][-1], sources[0])
    dims = list(shapes[0])
    dims[axis] = _count(rows) if rows else total
    if part.turned and not vector:
        dims[-2:] = dims[:-3:-1]
    if part.flat:
        dims = [math.prod(dims)]
    elif is_convolution(part.name):
        dims = [math.prod(dims[:-1]), 1, dims[-1]]
    elif part.name.endswith("shared_expert_gate.weight"):
        # Some files have its single row as a vector.
        dims = [1, math.prod(dims)]
    return tuple(dims), vector, rows, columns


def _merged(shape: tuple[int, ...], flipped: bool) -> tuple[int, ...]:
    heads, rows, columns = shape
    return (heads * columns, rows) if flipped else (heads * rows, columns)


def _count(order: Order) -> int:
    return sum(math.prod(count for count, _ in loops) for _, loops in order)


def _checked(order: Order, count: int, source: TensorEntry) -> Order:
    """Raises BadCheckpoint unless all rows of an order, or columns, are among `count`."""
    last = max((begin + sum((times - 1) * step for times, step in loops) for begin, loops in order), default=0)
    if order and (last >= count or count % _count(order)):
        raise BadCheckpoint(
            f"{described(source.name)} is {list(source.shape)}, and the configuration wants {_count(order)} rows or "
            f"columns, the last of them {last}"
        )
    return order


def _weight(config: ModelConfig, sources: list[TensorEntry], part: WeightPart, expert: int | None = None) -> GgufWeight:
    shape, vector, rows, columns = _shape(config, sources, part, expert)
    types = {source.dtype for source in sources}
    kind = sources[0].dtype if len(types) == 1 else "mixed"
    floats = types <= set(FLOATS)
    changed = part.added or part.logarithm or part.flat or vector or is_convolution(part.name)
    if not floats and (len(shape) < 2 or changed):
        raise BadCheckpoint(f"{described(sources[0].name)} is {list(shape)} in {kind}, wanted floats")
    if len(types) > 1 and floats:
        raise BadCheckpoint(f"{described(sources[0].name)} is {' and '.join(sorted(types))}, wanted one of them")
    dtype = next(each for each in DTYPES.values() if each.safetensors == kind) if floats else _WIDENED
    nbytes = sum(source.nbytes for source in sources)
    kept = "" if columns or part.flipped else _KEPT.get(kind, "")
    return GgufWeight(
        entry=TensorEntry(part.name, dtype.safetensors, shape, 0, dtype.nbytes * math.prod(shape)),
        packing="gguf",
        numbers=kind,
        bits=0 if floats else max(_bits(each) for each in types - set(FLOATS)),
        group=(WHOLE, WHOLE),
        tensors={str(index): source.name for index, source in enumerate(sources)},
        nbytes=nbytes if expert is None else nbytes // sources[0].shape[0],
        label=_OPTIONS[kind] if floats else f"gguf {'+'.join(sorted(types))}",
        turned=part.turned and not vector,
        kept=kept if kept in FORMATS else "",
        sources=tuple(source.name for source in sources),
        expert=expert,
        rows=rows,
        columns=columns,
        flipped=part.flipped,
        vector=vector,
        added=part.added,
        logarithm=part.logarithm,
    )


def _bits(kind: str) -> int:
    """The bits of a code, by the name of its type: 4 of Q4_K and MXFP4, 2 of IQ2_XXS."""
    found = re.search(r"\d", kind)
    return int(found[0]) if found else 0
