"""A checkpoint folder, which is untrusted: files below it only, the index, tensors, their bytes and where these lie."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..closing import Closing
from ..errors import BadCheckpoint, is_exhausted
from .header import MAX_TENSORS, TensorEntry, described, header_nbytes, load_object, parse_header


def open_inside(folder: Path, name: str) -> int:
    """Opens a regular file in `folder` for reading and returns its descriptor; `name` has no path separator.

    A link may point into the folder, or to the blobs of the hub cache if the folder is a snapshot of it. Any other link
    would let a checkpoint read any file of the machine. Raises BadCheckpoint.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not any(real.is_relative_to(root) for root in _roots(folder.resolve(strict=True))):
            raise BadCheckpoint(f"{path} is a link to {real}, wanted a file in the folder; copy it there")
        # Without O_NONBLOCK, opening a pipe waits for its other end.
        descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path} is missing; download the checkpoint again") from None
    except (OSError, RuntimeError) as error:
        if is_exhausted(error):
            raise
        raise BadCheckpoint(f"{path} cannot be opened: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadCheckpoint(f"{path} is a folder, pipe or device, wanted a file")
    return descriptor


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """The bytes of a file that has at most `most` of them. Raises BadCheckpoint."""
    descriptor = open_inside(folder, name)
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise BadCheckpoint(f"{folder / name}: {os.path.getsize(folder / name)} bytes, at most {most} are read")
    return data


def find_inside(folder: Path, name: str, most: int) -> bytes | None:
    """The same, or None where there is nothing of that name. Every file of a checkpoint is read in one of these ways:
    none is skipped that is a link to elsewhere, a pipe or a device."""
    return read_inside(folder, name, most) if os.path.lexists(folder / name) else None


def blob_id(folder: Path, name: str) -> str | None:
    """The hub's hash of a file that is a link into the blobs of a cache; None for any other file."""
    real = (folder / name).resolve()
    return real.name if real.parent in _roots(folder.resolve())[1:] else None


def _roots(folder: Path) -> list[Path]:
    """The folders that links may point into: models--x/snapshots/REVISION has its bytes in models--x/blobs."""
    # GGUF files often lie in a folder of their own there.
    for snapshot in (folder, folder.parent):
        if snapshot.parent.name == "snapshots":
            return [folder, snapshot.parent.parent / "blobs"]
    return [folder]


INDEX = "model.safetensors.index.json"
MAX_INDEX_NBYTES = 32 << 20
# Every file stays open while weights are read, and a process may often open 1024.
MAX_FILES = 768
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,200}\.safetensors")


def read_index(folder: Path) -> Mapping[str, str] | None:
    """The file of each tensor, by name; None if the folder has no index. Raises BadCheckpoint."""
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
    """Raises BadCheckpoint unless every tensor is in the index, and in the file that the index names."""
    wrong = [name for name, file in weight_map.items() if file_of.get(name) != file]
    extra = [name for name in file_of if name not in weight_map]
    if wrong or extra:
        raise BadCheckpoint(
            f"{INDEX} and the files disagree: {len(wrong)} tensors are in another file (first: {_some(wrong)}), "
            f"{len(extra)} are not in the index (first: {_some(extra)})"
        )


def _weight_map(data: bytes, path: Path) -> dict[str, Any]:
    # Before parsing: an index has few lists and objects, and a comma for every tensor.
    if data.count(b"{") + data.count(b"[") > 1000 or data.count(b",") > MAX_TENSORS + 1000:
        raise BadCheckpoint(f"{path} is not an index of at most {MAX_TENSORS} tensors")
    try:
        weight_map = load_object(data).get("weight_map")
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not the JSON of an index ({error})") from None
    if not isinstance(weight_map, dict):
        raise BadCheckpoint(f"{path}: weight_map is {described(weight_map)}, wanted files by tensor name")
    return weight_map


def _some(names: list[str]) -> str:
    return ", ".join(described(name) for name in names[:3]) or "none"


SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def has_weights(folder: Path) -> bool:
    """Whether a folder holds any file of weights, readable or not."""
    return any(path.suffix in (".safetensors", *_PICKLES) for path in folder.iterdir())


class Checkpoint(Closing):
    """All tensors of a checkpoint. Its files stay open until `close`.

    Raises BadCheckpoint, which names the file, what was found and what was wanted, unless the folder has a complete
    set of safetensors files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, TensorEntry] = {}
        self._file_of: dict[str, str] = {}
        self._descriptors: dict[str, int] = {}
        # Every file by its name in `folder`, as it was opened.
        self.files: dict[str, os.stat_result] = {}
        try:
            self._open_all()
        except BaseException:
            self.close()
            raise

    def file_of(self, name: str) -> str:
        """The name of the file that holds a tensor."""
        return self._file_of[name]

    def select(self, rename: Callable[[str], str | None]) -> None:
        """Gives tensors the names that `rename` returns, and leaves out those for which it returns None.

        Raises BadCheckpoint where two tensors get the same name.
        """
        file_of, entries = self._file_of, self.entries
        self.entries, self._file_of = {}, {}
        for name, entry in entries.items():
            if (own := rename(name)) is None:
                continue
            if own in self.entries:
                raise BadCheckpoint(f"{self.folder}: {described(name)} is in the files twice, under two prefixes")
            self.entries[own] = entry._replace(name=own)
            self._file_of[own] = file_of[name]

    def divide(self, parts: Callable[[TensorEntry], Sequence[TensorEntry]]) -> None:
        """Puts `parts` of a tensor, runs of its bytes under names of their own, in its place.

        Raises BadCheckpoint where one gets the name of another tensor.
        """
        file_of, entries = self._file_of, self.entries
        self.entries, self._file_of = {}, {}
        for name, entry in entries.items():
            for part in parts(entry):
                if part.name in self.entries:
                    raise BadCheckpoint(
                        f"{self.folder}: {described(part.name)} is in the files twice, once in {name!r}"
                    )
                self.entries[part.name], self._file_of[part.name] = part, file_of[name]

    def read_into(self, name: str, target: memoryview, begin: int = 0) -> None:
        """Fills `target` with the bytes of the tensor from byte `begin` on."""
        entry, file = self.entries[name], self._file_of[name]
        if begin < 0 or begin + len(target) > entry.nbytes:
            raise ValueError(
                f"{len(target)} bytes from byte {begin} on were wanted of {name!r}, which has {entry.nbytes}"
            )
        position = 0
        while position < len(target):
            read = os.preadv(self._descriptors[file], [target[position:]], entry.begin + begin + position)
            if read <= 0:
                raise BadCheckpoint(f"{file} ends inside tensor {name!r}; it changed while it was read")
            position += read

    def unchanged(self) -> bool:
        """Whether every file is still the one that was opened, with the same size and modification time."""
        return all(self._is_unchanged(file) for file in self._descriptors)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _is_unchanged(self, file: str) -> bool:
        opened = self.files[file]
        try:
            current = os.stat(self.folder / file)
        except OSError:
            return False
        return all(
            (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns)
            == (opened.st_dev, opened.st_ino, opened.st_size, opened.st_mtime_ns)
            for now in (current, os.fstat(self._descriptors[file]))
        )

    def _open_all(self) -> None:
        index = read_index(self.folder)
        if index is None and not os.path.lexists(self.folder / SINGLE):
            raise BadCheckpoint(
                f"{self.folder / SINGLE} is missing{_pickle_hint(self.folder)}; wanted this file or an index"
            )
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._open(file)
        if index is not None:
            check_index(index, self._file_of)

    def _open(self, file: str) -> None:
        descriptor = self._descriptors[file] = open_inside(self.folder, file)
        self.files[file] = os.fstat(descriptor)
        for name, entry in self._read_header(descriptor, file).items():
            if name in self.entries:
                raise BadCheckpoint(f"tensor {described(name)} is in both {self._file_of[name]} and {file}")
            self.entries[name] = entry
            self._file_of[name] = file
        if len(self.entries) > MAX_TENSORS:
            raise BadCheckpoint(f"{self.folder}: more than {MAX_TENSORS} tensors")

    def _read_header(self, descriptor: int, file: str) -> Mapping[str, TensorEntry]:
        return parse_header(*read_header(descriptor, file), file)


def read_header(descriptor: int, file: str) -> tuple[bytes, int]:
    """The JSON text of an open file's header, and the size of the file."""
    file_nbytes = os.fstat(descriptor).st_size
    length = header_nbytes(os.pread(descriptor, 8, 0), file_nbytes, file)
    header = os.pread(descriptor, length, 8)
    if len(header) != length:
        raise BadCheckpoint(f"{file} ends inside its header; it changed while it was read")
    return header, file_nbytes


def _pickle_hint(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*") if path.suffix in _PICKLES)
    if not found:
        return ""
    return f" ({found[0]} is a pickle file, which can run code and is never read; convert it to safetensors)"
