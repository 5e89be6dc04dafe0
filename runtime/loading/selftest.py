"""Compares the kernels that a plan's job is about to call with their definition, on the heads and widths of its model.

What is wrong is not used: torch then computes by the definition of the formats, and the plan says so.

Kernels of a GPU are tried by family: where one does not compile, does not start or is wrong, the others stay in use. A
kernel that reads beyond its memory leaves its CUDA context unusable: every later call of the process fails, so that
falling back is possible only if the kernel ran in another process, this module's `main`. Kernels that passed there are
not tried there again as long as the GPU, torch, Triton and their own source are the same; those that failed are, at
every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, Self

import torch
from platformdirs import user_state_path

from ...offload.atomic_file import own_name, write_atomically
from ...offload.device import Device, find_device
from ...offload.errors import swallow_cuda_error
from ...quant.formats import bitsandbytes_kernels
from ...quant.formats.format import Layout, get_format
from ...quant.kernels import tuning
from ...quant.kernels.gpu import Gpu, Lacks, dotted, lack_of, triton_lack
from ...quant.matmul.matmul import ParallelMatmul, Workspace, kernel_order
from ...quant.matmul.selftest import (
    ANY_KERNEL,
    Arithmetic,
    Wrong,
    wrong_experts,
    wrong_packing,
    wrong_product,
    wrong_widening,
)
from ...quant.matmul.thread_pool import torch_threads
from ...quant.native import library
from ...quant.scratch import scratch_nbytes
from ...quant.tensor import TORCH_DTYPES, dtype_name, pack
from ..attention.choice import LARGEST_HEAD
from ..attention.kernels.operands import has_dot
from ..attention.latent import LatentAttention
from ..attention.selftest import DECODE, EXTEND, HeadCase, heads_of, wrong_attention, wrong_store
from ..attention.torch_backend import TorchAttention
from ..kv.spec import BLOCK_TOKENS
from ..plan.notes import dtype_notes
from ..plan.placement import Plan
from ..plan.planner import choose_dtype
from ..settings.errors import WrongNumbers
from ..settings.stages import stage
from ..shape.model_shape import KVGroup, ModelShape
from ..shape.shards import FLOAT_NAMES, model_shards


def checked(shape: ModelShape, plan: Plan) -> Plan:
    """The plan; where a kernel that it calls on the CPU is wrong, one by torch alone, with a note that says why.

    Raises WrongNumbers where torch is wrong, too.
    """
    if ANY_KERNEL.get():
        return plan
    if not library.refused() and (wrong := first_wrong(shape, plan)):
        library.refuse(f"{wrong}")
        forget()
        if still := first_wrong(shape, by_definition(plan)):
            raise WrongNumbers(f"torch's own kernels are wrong here: {still}; reinstall torch")
    return by_definition(plan) if library.refused() else plan


def first_wrong(shape: ModelShape, plan: Plan) -> Wrong | None:
    """The first thing that a plan's kernels compute wrongly on the widths of a model, if there is any."""
    # Threads would wait for one another longer than they compute.
    with torch_threads(1):
        return next(_wrong(shape, plan), None)


def forget() -> None:
    """Compares kernels again that were compared before, for those who change them."""
    for known in (_wrong_packing, _wrong_widening, _wrong_product, _wrong_experts, _wrong_attention):
        known.cache_clear()


def by_definition(plan: Plan) -> Plan:
    """The plan without CPU kernels, which were refused: torch dequantizes matrices and computes attention."""
    note = f"torch computes instead of the CPU kernels, slower: {library.lack()}"
    attention = "torch" if plan.attention == "native" else plan.attention
    return replace(plan, attention=attention, compute="float", fused_nbytes=0, notes=(*plan.notes, note))


def _wrong(shape: ModelShape, plan: Plan) -> Iterator[Wrong]:
    """All of a job that computes on the CPU; packing alone where a device computes, which has tests of its own."""
    dtype, on_cpu = TORCH_DTYPES[plan.dtype], plan.staging is None
    order = kernel_order(plan.quant, dtype, "cpu" if on_cpu else "cuda")
    shards = model_shards(shape, plan.quant, plan.dtype, order)
    matrices = [layer.expert.matrices for layer in shards.layers if layer.expert]
    experts = [(up.layout, down.layout) for up, down in matrices]
    dense = [layer.dense for layer in shards.layers] + ([shards.head] if shards.head else [])
    layouts = [matrix.layout for shard in dense for matrix in shard.matrices]
    layouts += [layout for pair in experts for layout in pair]
    yield from filter(None, map(_wrong_packing, dict.fromkeys(layouts)))
    yield from filter(None, map(_wrong_widening, dict.fromkeys(_kept(shape, FLOAT_NAMES[plan.dtype]))))
    if not on_cpu:
        return
    how = Arithmetic(dtype, plan.compute == "int8", plan.deterministic)
    yield from filter(None, (_wrong_product(layout, how) for layout in dict.fromkeys(layouts)))
    yield from filter(None, (_wrong_experts(up, down, how) for up, down in dict.fromkeys(experts)))
    if plan.attention == "native":
        yield from filter(None, (_wrong_attention(each, dtype) for each in heads_of(shape, plan.kv, plan.kv_block)))


def _kept(shape: ModelShape, dtype: str) -> Iterator[Layout]:
    """What a quantized checkpoint has that may have to be widened, each in its own order."""
    for layer in shape.layers:
        experts = (layer.experts.up, layer.experts.down) if layer.experts else ()
        for matrix in (*layer.dense, *experts):
            if matrix.kept:
                yield get_format(matrix.kept).layout((matrix.rows, matrix.cols), dtype)


# Once in a process: an engine may be loaded many times.
_wrong_packing, _wrong_widening = cache(wrong_packing), cache(wrong_widening)
_wrong_product, _wrong_experts = cache(wrong_product), cache(wrong_experts)


@cache
def _wrong_attention(heads: HeadCase, dtype: torch.dtype) -> Wrong | None:
    kind = LatentAttention if heads.group.is_latent else TorchAttention
    return wrong_attention(heads, dtype, lambda cache: kind(cache, dtype, tiled=False, native=True))


# Compiling takes seconds a kernel on a slow processor.
TIMEOUT_S = 600.0
# What the line of the result begins with.
RESULT = "self-test: "
# A CUDA context takes about half a GiB.
_SIDE_BY_SIDE_NBYTES = 4 << 30
_FILE = "kernel-selftests.json"
_MOST_KEPT = 64
_COMMAND = (sys.executable, "-P", "-m", "moedge.runtime.loading.selftest")
_SOURCES = (
    "../../quant/kernels/*.py",
    "../attention/kernels/*.py",
    "../../moe/grouping_kernel.py",
    "../sampling/kernel.py",
)
_NO_TENSOR_CORES = "Triton uses tensor cores from compute capability {} on, this GPU has {}; matrices are widened whole"
# KV formats beside the native one: keys and values in the same format, and in different ones.
_QUANTIZED = ("int8", "int4", "int8/int4")


class KernelNeeds(NamedTuple):
    """What kernels are tried with: the dtype of a run, the heads of its layer groups (KV heads, query heads for each of
    them, elements, window), and its layers of experts (columns of the hidden states, and inside)."""

    dtype: str
    heads: tuple[tuple[int, int, int, int | None], ...] = ((2, 4, 128, None),)
    experts: tuple[tuple[int, int], ...] = ((128, 64),)

    @classmethod
    def of_model(cls, shape: ModelShape, dtype: str) -> Self:
        """Those of a model, each once."""
        heads = [
            (each.group.kv_heads, each.queries, each.group.head_dim, each.group.window)
            for each in heads_of(shape, dtype, BLOCK_TOKENS)
            if not each.group.is_latent
        ]
        experts = [(each.experts.up.cols, each.experts.down.cols) for each in shape.layers if each.experts]
        return cls(dtype, tuple(dict.fromkeys(heads)), tuple(dict.fromkeys(experts)))


def usual_needs(device: Device) -> KernelNeeds:
    """The needs of most models on this device."""
    return KernelNeeds(choose_dtype("auto", "bf16", Gpu(device.capability, device.processors)))


def usable_kernels(device: Device, needs: KernelNeeds) -> Gpu:
    """Compiles and runs the kernels, which takes seconds unless Triton has cached them."""
    gpu = Gpu(device.capability, device.processors)
    if lack := triton_lack(gpu.capability):
        return gpu._replace(lacks=Lacks.everything(lack))
    # Imports Triton.
    tests = family_tests(device.torch_device, gpu, needs)
    lacks = {}
    if not tuning.supports(gpu.capability):
        lacks["experts"] = _NO_TENSOR_CORES.format(dotted(tuning.DOT_CAPABILITY), dotted(gpu.capability))
        del tests["experts"]
    if device.is_real:
        lacks |= {family: lack for family, lack in run_apart(device, needs, tuple(tests)).items() if lack}
    for family in (family for family in tests if family not in lacks):
        lacks[family] = lack_of(tests[family])
        if lacks[family]:
            # Else the next CUDA call would report it.
            device.clear_error()
    return gpu._replace(lacks=Lacks(**lacks))


def family_tests(torch_device: torch.device, gpu: Gpu, needs: KernelNeeds) -> dict[str, Callable[[], str]]:
    """The tests by family of `Lacks`, each the name of what is wrong, or "". Triton is imported in them."""
    dtype = TORCH_DTYPES[needs.dtype]
    heads = [
        HeadCase(KVGroup((0,), kv_heads, dim, window), kv, queries)
        for kv_heads, queries, dim, window in needs.heads
        if dim <= LARGEST_HEAD
        for kv in (needs.dtype, *_QUANTIZED)
    ]

    def attention() -> str:
        from ..attention.triton_backend import TritonAttention

        # Without usable tensor cores torch replaces the kernel of prompts.
        passes = (*DECODE, *EXTEND) if has_dot(gpu.capability) else DECODE
        make = partial(TritonAttention, dtype=dtype, tiled=False, gpu=gpu, device=torch_device, stores_by_kernel=False)
        return _first(wrong_attention(each, dtype, make, passes, torch_device) for each in heads)

    def cache() -> str:
        from ..attention.triton_backend import store_by_kernel

        return _first(wrong_store(each, dtype, store_by_kernel, torch_device) for each in heads)

    def experts() -> str:
        from ...moe.grouping_kernel import wrong_grouping
        from ...quant.matmul.grouped_selftest import wrong_grouped

        return wrong_grouped(torch_device, dtype, needs.experts) or wrong_grouping(torch_device)

    def sampling() -> str:
        from ..sampling.kernel import wrong_draw

        return wrong_draw(torch_device)

    return {"attention": attention, "cache": cache, "experts": experts, "sampling": sampling}


def _first(found: Iterable[Wrong | None]) -> str:
    return next((wrong.what for wrong in found if wrong), "")


def run_apart(device: Device, needs: KernelNeeds, families: tuple[str, ...]) -> dict[str, str]:
    """Why the kernels of each family cannot be used, "" if they can: as remembered, or tried in other processes."""
    key, known = _key(device, needs), _remembered()
    lacks = {family: "" for family in families if family in known.get(key, [])}
    left = [family for family in families if family not in lacks]
    if left:
        lacks |= _try_each(device, needs, left)
        _remember({**known, key: [family for family, lack in lacks.items() if not lack]})
    return lacks


def _try_each(device: Device, needs: KernelNeeds, families: list[str]) -> dict[str, str]:
    """A process for each family, side by side where each may have a CUDA context of its own."""
    at_once = len(families) if device.available >= _SIDE_BY_SIDE_NBYTES else 1
    announcement = "compiling GPU kernels and trying them, once for this GPU and these packages (about a minute)"
    with stage("trying GPU kernels", announcement=announcement), ThreadPoolExecutor(at_once) as pool:
        index = device.torch_device.index or 0
        return dict(zip(families, pool.map(partial(run_one, index, needs), families), strict=True))


def run_one(index: int, needs: KernelNeeds, family: str) -> str:
    """Why the kernels of a family cannot be used on the GPU of this index, "" if they can."""
    request = json.dumps([index, family, needs])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [*_COMMAND, request], capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"Triton's kernels do not run here: they took more than {TIMEOUT_S:.0f} seconds"
    for line in done.stdout.splitlines():
        if line.startswith(RESULT):
            return line.removeprefix(RESULT)
    code, last = done.returncode, (done.stderr.strip().splitlines() or [""])[-1][:160]
    death = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}: {last}"
    return f"Triton's kernels do not run here: the process that tried them {death}"


def _key(device: Device, needs: KernelNeeds) -> str:
    properties = torch.cuda.get_device_properties(device.torch_device)
    facts = (properties.name, device.capability, torch.__version__, _version("triton"), _source_hash())
    return hashlib.sha256(repr((facts, needs)).encode()).hexdigest()[:32]


@cache
def _source_hash() -> str:
    here, digest = Path(__file__).parent, hashlib.sha256()
    for pattern in _SOURCES:
        folder, name = (here / pattern).parent.resolve(), Path(pattern).name
        for path in sorted(folder.glob(name)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _path() -> Path:
    return user_state_path("moedge") / _FILE


def _remembered() -> dict[str, list[str]]:
    """The families that passed, by key, the newest key last; nothing where the file cannot be read."""
    try:
        found = json.loads(_path().read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(each, list) for each in found.values()) else {}


def _remember(known: dict[str, list[str]]) -> None:
    newest = dict(list(known.items())[-_MOST_KEPT:])
    try:
        _path().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(_path(), json.dumps(newest).encode(), own_name(_path()))
    except OSError:
        # The next start tries the kernels again.
        return


def main(request: str) -> None:
    """Tests one family, and prints why it cannot be used."""
    index, family, (dtype, heads, experts) = json.loads(request)
    torch.cuda.set_device(index)
    device = find_device()
    assert device is not None
    needs = KernelNeeds(dtype, tuple(map(tuple, heads)), tuple(map(tuple, experts)))
    tests = family_tests(device.torch_device, Gpu(device.capability, device.processors), needs)
    print(f"{RESULT}{lack_of(tests[family])}", flush=True)
    # At once: if CUDA answers no more, what else runs at the end of a process would abort it.
    os._exit(0)


class CpuKernels(NamedTuple):
    """The instruction set of the library of CPU kernels, or why it is not used; `build` is the command to build it."""

    isa: str
    unavailable_reason: str
    build: str


class GpuKernels(NamedTuple):
    """What the first GPU is not used for, as notes on dtypes; why Triton does not serve it, or else the families of
    kernels that passed their self-tests, and the reasons of those that did not."""

    notes: tuple[str, ...]
    unavailable_reason: str
    passed: list[str]
    failed: dict[str, str]


def cpu_kernels() -> CpuKernels:
    reason = library.lack()
    return CpuKernels("" if reason else library.loaded().isa, reason, library.BUILD)


def gpu_kernels(device: Device) -> GpuKernels:
    """Compiles and runs the kernels of every family on the GPU, as a run does before its plan."""
    gpu = usable_kernels(device, usual_needs(device))
    failed = dict(gpu.lacks.reasons)
    passed = [family for family in gpu.lacks._fields if family not in failed]
    return GpuKernels(tuple(dtype_notes("auto", "bf16", gpu)), triton_lack(gpu.capability), passed, failed)


@torch.inference_mode()
def product_error(format_name: str, device: str) -> float:
    """Worst difference of a 64x64 product in bfloat16 from the float64 one, relative to its largest number.

    `device` is "cpu" or "cuda". Raises what the kernel raises.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    try:
        packed = pack(weight, format_name, kernel_order(format_name, x.dtype, device))
        meant = x.double() @ packed.dequantize().double().t()
        there = type(packed)(packed.layout, tuple(plane.to(device) for plane in packed.planes))
        nbytes = scratch_nbytes(packed.layout, dtype_name(x.dtype), deterministic=False)
        got = ParallelMatmul(Workspace(nbytes, device)).linear(x.to(device), there).cpu().double()
    except Exception:
        swallow_cuda_error()
        raise
    return float((got - meant).abs().max() / meant.abs().max())


def bitsandbytes_speed(device: str) -> str:
    """ "fused" where its nf4 kernel multiplies a few rows without widening them, "slow" where it was built without this
    device, else "plain"."""
    if not bitsandbytes_kernels.serves(device):
        return "slow"
    return "fused" if device == "cuda" or bitsandbytes_kernels.has_fused() else "plain"


if __name__ == "__main__":
    main(sys.argv[1])
