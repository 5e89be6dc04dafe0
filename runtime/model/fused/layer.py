"""A decoder layer by the library's steps: which layers these can compute, and the steps before and behind attention.

    hidden += o(attention(rotary(norm(q(x))), rotary(norm(k(x))), v(x)))    x = RMSNorm(hidden)
    hidden += sum of the chosen experts(x), weighed by softmax              x = RMSNorm(hidden)
        or of a dense layer down(activation(gate(x)) * up(x))

Layers are recognised by their modules and by what these compute: the name of a family is never asked for. What looks
like this and computes something else fails the self-test (selftest.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from ....moe.expert import ExpertGroups, HeldExperts, compute_experts, group_by_expert
from ....quant.formats.format import TILES
from ....quant.kernels.operands import Gate, recognise
from ....quant.matmul import steps
from ....quant.matmul.matmul import ALL_ROWS, ParallelMatmul
from ....quant.matmul.row_layouts import takes_floats
from ....quant.matmul.steps import HeadRows, NormWeight, Routed, Step, Steps
from ....quant.matmul.tiled import ACTIVATIONS, MOST_ROWS, native_product
from ....quant.native.library import NativeExpert
from ....quant.scratch import fused_row_nbytes, row_nbytes
from ....quant.tensor import PackedTensor
from ...attention.protocol import AttentionCall
from ...shape.read import is_router
from ..attention_seam import PackedPass
from ..experts_seam import RESCALE, PackedExperts
from ..weights_seam import PackedLinear, as_rms_norm, close, is_row_wise_norm

# The kernels read this many elements at a time.
_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a layer: `linears` are q, k, v, o, and of a layer without a mixture gate, up, down."""

    norms: tuple[NormWeight, NormWeight]
    head_norms: tuple[NormWeight | None, NormWeight | None]
    linears: tuple[PackedLinear, ...]
    head_dim: int
    gate: Gate
    mixture: Mixture | None

    @property
    def hidden_size(self) -> int:
        return self.shapes[0][1]

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of the linears' matrices: rows and columns."""
        return [(linear.packed.shape[0], linear.packed.shape[1]) for linear in self.linears]

    @property
    def num_chosen(self) -> int:
        """How many outputs the feed-forward block adds up for a row."""
        return self.mixture.num_chosen if self.mixture else 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """E experts of which `num_chosen` are chosen for a row by `router` [E, D]; `softmax_chosen`: weights sum to 1.

    `held` are all of them; None where experts stream, which `module` computes.
    """

    router: torch.Tensor
    num_chosen: int
    softmax_chosen: bool
    module: PackedExperts
    held: HeldExperts | None

    @property
    def inner_size(self) -> int:
        """0 where experts stream."""
        return int(self.held.experts[0].operands[2].shape[1]) if self.held else 0


def parts_of(layer: nn.Module) -> LayerParts | None:
    """The parts of a layer whose matrices are bound; None where it has another structure."""
    attention = getattr(layer, "self_attn", None)
    norms = [child for child in layer.children() if is_row_wise_norm(child)]
    others = [child for child in layer.children() if child is not attention and child not in norms]
    if attention is None or len(norms) != 2 or len(others) != 1 or hasattr(attention, RESCALE):
        return None
    weights = [weight for norm in norms if (weight := _norm_weight(norm))]
    linears = [linear for name in ("q_proj", "k_proj", "v_proj", "o_proj") if (linear := _linear(attention, name))]
    head_norms: list[nn.Module | None] = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if len(weights) != 2 or len(linears) != 4 or not _has_only(attention, [*linears, *head_norms]):
        return None
    dim = getattr(attention, "head_dim", 0)
    heads = [None if each is None else _norm_weight(each) for each in head_norms]
    if any(found is None and each is not None for found, each in zip(heads, head_norms, strict=True)):
        return None
    if dim == 0 or dim % _MULTIPLE or any(found is not None and found.weight.numel() != dim for found in heads):
        return None
    block = _mixture(others[0]) or _dense(others[0])
    if block is None:
        return None
    mixture, gate, more = block
    return LayerParts((weights[0], weights[1]), (heads[0], heads[1]), (*linears, *more), dim, gate, mixture)


def _mixture(block: nn.Module) -> tuple[Mixture, Gate, list[PackedLinear]] | None:
    experts = next((each for each in block.modules() if isinstance(each, PackedExperts)), None)
    routers = [each for name, each in block.named_modules() if is_router(f"{name}.weight") and hasattr(each, "weight")]
    if experts is None or len(routers) != 1 or not _has_only(block, routers):
        return None
    held = experts.source if isinstance(experts.source, HeldExperts) else None
    gate, weight, chosen = experts.body.gate, routers[0].weight, _choice(routers[0])
    if gate is None or gate.activation not in ACTIVATIONS or chosen is None:
        return None
    matrices = (held.experts[0].up, held.experts[0].down) if held else ()
    tiled = all(_is_tiled(matrix) for matrix in matrices)
    if experts.body.norm is not None or not tiled or not isinstance(weight, torch.Tensor) or not weight.is_contiguous():
        return None
    return Mixture(weight, *chosen, experts, held), gate, []


def _dense(block: nn.Module) -> tuple[None, Gate, list[PackedLinear]] | None:
    linears = [linear for name in ("gate_proj", "up_proj", "down_proj") if (linear := _linear(block, name))]
    activate = getattr(block, "act_fn", None)
    if len(linears) != 3 or activate is None or not _has_only(block, linears):
        return None
    gate = recognise(lambda x: activate(x[:, : x.shape[1] // 2]) * x[:, x.shape[1] // 2 :])
    if gate is None or gate.activation not in ACTIVATIONS or linears[0].packed.shape[0] % _MULTIPLE:
        return None
    return None, gate, linears


def _linear(module: nn.Module, name: str) -> PackedLinear | None:
    """A linear whose kernel widens codes in registers, for any number of rows."""
    linear = getattr(module, name, None)
    packed = getattr(linear, "packed", None)
    if not isinstance(linear, PackedLinear) or packed is None or not _is_tiled(packed):
        return None
    return linear if linear.bias is None or linear.bias.dtype == torch.bfloat16 else None


def _is_tiled(packed: PackedTensor) -> bool:
    return packed.layout.order == TILES or takes_floats(packed.layout)


def _has_only(module: nn.Module, known: Sequence[nn.Module | None]) -> bool:
    """Whether all parameters of a module belong to its descendants `known`."""
    theirs = {id(each) for other in known if other is not None for each in other.parameters()}
    return all(id(each) in theirs for each in module.parameters())


def _norm_weight(norm: nn.Module) -> NormWeight | None:
    """What the kernels need to compute the same as an RMSNorm; None where it is another norm."""
    found = as_rms_norm(norm)
    return None if found is None or found.weight.dtype != torch.bfloat16 or found.weight.numel() % _MULTIPLE else found


def _choice(router: nn.Module) -> tuple[int, bool] | None:
    """How many experts a router chooses, and whether their weights sum to 1; None where it is of another form."""
    weight: torch.Tensor = router.weight  # type: ignore[assignment]
    if weight.dtype != torch.bfloat16 or weight.shape[1] % _MULTIPLE:
        return None
    found = router(torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16())
    if not isinstance(found, tuple):
        return None
    ids = next((each for each in found if not each.is_floating_point()), None)
    if ids is None or ids.dim() != 2:
        return None
    scores = next((each for each in found if each.is_floating_point() and each.shape == ids.shape), None)
    if scores is None:
        return None
    totals = scores.double().sum(-1)
    return ids.shape[1], close(totals, torch.ones_like(totals))


class LayerArguments(TypedDict):
    """What transformers calls a decoder layer with, beside hidden states."""

    position_embeddings: tuple[Tensor, Tensor]
    packed: PackedPass


class Buffers:
    """Activations of at most `rows` rows, which layers of the same sizes share: each overwrites those of the last."""

    def __init__(self, parts: LayerParts, rows: int) -> None:
        self.rows, self.total_nbytes = rows, rows * Buffers.nbytes(parts)
        hidden, chosen, dim, mixture = parts.hidden_size, parts.num_chosen, parts.head_dim, parts.mixture
        experts = mixture.router.shape[0] if mixture else 0
        q, k, v = (linear.packed.shape[0] // dim for linear in parts.linears[:3])
        self.normed, self.total, self.projected = (_bf16(rows, hidden) for _ in range(3))
        self.q, self.k, self.v = (_bf16(rows, count, dim) for count in (q, k, v))
        held = mixture.held if mixture else None
        self.outputs = _bf16(rows * chosen if held or mixture is None else 0, hidden)
        self.qkv = (self.q, self.k, self.v)
        # Of a dense layer: what gate and up give.
        self.inner = [_bf16(rows, width) for width, _ in parts.shapes[4:6]]
        self.logits = torch.empty(rows, experts)
        ids, token_ids = (torch.empty(rows, chosen, dtype=torch.int64) for _ in range(2))
        counts, weights = torch.zeros(experts, dtype=torch.int64), torch.ones(rows, chosen)
        # Without a router that fills them: the one output of a row is the row's, as it is.
        self.routed = Routed(ids, weights, counts, token_ids, torch.arange(rows * chosen).view(rows, chosen))
        width = max(columns for _, columns in parts.shapes)
        # The three products of x run at the same time.
        self.packed = torch.empty(3, rows * row_nbytes(width), dtype=torch.uint8)
        of_row = steps.expert_row_nbytes(held.experts[0].operands) if held else 0
        self.scratch = torch.empty(rows * chosen * of_row, dtype=torch.uint8)

    @staticmethod
    def nbytes(parts: LayerParts) -> int:
        """What one row takes, as the plan counts it."""
        mixture = parts.mixture
        if mixture is None:
            return fused_row_nbytes(parts.shapes, parts.hidden_size)
        experts = (mixture.num_chosen, mixture.inner_size, mixture.router.shape[0])
        return fused_row_nbytes(parts.shapes, parts.hidden_size, *experts)

    @staticmethod
    def key(parts: LayerParts) -> tuple[object, ...]:
        """What layers that share buffers have in common."""
        of_all = (*parts.shapes, parts.head_dim, parts.num_chosen)
        return of_all if parts.mixture is None else (*of_all, parts.mixture.router.shape, parts.mixture.inner_size)


def buffers_nbytes(layers: Sequence[FusedLayer]) -> int:
    """The bytes of the buffers of all layers, which those of the same sizes share."""
    return sum({id(layer.buffers): layer.buffers.total_nbytes for layer in layers}.values())


def _bf16(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16)


def _most_rows(parts: LayerParts, tiled_rows: int) -> int:
    """The most rows of a pass for which steps are used.

    Products of more than `tiled_rows` rows are faster where matrices are dequantized first, which steps do not do; of
    many rows, one takes as long as one of MOST_ROWS. Most products are those of experts, which share the rows of a
    pass. Half as many rows as would give each of them `tiled_rows` are allowed, since all other products have all rows.
    """
    if tiled_rows >= MOST_ROWS:
        return ALL_ROWS
    mixture = parts.mixture
    return max(tiled_rows, tiled_rows * mixture.router.shape[0] // (2 * mixture.num_chosen) if mixture else 0)


class LayerSteps:
    """The steps of one layer: `before` attention, `behind` it, and the `last` one, ahead of which experts that stream
    are computed.

    All addresses stay but those that the methods set, of tensors of a pass. `routed` is what its router chose.
    """

    def __init__(
        self,
        parts: LayerParts,
        buffers: Buffers,
        routed: Routed,
        table: Array[NativeExpert],
        rotary: int,
        block: int,
        integer: bool,
    ) -> None:
        (first, second), (q_norm, k_norm), output = parts.norms, parts.head_norms, parts.linears[3]
        self._first = steps.norm(buffers.total, None, buffers.total, first, buffers.normed)
        products = [
            native_product(buffers.normed, linear.packed, linear.bias, out.flatten(1), scratch, integer)
            for linear, out, scratch in zip(parts.linears[:3], buffers.qkv, buffers.packed, strict=True)
        ]
        queries, keys = HeadRows(buffers.q, q_norm), HeadRows(buffers.k, k_norm)
        self._heads = steps.heads(queries, keys, buffers.v, rotary, block)
        self._projection = native_product(
            buffers.q.flatten(1), output.packed, output.bias, buffers.projected, buffers.packed[0], integer
        )
        self._second = steps.norm(buffers.total, buffers.projected, buffers.total, second, buffers.normed)
        self._last = steps.combine(buffers.outputs, buffers.total, routed)
        self.before = [
            Step(self._first),
            *(Step(each, waits=False) for each in products[:2]),
            Step(products[2]),
            Step(self._heads),
        ]
        feed_forward = _dense_steps(parts, buffers, integer)
        if parts.mixture is not None:
            feed_forward = [
                Step(steps.router(buffers.normed, parts.mixture.router, buffers.logits)),
                Step(steps.choose(buffers.logits, routed.ids, routed.weights, parts.mixture.softmax_chosen)),
            ]
            outputs, scratch = buffers.outputs, buffers.scratch
            if parts.mixture.held is not None:
                feed_forward += steps.mixture(buffers.normed, routed, table, parts.gate, outputs, scratch, integer)
        self.behind = [Step(self._projection), Step(self._second), *feed_forward]
        self.last = Step(self._last)

    def reads(self, hidden: int, cos: int, sin: int) -> None:
        """Sets the addresses of the hidden states [T, D] and of the rotary embedding [T, rotary]."""
        self._first.x = self._second.x = hidden
        self._heads.cos, self._heads.sin = cos, sin

    def stores(self, keys: int, values: int) -> None:
        """Lets the steps store keys and values in the cache with codes at these addresses, in `slots` of a pass."""
        self._heads.key_codes, self._heads.value_codes = keys, values

    def slots(self, slots: int) -> None:
        """Sets the address of the slots of a pass."""
        self._heads.slots = slots

    def attended(self, address: int) -> None:
        """Sets the address of what attention gave [T, Hq * dim]."""
        self._projection.x = address

    def adds(self, outputs: int, assignment_rows: int) -> None:
        """Sets the addresses of what experts gave [P, D], and of the rows of that of each assignment, int64 [T * A]."""
        self._last.outputs, self._last.assignment_rows = outputs, assignment_rows

    def writes(self, out: int) -> None:
        """Sets the address of the result [T, D], which may be that of the hidden states."""
        self._last.out = out


def _dense_steps(parts: LayerParts, buffers: Buffers, integer: bool) -> list[Step]:
    """Gate and up side by side, the activation, and down, whose output is the only one of a row; none for a mixture."""
    if parts.mixture is not None:
        return []
    first, second = buffers.inner
    xs, outs = (buffers.normed, buffers.normed, first), (first, second, buffers.outputs)
    up_gate, up, down = (
        Step(native_product(x, linear.packed, linear.bias, out, scratch, integer))
        for x, linear, out, scratch in zip(xs, parts.linears[4:], outs, buffers.packed, strict=True)
    )
    return [up_gate._replace(waits=False), up, Step(steps.gate(first, second, parts.gate.activation)), down]


class _Composed(NamedTuple):
    """The steps of a layer for a rotary embedding of `rotary` elements, and their runs."""

    rotary: int
    steps: LayerSteps
    before: Steps
    behind: Steps
    last: Steps


class FusedLayer:
    """Replaces the `forward` of a decoder layer for passes that its buffers have rows for; for others it calls the one
    that it replaced.

    `call` is what the layer asks attention for. `taken` counts its passes.
    """

    def __init__(
        self,
        parts: LayerParts,
        buffers: Buffers,
        compute: ParallelMatmul,
        seam: Callable[..., Tensor],
        call: AttentionCall,
    ) -> None:
        self.parts = parts
        self.buffers = buffers
        self.seam = seam
        self.call = call
        self.taken = 0
        self.most_rows = min(buffers.rows, _most_rows(parts, compute.tiled_rows()))
        self._compute = compute
        self._composed: _Composed | None = None
        held = parts.mixture.held if parts.mixture else None
        self._table = steps.experts_table([expert.operands for expert in held.experts] if held else [])
        self.routed = buffers.routed._replace(
            ids=torch.empty_like(buffers.routed.ids), counts=torch.zeros_like(buffers.routed.counts)
        )

    def forward(self, hidden: Tensor, *args: object, **named: Unpack[LayerArguments]) -> Tensor:
        """hidden [1, T, D] -> [1, T, D]."""
        if not self.takes(hidden, named["position_embeddings"]):
            return self.seam(hidden, *args, **named)
        rows, (cos, sin) = hidden.shape[1], named["position_embeddings"]
        composed = self._composed
        if composed is None or composed.rotary != cos.shape[-1]:
            steps = self.steps(cos.shape[-1])
            behind = steps.behind if self.streams else [*steps.behind, steps.last]
            runs = (Steps(steps.before), Steps(behind), Steps([steps.last]))
            composed = self._composed = _Composed(cos.shape[-1], steps, *runs)
        packed, out = named["packed"], torch.empty_like(hidden)
        composed.steps.reads(hidden.data_ptr(), cos.data_ptr(), sin.data_ptr())
        composed.before.run(rows, self._compute.call_on_all)
        q, k, v = (each[:rows] for each in self.buffers.qkv)
        attended = packed.attention.attend(self.call, q, k, v, packed.batch).contiguous()
        composed.steps.attended(attended.data_ptr())
        composed.steps.writes(out.data_ptr())
        composed.behind.run(rows, self._compute.call_on_all)
        if self.streams:
            groups = self.add_experts(rows, composed.steps)
            composed.last.run(rows, self._compute.call_on_all)
            del groups
        self.count(rows)
        return out

    @property
    def streams(self) -> bool:
        """Whether its experts stream: `add_experts` computes them between its steps."""
        return self.parts.mixture is not None and self.parts.mixture.held is None

    def add_experts(self, rows: int, steps: LayerSteps) -> ExpertGroups:
        """Computes the experts that the steps chose for `rows` rows, and lets the last step add them up; the result
        holds memory that it reads."""
        mixture = self.parts.mixture
        assert mixture is not None
        experts, hidden = mixture.module, self.buffers.normed[:rows]
        groups = group_by_expert(self.routed.ids[:rows], experts.source.num_experts)
        outputs = compute_experts(hidden, groups, experts.source, experts.body, self._compute)
        steps.adds(outputs.data_ptr(), groups.assignment_rows.data_ptr())
        return groups

    def takes(self, hidden: Tensor, embeddings: tuple[Tensor, Tensor]) -> bool:
        """Whether the steps can compute such hidden states with such cos and sin."""
        if not 0 < hidden.shape[1] <= self.most_rows or hidden.shape[0] != 1 or hidden.dtype != torch.bfloat16:
            return False
        cos, sin = embeddings
        same = cos.shape == sin.shape and cos.dtype == sin.dtype == torch.bfloat16 and cos.shape[-1] % 32 == 0
        return same and cos.shape[-1] <= self.parts.head_dim and all(map(Tensor.is_contiguous, (hidden, cos, sin)))

    def steps(self, rotary: int, block: int = 1) -> LayerSteps:
        """Steps of this layer for a rotary embedding of that many elements."""
        return LayerSteps(self.parts, self.buffers, self.routed, self._table, rotary, block, self._compute.integer)

    def count(self, rows: int) -> None:
        """Counts a pass and what was routed in it, as the seam does."""
        self.taken += 1
        if self.parts.mixture is not None and (held := self.parts.mixture.held):
            held.stats.count(held.layer, rows, self.routed.counts.tolist())

    @property
    def chosen(self) -> Tensor | None:
        """The experts int64 [T, A] that the last pass chose, for more rows than it had; None in a dense layer."""
        return None if self.parts.mixture is None else self.routed.ids
