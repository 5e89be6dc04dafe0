"""The index of a checkpoint in several files: which file holds which tensor. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import BadCheckpoint
from .folder_file import read_inside
from .header import MAX_TENSORS
from .json_object import described, load_object

INDEX = "model.safetensors.index.json"
MAX_INDEX_NBYTES = 32 << 20
# Every file stays open while weights are read, and a process may often open 1024.
MAX_FILES = 768
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


def read_index(folder: Path) -> Mapping[str, str] | None:
    """File by tensor; None where the folder has no index. Raises BadCheckpoint."""
    path = folder / INDEX
    if not os.path.lexists(path):
        return None
    weight_map = _weight_map(read_inside(folder, INDEX, MAX_INDEX_NBYTES), path)
    files = set(map(str, weight_map.values()))
    for file in files:
        if not _FILE_NAME.fullmatch(file):
            name = next(name for name, target in weight_map.items() if str(target) == file)
            raise BadCheckpoint(
                f"{path}: {described(name)} points to {described(weight_map[name])}, "
                "wanted the bare name of a .safetensors file"
            )
    if not 1 <= len(files) <= MAX_FILES or len(weight_map) > MAX_TENSORS:
        raise BadCheckpoint(
            f"{path}: {len(weight_map)} tensors in {len(files)} files, "
            f"wanted 1 to {MAX_TENSORS} tensors in at most {MAX_FILES} files"
        )
    return weight_map


def check_index(weight_map: Mapping[str, str], file_of: Mapping[str, str]) -> None:
    """Raises BadCheckpoint unless every tensor is where the index says, and in the index."""
    wrong = [name for name, file in weight_map.items() if file_of.get(name) != file]
    extra = [name for name in file_of if name not in weight_map]
    if wrong or extra:
        raise BadCheckpoint(
            f"{INDEX} and the files disagree: {len(wrong)} tensors are not where it says (first: {_some(wrong)}), "
            f"{len(extra)} are not in it (first: {_some(extra)})"
        )


def _weight_map(data: bytes, path: Path) -> dict[str, Any]:
    # Before parsing: an index has few lists and objects, and a comma for every tensor.
    if data.count(b"{") + data.count(b"[") > 1000 or data.count(b",") > MAX_TENSORS + 1000:
        raise BadCheckpoint(f"{path}: no index of at most {MAX_TENSORS} tensors")
    try:
        weight_map = load_object(data).get("weight_map")
    except ValueError as error:
        raise BadCheckpoint(f"{path}: not the JSON of an index ({error})") from None
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{path}: weight_map is {described(weight_map)}, wanted files by tensor name")
    return weight_map


def _some(names: list[str]) -> str:
    return ", ".join(described(name) for name in names[:3]) or "none"
