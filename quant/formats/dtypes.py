"""The table of dtypes. Torch-free; tensor.py derives torch's dtypes from it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class DType(NamedTuple):
    """The names and size of a dtype: in torch, in safetensors, and in options (dtypes of activations only)."""

    name: str
    safetensors: str
    nbytes: int
    option: str = ""


DTYPES: Mapping[str, DType] = MappingProxyType(
    {
        dtype.name: dtype
        for dtype in (
            DType("float32", "F32", 4, "fp32"),
            DType("bfloat16", "BF16", 2, "bf16"),
            DType("float16", "F16", 2, "fp16"),
            DType("float64", "F64", 8),
            DType("int64", "I64", 8),
            DType("int32", "I32", 4),
            DType("int8", "I8", 1),
            DType("uint8", "U8", 1),
            DType("bool", "BOOL", 1),
        )
    }
)
# The dtypes of activations, by their name in options: bf16, fp16, fp32.
OPTION_DTYPES: Mapping[str, DType] = MappingProxyType({each.option: each for each in DTYPES.values() if each.option})
WEIGHT_DTYPES = tuple(each.name for each in OPTION_DTYPES.values())
