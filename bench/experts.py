"""What streaming single experts saves: bytes per token by mode and policy, and speed by the number of sequences.

    python -m bench.make_model --shape s --skew --out models/skew
    python -m bench.experts bytes --model models/skew --stores stores
    python -m bench.experts speed --model models/m --stores stores --ram 3GiB --sequences 1 8 32 128

`bytes` holds half of the experts and decodes 4 sequences in every mode and under every policy, all runs over the same
tokens; beside them the least that any policy could read which knows the future (Belady), a scan under both policies,
and passes of 128 sequences against those that read everything. `speed` is a table of whole passes under a budget: how
fast, what was read, and how busy the disk was; each size in a process of its own, since a peak never falls.
Sequences are sampled, so that they do not fall into loops.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence as Items
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from moedge.moe.policy import Lru
from moedge.moe.streaming_mode import ExpertOptions, Hold, Mode
from moedge.offload.memory import host_peak, return_memory
from moedge.offload.stream.lane import ShardKey
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs.report import experts as experts_of
from moedge.runtime.jobs.summary import Experts
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, store_path
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SamplingParams
from moedge.runtime.settings.budgets import Budgets, MemoryBudget
from moedge.runtime.settings.settings import Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from support.experts.replay import belady, replay

PROMPT, GENERATED = 32, 160
# Of the flat distributions of random weights every token would be sorted at each draw; no trained model asks for that.
TOP_K = 200


@dataclass
class Decoded:
    """Steady passes of a run: seconds of each, tokens, bytes, and what became of experts."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    read: int = 0
    busy: float = 0.0
    trace: list[list[int]] = field(default_factory=list)
    experts: Experts = field(default_factory=Experts)

    @property
    def tok_s(self) -> float:
        return self.tokens / sum(self.seconds)


def decode(loaded: LoadedEngine, sequences: int, warm: int, passes: int) -> Decoded:
    """Passes in which every sequence decodes a token, after `warm` of them."""
    engine, generator, done = loaded.engine, torch.Generator().manual_seed(1), Decoded()
    for seed in range(sequences):
        prompt = torch.randint(300, 31000, (PROMPT,), generator=generator).tolist()
        engine.add(Sequence(prompt, _sampled(seed)))
    engine.step()
    while engine.scheduler.waiting or any(one.num_pending > 1 for one in engine.scheduler.running):
        engine.step()
    for _ in range(warm):
        engine.step()
    loaded.streamed.start_counting()
    engine.start_counting()
    observe = loaded.streamed.experts.stats.popularity.observe

    def record(layer: int, tokens: int, counts: Items[int]) -> None:
        done.trace.append([expert for expert, count in enumerate(counts) if count])
        observe(layer, tokens, counts)

    loaded.streamed.experts.stats.popularity.observe = record  # type: ignore[method-assign]
    busy = loaded.streamed.seconds_reading
    for _ in range(passes):
        begin = time.perf_counter()
        engine.step()
        done.seconds.append(time.perf_counter() - begin)
    done.tokens, done.read = engine.metrics.generated_tokens, loaded.streamed.nbytes_from_disk
    done.busy = (loaded.streamed.seconds_reading - busy) / sum(done.seconds)
    done.experts = experts_of(loaded, 0)
    return done


def _sampled(seed: int) -> SamplingParams:
    return SamplingParams(GENERATED, temperature=1.0, top_k=TOP_K, seed=seed, ignore_eos=True)


def planned(source: ModelSource, sequences: int, ram: str, quant: str, share: float | None = None) -> Plan:
    """The plan for a budget, or one that holds a share of every layer's experts, whatever that takes."""
    settings = Settings(quant=quant, max_sequences=sequences)
    plan = make_plan(
        source.shape, settings, MemoryBudget(Budgets(ram=ram).host_nbytes()), Workload(sequences, PROMPT + GENERATED)
    )
    if share is None:
        return plan
    held = tuple(int(share * (layer.experts.count if layer.experts else 0)) for layer in source.shape.layers)
    expert = max(layer.expert.nbytes for layer in shards_of(source, plan) if layer.expert)
    return replace(plan, placement=replace(plan.placement, held_experts=held, expert_ring=8 * expert))


def shards_of(source: ModelSource, plan: Plan) -> Any:
    from moedge.runtime.shape.shards import model_shards

    return model_shards(source.shape, plan.quant, plan.dtype).layers


def run(source: ModelSource, plan: Plan, store: Path, options: ExpertOptions, *sizes: int) -> Decoded:
    with closing(load_engine(source, plan, store, experts=options)) as loaded:
        return decode(loaded, *sizes)


def bytes_table(source: ModelSource, store: Path, sequences: int, passes: int, quant: str) -> None:
    plan = planned(source, sequences, "auto", quant, 0.5)
    layers = [layer for layer in shards_of(source, plan) if layer.num_experts]
    nbytes, num_slots = layers[0].expert.nbytes, sum(plan.placement.held_experts)
    print(f"{sequences} sequences, {num_slots} of {sum(layer.num_experts for layer in layers)} experts held")
    print("| mode | hold | MB / token | of all | hits | guesses right / found | tok/s |\n|---|---|---|---|---|---|---|")
    ways = [(mode, hold) for mode in (*Mode, None) for hold in Hold]
    whole = 0.0
    for mode, hold in ways:
        ran = run(source, plan, store, ExpertOptions(mode, hold), sequences, passes // 2, passes)
        per_token, guesses = ran.read / ran.tokens, ran.experts.forecast
        whole = whole or per_token
        right = "-" if guesses.precision is None else f"{guesses.precision:.0%} / {guesses.recall or 0:.0%}"
        print(
            f"| {mode or 'auto'} | {hold} | {per_token / 1e6:.2f} | {per_token / whole:.3f} | "
            f"{ran.experts.hit_rate:.1%} | {right} | {ran.tok_s:.1f} |",
            flush=True,
        )
    wanted = sum(map(len, ran.trace))
    best = belady(ran.trace, len(layers), num_slots)
    least = (wanted - best) * nbytes / ran.tokens
    print(f"| Belady | | {least / 1e6:.2f} | {least / whole:.3f} | {best / wanted:.1%} | | |")
    scan = [list(range(layer.num_experts)) for layer in layers] * 20
    held = [
        ShardKey(layer, expert) for layer, count in enumerate(plan.placement.held_experts) for expert in range(count)
    ]
    hits = replay(scan, len(layers), Lru(held, dict.fromkeys(range(len(layers)), nbytes)), held)
    print(f"\na scan of 20 passes: lru hits {hits / sum(map(len, scan)):.1%}, of which all in the first pass")


def whole_table(source: ModelSource, store: Path, sequences: int, passes: int, quant: str) -> None:
    """Chosen modes against reading everything, in turns; where every expert is wanted, choosing must cost nothing."""
    plan = planned(source, sequences, "auto", quant, 0.5)
    seconds: dict[Mode | None, list[float]] = {None: [], Mode.ALL: []}
    read = {}
    for _ in range(2):
        for mode, found in seconds.items():
            ran = run(source, plan, store, ExpertOptions(mode), sequences, 2, passes)
            found += ran.seconds
            read[mode] = ran.read / ran.tokens
    ratio = statistics.median(seconds[None]) / statistics.median(seconds[Mode.ALL])
    print(
        f"{sequences} sequences: chosen / all: {ratio:.3f} of the time, {read[None] / read[Mode.ALL]:.3f} of the bytes"
    )


def speed_table(options: argparse.Namespace, store: Path) -> None:
    print("| sequences | tok/s | pass s | MB / token | hits | union | disk busy | modes | peak GiB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for sequences in options.sequences:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            print(alone.submit(speed_row, options, store, sequences).result(), flush=True)


def speed_row(options: argparse.Namespace, store: Path, sequences: int) -> str:
    prepare_process()
    with open_source(options.model) as source:
        plan = planned(source, sequences, options.ram, options.quant)
        ran = run(source, plan, store, ExpertOptions(), sequences, options.warm, options.passes)
    return (
        f"| {sequences} | {ran.tok_s:.2f} | {statistics.median(ran.seconds):.3f} | "
        f"{ran.read / ran.tokens / 1e6:.0f} | {ran.experts.hit_rate:.1%} | {ran.experts.union:.1%} | "
        f"{ran.busy:.0%} | {dict(ran.experts.modes or {})} | {host_peak() / 2**30:.2f} |"
    )


def prepare_process() -> None:
    return_memory()
    torch.set_num_threads(min(2, torch.get_num_threads()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["bytes", "speed"])
    parser.add_argument("--model", required=True)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--quant", default="none")
    parser.add_argument("--ram", default="3GiB")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--passes", type=int, default=40)
    parser.add_argument("--warm", type=int, default=20)
    options = parser.parse_args()
    prepare_process()
    with open_source(options.model) as source:
        dtype = source.shape.dtype
        store = store_path(source, options.quant, dtype, options.stores)
        prepare(source, store, options.quant, dtype, Budgets())
        if options.table == "speed":
            speed_table(options, store)
            return
        bytes_table(source, store, 4, options.passes, options.quant)
        whole_table(source, store, 128, max(4, options.passes // 4), options.quant)


if __name__ == "__main__":
    main()
