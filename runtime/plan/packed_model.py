"""What the searches of one question share: sizes of weight formats, and the least that any draft takes. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shape.model_shape import ModelShape
from .device_plan import DeviceRoom
from .draft import Draft, Packed
from .job import JobShape
from .pass_cost import ComputeCosts
from .plan import Plan
from .predict import Prediction, live_sequences, phases_of, predict
from .rates import Rates


@dataclass(frozen=True, slots=True, eq=False)
class Speed:
    """What predictions rest on: the machine's rates, and by weight format the factors that earlier runs taught."""

    rates: Rates = field(default_factory=Rates)
    factors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def predict(self, draft: Draft, plan: Plan, job: JobShape) -> Prediction:
        return predict(draft.packed.work, plan, job, self.rates, self.factors.get(plan.quant, {}))


@dataclass(frozen=True, slots=True)
class _Formats:
    """Of a draft, by the names that a plan has for them."""

    dtype: str
    quant: str
    compute: str
    kv: str
    kv_block: int


@dataclass(frozen=True, slots=True)
class _Passes:
    """`count` alike: seconds that each computes, and the least share of weights that are not held that it brings in."""

    count: float
    compute_s: float
    wanted: float


class PackedModel:
    """A model in the formats that are asked for; what no budget changes is worked out once."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self._packed: dict[tuple[object, ...], Packed] = {}
        self._passes: dict[tuple[object, ...], list[_Passes]] = {}

    def packed(self, quant: str, dtype: str, deterministic: bool, device: DeviceRoom | None) -> Packed:
        key = (quant, dtype, deterministic, device and (device.context_nbytes, device.gpu))
        if key not in self._packed:
            self._packed[key] = Packed(self.shape, quant, dtype, deterministic, device)
        return self._packed[key]

    def least_seconds(
        self, draft: Draft, compute: str, blocks: tuple[int, ...], room: int, job: JobShape, speed: Speed
    ) -> float:
        """No plan of the draft is predicted to take less, with a cache of `blocks` and `room` bytes for weights.

        At best all of the room holds weights and no resource waits for another. Of the rest every pass brings in at
        least the share that it wants of the experts that are wanted least.
        """
        packed, factors, rates = draft.packed, speed.factors.get(draft.packed.quant, {}), speed.rates
        missing = max(0, packed.nbytes - room)
        name, rate = ("link", rates.link_bytes_s) if packed.on_device else ("disk", rates.disk_bytes_s)
        moved, computed = missing / rate * factors.get(name, 1.0), factors.get("compute", 1.0)
        return sum(
            each.count * max(each.compute_s * computed, each.wanted * moved)
            for each in self._passes_of(draft, compute, blocks, job, speed)
        )

    def _passes_of(
        self, draft: Draft, compute: str, blocks: tuple[int, ...], job: JobShape, speed: Speed
    ) -> list[_Passes]:
        work, spec = draft.packed.work, draft.cache.specs[0]
        live = live_sequences(draft.cache.specs, blocks, draft.live, job)
        formats = _Formats(draft.packed.dtype, draft.packed.quant, compute, spec.format, spec.block)
        key = (speed, job, work, formats, draft.tokens_per_pass, live)
        if key not in self._passes:
            costs = ComputeCosts(work, formats, speed.rates)
            self._passes[key] = [
                _Passes(phase.passes, costs.seconds(phase.load), work.least_wanted(phase.load.tokens))
                for phase in phases_of(job, live, draft.tokens_per_pass)
            ]
        return self._passes[key]
