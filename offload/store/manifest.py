"""The manifest of a store (inputs, files, a CRC32 per shard), and access to a store: by whom, and to whose files.

A store has either one writer or many readers at a time, and only files that this user or root wrote are read. Also
which files a store's folder may contain, and how they are removed. Reads and writes no weights.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..atomic_file import TEMPORARY_SUFFIX, sync_folder, try_lock
from ..checkpoint.header import ITEM_BITS
from ..errors import BadStore, FolderRefused, StoreInUse, is_exhausted


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file of the checkpoint as it was when its bytes were checked: its absolute path, size and modification time."""

    path: str
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path, status: os.stat_result) -> Self:
        return cls(str(path.resolve()), status.st_size, status.st_mtime_ns)

    def open(self) -> OpenSource:
        """Opens the file for reading. Raises BadStore if it is missing, or is not as it was."""
        path = Path(self.path)
        again = "`moedge models rm` removes the store that names it, and the next run reads the file again"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise BadStore(
                f"{path} cannot be opened ({error.strerror}), and weights are read from it; put it back, or {again}"
            ) from None
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (self.nbytes, self.mtime_ns):
            return OpenSource(path, descriptor)
        os.close(descriptor)
        raise BadStore(
            f"{path} changed after its checksums were taken: it has {status.st_size} bytes and was modified at "
            f"{status.st_mtime_ns / 1e9:.3f} (seconds since 1970), wanted {self.nbytes} bytes and "
            f"{self.mtime_ns / 1e9:.3f}; if the change is wanted, {again}"
        )


class OpenSource(NamedTuple):
    """An open file of the checkpoint."""

    path: Path
    descriptor: int


def open_sources(sources: Sequence[SourceFile]) -> list[OpenSource]:
    """Opens all files. Raises BadStore, with none left open."""
    opened: list[OpenSource] = []
    try:
        for source in sources:
            opened.append(source.open())
    except BaseException:
        close_sources(opened)
        raise
    return opened


def close_sources(opened: list[OpenSource]) -> None:
    while opened:
        os.close(opened.pop().descriptor)


class LinkedPart(NamedTuple):
    """`nbytes` from byte `begin` of a shard on are those at `offset` of the file with the index `source`."""

    begin: int
    source: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LinkedShard:
    """The parts of a shard in its order, and the CRC32 of their bytes; bytes between them are of no use."""

    crc32: int
    parts: tuple[LinkedPart, ...]


@dataclass(frozen=True, slots=True)
class LinkedTensor:
    """A tensor of a store's file that is cut into equal shards, all of which lie in the checkpoint's files."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[LinkedShard, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8

    def to_json(self) -> dict[str, Any]:
        shards = [[f"{shard.crc32:08x}", [list(part) for part in shard.parts]] for shard in self.shards]
        return {"dtype": self.dtype, "shape": list(self.shape), "shards": shards}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], sources: Sequence[SourceFile]) -> Self:
        """Raises ValueError, TypeError or KeyError for anything but parts inside their shards and files."""
        shards = tuple(
            LinkedShard(int(crc, 16), tuple(LinkedPart(*part) for part in parts)) for crc, parts in content["shards"]
        )
        tensor = cls(content["dtype"], tuple(content["shape"]), shards)
        if not shards or tensor.nbytes % len(shards):
            raise ValueError("shards are not of one size")
        if not all(shard.parts for shard in shards):
            raise ValueError("a shard has no parts")
        for part in (part for shard in shards for part in shard.parts):
            if min(part) < 0 or part.begin + part.nbytes > tensor.nbytes // len(shards):
                raise ValueError("a part is outside its shard")
            if part.offset + part.nbytes > sources[part.source].nbytes:
                raise ValueError("a part is outside its file")
        return tensor


LOCK = "lock"


def lock_to_write(folder: Path) -> int:
    """Takes the exclusive lock; returns the descriptor that holds it until it is closed. Raises StoreInUse."""
    return _lock(
        folder,
        os.O_RDWR | os.O_CREAT,
        fcntl.LOCK_EX,
        f"{folder} is in use by another process, wanted exclusive access; wait until that process has ended",
    )


def lock_to_use(folder: Path) -> int:
    """Takes the lock like `lock_to_write`, but shares it with other readers of the store."""
    return _lock(
        folder,
        os.O_RDONLY,
        fcntl.LOCK_SH,
        f"{folder} is being written by another process, wanted a finished store; wait until that process has ended",
    )


def _lock(folder: Path, flags: int, kind: int, refusal: str) -> int:
    while True:
        try:
            if (descriptor := try_lock(folder / LOCK, flags, kind, 0o644)) is not None:
                return descriptor
        except (FileNotFoundError, NotADirectoryError):
            raise BadStore(f"{folder} is not a store: no file {LOCK!r} in it; run `moedge prepare`") from None
        except BlockingIOError:
            raise StoreInUse(refusal) from None


def open_trusted(path: Path) -> int:
    """Opens a file for reading. Raises FileNotFoundError, or BadStore if it is not a regular file that we trust."""
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        if is_exhausted(error):
            raise
        raise BadStore(f"{path} cannot be opened ({error.strerror}), wanted a regular file") from None
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise BadStore(f"{path} is not a regular file; prepare the model again in another folder")
        refuse_untrusted(info, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_untrusted(info: os.stat_result, path: Path) -> None:
    """Raises BadStore if anybody but this user or root can have written `path`."""
    if info.st_mode & stat.S_IWOTH:
        raise BadStore(
            f"everybody may write to {path}, wanted only its owner to; run `chmod o-w` on it if you trust it"
        )
    # Root may use files of other owners: in containers, root usually works in mounted folders.
    if os.geteuid() not in (0, info.st_uid) and info.st_uid != 0:
        raise BadStore(
            f"{path} belongs to user {info.st_uid}, wanted {os.geteuid()} or root; prepare a store of your own"
        )


FORMAT = "moedge.store/1"
MANIFEST = "manifest.json"
# The manifest of the files that are finished so far; it is renamed to MANIFEST when all are.
PROGRESS = "progress.json"
HEAD_FILE = "head.safetensors"
RESIDENT_FILE = "resident.safetensors"
# Measurements that other code keeps beside a store's shards; they are removed when the store is written again.
_NOTE_NAME = re.compile(r"note-[a-z-]+\.safetensors")
_MAX_MANIFEST_NBYTES = 256 << 20
_FILE_NAME = re.compile(r"layer-\d{4,}\.safetensors|head\.safetensors|resident\.safetensors")


def is_note_name(name: str) -> bool:
    """Whether a file of that name may be kept beside the shards of a store."""
    return _NOTE_NAME.fullmatch(name) is not None


def is_file_name(name: str) -> bool:
    """Whether a file of that name may hold shards of a store."""
    return _FILE_NAME.fullmatch(name) is not None


def layer_file(index: int) -> str:
    return f"layer-{index:04}.safetensors"


def canonical(content: Any) -> bytes:
    """The canonical JSON text of a value: sorted keys, no whitespace, ASCII."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size, the CRC32 of all bytes before its data, and the CRC32 of each tensor's shards in order.

    `linked` are tensors that belong to it and lie in the checkpoint's own files.
    """

    name: str
    nbytes: int
    header_crc32: int
    shards_crc32: Mapping[str, tuple[int, ...]]
    linked: Mapping[str, LinkedTensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest. `fingerprint` (of the model) and `recipe` determine every byte of the files.

    `extra` belongs to the caller that wrote the store. `sources` are the checkpoint's files that linked shards lie in.
    """

    version: str
    fingerprint: str
    recipe: Mapping[str, Any]
    files: tuple[FileRecord, ...]
    extra: Mapping[str, Any]
    sources: tuple[SourceFile, ...] = ()

    @classmethod
    def begin(cls, fingerprint: str, recipe: Mapping[str, Any], sources: Sequence[SourceFile] = ()) -> Manifest:
        """The manifest of a store of this version without files; `recipe` is normalized by a JSON round trip."""
        return cls(version("moedge"), fingerprint, json.loads(canonical(recipe)), (), {}, tuple(sources))

    @property
    def nbytes(self) -> int:
        """The bytes of all files together, without the manifest."""
        return sum(file.nbytes for file in self.files)

    @property
    def nbytes_named(self) -> int:
        """The bytes of all files, and of the tensors that they name in the checkpoint's files."""
        return self.nbytes + sum(tensor.nbytes for file in self.files for tensor in file.linked.values())

    def made_of(self, fingerprint: str, recipe: Mapping[str, Any]) -> bool:
        """Whether the store has these inputs."""
        return self.fingerprint == fingerprint and canonical(self.recipe) == canonical(recipe)

    def same_making(self, other: Manifest) -> bool:
        """Whether files of both may be in one store: they have the same version and the same inputs."""
        same = self.version == other.version and self.sources == other.sources
        return same and self.made_of(other.fingerprint, other.recipe)

    def encode(self) -> bytes:
        """Canonical JSON; its `crc32` is the CRC32 of the same JSON without that key."""
        files = [_file_to_json(file) for file in sorted(self.files, key=lambda file: file.name)]
        content = {
            "format": FORMAT,
            "version": self.version,
            "fingerprint": self.fingerprint,
            "recipe": self.recipe,
            "files": files,
            "nbytes": self.nbytes,
            "extra": self.extra,
        }
        if self.sources:
            content["sources"] = [[each.path, each.nbytes, each.mtime_ns] for each in self.sources]
        return canonical(content | {"crc32": _hex(zlib.crc32(canonical(content)))}) + b"\n"


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest. Raises FileNotFoundError, or BadStore unless it is undamaged and of this version."""
    with open(open_trusted(path), "rb") as file:
        data = file.read(_MAX_MANIFEST_NBYTES + 1)
    if len(data) > _MAX_MANIFEST_NBYTES:
        raise BadStore(
            f"{path} has over {_MAX_MANIFEST_NBYTES} bytes, too many for a manifest; prepare the model again"
        )
    try:
        content = json.loads(data)
        found = content["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadStore(f"{path} is not a store's manifest ({error!r:.120}); prepare the model again") from None
    if found != FORMAT:
        raise BadStore(f"{path} has format {found!r:.40}, wanted {FORMAT!r}; prepare the model again")
    try:
        manifest = _from_json(content)
        sound = manifest.encode() == data
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise BadStore(f"{path} is damaged: its bytes do not match its CRC32; prepare the model again")
    return manifest


def _file_to_json(file: FileRecord) -> dict[str, Any]:
    crcs = {tensor: [_hex(crc) for crc in values] for tensor, values in file.shards_crc32.items()}
    linked = {tensor: each.to_json() for tensor, each in file.linked.items()}
    return {
        "name": file.name,
        "nbytes": file.nbytes,
        "header_crc32": _hex(file.header_crc32),
        "shards_crc32": crcs,
        **({"linked": linked} if linked else {}),
    }


def _from_json(content: Mapping[str, Any]) -> Manifest:
    sources = tuple(SourceFile(*each) for each in content.get("sources", ()))
    files = tuple(_file_from_json(file, sources) for file in content["files"])
    texts, mappings = (content["version"], content["fingerprint"]), (content["recipe"], content["extra"])
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(each, dict) for each in mappings):
        raise TypeError("wanted strings and objects")
    if len({file.name for file in files}) != len(files):
        raise ValueError("a file is listed twice")
    return Manifest(*texts, mappings[0], files, mappings[1], sources)


def _file_from_json(content: Mapping[str, Any], sources: Sequence[SourceFile]) -> FileRecord:
    # A name is joined to the store's folder, so it must not lead out of it.
    if not is_file_name(content["name"]):
        raise ValueError("not the name of a store's file")
    crcs = {tensor: tuple(int(crc, 16) for crc in values) for tensor, values in content["shards_crc32"].items()}
    linked = {name: LinkedTensor.from_json(each, sources) for name, each in content.get("linked", {}).items()}
    return FileRecord(content["name"], content["nbytes"], int(content["header_crc32"], 16), crcs, linked)


def _hex(crc: int) -> str:
    return f"{crc:08x}"


def make_folder(folder: Path) -> None:
    """Creates the folder, accessible to its owner only.

    Raises BadStore if it contains anything but a store, FolderRefused where it cannot be made.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise FolderRefused(
            f"{folder} cannot be written: {error.strerror}; give --disk-dir FOLDER on a disk that you can write"
        ) from None
    refuse_untrusted(os.stat(folder), folder)
    store_files(folder)


def store_files(folder: Path) -> list[str]:
    """All file names in the folder. Raises BadStore if a store has no such file: it may be a file of the user."""
    names = sorted(os.listdir(folder))
    for name in names:
        plain = name.removeprefix(".").removesuffix(TEMPORARY_SUFFIX)
        if plain not in {LOCK, MANIFEST, PROGRESS} and not is_file_name(plain) and not is_note_name(plain):
            raise BadStore(f"{folder} contains {name!r}, wanted only a store's files; choose another folder")
    return names


def begun_manifest(folder: Path, empty: Manifest) -> Manifest:
    """The finished or begun manifest in the folder if it has the same inputs as `empty`, else `empty`.

    Removes all other manifests.
    """
    for name in (MANIFEST, PROGRESS):
        try:
            found = read_manifest(folder / name)
            if found.same_making(empty):
                return found
        except FileNotFoundError:
            continue
        except BadStore:
            # A damaged manifest, or one of another version, is removed like one with other inputs.
            pass
        os.unlink(folder / name)
        # The manifest goes before any file that it names: a store that can be opened is complete.
        sync_folder(folder)
    return empty


def remove_files_except(folder: Path, kept: Collection[str]) -> None:
    """Removes all other files of the store. The lock file stays, because it is held."""
    for name in store_files(folder):
        if name not in kept and name != LOCK:
            os.unlink(folder / name)
    sync_folder(folder)
