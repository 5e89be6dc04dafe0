"""Every option of `run`, `prepare`, `jobs resume` and `models prune` changes what it is for: case K3."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moedge import generation
from moedge.cli.views import job_view
from moedge.offload.errors import ExitCode
from moedge.offload.store import stores
from moedge.runtime.loading import prepare as making
from moedge.runtime.loading.prepare import Written
from moedge.runtime.weights.importance import Importance

Cli = Callable[..., int]

RUN: dict[str, tuple[str | None, Callable[[Any, Any, Any], object], object]] = {
    "--dtype": ("fp32", lambda settings, budgets, asked: settings.dtype, "fp32"),
    "--quant": ("int4", lambda settings, budgets, asked: settings.quant, "int4"),
    "--kv": ("int4", lambda settings, budgets, asked: settings.kv, "int4"),
    "--deterministic": (None, lambda settings, budgets, asked: settings.deterministic, True),
    "--ram": ("3GiB", lambda settings, budgets, asked: budgets.ram, "3GiB"),
    "--gpu-mem": ("0", lambda settings, budgets, asked: budgets.gpu_mem, "0"),
    "--disk": ("5GiB", lambda settings, budgets, asked: budgets.disk, "5GiB"),
    "--disk-dir": ("/stores", lambda settings, budgets, asked: budgets.disk_dir, Path("/stores")),
    "--max-tokens": ("9", lambda settings, budgets, asked: asked.max_tokens, 9),
    "--temperature": ("0.5", lambda settings, budgets, asked: asked.temperature, 0.5),
    "--seed": ("4", lambda settings, budgets, asked: asked.seed, 4),
    "--raw": (None, lambda settings, budgets, asked: asked.raw, True),
}


def typed(flag: str, value: str | None) -> list[str]:
    return [flag] if value is None else [flag, value]


@pytest.mark.parametrize("flag", RUN)
def test_run_asks_for_what_was_typed(
    flag: str, checkpoint: Callable[[str], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(generation, "answer", lambda model, prompt, *rest: seen.append(rest) or ["hello"])
    value, arrived, wanted = RUN[flag]
    assert cli("run", checkpoint("llama"), "hi") == 0
    assert cli("run", checkpoint("llama"), "hi", *typed(flag, value)) == 0
    plain, asked = (arrived(*rest) for rest in seen)
    assert asked == wanted != plain


PREPARE: dict[str, tuple[str, Callable[[tuple[Any, ...]], object], object]] = {
    "--output": ("/one/store", lambda made: made[1], Path("/one/store")),
    "--quant": ("int8", lambda made: made[2], "int8"),
    "--dtype": ("bf16", lambda made: made[3], "bf16"),
    "--ram": ("3GiB", lambda made: made[4].host_nbytes, 3 << 30),
    "--disk": ("5GiB", lambda made: made[4].disk_nbytes, 5 << 30),
    "--disk-dir": ("/stores", lambda made: made[1].parent, Path("/stores")),
}


@pytest.mark.parametrize("flag", PREPARE)
def test_prepare_makes_what_was_typed(
    flag: str, checkpoint: Callable[[str], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def prepared(*made: Any, repair: bool, importance: None) -> Written:
        seen.append(made)
        return Written()

    monkeypatch.setattr(making, "prepare", prepared)
    value, arrived, wanted = PREPARE[flag]
    assert cli("prepare", checkpoint("llama")) == 0
    assert cli("prepare", checkpoint("llama"), flag, value) == 0
    plain, asked = map(arrived, seen)
    assert asked == wanted != plain


def test_prepare_calibrates_by_the_text_of_a_file(
    checkpoint: Callable[[str], Path],
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(making, "calibrate", lambda source, text, *_: Importance(text, {}))
    monkeypatch.setattr(
        making, "prepare", lambda *made, importance, **_: seen.append((made[2], importance)) or Written()
    )
    (tmp_path / "text").write_text("Überall")
    (tmp_path / "bytes").write_bytes(b"\xff")
    model, experts = checkpoint("qwen3_moe"), ("--quant", "int8", "--experts", "int3")
    assert cli("prepare", model, *experts, "--calibrate", tmp_path / "text") == 0
    assert seen == [("int8+int3", Importance("Überall", {}))]
    assert cli("prepare", model, "--calibrate", tmp_path / "text") == ExitCode.DOES_NOT_FIT
    assert "--experts; give one of them" in capsys.readouterr().err
    assert cli("prepare", model, *experts, "--calibrate", tmp_path / "bytes") == ExitCode.DOES_NOT_FIT
    assert "is no text in UTF-8" in capsys.readouterr().err


RESUME: dict[str, tuple[str | None, Callable[[Any], object], object]] = {
    "--failed": (None, lambda request: request.resume.failed, True),
    "--accept-drift": ("versions", lambda request: request.resume.drift, ("versions",)),
    "--ram": ("3GiB", lambda request: request.budgets.ram, "3GiB"),
    "--gpu-mem": ("0", lambda request: request.budgets.gpu_mem, "0"),
    "--disk": ("5GiB", lambda request: request.budgets.disk, "5GiB"),
    "--disk-dir": ("/stores", lambda request: request.budgets.disk_dir, Path("/stores")),
    "--until": ("07:00", lambda request: request.limits.until, "07:00"),
    "--max-rows": ("3", lambda request: request.limits.max_rows, 3),
    "--max-failures": ("5%", lambda request: request.limits.max_failures, "5%"),
}


def test_a_job_is_gone_on_with_as_was_typed(
    checkpoint: Callable[[str], Path], cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello", "max_tokens": 2}\n')
    out = tmp_path / "out.jsonl"
    assert cli("batch", checkpoint("llama"), tmp_path / "in.jsonl", "-o", out, "-q") == 0
    seen: list[Any] = []
    monkeypatch.setattr(job_view.JobView, "run", lambda self, request, summary: seen.append(request) or 0)
    assert cli("jobs", "resume", out) == 0
    for flag, (value, arrived, wanted) in RESUME.items():
        assert cli("jobs", "resume", out, *typed(flag, value)) == 0
        assert arrived(seen[-1]) == wanted != arrived(seen[0]), flag


def test_prune_keeps_what_was_typed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(stores, "prune", lambda root, keep: seen.append(keep) or [])
    assert cli("models", "prune", "--keep", "3GiB") == 0
    assert cli("models", "prune", "--keep", "0") == 0
    assert seen == [3 << 30, 0]
