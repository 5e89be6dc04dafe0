"""What terminals of 40, 80 and 200 columns show (`cli/views/`): sessions of two people on a recorded machine, as golden
files.

WRITE_GOLDEN=1 writes the files anew. Numbers that a clock gives are fixed; the model's answers are a fake engine's.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moedge import computing, plan_report
from moedge.apps.doctor import examination
from moedge.apps.doctor.examination import Examination
from moedge.apps.doctor.host import (
    HostMemoryFacts,
    check_age,
    check_hub_cache,
    check_memory,
    check_open_files,
    check_torch,
    fail,
    speed_findings,
)
from moedge.cli import check as cli_check
from moedge.cli.views import job_view, jobs_view, progress
from moedge.computing import TorchBuild
from moedge.offload.machine.hardware import Driver
from moedge.offload.machine.profile import PinLimit, save_machine
from moedge.runtime.evaluation.check import CheckReport
from moedge.runtime.evaluation.parts import Part
from moedge.runtime.jobs import job as states
from moedge.runtime.jobs import job_plan, lifecycle
from moedge.runtime.jobs import session as sessions
from moedge.runtime.jobs.journal.state import Counts
from moedge.runtime.jobs.summary import (
    KV,
    Latency,
    Memory,
    Passes,
    Percentiles,
    RunSummary,
    Seconds,
    Throughput,
    TierMemory,
    summarise_rows,
)
from moedge.runtime.settings.errors import MemoryGaveOut
from support import recorded_machine
from support.jobs import fake_engine
from support.recorded_machine import GIB, NAME, RECORDED
from support.screen import Screen

WIDTHS = (40, 80, 200)
REAL_FACTS, REAL_SMOOTHED = progress.facts, progress.SmoothedLeft
GOLDEN = Path(__file__).parent / "golden"
BUDGETS = ("--gpu-mem", "7GiB", "--ram", "20GiB", "--disk", "40GiB")
Shown = Callable[..., tuple[int, str]]
DRIVER, TORCH = Driver((13, 0), "580.65"), TorchBuild("2.13.0", (13, 0))


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shown:
    """`shown(width, *arguments)` is the exit code of a command, and what a terminal shows of it."""
    from moedge.cli.main import main

    monkeypatch.chdir(tmp_path)
    recorded_machine.config_only(tmp_path)
    save_machine(RECORDED, tmp_path / "box.json")
    for name in ("find_torch", "find_driver", "find_gpus"):
        found = {"find_torch": TORCH, "find_driver": DRIVER, "find_gpus": RECORDED.hardware.gpus}[name]
        monkeypatch.setattr(computing, name, lambda found=found: found)
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def run(width: int, *arguments: object) -> tuple[int, str]:
        screen = Screen()
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("LINES", "50")
        monkeypatch.setattr(sys, "argv", ["moedge", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setattr(sys, "stderr", screen)
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "\n".join(screen.lines(width)).rstrip("\n") + "\n"

    return run


def golden(name: str, screens: dict[int, str]) -> None:
    """Compares with the kept captures; no line is wider than its terminal, and no word is cut."""
    text = "".join(f"=== {width} columns\n{screen}" for width, screen in screens.items())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("WRITE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    words = set(screens[max(WIDTHS)].split())
    for width, screen in screens.items():
        assert "…" not in screen, width
        cut = {word for word in screen.split() if word not in words and set(word) - set("█#━╸╺[]")}
        assert not cut, (width, cut)


def test_a_plan_fits_terminals_of_every_width(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = plan_report.make_report, []

    def make_once(*given: Any, **more: Any) -> Any:
        made[:] = made or [make(*given, **more)]
        return made[0]

    monkeypatch.setattr(plan_report, "make_report", make_once)
    screens = {}
    for width in WIDTHS:
        code, screens[width] = shown(width, "plan", NAME, "--machine", "box.json", *BUDGETS, "--quant", "nf4")
        assert code == 0
    golden("plan", screens)


def test_what_is_refused_fits_terminals_of_every_width(shown: Shown, tmp_path: Path) -> None:
    lines = ['{"prompt": ', '{"text": "x"}', '{"prompt": "a", "max_token": 3}']
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    screens = {}
    for width in WIDTHS:
        rows = shown(width, "batch", files("moedge.demo") / "model", "bad.jsonl", "-o", "out.jsonl")
        model = shown(width, "batch", "no-such-model", "bad.jsonl", "-o", "out.jsonl")
        assert (rows[0], model[0]) == (7, 5)
        screens[width] = rows[1] + model[1]
    golden("refused", screens)


def examined(cache: Path) -> Examination:
    """The recorded machine as doctor finds it: with WSL2's limit on pinned memory, and a download that was cut off."""
    machine = replace(RECORDED, pin=PinLimit(GIB, True))
    memory = HostMemoryFacts(31 * GIB, 8 * GIB, 31 * GIB, 24 * GIB)
    findings = [
        check_torch(TORCH, DRIVER, 1),
        check_memory(memory),
        check_open_files(1024),
        *(finding for finding in check_hub_cache(cache, False) if finding.name == "downloads"),
        *(finding for finding in speed_findings(machine, TORCH.version) if finding.name != "profile"),
        check_age(RECORDED, RECORDED.torch),
        fail("stores", "stores cannot be written", "give --disk-dir FOLDER, or set disk-dir in moedge.toml"),
    ]
    return Examination(tuple(findings), RECORDED, cache)


def test_doctor_fits_terminals_of_every_width_and_says_what_to_do(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cut_off = tmp_path / "models--Qwen--Qwen3-30B-A3B" / "blobs"
    cut_off.mkdir(parents=True)
    (cut_off / "0.incomplete").touch()
    monkeypatch.setattr(examination, "examine", lambda *_: examined(tmp_path))
    screens = {}
    for width in WIDTHS:
        code, screens[width] = shown(width, "doctor")
        assert code == 6, "a failure"
    golden("doctor", screens)
    lines = screens[200].splitlines()
    for begin, words in {
        "computing on the GPU (RTX 3060 Ti)": "of 8.0 GiB granted",
        "ok    torch": "torch 2.13.0 for CUDA 13.0, driver 580.65",
        "ok    RAM": "31.00 GiB, 24.00 GiB available, no limit below that; ",
        "ok    disk": "3.1 GB/s",
        "ok    link": "22.0 GB/s to the GPU from pinned memory, 8.1 GB/s pageable",
        "warn  downloads": "not finished: Qwen/Qwen3-30B-A3B",
        "fail  stores": "cannot be written",
        "warn  pinning": "1.00 GiB can be pinned; plans use 80 % of it and copy the rest through a ring",
        "                  fix: hf download Qwen/Qwen3-30B-A3B": "",
        "                  fix: native Linux instead of WSL2": "",
        "1 failure, 2 warnings": "",
    }.items():
        assert any(line.startswith(begin) and words in line for line in lines), begin


class CtrlC:
    """Presses it before the pass of that number, once; `before` is called before every pass."""

    at_pass = 0

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    def before_pass(self, running: list[Any]) -> None:
        self.before()
        self.at_pass -= 1
        if self.at_pass == 0:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def ctrl_c() -> CtrlC:
    return CtrlC()


@pytest.fixture
def job(shown: Shown, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file of 50 prompts, two of them longer than the model's context, for a fake engine on the recorded machine."""
    rows = [{"id": f"row-{n}", "prompt": "hello " * (2000 if n in (7, 30) else 2), "max_tokens": 8} for n in range(50)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = plan_report.plan(
        tmp_path / NAME, machine="box.json", gpu_mem="7GiB", ram="20GiB", disk="40GiB", quant="nf4"
    ).result
    assert result is not None
    counts = SimpleNamespace(wanted=100, hits=34)
    experts = SimpleNamespace(stats=SimpleNamespace(layers={}), cache=SimpleNamespace(counts=counts))
    hit = SimpleNamespace(nbytes_moved=0, experts=experts)
    fake_engine.install(lambda: fake_engine.FakeEngine(ctrl_c.before_pass), monkeypatch.setattr)
    load = lifecycle.load_engine

    def load_engine(*given: Any, **more: Any) -> SimpleNamespace:
        engine = load(*given, **more)
        engine.streamed = hit
        return engine

    monkeypatch.setattr(lifecycle, "load_engine", load_engine)
    monkeypatch.setattr(lifecycle, "plan_job", lambda *_, **__: result)
    monkeypatch.setattr(states, "summarise", lambda model, planned, counts, *_: measured(counts))
    monkeypatch.setattr(lifecycle, "open_memory", lambda *_: (result.request.budget, None))
    monkeypatch.setattr(states, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    monkeypatch.setattr(sessions, "blake2b", lambda *_, **__: SimpleNamespace(hexdigest=lambda: "7f3a91c0"))
    monkeypatch.setattr(job_plan, "find_hardware", lambda folder: RECORDED.hardware)
    monkeypatch.setattr(progress, "facts", lambda *_: FACTS)
    monkeypatch.setattr(job_view, "Eta", lambda work: StillEta())
    return tmp_path


def measured(counts: Counts) -> RunSummary:
    """The summary of a run that computed 576 prompt tokens and found 1,012 in the cache, with fixed measurements."""
    summary = summarise_rows(counts)
    summary.seconds = Seconds(0.5, 12.0, 36.0, 48.5)
    summary.throughput = Throughput(16.0, 28.4)
    summary.predicted.generated_tok_s = 31.0
    summary.passes = Passes(9, 42.0, 32.0)
    summary.memory = Memory(TierMemory(7 * GIB, 6 * GIB), TierMemory(20 * GIB, 17 * GIB))
    summary.kv = KV("int8", 16, 4096, waste=0.02, prefix_hit_tokens=1012, preemptions=0)
    summary.latency = Latency(*(Percentiles(0.5, 1.5, 2.5) for _ in range(3)))
    return summary


@dataclass
class StillEta:
    """What is committed while passes run depends on the disk."""

    total: int = 50
    done: int = 20
    seconds_left: float = 11_100.0

    def update(self, *_: Any) -> None:
        pass


FACTS = {
    "percent": " 41%",
    "failed": "2 failed",
    "left": "left 3:05:00",
    "rate": "28 tok/s",
    "memory": "RAM 17.40/20.00 GiB",
    "experts": "expert hits 34%",
}


def test_a_job_that_is_interrupted_and_resumed_fits_terminals_of_every_width(
    shown: Shown, job: Path, ctrl_c: CtrlC
) -> None:
    """The session of a person with an 8 GiB card: plan, batch, Ctrl-C, the same line again."""
    screens = {}
    for width in WIDTHS:
        command = ["batch", NAME, "in.jsonl", "-o", f"out{width:03}.jsonl", *BUDGETS]
        ctrl_c.at_pass = 10
        code, first = shown(width, *command)
        assert code == 130
        assert len((job / f"out{width:03}.partial.jsonl").read_text().splitlines()) >= 32
        code, second = shown(width, *command)
        assert code == 3, "two rows are longer than the context"
        screens[width] = (first + second).replace(f"out{width:03}", "answers")
        answers = [json.loads(line)["id"] for line in (job / f"out{width:03}.jsonl").read_text().splitlines()]
        assert answers == [f"row-{n}" for n in range(50) if n not in (7, 30)]
    text = screens[200]
    for words in (
        "computing on the GPU (RTX 3060 Ti), 7.0 of 8.0 GiB granted",
        "in.jsonl: 50 rows: all valid",
        "2 rows are longer than the context of 4,096 tokens: error rows",
        "expert hits 34%",
        "moedge jobs resume 7f3a91c0",
        "resuming job 7f3a91c0: ",
    ):
        assert words in text, words
    golden("batch", screens)


class MovingEta:
    """Two rows a pass of five seconds, by a clock that only passes move."""

    total, ram_nbytes, prompt_tok_s = 50, 20 * GIB, 16.0

    def __init__(self) -> None:
        self.passes = 0

    def __call__(self) -> float:
        return 5.0 * self.passes

    def update(self, *_: Any) -> None:
        self.passes += 1

    @property
    def done(self) -> int:
        return 2 + 2 * self.passes

    @property
    def share(self) -> float:
        return self.done / self.total

    @property
    def failed(self) -> int:
        return 2 if self.passes else 0

    @property
    def generated_tok_s(self) -> float:
        return 3.5 * min(self.passes, 8)

    @property
    def seconds_left(self) -> float:
        return 5.0 * (24 - self.passes)

    @property
    def resident_nbytes(self) -> int:
        return 17 * GIB

    @property
    def hit_rate(self) -> float | None:
        return 0.34 if self.passes > 1 else None


def test_a_job_that_runs_fits_terminals_of_every_width(
    shown: Shown, job: Path, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The screen before the second pass, and after four and eight."""
    show = progress.BarProgress.show
    monkeypatch.setattr(progress, "facts", REAL_FACTS)
    screens = {}
    for width in WIDTHS:
        eta, moments = MovingEta(), []
        monkeypatch.setattr(job_view, "Eta", lambda work, eta=eta: eta)
        monkeypatch.setattr(progress, "SmoothedLeft", lambda eta=eta: REAL_SMOOTHED(eta))

        def show_now(bar: Any, eta: Any) -> None:
            show(bar, eta)
            bar._progress.refresh()

        def look(eta: MovingEta = eta, moments: list[str] = moments, width: int = width) -> None:
            if eta.passes in (1, 4, 8):
                moments.append("\n".join(sys.stderr.lines(width)).rstrip("\n"))  # type: ignore[attr-defined]

        monkeypatch.setattr(progress.BarProgress, "show", show_now)
        ctrl_c.before, ctrl_c.at_pass = look, 10
        code, _ = shown(width, "batch", NAME, "in.jsonl", "-o", f"out{width:03}.jsonl", *BUDGETS)
        assert code == 130
        first, *later = moments
        assert len(later) == 2
        assert all(moment.rpartition("\n")[0] == first.rpartition("\n")[0] for moment in later), "one line changes"
        screens[width] = "\n".join([first, *(moment.rpartition("\n")[2] for moment in later)]) + "\n"
    assert "18/50 rows  2 failed  left 1:20   28.0 tok/s   RAM 17.00/20.00 GiB  expert hits 34%  ━" in screens[200]
    golden("running", screens)


def test_a_job_that_runs_out_of_memory_says_what_helps(shown: Shown, job: Path, ctrl_c: CtrlC) -> None:
    passes = iter(range(100))

    def fail() -> None:
        if next(passes) == 4:
            raise MemoryGaveOut("out of memory in a pass of 1 token (CUDA out of memory)")

    screens = {}
    for width in WIDTHS:
        passes, ctrl_c.before = iter(range(100)), fail
        code, screens[width] = shown(width, "batch", NAME, "in.jsonl", "-o", f"out{width:03}.jsonl", *BUDGETS)
        assert code == 8
        screens[width] = re.sub(r"\d+ of 50", "2 of 50", screens[width].replace(f"out{width:03}", "answers"))
        screens[width] = screens[width].replace(str(job), "~")
    assert "Failed: 2 of 50 rows done, and kept in " in screens[200]
    assert "Resume with the same command, or: moedge jobs resume 7f3a91c0" in screens[200]
    golden("failure", screens)


def at(hour: int) -> type[datetime]:
    """The class of a clock that stands still."""
    return type("Then", (datetime,), {"now": classmethod(lambda cls, tz=None: cls(2026, 1, 1, hour))})


def test_the_list_of_jobs_fits_terminals_of_every_width(
    shown: Shown, job: Path, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is finished, shown with all of its numbers, and a later one that Ctrl-C stopped."""
    monkeypatch.setattr(sessions, "datetime", at(9))
    code, _ = shown(200, "batch", NAME, "in.jsonl", "-o", "answers.jsonl", *BUDGETS)
    assert code == 3
    monkeypatch.setattr(sessions, "datetime", at(11))
    monkeypatch.setattr(sessions, "blake2b", lambda *_, **__: SimpleNamespace(hexdigest=lambda: "02d4c6e8"))
    ctrl_c.at_pass = 10
    code, stopped = shown(200, "batch", NAME, "in.jsonl", "-o", "weather.jsonl", "--verbose", *BUDGETS)
    assert code == 130
    assert "1,012 of 1,588 prompt tokens reused (64%)" in stopped, "not of those of finished rows alone"
    monkeypatch.setattr(jobs_view, "datetime", at(12))
    screens = {}
    for width in WIDTHS:
        code, screens[width] = shown(width, "jobs", "ls")
        assert code == 0
    golden("jobs", screens)


def test_a_check_fits_terminals_of_every_width_and_exits_by_what_it_found(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numbers that agree, that part in a layer, weights packed with a loss, and a product that is wrong."""
    why = "the whole model in float32 takes 113.74 GiB, and the budget is 20.00 GiB"
    same = CheckReport(
        model=NAME, against=NAME, reference="layers", why=why, quant="none", dtype="bf16", prompts=4, tokens=85,
        max_abs=0.0312, max_relative=0.0021, kl=4.2e-5, greedy_same=32, greedy_total=32,
        layers=(1.1e-3, 2.4e-3, 2.2e-3), local=(1.1e-3, 1.3e-3, 1.0e-3), rounding=(1e-3, 9e-4, 1e-3),
        rerouted=(0.0, 0.012, 0.0), head=8e-4, parts=(Part(0, "self_attn.q_proj", 2e-3, 0.016),), compute="float",
        kv="bf16",
    )  # fmt: skip
    wrong = {"kl": 0.31, "greedy_same": 3, "layers": (1e-3, 0.2, 0.4), "local": (1e-3, 0.19, 2e-3)}
    parted = replace(same, reference="transformers", why="", **wrong)
    packed = replace(same, quant="int8", compute="int8", loss={"experts": 0.091, "attention": 0.088})
    missed = replace(packed, parts=(Part(0, "self_attn.q_proj", 0.18, 0.016),))
    screens = {}
    for width in WIDTHS:
        screens[width] = ""
        for found, wanted in ((same, 0), (parted, 3), (packed, 0), (missed, 3)):
            monkeypatch.setattr(cli_check, "_check", lambda *_, found=found: found)
            code, screen = shown(width, "check", NAME, "--json", "found.json")
            screens[width] += screen
            assert code == wanted
    golden("check", screens)
    assert json.loads((tmp_path / "found.json").read_text())["loss"] == {"experts": 0.091, "attention": 0.088}
