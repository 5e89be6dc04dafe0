"""Experts that the CPU computes beside the link to a device: their seconds, and how many of a pass. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from ...moe.division import MOST_ROWS, MOST_TOKENS, ExpertSeconds, divide
from ...moe.expected_rows import wanted_by, wanted_rows
from ...quant.formats.format import ROWS
from ...quant.matmul import row_layouts
from ..shape.model_shape import ModelShape
from ..shape.shards import ITEM_NBYTES, ModelShards, model_shards
from .placement import Placement
from .presets import CORE_FLOP_S, CPU_LAYER_S, EXPERT_FLOP_SHARE, EXPERT_READ_SHARE, FIRST_ROW_SHARE
from .rates import Rates

# Families whose experts have biases, which the CPU needs in host memory, too.
_BIASED = ("gpt_oss",)


def expert_seconds(shape: ModelShape, quant: str, dtype: str, rates: Rates) -> ExpertSeconds | None:
    """Seconds of a model's largest expert on the link and on the CPU; None where no kernel of the CPU reads all, or
    nothing is known of the CPU."""
    layouts = [layer.expert for layer in model_shards(shape, quant, dtype, ROWS).layers if layer.expert]
    if not rates.cores or not all(row_layouts.readable(*(m.layout for m in each.matrices)) for each in layouts):
        return None
    numel = max((layer.experts.numel for layer in shape.layers if layer.experts), default=0)
    nbytes = max((each.nbytes for each in layouts), default=0)
    # What copies leave of the memory.
    left = EXPERT_READ_SHARE * (rates.ram_bytes_s - rates.link_bytes_s)
    if not numel or left <= 0:
        return None
    flop_s = rates.cores * CORE_FLOP_S
    # Its result goes up.
    row_s = shape.hidden * ITEM_NBYTES[dtype] / rates.link_bytes_s
    return ExpertSeconds(
        link_s=nbytes / rates.link_bytes_s,
        read_s=max(nbytes / left, 2 * numel / (FIRST_ROW_SHARE * flop_s)) + row_s,
        row_s=2 * numel / (EXPERT_FLOP_SHARE * flop_s) + row_s,
        layer_s=CPU_LAYER_S,
    )


def host_nbytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of host memory for rows of the experts that the CPU computes: page-locked ones, and float32 between its
    matrices; and for biases."""
    experts = [layer.experts for layer in shape.layers if layer.experts]
    scratch = MOST_ROWS * 4 * max((each.up.cols + each.down.cols for each in experts), default=0)
    biases = sum(each.count * (each.up.rows + each.down.rows) for each in experts) * (shape.model_type in _BIASED)
    return (MOST_TOKENS + MOST_ROWS) * shape.hidden * ITEM_NBYTES[dtype] + scratch + biases * ITEM_NBYTES[dtype]


@dataclass(slots=True)
class Divided:
    """Of a pass: `experts` that the CPU computes in `seconds`, and `nbytes` of theirs that do not cross the link, in
    `layers`."""

    experts: float = 0.0
    seconds: float = 0.0
    nbytes: float = 0.0
    layers: float = 0.0


class DividedExperts:
    """The missing experts of passes, divided as the engine divides them: each is as likely as any, for every token."""

    def __init__(self, shards: ModelShards, held: Placement, seconds: ExpertSeconds | None) -> None:
        """No `seconds`: the CPU computes none."""
        self._seconds = seconds
        self._layers = held.missing_experts(shards) if seconds else {}

    def of(self, tokens: float) -> Divided:
        """Those of a pass of so many tokens."""
        found = Divided()
        if self._seconds is None or tokens > MOST_TOKENS:
            return found
        for (share, missing, nbytes), layers in self._layers.items():
            wanted = missing * wanted_by(tokens, share)
            # What is expected is between two whole numbers of experts.
            for experts, weight in ((int(wanted), 1 - wanted % 1), (int(wanted) + 1, wanted % 1)):
                rows = wanted_rows(max(1, round(tokens)), share, experts)
                if count := divide(rows, self._seconds)[0]:
                    found.experts += weight * layers * count
                    seconds = sum(map(self._seconds.on_cpu, rows[:count])) + self._seconds.layer_s
                    found.seconds += weight * layers * seconds
                    found.nbytes += weight * layers * count * nbytes
                    found.layers += weight * layers
        return found
