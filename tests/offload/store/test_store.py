"""A finished store gives back what was written, to us and to the safetensors library, and refuses everything else."""

import errno
import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from moedge.offload.errors import BadStore, StoreInUse
from moedge.offload.store.manifest import HEAD_FILE, MANIFEST, PROGRESS, RESIDENT_FILE, canonical, layer_file
from moedge.offload.store.shard_file import read_shard
from moedge.offload.store.store import Store
from moedge.offload.store.writer import StoreWriter, TensorSpec

RECIPE = {"quant": "nf4", "dtype": "bfloat16", "kv": [1, 2]}
DENSE, EXPERTS, EXPERT, HEAD = 8192, 3, 4096, 12288
NUM_LAYERS = 3
RESIDENT = {"norm": ("F32", (3,)), "embed": ("BF16", (5, 7)), "bias": ("U8", (9,)), "empty": ("F16", (0, 4))}


def content(name: str, nbytes: int) -> memoryview:
    return memoryview(random.Random(name).randbytes(nbytes))


def layer_sizes(index: int) -> tuple[int, int]:
    """(dense bytes, experts): one layer is dense, one has no dense run, the others have both."""
    return {0: (DENSE, 0), 1: (0, EXPERTS)}.get(index, (DENSE, EXPERTS))


def specs() -> list[TensorSpec]:
    return [TensorSpec(name, dtype, shape) for name, (dtype, shape) in RESIDENT.items()]


def write_files(writer: StoreWriter, salt: str = "", num_layers: int = NUM_LAYERS) -> list[str]:
    """Writes what the store does not have yet; returns the names of the files written."""
    written = []
    for index in range(num_layers):
        if not writer.has(layer_file(index)):
            dense, experts = layer_sizes(index)
            with writer.layer(index, dense, experts, EXPERT) as layer:
                if dense:
                    layer.write("dense", 0, content(f"{salt}{index}", dense))
                for expert in range(experts):
                    layer.write("experts", expert, content(f"{salt}{index}.{expert}", EXPERT))
            written.append(layer_file(index))
    if not writer.has(HEAD_FILE):
        writer.write_head(content(f"{salt}head", HEAD))
        written.append(HEAD_FILE)
    if not writer.has(RESIDENT_FILE):
        with writer.resident(specs()) as resident:
            for spec in specs():
                resident.write(spec.name, 0, content(f"{salt}{spec.name}", spec.nbytes))
        written.append(RESIDENT_FILE)
    return written


def write_store(folder: Path, salt: str = "", fingerprint: str = "abc") -> list[str]:
    with StoreWriter(folder, RECIPE, fingerprint) as writer:
        written = write_files(writer, salt)
        writer.finish({"mu": [0.1, -2.5]})
    return written


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_store(tmp_path / "store")
    return tmp_path / "store"


def refused(folder: Path, says: str) -> None:
    with pytest.raises(BadStore, match=says):
        Store.open(folder).close()


def test_every_shard_is_read_back_from_an_aligned_place(folder: Path) -> None:
    with Store.open(folder) as store:
        wanted = {("", "head", 0): content("head", HEAD)}
        for index in range(NUM_LAYERS):
            dense, experts = layer_sizes(index)
            if dense:
                wanted[layer_file(index), "dense", 0] = content(f"{index}", dense)
            wanted |= {(layer_file(index), "experts", i): content(f"{index}.{i}", EXPERT) for i in range(experts)}
        found = {}
        for extent in store.extents():
            if extent.path.name != RESIDENT_FILE:
                assert extent.offset % 4096 == 0
                buffer = bytearray(extent.nbytes)
                read_shard(extent, memoryview(buffer))
                name = "" if extent.tensor == "head" else extent.path.name
                found[name, extent.tensor, extent.index] = buffer
        assert found == wanted
        assert store.head is not None
        assert [(layer.dense is not None, len(layer.experts)) for layer in store.layers] == [
            (True, 0),
            (False, 3),
            (True, 3),
        ]
        first, second, third = (extent.offset for extent in store.layers[2].experts)
        assert second - first == third - second == EXPERT
        assert all(sound for _, sound in store.verify())


def test_resident_tensors_keep_name_dtype_shape_and_bytes(folder: Path) -> None:
    with Store.open(folder) as store:
        assert {name: (tensor.dtype, tensor.shape) for name, tensor in store.resident.items()} == RESIDENT
        for name, tensor in store.resident.items():
            buffer = bytearray(tensor.extent.nbytes)
            read_shard(tensor.extent, memoryview(buffer))
            assert buffer == content(name, tensor.extent.nbytes)


def test_the_safetensors_library_reads_the_same_bytes(folder: Path) -> None:
    layer = load_file(folder / layer_file(2))
    assert layer["dense"].tobytes() == content("2", DENSE)
    assert layer["experts"].shape == (EXPERTS, EXPERT)
    assert layer["experts"].dtype == np.uint8
    assert layer["experts"][1].tobytes() == content("2.1", EXPERT)
    with safe_open(folder / RESIDENT_FILE, "np") as resident:
        assert set(resident.keys()) == set(RESIDENT)
        assert resident.get_tensor("norm").tobytes() == content("norm", 12)
    for path in folder.glob("*.safetensors"):
        (length,) = struct.unpack("<Q", path.read_bytes()[:8])
        assert (8 + length) % 4096 == 0


def test_the_manifest_says_what_the_store_was_made_of(folder: Path) -> None:
    with Store.open(folder) as store:
        assert store.manifest.made_of("abc", RECIPE)
        assert not store.manifest.made_of("abc", {**RECIPE, "quant": "int8"})
        assert not store.manifest.made_of("abd", RECIPE)
        assert store.manifest.extra == {"mu": [0.1, -2.5]}
        assert store.manifest.nbytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_the_same_input_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_store(tmp_path / "again")
    assert snapshot(tmp_path / "again") == snapshot(folder)
    assert set(snapshot(folder)) == {"lock", MANIFEST, HEAD_FILE, RESIDENT_FILE, *map(layer_file, range(NUM_LAYERS))}


@given(st.permutations(list(RESIDENT)), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_order_and_pieces_do_not_change_the_bytes(order: list[str], random: random.Random) -> None:
    with scratch() as one, scratch() as other:
        for folder, names in ((one, list(RESIDENT)), (other, order)):
            with StoreWriter(folder, {}, "") as writer:
                with writer.resident([TensorSpec(name, *RESIDENT[name]) for name in names]) as resident:
                    for name in names:
                        data = content(name, TensorSpec(name, *RESIDENT[name]).nbytes)
                        cut = random.randint(0, len(data))
                        resident.write(name, 0, data[:cut])
                        resident.write(name, 0, data[cut:])
                writer.finish({})
        assert snapshot(one) == snapshot(other)


@contextmanager
def scratch() -> Iterator[Path]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "store"


def test_every_bit_flip_is_detected(folder: Path) -> None:
    """In any file, header, padding and manifest included: by opening, or by the CRC of its shard (case C6)."""
    generator = random.Random(1)
    files = sorted(path for path in folder.iterdir() if path.stat().st_size)
    weights = [path.stat().st_size for path in files]
    caught = {"open": 0, "read": 0}
    for _ in range(1000):
        path = generator.choices(files, weights)[0]
        offset, bit = generator.randrange(path.stat().st_size), 1 << generator.randrange(8)
        flip(path, offset, bit)
        try:
            with Store.open(folder) as store:
                damaged = [extent for extent, sound in store.verify() if not sound]
                assert len(damaged) == 1, (path.name, offset, bit)
                assert damaged[0].path == path
                assert damaged[0].offset <= offset < damaged[0].offset + damaged[0].nbytes
                with pytest.raises(BadStore, match="CRC32"):
                    read_shard(damaged[0], memoryview(bytearray(damaged[0].nbytes)))
            caught["read"] += 1
        except BadStore:
            caught["open"] += 1
        flip(path, offset, bit)
    assert sum(caught.values()) == 1000
    assert min(caught.values()) > 100
    with Store.open(folder) as store:
        assert all(sound for _, sound in store.verify())


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ bit]))


def test_an_unfinished_store_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", RECIPE, "abc") as writer:
        write_files(writer)
    refused(tmp_path / "store", f"unfinished: it has no {MANIFEST}")


def test_what_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "not a store")
    refused(tmp_path, "not a store")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a store")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [HEAD_FILE, RESIDENT_FILE, layer_file(1)])
def test_a_file_that_is_missing_short_or_long_is_named(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for data in (whole[:-1], whole + b"\0", b""):
        (folder / name).write_bytes(data)
        refused(folder, rf"{name} has {len(data)} bytes, wanted {len(whole)}")
    (folder / name).unlink()
    refused(folder, rf"{name} is missing")


def test_a_header_other_than_the_manifest_says_is_refused(folder: Path) -> None:
    """Even one that is a good header by itself."""
    path = folder / layer_file(2)
    path.write_bytes(path.read_bytes().replace(b'"dense"', b'"dance"', 1))
    refused(folder, "does not match the manifest")
    path.write_bytes(b"\xff" * path.stat().st_size)
    refused(folder, "header claims")


def rewrite_manifest(folder: Path, sign: bool = False, **changes: object) -> None:
    content = json.loads((folder / MANIFEST).read_bytes()) | changes
    if sign:
        del content["crc32"]
        content["crc32"] = f"{zlib.crc32(canonical(content)):08x}"
    (folder / MANIFEST).write_bytes(canonical(content) + b"\n")


def test_another_version_and_an_edited_manifest_are_refused(folder: Path) -> None:
    rewrite_manifest(folder, format="moedge.store/2")
    refused(folder, "format 'moedge.store/2', wanted 'moedge.store/1'")
    rewrite_manifest(folder, format="moedge.store/1", fingerprint="abd")
    refused(folder, "CRC32")
    rewrite_manifest(folder, fingerprint="abc")
    Store.open(folder).close()


@given(st.binary(max_size=60) | st.text(max_size=40).map(lambda text: json.dumps({"format": text}).encode()))
@settings(max_examples=100, deadline=None)
def test_no_manifest_raises_anything_but_a_refusal(data: bytes) -> None:
    with scratch() as folder:
        folder.mkdir()
        (folder / "lock").touch()
        for text in (data, b"[" * 100_000, b'{"format":"moedge.store/1",' + data):
            (folder / MANIFEST).write_bytes(text)
            refused(folder, MANIFEST)


def test_a_manifest_cannot_name_a_file_elsewhere(folder: Path) -> None:
    for name in ("../x.safetensors", "/etc/passwd", "layer-1.safetensors", ".lock"):
        files = json.loads((folder / MANIFEST).read_bytes())["files"]
        rewrite_manifest(folder, sign=True, files=[{**files[0], "name": name}], nbytes=files[0]["nbytes"])
        refused(folder, "damaged")


def test_a_manifest_that_contradicts_itself_or_the_files_is_refused(folder: Path) -> None:
    """With a good checksum: it was written by somebody else."""
    whole = json.loads((folder / MANIFEST).read_bytes())
    head, first, *others, last, resident = whole["files"]
    crcs = last["shards_crc32"]
    for says, files in (
        ("damaged", [head, head, first, *others, last, resident]),
        ("without gaps", [head, first, last, resident]),
        (
            "cannot be cut into",
            [head, first, *others, {**last, "shards_crc32": crcs | {"experts": ["0" * 8] * 5}}, resident],
        ),
        ("cannot be cut into", [head, first, *others, {**last, "shards_crc32": crcs | {"experts": []}}, resident]),
        (
            "2 shards of 'dense'",
            [head, first, *others, {**last, "shards_crc32": crcs | {"dense": ["0" * 8] * 2}}, resident],
        ),
        (
            "does not match the manifest",
            [head, first, *others, {**last, "shards_crc32": {"dense": crcs["dense"]}}, resident],
        ),
    ):
        rewrite_manifest(folder, sign=True, files=files, nbytes=sum(file["nbytes"] for file in files))
        refused(folder, says)
    rewrite_manifest(folder, sign=True, **whole)
    Store.open(folder).close()
    for key, value in (("extra", []), ("recipe", None), ("fingerprint", 7), ("nbytes", 1)):
        rewrite_manifest(folder, sign=True, **{**whole, key: value})
        refused(folder, "damaged")


def test_a_manifest_beyond_all_sense_is_not_read_whole(folder: Path) -> None:
    os.truncate(folder / MANIFEST, (256 << 20) + 1)
    refused(folder, "too many for a manifest")


def test_what_the_disk_cannot_read_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread = os.pread

    def broken(descriptor: int, nbytes: int, offset: int) -> bytes:
        if nbytes == HEAD:
            raise OSError(code, os.strerror(code))
        return pread(descriptor, nbytes, offset)

    with Store.open(folder) as store:
        monkeypatch.setattr(os, "pread", broken)
        code = errno.EIO
        assert [extent for extent, sound in store.verify() if not sound] == [store.head]
        code = errno.EBADF
        with pytest.raises(OSError, match="Bad file descriptor"):
            list(store.verify())


@pytest.mark.parametrize("name", [MANIFEST, HEAD_FILE])
def test_links_fifos_and_files_that_others_may_write_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).chmod(0o666)
    refused(folder, "everybody may write")
    (folder / name).rename(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o600)
    (folder / name).symlink_to(tmp_path / "moved")
    refused(folder, "cannot be opened")
    (folder / name).unlink()
    os.mkfifo(folder / name, 0o600)
    refused(folder, "not a regular file")


def test_a_store_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, 12345, -1) if os.geteuid() == 0 else pytest.skip("only root can give files away")
    Store.open(folder).close()
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    refused(folder, "belongs to user 12345, wanted 54321")


def test_a_store_that_everybody_may_write_to_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    refused(folder, "everybody may write")


def test_opening_a_large_store_takes_no_read_of_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path / "store", {}, "") as writer:
        for index in range(8):
            with writer.layer(index, 0, 64, 4096) as layer:
                for expert in range(64):
                    layer.write("experts", expert, memoryview(bytes(4096)))
        writer.finish({})
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *arguments: read.append(arguments[1]) or pread(*arguments))
    Store.open(tmp_path / "store").close()
    assert read
    assert sum(read) <= 8 * (8 + 4096)


def test_reading_a_file_that_was_cut_under_us_is_an_error(folder: Path) -> None:
    with Store.open(folder) as store:
        assert store.head is not None
        os.truncate(store.head.path, 8192)
        with pytest.raises(BadStore, match="ends inside head 0"):
            read_shard(store.head, memoryview(bytearray(HEAD)))
        assert dict(store.verify())[store.head] is False


def test_closing_gives_all_files_back(folder: Path) -> None:
    before = os.listdir("/proc/self/fd")
    with Store.open(folder):
        assert len(os.listdir("/proc/self/fd")) > len(before)
    (folder / HEAD_FILE).unlink()
    refused(folder, "missing")
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_use_is_noted_without_changing_a_byte(folder: Path) -> None:
    before = snapshot(folder)
    os.utime(folder / "lock", (0, 0))
    Store.open(folder).close()
    assert time.time() - (folder / "lock").stat().st_mtime < 3600
    assert snapshot(folder) == before


def test_a_reader_refuses_a_store_that_is_written(folder: Path) -> None:
    with StoreWriter(folder, RECIPE, "abc"), pytest.raises(StoreInUse, match="being written by another process"):
        Store.open(folder)
    with Store.open(folder), Store.open(folder):
        pass


def test_a_writer_refuses_a_store_that_is_used_or_written(folder: Path) -> None:
    with Store.open(folder), pytest.raises(StoreInUse, match="in use by another"):
        StoreWriter(folder, RECIPE, "abc")
    with StoreWriter(folder, RECIPE, "abc"), pytest.raises(StoreInUse, match="in use by another"):
        StoreWriter(folder, RECIPE, "abc")
    StoreWriter(folder, RECIPE, "abc").close()


def test_a_lock_dies_with_its_process(folder: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from moedge.offload.store.manifest import lock_to_write\n"
        "lock_to_write(Path(sys.argv[1])); print('locked', flush=True); time.sleep(600)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(StoreInUse):
            Store.open(folder)
    finally:
        holder.kill()
        holder.communicate()
    Store.open(folder).close()


def test_a_store_moves_with_its_folder(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    with Store.open(tmp_path / "elsewhere") as store:
        assert all(sound for _, sound in store.verify())


def test_the_store_needs_no_torch() -> None:
    modules = "store, writer, stores"
    program = f"import sys; from moedge.offload.store import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_progress_record_is_no_manifest(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "store", RECIPE, "abc") as writer:
        write_files(writer)
    assert (tmp_path / "store" / PROGRESS).exists()
    refused(tmp_path / "store", "unfinished")
