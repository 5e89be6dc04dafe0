"""`moedge report`: one HTML page about a job."""

from pathlib import Path
from typing import Annotated

import typer

from ...cli.face import own_file

JOB = Annotated[str, typer.Argument(metavar="JOB", help="Job id (or its beginning), job folder, or output file.")]
OUTPUT = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        callback=own_file,
        help="File to write; by default, the output's name with .report.html.",
    ),
]


def report(job: JOB, output: OUTPUT = None) -> None:
    """Write a page about a job of `moedge batch` or `moedge docs`: charts, failures, settings. It loads nothing."""
    from ...face import find_job, find_rounds, own_name, write_atomically
    from .job_report import JobReport
    from .page import page

    documents = find_rounds(job)
    found = JobReport.of_batch(find_job(job)) if documents is None else JobReport.of_documents(documents)
    path = output or found.output.with_suffix(".report.html")
    own_file(path)
    write_atomically(path, page(found).encode(), own_name(path))
    print(path)
