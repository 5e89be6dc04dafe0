"""Does work whose k-th call to the system fails end in a sentence, lose nothing and go on, for every k and every error?

These are the slow cases of tests, of which the fast lane tries a sample.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial

from matrix.state import ROOT, Part

TESTS = {
    "jobs": "tests/runtime/jobs/test_crash_points.py",
    "reading documents": "tests/apps/documents/test_failing_calls.py",
    "preparations": "tests/offload/store/test_crash.py",
    "a server's files and batches": "tests/apps/serve/test_storage.py",
    "whole commands": "tests/cli/test_failing_calls.py",
    "served batches": "tests/apps/serve/test_failing_calls.py",
}


def parts(quick: bool) -> Iterator[Part]:
    yield from slow_cases(TESTS, quick)


def slow_cases(tests: Mapping[str, str], quick: bool) -> Iterator[Part]:
    """A part for each file of tests, its slow ones included unless `quick`."""
    for name, file in tests.items():
        yield Part(name, partial(faults, file, quick))


def faults(file: str, quick: bool) -> list[str]:
    lane = ["-m", "not slow"] if quick else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, *lane]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return [] if done.returncode == 0 else failed or [done.stdout[-500:] + done.stderr[-500:]]
