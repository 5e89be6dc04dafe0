"""A checkpoint's files: links stay in the folder, nothing blocks, what changes while it is read is noticed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moedge.offload.checkpoint import checkpoint as index_module
from moedge.offload.checkpoint.checkpoint import Checkpoint, blob_id, read_inside
from moedge.offload.checkpoint.header import TensorEntry
from moedge.offload.errors import BadCheckpoint

ONES = {"x": np.ones((4, 8), np.float32), "y": np.arange(6, dtype=np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(ONES, folder / "model.safetensors")
    return folder


def hub_cache(tmp_path: Path, weights: Path) -> Path:
    """The layout that huggingface_hub makes: snapshots of links into blobs."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    weights.rename(blobs / "c0ffee")
    (snapshot / "model.safetensors").symlink_to("../../blobs/c0ffee")
    return snapshot


def test_the_links_of_the_hub_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, folder / "model.safetensors")
    with Checkpoint(snapshot) as checkpoint:
        assert set(checkpoint.entries) == {"x", "y"}
    assert blob_id(snapshot, "model.safetensors") == "c0ffee"


def test_a_file_that_is_no_link_has_no_blob_id(folder: Path) -> None:
    assert blob_id(folder, "model.safetensors") is None


def test_a_folder_reached_through_a_link_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    Checkpoint(tmp_path / "link").close()


def test_a_link_that_leaves_the_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    for target in (tmp_path / "elsewhere", Path("../elsewhere"), Path("inner")):
        path.rename(tmp_path / "elsewhere")
        (folder / "inner").unlink(missing_ok=True)
        (folder / "inner").symlink_to(tmp_path / "elsewhere")
        path.symlink_to(target)
        with pytest.raises(BadCheckpoint, match="is a link to"):
            Checkpoint(folder)
        path.unlink()
        (tmp_path / "elsewhere").rename(path)


def test_a_link_from_a_snapshot_to_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path, folder / "model.safetensors")
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (snapshot.parent.parent / "blobs" / "c0ffee").rename(other / "c0ffee")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(other / "c0ffee")
    with pytest.raises(BadCheckpoint, match="is a link to"):
        Checkpoint(snapshot)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (os.mkfifo, "pipe or device"),
        (Path.mkdir, "a folder"),
        (lambda path: path.symlink_to("/dev/zero"), "is a link to"),
        (lambda path: path.symlink_to(path.name), "cannot be opened"),
        (lambda path: path.symlink_to("nowhere"), "is missing"),
    ],
)
def test_what_is_no_file_is_refused_without_waiting(make: Callable[[Path], None], says: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=says):
        Checkpoint(folder)


def test_a_small_file_is_read_up_to_its_cap(folder: Path) -> None:
    (folder / "small").write_bytes(b"12345")
    assert read_inside(folder, "small", 5) == b"12345"
    with pytest.raises(BadCheckpoint, match="at most 4"):
        read_inside(folder, "small", 4)


def test_a_part_of_a_tensor_can_be_read(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        row = bytearray(32)
        checkpoint.read_into("x", memoryview(row), 64)
        assert bytes(row) == ONES["x"][2].tobytes()
        assert checkpoint.file_of("x") == "model.safetensors"
        for begin, size in ((-1, 4), (0, 129), (128, 1)):
            with pytest.raises(ValueError, match="bytes from"):
                checkpoint.read_into("x", memoryview(bytearray(size)), begin)


def read_all(checkpoint: Checkpoint) -> None:
    for name, entry in checkpoint.entries.items():
        checkpoint.read_into(name, memoryview(bytearray(entry.nbytes)))


def test_a_file_truncated_while_it_is_read_is_a_refusal(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        read_all(checkpoint)
        for nbytes in range((folder / "model.safetensors").stat().st_size, 0, -24):
            os.truncate(folder / "model.safetensors", nbytes - 1)
            with pytest.raises(BadCheckpoint, match="changed while it was read"):
                read_all(checkpoint)
            assert not checkpoint.unchanged()


def _edited(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    os.utime(path, ns=(0, 0))


def _replaced(path: Path) -> None:
    (path.parent / "new").write_bytes(path.read_bytes())
    (path.parent / "new").rename(path)


@pytest.mark.parametrize("change", [_edited, _replaced, Path.unlink, lambda path: os.truncate(path, 10)])
def test_a_changed_file_is_noticed(change: Callable[[Path], None], folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        assert checkpoint.unchanged()
        change(folder / "model.safetensors")
        assert not checkpoint.unchanged()


def test_a_replaced_file_is_read_from_the_one_that_was_checked(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        _replaced(folder / "model.safetensors")
        os.truncate(folder / "model.safetensors", 0)
        out = bytearray(24)
        checkpoint.read_into("y", memoryview(out))
        assert bytes(out) == ONES["y"].tobytes()


def test_descriptors_are_closed_after_a_refusal(folder: Path) -> None:
    (folder / index_module.INDEX).write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(BadCheckpoint, match="disagree"):
            Checkpoint(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_index_of_too_many_files_or_tensors_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_FILES", 3)
    monkeypatch.setattr(index_module, "MAX_TENSORS", 5)
    for count, files in ((5, 4), (6, 1)):
        weight_map = {f"t{i}": f"f{i % files}.safetensors" for i in range(count)}
        (folder / index_module.INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(BadCheckpoint, match=f"{count} tensors in {files} files"):
            Checkpoint(folder)


def test_a_broken_index_is_not_taken_for_none(folder: Path) -> None:
    (folder / index_module.INDEX).symlink_to("nowhere")
    with pytest.raises(BadCheckpoint, match="is missing"):
        Checkpoint(folder)


def test_a_tensor_is_divided_into_runs_of_its_bytes(folder: Path) -> None:
    def halves(entry: TensorEntry) -> list[TensorEntry]:
        middle = entry.begin + entry.nbytes // 2
        first = entry._replace(name="first", shape=(2, 8), end=middle)
        return [first, first._replace(name="second", begin=middle, end=entry.end)] if entry.name == "x" else []

    x = np.arange(32, dtype=np.float32).reshape(4, 8)
    save_file({**ONES, "x": x}, folder / "model.safetensors")
    with Checkpoint(folder) as checkpoint:
        checkpoint.divide(halves)
        assert set(checkpoint.entries) == {"first", "second"}
        found = np.empty((2, 8), np.float32)
        checkpoint.read_into("second", memoryview(found).cast("B"))
        assert (found == x[2:]).all()
    with Checkpoint(folder) as checkpoint, pytest.raises(BadCheckpoint, match="'y' is in the files twice, once in 'y'"):
        checkpoint.divide(lambda entry: [entry._replace(name="y")])
