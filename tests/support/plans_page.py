"""docs/plans.md: the planner's choices for well-known models on small GPUs; needs neither."""

from functools import cache

from moedge.offload.machine.hardware import GpuInfo, Hardware
from moedge.offload.machine.profile import Disk, DiskRead, Link, LoadingRates, Machine, Overheads, PinLimit
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, solve
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings.budgets import (
    ASSUMED_CONTEXT_NBYTES,
    LIBRARIES_NBYTES,
    PROCESS_NBYTES,
    DeviceBudget,
    MemoryBudget,
)
from moedge.runtime.settings.errors import DoesNotFit
from support.known_shapes import CONFIGS, known_shape

GIB = 1 << 30
SIZES = (6, 8, 12, 24)
HOST = 32 * GIB
JOB = Workload(2000, 768, 768, 2000 * 512, 2000 * 256)
COSTS = Overheads(1e-3, 5e-5, 2e-6, 2e-10, 3e-4, 5e-5)
# Not a machine that was measured: round numbers of a card with 20 TFLOP/s behind PCIe 4.0, and a good NVMe disk.
PROFILE = Machine(
    Hardware("any", 8, 64 * GIB, (GpuInfo("any", 8 * GIB),), "nvme"),
    4e10,
    Disk(True, GIB, (DiskRead(1 << 22, 4, 3e9),), write_bytes_s=2e9),
    Link(1e10, 2.2e10),
    PinLimit(4 * GIB, False),
    {},
    device_memory_bytes_s=4e11,
    device_flop_s={name: {1: 2e11, 64: 8e12, 1024: 2e13} for name in ("none", "int8", "int4", "nf4")},
    overheads=COSTS,
    device_overheads=COSTS,
    loading=LoadingRates(1e9, {"none": 4e9, "int8": 1e9, "int4": 3e8, "nf4": 3e8}),
)

HEAD = """# Plans

This page shows the planner's choices for five models on GPUs of 6 to 24 GiB with 32 GiB of host memory, for a job of
2,000 rows with 512 prompt tokens and 256 generated tokens each. It is generated from the models' published
configurations and a profile of round numbers (a GPU with 20 TFLOP/s behind 22 GB/s, a disk of 3 GB/s): these are
predictions, not measurements. No GPU was measured for it. A test generates this page again and compares. Of a model
with recurrent layers, *KV* counts the states of its sequences too.
"""
COLUMNS = (
    "GPU",
    "weights",
    "on the GPU",
    "in RAM",
    "on disk",
    "KV",
    "sequences",
    "tokens per pass",
    "tok/s",
    "bottleneck",
)


def page() -> str:
    return "\n".join([HEAD, *map(section, CONFIGS)])


def section(name: str) -> str:
    shape = known_shape(name)
    title = f"## {name}\n\n{shape.parameters / 1e9:.1f} B parameters, {shape.active_parameters / 1e9:.1f} B active.\n"
    rows = [_row(size, found) for size, found in choices(name).items()]
    return "\n".join([title, _line(COLUMNS), "|" + "---|" * len(COLUMNS), *rows]) + "\n"


@cache
def choices(name: str) -> dict[int, PlanResult | DoesNotFit]:
    """What the planner chooses on each GPU."""
    return {size: _choice(question(name, size)) for size in SIZES}


def _choice(asked: PlanRequest) -> PlanResult | DoesNotFit:
    try:
        return solve(asked)
    except DoesNotFit as refusal:
        return refusal


def question(name: str, gib: int) -> PlanRequest:
    """A device whose desktop leaves it all but half a GiB."""
    device = DeviceBudget(
        gib * GIB - GIB // 2, ASSUMED_CONTEXT_NBYTES + LIBRARIES_NBYTES, PROCESS_NBYTES + LIBRARIES_NBYTES
    )
    costs = CostModel(known_shape(name), rates_of(PROFILE, on_device=True))
    return PlanRequest(costs=costs, workload=JOB, budget=MemoryBudget(HOST, device))


def _row(gib: int, found: PlanResult | DoesNotFit) -> str:
    if isinstance(found, DoesNotFit):
        return _line((f"{gib} GiB", f"does not fit: {str(found).split(',')[0]}", *[""] * (len(COLUMNS) - 2)))
    return _line((f"{gib} GiB", *_cells(found)))


def _cells(choice: PlanResult) -> tuple[str, ...]:
    plan, told = choice.plan, choice.prediction
    assert plan.staging is not None
    whole = plan.weights_nbytes
    return (
        f"{plan.quant} {whole / GIB:.1f} GiB",
        f"{plan.held_nbytes / whole:.0%}",
        f"{plan.staging.staged_nbytes / whole:.0%}",
        f"{plan.staging.disk_nbytes / whole:.0%}",
        f"{plan.kv} {(plan.kv_nbytes + plan.states_nbytes) / GIB:.1f} GiB",
        f"{plan.max_sequences:,}",
        f"{plan.tokens_per_pass:,}",
        f"{told.generated_tok_s:,.0f}",
        told.bottleneck,
    )


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
