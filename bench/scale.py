"""How costs grow: by rows of a job, sequences of a pass, tokens of a context, and experts and layers of a model.

    python -m bench.scale --record bench/results/scale.json --page scale.html
    python -m bench.scale --record bench/results/scale.json --only sequences context     the others stay as recorded
    python -m bench.scale --record bench/results/scale.json --draw --page scale.html

No model computes: jobs run with the fake engine of the tests, passes are scheduled and packed over a KV cache without
bytes, and the planner plans models of which nothing but the shape exists. So this is all that moedge adds to a model's
own time. The slope of a law is that of the logarithms, by least squares over the last decade of its x; 1 is linear.
The table says how far each is from the most that it should be.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
import torch

from bench.kv_waste import GROUP, NoMemory
from moedge.apps.reports.page import ChartLine, Figure, by_count, figures_page
from moedge.apps.serve.policy import interactive_first
from moedge.moe.expert import group_by_expert
from moedge.moe.expert_cache import Popular
from moedge.offload.machine.hardware import find_hardware
from moedge.offload.stream.stream import ShardKey
from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Sequence as Generated
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.placement import Workload
from moedge.runtime.sampling.draw import Sampled
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import MemoryBudget, Settings
from support.jobs import job_scale
from support.known_shapes import choose, plain_model

GIB = 1 << 30
BLOCK, TOKENS_PER_PASS = 32, 1024
MOST_LAYERS = 256
GROUPS = ("rows", "sequences", "context", "experts")
# Slopes are fitted over this factor of the largest x. A law is linear up to this slope: memory is slower than caches.
DECADE, LINEAR = 10.0, 1.15


@dataclass(frozen=True, slots=True)
class Law:
    """What one thing costs: `points` are (x, cost), `most` is what the slope at their end may be."""

    group: str
    name: str
    x: str
    unit: str
    points: list[tuple[float, float]]
    most: float = 1.0

    @property
    def slope(self) -> float:
        return fitted_slope(self.points)


def fitted_slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the logarithms over the last decade of x, which has two points at least; costs of 0 have none."""
    most = max(x for x, _ in points)
    last = [(math.log(x), math.log(y)) for x, y in points if x * DECADE >= most * 0.999 and y > 0]
    if len(last) < 2:
        return 0.0
    x, y = np.array(last).T
    return float(np.polyfit(x, y, 1)[0])


def seconds_of(work: Callable[[], object], least: float = 0.1, most: int = 50) -> float:
    """The fastest of several calls, which take `least` seconds together."""
    gc.collect()
    gc.disable()
    try:
        taken: list[float] = []
        while not taken or (sum(taken) < least and len(taken) < most):
            begun = time.perf_counter()
            work()
            taken.append(time.perf_counter() - begun)
        return min(taken)
    finally:
        gc.enable()


# --- rows


def _cpu_of(phase: str, found: dict[str, Any]) -> float:
    return float(found["cpu"][phase])


def rows_laws(counts: Sequence[int]) -> Iterator[Law]:
    # A process each: the peak of a process is that of all of its jobs.
    found = {count: job_scale.measure(count)[0] for count in counts}
    least = found[counts[0]]["peak"]

    def law(name: str, unit: str, cost: Callable[[dict[str, Any]], float], most: float = 1.0) -> Law:
        return Law("rows", name, "rows", unit, [(count, cost(found[count])) for count in counts], most)

    yield law("CPU seconds of a job beside its engine", "s", lambda each: each["cpu_outside"])
    for phase in ("check", "measure", "run", "export"):
        yield law(f"of these: {phase}", "s", functools.partial(_cpu_of, phase))
    yield law("peak memory beyond that of the smallest job", "bytes", lambda each: max(0, each["peak"] - least))
    yield law("job folder on disk", "bytes", lambda each: each["job_nbytes"])
    yield law("CPU seconds of the same command after the end", "s", lambda each: each["later"]["again"])
    yield law("CPU seconds of moedge jobs show", "s", lambda each: each["later"]["show"])
    yield law("CPU seconds of moedge report", "s", lambda each: each["later"]["report"])


# --- sequences and context: the real scheduler and block tables


def scheduler(num_blocks: int, tokens: int, live: int) -> Scheduler:
    cache = KVCache([cast(KVPool, NoMemory(KVSpec(GROUP, "int8", BLOCK), num_blocks))])
    made = Scheduler(PassLimits(tokens, live), cache)
    made.policy = interactive_first
    return made


def step(runs: Scheduler) -> None:
    batch = runs.schedule()
    runs.commit(batch, Sampled(np.zeros(len(batch.sampling), dtype=np.int64), {}))


def sequence(index: int, prompt: int, output: int = 1 << 20, urgent: bool = False) -> Generated:
    made = Generated([index, *range(1, prompt)], SequenceSampling(output, ignore_eos=True))
    made.urgent = urgent
    return made


def filled(count: int, blocks_each: int = 4, prompt: int = 8, urgent: bool = False) -> Scheduler:
    """Sequences that all decode."""
    runs = scheduler(count * blocks_each, prompt * count, count)
    for index in range(count):
        runs.add(sequence(index, prompt, blocks_each * BLOCK - prompt, urgent))
    while runs.waiting or runs.urgent or any(each.num_pending > 1 for each in runs.running):
        step(runs)
    return runs


def sequences_laws(counts: Sequence[int]) -> Iterator[Law]:
    def law(name: str, cost: Callable[[int], float]) -> Law:
        return Law("sequences", name, "sequences", "s", [(count, cost(count)) for count in counts])

    yield law("a pass in which all generate", decode_seconds)
    yield law("a pass of chats that all generate", lambda count: decode_seconds(count, urgent=True))
    yield law("a pass in which all begin as chats", arrival_seconds)
    yield law("a pass with half of the KV cache that all need", preempting_seconds)


def decode_seconds(count: int, urgent: bool = False) -> float:
    runs = filled(count, urgent=urgent)
    return seconds_of(lambda: step(runs), most=40)


def arrival_seconds(count: int) -> float:
    def begin() -> None:
        step(made.pop())

    made = [scheduler(count * 2, 8 * count, count) for _ in range(5)]
    for runs in made:
        for index in range(count):
            runs.add(sequence(index, 8, 40, urgent=True))
    return seconds_of(begin, least=math.inf, most=len(made))


def preempting_seconds(count: int) -> float:
    """For each pass: sequences start with 1 block and end with 4; the cache has 2 for each."""
    runs = scheduler(count * 2, max(TOKENS_PER_PASS, count), count)
    for index in range(count):
        runs.add(sequence(index, 8, 4 * BLOCK - 8))
    passes, begun = 0, time.perf_counter()
    while runs.busy:
        step(runs)
        passes += 1
    return (time.perf_counter() - begun) / passes


def context_laws(counts: Sequence[int]) -> Iterator[Law]:
    def law(name: str, cost: Callable[[int], float], most: float = 1.0) -> Law:
        return Law("context", name, "tokens", "s", [(count, cost(count)) for count in counts], most)

    yield law("a prompt, in passes of 1,024 tokens", prompt_seconds)
    yield law("a prompt whose beginning is in the prefix cache", cached_seconds)
    yield law("a pass that generates a token", token_seconds, most=0.0)
    yield law("a pass while a row with so long a prompt finds no memory", blocked_seconds, most=0.0)


def prompt_seconds(tokens: int) -> float:
    def run() -> None:
        runs = scheduler(tokens // BLOCK + 2, TOKENS_PER_PASS, 1)
        runs.add(made)
        while runs.busy:
            step(runs)

    made = sequence(0, tokens, 1)
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def cached_seconds(tokens: int) -> float:
    runs = scheduler(2 * tokens // BLOCK + 4, TOKENS_PER_PASS, 2)
    runs.add(sequence(0, tokens, 1))
    while runs.busy:
        step(runs)
    again = sequence(0, tokens, 1)
    runs.add(again)
    begun = time.perf_counter()
    while runs.busy:
        step(runs)
    return time.perf_counter() - begun


def token_seconds(tokens: int) -> float:
    runs = scheduler(tokens // BLOCK + 4, TOKENS_PER_PASS, 1)
    runs.add(sequence(0, tokens, 100))
    while runs.waiting or runs.running[0].num_pending > 1:
        step(runs)
    # Past the ends of blocks, too: those are the costly passes.
    begun = time.perf_counter()
    for _ in range(64):
        step(runs)
    return (time.perf_counter() - begun) / 64


def blocked_seconds(tokens: int) -> float:
    num_blocks = tokens // BLOCK + 8
    runs = scheduler(num_blocks, TOKENS_PER_PASS, 4)
    runs.add(sequence(0, 10 * BLOCK, 100))
    step(runs)
    runs.add(sequence(1, tokens, 1))
    # The prompt's hashes are computed once.
    step(runs)
    begun = time.perf_counter()
    for _ in range(64):
        step(runs)
    assert runs.waiting
    return (time.perf_counter() - begun) / 64


# --- experts and layers


def experts_laws(counts: Sequence[int]) -> Iterator[Law]:
    def law(name: str, cost: Callable[[int], float], x: str = "experts of a layer") -> Law:
        shown = counts if x != "layers" else [count for count in counts if count <= MOST_LAYERS]
        return Law("experts", name, x, "s", [(count, cost(count)) for count in shown])

    yield law("planning, 16 layers", lambda count: plan_seconds(count, 16))
    yield law("planning, 16 experts a layer", lambda count: plan_seconds(16, count), "layers")
    yield law("reading the headers of 4 layers", header_seconds)
    yield law("grouping 512 tokens by expert", grouping_seconds)
    yield law("what 16 layers hold, in a pass", policy_seconds)


def plan_seconds(experts: int, layers: int) -> float:
    shape = plain_model(experts, min(8, experts), num_layers=layers)
    budget, workload = MemoryBudget(max(3 * GIB, experts * layers << 21)), Workload(1000, 768, None, 512_000, 256_000)
    return seconds_of(lambda: choose(shape, Settings(), budget, workload), least=0.3, most=5)


def header_seconds(experts: int) -> float:
    from bench.planner import make_checkpoint
    from moedge.runtime.source.model_source import open_source
    from support.known_shapes import QWEN3_30B

    config = QWEN3_30B | {"num_experts": experts, "num_hidden_layers": 4}
    with TemporaryDirectory() as folder:
        path = make_checkpoint(config, 2, Path(folder, "model"))

        def read() -> None:
            with open_source(str(path)) as source:
                assert len(source.shape.layers) == 4

        return seconds_of(read, most=5)


def grouping_seconds(experts: int) -> float:
    generator = torch.Generator().manual_seed(3)
    chosen = torch.randint(experts, (512, 8), generator=generator)
    return seconds_of(lambda: group_by_expert(chosen, experts).wanted)


def policy_seconds(experts: int) -> float:
    """Half of the experts are held; each layer wants an eighth, of which those that are not held arrive."""
    layers, generator = range(16), np.random.default_rng(4)
    held = {ShardKey(layer, expert) for layer in layers for expert in range(0, experts, 2)}
    probabilities = {layer: generator.random(experts) for layer in layers}
    policy = Popular(held, dict.fromkeys(layers, 1), probabilities)
    wanted = {layer: sorted({*generator.integers(experts, size=max(1, experts // 8)).tolist()}) for layer in layers}

    def run() -> None:
        policy.begin_pass()
        for layer in layers:
            policy.observe(layer, wanted[layer])
            for expert in wanted[layer]:
                if (key := ShardKey(layer, expert)) not in held and (left := policy.victim(key, lambda each: True)):
                    held.remove(left)
                    held.add(key)

    return seconds_of(run)


MEASURES: dict[str, tuple[Callable[[Sequence[int]], Iterable[Law]], Sequence[int]]] = {
    "rows": (rows_laws, (100, 1000, 10_000, 100_000, 1_000_000)),
    "sequences": (sequences_laws, (16, 64, 256, 1024, 2048, 4096)),
    "context": (context_laws, (1024, 4096, 16_384, 65_536, 131_072, 262_144)),
    "experts": (experts_laws, (16, 64, 128, 256, 512, 1024)),
}


# --- what is shown


def record_of(laws: Iterable[Law]) -> dict[str, Any]:
    return {
        "schema": "moedge.scale/1",
        "processor": find_hardware(Path()).cpu,
        "python": platform.python_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "laws": [asdict(law) | {"slope": round(law.slope, 3)} for law in laws],
    }


def laws_of(record: dict[str, Any]) -> list[Law]:
    return [Law(**{name: value for name, value in each.items() if name != "slope"}) for each in record["laws"]]


def shown(value: float, unit: str) -> str:
    """`1.2 ms`, `3.4 MB`."""
    if not value:
        return "0"
    steps = {"s": ("s", "ms", "µs", "ns"), "bytes": ("GB", "MB", "kB", "B")}[unit]
    number = value if unit == "s" else value / 1e9
    for name in steps:
        if number >= 1 or name == steps[-1]:
            return f"{number:,.3g} {name}"
        number *= 1000
    raise AssertionError(unit)


def table(laws: Iterable[Law]) -> str:
    """Markdown: what a law costs at its largest x, and its slope."""
    lines = ["| cost of | at | is | slope |", "|---|---|---|---|"]
    for law in laws:
        x, y = law.points[-1]
        lines.append(f"| {law.name} | {x:,.0f} {law.x} | {shown(y, law.unit)} | {law.slope:.2f}{_verdict(law)} |")
    return "\n".join(lines)


def _verdict(law: Law) -> str:
    return "" if law.slope <= max(law.most, 0.0) + LINEAR - 1 else f", above {law.most:.0f}"


def page(record: dict[str, Any]) -> str:
    laws = laws_of(record)
    figures = []
    for group in GROUPS:
        for x in dict.fromkeys(law.x for law in laws if law.group == group):
            for unit in dict.fromkeys(law.unit for law in laws if (law.group, law.x) == (group, x)):
                mine = [law for law in laws if (law.group, law.x, law.unit) == (group, x, unit)]
                figures.append(_figure(x, unit, mine))
    about = f"{record['processor']}, Python {record['python']}, {record['date']}. Both axes are logarithmic."
    return figures_page("How costs grow", [about], figures)


def _figure(x: str, unit: str, laws: list[Law]) -> Figure:
    lines = [ChartLine(law.points, f"series-{index % 6}", dots=f"dots-{index % 6}") for index, law in enumerate(laws)]
    chart = by_count(f"Cost by {x}", lines, lambda value: shown(value, unit), x, log=True)
    rows = [[law.name, shown(law.points[-1][1], unit), f"{law.slope:.2f}"] for law in laws]
    head = ["cost of", f"at {laws[0].points[-1][0]:,.0f}", "slope"]
    title = f"{'Time' if unit == 's' else 'Bytes'} by {x}"
    return Figure(title, chart, [law.name for law in laws], head=head, rows=rows)


def measured(groups: Iterable[str], largest: int | None) -> Iterator[Law]:
    for group in groups:
        measure, counts = MEASURES[group]
        for law in measure([count for count in counts if largest is None or count <= largest]):
            print(f"{group:>10}  {law.slope:5.2f}  {shown(law.points[-1][1], law.unit):>9}  {law.name}", flush=True)
            yield law


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--largest", type=int, help="leave larger numbers out")
    parser.add_argument("--record", type=Path, help="the JSON file with all points; laws that are not measured stay")
    parser.add_argument("--draw", action="store_true", help="measure nothing")
    parser.add_argument("--page", type=Path, help="an HTML file")
    options = parser.parse_args()
    before = json.loads(options.record.read_text()) if options.record and options.record.exists() else None
    if options.draw:
        record = before
    else:
        new = list(measured(options.only, options.largest))
        kept = [law for law in laws_of(before) if law.group not in options.only] if before else []
        record = record_of(sorted([*kept, *new], key=lambda law: GROUPS.index(law.group)))
    if record is None:
        parser.error("--draw needs a --record that is there")
    if options.record and not options.draw:
        options.record.write_text(json.dumps(record, indent=1) + "\n")
    if options.page:
        options.page.write_text(page(record))
    print(table(laws_of(record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
