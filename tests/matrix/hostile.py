"""Spoiled checkpoints and headers by the thousand: verdicts, time and memory of each class, as a table.

A fault is what was accepted or refused wrongly, raised something else than a refusal, or went over its limits.
Tokenizers, templates, documents, requests and rows that ask for much are the slow cases of tests.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import struct
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matrix.failing_calls import slow_cases
from matrix.state import Part

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

TESTS = {
    "tokenizers and other small files": "tests/hostile/test_small_files.py",
    "templates": "tests/hostile/test_templates.py",
    "documents": "tests/hostile/test_documents.py",
    "requests": "tests/hostile/test_requests.py",
    "rows at the smallest budget": "tests/hostile/test_ceilings.py",
}
FAMILIES = ("qwen3_moe", "gpt_oss", "granitemoe", "gemma3_text", "mixtral", "olmoe", "llama", "qwen3")
MAX_SECONDS, MAX_NBYTES = 2.0, 300 << 20
BATCH = {"mutation": 250, "header": 50_000, "limit": 1, "gguf": 250, "layout": 250}


@dataclass(frozen=True, slots=True)
class Result:
    """One case: seconds of the CPU, whatever else the machine does, and bytes that resident memory rose by at most."""

    kind: str
    refused: bool
    seconds: float
    nbytes: int
    wrong: str | None


@dataclass(frozen=True, slots=True)
class Batch:
    """A run of seeds that one process goes through."""

    judge: str
    seeds: range
    folders: list[Path]
    scratch: Path


def parts(quick: bool) -> Iterator[Part]:
    """Mutations and headers in chunks, so that an interrupted run does not lose much."""
    mutations, headers = range(0, 3000, 500), range(0, 200_000, 50_000)
    if quick:
        mutations, headers = range(0, 60, 60), range(0, 2000, 2000)
    for seeds in chunks(mutations):
        yield Part(f"GGUF files {seeds.start} to {seeds.stop}", partial(faults, "gguf", seeds, quick))
        yield Part(f"quantized layouts {seeds.start} to {seeds.stop}", partial(faults, "layout", seeds, quick))
    for seeds in chunks(mutations):
        yield Part(f"structured mutations {seeds.start} to {seeds.stop}", partial(faults, "mutation", seeds, quick))
    for seeds in chunks(headers):
        yield Part(f"fuzzed headers {seeds.start} to {seeds.stop}", partial(faults, "header", seeds, quick))
    yield Part("files at the limits", partial(faults, "limit", range(3 if quick else len(LIMITS)), quick))
    yield from slow_cases(TESTS, quick)


def chunks(begins: range) -> Iterator[range]:
    for begin in begins:
        yield range(begin, begin + begins.step)


def faults(judge: str, seeds: range, quick: bool = False) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="hostile-") as scratch:
        return report(run(judge, seeds, sound(judge, Path(scratch), quick), Path(scratch)), seeds.start)


def sound(judge: str, scratch: Path, quick: bool) -> list[Path]:
    """The checkpoints that are spoiled."""
    if judge == "gguf":
        from support.hostile.gguf import write_sound

        return [write_sound(scratch / "sound.gguf")]
    if judge == "layout":
        from support.hostile.layouts import LAYOUTS, write_layout

        return [write_layout(layout, scratch / f"layout-{index}") for index, layout in enumerate(LAYOUTS)]
    return make_checkpoints(scratch, FAMILIES[:2] if quick else FAMILIES)


def make_checkpoints(scratch: Path, families: Sequence[str]) -> list[Path]:
    from support.tiny_families import build_model

    folders = [scratch / family for family in families]
    for family, folder in zip(families, folders, strict=True):
        build_model(family).save_pretrained(folder)
    return folders


def run(judge: str, seeds: range, folders: list[Path], scratch: Path) -> Iterator[Result]:
    """Each batch in a process of its own, so that one that dies is not taken for one that refuses."""
    context, size = multiprocessing.get_context("spawn"), BATCH[judge]
    for begin in range(seeds.start, seeds.stop, size):
        batch = Batch(judge, range(begin, min(begin + size, seeds.stop)), folders, scratch)
        with context.Pool(1) as pool:
            yield from pool.apply(run_batch, (batch,))


def run_batch(batch: Batch) -> list[Result]:
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    logging.disable()
    transformers_logging.disable_progress_bar()
    judges: dict[str, Callable[[int, Batch], Result]] = {
        "mutation": mutation, "header": header, "limit": limit, "gguf": gguf_file, "layout": layout,
    }  # fmt: skip
    # Imports and first uses are not the case's own.
    if batch.judge in ("mutation", "gguf"):
        load(batch.folders[0])
    if batch.judge == "layout":
        from support.hostile.layouts import widen_all

        widen_all(batch.folders[0])
    return [judges[batch.judge](seed, batch) for seed in batch.seeds]


def load(folder: Path) -> None:
    from moedge.runtime.shape.checkpoint_shape import read_shape
    from support.hostile.load import load_weights

    load_weights(folder, read_shape(folder))


def mutation(seed: int, batch: Batch) -> Result:
    from support.hostile.cases import judge, make_case
    from support.hostile.load import load_weights

    case = make_case(seed, batch.folders)
    before = reset_peak()
    outcome = judge(case, batch.scratch / "case", load_weights)
    kind = case.kinds[0].split(":")[0] if len(case.kinds) == 1 else f"{len(case.kinds)} at once"
    wrong = outcome.wrong and f"seed {seed} {case.kinds}: {outcome.wrong}: {outcome.message[:200]}"
    return Result(kind, outcome.refused, outcome.seconds, peak() - before, wrong)


def gguf_file(seed: int, batch: Batch) -> Result:
    from support.hostile.gguf import header_nbytes, is_refused, spoil

    path, data = batch.scratch / "model.gguf", batch.folders[0].read_bytes()
    kind, spoiled = spoil(data, header_nbytes(data, path), random.Random(seed))
    path.write_bytes(spoiled)
    before, started, refused, wrong = reset_peak(), time.process_time(), False, None
    try:
        refused = is_refused(path)
    except Exception as error:
        wrong = f"seed {seed} {kind}: {error!r:.200}"
    return Result(kind, refused, time.process_time() - started, peak() - before, wrong)


def layout(seed: int, batch: Batch) -> Result:
    from support.hostile.layouts import judged, spoiled

    folder = batch.folders[seed % len(batch.folders)]
    case = spoiled(folder, seed // len(batch.folders))
    before = reset_peak()
    if case is None:
        return Result("does not apply", False, 0.0, 0, None)
    outcome, fault = judged(case, batch.scratch / "case")
    wrong = f"seed {seed} {case.kinds}: {fault}: {outcome.message[:200]}" if fault else None
    return Result(case.kinds[0], outcome.refused, outcome.seconds, peak() - before, wrong)


def header(seed: int, batch: Batch) -> Result:
    from support.hostile.headers import header_outcome, make_header

    kind, text, file_nbytes = make_header(seed)
    # Resetting the peak costs more than a small header: memory is watched over a thousand of them.
    before = reset_peak() if seed % 1000 == 0 else peak()
    started = time.process_time()
    try:
        accepted, wrong = header_outcome(text, file_nbytes), None
    except Exception as error:
        accepted, wrong = False, f"seed {seed}: {error!r}"
    seconds = time.process_time() - started
    if kind == "good" and not accepted:
        wrong = f"seed {seed}: a good header was refused"
    return Result(kind, not accepted, seconds, peak() - before, wrong)


def limit(seed: int, batch: Batch) -> Result:
    from moedge.offload.errors import BadCheckpoint
    from moedge.runtime.settings.errors import UnsupportedModel
    from moedge.runtime.shape.checkpoint_shape import read_shape

    kind, (make, wanted) = list(LIMITS.items())[seed]
    folder = batch.scratch / f"limit-{seed}"
    folder.mkdir()
    (folder / "config.json").write_bytes((batch.folders[-2] / "config.json").read_bytes())
    make(folder)
    before, started, message = reset_peak(), time.process_time(), ""
    try:
        read_shape(folder)
    except (BadCheckpoint, UnsupportedModel) as error:
        message = str(error)
    seconds = time.process_time() - started
    wrong = None if wanted in message else f"{kind}: wanted {wanted!r} in {message[:200]!r}"
    return Result(kind, bool(message), seconds, peak() - before, wrong)


def reset_peak() -> int:
    """Resident bytes now; `peak` counts from here on."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def write_safetensors(folder: Path, header_text: bytes, nbytes: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header_text)) + header_text)
    os.truncate(path, 8 + len(header_text) + nbytes)


def _many(count: int, size: int) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        name = "model.layers.{}.mlp.experts.{}.gate_proj.weight"
        content = {
            name.format(i % 61, i): {
                "dtype": "BF16",
                "shape": [1, size],
                "data_offsets": [2 * i * size, 2 * (i + 1) * size],
            }
            for i in range(count)
        }
        write_safetensors(folder, json.dumps(content).encode(), 2 * count * size)

    return make


def _header(text: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: write_safetensors(folder, text(), 0)


def _index(text: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / "model.safetensors.index.json").write_bytes(text()) and None


def _config(text: Callable[[], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_bytes(text()) and None


def _map(count: int) -> dict[str, Any]:
    return {
        "weight_map": {
            f"model.layers.{i % 61}.mlp.experts.{i}.weight": f"m-{i % 163}.safetensors" for i in range(count)
        }
    }


LIMITS: dict[str, tuple[Callable[[Path], None], str]] = {
    "100,000 tensors": (_many(100_000, 64), "hold layers"),
    "100,000 empty tensors": (_many(100_000, 0), "hold layers"),
    "200,000 tensors": (_many(200_000, 64), "at most"),
    "header of 100 MB": (_header(lambda: b'{"x":"' + b"x" * (100 * 10**6 - 8) + b'"}'), "claims"),
    "header of one name": (_header(lambda: b'{"' + b"x" * (30 << 20) + b'":{}}'), "name is empty"),
    "header in wide letters": (_header(lambda: b'{"' + "\U0001f600".encode() * (7 << 20) + b'":{}}'), "name is empty"),
    "header of lists": (_header(lambda: b'{"x":[' + b"[]," * (10 << 20) + b"[]]}"), "at most"),
    "header of objects": (_header(lambda: b'{"x":[' + b'{"a":1},' * 380_000 + b"{}]}"), "wanted exactly"),
    "header of numbers": (_header(lambda: b'{"x":[' + b"1000," * 1_100_000 + b"0]}"), "wanted exactly"),
    "header of long numbers": (_header(lambda: b'{"x":[' + (b"9" * 4000 + b",") * 7000 + b"0]}"), "wanted exactly"),
    "header of brackets": (_header(lambda: b'{"x":' + b"[" * (30 << 20)), "at most"),
    "index of 100,000 tensors": (_index(lambda: json.dumps(_map(100_000)).encode()), "missing"),
    "index of 200,000 tensors": (_index(lambda: json.dumps(_map(200_000)).encode()), "100000"),
    "index of 100 MB": (_index(lambda: b" " * 100 * 10**6), "at most"),
    "index of lists": (_index(lambda: b"[" + b"[]," * (10 << 20) + b"[]]"), "is not an index"),
    "config of 100 MB": (_config(lambda: b" " * 100 * 10**6), "at most"),
    "config of lists": (_config(lambda: b"[" + b"[]," * 340_000 + b"[]]"), "object was wanted"),
    "config of objects": (_config(lambda: b'{"x":[' + b'{"a":1},' * 120_000 + b"{}]}"), "not supported"),
    "config of brackets": (_config(lambda: b"[" * (1 << 20)), "nested"),
}  # fmt: skip


def report(results: Iterable[Result], first: int = 0) -> list[str]:
    """Prints a line for each class of cases; returns 20 wrong cases and 20 over their limits at most.

    `first` is the seed of the first result.
    """
    by_kind: dict[str, list[Result]] = defaultdict(list)
    every = list(results)
    for result in every:
        by_kind[result.kind].append(result)
    print(f"{'class':34}{'count':>8}{'accepted':>10}{'refused':>9}{'wrong':>7}{'worst s':>9}{'worst MB':>10}")
    for kind, cases in sorted(by_kind.items()):
        refused = sum(case.refused for case in cases)
        print(
            f"{kind:34}{len(cases):8}{len(cases) - refused:10}{refused:9}{sum(bool(case.wrong) for case in cases):7}"
            f"{max(case.seconds for case in cases):9.3f}{max(case.nbytes for case in cases) / 1e6:10.1f}"
        )
    over = [
        f"seed {seed} ({case.kind}) took {case.seconds:.2f} s of the CPU and {case.nbytes / 2**20:.0f} MiB"
        for seed, case in enumerate(every, first)
        if case.seconds > MAX_SECONDS or case.nbytes > MAX_NBYTES
    ]
    return [case.wrong for case in every if case.wrong][:20] + over[:20]
