"""Spoiled GGUF files (`offload/checkpoint/gguf_file.py`) are refused in a sentence, in little memory, or load with
finite weights.
"""

import random
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest

from moedge.offload.checkpoint import gguf_file
from moedge.offload.errors import BadCheckpoint
from moedge.runtime.shape.checkpoint_shape import read_shape
from moedge.runtime.source.model_source import model_fingerprint, open_source
from support.hostile.gguf import (
    NUMBERS,
    VALUES,
    header_nbytes,
    is_refused,
    names_of_values,
    retyped,
    spoil,
    write_sound,
)

MUTATIONS = 200
MOST_NBYTES = 16 << 20


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_sound(tmp_path_factory.mktemp("sound") / "model.gguf").read_bytes()


@pytest.mark.sample("0")
@pytest.mark.parametrize("seed", range(4))
def test_spoiled_headers_are_refused_or_load(seed: int, sound: bytes, tmp_path: Path) -> None:
    path, rng = tmp_path / "model.gguf", random.Random(seed)
    end = header_nbytes(sound, path)
    assert not is_refused(path)
    refused = 0
    for _ in range(MUTATIONS // 4):
        path.write_bytes(spoil(sound, end, rng)[1])
        refused += is_refused(path)
    assert refused > MUTATIONS // 8


@pytest.mark.sample("7")
@pytest.mark.parametrize("value", VALUES, ids=map(str, range(len(VALUES))))
def test_a_value_of_another_kind_is_refused_or_changes_nothing(value: bytes, sound: bytes, tmp_path: Path) -> None:
    path, refused = tmp_path / "model.gguf", set()
    names = names_of_values(sound, path)
    for name in names:
        path.write_bytes(retyped(sound, path, name, value))
        refused |= {name} if is_refused(path) else set()
    assert "general.architecture" in refused


@pytest.mark.parametrize("at", [8, 16, 24])
@pytest.mark.parametrize("number", NUMBERS[5:])
def test_counts_and_lengths_take_no_memory_before_they_are_checked(
    at: int, number: int, sound: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound[:at] + struct.pack("<Q", number) + sound[at + 8 :])
    tracemalloc.start()
    try:
        with pytest.raises(BadCheckpoint):
            read_shape(path)
        assert tracemalloc.get_traced_memory()[1] < MOST_NBYTES
    finally:
        tracemalloc.stop()


def test_f14_a_header_is_read_once_and_again_where_the_file_changed(
    sound: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Millions of strings in an unknown key cost seconds: for a plan, a shape and a tokenizer together, once."""
    read: list[int] = []
    reader = gguf_file._Reader.header
    monkeypatch.setattr(gguf_file._Reader, "header", lambda self: read.append(1) or reader(self))
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    time.sleep(0.2)
    with open_source(str(path), tokenizer=False):
        model_fingerprint(path)
    assert len(read) == 1
    path.write_bytes(sound)
    for _ in range(2):
        del read[:]
        read_shape(path)
        assert read, "a file that was written a moment ago may change unseen"


def test_scales_that_are_not_finite_are_refused(sound: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(sound)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    spoiled = bytearray(sound)
    at = int(tensors["blk.0.ffn_up_exps.weight"].data_offset)
    spoiled[at : at + 2] = np.float16("nan").tobytes()
    path.write_bytes(spoiled)
    assert is_refused(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    for data in (b"", b"GGUF", b"GGUF\x03\x00\x00\x00", b"PK\x03\x04" * 20, b"GGUF" + struct.pack(">IQQ", 3, 0, 0)):
        path.write_bytes(data)
        with pytest.raises(BadCheckpoint, match=r"model\.gguf: "):
            read_shape(path)
