"""How a job stands, read from its folder without disturbing whoever works on it. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from .folder import JobFolder, is_locked
from .journal.state import JobState, read_state


class Standing(StrEnum):
    """`interrupted` is a process that ended without a word: killed, crashed, or the power went."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"


# In the words of OpenAI's batch object, which knows no job that rests.
_BATCH_STATUS = {
    Standing.RUNNING: "in_progress",
    Standing.CANCELLING: "cancelling",
    Standing.FINISHED: "completed",
    Standing.CANCELLED: "cancelled",
    Standing.STOPPED: "in_progress",
    Standing.INTERRUPTED: "in_progress",
}


@dataclass(frozen=True, slots=True)
class JobStatus:
    folder: JobFolder
    state: JobState
    standing: Standing

    @classmethod
    def read(cls, folder: JobFolder) -> JobStatus:
        """Raises BadJournal, OtherVersion."""
        # The lock first: who finishes in between is seen as finished.
        locked = is_locked(folder)
        state = read_state(folder.journal)
        return cls(folder, state, _standing(folder, state, locked))

    @property
    def job_id(self) -> str:
        return str(self.state.opened["id"])

    @property
    def output(self) -> Path:
        return Path(self.state.opened["request"]["output"])

    @property
    def reason(self) -> str | None:
        """Why the last process stopped."""
        return None if self.state.stopped is None else str(self.state.stopped["reason"])

    def batch_object(self) -> dict[str, Any]:
        """OpenAI's batch object; what it has no word for is under `moedge`."""
        opened, counts, finished = self.state.opened, self.state.counts, self.standing is Standing.FINISHED
        endpoints = [name for name, number in opened["endpoints"].items() if number]
        return {
            "id": self.job_id,
            "object": "batch",
            "endpoint": endpoints[0] if len(endpoints) == 1 else "mixed",
            "input_file_id": opened["request"]["input"],
            "completion_window": "24h",
            "status": _BATCH_STATUS[self.standing],
            "output_file_id": str(self.output) if finished else None,
            "error_file_id": str(self.output.with_suffix(".errors.jsonl")) if finished and counts.failed else None,
            "created_at": _seconds(opened["created_at"]),
            "in_progress_at": _at(self.state.started),
            "completed_at": _at(self.state.exported) if finished else None,
            "cancelled_at": _at(self.state.cancelled),
            "request_counts": {"total": self.state.num_rows, "completed": counts.ok, "failed": counts.failed},
            "usage": _usage(counts.prompt_tokens, counts.generated_tokens),
            "moedge": {
                "state": self.standing,
                "reason": self.reason,
                "folder": str(self.folder.path),
                "identity": opened["identity"],
                "suspects": sorted(row for row, each in self.state.suspects.items() if each.isolated),
            },
        }


def _standing(folder: JobFolder, state: JobState, locked: bool) -> Standing:
    if locked:
        return Standing.CANCELLING if folder.cancel.exists() else Standing.RUNNING
    if state.finished and state.export_is_current:
        return Standing.FINISHED
    if state.cancelled is not None:
        return Standing.CANCELLED
    return Standing.INTERRUPTED if state.running else Standing.STOPPED


def _usage(prompt: int, generated: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }


def _at(record: Mapping[str, Any] | None) -> int | None:
    return None if record is None else _seconds(record["at"])


def _seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())
