"""Predicts passes of a published model on a card of a data sheet whose CPU attends to some sequences where they lie.

    python -m bench.cpu_attention
    python -m bench.cpu_attention --kv int8 --ram-gb-s 60 --share 0.5

Of the cohorts of sequences in host memory that a plan has, the CPU attends to as many as take it no longer than the
link then takes for weights and the other cohorts; queries go down and results up. It reads `--share` of the RAM's
bandwidth that copies leave. Bytes and seconds are the plan's and those of its cost model. `overlapped` is the busiest of
link, GPU, host and CPU, for which layers of two halves of the sequences must take turns, since a layer's output waits
for its attention; `in turn`, the GPU waits for the CPU in every layer. Nothing here was measured.
"""

from __future__ import annotations

import argparse

from bench.link_curves import on_card, work_of
from moedge.runtime.plan.cost_model import _LayerKind
from moedge.runtime.plan.planner import solve
from moedge.runtime.settings.settings import Settings
from support import plans_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen3-30B-A3B")
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--ram", type=int, default=24, help="GiB")
    parser.add_argument("--quant", default="nf4")
    parser.add_argument("--kv", default="int4")
    parser.add_argument("--ram-gb-s", type=float, default=40.0)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--layer-us", type=float, default=100.0, help="that queries, results and threads take a layer")
    parser.add_argument("--sequences", type=int, nargs="+", default=(128, 256, 384, 512))
    options = parser.parse_args()
    print("| sequences | in cohorts | by the CPU | link s, without | GPU s | tok/s | overlapped | in turn |")
    print("|" + "---|" * 8)
    for sequences in options.sequences:
        print(row(sequences, options), flush=True)


def row(sequences: int, options: argparse.Namespace) -> str:
    settings = Settings(quant=options.quant, kv=options.kv, max_sequences=sequences, speculate="off")
    request = plans_page.question(options.model, options.card, options.ram, settings)
    plan, rates, shape = solve(request).plan, request.costs.rates, request.shape
    seconds, took = on_card(request.costs, plan, request.workload)
    work = work_of(shape, plan, seconds, rates.disk_bytes_s)
    of_cohorts = [layer.cohort_nbytes for layer in work.layers]
    weights = sum(layer.dense_nbytes + layer.arriving * layer.expert_nbytes for layer in work.layers)
    rows_s = len(shape.layers) * options.layer_us / 1e6
    # Queries and results of a layer, in bfloat16, for each sequence.
    rows_nbytes = sum(4 * _LayerKind(1, layer.dense, layer.experts).width for layer in shape.layers)
    hosted = plan.host_kv.sequences / max(1, plan.host_kv.count) if plan.host_kv and work.cohorts else 0.0
    cpu_bytes_s = options.share * (options.ram_gb_s * 1e9 - rates.link_bytes_s)
    gpu_s = seconds.layers + seconds.attention + seconds.beside
    driven = len(shape.layers) * (seconds.layer + work.cohorts * seconds.cohort) + seconds.driven_beside
    best = (took, took, 0)
    for count in range(1, work.cohorts + 1):
        link_s = (
            weights + (work.cohorts - count) * sum(of_cohorts) + count * hosted * rows_nbytes
        ) / rates.link_bytes_s
        cpu_s = count * sum(of_cohorts) / cpu_bytes_s + rows_s
        left = gpu_s - seconds.attention * count / (work.cohorts + 1)
        best = min(best, (max(link_s, cpu_s, left, driven), max(link_s, cpu_s + left, driven), count))
    overlapped, in_turn, count = best
    link_s = (weights + work.cohorts * sum(of_cohorts)) / rates.link_bytes_s
    live = plan.max_sequences
    cells = (
        live, f"{hosted * work.cohorts:.0f} in {work.cohorts}", count, f"{link_s:.2f}", f"{gpu_s:.2f}", f"{live / took:.0f}",
        f"{live / overlapped:.0f} ({took / overlapped:.2f}x)", f"{live / in_turn:.0f} ({took / in_turn:.2f}x)",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
