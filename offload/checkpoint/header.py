"""Strict readers of what untrusted files say of themselves: one JSON object, and the header of a safetensors file.

It is stricter than the library, which accepts duplicate names, unknown fields and names like `../x`. Knows only the
file format (https://huggingface.co/docs/safetensors), not models. Torch-free.
"""

from __future__ import annotations

import codecs
import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple, Never

from ..errors import BadCheckpoint


def load_object(data: bytes) -> dict[str, Any]:
    """Parses `data`. Raises ValueError, which says what was found, unless it is one UTF-8 object with unique keys."""
    if data.startswith(codecs.BOM_UTF8):
        raise ValueError("it starts with a byte order mark; save it without one")
    try:
        text = data.decode("utf-8")
        value = _QUICK.decode(text)
        if _num_pairs(value) != data.count(b":"):
            value = _STRICT.decode(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was wanted, found {described(value)}")
    return value


def described(value: object) -> str:
    """A short, printable form of a value for a message; the contents of a list or object are left out."""
    if isinstance(value, dict | list):
        return f"a {type(value).__name__} of {len(value)}"
    # The text is cut before it is escaped: escaping a name of several megabytes would make it ten times as long first.
    return f"{value[:60] if isinstance(value, str) else value!a:.60}"


def _num_pairs(value: Any) -> int:
    """The number of names in an object and in the objects directly inside it.

    JSON text has a colon for each name. If it has no more colons than this number, no name was dropped as a duplicate,
    and that is all that has to be shown. Checking every name while it is parsed takes three times as long.
    """
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(inner) for inner in value.values() if isinstance(inner, dict))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        name, count = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{described(name)} occurs {count} times, wanted once")
    return unique


def _refuse_constant(literal: str) -> Never:
    raise ValueError(f"{literal} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)
# This decoder keeps the last of several values with the same name.
_QUICK = json.JSONDecoder(parse_constant=_refuse_constant)


# The largest checkpoints hold 92,000 tensors in 11 MB of headers, spread over several files. Python objects take ten
# times the memory of their JSON text, so the format's own limit of 100 MB would exceed a small budget.
MAX_HEADER_NBYTES = 32 << 20
MAX_TENSORS = 100_000
MAX_DIMS = 8
MAX_NAME_NBYTES = 512
_MAX_NUMEL = 2**62
_FIELDS = {"dtype", "shape", "data_offsets"}
_WHOLE = {int}
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


class TensorEntry(NamedTuple):
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
    """The length in bytes of the JSON header, as the first eight bytes of the file state it. Raises BadCheckpoint."""
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
    """The tensors of one file by name, in file order. Raises BadCheckpoint.

    `header` is the JSON text without its length prefix; `file_nbytes` is the size of the whole file.
    """
    content = _load(header, file)
    metadata = content.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(_is_text(value) for value in metadata.values()):
        raise BadCheckpoint(f"{file}: __metadata__ is {described(metadata)}, wanted strings by name")
    base = 8 + len(header)
    entries = sorted(_entries(content, base, file), key=attrgetter("begin", "end"))
    _check_cover(entries, base, file_nbytes, file)
    return {entry.name: entry for entry in entries}


def _load(header: bytes, file: str) -> dict[str, Any]:
    if header[:1] != b"{":
        raise BadCheckpoint(f"{file}: the header starts with {header[:1]!r}, wanted '{{'; not a safetensors file")
    # Before parsing: a list of empty lists takes 25 times its text in memory.
    brackets, commas = header.count(b"{") + header.count(b"["), header.count(b",")
    if brackets > 4 * MAX_TENSORS or commas > 12 * MAX_TENSORS:
        raise BadCheckpoint(
            f"{file}: {brackets} lists and objects in the header, at most {MAX_TENSORS} tensors are read"
        )
    try:
        return load_object(header)
    except ValueError as error:
        raise BadCheckpoint(f"{file}: the header is not the JSON of a safetensors file ({error})") from None


def _entries(content: dict[str, Any], base: int, file: str) -> Iterator[TensorEntry]:
    # Checkpoints have many tensors of few dtypes and shapes, so the size of each kind is computed once.
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    for name, fields in content.items():
        try:
            yield _entry(name, fields, base, kinds)
        except ValueError as fault:
            raise BadCheckpoint(f"{file}: tensor {described(name)}: {fault}") from None


def _entry(name: str, fields: Any, base: int, kinds: dict[tuple[str, tuple[int, ...]], int]) -> TensorEntry:
    """Raises ValueError, which says what is wrong with the tensor's name or description."""
    if not (0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_NBYTES and name.isprintable()):
        raise ValueError(f"the name is empty, unprintable or over {MAX_NAME_NBYTES} bytes")
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError("wanted exactly dtype, shape and data_offsets")
    dtype, sizes, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise ValueError(f"dtype {described(dtype)} is not one of {', '.join(ITEM_BITS)}")
    if not _are_whole(sizes, MAX_DIMS) or not _are_whole(offsets, 2) or len(offsets) != 2:
        raise ValueError("shape or offsets are not lists of sizes")
    shape, (begin, end) = tuple(sizes), offsets
    nbytes = kinds.get((dtype, shape))
    if nbytes is None:
        nbytes = kinds[dtype, shape] = _nbytes(dtype, shape)
    # Together with `_check_cover`, this check implies that the offsets are inside the file.
    if end - begin != nbytes:
        raise ValueError(f"{end - begin} bytes found, {dtype} {list(shape)} takes {nbytes}")
    return TensorEntry(name, dtype, shape, base + begin, base + end)


def _are_whole(values: Any, most: int) -> bool:
    # True and 1.0 are equal to 1 but are not sizes.
    return isinstance(values, list) and len(values) <= most and _WHOLE.issuperset(map(type, values))


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    if shape and min(shape) < 0:
        raise ValueError("shape or offsets are not lists of sizes")
    # The product is 0 if one size is 0, however large the others are; `bound` ignores zeros.
    numel, bound = math.prod(shape), math.prod(size or 1 for size in shape)
    if bound > _MAX_NUMEL:
        raise ValueError(f"{bound} elements are more than any file can hold")
    return numel * ITEM_BITS[dtype] // 8


def _is_text(value: object) -> bool:
    # JSON can escape half of a surrogate pair, which is not valid text.
    return isinstance(value, str) and (value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value))


def _check_cover(entries: list[TensorEntry], base: int, file_nbytes: int, file: str) -> None:
    if len(entries) > MAX_TENSORS:
        raise BadCheckpoint(f"{file}: {len(entries)} tensors, at most {MAX_TENSORS} are read")
    position = base
    for entry in entries:
        if entry.begin != position:
            kind = "overlaps its neighbour" if entry.begin < position else "leaves a hole before it"
            raise BadCheckpoint(f"{file}: tensor {described(entry.name)} at byte {entry.begin} {kind} ({position})")
        position = entry.end
    if position != file_nbytes:
        raise BadCheckpoint(f"{file}: tensors end at byte {position}, the file at {file_nbytes}; download it again")
