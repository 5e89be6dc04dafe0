"""GPUs by name, from their makers' public data sheets: for plans for a card that is not here. Torch-free.

A data sheet says what a card can do at most. Plans take what programs usually get of it: four fifths of a link, half of
the peak of tensor cores.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .hardware import GpuInfo, Hardware
from .profile import Link, Machine, Overheads

GIB = 1 << 30
LINK_SHARE, PEAK_SHARE, MEMORY_SHARE = 0.8, 0.5, 0.8
# Bytes per second of PCIe, one direction, by generation and lanes.
_PCIE = {(3, 16): 15.75e9, (4, 8): 15.75e9, (4, 16): 31.5e9, (5, 16): 63.0e9}
_MOST_ROWS = 1024
# As measured on desktop processors: what launches and Python cost.
_OVERHEADS = Overheads(1e-3, 5e-5, 2e-6, 2e-10, 3e-4, 5e-5)
_RAM_BYTES_S = 4e10


@dataclass(frozen=True, slots=True)
class Preset:
    """`bandwidth` of its memory in GB/s, `tflops` of fp16 products with float32 sums, without sparsity."""

    gib: int
    bandwidth: float
    tflops: float
    processors: int
    capability: str
    pcie: tuple[int, int]


PRESETS: Mapping[str, Preset] = {
    "RTX 2060 6GB": Preset(6, 336, 25.8, 30, "7.5", (3, 16)),
    "RTX 3060 12GB": Preset(12, 360, 25.5, 28, "8.6", (4, 16)),
    "RTX 3060 Ti 8GB": Preset(8, 448, 32.4, 38, "8.6", (4, 16)),
    "RTX 3070 8GB": Preset(8, 448, 40.6, 46, "8.6", (4, 16)),
    "RTX 3080 10GB": Preset(10, 760, 59.5, 68, "8.6", (4, 16)),
    "RTX 3090 24GB": Preset(24, 936, 71.2, 82, "8.6", (4, 16)),
    "RTX 4060 8GB": Preset(8, 272, 30.2, 24, "8.9", (4, 8)),
    "RTX 4060 Ti 16GB": Preset(16, 288, 44.1, 34, "8.9", (4, 8)),
    "RTX 4070 12GB": Preset(12, 504, 58.3, 46, "8.9", (4, 16)),
    "RTX 4080 16GB": Preset(16, 717, 97.5, 76, "8.9", (4, 16)),
    "RTX 4090 24GB": Preset(24, 1008, 165.2, 128, "8.9", (4, 16)),
    "RTX 5090 32GB": Preset(32, 1792, 209.5, 170, "12.0", (5, 16)),
    "T4 16GB": Preset(16, 320, 65.0, 40, "7.5", (3, 16)),
    "L4 24GB": Preset(24, 300, 121.0, 58, "8.9", (4, 16)),
    "A10 24GB": Preset(24, 600, 125.0, 72, "8.6", (4, 16)),
    "A100 40GB": Preset(40, 1555, 312.0, 108, "8.0", (4, 16)),
    "H100 80GB": Preset(80, 3350, 989.0, 132, "9.0", (5, 16)),
}


def find_preset(text: str) -> str:
    """The name of the preset that `text` means; case, spaces and "NVIDIA GeForce" do not matter, and neither does the
    memory where only one card has the name. Raises ValueError, naming the nearest."""
    wanted = _plain(text)
    exact = [name for name in PRESETS if _plain(name) == wanted]
    same = exact or [name for name in PRESETS if _plain(name.rpartition(" ")[0]) == wanted]
    if len(same) == 1:
        return same[0]
    near = difflib.get_close_matches(wanted, [_plain(name) for name in PRESETS], n=1)
    nearest = next((name for name in PRESETS if near and _plain(name) == near[0]), None)
    hint = f"nearest: {nearest}; known" if nearest else "known"
    raise ValueError(f"no preset for the GPU {text!r}; {hint} are {', '.join(PRESETS)}")


def with_preset(name: str, hardware: Hardware, profile: Machine | None, weight_nbytes: Mapping[str, float]) -> Machine:
    """This machine, with the GPU of a preset in place of its own; what was measured of its disk stays.

    `weight_nbytes` are the bytes of a weight by format, with its scales.
    """
    preset = PRESETS[name]
    gpu = GpuInfo(name, preset.gib * GIB, preset.capability, preset.processors)
    link = LINK_SHARE * _PCIE[preset.pcie]
    memory, peak = MEMORY_SHARE * preset.bandwidth * 1e9, PEAK_SHARE * preset.tflops * 1e12
    # One row multiplies as fast as its weights are read.
    rates = {fmt: {1: min(peak, 2 * memory / nbytes), _MOST_ROWS: peak} for fmt, nbytes in weight_nbytes.items()}
    base = profile or Machine(hardware, _RAM_BYTES_S, overheads=_OVERHEADS)
    return replace(
        base,
        hardware=replace(hardware, gpus=(gpu,)),
        link=Link(link / 2, link),
        pin=None,
        device_memory_bytes_s=memory,
        device_flop_s=rates,
        device_overheads=_OVERHEADS,
        kernel_lacks=dict.fromkeys(("attention", "cache", "experts"), ""),
    )


def _plain(text: str) -> str:
    return "".join(text.lower().replace("nvidia", "").replace("geforce", "").split())
