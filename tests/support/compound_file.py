"""Compound files (OLE2), as Outlook saves messages: [MS-CFB], version 3, with streams of less than 4,096 bytes."""

import struct
from collections.abc import Mapping

_FREE, _END, _FAT = 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFD
_SECTOR, _MINI = 512, 64

Storage = Mapping[str, "bytes | Storage"]


def compound_file(content: Storage) -> bytes:
    """A file with these streams and storages; siblings hang in a chain, which is a tree, too."""
    entries: list[list[object]] = [["Root Entry", 5, _FREE, _FREE, 0, 0]]
    mini = bytearray()
    chains: list[int] = []

    def add(inside: Storage) -> int:
        first = before = _FREE
        # Shorter names come first.
        for name, value in sorted(inside.items(), key=lambda each: (len(each[0]), each[0].upper())):
            number = len(entries)
            entries.append([name, 2 if isinstance(value, bytes) else 1, _FREE, _FREE, _END, 0])
            if before == _FREE:
                first = number
            else:
                entries[before][2] = number
            before = number
            if isinstance(value, bytes):
                begin, count = len(chains), -(-len(value) // _MINI)
                mini.extend(value.ljust(count * _MINI, b"\0"))
                chains.extend([*range(begin + 1, begin + count), _END] if count else [])
                entries[number][4:] = [begin if count else _END, len(value)]
            else:
                entries[number][3] = add(value)
                entries[number][4] = 0
        return first

    entries[0][3] = add(content)
    directory = b"".join(_entry(each) for each in entries)
    parts = [_padded(directory), _padded(struct.pack(f"<{len(chains)}I", *chains), b"\xff"), _padded(bytes(mini))]
    starts, at = [], 1
    for each in parts:
        starts.append(at)
        at += len(each) // _SECTOR
    entries[0][4:] = [starts[2] if mini else _END, len(mini)]
    parts[0] = _padded(b"".join(_entry(each) for each in entries))
    fat = [_FAT]
    for start, each in zip(starts, parts, strict=True):
        count = len(each) // _SECTOR
        fat += [*range(start + 1, start + count), _END] if count else []
    assert len(fat) <= _SECTOR // 4
    header = struct.pack(
        "<8s16sHHHHH6xIIIIIIIIII", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", bytes(16), 0x3E, 3, 0xFFFE, 9, 6, 0, 1,
        starts[0], 0, 4096, starts[1] if chains else _END, len(parts[1]) // _SECTOR, _END, 0, 0,
    )  # fmt: skip
    return header.ljust(_SECTOR, b"\xff") + _padded(struct.pack(f"<{len(fat)}I", *fat), b"\xff") + b"".join(parts)


def _entry(entry: list[object]) -> bytes:
    name, kind, right, child, start, size = entry
    text = str(name).encode("utf-16-le") + b"\0\0"
    return struct.pack(
        "<64sHBBIII16sIQQIQ", text, len(text), kind, 1, _FREE, right, child, bytes(16), 0, 0, 0, start, size
    )


def _padded(data: bytes, fill: bytes = b"\0") -> bytes:
    return data.ljust(-(-len(data) // _SECTOR) * _SECTOR, fill)
