"""What streaming single experts saves: bytes per token by mode, and speed by the number of sequences.

    python -m bench.make_model --shape s --skew --out models/skew
    python -m bench.experts bytes --model models/skew --stores stores
    python -m bench.experts speed --model models/m --stores stores --ram 3GiB --sequences 1 8 32 128

`bytes` holds half of the experts and decodes 4 sequences in every mode, all runs over the same tokens; beside them the
least that any policy could read which knows the future (Belady), and passes of 128 sequences against those that read
everything. `speed` is a table of whole passes under a budget: how
fast, what was read, and how busy the disk was; each size in a process of its own, since a peak never falls.
Sequences are sampled, so that they do not fall into loops. Prompts are random; `--prose` takes them from Python's help.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from transformers import AutoTokenizer

from bench.make_real_mixture import prose
from moedge.moe.streaming_mode import Mode
from moedge.offload.memory import host_peak, return_memory
from moedge.offload.stream.stream import ShardKey
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.jobs.report import experts as experts_of
from moedge.runtime.jobs.summary import Experts
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, store_path
from moedge.runtime.plan.placement import Plan, Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import ModelSource, open_source
from support.experts.replay import belady

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


def random_prompts() -> Iterator[list[int]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(300, 31000, (PROMPT,), generator=generator).tolist()


def prose_prompts(source: ModelSource) -> Iterator[list[int]]:
    """Pieces of Python's help that a mixture was not cut by."""
    ids = AutoTokenizer.from_pretrained(source.folder).encode(prose()[1], add_special_tokens=False)
    return (ids[begin : begin + PROMPT] for begin in range(0, len(ids), 2 * PROMPT))


def decode(loaded: LoadedEngine, prompts: Iterator[list[int]], sequences: int, warm: int, passes: int) -> Decoded:
    """Passes in which every sequence decodes a token, after `warm` of them."""
    engine, done = loaded.engine, Decoded()
    for seed, prompt in enumerate(islice(prompts, sequences)):
        engine.add(Sequence(prompt, _sampled(seed)))
    engine.step()
    while engine.scheduler.waiting or any(one.num_pending > 1 for one in engine.scheduler.running):
        engine.step()
    for _ in range(warm):
        engine.step()
    loaded.streamed.start_counting()
    engine.start_counting()
    observe = loaded.streamed.experts.stats.count

    def record(layer: int, tokens: int, counts: Items[int]) -> None:
        done.trace.append([expert for expert, count in enumerate(counts) if count])
        observe(layer, tokens, counts)

    loaded.streamed.experts.stats.count = record  # type: ignore[method-assign]
    busy = seconds_reading(loaded)
    for _ in range(passes):
        begin = time.perf_counter()
        engine.step()
        done.seconds.append(time.perf_counter() - begin)
    done.tokens, done.read = engine.metrics.generated_tokens, loaded.streamed.nbytes_from_disk
    done.busy = (seconds_reading(loaded) - busy) / sum(done.seconds)
    done.experts = experts_of(loaded, 0)
    return done


def seconds_reading(loaded: LoadedEngine) -> float:
    """Seconds in which the busiest reader had something to read."""
    return max((reader.seconds_busy for reader in loaded.streamed._lanes.readers), default=0.0)


def _sampled(seed: int) -> SequenceSampling:
    return SequenceSampling(GENERATED, temperature=1.0, top_k=TOP_K, seed=seed, ignore_eos=True)


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


def run(source: ModelSource, plan: Plan, store: Path, mode: Mode | None, prose: bool, *sizes: int) -> Decoded:
    with closing(load_engine(source, plan, store, stream=mode)) as loaded:
        return decode(loaded, prose_prompts(source) if prose else random_prompts(), *sizes)


def bytes_table(source: ModelSource, store: Path, sequences: int, passes: int, quant: str, prose: bool) -> None:
    plan = planned(source, sequences, "auto", quant, 0.5)
    layers = [layer for layer in shards_of(source, plan) if layer.num_experts]
    nbytes, num_slots = layers[0].expert.nbytes, sum(plan.placement.held_experts)
    print(f"{sequences} sequences, {num_slots} of {sum(layer.num_experts for layer in layers)} experts held")
    print("| mode | MB / token | of all | hits | guesses right / found | tok/s |\n|---|---|---|---|---|---|")
    whole = 0.0
    for mode in (*Mode, None):
        ran = run(source, plan, store, mode, prose, sequences, passes // 2, passes)
        per_token, guesses = ran.read / ran.tokens, ran.experts.forecast
        whole = whole or per_token
        right = "-" if guesses.precision is None else f"{guesses.precision:.0%} / {guesses.recall or 0:.0%}"
        print(
            f"| {mode or 'auto'} | {per_token / 1e6:.2f} | {per_token / whole:.3f} | "
            f"{ran.experts.hit_rate:.1%} | {right} | {ran.tok_s:.1f} |",
            flush=True,
        )
    wanted = sum(map(len, ran.trace))
    held = [
        ShardKey(layer, expert) for layer, count in enumerate(plan.placement.held_experts) for expert in range(count)
    ]
    best = belady(ran.trace, len(layers), held)
    least = (wanted - best) * nbytes / ran.tokens
    print(f"| Belady | {least / 1e6:.2f} | {least / whole:.3f} | {best / wanted:.1%} | | |")


def whole_table(source: ModelSource, store: Path, sequences: int, passes: int, quant: str, prose: bool) -> None:
    """Chosen modes against reading everything, in turns; where every expert is wanted, choosing must cost nothing."""
    plan = planned(source, sequences, "auto", quant, 0.5)
    seconds: dict[Mode | None, list[float]] = {None: [], Mode.ALL: []}
    read = {}
    for _ in range(2):
        for mode, found in seconds.items():
            ran = run(source, plan, store, mode, prose, sequences, 2, passes)
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
        ran = run(source, plan, store, None, options.prose, sequences, options.warm, options.passes)
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
    parser.add_argument("--prose", action="store_true", help="prompts of real text instead of random ones")
    options = parser.parse_args()
    prepare_process()
    with open_source(options.model) as source:
        dtype = source.shape.dtype
        store = store_path(source, options.quant, dtype, options.stores)
        prepare(source, store, options.quant, dtype, Budgets().on_cpu())
        if options.table == "speed":
            speed_table(options, store)
            return
        bytes_table(source, store, 4, options.passes, options.quant, options.prose)
        whole_table(source, store, 128, max(4, options.passes // 4), options.quant, options.prose)


if __name__ == "__main__":
    main()
