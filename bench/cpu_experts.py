"""Plans of a published model on a card of a data sheet, with and without experts on the CPU beside the link.

    python -m bench.cpu_experts
    python -m bench.cpu_experts --card "RTX 3060 12GB" --ram 32 --ram-gb-s 60 --cores 16

The cost model's predictions, whose rates of the CPU are those of runtime/plan/presets.py for RAM and cores as given.
*In turn*: link and GPU wait for each other, as they do where nothing is requested ahead of a router.
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
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--ram-gb-s", type=float, default=40.0)
    parser.add_argument("--cores", type=int, default=8)
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128))
    options = parser.parse_args()
    print("| sequences | by the CPU | off | auto | | link / CPU / host / GPU | in turn: off | auto | |")
    print("|" + "---|" * 9)
    for sequences in options.sequences:
        print(row(sequences, options), flush=True)


def row(sequences: int, options: argparse.Namespace) -> str:
    settings = Settings(quant=options.quant, kv="int8", max_sequences=sequences, speculate="off")
    request = plans_page.question(options.model, options.card, options.ram, settings)
    rates = replace(request.costs.rates, ram_bytes_s=1e9 * options.ram_gb_s, cores=options.cores)
    request = replace(request, costs=CostModel(request.shape, rates))
    off, auto = (solve(request.with_settings(cpu_experts=each)) for each in ("off", "auto"))
    busy = auto.prediction.busy_s
    shares = " / ".join(f"{busy[name] / auto.prediction.seconds:.0%}" for name in ("link", "cpu", "host", "compute"))
    cells = [str(sequences), f"{auto.prediction.cpu_experts:.0f}"]
    cells += [*gain(off.prediction.generated_tok_s, auto.prediction.generated_tok_s), shares]
    cells += gain(in_turn(off), in_turn(auto))
    return "| " + " | ".join(cells) + " |"


def gain(before: float, after: float) -> list[str]:
    return [f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}x"]


def in_turn(result: PlanResult) -> float:
    """Tokens per second where the GPU waits for the slower of link and CPU, and both for the GPU."""
    busy, told = result.prediction.busy_s, result.prediction
    return told.generated_tok_s * told.seconds / (max(busy["link"], busy["cpu"]) + busy["compute"])


if __name__ == "__main__":
    main()
