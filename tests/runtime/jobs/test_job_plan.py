"""What a job's first estimate is made of: a machine that is measured in time."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from moedge.offload.machine.hardware import Hardware
from moedge.offload.machine.profile import Disk, DiskRead, LoadingRates, Machine, Overheads
from moedge.quant.native import library
from moedge.runtime.jobs import job_plan
from moedge.runtime.jobs.job_plan import plan_job
from moedge.runtime.plan.loading_cost import LoadingSpeeds
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.plan_file import PastRun, machine_key
from moedge.runtime.plan.planner import PlanResult
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings.settings import MIB, Budgets, MemoryBudget, Settings, process_nbytes
from moedge.runtime.source.model_source import open_source
from support.known_shapes import plain_model

GIB = 1 << 30
HARDWARE = Hardware("a CPU", 2, 24 * GIB, (), "/dev/vda ext4")
# In order 2.5 GB/s of a file that was just written, 1.2 GB/s of older ones.
DISK = Disk(True, GIB, (DiskRead(8 << 20, 1, 2.5e9),), cold_bytes_s=1.2e9, write_bytes_s=1e9)
PACKED = {"none": 5e9, "int8": 1.9e9, "int4": 4e8, "nf4": 4e8}
MEASURED = Machine(
    HARDWARE,
    2e10,
    DISK,
    flop_s={"none": {1: 1e10, 64: 3e11}},
    overheads=Overheads(1e-3, 6e-5, 1e-5, 6e-6, 1e-4, 1e-5),
    loading=LoadingRates(1e9, PACKED),
    kernels=library.identity(),
)
# A few rows: by far less than ten minutes at the default speeds.
FEW = Workload(4, 40, 40, 4 * 32, 4 * 8)


@pytest.fixture
def found(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., PlanResult]:
    """The plan of a job of a model of so many layers of 400 MB, on a machine that has no profile or the given one."""
    known: list[Machine | None] = []
    monkeypatch.setattr(job_plan._Machine, "here", lambda budgets: job_plan._Machine(HARDWARE, known.pop()))
    monkeypatch.setattr(job_plan._Machine, "measured", lambda self, *_: replace(self, profile=MEASURED))

    def plan(num_layers: int, ram: int, profile: Machine | None = None) -> PlanResult:
        known.append(profile)
        with open_source(str(checkpoint("qwen3_moe"))) as source:
            large = replace(source, shape=plain_model(num_layers=num_layers))
            budgets = Budgets(disk_dir=tmp_path)
            result = plan_job(large, Settings(quant="none"), budgets, MemoryBudget(ram, None, 0), FEW)
        assert result.request.costs.rates == rates_of(result.request.profile)
        return result

    return plan


@pytest.fixture
def planned(found: Callable[..., PlanResult]) -> Callable[..., bool]:
    """Whether the machine is measured for such a job."""
    return lambda *job: found(*job).request.profile is MEASURED


def test_experts_are_not_held_where_what_measuring_left_in_the_process_is(
    found: Callable[..., PlanResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries, 150 MiB more than a process is planned with: a rehearsed pass was over the budget by three."""
    left = 150 * MIB
    monkeypatch.setattr(job_plan, "host_resident", lambda: process_nbytes() + left)
    known, measured = found(32, 4 * GIB, MEASURED).plan, found(32, 4 * GIB).plan
    assert measured.process_nbytes == known.process_nbytes + left
    assert measured.used_nbytes <= 4 * GIB < measured.used_nbytes + measured.weights_nbytes / 32
    # Another job has its place back, and so has this one where it would not run without.
    monkeypatch.setattr(job_plan, "host_resident", lambda: 4 * GIB)
    assert found(32, 4 * GIB).plan == known


def test_the_machine_is_measured_before_a_job_whose_model_takes_long_to_load(planned: Callable[..., bool]) -> None:
    """A short job of a large model, in memory or streamed, waits for the disk and for loading, so their rates count."""
    assert planned(32, 24 * GIB)
    assert planned(32, 4 * GIB)
    assert not planned(2, 24 * GIB)


def test_a_machine_that_was_measured_beside_others_is_measured_again_before_a_long_job(
    planned: Callable[..., bool],
) -> None:
    assert planned(32, 24 * GIB, replace(MEASURED, others=0.9))
    assert not planned(32, 24 * GIB, replace(MEASURED, others=0.1))
    assert not planned(2, 24 * GIB, replace(MEASURED, others=0.9))


def test_a_machine_is_measured_again_with_the_kernels_of_another_release(planned: Callable[..., bool]) -> None:
    """A profile of slower kernels chose passes of the wrong size for a whole release."""
    assert planned(32, 24 * GIB, replace(MEASURED, kernels="of another release"))
    assert not planned(32, 24 * GIB, replace(MEASURED))
    assert not planned(2, 24 * GIB, replace(MEASURED, kernels=""))


def test_a_machine_whose_profile_three_jobs_contradict_is_measured_again(
    planned: Callable[..., bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest first: all off by two in the same direction, on this machine, since it was measured."""
    profile = replace(MEASURED, measured_at="2026-11-02T00:00:00+00:00")

    def measured_after(*ratios: float, day: int = 3, machine: Hardware = HARDWARE) -> bool:
        at = f"2026-11-{day:02}T00:00:00+00:00"
        run = PastRun(at, machine_key(machine), "m", "s", "f", "disk", 1.0, 2.0, 3.0, 4, 5)
        monkeypatch.setattr(job_plan, "last_runs", lambda _: [replace(run, ratio=ratio) for ratio in ratios])
        return planned(32, 24 * GIB, profile)

    assert measured_after(2.5, 2.1, 3.0, 1.0)
    assert measured_after(0.4, 0.3, 0.5)
    assert not measured_after(2.5, 1.9, 3.0, 4.0)
    assert not measured_after(2.5, 0.4, 2.5)
    assert not measured_after(2.5, 2.5)
    assert not measured_after(2.5, 2.5, 2.5, day=1)
    assert not measured_after(2.5, 2.5, 2.5, machine=replace(HARDWARE, cpu="another"))


def test_a_checkpoint_is_read_as_fast_as_older_files() -> None:
    """A file that was just written may be in a cache of the storage, where no checkpoint is."""
    assert LoadingSpeeds.of(MEASURED).read_bytes_s == 1.2e9
    slow = replace(DISK, reads=(DiskRead(8 << 20, 1, 3e8), DiskRead(8 << 20, 8, 2e9)))
    assert LoadingSpeeds.of(replace(MEASURED, disk=slow)).read_bytes_s == 3e8


def test_assumed_packing_is_that_of_the_library_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured counts first, with the library and without."""
    for available in (True, False):
        monkeypatch.setattr(library, "available", lambda available=available: available)
        assumed, measured = LoadingSpeeds(), LoadingSpeeds.of(MEASURED)
        assert (assumed.packing("int4") > 1e9) == available
        assert measured.packing("nf4") == PACKED["nf4"]
        assert measured.packing("mxfp4") == assumed.packing("mxfp4")
