"""A person who has budgets for a machine: what `doctor`, `plan` and `config init` answer (`cli/plan.py`,
`cli/config.py`), and plans without weights (`api/plan_report.py`).

The machine is a recorded profile: 8 GiB of GPU memory behind 22 GB/s, 32 GiB of RAM, a disk of 3.1 GB/s.
"""

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from moedge import plan_report
from moedge.offload.machine.profile import Machine, save_machine
from moedge.offload.store.stores import RESERVE_NBYTES
from moedge.runtime.jobs import job_plan
from moedge.runtime.plan import presets
from moedge.runtime.settings import settings
from support import recorded_machine
from support.forked import forked
from support.recorded_machine import CONFIG, GIB, RECORDED

Cli = Callable[..., int]
Said = Callable[..., tuple[int, str]]


@pytest.fixture
def said(cli: Cli, capsys: pytest.CaptureFixture[str]) -> Said:
    """`said(*arguments)` is the exit code and all that was printed, with single spaces."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = cli(*arguments)
        return code, " ".join("".join(capsys.readouterr()).split())

    return run


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    return recorded_machine.config_only(tmp_path)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    save_machine(RECORDED, tmp_path / "box.json")
    return tmp_path / "box.json"


def test_budgets_for_a_machine_are_planned_and_explained(
    said: Said, config_only: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session of a person with an 8 GiB card, from a plan with --explain to a moedge.toml: first the plan."""
    # Curves take dozens of plans.
    for name in ("by_budget", "by_sequences"):
        monkeypatch.setattr(plan_report, name, lambda *_: [])
    model = ["plan", config_only, "--machine", machine]
    code, text = said(*model, "--gpu-mem", "7GiB", "--ram", "12GiB", "--disk", "40GiB", "--explain", "--quant", "nf4")
    assert code == 0
    assert "Qwen3-30B-A3B: qwen3_moe, 30.5 B parameters (3.0 B active), 48 layers x 128 experts, 8 per token" in text
    assert "computing on the GPU (RTX 3060 Ti), 7.0 of 8.0 GiB granted" in text
    assert re.search(r"holds [\d,]+ of 6,144 experts", text)
    ram = re.search(r"RAM 12\.00 GiB: (.*?) leave ([\d.]+) GiB for weights of ([\d.]+) GiB; ([\d.]+) GiB are", text)
    assert ram is not None
    needed = [float(part) * (1 if unit == "GiB" else 1 / 1024) for part, unit in re.findall(r"([\d.]+) (.iB)", ram[1])]
    assert sum(needed) + float(ram[2]) == pytest.approx(12, abs=0.03)
    disk = re.search(r"disk: ([\d.]+) GiB of prepared weights, of which passes read (\d+)%; written once", text)
    assert disk is not None
    assert 0 < int(disk[2]) < 50
    assert re.search(r"\+\d+ GiB ram [\d,.]+ tok/s, [\d.]+x", text), "the cheapest way up"


def test_budgets_for_a_machine_are_refused_or_written_down(
    said: Said, config_only: Path, machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None
) -> None:
    """The same session: what does not fit, and the moedge.toml."""
    monkeypatch.chdir(tmp_path)
    model = ["plan", config_only, "--machine", machine]
    code, text = said(*model, "--gpu-mem", "7GiB", "--ram", "6GiB", "--disk", "6GiB", "--quant", "nf4")
    assert code == 4
    assert re.search(r"prepared weights of [\d.]+ GiB do not fit the 6\.00 GiB that --disk .*give --disk \d+MiB", text)
    code, text = said(*model, "--gpu-mem", "1GiB", "--ram", "8GiB")
    assert code == 4
    assert re.search(
        r"does not fit: 1,024 MiB of device memory is too little .* nearest that fits: --gpu-mem \d+MiB", text
    )
    budgets = ("--gpu-mem", "7GiB", "--ram", "24GiB", "--disk", "40GiB")
    assert said(*model, *budgets, "--quant", "nf4", "--save", "plan.json")[0] == 0
    assert said("config", "init", "--from-plan", "plan.json") == (
        0,
        "moedge.toml written; `moedge config show` says what counts now",
    )
    written = tomllib.loads((tmp_path / "moedge.toml").read_text())
    assert (written["gpu-mem"], written["ram"]) == ("7168MiB", "24576MiB")
    assert written["quant"] == json.loads((tmp_path / "plan.json").read_text())["plan"]["quant"]


@pytest.mark.slow
def test_a_plan_for_a_gpu_of_a_data_sheet_says_so(
    said: Said, cli: Cli, capsys: pytest.CaptureFixture[str], config_only: Path
) -> None:
    def disk(*arguments: object) -> dict[str, Any]:
        """What the document says of it. A log gets lines beside it where planning takes seconds."""
        capsys.readouterr()
        assert cli("plan", config_only, *arguments, "--ram", "32GiB", "--json") == 0
        tier: dict[str, Any] = json.loads(capsys.readouterr().out)["tiers"][-1]
        return tier

    code, text = said("plan", config_only, "--gpu", "nvidia rtx 3060 12gb", "--ram", "32GiB", "--disk", "100GiB")
    assert code == 0
    assert "preset RTX 3060 12GB: figures of its data sheet, not measured" in text
    assert "computing on the GPU (RTX 3060 12GB), 11.5 of 12.0 GiB granted" in text
    code, text = said("plan", config_only, "--gpu", "rtx 3061")
    assert code == 4
    assert "nearest: RTX 3060" in text
    described = "Mine: 16GiB, 500GB/s, 60TFLOP/s, pcie4x8"
    code, text = said("plan", config_only, "--gpu", described, "--ram", "32GiB")
    assert code == 0
    assert "computing on the GPU (Mine), 15.5 of 16.0 GiB granted" in text
    # No byte of this machine's disk is promised to another one.
    assert disk("--gpu", described) == {"tier": "disk", "budget": None, "parts": {"store of weights": 0}}
    assert disk("--gpu", "rtx 3060 12gb", "--disk", "7TiB")["budget"] == 7 << 40


def test_presets_are_found_by_what_people_call_them() -> None:
    for name in presets.PRESETS:
        assert presets.find_preset(f"NVIDIA GeForce {name.lower()}") == (name, presets.PRESETS[name])
        machine = presets.with_preset(name, presets.PRESETS[name], RECORDED.hardware, None)
        assert Machine.from_json(machine.to_json()) == machine
        assert machine.hardware.gpus[0].nbytes == int(re.search(r"(\d+)GB$", name)[1]) * GIB  # type: ignore[index]
    assert presets.find_preset("rtx4090")[0] == "RTX 4090 24GB"
    kept = presets.with_preset("T4 16GB", presets.PRESETS["T4 16GB"], RECORDED.hardware, RECORDED)
    assert (kept.disk, kept.loading, kept.pin) == (RECORDED.disk, RECORDED.loading, None)


@pytest.mark.slow
def test_budgets_above_the_machine_are_refused_with_both_numbers(said: Said, machine: Path, tmp_path: Path) -> None:
    model = files("moedge.demo") / "model"
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    for command in (["plan", model], ["batch", model, rows, "-o", tmp_path / "out.jsonl"]):
        code, text = said(*command, "--ram", "900TiB")
        assert code == 2
        assert re.search(r"--ram 900TiB is more than this machine has \([\d.]+ GiB\); give at most \d+MiB", text)
    assert said("plan", model, "--ram", "64GiB", "--machine", machine)[0] == 0


def test_a_gpu_budget_above_the_gpu_is_refused() -> None:
    asked = settings.Budgets(gpu_mem="48GiB", ram="1GiB")
    for elsewhere in (False, True):
        with pytest.raises(settings.BadSize, match=r"--gpu-mem 48GiB is more than the GPU has \(8\.00 GiB\)"):
            asked.expected(RECORDED.hardware, elsewhere=elsewhere)


def test_curves_are_round_and_end_at_what_the_machine_has(
    cli: Cli, capsys: pytest.CaptureFixture[str], config_only: Path, machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the curve of host memory is looked at; the other two take dozens of plans.
    for name in ("by_sequences", "suggestions"):
        monkeypatch.setattr(plan_report, name, lambda *_: [])

    def curve(*arguments: object) -> list[int]:
        capsys.readouterr()
        assert cli("plan", config_only, "--json", "--quant", "nf4", "--disk", "100GiB", *arguments) == 0
        points = json.loads(capsys.readouterr().out)["points"]
        return [point["value"] for point in points if point["varied"] == "host"]

    elsewhere = curve("--machine", machine, "--gpu-mem", "0", "--ram", "20GiB")
    assert [value / GIB for value in elsewhere] == [10, 15, 20, 30, 40]
    here = replace(RECORDED, hardware=replace(RECORDED.hardware, gpus=()))
    monkeypatch.setattr(job_plan, "find_hardware", lambda folder: here.hardware)
    monkeypatch.setattr(job_plan, "load_machine", lambda hardware, path: here)
    monkeypatch.setattr(settings, "host_total", lambda: 32 * GIB)
    assert [value / GIB for value in curve("--ram", "20.3GiB")] == pytest.approx([10, 15, 20, 20.3, 30])


def test_a_folder_whose_index_says_something_else_than_its_config_is_refused(
    said: Said, config_only: Path, no_curves: None
) -> None:
    index = config_only / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 61_064_245_248}, "weight_map": {}}))
    assert said("plan", config_only, "--gpu", "RTX 3090", "--ram", "64GiB", "--quant", "nf4")[0] == 0
    index.write_text(json.dumps({"metadata": {"total_size": 30_000_000_000}, "weight_map": {}}))
    code, text = said("plan", config_only)
    assert code != 0
    assert "30,000,000,000 bytes of weights, and config.json describes 61," in text
    (config_only / "config.json").write_text(json.dumps(CONFIG | {"model_type": "jetmoe"}))
    index.unlink()
    code, text = said("plan", config_only)
    assert code != 0
    assert "jetmoe" in text


def test_free_space_is_what_the_disk_has_less_the_reserve(
    cli: Cli, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None
) -> None:
    """The same bytes decide when a store is written."""
    from moedge.offload.store import stores

    class Usage:
        free = 2 * RESERVE_NBYTES + 20 * (1 << 20)

    monkeypatch.setattr(stores.shutil, "disk_usage", lambda path: Usage)
    assert stores.DiskSpace.of(tmp_path / "none", None).new_nbytes == RESERVE_NBYTES + (20 << 20)
    model = files("moedge.demo") / "model"
    assert cli("plan", model, "--disk-dir", tmp_path / "none", "--json") == 0
    assert json.loads(capsys.readouterr().out)["tiers"][-1]["budget"] == RESERVE_NBYTES + (20 << 20)


def test_a_saved_plan_runs_while_what_it_uses_is_there(
    cli: Cli, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_curves: None
) -> None:
    """Saved with all memory that was free, run with less of it."""
    model, rows, saved = files("moedge.demo") / "model", tmp_path / "in.jsonl", tmp_path / "plan.json"
    rows.write_text('{"prompt": "a b", "max_tokens": 2}\n')
    assert cli("plan", model, rows, "--ram", "4GiB", "--save", saved) == 0
    parts = json.loads(saved.read_text())["tiers"][0]["parts"]
    # What passes may keep is no need.
    used = sum(parts.values()) - parts.get("kept for the next pass", 0)
    enough, short = f"{-(-used // (1 << 20))}MiB", f"{used // (1 << 20) - 1}MiB"
    capsys.readouterr()
    assert cli("batch", model, rows, "-o", tmp_path / "short.jsonl", "--plan", saved, "--ram", short) == 4
    assert "are granted now" in " ".join(capsys.readouterr().err.split())
    # In a process of its own: this one holds what other tests loaded.
    batch = ["batch", model, rows, "-o", tmp_path / "out.jsonl", "--plan", saved, "--ram", enough]
    with forked(batch, tmp_path) as process:
        said = process.stderr.read()
    assert process.wait() == 0, said
