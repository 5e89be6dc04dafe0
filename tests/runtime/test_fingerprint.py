"""A fingerprint (`runtime/source/model_source.py`) changes with the config, a header, a size or a blob, and with
nothing else; it reads no weight.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from moedge.offload.errors import BadCheckpoint
from moedge.runtime.source.model_source import model_fingerprint

FILES = ("a.safetensors", "b.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for file in FILES:
        save_file({file[0]: np.zeros(4, np.float32)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {file[0]: file for file in FILES}}))
    return folder


def test_a_copy_has_the_same_fingerprint(folder: Path, tmp_path: Path) -> None:
    assert model_fingerprint(folder) == model_fingerprint(shutil.copytree(folder, tmp_path / "copy"))


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text('{"model_type": "qwen3"}'),
        lambda folder: save_file({"a": np.zeros(4, np.int32)}, folder / "a.safetensors"),
        lambda folder: save_file({"a": np.zeros(5, np.float32)}, folder / "a.safetensors"),
        lambda folder: (folder / "b.safetensors").open("ab").write(b"x"),
    ],
)
def test_a_change_of_config_header_or_size_changes_it(change: Callable[[Path], object], folder: Path) -> None:
    before = model_fingerprint(folder)
    change(folder)
    assert model_fingerprint(folder) != before


def test_weights_that_are_edited_in_place_are_not_noticed(folder: Path) -> None:
    """As SECURITY.md says: no weight is read."""
    before = model_fingerprint(folder)
    save_file({"a": np.ones(4, np.float32)}, folder / "a.safetensors")
    assert model_fingerprint(folder) == before


def test_two_blobs_of_one_shape_differ_in_a_hub_cache(folder: Path, tmp_path: Path) -> None:
    snapshots, blobs = tmp_path / "models--a--b" / "snapshots", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    fingerprints = set()
    for blob in ("c0ffee", "decade", "c0ffee"):
        snapshot = snapshots / "1"
        shutil.rmtree(snapshot, ignore_errors=True)
        shutil.copytree(folder, snapshot)
        (snapshot / "a.safetensors").rename(blobs / blob)
        (snapshot / "a.safetensors").symlink_to(f"../../blobs/{blob}")
        fingerprints.add(model_fingerprint(snapshot))
    assert len(fingerprints) == 2


def test_no_weight_is_read_and_no_torch_imported(folder: Path) -> None:
    """Weights of a terabyte, in a file that has none of it on disk."""
    header = json.dumps({"a": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}}).encode()
    with (folder / "a.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**40)
    code = (
        "import sys; from pathlib import Path; from moedge.runtime.source.model_source import model_fingerprint;"
        f"print(model_fingerprint(Path({str(folder)!r}))); assert 'torch' not in sys.modules"
    )
    assert len(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip()) == 64


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "b.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"b\.safetensors is missing"):
        model_fingerprint(folder)
