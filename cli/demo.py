"""`moedge demo`: runs a whole job with the bundled small model and a few prompts."""

from __future__ import annotations

import json
import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import typer

from .options import options


def demo() -> None:
    """Run a batch job on the bundled 5 M parameter mixture of experts."""
    options.say_device()
    from ..runtime.jobs.request import BatchRequest
    from ..runtime.rows.row import Defaults
    from .views.job_view import JobView

    with as_file(files("moedge.demo")) as bundle, tempfile.TemporaryDirectory() as folder:
        prompts, output = bundle / "prompts.jsonl", Path(folder, "answers.jsonl")
        request = BatchRequest(str(bundle / "model"), prompts, output, defaults=Defaults(max_tokens=120))
        code = JobView(options.Progress.AUTO, quiet=False).run(request, None)
        _print_answers(prompts, output)
    raise typer.Exit(code)


def _print_answers(prompts: Path, answers: Path) -> None:
    from ..runtime.settings.formatting import escape_controls

    for question, answer in zip(prompts.open(), answers.open(), strict=True):
        print(f"\n> {json.loads(question)['messages'][-1]['content']}")
        print(escape_controls(json.loads(answer)["text"].strip()))
