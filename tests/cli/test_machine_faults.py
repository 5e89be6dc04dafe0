"""Short memory and odd surroundings of a job (`runtime/jobs/lifecycle.py`, `runtime/engine/engine.py`): cases M4, M5,
M6, K2 and K5 of the failure table (docs/dev/faults.md).
"""

import itertools
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moedge.runtime.engine.sequence import Batch
from moedge.runtime.model.runner import ModelRunner
from support.row_files import write_rows

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
MOEDGE = [sys.executable, "-m", "moedge"]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "in.jsonl"
    write_rows(file, [{"id": f"{n}", "prompt": "Hello " * n, "max_tokens": 8} for n in (1, 2, 3, 5, 8)])
    return file


def test_m4_a_real_limit_is_found_and_kept_to(checkpoint: Callable[[str], Path], rows: Path, tmp_path: Path) -> None:
    """In a memory cgroup of its own, where the kernel kills what takes more."""
    limit, summary = 1400, tmp_path / "summary.json"
    job = [
        "batch",
        checkpoint("mixtral"),
        rows,
        "-o",
        tmp_path / "out.jsonl",
        "--ram",
        "80%",
        "--summary",
        summary,
        "-q",
    ]
    ceiling = [sys.executable, ROOT / "tests" / "support" / "memory_ceiling.py", f"{limit}MiB"]
    done = subprocess.run([*map(str, [*ceiling, *MOEDGE, *job])], capture_output=True, text=True, check=False)
    if "no memory controller" in done.stderr or "Permission denied" in done.stderr or "Read-only" in done.stderr:
        pytest.skip("this machine does not let a test make a memory cgroup")
    assert done.returncode == 0, done.stderr
    host = json.loads(summary.read_text())["memory"]["host"]
    assert host["budget"] == limit * MIB * 80 // 100
    assert host["peak"] <= host["budget"]


def test_m4_a_limit_that_is_too_small_is_a_refusal_and_not_a_kill(
    checkpoint: Callable[[str], Path], rows: Path, tmp_path: Path
) -> None:
    """RLIMIT_DATA: allocations beyond it fail. The limit is seen before anything large is allocated."""
    limit = 900 * MIB

    def small() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    job = ["batch", checkpoint("mixtral"), rows, "-o", tmp_path / "out.jsonl", "--ram", "30%", "-q"]
    done = subprocess.run([*MOEDGE, *map(str, job)], capture_output=True, text=True, check=False, preexec_fn=small)
    assert done.returncode == 4, done.stderr
    # Builds of torch with many libraries cannot be loaded within the limit at all.
    assert re.search(r"270 MiB of host memory is too little|torch cannot be loaded within the limit", done.stderr)
    assert not (tmp_path / "out.jsonl").exists()


HOST = "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "error", [RuntimeError(HOST), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=repr
)
def test_m5_m6_memory_that_gives_out_in_a_pass_costs_no_row_and_changes_no_token(
    error: Exception, checkpoint: Callable[[str], Path], cli: Callable[..., int], rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In the third pass and in the parts that it runs in again: the run goes on, and says what it gave up."""
    command = ["batch", checkpoint("mixtral"), rows, "--max-sequences", 3, "--deterministic", "-q"]
    command += ["--disk-dir", tmp_path / "stores", "-o"]
    assert cli(*command, tmp_path / "undisturbed.jsonl") == 0
    forward, passes, summary = ModelRunner.forward, itertools.count(1), tmp_path / "summary.json"

    def failing(self: ModelRunner, batch: Batch) -> Any:
        if next(passes) in {3, 4}:
            raise error
        return forward(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    assert cli(*command, tmp_path / "out.jsonl", "--summary", summary) == 0
    assert next(passes) > 4
    told = json.loads(summary.read_text())
    assert {given["what"] for given in told["fallbacks"]} == {"tokens of a pass"}
    assert told["plan"]["tokens_per_pass"] == told["fallbacks"][-1]["after"]
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


def test_m5_memory_that_is_never_enough_ends_resumable_with_the_smallest_budget(
    checkpoint: Callable[[str], Path], cli: Callable[..., int], rows: Path, tmp_path: Path, capsys: Any
) -> None:
    command = ["batch", checkpoint("mixtral"), rows, "--deterministic", "--disk-dir", tmp_path / "stores", "-o"]
    with pytest.MonkeyPatch.context() as patch:

        def failing(self: ModelRunner, batch: Batch) -> Any:
            raise MemoryError

        patch.setattr(ModelRunner, "forward", failing)
        assert cli(*command, tmp_path / "out.jsonl") == 8
    assert re.search(
        r"no fallback is left\. .* --ram \d+MiB.*the same command resumes the job", capsys.readouterr().err
    )
    assert cli(*command, tmp_path / "out.jsonl") == 0


CONTRADICTIONS: dict[str, tuple[list[str], int, str]] = {
    "auto less than nothing": (["--ram", "auto-900GiB"], 2, r"leaves nothing: auto is [\d.]+ GiB here"),
    "more than all": (["--ram", "120%"], 2, "more than all of it"),
    "weights in one format, arithmetic of another": (
        ["MOEDGE_COMPUTE=int8", "--quant", "nf4"], 4, "found were --quant nf4",
    ),
    "a GPU that is not there": (["--gpu-mem", "6GiB"], 4, "--gpu-mem 6GiB was asked for and CUDA finds no device"),
    "a backend that cannot": (["MOEDGE_ATTENTION=triton"], 4, "triton cannot compute this run: it runs on NVIDIA GPUs"),
    "less memory than a process": (
        ["--ram", "200MiB"],
        4,
        r"200 MiB .* works is --ram \d+MiB \([\d,]+ MiB for the process",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_k2_settings_that_contradict_each_other_are_refused_with_the_arithmetic(
    name: str,
    checkpoint: Callable[[str], Path],
    cli: Callable[..., int],
    rows: Path,
    tmp_path: Path,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Triton's interpreter, which the tests of kernels use, would compute on the processor.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options, code, says = CONTRADICTIONS[name]
    out = tmp_path / "out.jsonl"
    assert cli("batch", checkpoint("mixtral"), rows, "-o", out, "--disk-dir", tmp_path / "stores", *options) == code
    assert re.search(says, unframed(capsys.readouterr().err))
    assert not out.exists()


@pytest.mark.parametrize(("disk", "says"), [("0", "--disk 0"), ("64KiB", r"takes [\d.]+ MiB but --disk 64.00 KiB")])
def test_k2_a_store_larger_than_its_budget_is_refused_with_both_sizes(
    disk: str, says: str, checkpoint: Callable[[str], Path], cli: Callable[..., int], tmp_path: Path, capsys: Any
) -> None:
    assert cli("prepare", checkpoint("mixtral"), "--disk-dir", tmp_path / "stores", "--disk", disk) in {4, 8}
    told = unframed(capsys.readouterr().err)
    assert re.search(says, told), told
    assert not list(tmp_path.glob("stores/*/manifest.json"))


def unframed(text: str) -> str:
    """Usage errors stand in a frame of the terminal's width."""
    return " ".join(text.replace("│", " ").split())


# Locale, whether HOME is set, umask, open files at most: 24 in all.
SURROUNDINGS = list(itertools.product(("C", "tr_TR.UTF-8", "POSIX"), (True, False), (0o000, 0o077), (64, 1024)))


def odd(locale: str, home: bool, umask: int, files: int, folder: Path) -> dict[str, Any]:
    """What `subprocess.run` wants for such surroundings; none of Python's own repairs of a locale."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHON"))}
    kept |= {"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TZ": "Pacific/Kiritimati"}
    if home:
        kept["HOME"] = str(folder)
    else:
        kept.pop("HOME", None)

    def enter() -> None:
        os.umask(umask)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    return {"env": kept, "preexec_fn": enter, "capture_output": True, "timeout": 120}


@pytest.mark.sample("C-True-0-64", "tr_TR.UTF-8-False-63-64", "POSIX-True-63-64")
@pytest.mark.parametrize("surroundings", SURROUNDINGS, ids=lambda case: "-".join(map(str, case)))
def test_k5_commands_work_in_odd_surroundings(surroundings: tuple[str, bool, int, int], tmp_path: Path) -> None:
    done = subprocess.run([*MOEDGE, "config", "show"], check=False, **odd(*surroundings, tmp_path))
    assert done.returncode == 0, done.stderr
    assert b"max-sequences" in done.stdout


def test_k5_a_job_gives_the_same_bytes_in_the_oddest_surroundings(
    checkpoint: Callable[[str], Path], cli: Callable[..., int], tmp_path: Path
) -> None:
    """Names and texts beyond ASCII, in a process whose encoding knows none of them."""
    source = tmp_path / "fragen-äöü.jsonl"
    texts = ("Grüße", "İstanbul", "日本語")
    write_rows(source, [{"id": text, "prompt": text, "max_tokens": 6} for text in texts], ensure_ascii=False)
    job = [
        "batch",
        str(checkpoint("qwen3_moe")),
        str(source),
        "--deterministic",
        "--disk-dir",
        str(tmp_path / "stores"),
    ]
    assert cli(*job, "-o", tmp_path / "here.jsonl", "-q") == 0
    done = subprocess.run(
        [*MOEDGE, *job, "-o", str(tmp_path / "antwörten.jsonl")], check=False, **odd("C", False, 0o077, 64, tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "antwörten.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()
