"""Collects what a job has recorded: its journals, the logs of its runs, and the summary of a job over documents.

What was not recorded stays empty. Torch-free, and nothing is written.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from ...face import Counts, JobFolder, JobStatus, OutputPaths, RoundsJob

MOST_EXAMPLES = 3
_SETTINGS = ("quant", "kv", "dtype", "attention", "compute", "deterministic", "temperature", "max_tokens", "seed")


@dataclass(slots=True)
class LoggedRun:
    """One run of a job. `end` is empty where it was killed."""

    begin: Mapping[str, Any]
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    end: Mapping[str, Any] = field(default_factory=dict)


def read_runs(path: Path) -> list[LoggedRun]:
    """The runs in their order; a line that a kill cut off is left out."""
    runs: list[LoggedRun] = []
    for found in _records(path):
        record = found.pop("record", None)
        if record == "begin":
            runs.append(LoggedRun(found))
        elif runs and record == "sample":
            runs[-1].samples.append(found)
        elif runs and record == "end":
            runs[-1].end = found
    return runs


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with suppress(ValueError):
                found = json.loads(line)
                if isinstance(found, dict):
                    yield found


class Example(NamedTuple):
    row_id: str
    message: str


@dataclass(slots=True)
class Failures:
    """Failed rows of one code, and the first of them."""

    code: str
    count: int
    examples: list[Example] = field(default_factory=list)


class TimedValue(NamedTuple):
    """`seconds` of work of all runs, and a value at that time."""

    seconds: float
    value: float


@dataclass(slots=True)
class JobReport:
    """`runs` are those of the journals in their order. `documents` is the summary of a job over documents."""

    PHASES: ClassVar[tuple[str, ...]] = (
        "starting", "loading", "computing", "waiting for the disk", "waiting for the link to the GPU",
        "waiting for rows", "all else",
    )  # fmt: skip

    name: str
    output: Path
    model: str
    status: str
    created: str
    num_rows: int
    counts: Counts
    runs: list[LoggedRun]
    # Rows that were done before each run began, over all journals.
    rows_before: list[int]
    failures: list[Failures]
    settings: Mapping[str, Any]
    # The beginnings of some answers, by the ids of their rows.
    examples: Mapping[str, str]
    documents: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_batch(cls, folder: JobFolder) -> Self:
        """Raises BadJournal, OtherVersion."""
        status = JobStatus.read(folder)
        runs = read_runs(folder.runs)
        return cls(
            name=status.job_id,
            output=status.output,
            model=status.model,
            status=_status(status),
            created=f"{status.created:%Y-%m-%d %H:%M}",
            num_rows=status.num_rows,
            counts=status.counts,
            runs=runs,
            rows_before=[0] * len(runs),
            failures=[
                Failures(code, count, [_example(json.loads(done.line)) for done in first])
                for code, count, first in status.failures(MOST_EXAMPLES)
            ],
            settings=_settings(status.state.opened) | _kernels(runs),
            examples=status.examples(),
        )

    @classmethod
    def of_documents(cls, job: RoundsJob) -> Self:
        runs, before, done = list[LoggedRun](), list[int](), 0
        for each in job.rounds:
            found = read_runs(each.folder.runs)
            runs += found
            before += [done] * len(found)
            done += each.counts.rows
        return cls(
            name=job.job_id,
            output=job.output,
            model=job.model,
            status=_status(job),
            created=f"{job.created:%Y-%m-%d %H:%M}",
            num_rows=job.num_rows,
            counts=job.counts,
            runs=runs,
            rows_before=before,
            failures=list(_failures_in(job.output)),
            settings=_settings(job.rounds[0].state.opened)
            | _kernels(runs)
            | {k: v for k, v in job.question.items() if v},
            examples=job.summary.get("totals", {}).get("examples", {}),
            documents=job.summary if "totals" in job.summary else {},
        )

    def link(self, row_id: str) -> str | None:
        """The address of the document that a row is about, or of the archive or mail that it lies in; else None."""
        if (folder := self.documents.get("folder")) is None:
            return None
        path = Path(folder).parent / row_id if Path(folder).is_file() else Path(folder, row_id)
        # The rows of a document that is asked about in chunks are `path#1`, `path#2` and so on.
        ways = (path, path.with_name(path.name.rpartition("#")[0] or "#"), *path.parents)
        return next((each.as_uri() for each in ways if each.is_file()), None)

    @property
    def command(self) -> str | None:
        """The command line of the last run that had one."""
        return next((run.begin["command"] for run in reversed(self.runs) if run.begin.get("command")), None)

    @property
    def folder(self) -> str | None:
        """Where that command ran."""
        return next((run.begin["cwd"] for run in reversed(self.runs) if run.begin.get("command")), None)

    @property
    def summaries(self) -> list[Mapping[str, Any]]:
        """Of the runs that ended by themselves."""
        return [run.end["summary"] for run in self.runs if run.end]

    @property
    def seconds(self) -> float:
        """Of passes, over all runs."""
        return sum(map(_length, self.runs))

    def breaks(self) -> list[float]:
        """The seconds at which a run other than the first began."""
        return [begin for begin, _ in self._timed()][1:]

    def rows_over_time(self) -> list[TimedValue]:
        return [
            TimedValue(begin + sample["s"], before + sample["done"])
            for (begin, run), before in zip(self._timed(), self.rows_before, strict=True)
            for sample in run.samples
        ]

    def memory_over_time(self) -> list[TimedValue]:
        return [
            TimedValue(begin + sample["s"], sample["ram"]) for begin, run in self._timed() for sample in run.samples
        ]

    def rates(self, most: int = 120) -> list[TimedValue]:
        """Generated tokens per second, each over a part of the time; there are about `most` of them."""
        shortest, found = max(self.seconds / most, 1e-9), list[TimedValue]()
        for begin, run in self._timed():
            seconds = generated = 0.0
            for sample in run.samples:
                if sample["s"] - seconds >= shortest and sample["s"] > seconds:
                    rate = (sample["generated"] - generated) / (sample["s"] - seconds)
                    found.append(TimedValue(begin + (seconds + sample["s"]) / 2, rate))
                    seconds, generated = sample["s"], sample["generated"]
        return found

    def expected_rates(self) -> list[tuple[float, float, float]]:
        """(from, to, tokens per second) of the estimates that the runs began with."""
        return [
            (begin, begin + _length(run), run.begin["predicted_tok_s"])
            for begin, run in self._timed()
            if run.begin.get("predicted_tok_s") is not None
        ]

    @property
    def ram_budget(self) -> float | None:
        return max((run.begin.get("ram_budget") or 0 for run in self.runs), default=0) or None

    def phases(self) -> dict[str, float]:
        """Seconds by what a job did or waited for, over the runs that ended by themselves."""
        found = dict.fromkeys(self.PHASES, 0.0)
        for each in self.summaries:
            seconds = {name: each["seconds"].get(name) or 0.0 for name in ("start", "load", "generate", "total")}
            stalls = {name: value or 0.0 for name, value in each["stalls"].items()}
            waited = min(sum(stalls.values()), seconds["generate"])
            found["starting"] += seconds["start"]
            found["loading"] += seconds["load"]
            found["computing"] += seconds["generate"] - waited
            found["waiting for the disk"] += stalls.get("disk", 0.0)
            found["waiting for the link to the GPU"] += stalls.get("link", 0.0)
            found["waiting for rows"] += stalls.get("rows", 0.0)
            found["all else"] += max(0.0, 2 * seconds["total"] - sum(seconds.values()))
        return {name: seconds for name, seconds in found.items() if seconds > 0}

    def expert_use(self) -> list[list[int]]:
        """Tokens by layer and expert, of the last run that has counted them."""
        return next((run.end["experts"] for run in reversed(self.runs) if run.end.get("experts")), [])

    def _timed(self) -> Iterator[tuple[float, LoggedRun]]:
        """The runs, each with the seconds of those before it."""
        begin = 0.0
        for run in self.runs:
            yield begin, run
            begin += _length(run)


def _length(run: LoggedRun) -> float:
    return float(run.samples[-1]["s"]) if run.samples else 0.0


def _status(job: JobStatus | RoundsJob) -> str:
    return str(job.phase) if job.reason is None else f"{job.phase} ({job.reason})"


def _kernels(runs: Iterable[LoggedRun]) -> dict[str, Any]:
    """What computed in the last run that ended by itself: executor, attention, products."""
    found = [run.end["summary"].get("kernels") or {} for run in runs if run.end]
    return dict(found[-1]) if found else {}


def _settings(opened: Mapping[str, Any]) -> dict[str, Any]:
    identity = opened["identity"]
    return {name: identity[name] for name in _SETTINGS if identity.get(name) not in (None, "")}


def _failures_in(output: Path) -> Iterable[Failures]:
    """Of a job over documents: its error rows, or those that it has so far."""
    paths, found = OutputPaths(output), dict[str, Failures]()
    for path in (paths.errors, paths.partial):
        if not path.is_file() or (path == paths.errors and paths.partial.is_file()):
            continue
        with path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                if row.get("error"):
                    each = found.setdefault(row["error"]["code"], Failures(row["error"]["code"], 0))
                    each.count += 1
                    if len(each.examples) < MOST_EXAMPLES:
                        each.examples.append(_example(row))
    return sorted(found.values(), key=lambda each: -each.count)


def _example(row: Mapping[str, Any]) -> Example:
    """Of a row in the short form, or in OpenAI's."""
    error = row.get("error") or ((row.get("response") or {}).get("body") or {}).get("error") or {}
    return Example(str(row.get("custom_id") or row.get("id") or ""), str(error.get("message") or ""))
