"""How much of the KV cache holds tokens, and what scheduling costs: the real scheduler and allocator, no model.

    python -m bench.kv_waste [--rows 2000] [--live 64] [--blocks 16 32 64] [--pool 1.0 0.5 0.25]

Prompts are lognormal with a median of 400 tokens, outputs exponential with a mean of 300, together at most 4,096.
Every figure is integrated over passes, in bytes, a shared block counted once; `waste` is the share of used blocks'
places without a token. --pool is the share of what all live sequences need on average at their ends: below 1, memory
decides how many run. "reserved" is a baseline, not something anybody ships today: 4,096 places for every sequence.
The last column is what scheduling, growing, packing and booking cost for a sequence in a pass.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from dataclasses import dataclass
from typing import cast

import numpy as np

from moedge.runtime.engine.scheduler import PassLimits, Scheduler
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.kv.allocator import Usage
from moedge.runtime.kv.cache import KVCache
from moedge.runtime.kv.pool import KVPool
from moedge.runtime.kv.spec import KVSpec
from moedge.runtime.sampling.draw import Sampled
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.shape.model_shape import KVGroup

MEDIAN_PROMPT, SPREAD, MEAN_OUTPUT, MOST = 400, 0.8, 300, 4096
TOKENS_PER_PASS = 1024
# Qwen3-30B-A3B.
GROUP = KVGroup(tuple(range(48)), 4, 128, None)


class NoMemory:
    """A pool without bytes."""

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        self.spec = spec
        self.memory = range(num_blocks)


@dataclass
class Result:
    usage: Usage
    live_tokens: int
    held_sequences: int
    passes: int
    seconds: list[float]
    scheduler: Scheduler


def rows(count: int, seed: int) -> list[Sequence]:
    generator = random.Random(seed)
    sequences = []
    for index in range(count):
        prompt = min(MOST - 2, max(1, round(generator.lognormvariate(math.log(MEDIAN_PROMPT), SPREAD))))
        output = min(MOST - prompt, max(1, round(generator.expovariate(1 / MEAN_OUTPUT))))
        # Different first tokens: nothing is shared.
        sequences.append(Sequence([index, *[0] * (prompt - 1)], SequenceSampling(output, ignore_eos=True)))
    return sequences


def simulate(sequences: list[Sequence], live: int, block: int, num_blocks: int) -> Result:
    cache = KVCache([cast(KVPool, NoMemory(KVSpec(GROUP, "int8", block), num_blocks))])
    scheduler = Scheduler(PassLimits(TOKENS_PER_PASS, live), cache)
    todo = iter(sequences)
    result = Result(Usage(), 0, 0, 0, [], scheduler)
    more = True
    while more or scheduler.busy:
        while more and scheduler.has_capacity:
            sequence = next(todo, None)
            more = sequence is not None
            if sequence is not None:
                scheduler.add(sequence)
        begun = time.perf_counter()
        batch = scheduler.schedule()
        usage = cache.usage(sequence.table for sequence in scheduler.running)
        result.live_tokens += sum(sequence.table.num_grown for sequence in scheduler.running)
        result.held_sequences += len(scheduler.running)
        scheduler.commit(batch, Sampled(np.zeros(len(batch.sampling), dtype=np.int64), {}))
        result.seconds.append(time.perf_counter() - begun)
        result.usage.add(usage)
        result.passes += 1
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--live", nargs="+", type=int, default=[64])
    parser.add_argument("--blocks", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("--pool", nargs="+", type=float, default=[1.0, 0.5, 0.25])
    options = parser.parse_args()
    print("| live | block | pool | waste | idle | running | preemptions | computed again | reserved | us a sequence |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for live in options.live:
        for block in options.blocks:
            for pool in options.pool:
                sequences = rows(options.rows, seed=live)
                mean = statistics.fmean(sequence.max_tokens for sequence in sequences)
                num_blocks = max(math.ceil(MOST / block), round(1.5 * mean * live * pool / block))
                print(_line(simulate(sequences, live, block, num_blocks), live, block, pool), flush=True)


def _line(result: Result, live: int, block: int, pool: float) -> str:
    usage, counts = result.usage, result.scheduler.counts
    cells = (
        live, block, f"{pool:.2f}", f"{usage.waste / (usage.live + usage.waste):.2%}",
        f"{(usage.idle + usage.cached) / usage.allocated:.1%}", f"{result.held_sequences / result.passes:.1f}",
        counts.preemptions, counts.recomputed_tokens,
        f"{1 - result.live_tokens / (MOST * result.held_sequences):.1%}",
        f"{1e6 * sum(result.seconds) / result.held_sequences:.1f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
