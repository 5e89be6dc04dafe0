"""How close passes come to what this machine can do: its disk, its products, its link and its device's memory.

    python -m bench.make_model --shape m --out models/m
    python -m bench.roofline --model models/m --stores stores --ram 3GiB --sequences 32 128 512

The roofs are not moedge's: the disk's is raw O_DIRECT reads of the same files, best of several block sizes and thread
counts; compute's is the same pass with all weights in memory. Everything is measured in one run, in turns.

bench/compare.py takes the bare products of a pass from here, bench/gpu.sh a device's rates and bounds.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import Tensor

from moedge.offload.budget import parse_size
from moedge.offload.device import allocate
from moedge.offload.machine.speeds import best_seconds, measure_link, measure_pin_limit
from moedge.offload.memory import return_memory
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.scratch import scratch_nbytes
from moedge.quant.tensor import pack
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, store_path
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.shape.model_shape import LayerShape, Matrix, ModelShape
from moedge.runtime.source.model_source import ModelSource, open_source

PROMPT = 32
RING_NBYTES = 144 << 20
SETTLE_SECONDS = 0.2


class Reads(NamedTuple):
    """How raw reads are made; `rate` is what a first trial gave, in bytes per second."""

    rate: float
    num_threads: int
    block: int


def raw_read_rate(files: list[Path], num_threads: int, block: int, nbytes: int) -> float:
    """Bytes per second of O_DIRECT reads of up to `nbytes`, in file order."""
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    blocks = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size // block * block, block)]
    jobs, lock = iter(blocks[: nbytes // block]), threading.Lock()
    counts = [0] * num_threads
    # As large as the ring, in huge pages: small buffers that stay in the processor's cache read faster than any
    # memory that weights could be left in.
    rooms = [allocate(max(block, RING_NBYTES // num_threads)) for _ in range(num_threads)]
    for room in rooms:
        room[:: 1 << 12] = bytes(len(range(0, len(room), 1 << 12)))

    def work(index: int) -> None:
        room = rooms[index]
        places = itertools.cycle(range(0, len(room) // block * block, block))
        while True:
            with lock:
                job = next(jobs, None)
            if job is None:
                return
            at = next(places)
            counts[index] += os.preadv(job[0], [memoryview(room)[at : at + block]], job[1])

    begun = time.perf_counter()
    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    for descriptor in descriptors:
        os.close(descriptor)
    return sum(counts) / seconds


def fastest_reads(files: list[Path], nbytes: int) -> Reads:
    """Of several block sizes and numbers of threads."""
    ways = itertools.product((1, 2, 4, 8), (1 << 20, 4 << 20, 8 << 20))
    return max(Reads(raw_read_rate(files, *way, nbytes), *way) for way in ways)


class Pass(NamedTuple):
    """One steady pass: its seconds, the bytes that moved meanwhile, and the disk's better rate of before and after."""

    seconds: float
    moved: int
    rate: float


def steady_passes(loaded: LoadedEngine, num_sequences: int, generated: int, read: Callable[[], float]) -> list[Pass]:
    """The passes in which every sequence decodes one token; `read` is asked for the disk's rate around them."""
    generator = torch.Generator().manual_seed(7)
    engine = loaded.engine
    for _ in range(num_sequences):
        prompt = torch.randint(300, 31000, (PROMPT,), generator=generator).tolist()
        engine.add(Sequence(prompt, SequenceSampling(generated, ignore_eos=True)))
    passes, rates = [], [0.0]
    while engine.busy:
        before, moved = engine.metrics.generated_tokens, loaded.streamed.nbytes_moved
        begun = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - begun
        moved = loaded.streamed.nbytes_moved - moved
        if engine.metrics.generated_tokens - before == num_sequences and not engine.scheduler.waiting:
            # What was asked for ahead comes first.
            time.sleep(SETTLE_SECONDS)
            rates.append(read())
            passes.append(Pass(seconds, moved, max(rates[-2:])))
    return passes[1:]


def measure(
    source: ModelSource,
    plan: Plan,
    store: Path | None,
    num_sequences: int,
    generated: int,
    read: Callable[[], float],
) -> tuple[list[Pass], float]:
    """The steady passes, and the bytes that a pass read in the mean."""
    # The engine before this one is a circle of modules.
    gc.collect()
    with closing(load_engine(source, plan, store)) as loaded:
        passes = steady_passes(loaded, num_sequences, generated, read)
        moved = loaded.streamed.nbytes_from_disk / loaded.engine.metrics.passes
    return passes, moved


# --- products: the roof of a pass in memory. Every expert gets the same number of rows, no row is gathered or weighed,
# nothing is attended, normalised or sampled. Products go one after another with all threads, or experts side by side
# with one thread each; the faster way counts.


PRODUCT_REPEATS = 5


class BareLayer:
    """The matrices of one layer, at random, and products with them."""

    def __init__(self, layer: LayerShape) -> None:
        experts = layer.experts
        self.dense = [_weights(matrix) for matrix in layer.dense]
        self.experts = [(_weights(experts.up), _weights(experts.down)) for _ in range(experts.count)] if experts else []
        self.chosen = experts.per_token if experts else 0

    def multiply(self, tokens: int, threads: int, side_by_side: bool) -> None:
        for weight in self.dense:
            torch.mm(torch.zeros(tokens, weight.shape[1], dtype=weight.dtype), weight.t())
        if not self.experts:
            return
        rows = max(1, tokens * self.chosen // len(self.experts))
        inputs = [torch.zeros(rows, weight.shape[1], dtype=weight.dtype) for weight in self.experts[0]]

        def expert(index: int) -> None:
            for x, weight in zip(inputs, self.experts[index], strict=True):
                torch.mm(x, weight.t())

        if not side_by_side:
            for index in range(len(self.experts)):
                expert(index)
            return
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(expert, range(len(self.experts))))


def product_seconds(shape: ModelShape, tokens: int, threads: int) -> float:
    """Median time of the products of all layers for a pass of `tokens`; the output head is left out."""
    torch.set_num_threads(threads)
    kinds = {(layer.dense, layer.experts): layer for layer in shape.layers}
    counts = [sum(kind == (layer.dense, layer.experts) for layer in shape.layers) for kind in kinds]
    return sum(
        count * _layer_seconds(BareLayer(one), tokens, threads)
        for one, count in zip(kinds.values(), counts, strict=True)
    )


def _layer_seconds(layer: BareLayer, tokens: int, threads: int) -> float:
    best = []
    for side_by_side in (False, True):
        times = []
        for _ in range(PRODUCT_REPEATS):
            begun = time.perf_counter()
            layer.multiply(tokens, threads, side_by_side)
            times.append(time.perf_counter() - begun)
        best.append(statistics.median(times))
    return min(best)


def _weights(matrix: Matrix) -> Tensor:
    return torch.empty(matrix.rows, matrix.cols, dtype=torch.bfloat16).normal_(std=0.02)


# --- a device's own rates: copies over the link and within its memory, products by rows


DEVICE_ROWS = (1, 16, 64, 256, 1024, 4096)
DEVICE_SIZE = 4096


def link() -> dict[str, Any]:
    """bytes/s from the host, pinned and pageable, by size of one copy."""
    rates = {f"{mib} MiB": measure_link(mib << 20) for mib in (1, 4, 16, 256)}
    return {
        "pinned_bytes_s": {size: rate and rate.pinned_bytes_s for size, rate in rates.items()},
        "pageable_bytes_s": {size: rate and rate.pageable_bytes_s for size, rate in rates.items()},
    }


def pinning() -> dict[str, Any]:
    limit = measure_pin_limit(16 << 30)
    return {"pinned_nbytes": limit and limit.nbytes, "refused": limit and limit.refused}


def device_copy() -> dict[str, Any]:
    """Bytes read plus bytes written per second of a copy within the device's memory."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return {"bytes_s": 2 * len(source) / _device_seconds(lambda: target.copy_(source))}


def products() -> dict[str, Any]:
    """FLOP/s of bf16 rows with a packed matrix [4096, 4096], by weight format and rows."""
    weight = torch.randn(DEVICE_SIZE, DEVICE_SIZE, dtype=torch.bfloat16, device="cuda")
    rates: dict[str, Any] = {}
    for name in ("none", "int8", "nf4"):
        packed = pack(weight, name)
        compute = ParallelMatmul(Workspace(scratch_nbytes(packed.layout, "bfloat16", False), "cuda"))
        for rows in DEVICE_ROWS:
            x = torch.randn(rows, DEVICE_SIZE, dtype=torch.bfloat16, device="cuda")
            seconds = _device_seconds(partial(compute.linear, x, packed))
            rates.setdefault(name, {})[str(rows)] = 2 * rows * DEVICE_SIZE * DEVICE_SIZE / seconds
    return {"flop_s": rates}


def widening() -> dict[str, Any]:
    """Weights per second that each format is widened at to bf16."""
    weight = torch.randn(DEVICE_SIZE, DEVICE_SIZE, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(weight)
    packs = {name: pack(weight, name) for name in ("int8", "nf4")}
    return {
        "weights_s": {name: weight.numel() / _device_seconds(partial(p.dequantize, out)) for name, p in packs.items()}
    }


def _device_seconds(run: Any) -> float:
    def synchronous() -> None:
        run()
        torch.cuda.synchronize()

    return best_seconds(synchronous, 0.2)


# --- a device's pass against what binds it: the link, its memory or its arithmetic, all measured in the same run


@dataclass(frozen=True)
class Rates:
    """bytes/s over the link, bytes/s read and written within the device, FLOP/s of bfloat16 products of many rows."""

    link: float
    memory: float
    compute: float


def measure_rates() -> Rates | None:
    """None where there is no link to measure."""
    link = measure_link(256 << 20)
    if link is None or link.pinned_bytes_s is None:
        return None
    compute = max(products()["flop_s"]["none"].values())
    return Rates(link.pinned_bytes_s, device_copy()["bytes_s"], compute)


def bounds(shape: ModelShape, plan: Plan, rates: Rates, live: int, tokens: int, streamed: int) -> dict[str, float]:
    """Least seconds of a pass in which `live` sequences of `tokens` tokens decode, by what would bind it.

    `streamed` bytes cross the link; the device's memory takes each of them in and gives it out, reads what is held, and
    all keys and values.
    """
    kv = live * tokens * sum(KVSpec(group, plan.kv, plan.kv_block).token_nbytes for group in shape.kv_groups)
    return {
        "link": streamed / rates.link,
        "memory": (2 * streamed + plan.held_nbytes + kv) / rates.memory,
        "compute": 2 * shape.active_parameters * live / rates.compute,
    }


def against_roofline(
    shape: ModelShape, plan: Plan, rates: Rates | None, live: int, tokens: int, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Which bound is the highest, and how far above it the measured pass lies."""
    if rates is None:
        return {}
    found = bounds(shape, plan, rates, live, tokens, measured["link_nbytes"])
    binding = max(found, key=found.__getitem__)
    return {"bounds_s": found, "bound_by": binding, "pass_over_bound": measured["pass_s"] / found[binding]}


# --- streaming from disk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--ram", nargs="+", default=["3GiB"])
    parser.add_argument("--quant", default="none")
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 128, 512])
    # Enough tokens that all sequences are still live when the last prompt is done.
    parser.add_argument("--generated", type=int, default=28)
    parser.add_argument("--read", default="3GiB", help="bytes of a raw read")
    options = parser.parse_args()
    read_nbytes = parse_size(options.read, 0, 0)
    return_memory()
    with open_source(options.model) as source:
        store = store_path(source, options.quant, source.shape.dtype, options.stores)
        prepare(source, store, options.quant, source.shape.dtype, Budgets().on_cpu())
        files = sorted(store.glob("layer-*.safetensors"))
        print("| memory | sequences | pass s | disk roof s | compute roof s | pass/roof | tok/s | read/plan |")
        print("|---|---|---|---|---|---|---|---|")
        for num_sequences in options.sequences:
            settings = Settings(dtype="auto", quant=options.quant, max_sequences=num_sequences)
            job = Workload(num_sequences, PROMPT + options.generated)
            for ram in options.ram:
                plan = make_plan(source.shape, settings, MemoryBudget(Budgets(ram=ram).host_nbytes()), job)
                same = replace(settings, tokens_per_pass=plan.tokens_per_pass)
                whole = make_plan(source.shape, same, MemoryBudget(1 << 40), job)
                alone, _ = measure(source, whole, store, num_sequences, options.generated, lambda: 1.0)
                compute = statistics.median(each.seconds for each in alone)
                reads = fastest_reads(files, read_nbytes)
                again = partial(raw_read_rate, files, reads.num_threads, reads.block, read_nbytes * 2 // 3)
                passes, moved = measure(source, plan, store, num_sequences, options.generated, again)
                seconds = statistics.median(each.seconds for each in passes)
                disk = statistics.median(each.moved / each.rate for each in passes)
                ratio = statistics.median(each.seconds / max(compute, each.moved / each.rate) for each in passes)
                streamed = plan.weights_nbytes - plan.held_nbytes
                cells = (
                    ram, num_sequences, f"{seconds:.2f}", f"{disk:.2f}", f"{compute:.2f}",
                    f"{ratio:.2f}", f"{num_sequences / seconds:.1f}",
                    f"{moved / streamed:.3f}" if streamed else "-",
                )  # fmt: skip
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
