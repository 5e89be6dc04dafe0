"""Ways to spoil a GGUF file, and what becomes of it."""

import random
import struct
from pathlib import Path

import gguf

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.settings.errors import UnsupportedModel
from moedge.runtime.shape.checkpoint_shape import read_shape
from support.gguf_files import build, to_gguf
from support.hostile.load import load_weights

# Numbers that counts, lengths, sizes and offsets of a file are replaced by.
NUMBERS = (0, 1, 3, 31, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, (1 << 64) - 1)
KINDS = ("bit", "number of 8 bytes", "number of 4 bytes", "end", "hole")


def write_sound(path: Path) -> Path:
    """A file that loads."""
    return to_gguf(build("qwen3_moe", num_hidden_layers=1, num_experts=4, vocab_size=64), path, "Q8_0")


def header_nbytes(data: bytes, path: Path) -> int:
    path.write_bytes(data)
    return int(gguf.GGUFReader(path).data_offset)


def spoil(data: bytes, header_nbytes: int, rng: random.Random) -> tuple[str, bytes]:
    """What was done, and the bytes of the file after it."""
    spoiled = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(header_nbytes - 8)
    if kind == 0:
        spoiled[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        spoiled[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS))
    elif kind == 2:
        spoiled[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)
    elif kind == 3:
        del spoiled[rng.randrange(len(spoiled)) :]
    else:
        del spoiled[at : at + rng.randrange(1, 64)]
    return KINDS[kind], bytes(spoiled)


def is_refused(path: Path) -> bool:
    """Whether a file is refused in a sentence; loads it otherwise."""
    try:
        load_weights(path, read_shape(path))
    except (BadCheckpoint, UnsupportedModel) as error:
        message = str(error)
    else:
        return False
    assert len(message) < 2500
    assert message.isprintable()
    return True


# Values of every kind that GGUF has, packed with their types.
VALUES = (
    struct.pack("<IB", 0, 7), struct.pack("<Ii", 5, -1), struct.pack("<If", 6, float("nan")), struct.pack("<IB", 7, 1),
    struct.pack("<IQ3s", 8, 3, b"abc"), struct.pack("<IQ", 10, 1 << 63), struct.pack("<Id", 12, 1e300),
    struct.pack("<IIQ2i", 9, 5, 2, 1, 2), struct.pack("<IIQ", 9, 4, 0), struct.pack("<IIQQ1s", 9, 8, 1, 1, b"x"),
)  # fmt: skip


def names_of_values(data: bytes, path: Path) -> list[str]:
    """The keys of a file's metadata, and those that it may have of tokens."""
    path.write_bytes(data)
    # Fields of this beginning are the file's own counts.
    found = [name for name in gguf.GGUFReader(path).fields if not name.startswith("GGUF.")]
    return [*found, *(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding"))]


def retyped(data: bytes, path: Path, name: str, value: bytes) -> bytes:
    """A file in which one key of the metadata has a value of some other kind.

    One that it does not have takes the place of its last one.
    """
    path.write_bytes(data)
    reader = gguf.GGUFReader(path)
    field, last = reader.fields.get(name, list(reader.fields.values())[-1]), reader.tensors[-1].field
    stop = field.offset + sum(part.nbytes for part in field.parts)
    end = last.offset + sum(part.nbytes for part in last.parts)
    key = struct.pack("<Q", len(name)) + name.encode()
    header = data[: field.offset] + key + value + data[stop:end]
    return header + bytes(-len(header) % reader.alignment) + data[int(reader.data_offset) :]
