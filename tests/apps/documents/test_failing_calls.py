"""A job over documents (`apps/documents/run.py`) whose k-th call to the system fails, for every k: it ends in a
sentence, and goes on.
"""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge.apps.documents.run import DocumentsEnded
from moedge.offload.errors import ExitCode, exit_code_of
from support.jobs.disk_faults import Disk, patched

Ask = Callable[..., DocumentsEnded]
OPTIONS: dict[str, Any] = {"chunk_tokens": 300, "context": 1600, "max_tokens": 300}
ERRORS = (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS, errno.EDQUOT)


def rows(folder: Path, out: str) -> dict[str, bytes]:
    found = {suffix: (folder / out).with_suffix(suffix) for suffix in (".jsonl", ".errors.jsonl")}
    return {suffix: path.read_bytes() for suffix, path in found.items() if path.exists()}


# The fast lane tries every 11th call with one error, the slow lane with all, from another one with each; make matrix
# tries every call.
@pytest.mark.sample("11-ENOSPC")
@pytest.mark.parametrize("error", ERRORS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("step", [11, pytest.param(1, marks=pytest.mark.slow)])
def test_j6_j7_a_call_that_fails_costs_no_document(step: int, error: int, ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name, text in (("a", "K1."), ("b", "".join(f"K{number}. Filler words.\n" for number in range(40))), ("c", "")):
        (folder / f"{name}.txt").write_text(text)
    ask(folder, out="whole.jsonl", **OPTIONS)
    wanted, failed, codes = rows(tmp_path, "whole.jsonl"), 0, set()
    for last in range(1 + ERRORS.index(error), 2000, step):
        out, disk = f"out{last}.jsonl", Disk(last, fault=error)
        try:
            with patched(disk):
                ask(folder, out=out, **OPTIONS)
        except Exception as raised:
            codes.add((exit_code_of(raised), type(raised).__name__))
        if not disk.faults:
            break
        failed += 1
        ask(folder, out=out, **OPTIONS)
        assert rows(tmp_path, out) == wanted, f"after error {error} at call {last}, {disk.calls[last - 1]}"
    print(f"{failed} calls failed with {errno.errorcode[error]}: {codes}")
    assert failed > 100 // step
    assert {code for code, _ in codes} <= {ExitCode.GAVE_OUT, ExitCode.USAGE, ExitCode.ENVIRONMENT}
