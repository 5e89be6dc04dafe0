"""What must hold of a compiled kernel, and how many warps of it an SM runs. Free of Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple


class Limits(NamedTuple):
    """Of an SM: KiB of shared memory, those that one block may have, warps and blocks.

    From the CUDA C++ programming guide, technical specifications by compute capability.
    """

    shared: int
    block_shared: int
    warps: int
    blocks: int


LIMITS = {
    75: Limits(64, 64, 32, 16),
    80: Limits(164, 163, 64, 32),
    86: Limits(100, 99, 48, 16),
    89: Limits(100, 99, 48, 24),
    90: Limits(228, 227, 64, 32),
    120: Limits(100, 99, 48, 24),
}
# An SM's registers lie in four parts of 16 Ki; a warp's lie in one, in steps of 8 a thread.
PART_REGISTERS, PARTS, REGISTER_STEP, WARP = 16 << 10, 4, 8, 32
# Of shared memory the driver takes 1 KiB a block, since sm80.
RESERVED = 1024
LEAST_WARPS, LEAST_WIDTH, MOST_SPILLED = 12, 8, 256
# Of hot kernels: ptxas rounds registers down, and stores what only the last lines need before the loop. With a Triton
# that no torch pins, also in it.
MOST_SPILLED_ONCE = 16


def warps_per_sm(facts: dict[str, Any], arch: int) -> int:
    """How many warps of the kernel an SM runs at a time."""
    limits, warps = LIMITS[arch], facts["warps"]
    registers = -(-max(facts["registers"], 1) // REGISTER_STEP) * REGISTER_STEP * WARP
    blocks = min(limits.blocks, limits.warps // warps, PARTS * (PART_REGISTERS // registers) // warps)
    shared = facts["shared"] + (RESERVED if arch >= 80 else 0)
    return warps * min(blocks, limits.shared * 1024 // shared if shared else blocks)


def broken(subject: Any, facts: dict[str, Any], arch: int, pinned: bool = True) -> Iterator[str]:
    """The rules that the compiled subject breaks, in words; `pinned` says that a torch brings this Triton."""
    width = min(LEAST_WIDTH, subject.line)
    narrow = [nbytes for nbytes in facts["codes"] if nbytes < width]
    if narrow:
        yield f"codes are loaded {narrow} bytes wide, wanted {width} or more"
    if subject.reads and not facts["codes"]:
        yield "no load of codes was found"
    if subject.dots and arch >= 80 and not facts["mma"]:
        yield "no tensor cores in a product of 16-bit numbers"
    if facts["shared"] > LIMITS[arch].block_shared * 1024:
        yield f"{facts['shared']} bytes of shared memory, and a block has {LIMITS[arch].block_shared} KiB"
    warps = warps_per_sm(facts, arch)
    if warps < facts["warps"]:
        yield "it does not fit an SM"
    if subject.hot and ((facts["spills_in_loop"] and pinned) or facts["spill"] > MOST_SPILLED_ONCE):
        where = "in a loop" if facts["spills_in_loop"] else "outside of loops"
        yield f"{facts['spill']} bytes spill {where}, wanted none in loops and {MOST_SPILLED_ONCE} elsewhere"
    if subject.hot and warps < LEAST_WARPS:
        yield f"{warps} warps an SM, wanted {LEAST_WARPS} or more"
    if facts["spill"] > MOST_SPILLED:
        yield f"{facts['spill']} bytes spill, wanted {MOST_SPILLED} at most"
