"""Predicts passes of published models over the link of a card of a data sheet, by budget and sequences: a simulation.

    python -m bench.link_curves                     two models on a card of 8 GB
    python -m bench.link_curves --models gpt-oss-120b --ram 96 --card "RTX 3060 12GB" --gpu-mem 10GiB
    python -m bench.link_curves --models GLM-4.5-Air --ram 24 --gpu-mem 7GiB    what RAM has no room for is on a disk

Bytes, rings and cohorts are the plan's, seconds of computing those of its cost model; when what moves is simulated
(tests/support/device/link_events.py). Nothing here was measured.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from moedge.moe.expected_rows import wanted_by
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.cost_model import CostModel, _decoding
from moedge.runtime.plan.pass_bytes import HostKVBytes
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import solve
from moedge.runtime.plan.presets import beside_layers_s, host_kv_s
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.shape.shards import LayerShards, ModelShards, model_shards
from support import plans_page
from support.device.link_events import LayerWork, PassWork, Seconds, Simulation


def work_of(
    shape: ModelShape, plan: Plan, seconds: Seconds, disk_bytes_s: float = 0.0, tokens: float | None = None
) -> PassWork:
    """A pass in which all sequences of a plan decode, or of `tokens`; layers take what their share of weights takes.

    Of experts that are not held those arrive that are wanted, as many as if tokens chose independently.
    """
    shards, held = model_shards(shape, plan.quant, plan.dtype), plan.placement
    sizes, live = plan.host_kv, plan.max_sequences
    total = sum(layer.dense.nbytes + _experts_nbytes(layer) for layer in shards.layers)
    cohorts = HostKVBytes(sizes, plan.kv_blocks, live, len(shards.layers)).cohorts(live)
    down = max(0, live - plan.kv_sequences) if cohorts else 0
    specs = {layer: spec for spec in _specs(shape, plan) for layer in spec[0].group.layers}
    streamed, layers = set(shards.dense_order[held.held_dense :]), []
    for index, (kind, layer) in enumerate(zip(shape.layers, shards.layers, strict=True)):
        spec, blocks = specs[index]
        missing = layer.num_experts - held.held_experts[index]
        experts_s = seconds.layers * _experts_nbytes(layer) / total
        wanted = (
            wanted_by(live if tokens is None else tokens, kind.experts.per_token / kind.experts.count)
            if kind.experts
            else 0.0
        )
        layers.append(
            LayerWork(
                dense_nbytes=layer.dense.nbytes if index in streamed else 0,
                arriving=round(missing * wanted),
                expert_nbytes=layer.expert.nbytes if layer.expert else 0,
                cohort_nbytes=blocks * spec.record_nbytes,
                down_nbytes=spec.blocks_for(down) * spec.record_nbytes if down else 0,
                dense_s=seconds.layers * layer.dense.nbytes / total,
                attention_s=seconds.attention / len(shards.layers),
                experts_s=experts_s,
                arriving_s=experts_s * missing / max(1, layer.num_experts),
            )
        )
    windows = sizes.window_nbytes if sizes else 0
    work = PassWork(tuple(layers), cohorts, held.dense_ring, held.expert_ring, windows, seconds)
    return _with_disk(work, plan, shards, disk_bytes_s) if plan.streams and plan.staging else work


def _with_disk(work: PassWork, plan: Plan, shards: ModelShards, bytes_s: float) -> PassWork:
    """Of what arrives, the share comes from the disk that neither device nor host memory holds."""
    assert plan.staging is not None
    here, host = plan.placement, plan.staging.placement
    in_host = set(shards.dense_order[: host.held_dense])
    layers = []
    for index, layer in enumerate(work.layers):
        missing = shards.layers[index].num_experts - here.held_experts[index]
        on_disk = shards.layers[index].num_experts - host.held_experts[index]
        read = round(layer.arriving * on_disk / missing) if missing else 0
        layers.append(replace(layer, read=read, dense_read=index not in in_host))
    # Rings of the disk are those of the host, whose placement counts what the device holds as its own.
    return replace(
        work,
        layers=tuple(layers),
        disk_bytes_s=bytes_s,
        dense_staging=host.dense_ring,
        expert_staging=host.expert_ring,
    )


def on_card(costs: CostModel, plan: Plan, job: Workload) -> tuple[Seconds, float]:
    """What the cost model says of a card, and of the seconds of a pass."""
    passes = costs.pass_costs(plan)
    load = _decoding(job, plan.max_sequences)
    model, cost = passes._computing, passes.cost(load)
    attention, head = model._attention(load), model._head(load)
    cohorts, count = passes._host_kv.cohorts(load.sequences), len(costs.shape.layers)
    per_layer = sum(kind.count * model._fixed(kind, load) for kind in model._kinds) / count
    cohort = host_kv_s(2, 1)[0] - host_kv_s(1, 1)[0]
    write = host_kv_s(1, 1)[0] - cohort
    seconds = Seconds(
        layers=cost.compute_s - attention - head,
        attention=attention,
        beside=head,
        layer=per_layer + (write if cohorts else 0),
        cohort=cohort,
        arrival=costs.rates.overheads.arrival_s,
        driven_beside=model._overheads.schedule_s * load.sequences + beside_layers_s(load.sampled),
        eager=False,
    )
    return seconds, max(cost.link_s, cost.compute_s, cost.host_s, cost.disk_s)


def _experts_nbytes(layer: LayerShards) -> int:
    return layer.num_experts * layer.expert.nbytes if layer.expert else 0


def _specs(shape: ModelShape, plan: Plan) -> list[tuple[KVSpec, int]]:
    """By layer group, with the blocks of a cohort."""
    specs = [KVSpec(group, plan.kv, plan.kv_block) for group in shape.kv_groups]
    return list(zip(specs, plan.host_kv.blocks if plan.host_kv else (0,) * len(specs), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=("Qwen3-30B-A3B", "Qwen3-235B-A22B"))
    parser.add_argument("--card", default="RTX 4060 8GB")
    parser.add_argument("--ram", type=int, nargs="+", default=(64, 192), help="GiB, by model")
    parser.add_argument("--gpu-mem", nargs="+", default=("4GiB", "6GiB", "7GiB"))
    parser.add_argument("--sequences", type=int, nargs="+", default=(64, 256, 1024))
    options = parser.parse_args()
    print("| model | budget | sequences | in cohorts | up GB | plan s | simulated s | link busy | disk busy | tok/s |")
    print("|" + "---|" * 10)
    for name, ram in zip(options.models, options.ram, strict=True):
        for budget in options.gpu_mem:
            for sequences in options.sequences:
                print(curve(name, options.card, ram, budget, sequences), flush=True)


def curve(name: str, card: str, ram: int, budget: str, sequences: int) -> str:
    settings = Settings(quant="nf4", kv="int8", max_sequences=sequences, speculate="off")
    request = plans_page.question(name, card, ram, settings, gpu_mem=budget)
    plan = solve(request).plan
    seconds, planned = on_card(request.costs, plan, request.workload)
    rates = request.costs.rates
    work, rate = work_of(request.shape, plan, seconds, rates.disk_bytes_s), rates.link_bytes_s
    simulation = Simulation(work, rate)
    links = simulation.machine.link, simulation.machine.disk
    simulation.run(3)
    before = [each.busy for each in links]
    took = simulation.run(1)
    busy, read = (each.busy - earlier for each, earlier in zip(links, before, strict=True))
    hosted = plan.host_kv.sequences if work.cohorts and plan.host_kv else 0
    cells = (
        name, budget, plan.max_sequences, f"{hosted} in {work.cohorts}", f"{busy * rate / 1e9:.2f}", f"{planned:.3f}",
        f"{took:.3f}", f"{busy / took:.0%}", f"{read / took:.0%}", f"{plan.max_sequences / took:.0f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
