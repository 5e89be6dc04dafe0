"""The only table of dtypes. Free of torch; what needs torch is derived from it in tensor.py."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class DType(NamedTuple):
    """A dtype by its names: torch's, that of safetensors, and the one in options, for those that models compute in."""

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
# By the name in options: bf16, fp16, fp32.
OPTION_DTYPES: Mapping[str, DType] = MappingProxyType({each.option: each for each in DTYPES.values() if each.option})
WEIGHT_DTYPES = tuple(each.name for each in OPTION_DTYPES.values())
