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
