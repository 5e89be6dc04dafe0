"""What a pass costs a GPU and the thread that drives it, from counts: the one source of these constants. Torch-free.

Kernels are counted in instructions, torch's operations in launches and bytes, the driver in calls. Data sheets give the
rates (presets.py). A better kernel changes a count here, and nothing else. docs/tables/plans.md says what was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from .profile import ATTENTION, LATENTS, TOGETHER, FlopRates, Overheads

# Four schedulers of a multiprocessor start an instruction of 32 threads each in a clock, in every GPU since Volta.
ISSUED_A_CLOCK = 128
# What kernels reached of a data sheet's figures on an H100, the one GPU measured so far (bench/results/gpu.md): of the
# memory 0.68 to 0.77, which are 0.75 to 0.85 of a copy's 3.0 of 3.35 TB/s; of instructions 0.24 to 0.65, nf4 0.40; of
# the tensor cores' peak 0.52 to 0.76. Copies over its link reached 0.87; 0.8 is for 4 MiB and less.
MEMORY_SHARE, ISSUE_SHARE, PEAK_SHARE, LINK_SHARE = 0.7, 0.4, 0.5, 0.8

# Instructions for a weight by format and rows of a tile, with which grouped products decode gate and up, by the major
# compute capability (8: the worst of 8.0, 8.9 and 12.0); and for an element of keys and values, of decoding tokens and
# of prompts. From `python -m matrix.compiling.instructions 80 89 90 120`, Triton 3.7.1.
_WEIGHTS: Mapping[int, Mapping[str, tuple[float, float, float]]] = {
    8: {"none": (1.7, 2.4, 4.5), "int8": (4.5, 5.0, 26.9), "nf4": (12.7, 14.0, 18.4), "mxfp4": (14.2, 15.3, 27.9)},
    9: {"none": (1.6, 2.2, 3.4), "int8": (4.2, 5.1, 5.0), "nf4": (12.9, 13.6, 9.6), "mxfp4": (14.0, 15.0, 27.4)},
}
_DECODE = {"native": 5.2, "int8": 10.0, "int4": 11.5}
_PROMPTS = {
    8: {"native": 11.3, "int8": 19.5, "int4": 34.3},
    9: {"native": 7.2, "int8": 12.1, "int4": 20.4},
}
_TILE_ROWS = (16, 32, 64)
# Rows of queries for which prompts decode an element once.
_PROMPT_ROWS = 64
# Decode rates are per operation of attention in which this many query heads share a key (calibration/pass_rates.py).
SHARED_HEADS = 4
# Bytes of a weight by format, with its scales; and those that torch moves to multiply by it where no kernel does:
# unpacked, widened, read (tests/runtime/plan/test_device_costs.py).
WEIGHT_NBYTES = {"none": 2.0, "int8": 1.0, "int4": 0.63, "nf4": 0.53, "mxfp4": 0.53}
DENSE_NBYTES = {"none": 2.0, "int8": 5.0, "int4": 12.9, "nf4": 4.6, "mxfp4": 4.6}
# Latents are attended by torch: an element is unpacked, widened to float32, and read twice.
_LATENT_NBYTES = 14.0

# Python of an operation of torch: 2.2 us on a Zen 5 of 2025 (attention and norms of a layer, 52 operations in 115 us);
# other processors take about half as long again. A call of CUDA's driver: 5 us for a launch (NVIDIA's figure for an
# empty kernel is 2 to 5 us of the submitting thread), 1.2 us for events and copies.
SLOWER = 1.5
LAUNCH_S = SLOWER * 2.2e-6 + 5e-6
CALL_S = 1.2e-6
# Launches of a layer with streamed experts and prompts (tests/device/host_cost.json), of which some 20 copy; where
# torch computes attention it takes as many times more.
LAYER_LAUNCHES, TORCH_ATTENTION = 116, 2.35
# An expert that torch computes: aten's operations of its two products, of int8 and nf4 (int4's are 24).
EXPERT_LAUNCHES = 12
# An expert that streams, in groups of four, as they are when the host is what passes wait for: cache, order, lane 26 us
# and a quarter of a grouped product's 50 us (`python -m bench.host_cost --lane cuda`, Zen 5); 24 calls, and a quarter
# of two launches by Triton, three uploads and an allocation.
ARRIVAL_S = SLOWER * (26e-6 + 50e-6 / 4) + 24 * CALL_S + (2 * 18e-6 + 4 * 5e-6) / 4
# A sequence in a pass: engine 10 us, tables of pages 15 us (Zen 5).
SEQUENCE_S = SLOWER * 25e-6
# Operations of a tile of the sampler whose rows are drawn from the best k, and the logits of a tile (Sampler).
SAMPLER_LAUNCHES, SAMPLER_LOGITS = 62, (24 << 20) // 96
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


def sampling_s(rows: float, vocab: int) -> float:
    """Seconds of the host to draw a token for each of `rows`, tile by tile."""
    return rows / max(1, SAMPLER_LOGITS // vocab) * SAMPLER_LAUNCHES * LAUNCH_S


def flop_rates(capability: tuple[int, int], memory_bytes_s: float, issued_s: float, peak: float) -> FlopRates:
    """FLOP/s of kernels by name and rows, on a GPU whose memory gives `memory_bytes_s`, whose multiprocessors start
    `issued_s` instructions of a thread in a second, and whose products take `peak` FLOP/s."""
    # Below 8.0 no kernel multiplies with tensor cores. Those of 12.0 have the instructions of 8.0.
    major = 0 if capability < (8, 0) else 9 if capability[0] in (9, 10) else 8
    rates: dict[str, dict[int, float]] = {
        name: _dense(nbytes / memory_bytes_s, memory_bytes_s, peak) for name, nbytes in DENSE_NBYTES.items()
    }
    for name, counts in _WEIGHTS.get(major, {}).items():
        seconds = {1: max(WEIGHT_NBYTES[name] / memory_bytes_s, counts[0] / issued_s)}
        for rows, count in zip(_TILE_ROWS, counts, strict=True):
            seconds[rows] = max(seconds[1], count / issued_s, 2 * rows / peak)
        rates[TOGETHER.format(name)] = {rows: 2 * rows / each for rows, each in seconds.items()}
    for kind, count in _DECODE.items():
        decoded = 2 * SHARED_HEADS * issued_s / count
        prompts = issued_s / _PROMPTS[major][kind] * 2 * _PROMPT_ROWS if major in _PROMPTS else decoded
        rates[ATTENTION.format(kind)] = {1: decoded, _PROMPT_ROWS: min(peak, prompts)}
    native = rates.pop(ATTENTION.format("native"))
    rates |= {ATTENTION.format(name): native for name in ("bf16", "fp16", "fp32")}
    # Keys of one, values of the other.
    mixed = [rates[ATTENTION.format(name)] for name in ("int8", "int4")]
    rates[ATTENTION.format("int8/int4")] = {rows: 2 / sum(1 / each[rows] for each in mixed) for rows in mixed[0]}
    rates[LATENTS] = {1: 2 * SHARED_HEADS * memory_bytes_s / _LATENT_NBYTES}
    return rates


def _dense(weight_s: float, memory_bytes_s: float, peak: float) -> dict[int, float]:
    """Unpacking takes `weight_s` less the read of what it leaves; the product is then one of memory or arithmetic."""
    read_s = 2 / memory_bytes_s
    seconds = {rows: weight_s - read_s + max(read_s, 2 * rows / peak) for rows in (1, 64, 256, 1024, 8192)}
    return {rows: 2 * rows / each for rows, each in seconds.items()}
