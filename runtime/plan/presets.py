"""GPUs by name, from their makers' public data sheets, and what a pass costs one and its thread. Torch-free.

A data sheet says what a card can do at most. What kernels get of it, and what they and their host take besides, is
counted: kernels in instructions, torch's operations in launches and bytes, the driver in calls. A better kernel changes
a count here, and nothing else. docs/tables/plans.md says what was measured.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

from ...offload.budget import GIB
from ...offload.machine.hardware import GpuInfo, Hardware
from ...offload.machine.profile import DRAWING, HEADS, LATENTS, TOGETHER, FlopRates, Link, Machine, Overheads
from ...quant.formats.format import ASSUMED
from ...quant.kernels.gpu import Lacks

# Four schedulers of a multiprocessor start an instruction of 32 threads each in a clock, in every GPU since Volta.
ISSUED_A_CLOCK = 128
# What kernels reached of a data sheet's figures on an H100 and an H200, the only GPUs measured so far (bench/results/
# gpu.md): of the memory 0.68 to 0.77, which are 0.75 to 0.85 of a copy's 3.0 of 3.35 TB/s; of instructions 0.26 to
# 0.42 in attention, before codes were decoded in registers (those of weights are with their formats); of the tensor
# cores' peak 0.52 to 0.76. Copies over its link reached 0.87; 0.8 is for 4 MiB and less.
MEMORY_SHARE, ISSUE_SHARE, PEAK_SHARE, LINK_SHARE = 0.7, 0.4, 0.5, 0.8

# Instructions for an element of keys and values, of decoding tokens and of prompts, in heads of 64, 128 and 256, by the
# major compute capability (0: below 8.0, where nothing multiplies by tensor cores and programs share fewer heads; 8:
# the worst of 8.0, 8.6, 8.9 and 12.0). From `python -m matrix.compiling.instructions 75 80 86 89 90 120`, Triton 3.7.1;
# those for a weight are with its format (`Assumed`).
_DECODE = {
    0: {
        "native": (65.2, 45.4, 47.6),
        "int8": (84.2, 102.0, 74.6),
        "int8/int4": (105.2, 100.4, 85.8),
        "int4": (92.0, 101.6, 92.0),
    },
    8: {
        "native": (5.4, 4.9, 3.9),
        "int8": (3.6, 3.3, 3.7),
        "int8/int4": (4.5, 3.6, 4.2),
        "int4": (4.8, 3.9, 4.6),
    },
    9: {
        "native": (5.2, 4.8, 3.8),
        "int8": (3.6, 3.2, 3.5),
        "int8/int4": (4.4, 3.5, 4.0),
        "int4": (4.7, 3.9, 4.4),
    },
}
_PROMPTS = {
    8: {
        "native": (9.5, 10.7, 11.1),
        "int8": (17.5, 13.9, 17.3),
        "int8/int4": (24.7, 15.7, 21.4),
        "int4": (28.6, 18.5, 22.4),
    },
    9: {
        "native": (9.0, 6.8, 8.2),
        "int8": (12.6, 8.8, 9.6),
        "int8/int4": (23.7, 11.6, 13.1),
        "int4": (23.4, 13.5, 14.9),
    },
}
_HEADS = (64, 128, 256)
_TILE_ROWS = (16, 32, 64)
# Bytes that a row reads and writes for each weight of an expert, of Qwen3-30B-A3B: gate and up, then down.
_ROW_NBYTES = 2 * ((2048 + 768) / (1536 * 2048) * 2 / 3 + (768 + 2048) / (2048 * 768) / 3)
# Rows of queries for which prompts decode an element once.
_PROMPT_ROWS = 64
# Decode rates are per operation of attention in which this many query heads share a key (calibration/pass_rates.py).
SHARED_HEADS = 4
# Latents are attended by torch: an element is unpacked, widened to float32, and read twice.
_LATENT_NBYTES = 14.0

# Python of an operation of torch: 2.2 us on a Zen 5 of 2025 (attention and norms of a layer, 52 operations in 115 us);
# other processors take about half as long again. A call of CUDA's driver: 5 us for a launch (NVIDIA's figure for an
# empty kernel is 2 to 5 us of the submitting thread), 1.2 us for events and copies.
SLOWER = 1.5
LAUNCH_S = SLOWER * 2.2e-6 + 5e-6
CALL_S = 1.2e-6
# Launches of a layer with streamed experts, of prompts (some 20 of them copy) and of decoding tokens alone; those where
# torch computes attention; and of a pass beside its layers (tests/device/host_cost.json).
LAYER_LAUNCHES, DECODE_LAUNCHES, TORCH_LAUNCHES, TORCH_DECODE_LAUNCHES, PASS_LAUNCHES = 61, 40, 222, 180, 26
# The same of a layer that is replayed, with its two graphs.
GRAPH_LAUNCHES, DECODE_GRAPH_LAUNCHES = 28, 10
# An expert that torch computes: aten's operations of its two products, of int8 and nf4 (int4's are 24).
EXPERT_LAUNCHES = 12
# An expert that streams, in runs of sixteen that are one grouped product: cache, order, lane 9 us and a sixteenth of a
# product's 50 us (`python -m bench.host_cost --lane cuda`, Zen 5); calls, which are most where no two are neighbours
# (bench/test_host_cost.py); and a sixteenth of two launches by Triton, an upload and an allocation. Where layers are
# read whole, it is half of that: their experts are one product, however many they are.
ARRIVAL_CALLS = 2.5
ARRIVAL_S = SLOWER * (9e-6 + 50e-6 / 16) + ARRIVAL_CALLS * CALL_S + (2 * 18e-6 + 2 * 5e-6) / 16
# A sequence in a pass: engine and text 10 us, tables of pages 15 us (Zen 5), before layers shared what they look for.
# Since then `python -m bench.host_cost --sequences 64 512` has found 22 to 28 us on a Zen 3 that others used, too.
SEQUENCE_S = SLOWER * 25e-6
# A small kernel takes the device so long, however little it computes: with one sequence an H200 took 5.0 ms for the
# 1,600 of a pass beside its products, attention and sampler, which are 7 launches a layer.
KERNEL_S, LARGE_KERNELS = 3.1e-6, 7
# Clocks of a multiprocessor for a logit of a row that is drawn: 0.87 ms for a row of 151,936 on an H200, with top-k and
# top-p (bench/results/gpu.md). Each draws one row at a time.
DRAW_CLOCKS = 11.3
# To draw tokens: settings of the rows go up, a kernel draws, tokens come down (tests/device/test_host_cost.py).
DRAW_LAUNCHES = 3
# A layer of a cohort in host memory: what attention launches, its copy and the events around it, and Python of the
# window. And for the layer itself: its new tokens are stored apart, copied down, and put in place by the host, in 12
# operations of torch. Counted as tests/device/host_cost.json is: with one cohort a layer starts 13 kernels more while
# decoding (int8 keys), and 30 more of prompts.
COHORT_LAUNCHES, COHORT_CALLS, COHORT_PYTHON_S = 9, 9, SLOWER * 25e-6
WRITE_LAUNCHES, WRITE_CALLS, WRITE_PYTHON_S = 6, 3, SLOWER * 12 * 10e-6
# Experts in order `rows` that the CPU computes beside copies (bench/results/cpu-products.md, "beside a copy"): one row
# reads at 0.59 to 0.68 of what copies leave of the memory. Of torch's float32 products in cache, 22 GFLOP/s a core, one
# row has 0.2 to 0.27 with AVX2, and four and eight 0.44 to 0.62; with AVX512-BF16 both have twice as much.
EXPERT_READ_SHARE, FIRST_ROW_SHARE, EXPERT_FLOP_SHARE, CORE_FLOP_S = 0.59, 0.2, 0.44, 2.2e10
# A layer of them: choosing, rows down and up, and threads that wake, with experts of 64 by 64 (2 virtual cores of a
# Zen 5, busy): 0.18 ms beside the experts.
CPU_LAYER_S = 1.8e-4
# Attention of the CPU to sequences in host memory (bench/results/attention.md, Qwen3-30B-A3B's heads): keys and values
# that a core with AVX512-BF16 attends to, 5.3 to 8.5 billion a second of int8 and 3 to 7.7 of int4, of which it reads
# half of what memory gives. A sequence in a layer takes a core 31 us beside, of 16 tokens; a cohort's call of the
# library takes 80 us, and a layer waits for queries, whose copy and that of the results are started: assumed to take as
# long as a dozen launches.
CORE_ELEMENTS_S, ATTENTION_READ_SHARE = 4e9, 0.5
ATTENDED_SEQUENCE_S, ATTENDED_COHORT_S, ATTENDED_LAYER_S = 31e-6, 80e-6, 1e-4
# What nobody can count to more than nothing.
_NOTHING = 1e-12
OVERHEADS = Overheads(
    layer_s=LAYER_LAUNCHES * LAUNCH_S,
    expert_s=EXPERT_LAUNCHES * LAUNCH_S,
    sequence_s=_NOTHING,
    token_s=_NOTHING,
    arrival_s=ARRIVAL_S,
    schedule_s=SEQUENCE_S,
)


def beside_layers_s(sampled: float) -> float:
    """Seconds of the host beside a pass's layers: what every pass starts, and what draws tokens where any are drawn."""
    return (PASS_LAUNCHES + (DRAW_LAUNCHES if sampled else 0)) * LAUNCH_S


def host_kv_s(cohorts: float, layers: int) -> tuple[float, float]:
    """Seconds of the host and of the device beside copies, in a pass that reads so many cohorts."""
    if not cohorts:
        return 0.0, 0.0
    cohort = COHORT_LAUNCHES * LAUNCH_S + COHORT_CALLS * CALL_S + COHORT_PYTHON_S
    write = WRITE_LAUNCHES * LAUNCH_S + WRITE_CALLS * CALL_S + WRITE_PYTHON_S
    return layers * (cohorts * cohort + write), layers * (cohorts * COHORT_LAUNCHES + WRITE_LAUNCHES) * KERNEL_S


def layer_share(prompts: bool, by_torch: bool, graphs: bool = False) -> float:
    """Launches of a layer, as a multiple of those that `OVERHEADS` has; `by_torch`: torch computes its attention;
    `graphs`: all but attention is replayed.
    """
    if graphs:
        return (GRAPH_LAUNCHES if prompts else DECODE_GRAPH_LAUNCHES) / LAYER_LAUNCHES
    if by_torch:
        return (TORCH_LAUNCHES if prompts else TORCH_DECODE_LAUNCHES) / LAYER_LAUNCHES
    return 1.0 if prompts else DECODE_LAUNCHES / LAYER_LAUNCHES


def small_kernels_s(prompts: bool, by_torch: bool) -> float:
    """Seconds of the device for the small kernels of a layer."""
    return (layer_share(prompts, by_torch) * LAYER_LAUNCHES - LARGE_KERNELS) * KERNEL_S


def head_size(head_dim: int) -> int:
    """The size of heads for which a kernel is compiled that computes heads of `head_dim`."""
    return next((size for size in _HEADS if head_dim <= size), _HEADS[-1])


def flop_rates(
    capability: tuple[int, int], memory_bytes_s: float, issued_s: float, peak: float, processors: int
) -> FlopRates:
    """FLOP/s of kernels by name and rows, on a GPU whose memory gives `memory_bytes_s`, whose multiprocessors can start
    `issued_s` instructions of a thread in a second, and whose products take `peak` FLOP/s; logits/s of `DRAWING`."""
    # Below 8.0 no kernel multiplies with tensor cores. Those of 12.0 have the instructions of 8.0.
    major = 0 if capability < (8, 0) else 9 if capability[0] in (9, 10) else 8
    rates: dict[str, dict[int, float]] = {
        name: _dense(each.dense_nbytes / memory_bytes_s, memory_bytes_s, peak) for name, each in ASSUMED.items()
    }
    for name, assumed in ASSUMED.items():
        if (counts := assumed.instructions.get(major)) is None:
            continue
        weight_s, together = 0.0, rates.setdefault(TOGETHER.format(name), {})
        for rows, count in zip((1, *_TILE_ROWS), (counts[0], *counts), strict=True):
            read_s = (assumed.weight_nbytes + rows * _ROW_NBYTES) / memory_bytes_s
            # More rows never take less.
            weight_s = max(weight_s, read_s, count / (assumed.issue_share * issued_s), 2 * rows / peak)
            together[rows] = 2 * rows / weight_s
    elements_s = ISSUE_SHARE * issued_s
    for kind, index in product(_DECODE[major], range(len(_HEADS))):
        decoded = 2 * SHARED_HEADS * elements_s / _DECODE[major][kind][index]
        prompts = elements_s / _PROMPTS[major][kind][index] * 2 * _PROMPT_ROWS if major in _PROMPTS else decoded
        rates[HEADS.format(kind, _HEADS[index])] = {1: decoded, _PROMPT_ROWS: min(peak, prompts)}
    for size in _HEADS:
        native = rates.pop(HEADS.format("native", size))
        rates |= {HEADS.format(name, size): native for name in ("bf16", "fp16", "fp32")}
    drawn = issued_s / ISSUED_A_CLOCK / DRAW_CLOCKS
    rates[DRAWING] = {1: drawn / processors, processors: drawn}
    rates[LATENTS] = {1: 2 * SHARED_HEADS * memory_bytes_s / _LATENT_NBYTES}
    return rates


def _dense(weight_s: float, memory_bytes_s: float, peak: float) -> dict[int, float]:
    """Unpacking takes `weight_s` less the read of what it leaves; the product is then one of memory or arithmetic."""
    read_s = 2 / memory_bytes_s
    seconds = {rows: weight_s - read_s + max(read_s, 2 * rows / peak) for rows in (1, 64, 256, 1024, 8192)}
    return {rows: 2 * rows / each for rows, each in seconds.items()}


# Bytes per second of a lane of PCIe, one direction, by generation.
_LANE_BYTES_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9}
# What a host's memory is taken to read where nobody measured it: 0.78 of the 51.2 GB/s of two channels of DDR4-3200.
_RAM_BYTES_S = 4e10


@dataclass(frozen=True, slots=True)
class Preset:
    """`bandwidth` of its memory in GB/s, `tflops` of fp16 products with float32 sums, without sparsity, `ghz` its boost
    clock, `pcie` the generation and lanes of its link."""

    gib: int
    bandwidth: float
    tflops: float
    processors: int
    ghz: float
    capability: str
    pcie: tuple[int, int]


PRESETS: Mapping[str, Preset] = {
    "GTX 1660 6GB": Preset(6, 192, 10.1, 22, 1.785, "7.5", (3, 16)),
    "GTX 1660 Super 6GB": Preset(6, 336, 10.1, 22, 1.785, "7.5", (3, 16)),
    "GTX 1660 Ti 6GB": Preset(6, 288, 10.9, 24, 1.77, "7.5", (3, 16)),
    "RTX 2060 6GB": Preset(6, 336, 25.8, 30, 1.68, "7.5", (3, 16)),
    "RTX 2060 12GB": Preset(12, 336, 28.7, 34, 1.65, "7.5", (3, 16)),
    "RTX 2060 Super 8GB": Preset(8, 448, 28.7, 34, 1.65, "7.5", (3, 16)),
    "RTX 2070 8GB": Preset(8, 448, 29.9, 36, 1.62, "7.5", (3, 16)),
    "RTX 2070 Super 8GB": Preset(8, 448, 36.3, 40, 1.77, "7.5", (3, 16)),
    "RTX 2080 8GB": Preset(8, 448, 40.3, 46, 1.71, "7.5", (3, 16)),
    "RTX 2080 Super 8GB": Preset(8, 496, 44.6, 48, 1.815, "7.5", (3, 16)),
    "RTX 2080 Ti 11GB": Preset(11, 616, 53.8, 68, 1.545, "7.5", (3, 16)),
    "TITAN RTX 24GB": Preset(24, 672, 130.5, 72, 1.77, "7.5", (3, 16)),
    "RTX 3050 6GB": Preset(6, 168, 13.5, 18, 1.47, "8.6", (4, 8)),
    "RTX 3050 8GB": Preset(8, 224, 18.2, 20, 1.777, "8.6", (4, 8)),
    "RTX 3060 8GB": Preset(8, 240, 25.5, 28, 1.777, "8.6", (4, 16)),
    "RTX 3060 12GB": Preset(12, 360, 25.5, 28, 1.777, "8.6", (4, 16)),
    "RTX 3060 Ti 8GB": Preset(8, 448, 32.4, 38, 1.665, "8.6", (4, 16)),
    "RTX 3070 8GB": Preset(8, 448, 40.6, 46, 1.725, "8.6", (4, 16)),
    "RTX 3070 Ti 8GB": Preset(8, 608, 43.5, 48, 1.77, "8.6", (4, 16)),
    "RTX 3080 10GB": Preset(10, 760, 59.5, 68, 1.71, "8.6", (4, 16)),
    "RTX 3080 12GB": Preset(12, 912, 61.3, 70, 1.71, "8.6", (4, 16)),
    "RTX 3080 Ti 12GB": Preset(12, 912, 68.2, 80, 1.665, "8.6", (4, 16)),
    "RTX 3090 24GB": Preset(24, 936, 71.2, 82, 1.695, "8.6", (4, 16)),
    "RTX 3090 Ti 24GB": Preset(24, 1008, 80.0, 84, 1.86, "8.6", (4, 16)),
    "RTX 4060 8GB": Preset(8, 272, 30.2, 24, 2.46, "8.9", (4, 8)),
    "RTX 4060 Ti 8GB": Preset(8, 288, 44.1, 34, 2.535, "8.9", (4, 8)),
    "RTX 4060 Ti 16GB": Preset(16, 288, 44.1, 34, 2.535, "8.9", (4, 8)),
    "RTX 4070 12GB": Preset(12, 504, 58.3, 46, 2.475, "8.9", (4, 16)),
    "RTX 4070 Super 12GB": Preset(12, 504, 71.0, 56, 2.475, "8.9", (4, 16)),
    "RTX 4070 Ti 12GB": Preset(12, 504, 80.2, 60, 2.61, "8.9", (4, 16)),
    "RTX 4070 Ti Super 16GB": Preset(16, 672, 88.2, 66, 2.61, "8.9", (4, 16)),
    "RTX 4080 16GB": Preset(16, 717, 97.5, 76, 2.505, "8.9", (4, 16)),
    "RTX 4080 Super 16GB": Preset(16, 736, 104.4, 80, 2.55, "8.9", (4, 16)),
    "RTX 4090 24GB": Preset(24, 1008, 165.2, 128, 2.52, "8.9", (4, 16)),
    "RTX 4090 D 24GB": Preset(24, 1008, 147.1, 114, 2.52, "8.9", (4, 16)),
    "RTX 5050 8GB": Preset(8, 320, 26.3, 20, 2.57, "12.0", (5, 8)),
    "RTX 5060 8GB": Preset(8, 448, 38.4, 30, 2.497, "12.0", (5, 8)),
    "RTX 5060 Ti 8GB": Preset(8, 448, 47.4, 36, 2.572, "12.0", (5, 8)),
    "RTX 5060 Ti 16GB": Preset(16, 448, 47.4, 36, 2.572, "12.0", (5, 8)),
    "RTX 5070 12GB": Preset(12, 672, 61.7, 48, 2.512, "12.0", (5, 16)),
    "RTX 5070 Ti 16GB": Preset(16, 896, 87.9, 70, 2.452, "12.0", (5, 16)),
    "RTX 5080 16GB": Preset(16, 960, 112.6, 84, 2.617, "12.0", (5, 16)),
    "RTX 5090 32GB": Preset(32, 1792, 209.5, 170, 2.407, "12.0", (5, 16)),
    "T1000 8GB": Preset(8, 160, 5.0, 14, 1.395, "7.5", (3, 16)),
    "Quadro RTX 4000 8GB": Preset(8, 416, 57.0, 36, 1.545, "7.5", (3, 16)),
    "Quadro RTX 5000 16GB": Preset(16, 448, 89.2, 48, 1.815, "7.5", (3, 16)),
    "Quadro RTX 6000 24GB": Preset(24, 672, 130.5, 72, 1.77, "7.5", (3, 16)),
    "Quadro RTX 8000 48GB": Preset(48, 672, 130.5, 72, 1.77, "7.5", (3, 16)),
    "RTX A2000 6GB": Preset(6, 288, 31.9, 26, 1.2, "8.6", (4, 16)),
    "RTX A2000 12GB": Preset(12, 288, 31.9, 26, 1.2, "8.6", (4, 16)),
    "RTX A4000 16GB": Preset(16, 448, 76.7, 48, 1.56, "8.6", (4, 16)),
    "RTX A4500 20GB": Preset(20, 640, 94.6, 56, 1.65, "8.6", (4, 16)),
    "RTX A5000 24GB": Preset(24, 768, 111.1, 64, 1.695, "8.6", (4, 16)),
    "RTX A5500 24GB": Preset(24, 768, 136.4, 80, 1.665, "8.6", (4, 16)),
    "RTX A6000 48GB": Preset(48, 768, 154.8, 84, 1.8, "8.6", (4, 16)),
    "RTX 2000 Ada 16GB": Preset(16, 224, 48.0, 22, 2.13, "8.9", (4, 8)),
    "RTX 4000 SFF Ada 20GB": Preset(20, 280, 76.9, 48, 1.565, "8.9", (4, 16)),
    "RTX 4000 Ada 20GB": Preset(20, 360, 106.9, 48, 2.175, "8.9", (4, 16)),
    "RTX 4500 Ada 24GB": Preset(24, 432, 158.5, 60, 2.58, "8.9", (4, 16)),
    "RTX 5000 Ada 32GB": Preset(32, 576, 261.1, 100, 2.55, "8.9", (4, 16)),
    "RTX 5880 Ada 48GB": Preset(48, 960, 277.1, 110, 2.46, "8.9", (4, 16)),
    "RTX 6000 Ada 48GB": Preset(48, 960, 364.2, 142, 2.505, "8.9", (4, 16)),
    "RTX PRO 2000 16GB": Preset(16, 288, 67.9, 34, 1.95, "12.0", (5, 8)),
    "RTX PRO 4000 SFF 24GB": Preset(24, 432, 95.8, 70, 1.337, "12.0", (5, 8)),
    "RTX PRO 4000 24GB": Preset(24, 672, 187.6, 70, 2.617, "12.0", (5, 16)),
    "RTX PRO 4500 32GB": Preset(32, 896, 219.7, 82, 2.617, "12.0", (5, 16)),
    "RTX PRO 5000 48GB": Preset(48, 1344, 294.8, 110, 2.617, "12.0", (5, 16)),
    "T4 16GB": Preset(16, 320, 65.0, 40, 1.59, "7.5", (3, 16)),
    "L4 24GB": Preset(24, 300, 121.0, 58, 2.04, "8.9", (4, 16)),
    "L20 48GB": Preset(48, 864, 118.7, 92, 2.52, "8.9", (4, 16)),
    "L40S 48GB": Preset(48, 864, 366.4, 142, 2.52, "8.9", (4, 16)),
    "A2 16GB": Preset(16, 200, 18.1, 10, 1.77, "8.6", (4, 8)),
    "A10 24GB": Preset(24, 600, 125.0, 72, 1.695, "8.6", (4, 16)),
    "A10G 24GB": Preset(24, 600, 70.0, 80, 1.71, "8.6", (4, 16)),
    "A30 24GB": Preset(24, 933, 165.2, 56, 1.44, "8.0", (4, 16)),
    "A40 48GB": Preset(48, 696, 149.7, 84, 1.74, "8.6", (4, 16)),
    "A100 40GB": Preset(40, 1555, 312.0, 108, 1.41, "8.0", (4, 16)),
    "H100 80GB": Preset(80, 3350, 989.0, 132, 1.83, "9.0", (5, 16)),
}
# A card that is described, such as "My card: 16GiB, 500GB/s, 60TFLOP/s, pcie4x8": what is not said is as in a GeForce
# of 2020, whose multiprocessors take 512 operations of fp16 in a clock.
DESCRIBED = "NAME: 16GiB, 500GB/s, 60TFLOP/s, pcie4x8"
_CAPABILITY, _GHZ, _OPERATIONS = "8.6", 1.7, 512
_PART = {
    "gib": re.compile(r"(\d+)gi?b"),
    "bandwidth": re.compile(r"(\d+(?:\.\d+)?)gb/s"),
    "tflops": re.compile(r"(\d+(?:\.\d+)?)tflop/?s"),
    "pcie": re.compile(r"pcie([345])x(1|2|4|8|16)"),
}


def find_preset(text: str) -> tuple[str, Preset]:
    """The name and the figures of the GPU that `text` describes, or of the preset that it means.

    Of a name case, spaces, "NVIDIA GeForce" and "Generation" do not matter, and neither does the memory where only one
    card has the name. Raises ValueError, naming the nearest, or what a description lacks.
    """
    if ":" in text:
        return _described(text)
    wanted = _plain(text)
    exact = [name for name in PRESETS if _plain(name) == wanted]
    same = exact or [name for name in PRESETS if _plain(name.rpartition(" ")[0]) == wanted]
    if len(same) == 1:
        return same[0], PRESETS[same[0]]
    near = same or difflib.get_close_matches(text, list(PRESETS), n=1, cutoff=0.3)
    hint = f"nearest: {', '.join(near)}; known" if near else "known"
    raise ValueError(f'no preset for the GPU {text!r}; {hint} are {", ".join(PRESETS)}; or describe it: "{DESCRIBED}"')


def _described(text: str) -> tuple[str, Preset]:
    name, _, parts = text.partition(":")
    found: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (each.strip().lower().replace(" ", "") for each in parts.split(","))):
        known = [(key, match.groups()) for key, pattern in _PART.items() if (match := pattern.fullmatch(part))]
        if not known or known[0][0] in found:
            raise ValueError(f'{part!r} in {text!r} says nothing of a GPU, or says it twice; wanted "{DESCRIBED}"')
        found |= known
    if missing := _PART.keys() - found.keys():
        raise ValueError(f'{text!r} lacks {", ".join(sorted(missing))}; wanted "{DESCRIBED}"')
    gib, bandwidth, tflops = (float(found[key][0]) for key in ("gib", "bandwidth", "tflops"))
    if not min(gib, bandwidth, tflops) > 0:
        raise ValueError(f'{text!r} has a figure of 0; wanted "{DESCRIBED}"')
    generation, lanes = map(int, found["pcie"])
    processors = max(1, round(tflops * 1e3 / (_GHZ * _OPERATIONS)))
    link = (generation, lanes)
    return name.strip() or "GPU", Preset(int(gib), bandwidth, tflops, processors, _GHZ, _CAPABILITY, link)


def with_preset(name: str, preset: Preset, hardware: Hardware, profile: Machine | None) -> Machine:
    """A machine with this GPU in place of its own; what was measured of the rest stays."""
    generation, lanes = preset.pcie
    link = LINK_SHARE * lanes * _LANE_BYTES_S[generation]
    memory, peak = MEMORY_SHARE * preset.bandwidth * 1e9, PEAK_SHARE * preset.tflops * 1e12
    issued = ISSUED_A_CLOCK * preset.processors * preset.ghz * 1e9
    major, minor = map(int, preset.capability.split("."))
    gpu = GpuInfo(name, preset.gib * GIB, preset.capability, preset.processors)
    return replace(
        profile or Machine(hardware, _RAM_BYTES_S),
        hardware=replace(hardware, gpus=(gpu,)),
        link=Link(link / 2, link),
        pin=None,
        device_memory_bytes_s=memory,
        device_flop_s=flop_rates((major, minor), memory, issued, peak, preset.processors),
        device_overheads=OVERHEADS,
        kernel_lacks=Lacks()._asdict(),
    )


# Words of full names that say nothing more of a card.
_MAKERS = ("nvidia", "geforce", "generation", "blackwell")


def _plain(text: str) -> str:
    return "".join(word for word in text.lower().split() if word not in _MAKERS)
