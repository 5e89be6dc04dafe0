"""What was read from files, by the hash of their bytes, so that the next question reads nothing again."""

from __future__ import annotations

import json
import os
import threading
import zlib
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any

from ...face import own_name
from .reader_process import ReadOptions
from .readers.content import Content, ReadCode, ReadFailure

# To be raised when readers change what they make of the same bytes.
_VERSION = 1


class TextCache:
    """Files `ab/abcdef...json` in a folder. An entry that is damaged or torn is as if it were not there."""

    def __init__(self, folder: Path, options: ReadOptions) -> None:
        self._folder = folder
        self._options = f"{_VERSION}:{options.reader}:{options.languages}"

    def get(self, digest: str, name: str) -> Content | None:
        """The text of a file with this sha256 and name. Raises ReadFailure where it is known to have none."""
        try:
            checksum, _, body = self._path(digest, name).read_bytes().partition(b" ")
            if int(checksum, 16) != zlib.crc32(body):
                return None
            found = json.loads(body)
        except (OSError, ValueError):
            return None
        if "code" in found:
            raise ReadFailure(ReadCode(found["code"]), found["message"])
        return Content(**{**found, "pages": tuple(found["pages"]), "notes": tuple(found["notes"])})

    def keep(self, digest: str, name: str, found: Content | ReadFailure) -> None:
        """Keeps a text, or a failure that would be the same again. A full disk keeps nothing."""
        if isinstance(found, ReadFailure):
            if not found.code.permanent:
                return
            entry: dict[str, Any] = {"code": found.code, "message": found.message}
        else:
            entry = asdict(found)
        body = json.dumps(entry, separators=(",", ":")).encode()
        path = self._path(digest, name)
        # Two threads may read two files of the same content.
        hidden = own_name(path.with_name(f"{path.name}.{threading.get_ident()}"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not synced: a checksum tells what a power cut left behind, and reading the file again costs little.
            hidden.write_bytes(b"%08x " % zlib.crc32(body) + body)
            os.replace(hidden, path)
        except OSError:
            with suppress(OSError):
                hidden.unlink(missing_ok=True)

    def _path(self, digest: str, name: str) -> Path:
        """The type of a text depends on the name's suffix, too."""
        key = f"{self._options}:{PurePath(name).suffix.lower()}".encode()
        return self._folder / digest[:2] / f"{digest}-{blake2b(key, digest_size=4).hexdigest()}.json"
