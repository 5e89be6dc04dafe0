"""What a launch compiles to for a GPU that is not there: registers, spills, widths of loads. Imports Triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from moedge.quant.kernels import product
from moedge.quant.kernels.product import Launch
from moedge.runtime.attention.kernels import paged as pages

# The lines that load codes of weights, of keys and of values: PTX names the line of every load.
CODE_LOADS = {
    product: (
        "pairs = tl.load(start_of(packed.codes",
        "weights = tl.load(start_of(packed.codes",
        "low = tl.load(codes",
        "others = tl.load(codes",
        "high = tl.load(codes",
        "points = tl.load(codes",
        "more = tl.load(codes",
        "signs = tl.load(codes",
    ),
    pages: tuple(f"codes = tl.load(pointers{rest}" for rest in (", mask=mask", ", mask=columns", ")")),
}
_LOC = re.compile(r"\.loc\s+(\d+) (\d+)")
_FILE = re.compile(r'\.file\s+(\d+) "(?:[^"]*/)?([^"/]+)"')
_LOAD = re.compile(r"\bld\.global[\w.:]*?(?:\.v(\d))?\.[bfsu](\d+)\b")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[^;]*?\], (?:\[[^\]]*\], )?(0x[0-9a-f]+|\d+)")
_SPILL = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(?:LDL|STL)\b")
_BRANCH = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?BRA\b[^;]*?0x([0-9a-f]+)")
_MMA = re.compile(r"\b(mma\.sync|wgmma|tcgen05\.mma)")


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


def specialization(launch: Launch) -> str:
    """What Triton compiles the kernel for: two launches for which it is the same run the same binary."""
    *_, binder = launch.kernel.device_caches[driver.active.get_current_device()]
    _, specialized, _ = binder(*launch.arguments)
    return f"{launch.kernel.fn.__qualname__} {specialized} {launch.warps} {launch.stages}"


def compile_launch(launch: Launch) -> dict[str, Any]:
    """For the architecture of the active driver. Raises what Triton raises."""
    kernel = launch.compile()
    usage, ptx = resource_usage(kernel.asm["cubin"]), kernel.asm["ptx"]
    spill = usage["STACK"] + usage.get("LOCAL", 0)
    loads = list(loads_of(ptx))
    return {
        "registers": usage["REG"],
        "spill": spill,
        "spills_in_loop": spill > 0 and spills_in_loop(inspect(kernel.asm["cubin"], "-sass")),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "mma": bool(_MMA.search(ptx)),
        "codes": sorted({nbytes for nbytes, of_codes in loads if of_codes}),
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    words = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", inspect(cubin, "-res-usage"))
    return {name: int(count) for name, count in words}


def inspect(cubin: bytes, option: str) -> str:
    """What cuobjdump, which comes with Triton, says of the binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def spills_in_loop(sass: str) -> bool:
    """Whether an instruction between a branch back and its target touches a register's place in memory."""
    spills = [int(found[1], 16) for found in _SPILL.finditer(sass)]
    branches = [(int(found[1], 16), int(found[2], 16)) for found in _BRANCH.finditer(sass)]
    return any(target <= spill <= begin for begin, target in branches for spill in spills)


def loads_of(ptx: str) -> Iterator[tuple[int, bool]]:
    """(bytes, whether it is of codes) of every load from global memory, also past the registers."""
    files = dict(_FILE.findall(ptx))
    place, within = ("", 0), False
    for line in ptx.splitlines():
        if "inline asm" in line:
            within = "begin" in line
        elif found := _LOC.search(line):
            # LLVM counts lines of assembler as lines of the source.
            place = place if within else (files.get(found[1], ""), int(found[2]))
        elif found := _ASYNC.search(line):
            yield int(found[1], 0), place in code_lines()
        elif found := _LOAD.search(line):
            yield int(found[1] or 1) * int(found[2]) // 8, place in code_lines()


@cache
def code_lines() -> frozenset[tuple[str, int]]:
    """(file, line) of the loads of codes."""
    found = set()
    for module, wanted in CODE_LOADS.items():
        path = Path(module.__file__)
        for text in wanted:
            numbers = [n for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip().startswith(text)]
            if len(numbers) != 1:
                raise RuntimeError(f"{path} has the line '{text}...' {len(numbers)} times; name it in CODE_LOADS")
            found.add((path.name, numbers[0]))
    return frozenset(found)
