"""The errors of the runtime. Every message says what was found, what was expected and what to do."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import requires, version
from importlib.util import find_spec
from typing import Any

from ...offload.errors import ExitCode, MissingPackage, MoedgeError


class UnsupportedModel(MoedgeError):
    """The checkpoint is one that moedge cannot run (yet), or one that it must not touch."""

    exit_code = ExitCode.MODEL


class SettingError(MoedgeError):
    """A requested setting cannot be applied to this model or machine."""

    exit_code = ExitCode.DOES_NOT_FIT


class BadArgument(MoedgeError, ValueError):
    """An argument of the Python API has a value, or a combination of values, that makes no sense."""

    exit_code = ExitCode.USAGE


class EngineUnavailable(MoedgeError, RuntimeError):
    """The engine was closed, or another call is using it."""

    exit_code = ExitCode.USAGE


class WrongNumbers(MoedgeError):
    """Not even torch computes right numbers on this machine."""

    exit_code = ExitCode.ENVIRONMENT


class OverBudget(MoedgeError):
    """More memory was used than the budget allows, although the work was finished: `result` is what it gave."""

    exit_code = ExitCode.GAVE_OUT

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


class DoesNotFit(MoedgeError):
    """The model or the job needs more memory than it was given."""

    exit_code = ExitCode.DOES_NOT_FIT


class MemoryGaveOut(MoedgeError):
    """Memory ran out in spite of the plan, and no fallback is left."""

    exit_code = ExitCode.GAVE_OUT


class ModelNotFound(MoedgeError):
    """There is no checkpoint under that name, here or on the hub."""

    exit_code = ExitCode.MODEL


class MissingExtra(MissingPackage):
    """A package of an optional extra is needed and not installed."""

    def __init__(self, needs: str, extra: str, otherwise: str = "") -> None:
        """`needs` is half a sentence ("zstd needs zstandard"), `extra` a name of pyproject.toml's."""
        super().__init__(f"{needs}, which is not installed: {install_line(extra)}{otherwise}")


def install_line(extra: str) -> str:
    """The command that installs what an extra needs, wherever moedge itself was installed from."""
    # What `uv tool install` makes has no pip.
    command = ["pip", "install"] if find_spec("pip") else ["uv", "pip", "install", "--python", sys.executable]
    return shlex.join([*command, *_needed(extra)])


def _needed(extra: str) -> Iterator[str]:
    """The requirements of an extra without their markers; for an extra that it names, those of that one."""
    # Every command imports this file.
    from packaging.requirements import Requirement

    for each in map(Requirement, requires("moedge") or ()):
        if not (
            each.marker is not None
            and each.marker.evaluate({"extra": extra})
            and not each.marker.evaluate({"extra": ""})
        ):
            continue
        if each.name == "moedge":
            for name in sorted(each.extras):
                yield from _needed(name)
        else:
            extras = f"[{','.join(sorted(each.extras))}]" if each.extras else ""
            yield f"{each.name}{extras}{each.specifier}"


class OldTransformers(UnsupportedModel):
    """The model needs a newer transformers than the one that is installed."""

    exit_code = ExitCode.ENVIRONMENT


def require_transformers(release: str, subject: str) -> None:
    """Raises OldTransformers if the installed one is older than `release`; `subject` is what needs it."""
    from packaging.version import Version

    found = version("transformers")
    if Version(found) < Version(release):
        raise OldTransformers(
            f"{subject} needs transformers {release} or newer, and {found} is installed: "
            f"pip install 'transformers>={release}'"
        )


class ClusterFailed(MoedgeError):
    """No worker of a cluster can compute the rows of a job, or the cluster cannot be reached."""

    exit_code = ExitCode.ENVIRONMENT


class TokenizerError(MoedgeError, ValueError):
    """The model folder has no tokenizer that moedge can use faithfully: nothing can run."""

    exit_code = ExitCode.MODEL


class PromptError(MoedgeError, ValueError):
    """The text or the messages of one prompt cannot be turned into token ids; other prompts are not affected."""

    exit_code = ExitCode.INPUT


class TemplateError(PromptError):
    """The chat template raised, ran too long, wrote too much or took its process down."""


class InputUnreadable(MoedgeError):
    """The input is missing, no regular file, or not permitted."""

    exit_code = ExitCode.INPUT


class InputRefused(MoedgeError):
    """A line of the input is malformed and the job is strict; the message is the report of the check.

    `failures` are the first lines at fault, RowFailures, and `total` counts all; none where it is the whole file.
    """

    exit_code = ExitCode.INPUT

    def __init__(self, message: str, failures: Sequence[Any] = (), total: int = 0) -> None:
        super().__init__(message)
        self.failures, self.total = tuple(failures), total


class InputChanged(MoedgeError):
    """The input is not what it was when the job began."""

    exit_code = ExitCode.INPUT


class OutputRefused(MoedgeError):
    """OUT cannot be written where it is asked for."""

    exit_code = ExitCode.USAGE


class OutputExists(OutputRefused):
    """OUT or its error file exists; neither is ever overwritten."""


class BadLimit(MoedgeError):
    """A limit of a run is invalid."""

    exit_code = ExitCode.USAGE


class JobMismatch(MoedgeError):
    """The job that this output belongs to was started with other settings, which would change answers."""

    exit_code = ExitCode.USAGE


class JobNotFound(MoedgeError):
    """There is no job of that name."""

    exit_code = ExitCode.USAGE


class JobInUse(MoedgeError):
    """Another process works on the job."""

    exit_code = ExitCode.ENVIRONMENT


class BadJournal(MoedgeError):
    """The journal is damaged where it had been safely on disk, or is none."""

    exit_code = ExitCode.GAVE_OUT


class OtherVersion(MoedgeError):
    """The journal was written by a moedge whose format this one does not know."""

    exit_code = ExitCode.ENVIRONMENT


class JournalFailed(MoedgeError):
    """The disk refused to keep the journal; what it had confirmed before is safe, and the job can be resumed later."""

    exit_code = ExitCode.GAVE_OUT


class ExportFailed(MoedgeError):
    """The disk refused an output file; no answer is lost."""

    exit_code = ExitCode.GAVE_OUT


class Stalled(MoedgeError):
    """Nothing was computed and no byte moved for too long; no confirmed answer is lost."""

    exit_code = ExitCode.STOPPED


def shown(value: Any) -> str:
    """A value in a message: short, on one line, and printable whatever it holds."""
    if isinstance(value, list | tuple | dict):
        kind = "an object" if isinstance(value, dict) else "a list"
        return f"{kind} of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "nothing", True: "true", False: "false"}[value]
    return ascii(value[:60] if isinstance(value, str) else value)[:64]


def counted(number: int, noun: str) -> str:
    """`1 row`, `1,234 rows`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
