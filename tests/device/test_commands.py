"""`--gpu-mem` from the command line to the run's summary (`runtime/jobs/job_plan.py`,
`runtime/loading/machine_memory.py`), on the fake device.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moedge import computing
from moedge.runtime.jobs import job_plan
from moedge.runtime.loading import machine_memory
from support.row_files import read_rows, write_rows

EXACT = ("--dtype", "fp32", "--quant", "none", "--deterministic", "-q", "--tokens-per-pass", "64")


@pytest.fixture
def batch(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, list[Any], dict[str, Any]]]:
    """`batch(fake, *options)` is the exit code, the answers and the summary of one job."""
    from moedge.cli.main import main

    rows = tmp_path / "in.jsonl"
    write_rows(rows, [{"id": str(n), "prompt": "a b " * n, "max_tokens": 8} for n in (1, 9)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def run(fake: Any, *options: str) -> tuple[int, list[Any], dict[str, Any]]:
        out, numbers = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl", tmp_path / "summary"
        monkeypatch.setattr(machine_memory, "find_device", lambda: fake and fake.device)
        monkeypatch.setattr(job_plan, "find_gpus", lambda: (fake,) if fake else ())
        # The first line of the command asks the driver, which is not there.
        monkeypatch.setattr(computing, "computing_line", lambda gpu_mem: "computing on a simulated device")
        arguments = ["batch", str(checkpoint("mixtral")), str(rows), "-o", str(out), *EXACT, *options]
        monkeypatch.setattr(sys, "argv", ["moedge", *arguments, "--summary", str(numbers)])
        with pytest.raises(SystemExit) as ended:
            main()
        answers = [row["text"] for row in read_rows(out)] if out.exists() else []
        return int(ended.value.code or 0), answers, json.loads(numbers.read_text()) if numbers.exists() else {}

    return run


def test_a_job_on_a_device_answers_as_on_the_processor(batch: Callable[..., Any], fakes: ModuleType) -> None:
    fake = fakes.FakeDevice()
    code, wanted, alone = batch(None)
    assert (code, alone["memory"]["device"], alone["bytes"]["host_to_device"]) == (0, None, None)
    with fake:
        code, answers, summary = batch(fake, "--gpu-mem", "540MiB")
        assert batch(fake, "--gpu-mem", "0")[2]["memory"]["device"] is None
    assert (code, answers) == (0, wanted)
    device = summary["memory"]["device"]
    assert 0 < device["peak"] <= device["budget"] == 540 << 20
    assert summary["plan"]["budget"]["device"]["nbytes"] == 540 << 20


def test_too_little_device_memory_names_what_would_do_and_that_works(
    batch: Callable[..., Any], fakes: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with fakes.FakeDevice() as fake:
        assert batch(fake, "--gpu-mem", "20MiB")[0] == 4
        words = capsys.readouterr().err.split()
        smallest = words[words.index("--gpu-mem") + 1].rstrip(",")
        code, answers, summary = batch(fake, "--gpu-mem", smallest)
        assert (code, len(answers)) == (0, 2)
    assert summary["memory"]["device"]["peak"] <= summary["memory"]["device"]["budget"]


def test_a_device_that_is_not_there_is_refused(batch: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert batch(None, "--gpu-mem", "7GiB")[0] == 4
    assert "--gpu-mem 0" in capsys.readouterr().err
    assert batch(None, "--gpu-mem", "auto")[0] == 0
