"""What Python costs for every expert that streams, where nothing moves: microseconds that a link must hide; and for
every sequence of a pass.

    python -m bench.host_cost
    python -m bench.host_cost --layers 2 --experts 16 --tokens 4 --repeats 3
    python -m bench.host_cost --lane cuda                 with the lane of a GPU over a CUDA that does nothing
    python -m bench.host_cost --sequences 64 512          a sequence in a pass, greedily and drawn
    python -m bench.host_cost --json host.json

A pass goes through the layers as `moe/expert_cache.py` serves them: what a router chose is requested, arrives over a
lane that does nothing, is bound, handed out, finished and given back. No expert is computed, no event is recorded and
no kernel started: of a GPU's host time this is the part that the cache, the stream and the ring take. Experts arrive
`one by one`, as they do where the link is the bottleneck, or `together`, up to four.

`--lane cuda` takes the lane that copies to a GPU; its calls of CUDA return at once and are counted. What they take of a
driver is in `runtime/plan/presets.py`.

`--sequences FEW MANY`: what a decoding pass takes more with MANY sequences than with FEW, over their difference:
scheduling, packing, tables of pages in 48 layers, what a draw asks of the host, and text
(`tests/support/device/sequence_cost.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from moedge.moe.expert import ExpertGroups, ExpertWeights, group_by_expert
from moedge.moe.expert_cache import ExpertSlots, Popular, StreamingExpertCache
from moedge.moe.routing_stats import RoutingStats
from moedge.moe.streaming_mode import Mode, RouterLatency
from moedge.moe.streaming_order import ExpertFetchQueue, ExpertForecast, StreamingOrder
from moedge.offload.device import Pinned
from moedge.offload.stream.cuda_lane import CudaLane
from moedge.offload.stream.stream import ALIGNMENT, Lane, Ring, Run, Shard, ShardKey, ShardStream, SyncPoint
from moedge.quant.formats.format import get_format
from moedge.quant.tensor import PackedTensor
from support.device.sequence_cost import NEW, decoding_engine

# Experts of Qwen3-30B-A3B in nf4.
WIDTH, INNER, FORMAT = 2048, 768, "nf4"
PER_TOKEN = 8
# Of the same model.
LAYERS = 48


class Point:
    """A mark, and the end of a copy: reached already."""

    def __init__(self, there: bool) -> None:
        self.there = there

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        pass


class NoLane:
    """Moves nothing. Bytes are there when they are waited for; with `together` also when they are asked about."""

    most_together = 8
    seconds_waited = 0.0
    seconds_busy = 1e-3

    def __init__(self, together: bool) -> None:
        self.point = Point(together)
        self.nbytes_moved = 0

    def start(self, run: Run, after: SyncPoint | None) -> Point:
        self.nbytes_moved += sum(shard.nbytes for shard, _ in run)
        return self.point

    def wait(self, ready: Point) -> None:
        pass

    def mark_used(self) -> Point:
        return self.point

    def close(self) -> None:
        pass


class CountedCuda:
    """In place of `torch.cuda`: streams and events that do nothing, and whose `calls` are counted."""

    def __init__(self, ready: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.ready = ready

    def Stream(self) -> CountedCuda:
        return self

    def Event(self, enable_timing: bool = False) -> CountedEvent:
        self.calls["event"] += 1
        return CountedEvent(self)

    def current_stream(self) -> CountedCuda:
        return self

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.calls["set stream"] += 1
        yield

    def wait_event(self, event: object) -> None:
        self.calls["wait"] += 1

    def synchronize(self) -> None:
        self.calls["synchronize"] += 1

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0


class CountedEvent:
    def __init__(self, cuda: CountedCuda) -> None:
        self.cuda = cuda

    def record(self, stream: object) -> None:
        self.cuda.calls["record"] += 1

    def query(self) -> bool:
        self.cuda.calls["query"] += 1
        return self.cuda.ready

    def elapsed_time(self, other: object) -> float:
        self.cuda.calls["elapsed"] += 1
        return 0.1

    def synchronize(self) -> None:
        self.cuda.calls["synchronize"] += 1


class CountedBytes:
    """Memory whose copies are counted, in place of a slab and of a device's ring."""

    def __init__(self, cuda: CountedCuda) -> None:
        self.cuda = cuda

    def __getitem__(self, part: slice) -> CountedBytes:
        return self

    def copy_(self, source: object, non_blocking: bool = False) -> None:
        self.cuda.calls["copy"] += 1


def cuda_lane(cuda: CountedCuda, nbytes: int) -> CudaLane:
    memory = CountedBytes(cuda)
    return CudaLane(cuda, memory, Pinned(cuda, 0, nbytes, lambda: None), memory)  # type: ignore[arg-type]


class NoSlots:
    """Holds nothing, so that nothing is swapped."""

    def shard(self, key: ShardKey) -> torch.Tensor:
        raise KeyError(key)

    def take(self, entering: ShardKey, view: torch.Tensor) -> torch.Tensor | None:
        return None

    def swap(self, leaving: ShardKey, entering: ShardKey, view: torch.Tensor) -> torch.Tensor:
        raise KeyError(leaving)


class Layers:
    """A model's experts, none of them held, and their cache."""

    def __init__(self, arguments: argparse.Namespace, mode: Mode, whole: bool, together: bool) -> None:
        self.count, self.experts, self.whole = arguments.layers, arguments.experts, whole
        # A layer that is read whole has its place, and a quarter more.
        ring = self.experts * 5 // 4 if whole else arguments.ring
        up, down = (get_format(FORMAT).layout(size, "bfloat16") for size in ((2 * INNER, WIDTH), (WIDTH, INNER)))
        nbytes = -(-(up.nbytes + down.nbytes) // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(ring * nbytes, dtype=torch.uint8)
        counts = dict.fromkeys(range(self.count), self.experts)
        stats = RoutingStats(counts)
        probabilities = {layer: one.wanted_by(arguments.tokens) for layer, one in stats.layers.items()}
        end = up.nbytes + down.nbytes

        bound: dict[int, ExpertWeights] = {}

        def bind(key: ShardKey, view: torch.Tensor) -> ExpertWeights:
            """Once for each place of the ring, as layers do."""
            if (address := view.data_ptr()) not in bound:
                bound[address] = ExpertWeights(
                    PackedTensor.bind(up, view[: up.nbytes]), PackedTensor.bind(down, view[up.nbytes : end])
                )
            return bound[address]

        def shard(key: ShardKey) -> Shard:
            return Shard(f"{key}", nbytes, (key.layer * self.experts + key.expert) * nbytes)

        self.cuda = CountedCuda(together)
        lane: Lane = NoLane(together)
        if arguments.lane == "cuda":
            lane = cuda_lane(self.cuda, self.count * self.experts * nbytes)
        policy = Popular([], dict.fromkeys(counts, nbytes), probabilities)
        slots = ExpertSlots([], NoSlots(), bind, policy)
        order = StreamingOrder(
            ExpertFetchQueue(ShardStream(lane, Ring(memory.numel()), memory), shard),
            slots.held,
            ExpertForecast(stats, {}),
            RouterLatency(lambda: 1e-3, lambda: nbytes, lambda: 0.0, nbytes),
            most_ahead=ring + 1,
            forced=mode,
        )
        self.cache = StreamingExpertCache(stats, order, slots)
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.zeros(arguments.tokens, 8)
        # As if a device had counted: one pass, in which a token chose each.
        self.totals = torch.ones(self.count, 2, self.experts + 1, dtype=torch.int64)
        shape = (self.count, arguments.tokens, self.experts)
        self.chosen = torch.rand(shape, generator=generator).topk(PER_TOKEN, dim=-1).indices

    def groups(self) -> list[ExpertGroups]:
        return [group_by_expert(chosen, self.experts) for chosen in self.chosen]

    def run(self, groups: list[ExpertGroups]) -> int:
        """One pass; returns how many experts came. Of whole layers a device groups the tokens."""
        if self.whole:
            for layer in range(self.count):
                self.cache.read_all(layer, self.experts, len(self.hidden), self.totals[layer])
                self.cache.computed_all()
            return self.count * self.experts
        before = self.cache.counts.fetched
        for layer, chosen in enumerate(groups):
            for arrived in self.cache.fetch(layer, chosen, self.hidden, self.hidden):
                for one in arrived:
                    one.finish()
        return self.cache.counts.fetched - before


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, float | str]]:
    """Of every mode, with experts that come alone and together: medians, in microseconds of this thread's time."""
    for mode, whole in ((Mode.ALL, True), (Mode.ALL, False), (Mode.WANTED, False)):
        for together in (False, True):
            layers = Layers(arguments, mode, whole, together)
            groups = layers.groups()
            layers.run(groups)
            layers.cuda.calls.clear()
            times, came = [], 0
            for _ in range(arguments.repeats):
                begun = time.thread_time()
                came = layers.run(groups)
                times.append((time.thread_time() - begun) * 1e6 / came)
            yield {
                "mode": f"{mode}, whole layers" if whole else str(mode),
                "arrive": "together" if together else "one by one",
                "experts a pass": came,
                "us per expert": round(statistics.median(times), 1),
                "fastest": round(min(times), 1),
                "calls of CUDA per expert": round(sum(layers.cuda.calls.values()) / came / arguments.repeats, 1),
            }


def measure_sequences(few: int, many: int, repeats: int) -> Iterator[dict[str, float | str]]:
    """Of passes of both numbers of sequences, in turn, so that what else runs slows both: CPU time of this thread."""
    for sampled in (False, True):
        times: dict[int, list[float]] = {few: [], many: []}
        with decoding_engine(few, sampled, LAYERS) as one, decoding_engine(many, sampled, LAYERS) as other:
            for _ in range(min(repeats, NEW - 4)):
                for count, engine in ((few, one), (many, other)):
                    begun = time.thread_time()
                    engine.step()
                    times[count].append((time.thread_time() - begun) * 1e6)
        yield {
            "tokens": "drawn" if sampled else "greedy",
            f"us of a pass of {few}": round(statistics.median(times[few])),
            f"of {many}": round(statistics.median(times[many])),
            "us per sequence": round(
                (statistics.median(times[many]) - statistics.median(times[few])) / (many - few), 1
            ),
            "fastest": round((min(times[many]) - min(times[few])) / (many - few), 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ring", type=int, default=64, help="Number of experts that the ring can hold.")
    parser.add_argument("--lane", choices=("none", "cuda"), default="none")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--sequences", type=int, nargs=2, metavar=("FEW", "MANY"))
    parser.add_argument("--json", type=Path, help="Write the figures there, too.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        if arguments.sequences:
            few, many = arguments.sequences
            rows = list(measure_sequences(few, many, arguments.repeats))
        else:
            rows = list(measure(arguments))
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
