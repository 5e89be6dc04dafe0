"""`quantization_config` of a config.json: how the weights of a quantized checkpoint are stored. Torch-free.

The names of tensors say which weights are quantized, and their shapes must be those of a scheme of the config. Patterns
of modules are never matched: a regular expression of a stranger can run for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...offload.checkpoint.header import described
from ..settings.errors import UnsupportedModel

KEYS = ("quantization_config", "compression_config")
# Rows and columns of a group where all of them share a scale.
WHOLE = 0
# Weights that share a scale where bitsandbytes chooses.
BNB_BLOCK = 64
_MAX_SIZE = 1 << 20
_MAX_NAMES = 100_000
_MAX_GROUPS = 64


@dataclass(frozen=True, slots=True)
class Scheme:
    """One way to store weights: `numbers` is "int" or "float", `group` the rows and columns that share a scale."""

    numbers: str
    bits: int
    group: tuple[int, int]
    symmetric: bool = True


def num_groups(size: int, group: int) -> int:
    """How many groups cover so many rows or columns."""
    return 1 if group == WHOLE else -(-size // group)


@dataclass(frozen=True, slots=True)
class Quantization:
    """`method` is transformers' `quant_method`; `unquantized` names modules that hold floats.

    `stored_zero` is what a zero point of 0 in the files means; `ordered` says that columns of a group may lie apart.
    `levels` are those of bitsandbytes' 4-bit codes; `nested`: their scales are quantized, too.
    """

    method: str
    schemes: tuple[Scheme, ...] = ()
    unquantized: frozenset[str] = frozenset()
    stored_zero: int = 0
    ordered: bool = False
    levels: str = ""
    nested: bool = False


def parse_quantization(values: Mapping[str, Any]) -> Quantization | None:
    """What a config.json says of quantized weights; None where it says nothing.

    Raises UnsupportedModel for a method that is not read here, and for values that are none.
    """
    given = [values[key] for key in KEYS if values.get(key) is not None]
    if not given:
        return None
    config = given[0]
    if len(given) > 1 or not isinstance(config, dict):
        raise _refused("quantization_config", given if len(given) > 1 else config, "one object")
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if not isinstance(method, str) or method not in _METHODS:
        raise UnsupportedModel(
            f"config.json: weights are quantized by {described(method)}, which is not read; wanted one of "
            f"{', '.join(_METHODS)}, or the bf16 or fp16 original"
        )
    return _METHODS[method](config)


def _names(config: Mapping[str, Any], *keys: str) -> frozenset[str]:
    for key in keys:
        names = config.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or len(names) > _MAX_NAMES or not all(isinstance(name, str) for name in names):
            raise _refused(key, names, "a list of modules' names")
        return frozenset(name for name in names if not name.startswith("re:"))
    return frozenset()


def _fp8(config: Mapping[str, Any]) -> Quantization:
    if config.get("expert_dtype") not in (None, "fp8"):
        raise _refused("expert_dtype", config["expert_dtype"], "fp8")
    block = config.get("weight_block_size", [128, 128])
    group = (WHOLE, WHOLE) if block is None else _pair(block, "weight_block_size")
    if config["quant_method"] == "mxfp8":
        group = (1, 32)
    skipped = _names(config, "modules_to_not_convert", "ignored_layers")
    return Quantization("fp8", (Scheme("float", 8, group),), skipped)


def _fbgemm(config: Mapping[str, Any]) -> Quantization:
    return Quantization("fbgemm_fp8", (Scheme("float", 8, (1, WHOLE)),), _names(config, "modules_to_not_convert"))


def _bitsandbytes(config: Mapping[str, Any]) -> Quantization:
    four, eight = config.get("load_in_4bit", False), config.get("load_in_8bit", False)
    if not isinstance(four, bool) or not isinstance(eight, bool) or four == eight:
        raise _refused("load_in_4bit and load_in_8bit", [four, eight], "true for one of them")
    skipped = _names(config, "llm_int8_skip_modules")
    if eight:
        return Quantization("bitsandbytes_8bit", (Scheme("int", 8, (1, WHOLE)),), skipped)
    levels = _one_of(config, ("bnb_4bit_quant_type",), ("nf4", "fp4"), "fp4")
    nested = bool(config.get("bnb_4bit_use_double_quant"))
    scheme = Scheme(levels, 4, (1, BNB_BLOCK))
    return Quantization("bitsandbytes_4bit", (scheme,), skipped, levels=levels, nested=nested)


def _gptq(config: Mapping[str, Any]) -> Quantization:
    layout = _one_of(config, ("checkpoint_format", "format"), ("gptq", "gptq_v2"), "gptq")
    group = _group_size(config)
    # The names of tensors of other widths say so in their shapes, but not the width itself.
    if config.get("dynamic"):
        raise _refused("dynamic", config["dynamic"], "the same bits and groups in all layers")
    scheme = Scheme("int", _bits(config, "bits", (2, 3, 4, 8)), (1, group), bool(config.get("sym", True)))
    skipped, ordered = _names(config, "modules_to_not_convert"), config.get("desc_act") is not False
    return Quantization("gptq", (scheme,), skipped, int(layout == "gptq"), ordered)


def _awq(config: Mapping[str, Any]) -> Quantization:
    version = config.get("version", config.get("format", "gemm"))
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refused("version", version, "gemm, the order of codes that is read")
    scheme = Scheme("int", _bits(config, "bits", (4,)), (1, _group_size(config)), symmetric=False)
    return Quantization("awq", (scheme,), _names(config, "modules_to_not_convert"))


def _auto_round(config: Mapping[str, Any]) -> Quantization:
    packing = _one_of(config, ("packing_format",), ("auto_round:auto_gptq", "auto_round:auto_awq"), "")
    if config.get("extra_config"):
        raise _refused("extra_config", config["extra_config"], "the same bits and groups in all layers")
    return _awq({**config, "version": "gemm"}) if packing.endswith("awq") else _gptq({**config, "format": "gptq"})


def _mxfp4(config: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", (Scheme("float", 4, (1, 32)),), _names(config, "modules_to_not_convert"))


_CT_FORMATS = (
    "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense",
)  # fmt: skip


def _compressed_tensors(config: Mapping[str, Any]) -> Quantization:
    _one_of(config, ("format",), _CT_FORMATS, "dense")
    for key in ("sparsity_config", "transform_config"):
        inner = config.get(key)
        if inner and not (isinstance(inner, dict) and (inner.get("format") == "dense" or not any(inner.values()))):
            raise _refused(key, inner, "nothing, because weights alone are read")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not 1 <= len(groups) <= _MAX_GROUPS:
        raise _refused("config_groups", groups, "an object of schemes")
    schemes = [_ct_scheme(name, group) for name, group in groups.items()]
    found = tuple(dict.fromkeys(scheme for scheme in schemes if scheme is not None))
    # Where a weight has weight_g_idx: it is written for actorder "group" alone.
    return Quantization("compressed-tensors", found, _names(config, "ignore"), ordered=True)


def _ct_scheme(name: str, group: object) -> Scheme | None:
    """None for a group that quantizes activations or the cache alone."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict | None):
        raise _refused(f"config_groups.{described(name)}", group, "an object with weights")
    if group.get("format") is not None:
        _one_of(group, ("format",), _CT_FORMATS, "")
    weights = group.get("weights")
    if weights is None:
        return None
    numbers = _one_of(weights, ("type",), ("int", "float"), "int")
    bits = _bits(weights, "num_bits", tuple(range(2, 9)) if numbers == "int" else (4, 8), 8)
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in _CT_GROUPS:
        raise _refused("strategy", strategy, f"one of {', '.join(_CT_GROUPS)}")
    symmetric = weights.get("symmetric", True)
    if not isinstance(symmetric, bool) or (numbers == "float" and not symmetric):
        raise _refused("symmetric", symmetric, "true, or false for integers")
    return Scheme(numbers, bits, _CT_GROUPS[strategy](weights), symmetric)


_CT_GROUPS: Mapping[str, Callable[[Mapping[str, Any]], tuple[int, int]]] = {
    "tensor": lambda weights: (WHOLE, WHOLE),
    "channel": lambda weights: (1, WHOLE),
    "group": lambda weights: (1, _group_size(weights)),
    "tensor_group": lambda weights: (1, _group_size(weights)),
    "block": lambda weights: _pair(weights.get("block_structure"), "block_structure"),
}
_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "auto-round": _auto_round,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fbgemm,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "mxfp8": _fp8,
}


def _refused(name: str, found: object, wanted: object) -> UnsupportedModel:
    return UnsupportedModel(f"config.json: quantization_config: {name} is {described(found)}, wanted {wanted}")


def _one_of(config: Mapping[str, Any], keys: tuple[str, ...], wanted: tuple[str, ...], default: str) -> str:
    found = next((config[key] for key in keys if config.get(key) is not None), default)
    if found not in wanted or not isinstance(found, str):
        raise _refused(keys[0], found, f"one of {', '.join(wanted)}")
    return found


def _bits(config: Mapping[str, Any], key: str, wanted: tuple[int, ...], default: int | None = None) -> int:
    found = config.get(key, default)
    if type(found) is not int or found not in wanted:
        raise _refused(key, found, f"one of {', '.join(map(str, wanted))}")
    return found


def _group_size(config: Mapping[str, Any]) -> int:
    """Columns of a group; the files say -1 for all of a row."""
    found = config.get("group_size", config.get("q_group_size"))
    if type(found) is not int or not (found == -1 or 1 <= found <= _MAX_SIZE):
        raise _refused("group_size", found, f"-1, or 1 to {_MAX_SIZE}")
    return WHOLE if found == -1 else found


def _pair(found: object, name: str) -> tuple[int, int]:
    if isinstance(found, list) and len(found) == 2 and all(type(size) is int for size in found):
        rows, columns = found
        if min(found) >= 1 and max(found) <= _MAX_SIZE:
            return rows, columns
    raise _refused(name, found, f"two numbers from 1 to {_MAX_SIZE}")
