"""How RAM is best divided between weights and sequences, where weights stream from disk and the CPU computes.

    python -m bench.ram_division --ram 6GiB --ram 3GiB

Plans Qwen3-30B-A3B's first 24 layers (30.7 GB in bfloat16) for each limit of sequences, 1,000 rows of 512 + 128
tokens, and marks what `auto` chooses; needs no weights. The planner reserves the keys and values of a number of
sequences first and holds experts in what is left, for every number; a plan that fills RAM with experts first is the
line with the fewest sequences.

Each division's passes are simulated, too (tests/support/device/link_events.py): the disk is a link that reads one
expert at a time in the product's order, the CPU is what waits for it; bytes and rings are the plan's, seconds of
computing those of the cost model. `--gflops` and `--disk-gbs` are rates in place of this machine's profile: nothing is
taken beside products then.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.link_curves import work_of
from moedge.offload.budget import parse_size
from moedge.offload.machine.hardware import find_hardware
from moedge.offload.machine.profile import Overheads, load_machine, saved_path
from moedge.runtime.plan.cost_model import CostModel, _phases
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, solve
from moedge.runtime.plan.rates import Rates, rates_of
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config
from support.device.link_events import Seconds, Simulation

Q24 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
JOB = Workload(1000, 640, 640, 1000 * 512, 1000 * 128)
MOST = (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, None)
GIB = 1 << 30


def simulated_s(costs: CostModel, found: PlanResult) -> float:
    """Seconds of the job's passes."""
    plan, total = found.plan, 0.0
    passes = costs.pass_costs(plan)
    for count, load in _phases(JOB, found.prediction.sequences, plan.tokens_per_pass):
        attention, head = passes._computing._attention(load), passes._computing._head(load)
        seconds = Seconds(passes.cost(load).compute_s - attention - head, attention, head)
        work = work_of(costs.shape, plan, seconds, tokens=load.tokens)
        total += count * Simulation(work, costs.rates.disk_bytes_s).run(3)
    return total


def row(costs: CostModel, found: PlanResult) -> tuple[float, str]:
    """Tokens per second of the simulation, and the line."""
    told, plan = found.prediction, found.plan
    held = sum(plan.placement.held_experts) / costs.shape.num_experts
    rate = JOB.mean_generated * JOB.sequences / simulated_s(costs, found)
    return rate, (
        f"{plan.max_sequences:>9}  {plan.kv_nbytes / GIB:>4.2f} GiB  {held:>12.0%}"
        f"  {told.disk_nbytes / told.passes / GIB:>7.2f} GiB  {told.generated_tok_s:>5.1f} tok/s  {rate:>5.1f} tok/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", action="append", required=True)
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--gflops", type=float)
    parser.add_argument("--disk-gbs", type=float, default=3)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(Q24))
        shape = shape_of_config(ModelConfig.read(Path(folder)))
    rates = rates_of(load_machine(find_hardware(Path.cwd()), saved_path()))
    if arguments.gflops:
        rates = Rates(
            disk_bytes_s=arguments.disk_gbs * 1e9, memory_bytes_s=5e10, otherwise={1: arguments.gflops * 1e9},
            overheads=Overheads(*[0.0] * 6),
        )  # fmt: skip
    costs = CostModel(shape, rates)
    for ram in arguments.ram:
        budget = MemoryBudget(parse_size(ram, 0, 0))

        def plan(most: int | None, budget: MemoryBudget = budget) -> PlanResult | None:
            settings = Settings(quant=arguments.quant, kv="int8", max_sequences=most)
            try:
                return solve(PlanRequest(costs=costs, workload=JOB, budget=budget, settings=settings))
            except DoesNotFit:
                return None

        # What is more than `auto` takes is not taken.
        plans = {found.plan.max_sequences: found for most in MOST if (found := plan(most)) is not None}
        auto = plan(None)
        rows = {most: row(costs, found) for most, found in plans.items()}
        best = max(rows, key=lambda most: rows[most][0])
        print(f"\n{ram}, {arguments.quant}\nsequences  KV cache  experts held  read a pass    predicted    simulated")
        for most, (_, line) in sorted(rows.items()):
            chosen = auto is not None and most == auto.plan.max_sequences
            print(line + "  auto" * chosen + "  the most of the simulated" * (most == best))


if __name__ == "__main__":
    main()
