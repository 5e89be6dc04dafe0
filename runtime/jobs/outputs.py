"""Where a job writes: OUT and the two names derived from it, checked before the job starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..settings.errors import OutputExists, OutputRefused


@dataclass(frozen=True, slots=True)
class OutputPaths:
    """`out` holds answered rows, `errors` the others; `partial` holds both when a job stops early."""

    out: Path

    @property
    def errors(self) -> Path:
        return self.out.with_suffix(".errors.jsonl")

    @property
    def partial(self) -> Path:
        return self.out.with_suffix(".partial.jsonl")

    @property
    def job(self) -> Path:
        """The job's folder: one for all outputs whose other names would be the same."""
        return self.out.with_suffix(".job")

    def refuse_existing(self) -> None:
        for path in (self.out, self.errors):
            # A dangling link counts: renaming over it would destroy it.
            if os.path.lexists(path):
                raise OutputExists(f"{path} exists and is not overwritten; move it away or choose another output name")


def claim_output(
    out: str | os.PathLike[str],
    input_path: str | os.PathLike[str],
    model_path: str | os.PathLike[str] | None = None,
) -> OutputPaths:
    """Raises `OutputRefused`, `OutputExists` if something is there that no job has begun. Writes nothing."""
    try:
        return _claim(OutputPaths(Path(out)), input_path, model_path)
    except (OSError, ValueError) as error:
        raise OutputRefused(f"{out} cannot be an output ({error}); choose another name") from None


def _claim(
    paths: OutputPaths, input_path: str | os.PathLike[str], model_path: str | os.PathLike[str] | None
) -> OutputPaths:
    out = paths.out
    if paths.out.is_dir():
        raise OutputRefused(f"{out} is a folder; give a file name in it, such as {paths.out / 'out.jsonl'}")
    if paths.out.suffix == ".gz":
        raise OutputRefused(f"{out}: output is not compressed; leave .gz away")
    if out.suffix == ".job":
        raise OutputRefused(f"{out}: .job is what the folder of a job is called; choose another output name")
    _check_folder(out.parent, model_path)
    _check_names(paths)
    for path in (paths.out, paths.errors, paths.partial):
        if path.exists() and Path(input_path).exists() and path.samefile(input_path):
            raise OutputRefused(f"{path} is the input, which would be overwritten; choose another output name")
    if not (paths.job / "journal").is_file():
        paths.refuse_existing()
    return paths


def _check_names(paths: OutputPaths) -> None:
    """All of them now: a name that is too long must not show when the work is done."""
    if "\0" in paths.out.name:
        raise OutputRefused(f"{paths.out.name!a} cannot be an output: it has a NUL in it; choose another name")
    limit = os.pathconf(paths.out.parent, "PC_NAME_MAX")
    for path in (paths.out, paths.errors, paths.partial):
        if len(os.fsencode(path.name)) > limit:
            raise OutputRefused(f"{path.name} has more than {limit} bytes; choose a shorter output name")


def _check_folder(folder: Path, model_path: str | os.PathLike[str] | None) -> None:
    if not folder.is_dir():
        raise OutputRefused(f"the folder {folder} does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputRefused(f"the folder {folder} is not writable; choose another output name")
    if model_path is not None and folder.resolve().is_relative_to(Path(model_path).resolve()):
        raise OutputRefused(f"the folder {folder} belongs to the model; write the output elsewhere")


class NewFile:
    """Written under another name on the same disk; `publish` gives it its own, replacing what has it."""

    def __init__(self, path: Path, hidden: Path | None = None) -> None:
        self.path = path
        # The process id keeps a second job for the same name from writing into this one's file.
        self.hidden = hidden or path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file = self.hidden.open("w+b")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def flush(self) -> None:
        """What was written can be read under the hidden name."""
        self._file.flush()

    def publish(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.hidden.replace(self.path)
        _sync_folder(self.path.parent)

    def discard(self) -> None:
        self._file.close()
        self.hidden.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """A rename is on disk only when the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
