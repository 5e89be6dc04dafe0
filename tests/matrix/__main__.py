"""The long correctness runs, one after another, each in a process of its own.

    make matrix                               all of them; continues where it was interrupted
    make matrix ARGS="--fresh stream_bugs"    one of them, from its beginning
    make matrix ARGS=--quick                  all of them at their quick settings: about a minute

A run consists of parts. Those that passed are in build/matrix/RUN.json until the whole run has passed; they are skipped
as long as no source file changed. Exits 1 if a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import time

from matrix.state import FOLDER, run_parts

# By what each protects, the cheapest first.
RUNS = {
    "kernels": "every kernel, KV format and feature against float64",
    "published_sizes": "every kernel and format in the sizes of published models, and planted bugs of the kind",
    "native": "the CPU kernels without Python, under every sanitizer",
    "kv_cache": "the KV cache's state machine, and every broken variant of it",
    "stream_bugs": "the stream under adversarial timing, and every seeded bug",
    "hostile": "spoiled checkpoints, headers, tokenizers, templates, documents and requests, and files at the limits",
    "exact": "random trials of --deterministic give the same bits, in 39 families",
    "expert_modes": "every way to stream and hold experts gives the same tokens",
    "failing_calls": "jobs, documents, preparations and servers whose k-th call fails, for every k, lose nothing",
    "kills": "preparations and jobs that are killed end with the same bytes",
    "stops": "what stops, kills and power cuts of a whole command cost, in tokens",
    "ray": "jobs on a Ray cluster whose workers are killed end with the same bytes",
    "documents": "jobs over folders of documents that are killed end with the same bytes",
    "gguf_architectures": "GGUF files that llama.cpp's converter makes of every family give its tokens",
    "formats": "every layout of quantized checkpoints, in every group of families",
    "real": "a published model in every combination of formats, arithmetics, caches, attention and instruction sets",
    "large_layers": "layers of 4 GB of every format within 2 GiB of RAM, and gpt-oss-20b's layers token by token",
    "families": "every family whole, with the oldest and the newest transformers",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="runs:\n" + "\n".join(f"  {name:20}{about}" for name, about in RUNS.items()),
    )  # fmt: skip
    parser.add_argument("runs", nargs="*", metavar="RUN", help="all, if none is named")
    parser.add_argument("--quick", action="store_true", help="the quick settings")
    parser.add_argument("--fresh", action="store_true", help="forget what passed before")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.runs) - RUNS.keys():
        parser.error(f"no run is called {', '.join(sorted(unknown))}; runs: {', '.join(RUNS)}")
    names = options.runs or list(RUNS)
    if options.here:
        return run_here(names[0], options.quick)
    failed = []
    for name in names:
        if options.fresh:
            (FOLDER / f"{state_name(name, options.quick)}.json").unlink(missing_ok=True)
        begun = time.perf_counter()
        command = [sys.executable, "-m", "matrix", "--here", *(["--quick"] if options.quick else []), name]
        if subprocess.run(command, check=False).returncode:
            failed.append(name)
        print(f"{name}: {'FAILED' if name in failed else 'passed'} in {time.perf_counter() - begun:.0f} s", flush=True)
    return int(bool(failed))


def state_name(name: str, quick: bool) -> str:
    return f"{name}-quick" if quick else name


def run_here(name: str, quick: bool) -> int:
    parts = importlib.import_module(f"matrix.{name}").parts(quick)
    faults = run_parts(state_name(name, quick), parts)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
