"""Do the Triton kernels compute what they should, what do they compile to, and how fast are they?

    python bench/kernels.py check                 every format, kernel and feature against float64
    python bench/kernels.py compile [--arch 86]   registers, spills, shared memory, for GPUs that are not there
    python bench/kernels.py time                  time against the bytes or operations that cannot be saved

`check` runs in Triton's interpreter, or compiled where there is a GPU; it exits 1 beyond 2e-6 (float32). `compile`
needs no GPU and no driver; it prints the table of docs/kernels.md and exits 1 where a kernel does not compile or
spills more than 256 bytes (--json: one line per kernel, --sample: a few of them). `time` needs a GPU: it also checks
every timed result against float64, and names the floor that each kernel is measured by.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

# Before Triton is imported: only compiled kernels can be compiled further, only a GPU can run them.
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() or "compile" in sys.argv else "1"
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "runtime" / "attention"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "quant"))

import grouped_cases
import paged_cases
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from moedge.quant.kernels.launch import Launch
from moedge.quant.kernels.operands import Gate
from moedge.quant.kernels.tuning import TILE_ROWS
from moedge.runtime.attention.kernels.launch import attend_launches, store_launch
from moedge.runtime.attention.kernels.tuning import decode_cut, extend_cut, num_splits

HAS_GPU = torch.cuda.is_available()
ARCHS = (75, 80, 86, 89, 90, 120)
MOST_SPILLED = 256
MOST_ERROR = 2e-6
# Products in bfloat16: probabilities and outputs are rounded to 8 bits.
MOST_ROUNDED = 2e-2
KV_PAIRS = (("native", "native"), ("int8", "int8"), ("int8", "int4"), ("int4", "int4"))
ALL_FEATURES = {"window": 333, "chunk": None, "softcap": 30.0, "sinks": True, "shift": True}
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
WORDS = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
SILU = Gate("silu")


# --- compile


class OtherGpu:
    """In place of Triton's CUDA driver: says which GPU to compile for, and has none."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@dataclass(frozen=True)
class Subject:
    """A kernel at one size, and the launch that compiles it for a GPU."""

    kernel: str
    size: str
    format: str
    launch: Callable[[], Launch]


def attention_subjects(arch: int, dtype: torch.dtype, head_dims: tuple[int, ...]) -> Iterator[Subject]:
    capability, wide = (arch // 10, arch % 10), dtype == FP32
    for head_dim, (keys, values) in itertools.product(head_dims, KV_PAIRS):
        case = paged_cases.Case(keys, values, head_dim, 8, 32, dtype=dtype, native=dtype, **ALL_FEATURES)
        size, name = f"head {head_dim}", keys if keys == values else f"{keys}/{values}"
        decode = decode_cut(capability, head_dim, 8, wide)
        kinds = [("decode" if decode.dot else "decode without dot", decode, 4)]
        if decode.dot:
            kinds.append(("extend", extend_cut(head_dim, 8, wide), 1))
        for kernel, cut, splits in kinds:
            yield Subject(f"{kernel}, {WORDS[dtype]}", size, name, lambda c=case, k=cut, s=splits: attend(c, k, s)[0])
        if not wide:
            yield Subject("store", size, name, lambda c=case: store(paged_cases.Cache.make(c)))
    if not wide:
        for head_dim in head_dims:
            case = paged_cases.Case("int8", "int8", head_dim, 8, 32, dtype=dtype)
            cut = decode_cut(capability, head_dim, 8, wide)
            yield Subject("merge", f"head {head_dim}", "any", lambda c=case, k=cut: attend(c, k, 16)[1])


def attend(case: paged_cases.Case, cut: object, splits: int) -> list[Launch]:
    cache = paged_cases.Cache.make(case)
    return attend_launches(cache.q, cache.out, cache.cached, cache.pages(1), cache.features, cut, splits)


def store(cache: paged_cases.Cache) -> Launch:
    x = cache.q[:, : cache.case.kv_heads]
    return store_launch(x, x, cache.cached, torch.zeros(len(x), dtype=torch.int64))


def expert_subjects(arch: int, dtype: torch.dtype) -> Iterator[Subject]:
    if arch < 80:
        return
    # float32 has one tile for all.
    for format_name, rows in itertools.product(grouped_cases.FORMATS, TILE_ROWS if dtype != FP32 else TILE_ROWS[:1]):
        for name, gate, bias in (("gate and up", SILU, False), ("down", None, True)):
            shape = (1536, 2048) if gate else (2048, 768)
            case = grouped_cases.Case(format_name, *shape, (rows, rows), 7, gate, bias, dtype)
            words = f"{name}, {WORDS[dtype]}"
            yield Subject(words, f"{rows} rows", format_name, lambda c=case: grouped_cases.Product.make(c).launch())


def subjects(arch: int) -> Iterator[Subject]:
    half = FP16 if arch < 80 else BF16
    yield from attention_subjects(arch, half, (64, 128, 256))
    yield from expert_subjects(arch, half)
    if arch >= 80:
        yield from attention_subjects(arch, FP32, (64, 128, 256))
        yield from expert_subjects(arch, FP32)


def in_sample(arch: int, subject: Subject) -> bool:
    """A few that are large, and each kernel at least once."""
    chosen = {
        75: [("decode without dot, fp16", "head 128", "int4")],
        80: [("extend, bf16", "head 128", "int4"), ("merge", "head 128", "any")],
        86: [("decode, bf16", "head 128", "int4"), ("store", "head 128", "int4"), ("extend, fp32", "head 128", "int8")],
        89: [("gate and up, bf16", "64 rows", "nf4")],
        90: [("extend, bf16", "head 256", "int8/int4"), ("down, bf16", "16 rows", "int8")],
        120: [("decode, bf16", "head 256", "int8")],
    }
    return (subject.kernel, subject.size, subject.format) in chosen[arch]


@dataclass(frozen=True)
class Compiled:
    kernel: str
    size: str
    format: str
    arch: int
    registers: int
    spill: int
    shared: int
    tensor_cores: bool
    seconds: float


def compile_for(arch: int, subject: Subject) -> Compiled:
    launch = subject.launch()
    driver.set_active(OtherGpu(arch))
    begin = time.perf_counter()
    kernel = launch.compile()
    seconds = time.perf_counter() - begin
    usage = resource_usage(kernel.asm["cubin"])
    has_mma = bool(re.search(r"\b(mma\.sync|wgmma|tcgen05\.mma)", kernel.asm["ptx"]))
    name = (subject.kernel, subject.size, subject.format)
    return Compiled(*name, arch, usage["REG"], usage["STACK"], kernel.metadata.shared, has_mma, seconds)


def resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def run_compile(archs: list[int], sample: bool, as_json: bool) -> int:
    compiled, failed = [], 0
    for arch in archs:
        for subject in subjects(arch):
            if sample and not in_sample(arch, subject):
                continue
            try:
                compiled.append(compile_for(arch, subject))
            except Exception as error:
                failed += 1
                print(f"sm{arch} {subject.kernel} {subject.size} {subject.format}: {error}", file=sys.stderr)
                continue
            if as_json:
                print(json.dumps(vars(compiled[-1])), flush=True)
    if not as_json:
        print_tables(compiled, archs)
    spilled = [result for result in compiled if result.spill > MOST_SPILLED]
    for result in spilled:
        print(f"spills too much: {result}", file=sys.stderr)
    return int(bool(failed or spilled))


def print_tables(compiled: list[Compiled], archs: list[int]) -> None:
    print(f"Triton {triton.__version__}; registers / bytes of spill / KiB of shared memory\n")
    print("| kernel | size | format |" + "".join(f" sm{arch} |" for arch in archs))
    print("|---|---|---|" + "---|" * len(archs))
    cells: dict[tuple[str, str, str], dict[int, str]] = {}
    for result in compiled:
        cell = f"{result.registers} / {result.spill} / {result.shared / 1024:.0f}"
        cells.setdefault((result.kernel, result.size, result.format), {})[result.arch] = cell
    for name in sorted(cells, key=lambda name: (name[0], int(re.findall(r"\d+", name[1])[0]), name[2])):
        print("| " + " | ".join([*name, *(cells[name].get(arch, "") for arch in archs)]) + " |")


# --- check


STORE, GROUPED = "store", "grouped product"


def checks(kernel: str) -> Iterator[tuple[object, float]]:
    """(case, relative error) of a kernel: every combination of formats and features, sizes going round."""
    device = "cuda" if HAS_GPU else "cpu"
    if kernel == GROUPED:
        gates = (None, Gate("silu"), Gate("gelu_tanh"), Gate("clamped_swiglu", alternating=True))
        for format_name, gate, bias, rows in itertools.product(
            grouped_cases.FORMATS, gates, (False, True), (1, 20, 70)
        ):
            case = grouped_cases.Case(format_name, counts=(rows, 0, 1, 17), gate=gate, bias=bias, device=device)
            yield case, grouped_cases.relative_error(case, seed=rows)
        return
    if kernel == STORE:
        for keys, values, head_dim in itertools.product(paged_cases.KINDS, paged_cases.KINDS, paged_cases.HEAD_DIMS):
            yield f"{keys}/{values} head {head_dim}", paged_cases.store_error(keys, values, head_dim, device)
        return
    first = paged_cases.KERNELS.index(kernel) * len(paged_cases.KINDS) ** 2 * len(paged_cases.FEATURES)
    combinations = itertools.product(paged_cases.KINDS, paged_cases.KINDS, paged_cases.FEATURES)
    for turn, (keys, values, feature) in enumerate(combinations, first):
        sizes = (paged_cases.HEAD_DIMS[turn % 5], paged_cases.GROUPS[turn // 2 % 5], paged_cases.BLOCKS[turn % 3])
        case = paged_cases.Case(keys, values, *sizes, device=device, **paged_cases.FEATURES[feature])
        yield case, paged_cases.check(case, kernel, seed=turn)


def run_check() -> int:
    failed = 0
    for kernel in (*paged_cases.KERNELS, STORE, GROUPED):
        count, worst = 0, 0.0
        for case, error in checks(kernel):
            count, worst = count + 1, max(worst, error)
            if not error < MOST_ERROR:
                failed += 1
                print(f"{kernel:20} {error:.1e} {case}", flush=True)
        print(f"{kernel:20} {count:5} cases, worst relative L2 {worst:.1e}", flush=True)
    return int(failed > 0)


# --- time


@dataclass(frozen=True)
class Timed:
    """What is launched, the bytes and operations that cannot be saved, and how far the result is from float64."""

    name: str
    launches: list[Launch]
    nbytes: float
    operations: float
    error: float


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


def product_rate() -> float:
    """Operations per second of torch.mm in bfloat16 (float16 before sm80)."""
    dtype = BF16 if torch.cuda.get_device_capability() >= (8, 0) else FP16
    a = torch.randn(4096, 4096, device="cuda", dtype=dtype)
    return 2 * 4096**3 / seconds_of(lambda: torch.mm(a, a))


def seconds_of(run: Callable[[], object]) -> float:
    """The median; caches are emptied between runs."""
    return triton.testing.do_bench(run, warmup=50, rep=200, return_mode="median") / 1000


def timed_attention(capability: tuple[int, int]) -> Iterator[Timed]:
    dtype = BF16 if capability >= (8, 0) else FP16
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for head_dim, (keys, values) in itertools.product((64, 128), KV_PAIRS):
        base = paged_cases.Case(keys, values, head_dim, 8, 32, 4, dtype=dtype, native=dtype, device="cuda")
        for batch, past in ((1, 8191), (16, 2047), (128, 1023)):
            case = replace(base, lengths=((past, 1),) * batch)
            cut = decode_cut(capability, head_dim, 8, wide=False)
            splits = num_splits(batch * 4 * -(-8 // cut.heads), processors, past, cut.keys)
            name = f"decode {keys}/{values} head {head_dim}, {batch} x {past + 1}, {splits} splits"
            yield timed_case(name, case, cut, splits, 1)
        if capability >= (8, 0):
            cut = extend_cut(head_dim, 8, wide=False)
            case = replace(base, lengths=((1024, 512), (0, 1024)))
            yield timed_case(f"extend {keys}/{values} head {head_dim}, 1536 rows", case, cut, 1, cut.rows // cut.heads)


def timed_case(name: str, case: paged_cases.Case, cut: object, splits: int, tokens: int) -> Timed:
    cache = paged_cases.Cache.make(case)
    launches = attend_launches(cache.q, cache.out, cache.cached, cache.pages(tokens), cache.features, cut, splits)
    for launch in launches:
        launch.run()
    error = paged_cases.relative_error(cache.out, cache.reference())
    stored = sum(sum(length) for length in case.lengths) * case.kv_heads
    widths = [side_nbytes(side) for side in (cache.cached.keys, cache.cached.values)]
    seen = sum(count * (past + (count + 1) / 2) for past, count in case.lengths)
    rows = cache.q.numel() * cache.q.element_size() * 2
    operations = 4 * seen * case.kv_heads * case.group * case.head_dim
    return Timed(name, launches, stored * sum(widths) + rows, operations, error)


def side_nbytes(side: object) -> float:
    """Bytes of one head of one token."""
    planes = [plane for plane in side[:3] if plane is not None]
    return sum(plane[0, 0].numel() * plane.element_size() for plane in planes) / side.codes.shape[2]


def timed_experts() -> Iterator[Timed]:
    """Qwen3-30B-A3B: 128 experts of 2048 x 768."""
    for format_name, rows in itertools.product(grouped_cases.FORMATS, (1, 4, 16, 64, 256)):
        for name, shape, gate in (("gate and up", (1536, 2048), SILU), ("down", (2048, 768), None)):
            case = grouped_cases.Case(format_name, *shape, (rows,) * 128, None, gate, dtype=BF16, device="cuda")
            product = grouped_cases.Product.make(case)
            launch = product.launch()
            launch.run()
            reference = product.reference()
            error = float((product.out.cpu().double() - reference).norm() / reference.norm())
            nbytes = sum(matrix.nbytes for matrix in product.matrices) + 2 * (product.x.numel() + product.out.numel())
            operations = 2 * 128 * rows * shape[0] * shape[1]
            yield Timed(f"{name} {format_name}, 128 experts x {rows} rows", [launch], nbytes, operations, error)


class Measured(NamedTuple):
    """A median, the floor, which share of the median it is, and what it is made of."""

    seconds: float
    floor: float
    share: float
    bound: str


def measure(case: Timed, bandwidth: float, rate: float) -> Measured:
    seconds = seconds_of(lambda: [launch.run() for launch in case.launches])
    floors = {"bytes": case.nbytes / bandwidth, "operations": case.operations / rate}
    bound = max(floors, key=floors.__getitem__)
    return Measured(seconds, floors[bound], floors[bound] / seconds, bound)


def run_time() -> int:
    if not HAS_GPU:
        print("no GPU was found, and only a GPU can be timed; `check` and `compile` need none", file=sys.stderr)
        return 1
    capability, failed = torch.cuda.get_device_capability(), 0
    bandwidth, rate = copy_bandwidth(), product_rate()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e9:.0f} GB/s, mm {rate / 1e12:.1f} TFLOP/s")
    print("| kernel | us | floor us | of floor | bound by | relative L2 |\n|---|---|---|---|---|---|")
    cases = itertools.chain(timed_attention(capability), timed_experts() if capability >= (8, 0) else ())
    for case in cases:
        timed = measure(case, bandwidth, rate)
        figures = f"{timed.seconds * 1e6:.1f} | {timed.floor * 1e6:.1f} | {timed.share:.0%} | {timed.bound}"
        print(f"| {case.name} | {figures} | {case.error:.1e} |", flush=True)
        failed += not case.error < MOST_ROUNDED
    return int(failed > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("check", "compile", "time"))
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    if arguments.mode == "compile":
        sys.exit(run_compile(arguments.arch, arguments.sample, arguments.json))
    sys.exit(run_check() if arguments.mode == "check" else run_time())
