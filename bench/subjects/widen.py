"""How fast are weights of a quantized checkpoint widened and packed, beside those that the files hold in bfloat16?

    python -m bench.micro widen [--threads 2] [--repeats 3] [--rows 1024 --columns 4096] [--quant int8] [--only Q6_K]

A GGUF file with one matrix of each type is written, and checkpoints of FP8 and of GPTQ with a scale for a row; they are
read back and packed as loading does it. Rates are packed bytes, medians over rounds in which every type takes its turn;
`of bf16` is the share of bfloat16's rate in the same run.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from moedge.offload.checkpoint.checkpoint import Checkpoint
from moedge.offload.checkpoint.gguf_file import GgufCheckpoint
from moedge.quant.formats.format import get_format
from moedge.quant.matmul.matmul import ParallelMatmul, Workspace
from moedge.quant.tensor import pack_into
from moedge.runtime.model.dequantize import dequantize
from moedge.runtime.shape.config import ModelConfig
from moedge.runtime.shape.gguf_names import WeightPart
from moedge.runtime.shape.gguf_tensors import BLOCKS, _weight
from moedge.runtime.shape.quantization import parse_quantization
from moedge.runtime.shape.quantized import QuantizedWeight, model_tensors
from moedge.runtime.weights.preparation import PackingLoss
from support.quantized_checkpoints import FORMATS, fp8_blocks, fp8_rows, gptq


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


def others(folder: Path, shape: tuple[int, int]) -> Iterator[tuple[str, Checkpoint, QuantizedWeight]]:
    """Checkpoints of one matrix each, and the matrix."""
    floats = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for name, form, write_matrix in (
        ("FP8 blocks", "fp8 blocks", fp8_blocks),
        ("FP8 rows", "fbgemm", fp8_rows),
        ("GPTQ rows", "gptq v1", partial(gptq, group=shape[1])),
    ):
        made = folder / form
        made.mkdir()
        tensors = {f"linear{part}": each.contiguous() for part, each in write_matrix(floats)[0].items()}
        save_file(tensors, made / "model.safetensors")
        files = Checkpoint(made)
        config = FORMATS[form][1] | ({"group_size": -1} if form == "gptq v1" else {})
        method = parse_quantization({"quantization_config": config})
        yield name, files, model_tensors(method, files.entries, "bfloat16", False).quantized["linear.weight"]


def seconds(
    files: Checkpoint, weight: QuantizedWeight, quant: str, compute: ParallelMatmul
) -> tuple[float, float, int]:
    """Seconds of widening and in all, and the packed bytes."""
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
    parser.add_argument("--only", nargs="*", help="those types alone")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(options.threads)
    compute = ParallelMatmul(Workspace(0), helpers=[Workspace(0) for _ in range(options.threads - 1)])
    shape = (options.rows, options.columns)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        write(Path(folder) / "all.gguf", shape)
        blocks = opened.enter_context(GgufCheckpoint(Path(folder) / "all.gguf"))
        matrices: dict[str, tuple[Checkpoint, QuantizedWeight]] = {}
        for name in ("BF16", *BLOCKS):
            entry = blocks.entries[name]
            matrices[name] = blocks, _weight(ModelConfig({"model_type": "llama"}), [entry], WeightPart(name))
        for name, files, weight in others(Path(folder), shape):
            matrices[name] = opened.enter_context(files), weight
        chosen = ["BF16", *options.only] if options.only else list(matrices)
        times: dict[str, list[tuple[float, float, int]]] = {name: [] for name in chosen}
        for _ in range(options.repeats):
            for name in chosen:
                times[name].append(seconds(*matrices[name], options.quant, compute))
    whole = {name: statistics.median(each[1] for each in found) for name, found in times.items()}
    print(f"{'type':10}{'MiB/s out':>11}{'of bf16':>9}{'widening, share':>17}")
    for name, found in times.items():
        share = statistics.median(each[0] / each[1] for each in found)
        rate = found[0][2] / whole[name] / 2**20
        print(f"{name:10}{rate:11.0f}{whole['BF16'] / whole[name]:9.2f}{share:17.2f}")
