"""What happens before the first row of a job, and how long it takes: weights read, quantized, written. Torch-free.

A step takes the bytes of the checkpoint over the rate of one thread; all threads pack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...offload.machine.profile import Machine
from ...quant.formats.format import ASSUMED, get_format
from ...quant.native import library
from ..shape.model_shape import ModelShape
from ..shape.shards import checkpoint_nbytes, copied_nbytes, resident_nbytes, tables_nbytes, widened_nbytes
from .candidate import WeightFootprint
from .placement import Plan

# How corrections are named.
GENERATING, LOADING = "generating", "loading"
# Of a machine that nobody measured (docs/dev/internals.md).
SLOW_READ_BYTES_S = 5e8
SLOW_WRITE_BYTES_S = 2e8
SLOW_CONVERT_BYTES_S = 4e8
SLOW_PACK_BYTES_S = {name: each.pack_bytes_s for name, each in ASSUMED.items()}
NATIVE_PACK_BYTES_S = {name: each.native_pack_bytes_s for name, each in ASSUMED.items()}


def assumed_pack_bytes_s() -> Mapping[str, float]:
    """Of a machine that nobody measured, by weight format; the library counts where it is installed here."""
    return NATIVE_PACK_BYTES_S if library.available() else SLOW_PACK_BYTES_S


@dataclass(frozen=True, slots=True)
class LoadingSpeeds:
    """Bytes per second: of a checkpoint read and converted by one thread, packed (by weight format) by all, of prepared
    weights written, and of prepared weights read."""

    read_bytes_s: float = SLOW_READ_BYTES_S
    convert_bytes_s: float = SLOW_CONVERT_BYTES_S
    pack_bytes_s: Mapping[str, float] = field(default_factory=assumed_pack_bytes_s)
    write_bytes_s: float = SLOW_WRITE_BYTES_S

    def packing(self, quant: str) -> float:
        """Bytes packed per second in a format; what is kept is copied, like floats."""
        alike = get_format(get_format(quant).parts[1]).rates
        return self.pack_bytes_s.get(quant, self.pack_bytes_s[alike if "+" in quant else "none"])

    @classmethod
    def of(cls, machine: Machine | None) -> LoadingSpeeds:
        """Slow ones for what was not measured."""
        if machine is None:
            return cls()
        disk, loading = machine.disk, machine.loading
        return cls(
            min(disk.one_thread_bytes_s, disk.bytes_s) if disk else SLOW_READ_BYTES_S,
            loading.convert_bytes_s if loading else SLOW_CONVERT_BYTES_S,
            {**assumed_pack_bytes_s(), **(loading.pack_bytes_s if loading else {})},
            (disk and disk.write_bytes_s) or SLOW_WRITE_BYTES_S,
        )


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is on disk of a model already: bytes of prepared weights by weight format, finished or begun.

    `is_model` says that the prepared weights are the MODEL itself, so that no checkpoint is read.
    """

    nbytes: Mapping[str, int] = field(default_factory=dict)
    is_model: bool = False

    @property
    def for_choice(self) -> Prepared:
        """What a choice of formats may depend on: not on what happens to be there from earlier jobs."""
        return Prepared({}, self.is_model)


@dataclass(frozen=True, slots=True)
class LoadingCost:
    """Seconds of each step before the first row, and the bytes that are written to disk."""

    read_s: float
    quantize_s: float
    write_s: float
    first_passes_s: float
    written_nbytes: int

    @property
    def seconds(self) -> float:
        return self.read_s + self.quantize_s + self.write_s + self.first_passes_s


def store_nbytes(shape: ModelShape, plan: Plan) -> int:
    """Bytes of all prepared weights of a plan."""
    return plan.weights_nbytes + resident_nbytes(shape, plan.dtype)


def loading_cost(
    shape: ModelShape,
    plan: Plan,
    speeds: LoadingSpeeds,
    disk_bytes_s: float,
    prepared: Prepared,
    passes_s: tuple[float, float],
) -> LoadingCost:
    """What loading takes under `plan`. `passes_s` are seconds of the rehearsed pass, and of the one that measures the
    offsets of quantized keys."""
    rehearsed_s, offsets_s = passes_s
    store, there = store_nbytes(shape, plan), prepared.nbytes.get(plan.quant, 0)
    streams = prepared.is_model or plan.streams
    kept = plan.held_nbytes if plan.staging is None else plan.held_nbytes + plan.staging.staged_nbytes
    if prepared.is_model or (streams and there >= store):
        quantized = "int" in plan.kv
        return LoadingCost(kept / disk_bytes_s, 0.0, 0.0, rehearsed_s + (offsets_s if quantized else 0.0), 0)
    missing = 1 - min(1.0, there / store) if streams else 1.0
    named = streams and not copied_nbytes(shape, plan.quant, plan.dtype)
    making = _making_s(shape, plan.quant, speeds, disk_bytes_s if named else None, streams)
    read_s, quantize_s = (missing * each for each in making)
    if not streams:
        return LoadingCost(read_s, quantize_s, 0.0, rehearsed_s + (offsets_s if "int" in plan.kv else 0.0), 0)
    written = round(missing * copied_nbytes(shape, plan.quant, plan.dtype))
    # The offsets of keys are measured with the new store, in a pass that reads all of it.
    offsets_s = max(offsets_s, store / disk_bytes_s)
    read_s += kept / disk_bytes_s
    return LoadingCost(read_s, quantize_s, written / speeds.write_bytes_s, rehearsed_s + offsets_s, written)


def _making_s(
    shape: ModelShape, quant: str, speeds: LoadingSpeeds, named_bytes_s: float | None, streams: bool
) -> tuple[float, float]:
    """Seconds of reading the checkpoint, and of packing its weights: none where they are named in their files, which
    all threads read at `named_bytes_s`, for checksums. Tables stay where they are, unless a store is made."""
    nbytes, tables = checkpoint_nbytes(shape), tables_nbytes(shape)
    if named_bytes_s is not None:
        return nbytes / named_bytes_s, 0.0
    nbytes -= 0 if streams else tables
    # Rates of converting and packing are of floats, also where the files hold fewer bits.
    widened = widened_nbytes(shape) - tables
    return nbytes / speeds.read_bytes_s, widened / speeds.convert_bytes_s + widened / speeds.packing(quant)


def least_loading_s(
    weights: WeightFootprint, streams: bool, speeds: LoadingSpeeds, disk_bytes_s: float, prepared: Prepared
) -> float:
    """No plan with these weights is predicted to load faster; `streams` where some are read from disk in every pass."""
    if prepared.is_model:
        return 0.0
    named = streams and not weights.copied_nbytes
    seconds = sum(_making_s(weights.shape, weights.quant, speeds, disk_bytes_s if named else None, streams))
    if not streams:
        return seconds
    store = weights.nbytes + resident_nbytes(weights.shape, weights.dtype)
    return seconds + weights.copied_nbytes / speeds.write_bytes_s + store / disk_bytes_s
