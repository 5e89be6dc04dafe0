"""Input that can be read from its start and at any place: pipes are kept in the job's folder, gzip is unpacked."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from io import BufferedReader
from pathlib import Path
from typing import cast

from .folder import JobFolder
from .new_file import NewFile
from .preflight import file_fingerprint
from .refusals import InputChanged, InputUnreadable
from .source import STDIN, open_input, open_regular, plain

_CHUNK_NBYTES = 1 << 20


def regular_input(path: Path, folder: JobFolder) -> Path:
    """The file to read rows from: `path`, or what came through standard input, kept for as long as the job is.

    Raises InputChanged where a job that was begun had other rows come through the pipe.
    """
    if os.fspath(path) != STDIN:
        return path
    if sys.stdin.isatty():
        raise InputUnreadable("no rows come from the terminal; give a file, or pipe one in")
    file = NewFile(folder.input)
    try:
        with open_input(path) as raw:
            while data := raw.read(_CHUNK_NBYTES):
                file.write(data)
        file.flush()
        if not folder.input.exists():
            file.publish()
        elif not file_fingerprint(folder.input).same_content(file_fingerprint(file.hidden)):
            raise InputChanged(
                f"other rows came through the pipe than when this job began; pipe the same ones in, use "
                f"`moedge jobs resume`, or move {folder.path} away to begin anew"
            )
    finally:
        file.discard()
    return folder.input


def seekable(path: Path, folder: JobFolder) -> BufferedReader:
    """The rows as plain bytes, from the first one on; an unpacked copy has no name and goes with the process."""
    raw = open_regular(path)
    text = plain(raw)
    if text is raw:
        return raw
    unpacked = tempfile.TemporaryFile(dir=folder.path)  # noqa: SIM115 (the caller closes it)
    with raw:
        shutil.copyfileobj(text, unpacked, _CHUNK_NBYTES)
    unpacked.seek(0)
    return cast(BufferedReader, unpacked)
