"""Predicts passes of a published model on a card of a data sheet whose CPU computes some experts, beside the link.

    python -m bench.cpu_experts
    python -m bench.cpu_experts --card "RTX 3060 12GB" --ram 32 --ram-gb-s 60 --gflop-s 400

Bytes and seconds are the plan's and those of its cost model; which experts the CPU computes says moe/division.py, of as
many as are wanted if tokens choose independently. The CPU reads `--share` of what the copies leave of the RAM's
bandwidth, and computes `--gflop-s` on codes. `overlapped` is the cost model's pass, the busiest of link, GPU and host;
`in turn` lets link and GPU wait for each other in every layer, as they do where nothing is requested ahead of a router.
Nothing here was measured.
"""

from __future__ import annotations

import argparse
from math import comb

from bench.link_curves import on_card
from moedge.moe.division import ExpertSeconds, divide
from moedge.runtime.plan.planner import solve
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.shards import model_shards
from support import plans_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B")
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--ram", type=int, default=24, help="GiB")
    parser.add_argument("--quant", default="int4")
    parser.add_argument("--ram-gb-s", type=float, default=40.0)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--gflop-s", type=float, default=200.0)
    parser.add_argument("--layer-us", type=float, default=100.0, help="that rows and threads take a layer")
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 2, 4, 8, 16, 32, 64, 128))
    options = parser.parse_args()
    print("| sequences | wanted of a layer, not held | by the CPU | overlapped, tok/s | | in turn, tok/s | |")
    print("|" + "---|" * 7)
    for sequences in options.sequences:
        print(row(sequences, options), flush=True)


def row(sequences: int, options: argparse.Namespace) -> str:
    settings = Settings(quant=options.quant, kv="int8", max_sequences=sequences, speculate="off")
    request = plans_page.question(options.model, options.card, options.ram, settings)
    plan, shape = solve(request).plan, request.shape
    card, _ = on_card(request.costs, plan, request.workload)
    shards = model_shards(shape, plan.quant, plan.dtype)
    experts, packed = shape.layers[-1].experts, shards.layers[-1].expert
    assert experts is not None
    assert packed is not None
    layers = sum(layer.experts is not None for layer in shape.layers)
    missing = experts.count - sum(plan.placement.held_experts) / layers
    wanted = wanted_rows(sequences, experts.per_token / experts.count, missing)
    link_bytes_s = request.costs.rates.link_bytes_s
    left = options.share * (options.ram_gb_s * 1e9 - link_bytes_s)
    seconds = ExpertSeconds(
        packed.nbytes / link_bytes_s,
        packed.nbytes / left,
        2 * experts.numel / (options.gflop_s * 1e9),
        options.layer_us / 1e6 + 4 * sequences * shape.hidden / link_bytes_s,
    )
    count, ends_s = divide(wanted, seconds)
    link_s, divided_s = layers * len(wanted) * seconds.link_s, layers * ends_s
    gpu_s = card.layers + card.attention + card.beside
    host_s = layers * (card.layer + len(wanted) * card.arrival) + card.driven_beside
    divided_host_s = host_s + layers * (options.layer_us / 1e6 - count * card.arrival)
    cells = []
    for before, after in (
        (max(link_s, gpu_s, host_s), max(divided_s, gpu_s, divided_host_s)),
        (link_s + gpu_s, divided_s + gpu_s),
    ):
        cells += [f"{sequences / before:.1f}", f"{sequences / after:.1f} ({before / after:.2f}x)"]
    return "| " + " | ".join([str(sequences), str(len(wanted)), str(count), *cells]) + " |"


def wanted_rows(tokens: int, probability: float, experts: float) -> list[int]:
    """How many of `tokens` want each of `experts` that any wants, ascending: as often as is expected."""
    rows: list[int] = []
    expected = 0.0
    for count in range(1, tokens + 1):
        expected += experts * comb(tokens, count) * probability**count * (1 - probability) ** (tokens - count)
        rows += [count] * max(0, round(expected) - len(rows))
    return rows


if __name__ == "__main__":
    main()
