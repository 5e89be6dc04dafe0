"""Predicts jobs of a published model on a card of a data sheet whose CPU attends to sequences in host memory, by plans.

    python -m bench.cpu_attention
    python -m bench.cpu_attention --card "RTX 3060 12GB" --ram 48 --ram-gb-s 60 --cores 16

Both plans of a row are the planner's, with `--cpu-attention off` and `auto`: they may have other numbers of sequences.
Nothing here was measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from moedge.runtime.plan.cost_model import CostModel
from moedge.runtime.plan.planner import PlanResult, solve
from moedge.runtime.settings.settings import Settings
from support import plans_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B")
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--ram", type=int, default=24, help="GiB")
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--kv", nargs="+", default=("int8", "int4"))
    parser.add_argument("--ram-gb-s", type=float, default=40.0)
    parser.add_argument("--cores", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=(128, 256, 384, 512))
    options = parser.parse_args()
    print("| KV | sequences at most | off: sequences, in RAM | tok/s | auto: sequences, in RAM | tok/s | |")
    print("|" + "---|" * 7)
    for kv in options.kv:
        for sequences in (*options.sequences, None):
            print(row(kv, sequences, options), flush=True)


def row(kv: str, sequences: int | None, options: argparse.Namespace) -> str:
    settings = Settings(quant=options.quant, kv=kv, max_sequences=sequences, speculate="off", cpu_experts="off")
    request = plans_page.question(options.model, options.card, options.ram, settings)
    rates = replace(request.costs.rates, ram_bytes_s=options.ram_gb_s * 1e9, cores=options.cores)
    request = replace(request, costs=CostModel(request.shape, rates))
    off, auto = (solve(request.with_settings(cpu_attention=each)) for each in ("off", "auto"))
    gain = auto.prediction.generated_tok_s / off.prediction.generated_tok_s
    cells = [kv, str(sequences or "auto"), *shown(off), *shown(auto), f"{gain:.2f}x"]
    return "| " + " | ".join(cells) + " |"


def shown(result: PlanResult) -> list[str]:
    plan = result.plan
    hosted = plan.host_kv.sequences if plan.host_kv else 0
    return [f"{plan.max_sequences}, {hosted}", f"{result.prediction.generated_tok_s:.0f}"]


if __name__ == "__main__":
    main()
