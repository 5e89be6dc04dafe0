"""How close streaming comes to what this machine can do: steady passes against the disk's roof and compute's roof.

    python bench/make_model.py --shape m --out models/m
    python bench/roofline.py --model models/m --stores stores --ram 3GiB --sequences 32 128 512

The roofs are not moedge's: the disk's is raw O_DIRECT reads of the same files, best of several block sizes and thread
counts; compute's is the same pass with all weights in memory. Everything is measured in one run, in turns.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from moedge.offload.heap import return_memory
from moedge.offload.page_locked import allocate
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, store_path
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.settings.budgets import Budgets, MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import ModelSource, open_source

PROMPT = 32
READ_NBYTES = 3 << 30
AGAIN_NBYTES = 2 << 30
RING_NBYTES = 144 << 20
SETTLE_SECONDS = 0.2


class Reads(NamedTuple):
    """How raw reads are made; `rate` is what a first trial gave, in bytes per second."""

    rate: float
    num_threads: int
    block: int


def raw_read_rate(files: list[Path], num_threads: int, block: int, nbytes: int = READ_NBYTES) -> float:
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


def fastest_reads(files: list[Path]) -> Reads:
    """Of several block sizes and numbers of threads."""
    ways = itertools.product((1, 2, 4, 8), (1 << 20, 4 << 20, 8 << 20))
    return max(Reads(raw_read_rate(files, *way), *way) for way in ways)


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
        engine.add(Sequence(prompt, SamplingParams(generated, ignore_eos=True)))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--ram", nargs="+", default=["3GiB"])
    parser.add_argument("--quant", default="none")
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 128, 512])
    # Enough tokens that all sequences are still live when the last prompt is done.
    parser.add_argument("--generated", type=int, default=28)
    options = parser.parse_args()
    return_memory()
    with open_source(options.model) as source:
        store = store_path(source, options.quant, source.shape.dtype, options.stores)
        prepare(source, store, options.quant, source.shape.dtype, Budgets())
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
                reads = fastest_reads(files)
                again = partial(raw_read_rate, files, reads.num_threads, reads.block, AGAIN_NBYTES)
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
