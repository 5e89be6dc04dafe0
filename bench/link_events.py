"""Simulates passes whose weights, keys and values cross a link: copies and computing as events, in the product's order.

    python -m bench.link_events                     two published models on a card of 8 GB, by budget and sequences

Streams, rings and the order of requests are the product's (`ShardStream`, `Ring`); what moves bytes is replaced. A copy
goes up a link that takes one at a time, once it was asked for and its slot is free; of several streams the one goes
first that could begin first. The host runs ahead of the device up to where the product waits: for the counts of a
layer's routed tokens, and for new keys and values before the next pass. `bench/throttled_link.py` compares it to passes.
"""

from __future__ import annotations

import argparse
from collections import deque
from dataclasses import dataclass

from moedge.moe.expected_rows import wanted_by
from moedge.moe.streaming_order import MAX_TOGETHER
from moedge.offload.stream.stream import ALIGNMENT, Ring, Run, Shard, ShardStream
from moedge.runtime.kv.cohorts import STAGINGS
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.plan.cost_model import CostModel, _decoding, _PassCosts
from moedge.runtime.plan.pass_bytes import HostKVBytes
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import solve
from moedge.runtime.plan.presets import beside_layers_s, host_kv_s
from moedge.runtime.settings.settings import Settings
from moedge.runtime.shape.model_shape import ModelShape
from moedge.runtime.shape.shards import LayerShards, model_shards
from support import plans_page


@dataclass(frozen=True)
class LayerWork:
    """Bytes of a layer that go up: its linears, 0 if they are held, `arriving` experts, and each cohort; those of new
    tokens go down. Seconds: of its linears, of attention, and of all experts."""

    dense_nbytes: int
    arriving: int
    expert_nbytes: int
    cohort_nbytes: int
    down_nbytes: int
    dense_s: float
    attention_s: float
    experts_s: float
    arriving_s: float


@dataclass(frozen=True)
class Seconds:
    """What computing takes in a pass: `layers` of which are not `attention`, and `beside` them; and the thread that
    drives a device for a layer, for a cohort in one, for an expert that arrives, and beside layers.

    With `eager` that thread is the device, and takes nothing else.
    """

    layers: float
    attention: float
    beside: float
    layer: float = 0.0
    cohort: float = 0.0
    arrival: float = 0.0
    driven_beside: float = 0.0
    eager: bool = True


@dataclass(frozen=True)
class PassWork:
    """A pass: its layers, cohorts in host memory, rings in bytes, and seconds."""

    layers: tuple[LayerWork, ...]
    cohorts: int
    dense_ring: int
    expert_ring: int
    window_ring: int
    seconds: Seconds


@dataclass(eq=False)
class Copy:
    """A copy up which may begin at `after`; `end` is known once the link has come to it."""

    machine: Machine
    nbytes: int
    after: float
    end: float | None = None

    def query(self) -> bool:
        self.machine.link.advance_to(self.machine.host)
        return self.end is not None and self.end <= self.machine.host


@dataclass(eq=False)
class Point:
    """A time of the device."""

    at: float

    def synchronize(self) -> None:
        pass


class Link:
    """One copy at a time; of the streams' next ones, that which could begin first."""

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s, self.free, self.busy = bytes_s, 0.0, 0.0
        self.streams: list[deque[Copy]] = []

    def end_of(self, copy: Copy) -> float:
        while copy.end is None:
            self._advance()
        return copy.end

    def advance_to(self, now: float) -> None:
        """Begins all that can begin before `now`."""
        while any(stream and max(self.free, stream[0].after) < now for stream in self.streams):
            self._advance()

    def _advance(self) -> None:
        heads = [stream for stream in self.streams if stream]
        first = min(heads, key=lambda stream: max(self.free, stream[0].after)).popleft()
        seconds = first.nbytes / self.bytes_s
        self.free = first.end = max(self.free, first.after) + seconds
        self.busy += seconds


class Machine:
    """The clocks of the host and of the device, and the link."""

    def __init__(self, bytes_s: float, eager: bool) -> None:
        self.host = self.device = 0.0
        self.eager, self.link = eager, Link(bytes_s)

    def compute(self, seconds: float, host_s: float = 0.0) -> None:
        self.host += host_s
        self.device = max(self.device, self.host) + seconds
        self._tie()

    def wait_for(self, at: float) -> None:
        """The device waits."""
        self.device = max(self.device, at)
        self._tie()

    def synchronize(self, at: float | None = None) -> None:
        """The host waits, for all that was given to the device, or until `at`."""
        self.host = max(self.host, self.device if at is None else at)

    def _tie(self) -> None:
        if self.eager:
            self.host = self.device


class SimulatedLane:
    """A stream of the link (`Lane` of offload/stream/stream.py)."""

    most_together = 8
    nbytes_moved, seconds_waited, seconds_busy = 0, 0.0, 0.0

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._copies: deque[Copy] = deque()
        machine.link.streams.append(self._copies)

    def start(self, run: Run, after: Point | None) -> Copy:
        begin = max(self._machine.host, after.at if after else 0.0)
        copy = Copy(self._machine, sum(slot.nbytes for _, slot in run), begin)
        self._copies.append(copy)
        return copy

    def wait(self, ready: Copy) -> None:
        self._machine.wait_for(self._machine.link.end_of(ready))

    def mark_used(self) -> Point:
        return Point(self._machine.device)

    def close(self) -> None:
        pass


class Simulation:
    """Passes one after the other; `seconds` are of each, from the end of the one before."""

    def __init__(self, work: PassWork, bytes_s: float) -> None:
        self.work, self.machine = work, Machine(bytes_s, work.seconds.eager)
        self._dense = self._stream(work.dense_ring)
        self._experts = self._stream(work.expert_ring)
        self._windows = self._stream(work.window_ring)
        self._written: deque[float] = deque()
        self._down_free = 0.0
        self._dense.ask(*self._shards([layer.dense_nbytes for layer in work.layers]))
        self._expert_shards = [self._shards([layer.expert_nbytes] * layer.arriving) for layer in work.layers]
        for shards in self._expert_shards:
            self._experts.ask(*shards)
        self.seconds: list[float] = []

    def run(self, passes: int) -> float:
        """Seconds of the last pass."""
        for _ in range(passes):
            begun = self.machine.device
            for index in range(len(self.work.layers)):
                self._layer(index)
            self.machine.compute(self.work.seconds.beside, self.work.seconds.driven_beside)
            self.machine.synchronize()
            self.seconds.append(self.machine.device - begun)
        return self.seconds[-1]

    def _layer(self, index: int) -> None:
        work, layer, machine = self.work, self.work.layers[index], self.machine
        dense = self._dense.next() if layer.dense_nbytes else None
        machine.compute(layer.dense_s / 2, work.seconds.layer)
        if index == 0 and work.cohorts:
            self._begin()
        parts = work.cohorts + 1
        machine.compute(layer.attention_s / parts)
        for _ in range(work.cohorts):
            window = self._windows.next()
            machine.compute(layer.attention_s / parts, work.seconds.cohort)
            self._windows.done(window)
        if work.cohorts:
            self._write(layer.down_nbytes)
        machine.compute(layer.dense_s / 2)
        if layer.experts_s:
            machine.synchronize()
            self._mix(index)
        if dense is not None:
            self._dense.done(dense)
            self._dense.ask(dense.shard)

    def _begin(self) -> None:
        while self._written:
            self.machine.synchronize(self._written.popleft())
        sizes = [layer.cohort_nbytes for layer in self.work.layers for _ in range(self.work.cohorts)]
        self._windows.ask(*self._shards(sizes))

    def _write(self, nbytes: int) -> None:
        """By the stream of compute."""
        if len(self._written) == STAGINGS:
            self.machine.synchronize(self._written.popleft())
        self.machine.compute(nbytes / self.machine.link.bytes_s)
        self._written.append(self.machine.device)

    def _mix(self, index: int) -> None:
        layer, left = self.work.layers[index], self.work.layers[index].arriving
        self.machine.compute(layer.experts_s - layer.arriving_s)
        each = layer.arriving_s / max(1, layer.arriving)
        # The same experts of the next pass are asked for as soon as the queue has room: it always has more than fit.
        self._experts.ask(*self._expert_shards[index])
        while left:
            together = [self._experts.next()]
            while len(together) < min(left, MAX_TOGETHER) and self._experts.is_ready():
                together.append(self._experts.next())
            self.machine.compute(each * len(together), self.work.seconds.arrival * len(together))
            self._experts.done(*together)
            left -= len(together)

    def _stream(self, nbytes: int) -> ShardStream[bytes]:
        return ShardStream(SimulatedLane(self.machine), Ring(nbytes), b"")

    def _shards(self, sizes: list[int]) -> list[Shard]:
        shards, begin = [], 0
        for nbytes in sizes:
            if nbytes:
                shards.append(Shard("", nbytes, begin))
                begin += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return shards


def work_of(shape: ModelShape, plan: Plan, seconds: Seconds) -> PassWork:
    """A pass in which all sequences of a plan decode. Layers take what their share of the weights takes.

    Of experts that are not held those arrive that are wanted, as many as if tokens chose independently.
    """
    shards, held, sizes, live = (
        model_shards(shape, plan.quant, plan.dtype),
        plan.placement,
        plan.host_kv,
        plan.max_sequences,
    )
    total = sum(layer.dense.nbytes + _experts_nbytes(layer) for layer in shards.layers)
    cohorts = HostKVBytes(sizes, plan.kv_blocks, live, len(shards.layers)).cohorts(live)
    down = max(0, live - plan.kv_sequences) if cohorts else 0
    specs = {layer: spec for spec in _specs(shape, plan) for layer in spec[0].group.layers}
    layers = []
    for index, (kind, layer) in enumerate(zip(shape.layers, shards.layers, strict=True)):
        spec, blocks = specs[index]
        missing, experts_s = (
            layer.num_experts - held.held_experts[index],
            seconds.layers * _experts_nbytes(layer) / total,
        )
        wanted = wanted_by(live, kind.experts.per_token / kind.experts.count) if kind.experts else 0.0
        layers.append(
            LayerWork(
                dense_nbytes=layer.dense.nbytes if index >= held.held_dense else 0,
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
    return PassWork(
        tuple(layers), cohorts, held.dense_ring, held.expert_ring, sizes.window_nbytes if sizes else 0, seconds
    )


def on_card(costs: CostModel, plan: Plan, job: Workload) -> tuple[Seconds, float]:
    """What the cost model says of a card, and of the seconds of a pass."""
    passes, load = (
        _PassCosts(costs._work(plan.quant, plan.dtype, None), plan, costs.rates),
        _decoding(job, plan.max_sequences),
    )
    model, cost = passes._computing, passes.cost(load)
    attention, head = model._attention(load), model._head(load)
    driven, _ = host_kv_s(1, 1)
    cohorts, count = passes._host_kv.cohorts(load.sequences), len(costs.shape.layers)
    per_layer = sum(kind.count * model._fixed(kind, load) for kind in model._kinds) / count
    write = host_kv_s(1, 1)[0] * 2 - host_kv_s(2, 1)[0]
    seconds = Seconds(
        layers=cost.compute_s - attention - head,
        attention=attention,
        beside=head,
        layer=per_layer + (write if cohorts else 0),
        cohort=driven - write,
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
    parser.add_argument("--ram", type=int, nargs="+", default=(64, 192), help="GiB, enough for all weights, by model")
    parser.add_argument("--gpu-mem", nargs="+", default=("4GiB", "6GiB", "7GiB"))
    parser.add_argument("--sequences", type=int, nargs="+", default=(64, 256, 1024))
    options = parser.parse_args()
    print(
        "| model | budget | sequences | in cohorts | up GB | plan s | simulated s | link busy | tok/s |\n|" + "---|" * 9
    )
    for name, ram in zip(options.models, options.ram, strict=True):
        for budget in options.gpu_mem:
            for sequences in options.sequences:
                print(curve(name, options.card, ram, budget, sequences), flush=True)


def curve(name: str, card: str, ram: int, budget: str, sequences: int) -> str:
    settings = Settings(quant="nf4", kv="int8", max_sequences=sequences, speculate="off")
    request = plans_page.question(name, card, ram, settings, gpu_mem=budget)
    plan = solve(request).plan
    seconds, planned = on_card(request.costs, plan, request.workload)
    work, rate = work_of(request.shape, plan, seconds), request.costs.rates.link_bytes_s
    simulation = Simulation(work, rate)
    before = simulation.run(3) and simulation.machine.link.busy
    took = simulation.run(1)
    busy = simulation.machine.link.busy - before
    hosted = plan.host_kv.sequences if work.cohorts and plan.host_kv else 0
    return (
        f"| {name} | {budget} | {plan.max_sequences} | {hosted} in {work.cohorts} | {busy * rate / 1e9:.2f} | {planned:.3f} | "
        f"{took:.3f} | {busy / took:.0%} | {plan.max_sequences / took:.0f} |"
    )


if __name__ == "__main__":
    main()
