"""The command `moedge`: its subcommands, and the exit codes of errors."""

import atexit
import gc
import os
import sys
import tempfile
import traceback
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ..computing import settle
from ..formatting import escape_controls
from ..offload.errors import ExitCode, exit_code_of
from ..offload.memory import refused_library, return_memory
from ..runtime.settings.applications import application
from .batch import batch, demo
from .bench import bench
from .check import check
from .config import app as config
from .jobs import app as jobs
from .models import app as models
from .options.configured_command import ConfiguredCommand
from .options.options import say
from .options.signals import Stopped, StopSignals
from .plan import plan
from .prepare import prepare
from .run import run


def _add(name: str, application_name: str, function: str, cls: type[ConfiguredCommand] | None) -> None:
    """Adds the command of an application, a function of its module `command`, unless the application is left out."""
    if (module := application(application_name, "command")) is not None:
        app.command(name, cls=cls)(getattr(module, function))


# Help and usage errors without boxes: where no colours are wanted, and where a terminal has none.
_PLAIN = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") in ("dumb", "unknown")

app = typer.Typer(
    name="moedge",
    help="Batch inference for language models that do not fit the machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None if _PLAIN else "markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(cls=ConfiguredCommand)(batch)
_add("docs", "documents", "docs", ConfiguredCommand)
app.command(cls=ConfiguredCommand)(run)
_add("serve", "serve", "serve", ConfiguredCommand)
app.command(cls=ConfiguredCommand)(prepare)
app.command(cls=ConfiguredCommand)(plan)
_add("doctor", "doctor", "doctor", ConfiguredCommand)
app.command(cls=ConfiguredCommand)(bench)
app.command(cls=ConfiguredCommand)(check)
_add("eval", "evaluation", "evaluate", ConfiguredCommand)
app.command()(demo)
_add("report", "reports", "report", None)
app.add_typer(config, name="config")
app.add_typer(jobs, name="jobs")
app.add_typer(models, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moedge {version('moedge')}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Runs the command line; an expected error prints one message; a bug saves its traceback."""
    settle()
    return_memory()
    # The collector would walk through every object of torch for a second, to free what ends with the process.
    atexit.register(gc.freeze)
    try:
        # Before a command imports what takes long; a job and `prepare` say more about how they stopped.
        with StopSignals():
            app()
    except Stopped as stopped:
        sys.exit(stopped.code)
    except Exception as error:
        code, refusal = exit_code_of(error), refused_library(error)
        if refusal:
            code = ExitCode.DOES_NOT_FIT
            say(f"moedge: {refusal}")
        elif code is ExitCode.BUG:
            say(f"moedge: internal error: {error!r}; please report it, with the traceback in {_save_traceback()}")
        elif isinstance(error, OSError):
            named = f": {error.filename}" if error.filename else ""
            say(escape_controls(f"moedge: {error.strerror or error}{named}; {code.advice}"))
        elif isinstance(error, (MemoryError, SystemError)):
            say(escape_controls(f"moedge: memory ran out ({error!r}); {code.advice}"))
        else:
            # A name in it may be the model's, or a row's.
            say(escape_controls(f"moedge: {error}"))
        sys.exit(code)


def _save_traceback() -> Path:
    """Writes the traceback into the user's logs, or into a temporary file where they cannot be written."""
    from platformdirs import user_log_path

    text = traceback.format_exc()
    try:
        path = user_log_path("moedge", ensure_exists=True) / "last-bug.txt"
        path.write_text(text)
    except OSError:
        with tempfile.NamedTemporaryFile("w", prefix="moedge-bug-", suffix=".txt", delete=False) as file:
            file.write(text)
        path = Path(file.name)
    return path


if __name__ == "__main__":
    main()
