"""The safetensors files of a checkpoint folder: which tensor lies where, and its bytes.

Reads with `pread`, never mmap: a mapped file counts against a container's memory, dies with SIGBUS when it is
truncated, and shows edits made under it. Pickle files are refused, there is no flag. Torch-free.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from .errors import BadCheckpoint
from .header import TensorEntry, header_nbytes, parse_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_MAX_INDEX_NBYTES = 256 << 20


class Checkpoint:
    """All tensors of a checkpoint; open files until `close`.

    Raises BadCheckpoint, naming file, found and wanted, for anything that is not a complete set of safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, str] = {}
        self._descriptors: dict[str, int] = {}
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def read_into(self, name: str, target: memoryview, begin: int = 0) -> None:
        """Fills `target` with the tensor's bytes from byte `begin` of it on."""
        entry, file = self.entries[name], self._file_of[name]
        if begin + len(target) > entry.nbytes:
            raise ValueError(f"{begin + len(target)} bytes were asked of {name!r}, which has {entry.nbytes}")
        position = 0
        while position < len(target):
            read = os.preadv(self._descriptors[file], [target[position:]], entry.begin + begin + position)
            if read <= 0:
                raise BadCheckpoint(f"{file}: ends inside tensor {name!r}; it changed while it was read")
            position += read

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_all(self) -> None:
        weight_map = _weight_map(self.folder)
        for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
            self._open(file)
        if weight_map is not None:
            _check_index(weight_map, self._file_of)

    def _open(self, file: str) -> None:
        path = self.folder / file
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing; download the checkpoint again{_pickle_hint(self.folder)}")
        descriptor = self._descriptors[file] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        file_nbytes = os.fstat(descriptor).st_size
        length = header_nbytes(os.pread(descriptor, 8, 0), file_nbytes, file)
        for name, entry in parse_header(os.pread(descriptor, length, 8), file_nbytes, file).items():
            if name in self.entries:
                raise BadCheckpoint(f"tensor {name!r} stands in both {self._file_of[name]} and {file}")
            self.entries[name] = entry
            self._file_of[name] = file


def _weight_map(folder: Path) -> Mapping[str, str] | None:
    """The index's tensor to file mapping, None where one file holds everything."""
    path = folder / INDEX
    if not path.exists():
        return None
    if path.stat().st_size > _MAX_INDEX_NBYTES:
        raise BadCheckpoint(f"{path}: {path.stat().st_size} bytes is no sensible index")
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = [(str(name), file) for name, file in weight_map.items()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadCheckpoint(f"{path}: not an index of safetensors files ({error})") from None
    for name, file in pairs:
        if not isinstance(file, str) or not _SHARD_NAME.fullmatch(file) or file.startswith("."):
            raise BadCheckpoint(
                f"{path}: {name[:80]!r} points to {file!r:.80}, wanted the bare name of a .safetensors file"
            )
    if not pairs:
        raise BadCheckpoint(f"{path}: names no tensor")
    return dict(pairs)


def _check_index(weight_map: Mapping[str, str], file_of: Mapping[str, str]) -> None:
    wrong = [name for name, file in weight_map.items() if file_of.get(name) != file]
    extra = [name for name in file_of if name not in weight_map]
    if wrong or extra:
        raise BadCheckpoint(
            f"{INDEX} and the files disagree: {len(wrong)} tensors are not where it says (first: {wrong[:3]}), "
            f"{len(extra)} are not in it (first: {extra[:3]})"
        )


def _pickle_hint(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    if not found:
        return ""
    return f" ({found[0]} is a pickle file, which can run code and is never read; convert it to safetensors)"
