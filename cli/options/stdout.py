"""A job whose answers go to standard output: its file is in a folder of its own, by which the same command resumes it.

Whoever read the rows that were finished before is gone: they are written once more.
"""

import json
import os
import shutil
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

from platformdirs import user_state_path

from ...runtime.jobs.request import BatchRequest
from ...runtime.rows.reader import STDIN
from ...runtime.settings.errors import OutputRefused

STDOUT = "-"
_NAME = "answers.jsonl"


def into_folder(request: BatchRequest, folder: Path | None) -> BatchRequest:
    """The request with a file in `folder`, or in one of the user's state that belongs to this very request.

    Raises OutputRefused where the folder cannot be made.
    """
    chosen = folder or user_state_path("moedge") / "streams" / _name(request)
    try:
        chosen.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OutputRefused(f"job-dir {chosen} cannot be created: {error.strerror}; choose another") from None
    return replace(request, output=chosen / _NAME, follow=False)


def _name(request: BatchRequest) -> str:
    """Rows from a pipe are known to one process only."""
    known = json.dumps(replace(request, output=Path(STDOUT)).as_json(), sort_keys=True)
    alone = f":{os.getpid()}" if os.fspath(request.input) == STDIN else ""
    return blake2b(f"{known}{alone}".encode(), digest_size=8).hexdigest()


def is_kept(output: Path) -> bool:
    """Whether the job is there after its end: not where only standard output has its answers."""
    return not output.parent.is_relative_to(user_state_path("moedge") / "streams")


def remove_finished(request: BatchRequest) -> None:
    """The folder of a job whose answers were all read; not one that the user named."""
    if not is_kept(request.output):
        shutil.rmtree(request.output.parent, ignore_errors=True)
