"""A job's folder beside its output: the journal, what belongs to it, and the lock that one process at a time holds."""

import fcntl
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import ClassVar, cast

from ...offload.atomic_file import AtomicFile, write_atomically
from ..rows.preflight import file_fingerprint
from ..rows.reader import STDIN, open_input, open_regular, plain
from ..rows.tables import InputFormat, convert
from ..settings.errors import InputChanged, InputUnreadable, JobInUse, OutputRefused


@dataclass(frozen=True, slots=True)
class JobFolder:
    """`OUT`'s stem + `.job`; every file in it may be read by hand, none may be edited."""

    ALIVE: ClassVar[str] = "alive.*"
    path: Path

    def alive(self, pid: int) -> Path:
        """Exists while a process runs rows; every exit but a kill removes it."""
        return self.path / self.ALIVE.replace("*", str(pid))

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def runs(self) -> Path:
        """How its runs went, for a report."""
        return self.path / "runs.jsonl"

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    @property
    def input(self) -> Path:
        """Rows that came through a pipe."""
        return self.path / "input"

    @property
    def rows(self) -> Path:
        """The rows of an input that is not JSON lines, converted to them."""
        return self.path / "rows.jsonl"

    @property
    def rows_of(self) -> Path:
        """Of which file `rows` were made."""
        return self.path / "rows.json"

    @property
    def trace(self) -> Path:
        """The file for the stacks after a fatal signal."""
        return self.path / "fatal"

    @property
    def stacks(self) -> Path:
        """The file for the stacks of a run that stalled."""
        return self.path / "stacks"

    @property
    def cancel(self) -> Path:
        """Exists while somebody asks the running process to stop."""
        return self.path / "cancel"

    def unfinished(self, name: str) -> Path:
        """The temporary file of an output until its rename."""
        return self.path / f"{name}.tmp"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def begun(self) -> bool:
        return self.journal.is_file()

    @property
    def locked(self) -> bool:
        """Whether a process is running the job now."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def make(self) -> None:
        """Raises OutputRefused where it cannot be."""
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            # One look: another process that begins here may remove it and make it again at any time, which whoever
            # opens the lock sees.
            if _is_file(self.path):
                raise OutputRefused(f"{self.path} is a file, wanted a folder; choose another output name") from None
        except OSError as error:
            raise OutputRefused(
                f"{self.path} cannot be created ({error.strerror}); choose another output name, or move it away"
            ) from None
        if self.path.is_symlink():
            raise OutputRefused(f"{self.path} is a link; a job's folder must be its own. Choose another output name")

    def remove_unbegun(self) -> None:
        """Removes the folder of a job that was refused before its first record."""
        if not self.begun:
            for file in (self.lock, self.input, self.rows, self.rows_of):
                file.unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()


def _is_file(path: Path) -> bool:
    """Whether something is there that is neither a folder nor a link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode)


class JobLock:
    """Held from construction to `close`; the kernel drops it with the process, so none goes stale."""

    def __init__(self, folder: JobFolder) -> None:
        """Raises JobInUse, naming who has it, and OSError."""
        while (descriptor := _open_lock(folder)) is None:
            pass
        self._descriptor = descriptor
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        except OSError as error:
            self.close()
            raise OSError(error.errno, error.strerror, str(folder.lock)) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._descriptor)


def _open_lock(folder: JobFolder) -> int | None:
    """The descriptor that holds the lock; None where the folder went away meanwhile, as that of a refused job does."""
    folder.make()
    try:
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.stat(folder.lock)):
            return descriptor
    except FileNotFoundError:
        pass
    except BlockingIOError:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise JobInUse(
            f"{folder.path} is in use by another process ({_holder(holder)}); wait until it has ended, "
            "or stop it with `moedge jobs cancel`"
        ) from None
    os.close(descriptor)
    return None


def _holder(text: str) -> str:
    """`process 12 on host box`, of the content of a lock."""
    try:
        found = json.loads(text)
        return f"process {found['pid']} on {found['host']}"
    except (ValueError, KeyError, TypeError):
        return "just started"


def now_text() -> str:
    """ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


_CHUNK_NBYTES = 1 << 20


def regular_input(path: Path, folder: JobFolder) -> Path:
    """The file to read rows from: `path`, or what came through standard input, kept for as long as the job is.

    Raises InputChanged where the job was started with other rows from the pipe.
    """
    if os.fspath(path) != STDIN:
        return path
    if sys.stdin.isatty():
        raise InputUnreadable("standard input is a terminal; give a file, or pipe one in")
    with AtomicFile(folder.input) as file:
        with open_input(path) as raw:
            while data := raw.read(_CHUNK_NBYTES):
                file.write(data)
        file.flush()
        if not folder.input.exists():
            file.publish()
        elif not file_fingerprint(folder.input).same_content(file_fingerprint(file.hidden)):
            raise InputChanged(
                "the rows from the pipe differ from those that this job was started with; pipe in the same rows, use "
                "`moedge jobs resume`, or start over with --overwrite"
            )
    return folder.input


def json_lines(path: Path, kind: InputFormat, folder: JobFolder) -> tuple[Path, str | None]:
    """The file to read rows from: `path`, or its rows as JSON lines, converted once and kept for as long as the job is;
    and the encoding of its text, None for UTF-8.

    A file that is what it was is not converted again. Raises InputRefused, InputUnreadable, MissingExtra.
    """
    if kind is InputFormat.JSONL:
        return path, None
    found = file_fingerprint(path)
    made_of = {"format": kind, "sha256": found.sha256, "nbytes": found.nbytes}
    if folder.rows.is_file() and folder.rows_of.is_file():
        kept = json.loads(folder.rows_of.read_bytes())
        if kept == made_of | {"encoding": kept.get("encoding")}:
            return folder.rows, kept["encoding"]
    # First: a kill between the two must not leave the mark of one file beside the rows of another.
    folder.rows_of.unlink(missing_ok=True)
    with AtomicFile(folder.rows) as file:
        encoding = convert(path, kind, file, "standard input" if path == folder.input else None)
        file.publish()
    write_atomically(folder.rows_of, json.dumps(made_of | {"encoding": encoding}).encode())
    return folder.rows, encoding


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
