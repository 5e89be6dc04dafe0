"""A preparation that was stopped goes on where it was, and what does not belong to it is never mixed in."""

import errno
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from moedge.offload.errors import BadStore, DiskFull
from moedge.offload.store import manifest as manifests
from moedge.offload.store.manifest import HEAD_FILE, MANIFEST, layer_file
from moedge.offload.store.store import Store
from moedge.offload.store.writer import StoreWriter, TensorSpec, build_header

NBYTES = 4096


def write_layer(writer: StoreWriter, index: int) -> None:
    with writer.layer(index, NBYTES, 2, NBYTES) as layer:
        layer.write("dense", 0, memoryview(bytes([index]) * NBYTES))
        for expert in range(2):
            layer.write("experts", expert, memoryview(bytes([index, expert]) * (NBYTES // 2)))


def write_files(writer: StoreWriter, num_layers: int = 4) -> list[str]:
    """Writes the layers and the head that are not there; returns their names."""
    written = []
    for index in range(num_layers):
        if not writer.has(layer_file(index)):
            write_layer(writer, index)
            written.append(layer_file(index))
    if not writer.has(HEAD_FILE):
        writer.write_head(memoryview(b"h" * NBYTES))
        written.append(HEAD_FILE)
    return written


def write(folder: Path, recipe: dict[str, Any] | None = None, fingerprint: str = "abc") -> list[str]:
    with StoreWriter(folder, recipe or {"quant": "nf4"}, fingerprint) as writer:
        written = write_files(writer)
        writer.finish({})
    return written


def snapshot(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


ALL = [*(layer_file(index) for index in range(4)), HEAD_FILE]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert write(tmp_path / "store") == ALL
    return tmp_path / "store"


def stop_after(folder: Path, num_layers: int) -> None:
    """A preparation that ends in the middle of the layer after `num_layers`."""
    with suppress(KeyboardInterrupt), StoreWriter(folder, {"quant": "nf4"}, "abc") as writer:
        for index in range(num_layers):
            write_layer(writer, index)
        with writer.layer(num_layers, NBYTES, 2, NBYTES) as layer:
            layer.write("dense", 0, memoryview(bytes([num_layers]) * NBYTES))
            raise KeyboardInterrupt


def test_finished_files_are_not_written_again(folder: Path, tmp_path: Path) -> None:
    stop_after(tmp_path / "other", 2)
    kept = [(tmp_path / "other" / layer_file(index)).stat().st_ino for index in range(2)]
    assert write(tmp_path / "other") == ALL[2:]
    assert [(tmp_path / "other" / layer_file(index)).stat().st_ino for index in range(2)] == kept
    assert snapshot(tmp_path / "other") == snapshot(folder)


def test_an_interrupted_file_leaves_nothing(tmp_path: Path) -> None:
    stop_after(tmp_path / "store", 1)
    assert sorted(snapshot(tmp_path / "store")) == [layer_file(0), "lock", "progress.json"]


def test_a_finished_file_that_was_damaged_is_written_again(folder: Path, tmp_path: Path) -> None:
    for damage in ("flip", "cut", "gone"):
        other = tmp_path / damage
        stop_after(other, 2)
        path = other / layer_file(1)
        whole = path.read_bytes()
        if damage == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[:-1] + b"\xff" * (damage == "flip"))
        assert write(other) == ALL[1:]
        assert snapshot(other) == snapshot(folder)


def test_a_complete_store_needs_no_write_and_stays_open_to_readers(folder: Path) -> None:
    before = snapshot(folder)
    with StoreWriter(folder, {"quant": "nf4"}, "abc") as writer:
        assert writer.complete
        assert write_files(writer) == []
    assert snapshot(folder) == before
    Store.open(folder).close()


def test_only_the_damaged_file_of_a_complete_store_is_made_anew(folder: Path) -> None:
    before = snapshot(folder)
    path = folder / layer_file(2)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert write(folder) == [layer_file(2)]
    assert snapshot(folder) == before


def test_a_complete_store_no_longer_opens_once_a_file_of_it_was_replaced(folder: Path) -> None:
    with StoreWriter(folder, {"quant": "nf4"}, "abc") as writer:
        writer.write_head(memoryview(b"x" * NBYTES))
        assert not writer.complete
    with pytest.raises(BadStore, match="unfinished"):
        Store.open(folder)


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("change", [{"recipe": {"quant": "int8"}}, {"fingerprint": "abd"}, {"version": "9"}])
def test_another_making_is_rebuilt_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, change: dict[str, Any]
) -> None:
    folder = tmp_path / "store"
    if finished:
        write(folder)
    else:
        stop_after(folder, 2)
    change = dict(change)
    if version := change.pop("version", None):
        monkeypatch.setattr(manifests, "version", lambda name: version)
    assert write(folder, **change) == ALL
    with Store.open(folder) as store:
        assert store.manifest.made_of(change.get("fingerprint", "abc"), change.get("recipe", {"quant": "nf4"}))
        assert all(sound for _, sound in store.verify())


def test_what_another_making_left_is_gone_before_the_first_write(folder: Path) -> None:
    with StoreWriter(folder, {"quant": "int8"}, "abc"):
        assert list(snapshot(folder)) == ["lock"]


@pytest.mark.parametrize("text", [b"", b"{", b'{"format":"moedge.store/0"}', b'{"format":"moedge.store/1"}'])
def test_a_damaged_record_of_progress_is_not_trusted(tmp_path: Path, text: bytes) -> None:
    stop_after(tmp_path, 2)
    (tmp_path / "progress.json").write_bytes(text)
    assert write(tmp_path) == ALL


@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", "layer-1.safetensors", ".bashrc"])
def test_a_folder_with_other_files_is_never_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("dear to somebody")
    with pytest.raises(BadStore, match=f"contains '{name}'"):
        StoreWriter(tmp_path, {}, "abc")
    assert os.listdir(tmp_path) == [name]


def test_a_store_is_its_owners_alone(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700


def test_recipes_are_compared_as_json(tmp_path: Path) -> None:
    write(tmp_path, {"a": (1, 2), "b": 0.5})
    assert write(tmp_path, {"b": 0.5, "a": [1, 2]}) == []
    assert write(tmp_path, {"b": 0.5, "a": [2, 1]}) == ALL
    with pytest.raises(ValueError, match="not JSON compliant"):
        StoreWriter(tmp_path, {"a": float("nan")}, "abc")


def test_incomplete_and_overfull_shards_are_refused(tmp_path: Path) -> None:
    page = memoryview(bytes(NBYTES))
    with StoreWriter(tmp_path, {}, "") as writer:
        with (
            pytest.raises(ValueError, match=r"experts has 8192 bytes, 4096 were written"),
            writer.layer(0, 0, 2, NBYTES) as layer,
        ):
            layer.write("experts", 1, page)
        with pytest.raises(ValueError, match="4097 more were given"), writer.layer(0, NBYTES, 0, 0) as layer:
            layer.write("dense", 0, memoryview(bytes(NBYTES + 1)))
        with pytest.raises(AssertionError, match="multiple of 4096"), writer.layer(0, 100, 0, 0):
            pass
        with pytest.raises(AssertionError, match="multiple of 4096"):
            writer.write_head(page[:17])
    assert sorted(os.listdir(tmp_path)) == ["lock"]


def test_a_store_with_a_gap_or_unchecked_files_is_not_finished(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, {}, "") as writer:
        with writer.layer(1, NBYTES, 0, 0) as layer:
            layer.write("dense", 0, memoryview(bytes(NBYTES)))
        with pytest.raises(ValueError, match=layer_file(0)):
            writer.finish({})
    with StoreWriter(tmp_path, {}, "") as writer, pytest.raises(ValueError, match="call has"):
        writer.finish({})


def test_wide_elements_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    specs = [TensorSpec("a", "U8", (3,)), TensorSpec("z", "F64", (1,)), TensorSpec("m", "BF16", (5,))]
    with StoreWriter(tmp_path, {}, "") as writer:
        with writer.resident(specs) as resident:
            for spec in specs:
                resident.write(spec.name, 0, memoryview(bytes(spec.nbytes)))
        writer.finish({})
    with Store.open(tmp_path) as store:
        assert list(store.resident) == ["z", "m", "a"]
        assert {name: tensor.extent.offset - 4096 for name, tensor in store.resident.items()} == {
            "z": 0,
            "m": 8,
            "a": 18,
        }


def test_a_full_disk_is_one_sentence_and_the_next_run_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, pwrite, left = tmp_path / "other", os.pwrite, 60_000

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(data)
        return pwrite(descriptor, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            DiskFull, match=rf"layer-000\d.safetensors needs {3 * NBYTES} bytes and \d+ are free"
        ) as caught:
            write(other)
    assert str(other) in str(caught.value)
    assert not [name for name in os.listdir(other) if name.endswith(".tmp")]
    finished = [name for name in ALL if (other / name).exists()]
    assert 1 < len(finished) < len(ALL)
    assert write(other) == ALL[len(finished) :]
    assert snapshot(other) == snapshot(folder)


def test_pages_are_flushed_and_dropped_while_a_large_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, advise = os.fsync, os.posix_fadvise
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("fsync") or fsync(fd))
    monkeypatch.setattr(
        os, "posix_fadvise", lambda *a: calls.append("drop" if a[3] == os.POSIX_FADV_DONTNEED else "") or advise(*a)
    )
    monkeypatch.setattr("moedge.offload.atomic_file._FLUSH_NBYTES", 8 * NBYTES)
    with StoreWriter(tmp_path, {}, "") as writer, writer.layer(0, 0, 32, NBYTES) as layer:
        calls.clear()
        for expert in range(32):
            layer.write("experts", expert, memoryview(bytes(NBYTES)))
        assert calls == ["fsync", "drop"] * 4


def test_the_manifest_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: names.append(Path(target).name) or rename(source, target))
    write(tmp_path)
    assert names[-1] == MANIFEST
    assert names.count(MANIFEST) == 1


def test_the_documented_header_is_the_one_that_is_written() -> None:
    page = (Path(__file__).parents[3] / "docs" / "dev" / "store.md").read_text()
    lines = re.findall(r"^0000[0-9a-f]{4}  ((?:[0-9a-f]{2} +){16})\|", page, re.MULTILINE)
    documented = bytes.fromhex("".join(lines))
    header = build_header([TensorSpec("dense", "U8", (8192,)), TensorSpec("experts", "U8", (2, NBYTES), 2)])
    assert len(documented) == 160
    assert header == documented.ljust(4096)


def test_every_key_of_the_manifest_is_documented(folder: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "dev" / "store.md").read_text()
    content = json.loads((folder / MANIFEST).read_bytes())
    for key in (*content, *content["files"][0]):
        assert any(name in page for name in (f"`{key}`", f"`{key}[].", f"`files[].{key}`")), key
