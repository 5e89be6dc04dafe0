"""Where the jobs of this user are: a link per job in the user's state folder. Losing it costs nothing but `jobs ls`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from platformdirs import user_state_path

from .folder import JobFolder
from .refusals import JobNotFound

_SUFFIX = ".job"


def register(job_id: str, folder: JobFolder) -> None:
    """Leaves nothing where the state folder cannot be written: the job itself is beside its output."""
    with suppress(OSError):
        root = _root()
        root.mkdir(parents=True, exist_ok=True)
        link = root / job_id
        link.unlink(missing_ok=True)
        link.symlink_to(folder.path.resolve())


def jobs(here: Path | None = None) -> Iterator[JobFolder]:
    """Jobs that were begun by this user, or lie in the folder `here`; links to jobs that are gone are removed."""
    found: dict[Path, JobFolder] = {}
    for link in sorted(_root().glob("*")):
        folder = JobFolder(Path(os.path.realpath(link)))
        if folder.begun:
            found[folder.path] = folder
        else:
            link.unlink(missing_ok=True)
    for path in sorted((here or Path.cwd()).glob(f"*{_SUFFIX}")):
        folder = JobFolder(path.resolve())
        if folder.begun:
            found[folder.path] = folder
    yield from found.values()


def find_job(name: str) -> JobFolder:
    """By its id or the beginning of it, by its folder, or by its output. Raises JobNotFound."""
    for path in (Path(name), Path(name).with_suffix(_SUFFIX) if Path(name).name else Path(name)):
        if JobFolder(path).begun:
            return JobFolder(path.resolve())
    matching = {
        JobFolder(Path(os.path.realpath(link))).path
        for link in _root().glob(f"{_escaped(name)}*")
        if JobFolder(Path(os.path.realpath(link))).begun
    }
    if len(matching) == 1:
        return JobFolder(matching.pop())
    found = "several jobs begin with it" if matching else "it is no id, no job's folder and no output of a job"
    raise JobNotFound(f"{name}: {found}; `moedge jobs ls` lists them")


def _escaped(name: str) -> str:
    return "".join(character for character in name if character.isalnum()) or "?" * 99


def _root() -> Path:
    return user_state_path("moedge") / "jobs"
