"""docs/tables/plans.md and golden_plans.json: the planner's choices for well-known models on cards of data sheets.

    PYTHONPATH=tests python -m support.plans_page

writes both; needs neither models nor GPUs.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from moedge.offload.machine.hardware import Hardware
from moedge.offload.machine.profile import Disk, DiskRead, LoadingRates, Machine
from moedge.runtime.plan import presets
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, solve
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import Budgets, Settings
from support.known_shapes import CONFIGS, published_shape

GIB = 1 << 30
ROOT = Path(__file__).parents[2]
PAGE, GOLDEN = ROOT / "docs" / "tables" / "plans.md", ROOT / "tests" / "runtime" / "plan" / "golden_plans.json"
CARDS = (
    "RTX 2060 6GB", "RTX 4060 8GB", "RTX 3060 12GB", "RTX 4060 Ti 16GB", "RTX 3090 24GB", "RTX 4090 24GB",
    "RTX 5090 32GB", "RTX A6000 48GB",
)  # fmt: skip
MODELS = (*CONFIGS, "DeepSeek-V2-Lite")
RAM = (24, 32, 64)
# The page's cards, with the RAM of a machine that has one.
SHOWN = {
    "RTX 2060 6GB": 32, "RTX 4060 8GB": 24, "RTX 3060 12GB": 32, "RTX 4060 Ti 16GB": 32, "RTX 3090 24GB": 64,
    "RTX 4090 24GB": 64, "RTX 5090 32GB": 64,
}  # fmt: skip
JOB = Workload(10_000, 768, 768, 10_000 * 512, 10_000 * 256)
# Round numbers of a good NVMe disk and a desktop's processor.
DISK = Disk(True, GIB, (DiskRead(1 << 22, 4, 3e9),), write_bytes_s=2e9)
LOADING = LoadingRates(1e9, {"none": 4e9, "int8": 3e9, "int4": 1.5e9, "nf4": 2.5e9, "mxfp4": 2e9})

HEAD = """# Plans

What the planner chooses for well-known models on cards of data sheets, for a job of 10,000 rows with 512 prompt tokens
and 256 generated tokens each, with `--kv int4`. gpt-oss has the weights that are published, in MXFP4; the others are
in bfloat16. Every figure here is arithmetic: no card of this page has run moedge. A test makes the page again and
compares.

| what | where it is from |
|---|---|
| memory, bandwidth, peak, clock, PCIe | data sheets (`runtime/plan/presets.py`) |
| instructions, launches, calls, bytes | counted in this code, without a GPU (`runtime/plan/presets.py`) |
| microseconds of Python | measured on a Zen 5, times 1.5 |
| what kernels reach of a data sheet | [measured](../../bench/results/gpu.md#on-an-h100-and-an-h200), taken for all |
| the disk (3 GB/s) and the processor that packs weights | round numbers |

A pass takes as long as the busiest of link, GPU (`compute`), host thread (`host`) and disk. Tokens are assumed to be
drawn from a model's best k (`--temperature` above 0), for which the sampler starts many kernels: greedy jobs wait less
for `host`. Of the kernels that an H100 and an H200 timed all but one are predicted within 1.5 times
(`tests/runtime/plan/test_device_costs.py`). Two jobs of it were recorded: the one that waited for the link is predicted
within a tenth; of a pass of the other, which waited for the host, a third is explained
([gpu.md](../dev/gpu.md#what-has-run)), so where `host` is the bottleneck a job may take several times as long. Of a
model with recurrent layers, *KV* counts states too.
"""
# Other settings than the page's, on one of its cards with the RAM shown.
OTHER: dict[str, tuple[str, str, Settings]] = {
    "`--kv int8`": ("Qwen3-30B-A3B", "RTX 4060 8GB", Settings(kv="int8")),
    "no setting": ("Qwen3-30B-A3B", "RTX 4090 24GB", Settings()),
    "`--quant nf4 --max-sequences 1`": ("Qwen3-30B-A3B", "RTX 4090 24GB", Settings(quant="nf4", max_sequences=1)),
    "`--quant nf4 --max-sequences 8`": ("Qwen3-30B-A3B", "RTX 4090 24GB", Settings(quant="nf4", max_sequences=8)),
    "`--kv bf16`": ("gpt-oss-20b", "RTX 3060 12GB", Settings(kv="bf16")),
    "`--kv int4 --quant int4 --experts int3`": (
        "Qwen3-Next-80B-A3B",
        "RTX 3060 12GB",
        Settings(quant="int4+int3", kv="int4"),
    ),
    "`--kv int4 --quant int8 --experts int3`": (
        "GLM-4.5-Air",
        "RTX 3060 12GB",
        Settings(quant="int8+int3", kv="int4"),
    ),
}
COLUMNS = (
    "GPU, RAM", "weights", "on the GPU", "in RAM", "on disk", "KV", "sequences", "tokens per pass", "tok/s",
    "bottleneck",
)  # fmt: skip


def machine(card: str) -> Machine:
    """With the preset of this name, or the card that is described."""
    hardware = Hardware("any", 8, 64 * GIB, (), "nvme")
    return presets.with_preset(
        *presets.find_preset(card), hardware, Machine(hardware, 4e10, disk=DISK, loading=LOADING)
    )


shape_of = cache(published_shape)


@cache
def costs(name: str, card: str) -> CostModel:
    """Requests that differ in budgets share it."""
    return CostModel(shape_of(name), rates_of(machine(card), on_device=True))


def question(
    name: str,
    card: str,
    ram: int,
    settings: Settings | None = None,
    job: Workload = JOB,
    gpu_mem: str = "auto",
) -> PlanRequest:
    """As `moedge plan NAME --gpu CARD --ram RAM` asks."""
    profile = machine(card)
    budgets = Budgets(ram=f"{ram}GiB", gpu_mem=gpu_mem)
    return PlanRequest(
        costs=costs(name, card),
        workload=job,
        budget=budgets.expected(profile.hardware, profile.kernel_lacks, elsewhere=True),
        settings=settings or Settings(kv="int4"),
        hardware=profile.hardware,
        profile=profile,
        elsewhere=True,
        preset=card,
    )


@cache
def choice(name: str, card: str, ram: int) -> PlanResult | None:
    """None where nothing fits."""
    try:
        return solve(question(name, card, ram))
    except DoesNotFit:
        return None


def golden(name: str) -> dict[str, Any]:
    """What is kept of a model's plans, by card and RAM."""
    return {f"{card}, {ram} GiB": kept(choice(name, card, ram)) for card in CARDS for ram in RAM}


def kept(found: PlanResult | None) -> dict[str, Any] | None:
    if found is None:
        return None
    plan, told = found.plan, found.prediction
    return {
        "quant": plan.quant,
        "held": round(plan.held_nbytes / plan.weights_nbytes, 2),
        "sequences": plan.max_sequences,
        "tokens": plan.tokens_per_pass,
        "tok_s": float(f"{told.generated_tok_s:.3g}"),
        "bottleneck": told.bottleneck,
        "grouped": plan.grouped_products,
        "seconds": {quant: float(f"{seconds:.4g}") for quant, seconds in found.seconds.items()},
    }


def page() -> str:
    return "\n".join([HEAD, *map(section, MODELS), other_settings()])


def section(name: str) -> str:
    shape = shape_of(name)
    title = f"## {name}\n\n{shape.parameters / 1e9:.1f} B parameters, {shape.active_parameters / 1e9:.1f} B active.\n"
    rows = [row(name, card, ram) for card, ram in SHOWN.items()]
    return "\n".join([title, _line(COLUMNS), "|" + "---|" * len(COLUMNS), *rows]) + "\n"


def row(name: str, card: str, ram: int) -> str:
    return _line((f"{card}, {ram} GiB", *_cells(choice(name, card, ram))))


def other_settings() -> str:
    """Of whole passes in milliseconds what each resource takes: they overlap, and the longest is the pass."""
    columns = ("model", "settings", *COLUMNS[:2], "on the GPU", "sequences", "tok/s", "GPU, ms", "host, ms", "link, ms")
    rows = []
    for setting, (name, card, settings) in OTHER.items():
        found = solve(question(name, card, SHOWN[card], settings))
        plan, told = found.plan, found.prediction
        busy = [f"{told.busy_s[each] / told.passes * 1e3:.0f}" for each in ("compute", "host", "link")]
        held = f"{plan.held_nbytes / plan.weights_nbytes:.0%}"
        speed = f"{told.generated_tok_s:,.{0 if told.generated_tok_s > 99 else 1}f}"
        where = f"{card}, {SHOWN[card]} GiB"
        rows.append(_line((name, setting, where, plan.quant, held, f"{plan.max_sequences:,}", speed, *busy)))
    text = "What a mean pass keeps each resource busy; a pass takes as long as the busiest."
    return "\n".join(["## Other settings\n", f"{text}\n", _line(columns), "|" + "---|" * len(columns), *rows]) + "\n"


def _cells(found: PlanResult | None) -> tuple[str, ...]:
    if found is None:
        return ("does not fit", *[""] * (len(COLUMNS) - 2))
    plan, told = found.plan, found.prediction
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
    PAGE.write_text(page())
    lines = [
        f' "{name}": {{\n' + ",\n".join(f'  "{key}": {json.dumps(each)}' for key, each in golden(name).items()) + "\n }"
        for name in MODELS
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
