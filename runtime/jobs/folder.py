"""A job's folder beside its output: the journal, what belongs to it, and the lock that one process at a time holds."""

import fcntl
import json
import os
import socket
import stat
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ...offload.atomic_file import try_lock
from ..settings.errors import JobInUse, OutputRefused


class JobFolder:
    """`OUT`'s stem + `.job`; every file in it may be read by hand, none may be edited."""

    ALIVE = "alive.*"

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        # How its runs went, for a report.
        self.runs = path / "runs.jsonl"
        self.ballast = path / "ballast"
        # Rows that came through a pipe.
        self.input = path / "input"
        # The rows of an input that is not JSON lines, converted to them, and of which file they were made.
        self.rows = path / "rows.jsonl"
        self.rows_of = path / "rows.json"
        # The stacks after a fatal signal, and those of a run that stalled.
        self.trace = path / "fatal"
        self.stacks = path / "stacks"
        # Exists while somebody asks the running process to stop.
        self.cancel = path / "cancel"
        self.lock = path / "lock"

    def alive(self, pid: int) -> Path:
        """Exists while a process runs rows; every exit but a kill removes it."""
        return self.path / self.ALIVE.replace("*", str(pid))

    def unfinished(self, name: str) -> Path:
        """The temporary file of an output until its rename."""
        return self.path / f"{name}.tmp"

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
        return try_lock(folder.lock, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX, 0o600)
    except FileNotFoundError:
        return None
    except BlockingIOError:
        raise JobInUse(
            f"{folder.path} is in use by another process ({_holder(folder.lock)}); wait until it has ended, "
            "or stop it with `moedge jobs cancel`"
        ) from None


def _holder(lock: Path) -> str:
    """`process 12 on host box`."""
    try:
        found = json.loads(lock.read_bytes())
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "just started"


def now_text() -> str:
    """ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
