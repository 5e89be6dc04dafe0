"""Tries bitsandbytes, the GPU and Triton with small products, instead of only importing them."""

from importlib.metadata import version
from importlib.resources import as_file, files

import torch

from ... import check
from ...face import (
    QUANT_FORMATS,
    Device,
    bitsandbytes_speed,
    cpu_kernels,
    gib,
    gpu_kernels,
    product_error,
    reads_integers,
)
from .host import Finding, fail, ok, warn

# The error of a bfloat16 product of 64 rows against float64, over its largest number; rounding alone is below 1 %.
_TOLERANCE = 0.02


def check_bitsandbytes(device: str) -> Finding:
    """Compares its nf4 kernel, on "cpu" or "cuda", with the dequantized matrix."""
    name, unit = "bitsandbytes", "GPU" if device == "cuda" else "CPU"
    try:
        worst = product_error("nf4", device)
        speed = bitsandbytes_speed(device)
    except Exception as error:
        return fail(name, f"does not work on this {unit}: {brief(error)}", "pip install --force-reinstall bitsandbytes")
    found = f"{name} {version(name)}: nf4 kernel on the {unit}"
    if worst > _TOLERANCE:
        return fail(name, f"{found} is wrong by {worst:.1%}", "pip install --upgrade bitsandbytes, or use --quant int4")
    if speed == "slow":
        fix = "pip install --force-reinstall bitsandbytes, built for this CUDA version"
        return warn(name, f"{found} OK but slow: bitsandbytes was built without CUDA", fix)
    if speed == "plain":
        return ok(name, f"{found} OK (64x64 test); without AVX512-BF16 nf4 is dequantized first, slower for few rows")
    return ok(name, f"{found} OK (64x64 test)")


# Weight formats of the bundled model, the arithmetic of its products, and KV formats: each of them at least once.
_CHECKED = (
    ("none", "float", "auto"),
    ("int8", "float", "int8"),
    ("int8", "int8", "int8/int4"),
    ("int4", "int8", "int4"),
    ("nf4", "float", "auto"),
    ("mxfp4", "int8", "int8"),
)
_PROMPT = "The harbour was quiet when the last ferry came in, and"


def check_formats() -> Finding:
    """Compares the bundled model in every format with its definition, as `moedge check` does."""
    try:
        wrong = {quant: difference for quant, difference in map(_difference, _CHECKED) if difference}
    except Exception as error:
        return fail("formats", f"a product failed: {brief(error)}", "pip install --force-reinstall torch")
    if not wrong:
        return ok("formats", f"the bundled model is right in {', '.join(QUANT_FORMATS)}")
    quant, difference = next(iter(wrong.items()))
    fix = f"jobs that are hit by it use torch instead; avoid --quant {quant}; report it"
    return fail("formats", f"the bundled model is wrong in {', '.join(wrong)}: {difference}", fix)


def _difference(formats: tuple[str, str, str]) -> tuple[str, str]:
    """The weight format, and what differs first in it."""
    quant, compute, kv = formats
    compute = compute if reads_integers(quant, "bf16") else "float"
    with as_file(files("moedge.demo")) as bundle:
        found = check(bundle / "model", (_PROMPT,), quant=quant, compute=compute, kv=kv)
    return quant, found.difference


def check_native() -> Finding:
    """Looks for the library of CPU kernels, and says what its absence costs; `check_formats` tries it."""
    found = cpu_kernels()
    if lack := found.unavailable_reason:
        costs = "torch computes attention instead, which takes 3 to 4 times as long with many sequences"
        if "g++" in lack or "sources" in lack:
            return warn("CPU kernels", f"not used: {lack.partition(' (')[0]}; {costs}", found.build)
        return ok("CPU kernels", f"not used: {lack}; {costs}")
    return ok("CPU kernels", found.isa)


def check_gpu() -> Finding:
    """Tries a product on the GPU; for machines whose driver shows one."""
    if not torch.cuda.is_available():
        return fail("GPU", "the driver shows a GPU and torch finds none", "see torch above; check `nvidia-smi`")
    try:
        worst = product_error("none", "cuda")
    except Exception as error:
        return fail("GPU", f"a product failed: {brief(error)}", "check `nvidia-smi` and `dmesg`; restart the machine")
    major, minor = torch.cuda.get_device_capability()
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    says = f"{name}, compute capability {major}.{minor}, {gib(free)} of {gib(total)} free"
    if worst > _TOLERANCE:
        return fail("GPU", f"{says}: a product is wrong by {worst:.1%}", "the device is broken or overclocked")
    if free < total * 3 // 4:
        return warn("GPU", says, "other programs hold the rest: `nvidia-smi` names them")
    return ok("GPU", says)


def check_kernels(device: Device) -> list[Finding]:
    """Compiles and runs the kernels of every family on the GPU: as a run does before its plan."""
    gpu = gpu_kernels(device)
    found = [warn("dtype", note, "nothing to do; --dtype bf16 still works") for note in gpu.notes]
    if lack := gpu.unavailable_reason:
        fix = "pip install triton" if "not installed" in lack else "a newer GPU; until then torch computes instead"
        return [*found, warn("kernels", f"torch computes instead of all of them. {lack}", fix)]
    found += [
        warn("kernels", f"torch computes instead of those for {family}, slower. {reason}", _fix(reason))
        for family, reason in gpu.failed.items()
    ]
    if gpu.passed:
        says = f"Triton {version('triton')}: kernels for {', '.join(gpu.passed)} compiled and passed their tests"
        found.append(ok("kernels", says))
    return found


def _fix(reason: str) -> str:
    if "compiler" in reason.lower():
        return "install a C compiler and the headers of Python (apt install gcc libc6-dev python3-dev)"
    if "tensor cores" in reason:
        return "a newer GPU; nothing is wrong with this one"
    return "pip install --force-reinstall torch, with the Triton that belongs to it; if that does not help, report it"


def brief(error: Exception) -> str:
    """The first line of an error, short enough for a table."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if len(text) <= 120 else text[:117] + "..."
