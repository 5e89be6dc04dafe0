"""A strict reader of safetensors headers: every byte of the file accounted for, once, or a refusal.

Stricter than the library, which accepts duplicate names, unknown fields and names like `../x`. Knows the file
format only (https://huggingface.co/docs/safetensors), no model. Torch-free.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from .errors import BadCheckpoint

MAX_HEADER_NBYTES = 100_000_000
MAX_DIMS = 8
MAX_NAME_NBYTES = 512
_MAX_NUMEL = 2**62
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file: `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def header_nbytes(prefix: bytes, file_nbytes: int, file: str) -> int:
    """Length of the JSON header that the first eight bytes announce."""
    if len(prefix) < 8:
        raise BadCheckpoint(f"{file}: {file_nbytes} bytes is too short for a safetensors file; download it again")
    (length,) = struct.unpack("<Q", prefix[:8])
    if not 2 <= length <= min(MAX_HEADER_NBYTES, file_nbytes - 8):
        raise BadCheckpoint(
            f"{file}: the header claims {length} bytes, wanted 2 to {min(MAX_HEADER_NBYTES, file_nbytes - 8)}; "
            "the file is truncated or not safetensors"
        )
    return int(length)


def parse_header(header: bytes, file_nbytes: int, file: str) -> dict[str, TensorEntry]:
    """The tensors of one file by name, in file order.

    `header` is the JSON text without its length prefix; `file_nbytes` the size of the whole file.
    """
    content = _load_json(header, file)
    content.pop("__metadata__", None)
    base = 8 + len(header)
    entries = [_entry(name, fields, base, file) for name, fields in content.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_cover(entries, base, file_nbytes, file)
    return {entry.name: entry for entry in entries}


def _load_json(header: bytes, file: str) -> dict[str, Any]:
    if header[:1] != b"{":
        raise BadCheckpoint(f"{file}: the header starts with {header[:1]!r}, wanted '{{'; not a safetensors file")
    try:
        content = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{file}: the header is not the JSON of a safetensors file ({error})") from None
    return dict(content)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:80]!r} stands in it twice")
    return unique


def _entry(name: str, fields: Any, base: int, file: str) -> TensorEntry:
    where = f"{file}: tensor {name[:80]!r}"
    if not (0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_NBYTES and name.isprintable()):
        raise BadCheckpoint(f"{where}: the name is empty, unprintable or over {MAX_NAME_NBYTES} bytes")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise BadCheckpoint(f"{where}: wanted exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise BadCheckpoint(f"{where}: dtype {dtype!r:.40} is not one of {', '.join(ITEM_BITS)}")
    if not _are_sizes(shape, MAX_DIMS) or not _are_sizes(offsets, 2) or len(offsets) != 2:
        raise BadCheckpoint(f"{where}: shape or offsets are not lists of sizes")
    numel = math.prod(shape)
    if numel > _MAX_NUMEL or math.prod(max(size, 1) for size in shape) > _MAX_NUMEL:
        raise BadCheckpoint(f"{where}: {numel} elements are more than any file holds")
    if offsets[1] - offsets[0] != numel * ITEM_BITS[dtype] // 8:
        raise BadCheckpoint(
            f"{where}: {offsets[1] - offsets[0]} bytes found, {dtype} {shape} takes {numel * ITEM_BITS[dtype] // 8}"
        )
    return TensorEntry(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_sizes(values: Any, most: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) <= most
        and all(type(value) is int and 0 <= value <= _MAX_NUMEL for value in values)
    )


def _check_cover(entries: list[TensorEntry], base: int, file_nbytes: int, file: str) -> None:
    position = base
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps its neighbour" if entry.begin < position else "leaves a hole before it"
            raise BadCheckpoint(f"{file}: tensor {entry.name[:80]!r} at byte {entry.begin} {kind} ({position})")
        position = entry.end
    if position != file_nbytes:
        raise BadCheckpoint(f"{file}: tensors end at byte {position}, the file at {file_nbytes}; download it again")
