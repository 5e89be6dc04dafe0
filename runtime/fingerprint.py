"""What identifies a checkpoint without reading its weights. Torch-free."""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from ..offload.checkpoint.checkpoint import SINGLE, read_header
from ..offload.checkpoint.folder_file import blob_id, open_inside, read_inside
from ..offload.checkpoint.index import read_index
from .shape.config import CONFIG, MAX_CONFIG_NBYTES


def model_fingerprint(folder: Path) -> str:
    """sha256 (hex) over config.json, and every weight file's name, size, header and, from a hub cache, blob id.

    An edit of a weight in place is seen only where blob ids are: all bytes of a large model take minutes to hash.
    Raises BadCheckpoint.
    """
    digest = sha256()
    for part in _parts(folder):
        # The length in front of every part keeps two parts from passing for one.
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _parts(folder: Path) -> Iterator[bytes]:
    yield read_inside(folder, CONFIG, MAX_CONFIG_NBYTES)
    index = read_index(folder)
    for file in [SINGLE] if index is None else sorted(set(index.values())):
        descriptor = open_inside(folder, file)
        try:
            header, file_nbytes = read_header(descriptor, file)
        finally:
            os.close(descriptor)
        yield file.encode()
        yield header
        yield file_nbytes.to_bytes(8, "little")
        yield (blob_id(folder, file) or "").encode()
