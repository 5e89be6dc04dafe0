"""`moedge jobs`: list, inspect, resume, cancel and export jobs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from ..runtime.settings.option import Option
from ..runtime.settings.options import BudgetOptions, ClusterOptions, EnergyOptions, StoppingOptions
from .batch import job_view
from .options import options
from .options.configured_command import ConfiguredCommand
from .options.options import ViewOptions, new_file

if TYPE_CHECKING:
    from ..runtime.jobs.folder import JobFolder

app = typer.Typer(help="List, inspect, resume, cancel and export jobs.", no_args_is_help=True)
JOB = Annotated[str, typer.Argument(metavar="JOB", help="Job id (or its beginning), job folder, or output file.")]
JSON = Annotated[bool, typer.Option("--json", help="Print OpenAI's batch object.")]


def _batch_job(name: str) -> JobFolder:
    """The folder of a batch job. Raises JobNotFound, and JobMismatch for a job over documents."""
    from ..runtime.jobs.status import find_job, find_rounds
    from ..runtime.settings.errors import JobMismatch

    documents = find_rounds(name)
    if documents is not None:
        raise JobMismatch(
            f"{name} is a job over documents: its `moedge docs` command resumes it (--failed runs failed rows again, "
            f"--cut continues cut answers), Ctrl-C stops it, and `rm -r {documents.path}` removes it"
        )
    return find_job(name)


@app.command()
def ls(as_json: JSON = False) -> None:
    """List your jobs and those in this folder, with their progress."""
    from ..runtime.jobs.folder import JobFolder
    from ..runtime.jobs.status import JobStatus, RoundsJob, listed_jobs
    from ..runtime.settings.errors import BadJournal, JobNotFound, OtherVersion
    from .views.jobs_view import print_jobs

    found: list[JobStatus | RoundsJob] = []
    for each in listed_jobs():
        try:
            found.append(JobStatus.read(each) if isinstance(each, JobFolder) else each.read())
        except (JobNotFound, FileNotFoundError):
            # Rounds of a question that another one replaced, or a job that is being removed.
            continue
        except (BadJournal, OtherVersion) as error:
            print(f"unreadable: {each.path}: {error}", file=sys.stderr)
    found.sort(key=lambda status: status.created, reverse=True)
    if not as_json:
        print_jobs(found)
    for status in found if as_json else ():
        print(json.dumps(status.batch_object()))


@app.command()
def show(job: JOB, as_json: JSON = False) -> None:
    """Show the state of a job and the settings it was started with."""
    from ..runtime.jobs.status import JobStatus, find_job, find_rounds
    from .views.jobs_view import print_documents, print_job

    documents = find_rounds(job)
    status = documents or JobStatus.read(find_job(job))
    if as_json:
        print(json.dumps(status.batch_object(), indent=2))
    elif isinstance(status, JobStatus):
        print_job(status)
    else:
        print_documents(status)


class ResumeCommand(BudgetOptions, ClusterOptions, StoppingOptions, EnergyOptions, ViewOptions, total=False):
    """The options of `moedge jobs resume`."""

    failed: Annotated[bool, Option("Run failed rows again.", False, common=True)]
    cut: Annotated[bool, Option("Continue rows that were cut at max_tokens; needs --max-tokens.", False, common=True)]
    max_tokens: Annotated[int | None, Option("New max_tokens of the rows that --cut continues.", low=1, common=True)]


@app.command(cls=ConfiguredCommand)
@options.command(ResumeCommand)
def resume(job: JOB, **given: Unpack[ResumeCommand]) -> None:
    """Resume a job with its original settings, under the budgets given here, on this machine or on a cluster."""
    options.say_device(given["gpu_mem"], given["output_format"] == "human" and not given["quiet"])
    from ..runtime.jobs.journal.state import read_state
    from ..runtime.jobs.request import ResumeOptions, budgets_of, cluster_request, limits_of, resumed

    if given["cut"] != (given["max_tokens"] is not None):
        raise typer.BadParameter("--cut and --max-tokens go together: --cut --max-tokens 1024")
    cluster = cluster_request(given["ray"], given["ray_workers"])
    folder = _batch_job(job)
    drift = tuple(given["accept_drift"] or ())
    resume = ResumeOptions(failed=given["failed"], drift=drift, cut_to=given["max_tokens"])
    opened = read_state(folder.journal).opened
    request = resumed(opened, folder.input, budgets_of(given), limits_of(given), resume)
    code = job_view(given).run(replace(request, cluster=cluster), given["summary"])
    raise typer.Exit(code)


@app.command()
def cancel(job: JOB) -> None:
    """Stop a job after its current pass. Finished rows are kept; only `moedge jobs resume` continues it."""
    from ..runtime.jobs.status import cancel as cancel_job

    folder = _batch_job(job)
    print(f"{folder.path}: {cancel_job(folder)}")


@app.command()
def rm(
    job: JOB,
    force: Annotated[bool, typer.Option("--force", help="Also remove a job that is not finished.")] = False,
) -> None:
    """Remove the folder of a job. Its output files stay."""
    from ..runtime.jobs.status import remove

    print(remove(_batch_job(job), force))


@app.command()
def export(
    job: JOB,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            callback=new_file,
            help="File to write; by default, the output's name with .partial.jsonl.",
        ),
    ] = None,
) -> None:
    """Write all finished rows, answered or failed; works while the job runs."""
    from ..runtime.jobs.status import export_now

    print(export_now(_batch_job(job), output))


@app.command()
def repair(job: JOB) -> None:
    """Repair a damaged journal: intact answers are kept, the other rows are run again."""
    from ..runtime.jobs.status import repair_journal
    from ..runtime.settings.errors import counted

    repaired = repair_journal(_batch_job(job))
    kept, lost = counted(repaired.rows, "answer"), counted(repaired.lost, "record")
    print(f"kept {kept}, lost {lost}; the old journal is {repaired.damaged}")
