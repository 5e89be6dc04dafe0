"""What one pass over the weights costs under a plan: seconds of every resource it uses. Closed form, torch-free."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from ...moe.expected_rows import padded_rows, wanted_by
from ..kv.spec import KVSpec
from ..shape.model_shape import ExpertsShape, Matrix, ModelShape
from ..shape.shards import ModelShards
from .placement import DEEP_RING_EXPERTS, Placement, largest_expert
from .plan import Plan
from .rates import ATTENTION, NUMBER_NBYTES, TOGETHER, WIDE, Curve, Rates

# With a ring of hardly any expert half of what disk and compute could do together they do in turns: what was measured
# from 3 experts to 24, drawn on to none (docs/performance.md).
MOST_UNHIDDEN = 0.5


@dataclass(frozen=True, slots=True)
class PassLoad:
    """One pass: `decoding` sequences with a token each, and `prompts` tokens of prompts, `chunk` of one at a time.

    `started` prompts end in it, and get logits too. The rest is how many tokens back a mean token of each kind looks.
    """

    decoding: float
    prompts: float
    chunk: float
    started: float
    decoding_back: float
    prompts_back: float

    @property
    def tokens(self) -> float:
        return self.decoding + self.prompts

    @property
    def sequences(self) -> float:
        return self.decoding + self.prompts / max(1.0, self.chunk)

    @property
    def sampled(self) -> float:
        return self.decoding + self.started


@dataclass(frozen=True, slots=True)
class PassCost:
    """Seconds that a pass keeps each resource busy, which overlap, and the bytes that cross links.

    `unhidden` is the share of the shorter of disk and compute that overlaps with nothing.
    """

    disk_s: float
    link_s: float
    compute_s: float
    disk_nbytes: float
    link_nbytes: float
    unhidden: float


class _LayerKind:
    """Layers that are alike, and how many they are."""

    def __init__(self, count: int, dense: tuple[Matrix, ...], experts: ExpertsShape | None) -> None:
        self.count = count
        self.dense = dense
        self.experts = experts
        self.dense_numel = sum(matrix.numel for matrix in dense)
        self.expert_numel = experts.numel if experts else 0

    @property
    def width(self) -> int:
        """Numbers of one token's queries of all heads: what the projection behind attention takes in."""
        widths = [each.cols for each in self.dense if each.name.rpartition(".")[2] in ("o_proj", "out_proj", "dense")]
        return max(widths, default=max((each.cols for each in self.dense), default=0))


class Formats(Protocol):
    """What decides how fast a pass computes, apart from its size: a plan has these, a draft before it is placed too."""

    @property
    def dtype(self) -> str: ...
    @property
    def quant(self) -> str: ...
    @property
    def compute(self) -> str: ...
    @property
    def kv(self) -> str: ...
    @property
    def kv_block(self) -> int: ...


class ModelWork:
    """A model packed in one weight format, its layers grouped by kind: usually one or two."""

    def __init__(self, shape: ModelShape, shards: ModelShards) -> None:
        self.shape = shape
        self.shards = shards
        kinds = Counter((layer.dense, layer.experts) for layer in shape.layers)
        self.kinds = [_LayerKind(count, *kind) for kind, count in kinds.items()]
        self.attention_width = sum(kind.count * kind.width for kind in self.kinds) / len(shape.layers)
        shares = [kind.experts.per_token / kind.experts.count for kind in self.kinds if kind.experts]
        self._rarest = min(shares, default=1.0)

    def least_wanted(self, tokens: float) -> float:
        """Of any byte of weights, the least probability that a pass of so many tokens needs it."""
        return wanted_by(tokens, self._rarest)


class PassCosts:
    """Costs of passes under one plan."""

    def __init__(self, model: ModelWork, plan: Plan, rates: Rates) -> None:
        shape, shards = model.shape, model.shards
        self._rates = rates
        self._computing = ComputeCosts(model, plan, rates)
        self._disk = _Streamed(shape, shards, plan.placement if plan.device is None else plan.device.staging)
        self._link = None if plan.device is None else _Streamed(shape, shards, plan.placement)
        # On a device neither was measured.
        self._unhidden = unhidden(shards, plan.placement) if plan.device is None else 0.0
        self._arrival_s = rates.overheads.arrival_s if plan.device is None else 0.0

    def cost(self, load: PassLoad) -> PassCost:
        disk, link = self._disk.nbytes(load.tokens), self._link.nbytes(load.tokens) if self._link else 0
        rates = self._rates
        compute = self._computing.seconds(load) + self._arrival_s * self._disk.arrivals(load.tokens)
        return PassCost(disk / rates.disk_bytes_s, link / rates.link_bytes_s, compute, disk, link, self._unhidden)


def unhidden(shards: ModelShards, placement: Placement) -> float:
    """What a ring this small keeps from overlapping, as a share; 0 where no expert streams."""
    if not placement.expert_ring:
        return 0.0
    return MOST_UNHIDDEN * max(0.0, 1 - placement.expert_ring / largest_expert(shards) / DEEP_RING_EXPERTS)


class ComputeCosts:
    """What passes compute, wherever their weights come from."""

    def __init__(self, model: ModelWork, formats: Formats, rates: Rates) -> None:
        self._shape = model.shape
        self._overheads = rates.overheads
        self._memory_bytes_s = rates.memory_bytes_s
        self._kinds = model.kinds
        self._width = model.attention_width
        self._groups = [_Looked.of(KVSpec(group, formats.kv, formats.kv_block)) for group in model.shape.kv_groups]
        name = formats.quant if formats.compute == "auto" else f"{formats.quant}x{formats.compute}"
        # Kernels on codes are for bfloat16; others widen, then multiply in their own precision.
        name = name if formats.dtype == "bf16" else WIDE
        self._alone, self._together = rates.curve(name), rates.curve(TOGETHER.format(name), name)
        self._attending = rates.curve(ATTENTION.format(formats.kv), formats.quant)

    def seconds(self, load: PassLoad) -> float:
        compute = sum(kind.count * self._layer(kind, load) for kind in self._kinds)
        return compute + self._attention(load) + self._head(load)

    def _layer(self, kind: _LayerKind, load: PassLoad) -> float:
        tokens, overheads = load.tokens, self._overheads
        seconds = _products(self._alone, kind.dense_numel, tokens)
        seconds += overheads.layer_s + overheads.sequence_s * load.sequences
        seconds += overheads.token_s * tokens + tokens * self._shape.hidden * NUMBER_NBYTES / self._memory_bytes_s
        if kind.experts is None:
            return seconds
        union = kind.experts.count * wanted_by(tokens, kind.experts.per_token / kind.experts.count)
        rows = padded_rows(max(1, round(tokens * kind.experts.per_token / union)))
        return seconds + _products(self._together, union * kind.expert_numel, rows) + overheads.expert_s * union

    def _attention(self, load: PassLoad) -> float:
        """Scores and sums over what tokens look back to. Keys and values are read once for a chunk."""
        decoding = self._looking(load.decoding, 1.0, load.decoding_back)
        return decoding + (self._looking(load.prompts, load.chunk, load.prompts_back) if load.prompts else 0.0)

    def _looking(self, tokens: float, chunk: float, back: float) -> float:
        rate, seconds = self._attending.at(chunk), 0.0
        for group in self._groups:
            seen = min(back, group.window or back)
            flop = 4 * tokens * seen * self._width
            read = tokens / max(1.0, chunk) * seen * group.token_nbytes
            seconds += group.num_layers * max(flop / rate, read / self._memory_bytes_s)
        return seconds

    def _head(self, load: PassLoad) -> float:
        head = self._shape.head
        numel = head.numel if head else self._shape.embedding_numel
        return _products(self._alone, numel, load.sampled)


def _products(rate: Curve, numel: float, rows: float) -> float:
    return 2 * rows * numel / rate.at(rows)


@dataclass(frozen=True, slots=True)
class _Looked:
    """Layers whose tokens look back equally far; `token_nbytes` of one layer's keys and values."""

    num_layers: int
    window: int | None
    token_nbytes: float

    @classmethod
    def of(cls, spec: KVSpec) -> _Looked:
        return cls(len(spec.group.layers), spec.group.window, spec.record_nbytes / spec.block)


class _Streamed:
    """Bytes that a pass brings over one link: dense shards that are not held, and wanted experts that are not."""

    def __init__(self, shape: ModelShape, shards: ModelShards, held: Placement) -> None:
        self._dense = sum(layer.dense.nbytes for layer in shards.layers[held.held_dense :])
        # By the share of a layer's experts that a token asks for: bytes, and how many.
        self._experts: Counter[float] = Counter()
        self._counts: Counter[float] = Counter()
        for layer, packed, count in zip(shape.layers, shards.layers, held.held_experts, strict=True):
            if layer.experts and packed.expert:
                share = layer.experts.per_token / layer.experts.count
                self._experts[share] += (packed.num_experts - count) * packed.expert.nbytes
                self._counts[share] += packed.num_experts - count

    def nbytes(self, tokens: float) -> float:
        return self._dense + sum(nbytes * wanted_by(tokens, share) for share, nbytes in self._experts.items())

    def arrivals(self, tokens: float) -> float:
        """Experts that come."""
        return sum(count * wanted_by(tokens, share) for share, count in self._counts.items())
