"""How close do the stream's reader threads come to the disk, with how many threads and which chunks?

    python -m bench.micro reads [--folder .] [--gib 2] [--shard-mib 21] [--rounds 3]

Writes a file of random bytes, then reads it past the page cache, always into huge pages: raw O_DIRECT reads by
threads without engine code (the roof: the best of 1-8 threads and 1-8 MiB) into one buffer a thread and into memory
as large as the stream's ring, and the production ShardStream with a consumer that does nothing. Every candidate takes
its turn in every round; prints GB/s, the median and best of the rounds, and the default's ratio to both roofs.
"""

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from moedge.offload.device import allocate
from moedge.offload.stream.reader_lane import CHUNK_NBYTES, NUM_THREADS, DirectFile, ReaderLane
from moedge.offload.stream.stream import ALIGNMENT, Ring, Shard, ShardStream

MIB = 1 << 20


def write_file(path: Path, nbytes: int) -> None:
    block = os.urandom(16 * MIB)
    with path.open("wb") as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())


def raw(path: Path, memory: memoryview, num_threads: int, chunk_nbytes: int) -> None:
    """Each thread reads every num_threads-th chunk, round and round through its own part of `memory`."""
    nbytes = path.stat().st_size
    num_chunks = max(1, len(memory) // num_threads // chunk_nbytes)

    def read(index: int) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        for turn, offset in enumerate(range(index * chunk_nbytes, nbytes, num_threads * chunk_nbytes)):
            begin = (index * num_chunks + turn % num_chunks) * chunk_nbytes
            os.preadv(descriptor, [memory[begin : begin + chunk_nbytes]], offset)
        os.close(descriptor)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def streamed(path: Path, memory: memoryview, shard_nbytes: int, num_threads: int, chunk_nbytes: int) -> None:
    nbytes = path.stat().st_size
    schedule = [
        Shard(str(begin), min(shard_nbytes, nbytes - begin), begin, path) for begin in range(0, nbytes, shard_nbytes)
    ]
    lane = ReaderLane({path: DirectFile(path)}, memory, num_threads, chunk_nbytes)
    stream: ShardStream[memoryview] = ShardStream(lane, Ring(len(memory)), memory)
    stream.ask(*schedule)
    for _ in schedule:
        stream.done(stream.next())
    stream.close()


def measure(candidates: dict[str, Callable[[], None]], nbytes: int, rounds: int) -> dict[str, list[float]]:
    """GB/s of each candidate in each round."""
    rates: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            begin = time.perf_counter()
            run()
            rates[name].append(nbytes / (time.perf_counter() - begin) / 1e9)
    return rates


def candidates_of(path: Path, memory: memoryview, shard_nbytes: int) -> dict[str, Callable[[], None]]:
    candidates: dict[str, Callable[[], None]] = {}
    for threads in (1, 2, 4, 6, 8):
        for mib in (1, 2, 4, 8):
            chunk = mib * MIB
            candidates[f"raw, buffers  {threads} x {mib} MiB"] = partial(
                raw, path, memory[: threads * chunk], threads, chunk
            )
            candidates[f"raw, ring     {threads} x {mib} MiB"] = partial(raw, path, memory, threads, chunk)
            if threads > 1:
                reader = partial(streamed, path, memory, shard_nbytes, threads, chunk)
                candidates[f"stream        {threads} x {mib} MiB"] = reader
    return candidates


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--shard-mib", type=float, default=21)
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> None:
    shard_nbytes = int(options.shard_mib * MIB) // ALIGNMENT * ALIGNMENT
    memory = memoryview(allocate(8 * shard_nbytes))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "bytes"
        write_file(path, int(options.gib * 1024) * MIB)
        rates = measure(candidates_of(path, memory, shard_nbytes), path.stat().st_size, options.rounds)
    for name, values in sorted(rates.items()):
        print(f"{name}  median {statistics.median(values):5.2f}  best {max(values):5.2f} GB/s")
    chosen = rates[f"stream        {NUM_THREADS} x {CHUNK_NBYTES // MIB} MiB"]
    for kind in ("raw, buffers", "raw, ring"):
        roof = max((values for name, values in rates.items() if name.startswith(kind)), key=statistics.median)
        ratio = statistics.median(chosen) / statistics.median(roof)
        print(f"default / {kind}: {ratio:.1%} by medians, {max(chosen) / max(roof):.1%} by bests")
