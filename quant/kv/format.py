"""Layouts of KV cache formats: the planes of a record, their offsets and their bytes. Torch-free.

Planner, codec and attention kernels share this definition. A record is one block of N tokens in one layer with
H KV heads of D elements, keys and values together; it is head-major, so that one head of one block is one run of bytes.

| plane            | native           | int8             | int4               |
|------------------|------------------|------------------|--------------------|
| `codes`          | float  [H, N, D] | int8   [H, N, D] | uint8 [H, N, D/2]  |
| `scales`         |                  | fp16   [H, 1, N] | fp16  [H, 2, N]    |
| `zeros`          |                  |                  | fp16  [H, 2, N]    |

int8: element = code * scale, code in -127 to 127.
int4: element = code * scales[g] + zeros[g], code in 0 to 15. Elements 0 to D/2 are group 0, in the low bits of a byte;
the others are group 1, in the high bits: a kernel computes two dots of half the width and does not interleave groups.

Latent attention caches one vector of each of two kinds for all heads, and a record holds them as if they were keys and
values of one head: the latent, which keys and values are computed from, in `keys`, and the rotated part of keys, which
is shorter, in `values` (`KVFormat.of_latents`). Keys of an indexer are records without values (`of_index_keys`).

A token's codes depend on that token alone (there are scales per token and head), so blocks can be appended to, shared,
copied and moved without being encoded again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Self

from ..formats.format import FormatError, Plane, end_of, lay_out


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """How a vector (one head of one token, D elements) is stored: `packed` elements per code, `groups` scales."""

    name: str
    code: str
    packed: int = 1
    groups: int = 0
    has_zeros: bool = False

    @property
    def quantized(self) -> bool:
        return self.groups > 0


VECTOR_FORMATS: Mapping[str, VectorFormat] = MappingProxyType(
    {
        "fp32": VectorFormat("fp32", "float32"),
        "bf16": VectorFormat("bf16", "bfloat16"),
        "fp16": VectorFormat("fp16", "float16"),
        "int8": VectorFormat("int8", "int8", groups=1),
        "int4": VectorFormat("int4", "uint8", packed=2, groups=2, has_zeros=True),
    }
)
KV_FORMATS = ("bf16", "fp16", "fp32", "int8", "int8/int4", "int4")


@dataclass(frozen=True, slots=True)
class KVFormat:
    """The formats of keys and of values."""

    keys: VectorFormat
    values: VectorFormat

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parses `int8` (for both) or `int8/int4` (for keys/values). Raises FormatError."""
        if name not in KV_FORMATS:
            raise FormatError(f"KV format {name!r} is unknown; use one of {', '.join(KV_FORMATS)}.")
        keys, _, values = name.partition("/")
        return cls(VECTOR_FORMATS[keys], VECTOR_FORMATS[values or keys])

    @classmethod
    def of_index_keys(cls, name: str) -> Self:
        """The formats of an indexer's keys, which have no values, where a run asks for `name`. Raises FormatError.

        Quantized ones keep 8 bits, as in DeepSeek's own code: what they choose is not rounded, it is there or not.
        """
        keys = cls.parse(name).keys
        return cls(VECTOR_FORMATS["int8"] if keys.quantized else keys, VECTOR_FORMATS["bf16"])

    @classmethod
    def of_latents(cls, name: str) -> Self:
        """The formats of latents and of rotated keys where a run asks for `name`. Raises FormatError.

        Latents are both keys and values, and take the finer of the two formats. Rotated keys, a ninth of the elements,
        stay in 8 bits (docs/quality.md).
        """
        keys = cls.parse(name).keys
        return cls(keys, VECTOR_FORMATS["int8"] if keys.quantized else keys)


class VectorPlanes(NamedTuple):
    """The planes of keys, or of values, in a record; None for planes that the format does not have."""

    codes: Plane
    scales: Plane | None
    zeros: Plane | None


@dataclass(frozen=True, slots=True)
class RecordLayout:
    """The layout of the record of one block in one layer: offsets in bytes, every plane at a multiple of 64."""

    format: KVFormat
    keys: VectorPlanes
    values: VectorPlanes
    nbytes: int

    @classmethod
    def of(cls, format: KVFormat, kv_heads: int, head_dim: int, block: int, value_dim: int | None = None) -> Self:
        """The layout for blocks of `block` tokens; values have `value_dim` elements where that is not `head_dim`, 0
        for none.

        Raises FormatError if the format cannot hold the head size.
        """
        parts = {
            "keys": (format.keys, head_dim),
            "values": (format.values, head_dim if value_dim is None else value_dim),
        }
        for vectors, dim in parts.values():
            if dim % vectors.packed:
                raise FormatError(
                    f"A head of {dim} elements was found; {vectors.name} wants a multiple of {vectors.packed}."
                    " Use --kv int8."
                )
        named = [
            (f"{side}.{name}", dtype, shape)
            for name in ("codes", "scales", "zeros")
            for side, (vectors, dim) in parts.items()
            for dtype, shape in _tensors(vectors, name, kv_heads, dim, block)
        ]
        planes = {plane.name: plane for plane in lay_out(named)}
        keys, values = (
            VectorPlanes(planes[f"{side}.codes"], planes.get(f"{side}.scales"), planes.get(f"{side}.zeros"))
            for side in parts
        )
        return cls(format, keys, values, end_of(planes.values()))


def _tensors(
    vectors: VectorFormat, name: str, kv_heads: int, head_dim: int, block: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of one plane; yields nothing if the format does not have it."""
    if name == "codes":
        yield vectors.code, (kv_heads, block, head_dim // vectors.packed)
    elif vectors.quantized and (name == "scales" or vectors.has_zeros):
        yield "float16", (kv_heads, vectors.groups, block)
