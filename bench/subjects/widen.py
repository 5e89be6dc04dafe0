"""How fast are weights of a quantized checkpoint widened and packed, beside those that the files hold in bfloat16?

    python -m bench.micro widen [--threads 2] [--repeats 3] [--rows 1024 --columns 4096] [--quant int8] [--only Q6_K]

A GGUF file with one matrix of each type is written, read back and packed as loading does it. Rates are packed bytes,
medians over rounds in which every type takes its turn; `of bf16` is the share of bfloat16's rate in the same run.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
import torch

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from moedge.offload.checkpoint.header import TensorEntry
from moedge.quant.formats.format import get_format
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.tensor import pack_into
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.shape.gguf import BLOCKS, _weight
from moedge.runtime.weights.preparation import PackingLoss


def write(path: Path, shape: tuple[int, int]) -> None:
    """A file with a matrix of each type: random bytes, whose floats need not be finite for their time to be right."""
    writer = gguf.GGUFWriter(path, "llama")
    generator = np.random.default_rng(0)
    for kind in ("BF16", *BLOCKS):
        own = gguf.GGMLQuantizationType[kind]
        block, nbytes = gguf.GGML_QUANT_SIZES[own]
        # Small numbers whatever the factors are: no byte has a bit of the upper half of an exponent.
        data = generator.integers(0, 64, (shape[0], shape[1] // block * nbytes), dtype=np.uint8)
        writer.add_tensor(kind, data, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def seconds(files: Checkpoint, entry: TensorEntry, quant: str, compute: ParallelMatmul) -> tuple[float, float, int]:
    """Seconds of widening and in all, and the packed bytes."""
    weight = _weight(entry.name, (entry,), entry.shape)
    begun = time.perf_counter()
    wide = dequantize(files, weight, torch.bfloat16)
    widened = time.perf_counter() - begun
    layout = get_format(quant).layout((wide.shape[0], wide.shape[1]), "bfloat16")
    packed = pack_into(wide, layout, torch.empty(layout.nbytes, dtype=torch.uint8), compute.for_each)
    if weight.bits:
        PackingLoss().add("all", wide, packed)
    return widened, time.perf_counter() - begun, layout.nbytes


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--only", nargs="*", default=list(BLOCKS))


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    compute = ParallelMatmul(Workspace(0), helpers=[Workspace(0) for _ in range(options.threads - 1)])
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "all.gguf", (options.rows, options.columns))
        with GgufCheckpoint(Path(folder) / "all.gguf") as files:
            chosen = ["BF16", *options.only]
            times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
            for _ in range(options.repeats):
                for name in chosen:
                    times[name].append(seconds(files, files.entries[name], options.quant, compute))
    whole = {name: statistics.median(each[1] for each in found) for name, found in times.items()}
    print(f"{'type':10}{'MiB/s out':>11}{'of bf16':>9}{'widening, share':>17}")
    for name, found in times.items():
        share = statistics.median(each[0] / each[1] for each in found)
        rate = found[0][2] / whole[name] / 2**20
        print(f"{name:10}{rate:11.0f}{whole['BF16'] / whole[name]:9.2f}{share:17.2f}")
