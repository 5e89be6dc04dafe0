"""safetensors headers: the library's own files are read, every malformed class is refused by name."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.checkpoint.header import header_nbytes, parse_header
from moedge.offload.errors import BadCheckpoint

GOOD = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "U8", "shape": [4], "data_offsets": [24, 28]},
}


def parse(header: Any, extra: int = 0) -> Any:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return parse_header(text, 8 + len(text) + 28 + extra, "x.safetensors")


def test_a_good_header_gives_absolute_byte_ranges() -> None:
    entries = parse(GOOD)
    base = 8 + len(json.dumps(GOOD))
    assert [(entry.name, entry.begin - base, entry.end - base) for entry in entries.values()] == [
        ("a", 0, 24),
        ("b", 24, 28),
    ]


def changed(**fields: Any) -> dict[str, Any]:
    return {**GOOD, "b": {**GOOD["b"], **fields}}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b" " + json.dumps(GOOD).encode(), "starts with"),
        (b'{"a": 1', "not the JSON"),
        (json.dumps(GOOD).encode().replace(b'"b"', b'"a"'), "2 times"),
        (b"[" * 100_000, "starts with"),
        (b'{"a":' + b"[" * 200_000, "not the JSON"),
        (changed(dtype="F7"), "not one of"),
        (changed(dtype=["U8"]), "not one of"),
        (changed(shape=[5]), "takes 5"),
        (changed(shape=[-4]), "not lists of sizes"),
        (changed(shape=[True] * 4), "not lists of sizes"),
        (changed(shape=[1] * 9), "not lists of sizes"),
        (changed(shape=[2**61, 2**61, 0]), "more than any file"),
        (changed(data_offsets=[23, 27]), "overlaps"),
        (changed(data_offsets=[25, 29]), "hole"),
        (changed(data_offsets=[28, 24]), "takes 4"),
        (changed(extra=1), "exactly"),
        ({**GOOD, "c\x00": GOOD["b"]}, "unprintable"),
        ({**GOOD, "n" * 513: GOOD["b"]}, "over 512"),
        ({"a": GOOD["a"]}, "tensors end at"),
        ({**GOOD, "__metadata__": {"a": 1}}, "wanted strings by name"),
        ({**GOOD, "__metadata__": {"a": "\ud800"}}, "wanted strings by name"),
        (b'{"a":[' + b"[]," * 500_000 + b"[]]}", "at most 100000 tensors"),
        (b'{"a":[' + b"1," * 1_300_000 + b"1]}", "at most 100000 tensors"),
        (changed(dtype=[[[]]]), "a list of 1"),
        (b"\xef\xbb\xbf{}", "starts with"),
    ],
)
def test_malformed_headers_are_refused(header: Any, says: str) -> None:
    with pytest.raises(BadCheckpoint, match=says):
        parse(header)


@given(st.binary(min_size=0, max_size=80))
@settings(max_examples=300)
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    for header in (data, b"{" + data + b"}"):
        with pytest.raises(BadCheckpoint):
            parse_header(header, 8 + len(header) + 5, "x")


@pytest.mark.parametrize("length", [0, 1, 2**63, 100_000_001])
def test_absurd_lengths_are_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(BadCheckpoint, match="claims"):
        header_nbytes(struct.pack("<Q", length), 10**6, "x")


def make(folder: Path, **files: dict[str, np.ndarray]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    return folder


def index(folder: Path, **weight_map: Any) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {name: np.random.default_rng(1).normal(size=(5, 7)).astype(np.float32) for name in "xyz"}
    with Checkpoint(make(tmp_path, model=tensors)) as checkpoint:
        for name, tensor in tensors.items():
            out = bytearray(tensor.nbytes)
            checkpoint.read_into(name, memoryview(out))
            assert bytes(out) == tensor.tobytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = make(tmp_path, model={"x": np.ones(16, np.float32)}) / "model.safetensors"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadCheckpoint):
            Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "target", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "model.bin", ".x.safetensors", 7]
)
def test_an_index_cannot_point_elsewhere(tmp_path: Path, target: Any) -> None:
    make(tmp_path, model={"x": np.ones(2, np.float32)})
    with pytest.raises(BadCheckpoint, match="bare name"):
        Checkpoint(index(tmp_path, x=target))


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    make(tmp_path, one={"x": np.ones(2, np.float32)}, two={"y": np.ones(2, np.float32)})
    Checkpoint(index(tmp_path, x="one.safetensors", y="two.safetensors")).close()
    for wrong in ({"x": "one.safetensors", "z": "two.safetensors"}, {"x": "two.safetensors", "y": "two.safetensors"}):
        with pytest.raises(BadCheckpoint, match="disagree"):
            Checkpoint(index(tmp_path, **wrong))
    make(tmp_path, two={"x": np.ones(2, np.float32)})
    with pytest.raises(BadCheckpoint, match="is in both"):
        Checkpoint(index(tmp_path, x="one.safetensors", y="two.safetensors"))


def test_pickle_files_are_named_and_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04evil")
    with pytest.raises(BadCheckpoint, match="pickle"):
        Checkpoint(tmp_path)


def test_no_file_of_ours_can_unpickle() -> None:
    root = Path(__file__).parents[3]
    for floor in ("quant", "offload", "moe", "runtime", "cli"):
        for path in (root / floor).rglob("*.py"):
            text = path.read_text()
            assert "import pickle" not in text, path
            assert "torch.load" not in text, path
