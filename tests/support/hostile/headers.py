"""Headers by number: random bytes, good ones with changed bytes, and ones of a grammar that lies now and then."""

import copy
import json
import random
from typing import Any

from moedge.offload.checkpoint.header import ITEM_BITS, MAX_DIMS, MAX_NAME_NBYTES, parse_header
from moedge.offload.errors import BadCheckpoint

KINDS = ("random bytes", "changed bytes", "grammar", "good")


def make_header(seed: int) -> tuple[str, bytes, int]:
    """(kind, header, size of the file that it stands in)."""
    rng = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    if kind == "random bytes":
        text = b"{" + rng.randbytes(rng.randrange(60)) + b"}"
        return kind, text, 8 + len(text) + rng.randrange(100)
    content, nbytes = _good(rng)
    if kind == "grammar":
        for _ in range(rng.randrange(1, 3)):
            _lie(content, rng)
    text = json.dumps(content).encode()
    if kind == "changed bytes":
        text = _changed(bytearray(text), rng)
    return kind, text, 8 + len(text) + nbytes


def header_outcome(header: bytes, file_nbytes: int) -> bool:
    """Whether it is accepted; raises AssertionError where what is accepted does not cover the file exactly once."""
    try:
        entries = parse_header(header, file_nbytes, "x.safetensors")
    except BadCheckpoint as error:
        if not str(error).isprintable():
            raise AssertionError(f"a message that a terminal cannot show: {error!a}") from None
        return False
    position = 8 + len(header)
    for entry in entries.values():
        assert entry.begin == position <= entry.end <= file_nbytes
        assert entry.nbytes * 8 == entry.numel * ITEM_BITS[entry.dtype]
        assert len(entry.shape) <= MAX_DIMS
        assert 0 < len(entry.name.encode()) <= MAX_NAME_NBYTES
        assert entry.name.isprintable()
        position = entry.end
    assert position == file_nbytes
    assert len(entries) + ("__metadata__" in json.loads(header)) == len(json.loads(header))
    return True


def _good(rng: random.Random) -> tuple[dict[str, Any], int]:
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.3 else {}
    position = 0
    for number in range(rng.randrange(6)):
        dtype = rng.choice(sorted(ITEM_BITS))
        shape = [rng.randrange(5) for _ in range(rng.randrange(4))]
        nbytes = ITEM_BITS[dtype] // 8
        for size in shape:
            nbytes *= size
        name = f"model.layers.{number}.{rng.choice(['mlp', 'norm', 'ä', '專家'])}.weight"
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + nbytes]}
        position += nbytes
    return content, position


_LIES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"), float("inf"), "", "F32", "\x00", "\ud800",
    [], [0], [-1], [2**62, 2**62], [0, 0], [0, 8, 16], ["a"], [[0]], {}, {"dtype": "F32"},
)  # fmt: skip


def _lie(content: dict[str, Any], rng: random.Random) -> None:
    names, lie = list(content), copy.deepcopy(rng.choice(_LIES))
    if not names or rng.random() < 0.2:
        content[rng.choice(["", "x" * 513, "\x1b[2J", "../x", "__metadata__"])] = lie
        return
    fields = content[rng.choice(names)]
    if not isinstance(fields, dict) or rng.random() < 0.1:
        content[rng.choice(names)] = lie
    elif rng.random() < 0.2 and fields:
        del fields[rng.choice(list(fields))]
    else:
        fields[rng.choice(["dtype", "shape", "data_offsets", "format", "more"])] = lie


def _changed(text: bytearray, rng: random.Random) -> bytes:
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(text))
        match rng.randrange(4):
            case 0:
                text[place] = rng.randrange(256)
            case 1:
                text[place] ^= 1 << rng.randrange(8)
            case 2:
                del text[place : place + rng.randrange(1, 8)]
            case _:
                text[place:place] = rng.choice([b"0", b"9", b"[", b"]", b"{", b'"', b",", b"-", b"e5", b"\\u0000"])
        if not text:
            break
    return bytes(text)
