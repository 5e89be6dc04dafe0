"""The tensors that a quantized checkpoint holds, worked out from its config.json: for plans without any weights.

Torch-free. The layouts are those that quantized.py reads, which makes a shape of these tensors as of those of files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from ...offload.checkpoint.header import TensorEntry
from ..settings.errors import UnsupportedModel
from .quantization import WHOLE, Quantization, Scheme
from .read import LAYER, is_expert, is_matrix

_NBYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4}
# Instead of a dtype: that of the model.
_MODELS = ""
# Dtype and shape of a tensor by its suffix, instead of ".weight".
_Parts = Mapping[str, tuple[str, tuple[int, ...]]]


def quantized_entries(
    quantization: Quantization, entries: Mapping[str, TensorEntry], transposed_experts: bool
) -> dict[str, TensorEntry]:
    """`entries`, which hold floats, with the layers' matrices as the scheme stores them.

    Left as they are: routers, which no published checkpoint quantizes, and modules that the config names. MXFP4 stores
    stacked experts alone so. Raises UnsupportedModel for a scheme whose tensors are not worked out here.
    """
    if quantization.method == "mxfp4":
        return dict(_stacked(entries, transposed_experts))
    if quantization.method not in _PARTS:
        raise UnsupportedModel(
            f"a plan without weights is not made for a checkpoint quantized by {quantization.method}; give the folder "
            "of the checkpoint, whose headers say what its tensors are"
        )
    scheme, parts = quantization.schemes[0], _PARTS[quantization.method]
    found: dict[str, TensorEntry] = {}
    for name, entry in entries.items():
        module = name.removesuffix(".weight")
        if not _is_quantized(name, entry, quantization.unquantized):
            found[name] = entry
            continue
        rows, columns = entry.shape
        for suffix, (dtype, shape) in parts(rows, columns, scheme).items():
            found[f"{module}.{suffix}"] = _entry(f"{module}.{suffix}", dtype or entry.dtype, shape)
    return found


def _entry(name: str, dtype: str, shape: tuple[int, ...]) -> TensorEntry:
    return TensorEntry(name, dtype, shape, 0, _NBYTES[dtype] * math.prod(shape))


def _is_quantized(name: str, entry: TensorEntry, unquantized: frozenset[str]) -> bool:
    """A name in the config means the modules that it is a part of, between dots."""
    if not LAYER.search(name) or not is_matrix(name) or len(entry.shape) != 2:
        return False
    return not any(f".{part}." in f".{name}" for part in unquantized)


def _stacked(entries: Mapping[str, TensorEntry], transposed: bool) -> Iterator[tuple[str, TensorEntry]]:
    for name, entry in entries.items():
        if not is_expert(name, entry) or len(entry.shape) != 3:
            yield name, entry
            continue
        count, columns, rows = entry.shape if transposed else (entry.shape[0], entry.shape[2], entry.shape[1])
        yield f"{name}_blocks", _entry(f"{name}_blocks", "U8", (count, rows, columns // 32, 16))
        yield f"{name}_scales", _entry(f"{name}_scales", "U8", (count, rows, columns // 32))


def _groups(size: int, group: int) -> int:
    return 1 if group == WHOLE else -(-size // group)


def _grid(rows: int, columns: int, scheme: Scheme) -> tuple[int, int]:
    return _groups(rows, scheme.group[0]), _groups(columns, scheme.group[1])


def _fp8(rows: int, columns: int, scheme: Scheme) -> _Parts:
    # MXFP8's scales are exponents.
    dtype = "U8" if scheme.group == (1, 32) else "F32"
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale_inv": (dtype, _grid(rows, columns, scheme))}


def _fbgemm(rows: int, columns: int, scheme: Scheme) -> _Parts:
    return {"weight": ("F8_E4M3", (rows, columns)), "weight_scale": ("F32", (rows, 1))}


def _gptq(rows: int, columns: int, scheme: Scheme) -> _Parts:
    groups = _groups(columns, scheme.group[1])
    return {
        "qweight": ("I32", (columns * scheme.bits // 32, rows)),
        "qzeros": ("I32", (groups, rows * scheme.bits // 32)),
        "scales": ("F16", (groups, rows)),
        "g_idx": ("I32", (columns,)),
    }


def _awq(rows: int, columns: int, scheme: Scheme) -> _Parts:
    groups = _groups(columns, scheme.group[1])
    zeros = ("I32", (groups, rows // 8))
    return {"qweight": ("I32", (columns, rows // 8)), "qzeros": zeros, "scales": ("F16", (groups, rows))}


def _compressed_tensors(rows: int, columns: int, scheme: Scheme) -> _Parts:
    grid = _grid(rows, columns, scheme)
    if scheme.bits == 8 and (scheme.numbers == "float" or scheme.group[1] == WHOLE):
        codes = "I8" if scheme.numbers == "int" else "F8_E4M3"
        return {"weight": (codes, (rows, columns)), "weight_scale": (_MODELS, grid)}
    if scheme.numbers == "float":
        whole: _Parts = {"weight_global_scale": ("F32", (1,))} if scheme.group[1] == 16 else {}
        packed = {"weight_packed": ("U8", (rows, columns // 2))}
        return {**packed, "weight_scale": ("F8_E4M3" if whole else "U8", grid), **whole}
    zeros: _Parts = {} if scheme.symmetric else {"weight_zero_point": ("I32", (-(-rows * scheme.bits // 32), grid[1]))}
    words = -(-columns * scheme.bits // 32)
    return {"weight_packed": ("I32", (rows, words)), "weight_scale": (_MODELS, grid), **zeros}


_PARTS: Mapping[str, Callable[[int, int, Scheme], _Parts]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
}
