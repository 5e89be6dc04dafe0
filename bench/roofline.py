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
from contextlib import closing
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from moedge.offload.heap import return_memory
from moedge.offload.memory import host_peak, reset_host_peak
from moedge.offload.slab import allocate
from moedge.runtime.load import LoadedEngine, load_engine
from moedge.runtime.model_source import ModelSource, open_source
from moedge.runtime.plan.budgets import Budgets
from moedge.runtime.plan.planner import JobShape, Plan, Settings, make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.sequence import Sequence
from moedge.runtime.weights.making import place_for, prepare

# Enough tokens that all sequences are still live when the last prompt is done.
PROMPT, GENERATED = 32, 28
READ_NBYTES = 3 << 30
RING_NBYTES = 144 << 20


def raw_read_rate(files: list[Path], num_threads: int, block: int) -> float:
    """Bytes per second of O_DIRECT reads of up to READ_NBYTES, in file order."""
    descriptors = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    blocks = [(fd, at) for fd in descriptors for at in range(0, os.fstat(fd).st_size // block * block, block)]
    jobs, lock = iter(blocks[: READ_NBYTES // block]), threading.Lock()
    counts = [0] * num_threads

    def work(index: int) -> None:
        # As large as the ring, in huge pages: small buffers that stay in the processor's cache read faster than any
        # memory that weights could be left in.
        room = allocate(max(block, RING_NBYTES // num_threads))
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


def disk_roof(store: Path) -> float:
    files = sorted(store.glob("layer-*.safetensors"))
    return max(
        raw_read_rate(files, threads, block << 20) for threads, block in itertools.product((1, 2, 4, 8), (1, 4, 8))
    )


def steady_passes(loaded: LoadedEngine, num_sequences: int) -> list[float]:
    """Seconds of each pass in which every sequence decodes one token."""
    generator = torch.Generator().manual_seed(7)
    engine = loaded.engine
    for _ in range(num_sequences):
        prompt = torch.randint(300, 31000, (PROMPT,), generator=generator).tolist()
        engine.add(Sequence(prompt, SamplingParams(GENERATED, ignore_eos=True)))
    seconds = []
    while engine.busy:
        before, begun = engine.metrics.generated_tokens, time.perf_counter()
        engine.step()
        if engine.metrics.generated_tokens - before == num_sequences and not engine.scheduler.waiting:
            seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def measure(source: ModelSource, plan: Plan, store: Path | None, num_sequences: int) -> tuple[float, float, int]:
    """Median seconds of a steady pass, bytes that a pass read, peak of the process."""
    # The engine before this one is a circle of modules.
    gc.collect()
    reset_host_peak()
    with closing(load_engine(source, plan, store)) as loaded:
        seconds = steady_passes(loaded, num_sequences)
        moved = loaded.streamed.nbytes_from_disk / loaded.engine.metrics.passes
    return statistics.median(seconds), moved, host_peak()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--ram", nargs="+", default=["3GiB"])
    parser.add_argument("--quant", default="none")
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 128, 512])
    options = parser.parse_args()
    return_memory()
    with open_source(options.model) as source:
        store = place_for(source, options.quant, source.shape.dtype, options.stores)
        prepare(source, store, options.quant, source.shape.dtype, Budgets())
        print("| memory | sequences | pass s | disk roof s | compute roof s | pass/roof | tok/s | read/plan | peak |")
        print("|---|---|---|---|---|---|---|---|---|")
        for num_sequences in options.sequences:
            settings = Settings("auto", options.quant, max_sequences=num_sequences)
            job = JobShape(num_sequences, PROMPT + GENERATED)
            for ram in options.ram:
                plan = make_plan(source.shape, settings, Budgets(ram).host_nbytes(), job)
                seconds, moved, peak = measure(source, plan, store, num_sequences)
                streamed = plan.weights_nbytes - plan.held_nbytes
                disk = streamed / disk_roof(store)
                same = replace(settings, tokens_per_pass=plan.tokens_per_pass)
                whole = make_plan(source.shape, same, 1 << 40, job)
                compute, _, _ = measure(source, whole, store, num_sequences)
                cells = (
                    ram, num_sequences, f"{seconds:.2f}", f"{disk:.2f}", f"{compute:.2f}",
                    f"{seconds / max(disk, compute):.2f}", f"{num_sequences / seconds:.1f}",
                    f"{moved / streamed:.3f}" if streamed else "-", f"{peak / 2**30:.2f} GiB",
                )  # fmt: skip
                print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
