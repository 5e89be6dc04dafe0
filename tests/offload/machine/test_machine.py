"""A profile comes back as it was written, belongs to one hardware, and a damaged one is never believed."""

import ctypes
import json
import os
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moedge.offload.machine import profile as saved
from moedge.offload.machine.bystanders import Bystanders
from moedge.offload.machine.hardware import Driver as NvidiaDriver
from moedge.offload.machine.hardware import (
    GpuInfo,
    GpuState,
    Hardware,
    PcieLink,
    find_driver,
    find_gpu_states,
    find_gpus,
    find_hardware,
)
from moedge.offload.machine.profile import (
    Disk,
    DiskRead,
    Link,
    LoadingRates,
    Machine,
    Overheads,
    PinLimit,
    load_machine,
    read_machine,
    save_machine,
    saved_path,
    this_machine,
)

HARDWARE = Hardware("a CPU", 2, 1 << 34, (GpuInfo("a GPU", 8 << 30, "8.6", 28),), "/dev/sda ext4")
MACHINE = Machine(
    HARDWARE,
    1.5e10,
    Disk(True, 1 << 30, (DiskRead(1 << 20, 1, 2e9), DiskRead(1 << 22, 2, 3e9)), None, 1.2e9),
    Link(8e9, 2.2e10),
    PinLimit(1 << 30, True),
    {"nf4": {1: 2e9, 128: 3e11}},
    4e11,
    {"int8": {1: 1e11}},
    "2026-11-21T14:00:00+00:00",
    "2.13.0",
    Overheads(1e-3, 1e-4, 1e-4, 1e-8, 3e-4, 1e-5),
    Overheads(2e-4, 2e-5, 1e-5, 6e-6, 3e-4, 1e-5),
    Overheads(2e-3, 1e-4, 1e-5, 1e-9, 3e-4, 1e-5),
    {"attention": "does not compile", "cache": ""},
    LoadingRates(6e8, {"nf4": 2e8}),
)
SPEEDS = st.floats(1, 1e15)
COUNTS = st.integers(1, 1 << 40)
RATES = st.dictionaries(st.text(), st.dictionaries(COUNTS, SPEEDS, max_size=3), max_size=3)
READS = st.lists(st.builds(DiskRead, COUNTS, COUNTS, SPEEDS, st.booleans()), min_size=1, max_size=3).map(tuple)
MACHINES = st.builds(
    Machine,
    st.builds(
        Hardware, st.text(), COUNTS, COUNTS, st.lists(st.builds(GpuInfo, st.text(), COUNTS)).map(tuple), st.text()
    ),
    SPEEDS,
    st.none() | st.builds(Disk, st.booleans(), COUNTS, READS, st.none() | SPEEDS, st.none() | SPEEDS),
    st.none() | st.builds(Link, SPEEDS, st.none() | SPEEDS),
    st.none() | st.builds(PinLimit, st.integers(0, 1 << 40), st.booleans()),
    RATES,
    st.none() | SPEEDS,
    RATES,
    st.just("") | st.datetimes().map(datetime.isoformat),
    st.text(),
    st.none() | st.builds(Overheads, *[SPEEDS] * 6),
    st.none() | st.builds(Overheads, *[SPEEDS] * 6),
    st.none() | st.builds(Overheads, *[SPEEDS] * 6),
    st.none() | st.dictionaries(st.text(), st.text(), max_size=3),
    st.none() | st.builds(LoadingRates, SPEEDS, st.dictionaries(st.text(), SPEEDS, max_size=3)),
)


@given(MACHINES)
def test_json_gives_the_same_machine_back(machine: Machine) -> None:
    assert Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every value in a JSON object."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    return [path, *(inner for key, value in items for inner in paths(value, (*path, key)))]


def damaged(path: tuple[Any, ...], value: Any) -> Any:
    document = {"machine": MACHINE.to_json()}
    inner: Any = document
    steps = ("machine", *path)
    for step in steps[:-1]:
        inner = inner[step]
    inner[steps[-1]] = value
    return document["machine"]


@pytest.mark.parametrize("path", paths(MACHINE.to_json()), ids=lambda path: ".".join(map(str, path)))
def test_no_value_may_be_of_another_kind_or_out_of_range(path: tuple[Any, ...]) -> None:
    allowed = {"direct": [True], "refused": [True], "random": [True], "nbytes": [0], "torch": ["x"], "kernels": ["x"]}
    allowed |= {name: [{}] for name in ("flop_s", "device_flop_s", "nf4", "int8", "kernel_lacks")}
    allowed |= {name: ["x"] for name in ("attention", "cache")}
    allowed["others"] = [0, 0.5]
    allowed["pack_bytes_s"] = [{}, {"a": 1}]
    for wrong in (True, "x", -1, float("nan"), float("inf"), [], {}, 0, 0.5, [1], {"a": 1}):
        try:
            machine = Machine.from_json(damaged(path, wrong))
        except ValueError:
            continue
        # What describes the hardware is compared with what is found.
        assert machine.hardware != HARDWARE or wrong in allowed.get(path[-1], []) or fine_speed(path, wrong)


def fine_speed(path: tuple[Any, ...], value: Any) -> bool:
    return value == 0.5 and (str(path[-1]).endswith("_s") or str(path[-1]).isdigit() or "pack_bytes_s" in path)


def test_the_best_way_to_read_is_the_fastest() -> None:
    assert MACHINE.disk is not None
    assert MACHINE.disk.best == MACHINE.disk.best_random == DiskRead(1 << 22, 2, 3e9)
    scattered = DiskRead(1 << 20, 1, 4e9, random=True)
    both = replace(MACHINE.disk, reads=(*MACHINE.disk.reads, scattered))
    assert (both.best, both.best_random) == (MACHINE.disk.best, scattered)


def test_a_fifth_of_the_pin_limit_is_left_where_there_is_one() -> None:
    assert PinLimit(1000, True).usable == 800
    assert PinLimit(1000, False).usable is None


class Counter:
    """A measurement that counts how often it was made."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, hardware: Hardware) -> Machine:
        self.times += 1
        return Machine(hardware, 1e9 + self.times)


def test_a_machine_is_measured_once_and_again_on_request(tmp_path: Path) -> None:
    measure, path = Counter(), tmp_path / "state" / "machine.json"
    first = this_machine(tmp_path, measure, path=path)
    assert this_machine(tmp_path, measure, path=path) == first
    assert measure.times == 1
    assert this_machine(tmp_path, measure, again=True, path=path).memory_bytes_s == 1e9 + 2
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


def test_what_was_measured_on_a_busy_machine_is_measured_again_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, others, path = [0.9], [0.6, 0.1], tmp_path / "machine.json"
    monkeypatch.setattr(Bystanders, "share", lambda self: busy[0])

    def measure(hardware: Hardware) -> Machine:
        return Machine(hardware, 1e9, others=others.pop(0))

    with pytest.warns(UserWarning, match="other programs used 60% of the processors"):
        first = this_machine(tmp_path, measure, path=path)
    assert this_machine(tmp_path, measure, path=path) == first, "it is as busy as before"
    busy[0] = 0.0
    assert this_machine(tmp_path, measure, path=path).others == 0.1
    assert this_machine(tmp_path, measure, path=path).others == 0.1, "it is not measured a third time"


def test_what_others_and_a_hypervisor_take_counts_and_own_work_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a second on two processors: 0.5 of this process, 0.3 of its children, 0.4 of others, 0.2 stolen, 0.6 idle."""

    class Times(NamedTuple):
        user: float = 100.0
        idle: float = 500.0
        iowait: float = 3.0
        steal: float = 1.0
        guest: float = 7.0

    moments = [
        (Times(), os.times_result((1.0, 1.0, 1.0, 1.0, 0.0)), 10.0),
        (Times(101.2, 500.5, 3.1, 1.2, 7.4), os.times_result((1.4, 1.1, 1.2, 1.1, 0.0)), 11.0),
    ]
    now = iter(moments)
    current: list[Any] = []
    monkeypatch.setattr(psutil, "cpu_times", lambda: current.append(next(now)) or current[-1][0])
    monkeypatch.setattr(os, "times", lambda: current[-1][1])
    monkeypatch.setattr(time, "perf_counter", lambda: current[-1][2])
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    bystanders = Bystanders()
    assert bystanders.share() == pytest.approx((0.4 + 0.2) / 2)


def test_the_kernels_own_numbers_give_a_share() -> None:
    bystanders = Bystanders()
    time.sleep(0.1)
    assert 0 <= bystanders.share() <= 1


@pytest.mark.parametrize(
    "change",
    [{"cpu": "another"}, {"cores": 4}, {"ram_nbytes": 1 << 35}, {"gpus": ()}, {"disk": "/dev/sdb ext4"}],
    ids=lambda change: next(iter(change)),
)
def test_other_hardware_has_no_profile_until_it_is_measured(change: dict[str, Any], tmp_path: Path) -> None:
    path, other = tmp_path / "machine.json", replace(HARDWARE, **change)
    save_machine(MACHINE, path)
    assert load_machine(other, path) is None
    save_machine(Machine(other, 1e9), path)
    assert load_machine(other, path) == Machine(other, 1e9)
    assert load_machine(HARDWARE, path) == MACHINE


def test_the_file_keeps_the_newest_profiles_only(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for cores in range(1, 21):
        save_machine(replace(MACHINE, hardware=replace(HARDWARE, cores=cores)), path)
    kept = [profile["hardware"]["cores"] for profile in json.loads(path.read_text())["machines"]]
    assert kept == [20, 19, 18, 17, 16, 15, 14, 13]


def test_a_file_cut_anywhere_or_of_another_schema_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    save_machine(MACHINE, path)
    whole = path.read_bytes()
    wrong = [whole[:length] for length in range(0, len(whole), 7)]
    wrong += [whole.replace(b"machine/8", b"machine/7"), b"[]", b"\xff\xfe", b"[" * 100_000, b'{"machines": 3}']
    for content in wrong:
        path.write_bytes(content)
        assert load_machine(HARDWARE, path) is None
    save_machine(MACHINE, path)
    assert path.read_bytes() == whole


def test_a_profile_of_another_machine_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(FileNotFoundError):
        read_machine(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="moedge doctor --json"):
        read_machine(path)
    save_machine(MACHINE, path)
    assert read_machine(path) == MACHINE


def test_a_failed_write_leaves_the_old_profile_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "machine.json"
    save_machine(MACHINE, path)

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        save_machine(replace(MACHINE, memory_bytes_s=1e9), path)
    assert load_machine(HARDWARE, path) == MACHINE
    assert list(tmp_path.iterdir()) == [path]


def test_a_profile_that_cannot_be_kept_is_still_used_and_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="measured again next time"):
        machine = this_machine(tmp_path, Counter(), path=tmp_path / "file" / "machine.json")
    assert machine.memory_bytes_s == 1e9 + 1


def test_profiles_are_kept_in_the_user_s_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(saved, "user_state_path", lambda name: tmp_path / name)
    assert saved_path() == tmp_path / "moedge" / "machine.json"


def test_hardware_is_the_same_when_looked_at_twice_and_for_folders_to_come(tmp_path: Path) -> None:
    hardware = find_hardware(tmp_path)
    assert hardware == find_hardware(tmp_path / "not" / "yet")
    assert hardware.cores == len(os.sched_getaffinity(0))
    assert hardware.disk != "unknown"


class Driver:
    """The calls of libcuda, as ctypes makes them."""

    def __init__(self, names: list[bytes], init: int = 0, describe: int = 0) -> None:
        self.names, self.init, self.describe = names, init, describe

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, handle: Any, ordinal: int) -> int:
        handle._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name: Any, length: int, handle: ctypes.c_int) -> int:
        name.value = self.names[handle.value]
        return self.describe

    def cuDeviceTotalMem_v2(self, nbytes: Any, handle: ctypes.c_int) -> int:
        nbytes._obj.value = (handle.value + 1) << 33
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, handle: ctypes.c_int) -> int:
        """The second does not know."""
        value._obj.value = {75: 8, 76: 6, 16: 28}[number]
        return handle.value


def test_gpus_are_those_that_the_driver_shows() -> None:
    assert find_gpus(Driver([b"one", b"two"])) == (GpuInfo("one", 1 << 33, "8.6", 28), GpuInfo("two", 2 << 33))
    assert find_gpus(Driver([])) == ()
    assert find_gpus(Driver([b"no device for this process"], init=100)) == ()
    with pytest.raises(OSError, match="CUDA error 999"):
        find_gpus(Driver([b"lost"], describe=999))


class BusDriver(Driver):
    """Also says where the first device is; the second one's place is not known."""

    def cuDeviceGetPCIBusId(self, address: Any, length: int, handle: ctypes.c_int) -> int:
        address.value = b"0000:0A:00.0"
        return handle.value


class Nvml:
    """The calls of libnvidia-ml, as ctypes makes them; `second` is whether it has nvmlDeviceGetMemoryInfo_v2."""

    def __init__(self, init: int = 0, second: bool = True) -> None:
        self.init = init
        if second:
            self.nvmlDeviceGetMemoryInfo_v2 = self._memory

    def nvmlInit_v2(self) -> int:
        return self.init

    def nvmlShutdown(self) -> int:
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes, handle: Any) -> int:
        handle._obj.value = 7
        return 0 if address == b"0000:0A:00.0" else 6

    def _memory(self, handle: ctypes.c_void_p, info: Any) -> int:
        assert (handle.value, info._obj.version) == (7, 40 | 2 << 24)
        info._obj.reserved, info._obj.used = 300 << 20, 600 << 20
        return 0


def test_what_is_taken_of_a_gpu_and_its_link_come_from_the_driver_and_the_kernel(tmp_path: Path) -> None:
    folder = tmp_path / "sys/bus/pci/devices/0000:0a:00.0"
    folder.mkdir(parents=True)
    for name, text in {"current_link_width": "8", "current_link_speed": "2.5 GT/s PCIe", "max_link_width": "16",
                       "max_link_speed": "16.0 GT/s PCIe"}.items():  # fmt: skip
        (folder / name).write_text(text + "\n")
    driver = BusDriver([b"one", b"two"])
    one, two = find_gpu_states(driver, Nvml(), tmp_path)
    assert one == GpuState(GpuInfo("one", 1 << 33, "8.6", 28), 600 << 20, PcieLink(8, 2.5), PcieLink(16, 16.0))
    assert (two.taken_nbytes, two.link, two.best_link) == (None, None, None)
    (folder / "current_link_speed").write_text("Unknown\n")
    for nvml in (Nvml(init=1), Nvml(second=False)):
        one, _ = find_gpu_states(driver, nvml, tmp_path)
        assert (one.taken_nbytes, one.link) == (None, None)
    assert find_gpu_states(BusDriver([]), Nvml(), tmp_path) == ()


def test_every_key_of_a_profile_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference.md").read_text()
    for path in paths(MACHINE.to_json()):
        names = [str(step) for step in path if not isinstance(step, int)]
        key = (
            next((name for name in names if name.endswith("flop_s")), "")
            or ("loading.pack_bytes_s" if "pack_bytes_s" in names else "")
            or ("hardware.gpus" if "gpus" in names else ".".join(names))
        )
        assert not key or f"`{key}`" in page or f"`{key}." in page, key


class Library:
    """cuDriverGetVersion, as ctypes calls it."""

    def __init__(self, version: int, status: int = 0) -> None:
        self.version, self.status = version, status

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = self.version
        return self.status


def test_the_driver_says_which_cuda_it_serves(tmp_path: Path) -> None:
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n")
    assert find_driver(Library(13010), tmp_path) == NvidiaDriver((13, 1), "580.95.05")
    assert find_driver(Library(12060), tmp_path / "none") == NvidiaDriver((12, 6))
    assert find_driver(Library(0, 100)) is None
