"""`moedge doctor` as scripts and people see it."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moedge.apps.doctor import examination, host, kernels
from moedge.offload.machine.profile import LoadingRates, Overheads, read_machine
from moedge.offload.machine.speeds import measure_disk
from moedge.runtime.calibration import machine_profile, pass_rates
from moedge.runtime.calibration.machine_profile import saved_profile
from moedge.runtime.plan.plan_file import PastRun, keep

MIB = 1 << 20
OVERHEADS = Overheads(1e-3, 1e-4, 1e-4, 1e-8, 3e-4, 1e-5)
FUSED = Overheads(5e-4, 5e-5, 5e-5, 1e-8, 3e-4, 1e-5)
LOADING = LoadingRates(1e9, {"nf4": 2e8})


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measurements of a moment, kept for this test alone."""
    monkeypatch.setattr(
        machine_profile, "measure_disk", lambda folder: measure_disk(folder, 8 * MIB, 0.001, (MIB,), (1,))
    )
    monkeypatch.setattr(machine_profile, "measure_memory", lambda nbytes: 1e10)
    monkeypatch.setattr(kernels, "_CHECKED", kernels._CHECKED[:1])
    monkeypatch.setattr(pass_rates, "weight_rates", lambda: {"nf4": {1: 1e9, 1024: 1e12}})
    monkeypatch.setattr(pass_rates, "pass_rates", dict)
    monkeypatch.setattr(pass_rates, "loading_rates", lambda: LOADING)
    monkeypatch.setattr(pass_rates, "measure_overheads", lambda: OVERHEADS)
    monkeypatch.setattr(pass_rates, "measure_fused_overheads", lambda: FUSED)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_what_is_measured_is_kept_and_printed_as_a_profile_that_can_be_read_back(
    brief: None, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stores = tmp_path / "stores"
    assert saved_profile(stores) is None
    assert cli("doctor", "--quick", "--disk-dir", stores) == 0
    assert "was not measured yet\n                    fix: moedge doctor\n" in capsys.readouterr().out
    assert cli("doctor", "--json", "--disk-dir", stores) == 0
    printed = capsys.readouterr().out
    (tmp_path / "machine.json").write_text(printed)
    machine = read_machine(tmp_path / "machine.json")
    assert machine == saved_profile(stores)
    assert machine.flop_s == {"nf4": {1: 1e9, 1024: 1e12}}
    assert (machine.loading, machine.overheads, machine.fused_overheads) == (LOADING, OVERHEADS, FUSED)
    document = json.loads(printed)
    assert document["schema"] == "moedge.machine/8"
    assert {"name", "verdict", "found", "fix"} == set(document["findings"][0])
    assert 0 < document["now"]["host_available_nbytes"] <= document["now"]["host_total_nbytes"]
    assert "cache reads" not in [finding["name"] for finding in document["findings"]], "it is on the same disk"
    assert cli("doctor", "--quick", "--disk-dir", stores) == 0
    told = capsys.readouterr().out
    assert "nf4 1T/1G FLOP/s" in told
    assert "measured just now" in told
    assert "bitsandbytes" not in told
    assert "predictions" not in told
    keep(PastRun("then", "here", "a model", "shape", "nf4", "disk", 1.2, 10.0, 8.0, 1 << 30, 1 << 29))
    assert cli("doctor", "--quick", "--disk-dir", stores) == 0
    told = capsys.readouterr().out
    assert "off by +25%; the newest, a model: 8.0 tok/s, 10.0 predicted, peak 0.50 GiB of 1.00 GiB planned" in told
    assert not any(line != line.rstrip() for line in told.splitlines())


def test_a_failure_exits_with_its_code_and_names_the_fix(
    brief: None, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = host.HostMemoryFacts(1 << 30, 0, 1 << 30, 1 << 29)
    monkeypatch.setattr(examination, "find_host_memory", lambda: poor)
    assert cli("doctor", "--quick") == 6
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("fail  RAM") for line in lines)
    assert lines[-1].startswith("1 failure")


def test_a_disk_that_fails_while_it_is_measured_is_a_finding(
    brief: None, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(folder: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(machine_profile, "measure_disk", broken)
    monkeypatch.setattr(examination, "_try_kernels", lambda gpu, say: [])
    assert cli("doctor") == 6
    assert "Input/output error" in capsys.readouterr().out


def test_looking_quickly_imports_no_torch(brief: None) -> None:
    code = (
        "import sys\nfrom moedge.cli.main import app\n"
        "try:\n    app(['doctor', '--quick', '--json'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["machines"] == []


def test_every_key_of_the_output_is_documented(
    brief: None, cli: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli("doctor", "--quick", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    page = page.partition("\n## The machine profile\n")[2].partition("\n## ")[0]
    keys = [*document, *document["findings"][0], *document["now"]]
    assert [key for key in keys if f"`{key}`" not in page and f".{key}`" not in page] == []


def test_a_model_cache_on_another_disk_is_measured_too(
    brief: None, cli: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    other = tmp_path / "other-disk"
    other.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(other))
    monkeypatch.setattr(
        machine_profile, "measure_disk", lambda folder, *_, **__: measure_disk(folder, 8 * MIB, 0.001, (MIB,), (1,))
    )
    monkeypatch.setattr(examination, "_try_kernels", lambda *_: [])
    monkeypatch.setattr(examination, "disk_of", lambda folder: folder == other)
    assert cli("doctor", "--disk-dir", tmp_path / "stores") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "cache reads" in line]
    assert re.search(rf"{other}: [\d.]+ [GM]B/s; a checkpoint of 60 GB is read in ", line)
