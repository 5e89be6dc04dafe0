"""Files of the API on disk: what clients upload, and what batches write. Torch-free.

A file's name on disk is its id, which this server makes up; the name that a client gives it is only repeated. A
multipart form is written to disk as it comes: one file, and fields of a few bytes.
"""

import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Self, TypeVar

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from ...face import write_atomically
from .errors import ApiError, not_found, refused
from .limits import ServerLimits

_BAD = ".json.bad"
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
MAX_NAME_CHARS = 255
BATCH = "batch"
BATCH_OUTPUT = "batch_output"


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """`path` is relative to the server's folder."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    path: str

    def as_json(self) -> dict[str, Any]:
        """OpenAI's file object."""
        shown = {name: value for name, value in asdict(self).items() if name != "path"}
        return {**shown, "object": "file", "status": "processed", "status_details": None, "expires_at": None}


class Upload:
    """A file that is being written; it exists for others when it is kept."""

    def __init__(self, path: Path, most_nbytes: int, check_total: Callable[[], None]) -> None:
        """`check_total` raises ApiError where all files together have become too large."""
        self.nbytes = 0
        self._check_total = check_total
        self._path = path
        self._most_nbytes = most_nbytes
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def write(self, data: bytes) -> None:
        """Raises ApiError for a file that is too large."""
        self.nbytes += len(data)
        if self.nbytes > self._most_nbytes:
            limit = f"{self._most_nbytes:,} bytes"
            raise ApiError(413, f"the file is larger than {limit}; split it", param="file", code="file_too_large")
        self._check_total()
        self._file.write(data)

    def sync(self) -> None:
        """What was written is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._file.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)


# A dataclass with an `id` and a time `created_at`.
_Record = TypeVar("_Record", bound=Any)


def read_records(folder: Path, pattern: str, kind: type[_Record]) -> Iterator[_Record]:
    """The records in a folder; of those that a newer server wrote, the fields that this one knows.

    One that cannot be read is set aside and named: the others must not wait for it.
    """
    wanted = {field.name for field in fields(kind)}
    for path in sorted(folder.glob(pattern)):
        try:
            content = json.loads(path.read_bytes())
            record = kind(**{name: value for name, value in content.items() if name in wanted})
            if record.id != path.stem or type(record.created_at) is not int:
                raise ValueError("it is another's, or has no time")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            aside = path.rename(path.with_suffix(_BAD))
            print(f"{path.name} cannot be read ({error}) and is left out; it is {aside} now", file=sys.stderr)
        else:
            yield record


class FileStore:
    """The files of one server; every method may be called from any thread."""

    def __init__(self, folder: Path, limits: ServerLimits) -> None:
        """Files are in `folder`/files; those that a killed server had not received whole are removed."""
        self._root = folder
        self._folder = folder / "files"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._limits = limits
        self._lock = threading.Lock()
        self._uploads: list[Upload] = []
        self._files = {found.id: found for found in read_records(self._folder, "file-*.json", StoredFile)}
        for path in self._folder.glob("file-*.jsonl"):
            if path.stem not in self._files and not path.with_suffix(_BAD).exists():
                path.unlink()

    def upload(self) -> tuple[str, Upload]:
        """The id of a file to come, and where to write it. Raises ApiError where there are too many."""
        with self._lock:
            if len(self._files) + len(self._uploads) >= self._limits.files:
                raise ApiError(
                    429,
                    f"{len(self._files):,} files are kept, and no more are allowed; delete some",
                    code="too_many_files",
                )
            file_id = new_id("file-")
            upload = Upload(self._folder / f"{file_id}.jsonl", self._limits.upload_nbytes, self._check_total)
            self._uploads.append(upload)
            return file_id, upload

    def end_upload(self, upload: Upload) -> None:
        """Call it once for every `upload`, whatever became of it."""
        with self._lock:
            self._uploads.remove(upload)

    def _check_total(self) -> None:
        with self._lock:
            kept = sum(file.bytes for file in self._files.values() if file.purpose == BATCH)
            nbytes = kept + sum(upload.nbytes for upload in self._uploads)
        if nbytes > self._limits.stored_nbytes:
            raise ApiError(
                507,
                f"files would have {nbytes:,} bytes, and {self._limits.stored_nbytes:,} are allowed; delete some",
                param="file",
                code="insufficient_storage",
            )

    def keep(self, file_id: str, upload: Upload, filename: str) -> StoredFile:
        upload.sync()
        return self._add(StoredFile(file_id, upload.nbytes, _now(), filename, BATCH, f"files/{file_id}.jsonl"))

    def publish(self, path: Path, batch_id: str, kind: str) -> str | None:
        """The id of what a batch wrote, the same however often it is published; None where it wrote nothing."""
        if not path.is_file() or not path.stat().st_size:
            return None
        file_id = "file-" + blake2b(f"{batch_id}:{kind}".encode(), digest_size=12).hexdigest()
        with self._lock:
            known = file_id in self._files
        if not known:
            name, size = f"{batch_id}_{kind}.jsonl", path.stat().st_size
            self._add(StoredFile(file_id, size, _now(), name, BATCH_OUTPUT, str(path.relative_to(self._root))))
        return file_id

    def get(self, file_id: str) -> StoredFile:
        """Raises ApiError."""
        with self._lock:
            found = self._files.get(file_id) if _FILE_ID.fullmatch(file_id) else None
        if found is None:
            raise not_found("file", file_id)
        return found

    def path(self, file: StoredFile) -> Path:
        return self._root / file.path

    def list(self, purpose: str | None) -> list[StoredFile]:
        """The newest first."""
        with self._lock:
            found = list(self._files.values())
        ordered = sorted(found, key=lambda each: (each.created_at, each.id), reverse=True)
        return [each for each in ordered if purpose in (None, each.purpose)]

    def delete(self, file_id: str) -> None:
        """Raises ApiError."""
        found = self.get(file_id)
        # The record first: content without a record is removed when a server starts, or belongs to a job.
        (self._folder / f"{file_id}.json").unlink(missing_ok=True)
        self.path(found).unlink(missing_ok=True)
        with self._lock:
            self._files.pop(file_id, None)

    def _add(self, file: StoredFile) -> StoredFile:
        write_new(self._folder / f"{file.id}.json", asdict(file))
        with self._lock:
            self._files[file.id] = file
        return file


def write_new(path: Path, record: Mapping[str, Any]) -> None:
    """Writes the record of something new. Where that fails at last, a later server does not find it after all."""
    try:
        write_atomically(path, json.dumps(record).encode())
    except BaseException:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        raise


def _now() -> int:
    return int(time.time())


def checked_name(name: str) -> str:
    """A name as a client gave it, which is shown and never opened. Raises ApiError."""
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise refused(f"filename must have 1 to {MAX_NAME_CHARS} printable characters", "file")
    return name


def page(ids: list[str], after: str | None, limit: int) -> Iterator[int]:
    """Positions in `ids` of one page of a list. Raises ApiError for an `after` that is not in it."""
    begin = 0
    if after is not None:
        if after not in ids:
            raise refused(f"after {after[:64]!a} is not in the list", "after")
        begin = ids.index(after) + 1
    yield from range(begin, min(begin + limit, len(ids)))


_MOST_PARTS = 16
_MOST_FIELD_NBYTES = 1024


class UploadForm:
    """`fields` are the small parts by name, `filename` is what the client calls its file, None without one."""

    def __init__(self, content_type: str, write: Callable[[bytes], None]) -> None:
        """`write` takes the content of the part "file". Raises ApiError for another kind of body."""
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise ApiError(415, "the body must be multipart/form-data", code="unsupported_media_type")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self._write = write
        self._num_parts = 0
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._header = [bytearray(), bytearray()]
        self._disposition = b""
        self._ended = False
        try:
            self._parser = MultipartParser(boundary, self._callbacks())  # type: ignore[arg-type]
        except FormParserError as error:
            raise refused(f"the form cannot be read: {error}", code="invalid_form") from None

    def add(self, data: bytes) -> None:
        """The next piece of the body. Raises ApiError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise refused(f"the form cannot be read: {error}", code="invalid_form") from None

    def end(self) -> None:
        """No more comes. Raises ApiError where the form is not whole."""
        if not self._ended:
            raise refused("the form ends before its last boundary", code="invalid_form")

    def _callbacks(self) -> dict[str, Callable[..., None]]:
        def end() -> None:
            self._ended = True

        return {
            "on_part_begin": self._begin_part,
            "on_header_field": lambda data, begin, end: self._header[0].extend(data[begin:end]),
            "on_header_value": lambda data, begin, end: self._header[1].extend(data[begin:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": lambda data, begin, end: self._add(data[begin:end]),
            "on_part_end": self._end_part,
            "on_end": end,
        }

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MOST_PARTS:
            raise refused(f"the form has more than {_MOST_PARTS} parts", code="invalid_form")
        self._disposition, self._value = b"", bytearray()

    def _end_header(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = [bytearray(), bytearray()]

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self.filename is not None:
                raise refused("the form has more than one file", "file")
            self.filename = options.get(b"filename", b"file.jsonl").decode(errors="replace")

    def _add(self, data: bytes) -> None:
        if self._is_file:
            self._write(data)
            return
        self._value.extend(data)
        if len(self._value) > _MOST_FIELD_NBYTES:
            raise refused(
                f"the field {self._name[:64]!a} is longer than {_MOST_FIELD_NBYTES} bytes", code="invalid_form"
            )

    def _end_part(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode(errors="replace")
