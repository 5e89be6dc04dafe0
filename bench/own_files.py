"""Does a model stream as fast from its checkpoint's own files as from a copy of its weights?

    python -m bench.make_model --shape s --out models/s
    python -m bench.own_files --model models/s --stores stores --ram 900MiB --sequences 8

Where a disk put a file changes how fast it is read, by up to a tenth: the checkpoint is copied into `--stores` right
before its weights are prepared there, so that both were written alike. Loads one engine that reads the checkpoint's
files in every pass and one that reads a store with the same bytes, and runs passes of both in turns; files leave the
page cache before every turn. Prints the median and the fastest of the turns, as GB/s that passes read and as tokens per
second, the bytes of a token, and their ratios. `--stream` fixes the order in which experts are read, which otherwise
depends on measured times. `--reads` lets no layer compute, so that the two readers are compared alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from moedge.moe.streaming_mode import Mode
from moedge.offload.budget import parse_size
from moedge.runtime.engine.sequence import Sequence
from moedge.runtime.loading.engine_loader import LoadedEngine, load_engine
from moedge.runtime.loading.prepare import prepare, prepare_linked, store_path
from moedge.runtime.plan.placement import Workload
from moedge.runtime.plan.planner import make_plan
from moedge.runtime.sampling.params import SequenceSampling
from moedge.runtime.settings.settings import Budgets, MemoryBudget, Settings
from moedge.runtime.source.model_source import open_source

PROMPT = 8


def drop(folder: Path) -> None:
    """Files of a folder leave the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copied(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint, whose files are written now unless an earlier run did."""
    if not folder.exists():
        shutil.copytree(model, folder, copy_function=shutil.copyfile)
        os.sync()
    return folder


def passes(loaded: LoadedEngine, sequences: int, count: int) -> tuple[float, int]:
    """Seconds and bytes of passes in which every sequence decodes a token."""
    sampling = SequenceSampling(count + 1, ignore_eos=True)
    for index in range(sequences):
        loaded.engine.add(Sequence([5 + index * 97 + token * 31 for token in range(PROMPT)], sampling))
    loaded.engine.step()
    loaded.start_counting()
    begun = time.perf_counter()
    for _ in range(count):
        loaded.engine.step()
    seconds = time.perf_counter() - begun
    list(loaded.engine.run())
    return seconds, loaded.streamed.nbytes_from_disk


def reads(loaded: LoadedEngine, sequences: int, count: int) -> tuple[float, int]:
    """The same for passes that ask for all experts of all layers and compute nothing."""
    streamed, cache = loaded.streamed, loaded.streamed.experts.cache
    assert cache is not None
    lanes, memory = streamed._lanes, streamed.memory
    assert lanes.experts is not None
    keys = [key for key in memory.on_disk if key.expert >= 0]
    moved = 0
    begun = time.perf_counter()
    for _ in range(count):
        lanes.experts.ask(*map(lanes.shard, keys))
        for _ in keys:
            arrival = lanes.experts.next()
            moved += arrival.shard.nbytes
            lanes.experts.done(arrival)
    return time.perf_counter() - begun, moved


def _per_token(rates: list[float], tokens: list[float]) -> str:
    megabytes = statistics.median(1e3 * rate / each for rate, each in zip(rates, tokens, strict=True))
    return f"{statistics.median(tokens):7.2f} tok/s, {megabytes:6.2f} MB a token"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--stores", type=Path, required=True)
    parser.add_argument("--ram", default="900MiB")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--stream", choices=[*Mode], type=Mode, help="as `stream` in moedge.toml, by default auto")
    parser.add_argument("--reads", action="store_true", help="compare the readers alone")
    options = parser.parse_args()
    measure: Callable[[LoadedEngine, int, int], tuple[float, int]] = reads if options.reads else passes
    workload = Workload(options.sequences, PROMPT + options.passes + 1)
    settings = Settings(quant="none", max_sequences=options.sequences)
    model = copied(options.model, options.stores / "checkpoint")
    with open_source(str(model)) as source, ExitStack() as opened:
        dtype = source.shape.dtype
        named = store_path(source, "none", dtype, options.stores, linked=True)
        copy = store_path(source, "none", dtype, options.stores)
        assert prepare_linked(source, named, "none", dtype, Budgets().on_cpu()) is not None
        prepare(source, copy, "none", dtype, Budgets().on_cpu())
        plan = make_plan(source.shape, settings, MemoryBudget(parse_size(options.ram, 0, 0)), workload)
        engines = {
            name: opened.enter_context(closing(load_engine(source, plan, store, stream=options.stream)))
            for name, store in (("own files", named), ("store", copy))
        }
        rates: dict[str, list[float]] = {name: [] for name in engines}
        tokens: dict[str, list[float]] = {name: [] for name in engines}
        for turn in range(options.rounds + 1):
            for name, loaded in engines.items():
                drop(model)
                drop(copy)
                seconds, nbytes = measure(loaded, options.sequences, options.passes)
                # The first turn warms both up.
                if turn:
                    rates[name].append(nbytes / seconds / 1e9)
                    tokens[name].append(options.sequences * options.passes / seconds)
    for name, found in rates.items():
        line = f"{name:10} {statistics.median(found):6.3f} GB/s, at best {max(found):6.3f}"
        print(line if options.reads else f"{line}; {_per_token(found, tokens[name])}")
    medians, bests = ([each(rates[name]) for name in engines] for each in (statistics.median, max))
    print(f"own files / store: {medians[0] / medians[1]:.1%} by medians, {bests[0] / bests[1]:.1%} by bests")


if __name__ == "__main__":
    main()
