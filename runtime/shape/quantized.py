"""Which tensors of the files make up a weight of a quantized checkpoint, and in which format. Torch-free.

Layouts are those that the formats' own libraries write: transformers (fp8, mxfp4), compressed-tensors, bitsandbytes,
AutoGPTQ and GPTQModel (gptq, gptq_v2), AutoAWQ (gemm). Reads headers, and the bytes of small tensors that hold shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from ...offload.checkpoint.header import TensorEntry, described, load_object
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import DTYPES, FORMATS
from ..settings.errors import UnsupportedModel
from .quantization import WHOLE, Quantization, Scheme, num_groups

# The bytes of a small tensor, by its name.
ReadSmall = Callable[[str], bytes]
MAX_SMALL_NBYTES = 4096
_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
_NBYTES = {each.safetensors: each.nbytes for each in DTYPES.values()}
# Scales of activations and of the KV cache: activations are not quantized here, and the cache has its own scales.
_UNUSED = re.compile(
    r"\.(input_scale|input_scale_ub|input_zero_point|input_global_scale|output_scale|output_zero_point|activation_scale"
    r"|act_scale|k_scale|v_scale|q_scale|kv_scale|kv_cache_scale|prob_output_scale|weight_format)$"
)
_MAX_UNUSED_NUMEL = 1 << 20


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight that the files hold in a few bits: `entry` is the float tensor that a model has.

    `packing` is how codes lie in the files and `numbers` what a code means; model/dequantize.py reads both. `tensors`
    are the names in the files by role, `group` the rows and columns that share a scale, `zero` what is added to zero
    points or, where there are none, the zero point. `nested` are block size and offset of bitsandbytes' absmax.
    `turned` experts are [E, K, N] in the model, and [E, N, K] in the files. `kept` is the weight format that has the
    same codes and scales, empty where none has.
    """

    entry: TensorEntry
    packing: str
    numbers: str
    bits: int
    group: tuple[int, int]
    tensors: Mapping[str, str]
    nbytes: int
    label: str
    zero: int = 0
    nested: tuple[int, float] | None = None
    turned: bool = False
    kept: str = ""


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """A checkpoint's tensors as a model has them: `entries` are floats, `quantized` of them lie in other tensors.

    `unused` are tensors of the files that nothing is computed from.
    """

    entries: Mapping[str, TensorEntry]
    quantized: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def model_tensors(
    quantization: Quantization | None,
    entries: Mapping[str, TensorEntry],
    dtype: str | None,
    transposed_experts: bool,
    read: ReadSmall | None = None,
) -> ModelTensors:
    """The weights that `entries` hold. `dtype` (bfloat16) is that of config.json, as which weights are counted.

    `read` is None where only headers are at hand. Raises BadCheckpoint where tensors are not those of a scheme,
    UnsupportedModel where their layout is not read.
    """
    if quantization is None:
        return ModelTensors(entries)
    files = _Files(entries, quantization, dtype or "bfloat16", transposed_experts, read)
    find = _FINDERS[quantization.method]
    quantized: dict[str, QuantizedWeight] = {}
    for entry in entries.values():
        if (weight := find(files, entry)) is not None:
            own = weight.tensors.values()
            if weight.entry.name in quantized or (weight.entry.name in entries and weight.entry.name not in own):
                raise BadCheckpoint(f"{described(weight.entry.name)} is in the files twice, quantized and not")
            if weight.entry.name.removesuffix(".weight") in quantization.unquantized:
                raise BadCheckpoint(
                    f"{described(weight.entry.name)} is {weight.label} in the files, and config.json says that it is "
                    "not quantized"
                )
            quantized[weight.entry.name] = replace(weight, kept=_kept(weight, files))
    if not quantized:
        raise BadCheckpoint(
            f"config.json says that weights are quantized by {quantization.method}, and no tensor of the files is"
        )
    used = {name for weight in quantized.values() for name in weight.tensors.values()}
    unused = tuple(name for name, entry in entries.items() if name not in used and _is_unused(entry))
    plain = {name: entry for name, entry in entries.items() if name not in used and not _is_unused(entry)}
    return ModelTensors(plain | {name: weight.entry for name, weight in quantized.items()}, quantized, unused)


_SHORT = {"F16": "f16", "BF16": "bf16"}


def _kept(weight: QuantizedWeight, files: _Files) -> str:
    """The weight format that has the codes and scales of a weight as they are, empty where there is none."""
    rows, columns = weight.group
    zero, scale = weight.tensors.get("zero"), files.entries[weight.tensors["scale"]]
    name = ""
    if "order" in weight.tensors and files.quantization.ordered:
        return ""
    if weight.numbers in ("nf4", "e2m1"):
        name = {("nf4", 64): "nf4-f32", ("e2m1", 32): "mxfp4-e8m0"}.get((weight.numbers, columns), "")
    elif weight.bits == 8 and weight.numbers in ("int", "bnb-int") and zero is None and weight.group == (1, WHOLE):
        name = "int8-f32"
    elif weight.numbers == "int" and weight.bits in (4, 8) and scale.dtype in _SHORT and rows == 1:
        name = f"int{weight.bits}-g{columns}-{_SHORT[scale.dtype]}" + ("-zp" if zero else "")
    whole = columns == WHOLE or weight.entry.shape[-2 if weight.turned else -1] % columns == 0
    return name if name in FORMATS and whole else ""


def _is_unused(entry: TensorEntry) -> bool:
    return _UNUSED.search(entry.name) is not None and entry.numel <= _MAX_UNUSED_NUMEL


@dataclass(frozen=True, slots=True)
class _Files:
    entries: Mapping[str, TensorEntry]
    quantization: Quantization
    dtype: str
    transposed_experts: bool
    read: ReadSmall | None

    def first(self, *names: str) -> TensorEntry | None:
        return next((self.entries[name] for name in names if name in self.entries), None)

    def want(self, name: str, of: str) -> TensorEntry:
        if name not in self.entries:
            raise BadCheckpoint(f"{described(of)} is quantized, and its {described(name)} is missing")
        return self.entries[name]

    def weight(
        self, name: str, shape: tuple[int, ...], kind: tuple[str, str, int], group: tuple[int, int],
        parts: Mapping[str, TensorEntry | None], label: str, zero: int = 0, nested: tuple[int, float] | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        """`kind` is packing, numbers and bits."""
        found = {role: entry for role, entry in parts.items() if entry is not None}
        dtype = DTYPES[self.dtype]
        entry = TensorEntry(name, dtype.safetensors, shape, 0, dtype.nbytes * math.prod(shape))
        nbytes = sum(each.nbytes for each in found.values())
        names = {role: each.name for role, each in found.items()}
        return QuantizedWeight(entry, *kind, group, names, nbytes, label, zero, nested)


def _check(entry: TensorEntry | None, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raises BadCheckpoint unless the tensor, if there is one, has one of the dtypes and shapes."""
    if entry is not None and (entry.dtype not in dtypes or entry.shape not in shapes):
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise BadCheckpoint(
            f"{described(entry.name)} is {entry.dtype} {list(entry.shape)}, wanted {' or '.join(dtypes)} {wanted}"
        )


def _whole_groups(entry: TensorEntry, columns: int, group: int) -> int:
    """The groups of a row. Raises BadCheckpoint where the last would be shorter: other sizes have as many scales."""
    if group != WHOLE and columns % group:
        raise BadCheckpoint(
            f"{described(entry.name)} has rows of {columns}, and config.json says groups of {group}; wanted a "
            "group_size that divides them, or -1 for one group a row"
        )
    return num_groups(columns, group)


def _matrix(entry: TensorEntry, *dims: int) -> tuple[int, ...]:
    """The shape of a tensor that must have as many dimensions, and elements."""
    if len(entry.shape) not in dims or not entry.numel:
        raise BadCheckpoint(
            f"{described(entry.name)} is {entry.dtype} {list(entry.shape)}, wanted "
            f"{' or '.join(map(str, dims))} dimensions"
        )
    return entry.shape


def _group_text(group: tuple[int, int]) -> str:
    rows, columns = group
    if rows == WHOLE:
        return "per tensor"
    if columns == WHOLE:
        return "per row" if rows == 1 else f"per {rows} rows"
    return f"g{columns}" if rows == 1 else f"{rows}x{columns}"


def _fp8(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`weight` in e4m3 with `weight_scale_inv` by blocks; also `scale` and `qscale_weight`; e8m0 scales in MXFP8."""
    if entry.dtype != "F8_E4M3":
        return None
    module = entry.name.removesuffix(".weight")
    scale = files.first(f"{entry.name}_scale_inv", f"{module}.scale", f"{module}.qscale_weight")
    scale = scale or files.want(f"{entry.name}_scale_inv", entry.name)
    (scheme,) = files.quantization.schemes
    return _scaled_bytes(files, entry, scale, [scheme], "e4m3")


def _fbgemm(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`weight` in e4m3 with `weight_scale` by rows; stacked experts are stored transposed, so theirs is by columns."""
    if entry.dtype != "F8_E4M3":
        return None
    scale = files.want(f"{entry.name}_scale", entry.name)
    if len(_matrix(entry, 2, 3)) == 2:
        return _scaled_bytes(files, entry, scale, list(files.quantization.schemes), "e4m3")
    count, _, columns = entry.shape
    _check(scale, _FLOATS, (count, 1, columns), (count, columns, 1))
    parts = {"codes": entry, "scale": scale}
    return files.weight(entry.name, entry.shape, ("bytes", "e4m3", 8), (WHOLE, 1), parts, "fp8 per row")


def _scaled_bytes(
    files: _Files, entry: TensorEntry, scale: TensorEntry, schemes: list[Scheme], numbers: str,
    zero: TensorEntry | None = None,
) -> QuantizedWeight:  # fmt: skip
    """A weight of a byte each, whose scales (and zero points) form a grid over its last two dimensions."""
    *stack, rows, columns = _matrix(entry, 2, 3)
    fitting = [
        scheme
        for scheme in schemes
        if _fits_grid(scale, (*stack, num_groups(rows, scheme.group[0]), num_groups(columns, scheme.group[1])))
    ]
    if not fitting:
        wanted = [(num_groups(rows, scheme.group[0]), num_groups(columns, scheme.group[1])) for scheme in schemes]
        raise BadCheckpoint(
            f"{described(scale.name)} is {scale.dtype} {list(scale.shape)}, and the schemes of config.json want "
            f"{' or '.join(str([*stack, *grid]) for grid in wanted) or 'none'} for a weight {list(entry.shape)}"
        )
    scheme = fitting[0]
    if scheme.group[0] == 1:
        _whole_groups(entry, columns, scheme.group[1])
    exponents = numbers == "e4m3" and scheme.group == (1, 32)
    _check(scale, (*_FLOATS, *_EXPONENTS) if numbers == "e4m3" else _FLOATS, scale.shape)
    if scale.dtype == "U8" and not exponents:
        _check(scale, _FLOATS, scale.shape)
    _check(zero, ("I8",), scale.shape)
    names = {"e4m3": "mxfp8" if scale.dtype in _EXPONENTS and exponents else "fp8", "int": "int8"}
    text = "" if names[numbers] == "mxfp8" else f" {_group_text(scheme.group)}"
    parts = {"codes": entry, "scale": scale, "zero": zero}
    return files.weight(entry.name, entry.shape, ("bytes", numbers, 8), scheme.group, parts, names[numbers] + text)


def _fits_grid(scale: TensorEntry, grid: tuple[int, ...]) -> bool:
    """Whether a tensor has a scale for each group; libraries leave dimensions of 1 out."""
    if scale.shape == grid:
        return True
    if math.prod(grid) == 1:
        return scale.numel == 1
    return len(grid) == 2 and grid[1] == 1 and scale.shape == grid[:1]


def _bitsandbytes_8bit(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`weight` int8 with the absmax of each row, `SCB`; weight = code * SCB / 127."""
    if entry.dtype != "I8" or not entry.name.endswith(".weight"):
        return None
    rows, columns = _matrix(entry, 2)
    scale = files.want(f"{entry.name.removesuffix('.weight')}.SCB", entry.name)
    _check(scale, ("F32",), (rows,), (rows, 1))
    # Only the row-major order is written to files.
    _check(files.first(f"{entry.name.removesuffix('.weight')}.weight_format"), ("U8",), (), (1,))
    kind, parts = ("bytes", "bnb-int", 8), {"codes": entry, "scale": scale}
    return files.weight(entry.name, (rows, columns), kind, (1, WHOLE), parts, "bitsandbytes int8 per row")


_STATE = re.compile(r"^(.*)\.quant_state\.bitsandbytes__(nf4|fp4)$")
_BNB_BLOCKS = tuple(1 << power for power in range(5, 13))


def _bitsandbytes_4bit(files: _Files, state: TensorEntry) -> QuantizedWeight | None:
    """`weight` uint8, two codes a byte, the first in the high bits; `absmax` by blocks of the flattened weight."""
    match = _STATE.match(state.name)
    if match is None:
        return None
    name, levels = match[1], match[2]
    codes, absmax = files.want(name, state.name), files.want(f"{name}.absmax", state.name)
    table = files.want(f"{name}.quant_map", state.name)
    shape, block, nested = _bnb_state(files, state, levels)
    numel = math.prod(shape)
    if codes.nbytes * 2 != numel or numel % 2:
        raise BadCheckpoint(f"{described(name)} has {codes.nbytes} bytes, its quant_state is of a weight {list(shape)}")
    blocks = -(-numel // block)
    _check(absmax, ("U8",) if nested else ("F32",), (blocks,))
    _check(table, ("F32",), (16,))
    parts: dict[str, TensorEntry | None] = {"codes": codes, "scale": absmax, "table": table, "state": state}
    if nested:
        outer, outer_table = files.want(f"{name}.nested_absmax", name), files.want(f"{name}.nested_quant_map", name)
        _check(outer, ("F32",), (-(-blocks // nested[0]),))
        _check(outer_table, ("F32",), (256,))
        parts |= {"nested_scale": outer, "nested_table": outer_table}
    kind = ("high-nibbles", levels, 4)
    return files.weight(name, shape, kind, (1, block), parts, f"bitsandbytes {levels} g{block}", 0, nested)


def _bnb_state(files: _Files, state: TensorEntry, levels: str) -> tuple[tuple[int, ...], int, tuple[int, float] | None]:
    """The shape and block size of a weight, and block size and offset of its absmax where that is quantized."""
    if files.read is None:
        raise UnsupportedModel(
            "the shapes of bitsandbytes' 4-bit weights are in the files, not in their headers; download the model first"
        )
    if state.dtype != "U8" or state.nbytes > MAX_SMALL_NBYTES:
        raise BadCheckpoint(f"{described(state.name)} is {state.dtype} of {state.nbytes} bytes, wanted a short U8 text")
    try:
        values = load_object(files.read(state.name))
    except ValueError as error:
        raise BadCheckpoint(f"{described(state.name)} is not JSON ({error})") from None
    shape, block, outer, offset = (
        values.get(key) for key in ("shape", "blocksize", "nested_blocksize", "nested_offset")
    )
    sizes = isinstance(shape, list) and len(shape) in (2, 3) and all(type(size) is int for size in shape)
    if not sizes or not all(1 <= size < 1 << 31 for size in shape or ()) or values.get("quant_type") != levels:
        raise BadCheckpoint(f"{described(state.name)}: shape or quant_type are not those of a matrix in {levels}")
    if block not in _BNB_BLOCKS or type(block) is not int:
        raise BadCheckpoint(f"{described(state.name)}: blocksize is {described(block)}, wanted one of {_BNB_BLOCKS}")
    if outer is None:
        return tuple(shape or ()), block, None
    if outer not in _BNB_BLOCKS or not isinstance(offset, float) or not math.isfinite(offset):
        raise BadCheckpoint(f"{described(state.name)}: nested_blocksize or nested_offset is out of range")
    return tuple(shape or ()), block, (int(outer), offset)


def _gptq(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`qweight` int32 [K * bits / 32, N], `qzeros` [K / g, N * bits / 32], `scales` [K / g, N], `g_idx` [K]."""
    if not entry.name.endswith(".qweight"):
        return None
    (scheme,) = files.quantization.schemes
    words, rows = _matrix(entry, 2)
    columns, group = words * 32 // scheme.bits, scheme.group[1]
    module = entry.name.removesuffix(".qweight")
    order = files.first(f"{module}.g_idx")
    # AutoGPTQ writes a shorter last group, and says in g_idx which columns those are.
    groups = _whole_groups(entry, columns, group) if order is None else num_groups(columns, group)
    parts = {
        "codes": entry,
        "scale": files.want(f"{module}.scales", entry.name),
        "zero": files.want(f"{module}.qzeros", entry.name),
        "order": order,
    }
    _check(entry, ("I32",), entry.shape)
    if words * 32 % scheme.bits or rows * scheme.bits % 32:
        raise BadCheckpoint(f"{described(entry.name)} is {list(entry.shape)}, which {scheme.bits} bits do not fill")
    _check(parts["scale"], _FLOATS, (groups, rows))
    _check(parts["zero"], ("I32",), (groups, rows * scheme.bits // 32))
    _check(parts["order"], ("I32", "I64"), (columns,))
    label = f"gptq int{scheme.bits} {_group_text(scheme.group)}"
    kind = ("words-first", "int", scheme.bits)
    stored_zero = files.quantization.stored_zero
    return files.weight(f"{module}.weight", (rows, columns), kind, scheme.group, parts, label, stored_zero)


def _awq(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`qweight` int32 [K, N / 8], `qzeros` [K / g, N / 8], `scales` [K / g, N]; a word has outputs 0 2 4 6 1 3 5 7."""
    if not entry.name.endswith(".qweight"):
        return None
    (scheme,) = files.quantization.schemes
    columns, words = _matrix(entry, 2)
    groups = _whole_groups(entry, columns, scheme.group[1])
    module = entry.name.removesuffix(".qweight")
    zero = files.want(f"{module}.qzeros", entry.name)
    parts = {"codes": entry, "scale": files.want(f"{module}.scales", entry.name), "zero": zero}
    _check(entry, ("I32",), entry.shape)
    _check(parts["scale"], _FLOATS, (groups, words * 8))
    _check(zero, ("I32",), (groups, words))
    label = f"awq int4 {_group_text(scheme.group)}"
    kind = ("awq", "int", 4)
    return files.weight(f"{module}.weight", (words * 8, columns), kind, scheme.group, parts, label)


def _mxfp4(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`X_blocks` uint8 [E, N, K / 32, 16], two codes a byte, the first in the low bits; `X_scales` [E, N, K / 32]."""
    if not entry.name.endswith("_blocks"):
        return None
    name = entry.name.removesuffix("_blocks")
    count, rows, groups, half = _matrix(entry, 4)
    scale = files.want(f"{name}_scales", entry.name)
    _check(entry, ("U8",), (count, rows, groups, 16))
    _check(scale, _EXPONENTS, (count, rows, groups))
    columns = groups * half * 2
    shape = (count, columns, rows) if files.transposed_experts else (count, rows, columns)
    parts = {"codes": entry, "scale": scale}
    weight = files.weight(name, shape, ("low-nibbles", "e2m1", 4), (1, 32), parts, "mxfp4")
    return replace(weight, turned=files.transposed_experts)


def _compressed_tensors(files: _Files, entry: TensorEntry) -> QuantizedWeight | None:
    """`weight_packed` in int32 words along K or in nibbles, or `weight` in int8 or e4m3; `weight_scale` beside them."""
    module = entry.name.rpartition(".")[0]
    if entry.name.endswith(".weight_packed"):
        scale = files.want(f"{module}.weight_scale", entry.name)
        return _ct_nibbles(files, entry, scale) if entry.dtype == "U8" else _ct_words(files, entry, scale)
    if not entry.name.endswith(".weight") or entry.dtype not in ("I8", "F8_E4M3"):
        return None
    numbers = "int" if entry.dtype == "I8" else "float"
    zero = files.first(f"{module}.weight_zero_point")
    schemes = [
        scheme
        for scheme in files.quantization.schemes
        if scheme.numbers == numbers and (numbers == "int" or scheme.bits == 8)
        and (scheme.symmetric or zero is not None)
    ]  # fmt: skip
    if f"{module}.weight_g_idx" in files.entries:
        raise UnsupportedModel(f"{described(module)}.weight_g_idx orders the inputs of bytes, which is not read")
    scale = files.want(f"{entry.name}_scale", entry.name)
    kind = "int" if numbers == "int" else "e4m3"
    return _scaled_bytes(files, entry, scale, schemes, kind, zero if numbers == "int" else None)


def _ct_nibbles(files: _Files, entry: TensorEntry, scale: TensorEntry) -> QuantizedWeight:
    """NVFP4, groups of 16 with e4m3 scales and one divisor of them all, and MXFP4, groups of 32 with exponents."""
    rows, half = _matrix(entry, 2)
    module, columns = entry.name.removesuffix(".weight_packed"), 2 * half
    sizes = {scheme.group[1] for scheme in files.quantization.schemes if (scheme.numbers, scheme.bits) == ("float", 4)}
    size = next((size for size in sorted(sizes & {16, 32}) if scale.shape == (rows, num_groups(columns, size))), None)
    if size is None:
        raise BadCheckpoint(
            f"{described(scale.name)} is {list(scale.shape)} for {described(entry.name)} {list(entry.shape)}, wanted a "
            f"scale for each group of {' or '.join(map(str, sorted(sizes))) or 'a scheme of 4-bit floats'}"
        )
    _whole_groups(entry, columns, size)
    whole = files.want(f"{module}.weight_global_scale", entry.name) if size == 16 else None
    _check(scale, ("F8_E4M3",) if size == 16 else _EXPONENTS, scale.shape)
    _check(whole, ("F32",), (1,), ())
    parts = {"codes": entry, "scale": scale, "divisor": whole}
    label = "nvfp4" if size == 16 else "mxfp4"
    return files.weight(f"{module}.weight", (rows, columns), ("low-nibbles", "e2m1", 4), (1, size), parts, label)


def _ct_words(files: _Files, entry: TensorEntry, scale: TensorEntry) -> QuantizedWeight:
    rows, words = _matrix(entry, 2)
    module = entry.name.removesuffix(".weight_packed")
    zero, shape = files.first(f"{module}.weight_zero_point"), files.first(f"{module}.weight_shape")
    stated = _stated_shape(files, shape)
    for scheme in files.quantization.schemes:
        if scheme.numbers != "int" or scheme.symmetric == (zero is not None):
            continue
        columns = _columns(scheme, words, scale, stated)
        grid = (num_groups(rows, scheme.group[0]), num_groups(columns, scheme.group[1]))
        if -(-columns * scheme.bits // 32) == words and _fits_grid(scale, grid) and stated in (None, (rows, columns)):
            break
    else:
        raise BadCheckpoint(
            f"{described(entry.name)} {list(entry.shape)} with scales {list(scale.shape)}"
            f"{f' and shape {list(stated)}' if stated else ''} is of no scheme of config.json"
        )
    if scheme.group[0] == 1:
        _whole_groups(entry, columns, scheme.group[1])
    _check(entry, ("I32",), entry.shape)
    _check(scale, _FLOATS, scale.shape)
    _check(zero, ("I32",), (-(-rows * scheme.bits // 32), grid[1]))
    order = files.first(f"{module}.weight_g_idx")
    _check(order, ("I32", "I64"), (columns,))
    parts = {"codes": entry, "scale": scale, "zero": zero, "order": order, "shape": shape}
    label = f"int{scheme.bits} {_group_text(scheme.group)}"
    kind = ("words", "int", scheme.bits)
    middle = 0 if zero else 1 << (scheme.bits - 1)
    return files.weight(f"{module}.weight", (rows, columns), kind, scheme.group, parts, label, middle)


def _columns(scheme: Scheme, words: int, scale: TensorEntry, stated: tuple[int, ...] | None) -> int:
    if stated is not None:
        return stated[1]
    if scheme.group[1] != WHOLE and scale.shape:
        return scale.shape[-1] * scheme.group[1]
    return words * 32 // scheme.bits


def _stated_shape(files: _Files, shape: TensorEntry | None) -> tuple[int, int] | None:
    _check(shape, ("I64", "I32"), (2,))
    if shape is None or files.read is None:
        return None
    data, size = files.read(shape.name), _NBYTES[shape.dtype]
    rows, columns = (int.from_bytes(data[begin : begin + size], "little", signed=True) for begin in (0, size))
    if not (0 < rows < 1 << 31 and 0 < columns < 1 << 31):
        raise BadCheckpoint(f"{described(shape.name)} is {rows} by {columns}")
    return rows, columns


_FINDERS: Mapping[str, Callable[[_Files, TensorEntry], QuantizedWeight | None]] = {
    "awq": _awq,
    "bitsandbytes_4bit": _bitsandbytes_4bit,
    "bitsandbytes_8bit": _bitsandbytes_8bit,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
