"""How RAM is best divided between weights and sequences, where weights stream from disk and the CPU computes.

    python -m bench.ram_division --ram 6GiB --ram 3GiB

Plans Qwen3-30B-A3B's first 24 layers (30.7 GB in bfloat16) for each limit of sequences, 1,000 rows of 512 + 128
tokens, and marks what `auto` chooses; needs no weights. The planner reserves the keys and values of a number of
sequences first and holds experts in what is left, for every number; a plan that fills RAM with experts first is the
line with the fewest sequences.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from moedge.offload.budget import parse_size
from moedge.offload.machine.hardware import find_hardware
from moedge.offload.machine.profile import load_machine, saved_path
from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import PlanRequest, PlanResult, solve
from moedge.runtime.plan.rates import rates_of
from moedge.runtime.settings.errors import DoesNotFit
from moedge.runtime.settings.settings import MemoryBudget, Settings
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.formula import shape_of_config

Q24 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
JOB = Workload(1000, 640, 640, 1000 * 512, 1000 * 128)
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ram", action="append", required=True)
    parser.add_argument("--quant", default="int4")
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(Q24))
        shape = shape_of_config(ModelConfig.read(Path(folder)))
    costs = CostModel(shape, rates_of(load_machine(find_hardware(Path.cwd()), saved_path())))
    for ram in arguments.ram:
        budget = MemoryBudget(parse_size(ram, 0, 0))

        def plan(most: int | None, budget: MemoryBudget = budget) -> PlanResult | None:
            settings = Settings(quant=arguments.quant, kv="int8", max_sequences=most)
            try:
                return solve(PlanRequest(costs=costs, workload=JOB, budget=budget, settings=settings))
            except DoesNotFit:
                return None

        chosen = plan(None)
        print(f"\n{ram}, {arguments.quant}\nsequences  KV cache  experts held  read a pass  generated")
        for most in (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, None):
            if (found := plan(most)) is None:
                print(f"{most:>9}  does not fit")
                continue
            told, taken = found.prediction, found.plan
            if most is not None and chosen is not None and taken == chosen.plan:
                # More than it takes is not taken.
                continue
            held = sum(taken.placement.held_experts) / shape.num_experts
            mark = "  auto" if most is None else ""
            print(
                f"{taken.max_sequences:>9}  {taken.kv_nbytes / GIB:>4.2f} GiB  {held:>12.0%}"
                f"  {told.disk_nbytes / told.passes / GIB:>7.2f} GiB  {told.generated_tok_s:>5.1f} tok/s{mark}"
            )


if __name__ == "__main__":
    main()
