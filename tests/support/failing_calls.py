"""`moedge` in processes whose k-th call to the system fails, each forked from one that has imported everything.

LD_PRELOAD=failing_calls.so python -m support.failing_calls     requests on stdin, replies on stdout, lines of JSON
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "native" / "failing_calls.c"
LIMIT_S = 600.0
# Names of the modules that a command had in the end of which no call failed; in the folder of all commands.
IMPORTED = Path("imported")
# What the system may say of each call that fails.
ERRORS = {
    "open": (errno.EMFILE, errno.ENOSPC, errno.EIO, errno.EROFS), "write": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "fsync": (errno.EIO, errno.ENOSPC), "rename": (errno.EIO, errno.ENOSPC, errno.EROFS),
    "mkdir": (errno.ENOSPC, errno.EROFS), "unlink": (errno.EIO, errno.EROFS), "truncate": (errno.EIO, errno.ENOSPC),
    "mmap": (errno.ENOMEM,), "fork": (errno.EAGAIN, errno.ENOMEM), "socket": (errno.EMFILE,),
    "connect": (errno.ECONNREFUSED,),
}  # fmt: skip


def build(folder: Path) -> Path:
    """The library that is preloaded."""
    library = folder / "failing_calls.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return library


@dataclass(frozen=True, slots=True)
class Fault:
    """The `last`-th call of this name that concerns `folder` fails with `number`, and those after it if `lasting`."""

    call: str
    last: int
    number: int
    folder: str
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """A command's exit code (None: it hung and was killed), what it printed, and how many calls were counted."""

    code: int | None
    said: str
    counted: int


class Commands:
    """Runs commands of moedge in a folder, with and without faults."""

    def __init__(self, library: Path, folder: Path, variables: Mapping[str, str]) -> None:
        self.folder = folder
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MOEDGE_")}
        environment |= {
            "LD_PRELOAD": str(library),
            "PYTHONPATH": str(ROOT / "tests"),
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.failing_calls"], cwd=folder, env=environment | dict(variables), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    @property
    def said(self) -> Path:
        """What the command that runs has printed so far."""
        return self.folder / "said"

    @property
    def process(self) -> int:
        """The id of the process that runs, or ran last."""
        return int((self.folder / "process").read_text())

    def run(self, arguments: Sequence[object], fault: Fault | None = None) -> Ended:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.said.write_text("")
        request = {"arguments": [str(each) for each in arguments], "fault": None if fault is None else asdict(fault)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return Ended(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


def serve() -> None:
    for name in ("torch", "transformers.modeling_utils", "moedge.batch", "moedge.cli.main"):
        importlib.import_module(name)
    # No child walks through what is here.
    gc.freeze()
    for line in sys.stdin:
        reply = handled(**json.loads(line))
        print(json.dumps(reply), flush=True)
        import_what_was_imported()


def import_what_was_imported() -> None:
    """What the last command has imported, the next ones have from the beginning. Some modules cannot be imported."""
    names = IMPORTED.read_text().split("\n") if IMPORTED.exists() else []
    for name in (name for name in names if name not in sys.modules):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    IMPORTED.unlink(missing_ok=True)


def handled(arguments: list[str], fault: dict[str, Any] | None) -> dict[str, Any]:
    said, counted = Path("said"), Path("counted")
    counted.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        work(arguments, fault, said, counted)
    Path("process").write_text(str(child))
    deadline, status = time.monotonic() + LIMIT_S, None
    while time.monotonic() < deadline:
        done, found = os.waitpid(child, os.WNOHANG)
        if done:
            status = os.waitstatus_to_exitcode(found)
            break
        time.sleep(0.01)
    else:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return {
        "code": status,
        "said": said.read_text(errors="replace"),
        "counted": int((counted.exists() and counted.read_text()) or 0),
    }


def work(arguments: list[str], fault: dict[str, Any] | None, said: Path, counted: Path) -> None:
    """The child: never returns."""
    code = 1
    os.setpgid(0, 0)
    library = ctypes.CDLL(os.environ["LD_PRELOAD"])
    report = os.open(counted, os.O_WRONLY | os.O_CREAT)
    try:
        output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["moedge", *arguments]
        if fault is not None:
            library.failing_calls_arm(
                fault["call"].encode(), fault["last"], fault["number"], fault["lasting"], fault["folder"].encode()
            )
        from moedge.cli.main import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        found = library.failing_calls_counted()
        library.failing_calls_arm(b"", 0, 0, 0, b"")
        os.write(report, str(found).encode())
        if fault is None or found < fault["last"]:
            IMPORTED.write_text("\n".join(sorted(sys.modules)))
        os._exit(code)


if __name__ == "__main__":
    serve()
