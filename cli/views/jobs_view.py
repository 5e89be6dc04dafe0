"""Shows jobs on the terminal: a table of all of them, and one in detail."""

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...formatting import escape_controls
from ...runtime.jobs.status import JobStatus, ListedJob, RoundsJob

# For scripts that read the table, which has as many lines as there are jobs.
_WIDE = 1000
_COLUMNS = ("ID", "STATUS", "DONE", "FAILED", "STARTED", "MODEL", "OUTPUT")
# In this order, where a terminal is too narrow.
_LEFT_OUT = ("MODEL", "STARTED", "FAILED")
_PADDING, _LEAST_OUTPUT = 2, 12
# Facts of a job that are hashes of files.
_HASHES = ("model", "tokenizer")


def print_jobs(jobs: Sequence[ListedJob], width: int | None = None) -> None:
    """Prints nothing but a sentence if there are none. Columns that do not fit `width` are left out.

    Without a `width` it is that of the terminal; elsewhere nothing is left out.
    """
    if not jobs:
        print("no jobs", file=sys.stderr)
        return
    now = datetime.now()
    console = Console(width=width or (None if sys.stdout.isatty() else _WIDE), highlight=False, markup=False)
    rows = [dict(zip(_COLUMNS, map(escape_controls, _cells(status, now)), strict=True)) for status in jobs]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) + _PADDING for name in _COLUMNS}
    for name in _LEFT_OUT:
        if sum(widths.values()) - widths["OUTPUT"] + _LEAST_OUTPUT > console.width:
            del widths[name]
    output = console.width - sum(widths.values()) + widths["OUTPUT"]
    table = Table(box=None, padding=(0, _PADDING, 0, 0), pad_edge=False, header_style="")
    for name in widths:
        table.add_column(name, justify="right" if name in ("DONE", "FAILED") else "left", no_wrap=True)
    for row in rows:
        # The end of a path says more than its beginning.
        path = row["OUTPUT"]
        row["OUTPUT"] = path if len(path) <= output else f"\u2026{path[1 - output :]}"
        table.add_row(*(row[name] for name in widths))
    console.print(table)


def _cells(status: ListedJob, now: datetime) -> tuple[str, ...]:
    counts = status.counts
    done = f"{counts.rows:,}/{status.num_rows:,}"
    started = age((now - status.created).total_seconds())
    # Relative to the current folder, if the file is in it.
    return (
        status.job_id,
        str(status.phase),
        done,
        f"{counts.failed:,}",
        started,
        _model(status),
        str(status.output.relative_to(Path.cwd())) if status.output.is_relative_to(Path.cwd()) else str(status.output),
    )


def _model(status: ListedJob) -> str:
    """The hub id, or the name of the folder."""
    name = status.model
    return Path(name).name if name.startswith((".", "/", "~")) else name


def age(seconds: float) -> str:
    """`12 s ago`, `5 min ago`, `3 h ago`, `2 days ago`."""
    for limit, size, unit in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit:
            return f"{max(0, int(seconds // size))} {unit} ago"
    days = int(seconds // 86_400)
    return f"{days} day{'' if days == 1 else 's'} ago"


def print_documents(job: RoundsJob) -> None:
    """The same for all rounds of a job over documents."""
    counts, phase = job.counts, str(job.phase) + (f" ({job.reason})" if job.reason else "")
    lines = {
        "job": f"{job.job_id}, {phase}",
        "rounds": f"{len(job.rounds)}",
        "rows": f"{counts.ok:,} answered, {counts.failed:,} failed, {job.num_rows - counts.rows:,} to do",
        "finish reasons": _by_name(counts.finish_reasons),
        "errors": _by_name(counts.codes),
        "tokens": f"{counts.generated_tokens:,} generated, {counts.prompt_tokens:,} prompt",
        "model": job.model,
        "documents": job.summary.get("folder", ""),
        "output": job.output,
        "folder": job.path,
    }
    chosen = {name: value for name, value in job.question.items() if value not in (None, "", [], 0)}
    _print_facts({**lines, **chosen})


def _print_facts(facts: Mapping[str, object]) -> None:
    # Names of models and paths are other people's.
    for label, text in facts.items():
        print(escape_controls(f"{label:22} {text}"))


def print_job(status: JobStatus) -> None:
    """One fact per line; names first, fingerprints last."""
    counts, opened = status.counts, status.state.opened
    identity = dict(opened["identity"])
    lines = {
        "job": f"{status.job_id}, {status.phase}" + (f" ({status.reason})" if status.reason else ""),
        "rows": f"{counts.ok:,} answered, {counts.failed:,} failed, {status.num_rows - counts.rows:,} to do",
        "finish reasons": _by_name(counts.finish_reasons),
        "errors": _by_name(counts.codes),
        "tokens": f"{counts.generated_tokens:,} generated, {counts.prompt_tokens:,} prompt",
        "model": opened["request"]["model"],
        "input": opened["request"]["input"],
        "output": status.output,
        "folder": status.folder.path,
    }
    hashes = {f"{name} fingerprint": identity.pop(name) for name in _HASHES if name in identity}
    # Settings that nobody set are left out: a journal keeps them all.
    chosen = {name: value for name, value in identity.items() if value not in (None, "", [])}
    _print_facts({**lines, **chosen, **hashes})


def _by_name(counts: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items()) or "none"
