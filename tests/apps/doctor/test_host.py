"""Every check of a machine (`apps/doctor/host.py`) tells well from ill on machines that are made up, and says what
mends it.
"""

import re
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from moedge.apps.doctor import host as places
from moedge.apps.doctor.host import (
    Finding,
    HostMemoryFacts,
    Verdict,
    check_age,
    check_cache_reads,
    check_hub_cache,
    check_memory,
    check_open_files,
    check_packages,
    check_state,
    check_stores,
    check_torch,
    gpu_state_findings,
    speed_findings,
)
from moedge.computing import TorchBuild, choose_computing, find_torch
from moedge.offload.machine.hardware import Driver, GpuInfo, GpuState, Hardware, PcieLink, shows_gpu
from moedge.offload.machine.profile import Disk, DiskRead, Link, Machine, PinLimit
from moedge.offload.memory import MemoryGroup
from moedge.offload.store.manifest import LOCK

GIB = 1 << 30
OK, WARN, FAIL = Verdict.OK, Verdict.WARN, Verdict.FAIL
CPU_BUILD, CUDA_BUILD = TorchBuild("2.13.0+cpu", None), TorchBuild("2.13.0+cu130", (13, 0))


def versions(**found: str) -> dict[str, str]:
    return {"moedge": "1", **found}


@pytest.mark.parametrize(
    ("found", "verdict", "fix"),
    [
        ({"torch": "2.12.0+cu130"}, OK, ""),
        ({"torch": "2.13.0rc1"}, OK, ""),
        ({"torch": "2.4.1"}, FAIL, "pip install 'torch<2.14,>=2.11'"),
        ({}, FAIL, "pip install 'torch<2.14,>=2.11'"),
    ],
)
def test_packages_are_held_against_what_moedge_declares(found: dict[str, str], verdict: Verdict, fix: str) -> None:
    def installed(name: str) -> str:
        if name not in versions(**found):
            raise PackageNotFoundError(name)
        return versions(**found)[name]

    wanted = ["torch>=2.11,<2.14", 'absent>=1; extra == "test"', 'absent>=1; python_version < "3"']
    finding = check_packages(wanted, installed)
    assert (finding.verdict, finding.fix) == (verdict, fix)


def test_this_installation_is_as_declared() -> None:
    assert check_packages().verdict is OK


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    build = find_torch()
    assert build is not None
    assert build.version == torch.__version__
    assert (build.cuda is None) == (torch.version.cuda is None)


@pytest.mark.parametrize(
    ("torch", "driver", "gpus", "verdict", "says"),
    [
        (None, None, 0, FAIL, "pip install torch"),
        (CPU_BUILD, None, 0, OK, ""),
        (CUDA_BUILD, None, 0, OK, ""),
        (CUDA_BUILD, Driver((13, 1), "580.1"), 1, OK, ""),
        (CPU_BUILD, Driver((13, 1), "580.1"), 1, FAIL, "/whl/cu130"),
        (CPU_BUILD, Driver((12, 8)), 1, FAIL, "/whl/cu128"),
        (CPU_BUILD, Driver((12, 8)), 0, OK, ""),
        (CUDA_BUILD, Driver((12, 6)), 1, FAIL, "a newer NVIDIA driver, or pip install --force-reinstall torch"),
        (TorchBuild("2.13.0+cu128", (12, 8)), Driver((12, 6)), 1, OK, ""),
    ],
)
def test_a_torch_that_cannot_use_the_gpu_is_in_the_way(
    torch: TorchBuild | None, driver: Driver | None, gpus: int, verdict: Verdict, says: str
) -> None:
    finding = check_torch(torch, driver, gpus)
    assert finding.verdict is verdict
    assert says in finding.fix
    assert bool(finding.fix) == (verdict is not OK)


def test_who_has_no_gpu_is_not_sent_to_doctor() -> None:
    assert choose_computing(CPU_BUILD, None, ()).reason == "no NVIDIA driver found"
    assert choose_computing(CPU_BUILD, None, (), undriven=True).reason.endswith("`moedge doctor` says more")
    finding = check_torch(CPU_BUILD, None, 0, undriven=True)
    assert (finding.verdict, "install NVIDIA's driver" in finding.fix) == (WARN, True)


@pytest.mark.parametrize(
    ("vendor", "kind", "found"), [("10de", "0300", True), ("10de", "0c03", False), ("1af4", "0300", False)]
)
def test_a_gpu_is_found_on_the_bus(tmp_path: Path, vendor: str, kind: str, found: bool) -> None:
    device = tmp_path / "sys" / "bus" / "pci" / "devices" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"0x{vendor}\n")
    (device / "class").write_text(f"0x{kind}00\n")
    assert shows_gpu(tmp_path) is found


def test_a_machine_without_a_bus_shows_no_gpu(tmp_path: Path) -> None:
    assert not shows_gpu(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "dxg").touch()
    assert shows_gpu(tmp_path), "the one of WSL2"


GROUP = MemoryGroup(Path("/sys/fs/cgroup/app"), 8 * GIB, 0)


@pytest.mark.parametrize(
    ("memory", "verdict", "found", "fix"),
    [
        (HostMemoryFacts(32 * GIB, 0, 32 * GIB, 24 * GIB), OK, "no limit below that; --ram auto takes 21.60 GiB", ""),
        (HostMemoryFacts(32 * GIB, GIB, 8 * GIB, 7 * GIB, (GROUP,)), WARN, "cgroup /sys/fs/cgroup/app", "MemoryMax="),
        (HostMemoryFacts(32 * GIB, 0, 20 * GIB, 7 * GIB), OK, "limited to 20.00 GiB by ulimit", ""),
        (HostMemoryFacts(32 * GIB, 0, 32 * GIB, GIB), FAIL, "1.00 GiB available", "free some"),
        (HostMemoryFacts(32 * GIB, 0, GIB, GIB), FAIL, "by ulimit", "ulimit -v unlimited"),
    ],
)
def test_memory_is_what_limits_leave(memory: HostMemoryFacts, verdict: Verdict, found: str, fix: str) -> None:
    finding = check_memory(memory)
    assert finding.verdict is verdict
    assert found in finding.found
    assert fix in finding.fix


def test_few_open_files_are_said() -> None:
    assert check_open_files(256).fix == "ulimit -n 4096"
    assert check_open_files(1024).verdict is OK


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "disk_free", lambda folder: 100 * GIB)


def test_downloads_that_were_cut_off_are_named(tmp_path: Path, roomy: None) -> None:
    assert [finding.verdict for finding in check_hub_cache(tmp_path / "none", False)] == [OK]
    (tmp_path / "models--Qwen--Qwen3-30B-A3B/blobs").mkdir(parents=True)
    assert len(check_hub_cache(tmp_path, False)) == 1
    (tmp_path / "models--Qwen--Qwen3-30B-A3B/blobs/12ab.incomplete").write_text("")
    cut = check_hub_cache(tmp_path, True)[1]
    assert (cut.verdict, cut.fix) == (WARN, "hf download Qwen/Qwen3-30B-A3B")


def test_little_room_is_to_mend_and_folders_that_cannot_be_written_are_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "disk_free", lambda folder: 5 * GIB)
    assert check_stores(tmp_path).fix == "--disk-dir FOLDER on another disk"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / LOCK).touch()
    assert "moedge models prune" in check_stores(tmp_path).fix
    assert "HF_HOME" in check_hub_cache(tmp_path, False)[0].fix
    monkeypatch.setattr(places, "_writable", lambda folder: False)
    assert check_stores(tmp_path).verdict is FAIL
    assert check_hub_cache(tmp_path, False)[0].verdict is FAIL
    assert check_state(tmp_path / "machine.json").verdict is WARN


def test_folders_in_which_no_file_can_be_made_are_found_out() -> None:
    """For the superuser, permissions allow everything, in /proc too."""
    assert check_state(Path("/proc/nope/moedge/machine.json")).verdict is WARN
    assert check_stores(Path("/proc/nope")).verdict is FAIL


MACHINE = Machine(
    Hardware("a CPU", 2, 32 * GIB, (GpuInfo("a GPU", 8 * GIB),), "/dev/sda ext4"),
    2e10,
    Disk(True, GIB, (DiskRead(1 << 20, 1, 3e9), DiskRead(1 << 22, 2, 2e9, random=True))),
    Link(8e9, 2.2e10),
    PinLimit(4 * GIB, False),
    {"none": {1: 1.4e10, 1024: 9.6e11}},
    device_memory_bytes_s=4e11,
    device_flop_s={"nf4": {1: 1e11, 1024: 3e13}},
    measured_at="2026-01-01T00:00:00+00:00",
    torch="2.13.0",
)


def by_name(machine: Machine) -> dict[str, Finding]:
    return {finding.name: finding for finding in speed_findings(machine, "2.13.0")}


def test_a_good_machine_is_well_and_every_number_is_there() -> None:
    found = by_name(MACHINE)
    assert {finding.verdict for finding in found.values()} == {OK}
    text = " ".join(finding.found for finding in found.values())
    for number in ("3.0 GB/s in order", "2.0 GB/s at random", "20.0 GB/s", "22.0 GB/s", "8.0 GB/s", "4.00 GiB tried",
                   "400.0 GB/s", "bf16 0.96T/14G", "nf4 30T/0.1T", "1,024/1 rows"):  # fmt: skip
        assert number in text


@pytest.mark.parametrize(
    ("change", "name", "fix"),
    [
        ({"disk": Disk(True, GIB, (DiskRead(1 << 20, 1, 1.5e8),))}, "disk", "NVMe"),
        ({"disk": None}, "disk", "free 256 MiB"),
        ({"link": Link(8e9, None)}, "link", "memlock"),
        ({"link": Link(2e9, 3e9)}, "link", "PCIe lanes"),
        ({"link": None}, "link", "moedge doctor"),
        ({"pin": PinLimit(GIB, True)}, "pinning", "WSL2"),
        ({"pin": None}, "pinning", "moedge doctor"),
        ({"torch": "2.12.0"}, "profile", "moedge doctor"),
    ],
)
def test_what_is_slow_or_lacking_is_to_mend_and_nothing_else(
    change: dict[str, Disk | Link | PinLimit | str | None], name: str, fix: str
) -> None:
    found = by_name(replace(MACHINE, **change))  # type: ignore[arg-type]
    assert {finding.name for finding in found.values() if finding.verdict is WARN} == {name}
    assert fix in found[name].fix


X16, X8 = PcieLink(16, 16.0), PcieLink(8, 16.0)


@pytest.mark.parametrize(
    ("taken", "link", "busy", "found"),
    [
        (GIB // 4, X16, True, {"GPU in use": (OK, "0.25 GiB of 8.00 GiB"), "PCIe": (OK, "PCIe 4.0 x16")}),
        (GIB, X16, True, {"GPU in use": (WARN, "1.00 GiB of 8.00 GiB are taken by a desktop"), "PCIe": (OK, "")}),
        (0, X8, False, {"GPU in use": (OK, ""), "PCIe": (WARN, "8 lanes, and the card can have PCIe 4.0 x16")}),
        (0, PcieLink(16, 8.0), True, {"GPU in use": (OK, ""), "PCIe": (WARN, "PCIe 3.0 x16, and .* PCIe 4.0 x16")}),
        (0, PcieLink(16, 2.5), False, {"GPU in use": (OK, ""), "PCIe": (OK, "PCIe 4.0 x16")}),
        (None, None, True, {}),
    ],
)
def test_what_is_taken_of_a_gpu_and_a_narrow_link_are_said(
    taken: int | None, link: PcieLink | None, busy: bool, found: dict[str, tuple[Verdict, str]]
) -> None:
    state = GpuState(GpuInfo("RTX 3060 Ti", 8 * GIB), taken, link, link and X16)
    findings = {finding.name: finding for finding in gpu_state_findings([state], busy)}
    assert {name: finding.verdict for name, finding in findings.items()} == {
        name: verdict for name, (verdict, _) in found.items()
    }
    for name, (verdict, words) in found.items():
        assert re.search(words, findings[name].found), findings[name].found
        assert bool(findings[name].fix) is (verdict is WARN)


def test_a_slow_disk_of_the_model_cache_is_said_with_the_time_that_a_checkpoint_takes() -> None:
    slow, fast = check_cache_reads(Path("/nfs/hub"), 1.2e8), check_cache_reads(Path("/nvme/hub"), 2e9)
    assert (slow.verdict, fast.verdict, fast.fix) == (WARN, OK, "")
    assert slow.found == "/nfs/hub: 120 MB/s; a checkpoint of 60 GB is read in 8:20"
    assert "HF_HOME" in slow.fix
    assert check_cache_reads(Path("/full"), None).verdict is WARN


def test_without_a_gpu_nothing_is_said_of_one() -> None:
    bare = replace(
        MACHINE, hardware=replace(MACHINE.hardware, gpus=()), link=None, pin=None, device_memory_bytes_s=None,
        device_flop_s={},
    )  # fmt: skip
    assert set(by_name(bare)) == {"disk", "memory", "CPU rates", "profile"}


def test_a_profile_of_a_busy_machine_is_marked() -> None:
    found = check_age(replace(MACHINE, others=0.6), MACHINE.torch)
    assert found.verdict == Verdict.WARN
    assert "other programs used 60% of the processors: its speeds are provisional" in found.found


@pytest.mark.parametrize(
    ("now", "ago"),
    [
        ("2026-01-01T00:00:30", "just now"),
        ("2026-01-01T00:30:00", "30 minutes"),
        ("2026-01-01T05:00:00", "5 hours"),
        ("2026-01-04T00:00:00", "3 days"),
    ],
)
def test_the_age_of_a_profile_is_said(now: str, ago: str) -> None:
    assert ago in check_age(MACHINE, "2.13.0", datetime.fromisoformat(now).replace(tzinfo=UTC)).found
