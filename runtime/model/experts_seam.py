"""Seam 2: transformers' experts modules call this function; routers, and so routing, stay transformers' own.

llama4 computes its experts, and the scale of its queries, outside of the seams, and step3p5 its experts: `adapt` brings
them there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations.moe import ExpertsInterface

from ...moe.expert import ExpertBody, ExpertSource, HeldExperts, mix_experts
from ...moe.expert_cache import StreamedExperts
from ...quant.kernels.operands import recognise
from ...quant.matmul.matmul import ParallelMatmul

if TYPE_CHECKING:
    from ...moe.routed_experts import RoutedExperts, RoutedStream
    from ...quant.kernels.product import GroupedProduct


class PackedExperts(nn.Module):
    """A child module that replaces the weight parameters of an experts module."""

    def __init__(self, source: ExpertSource, body: ExpertBody, compute: ParallelMatmul) -> None:
        super().__init__()
        self.source = source
        self.body = body
        self.compute = compute
        self._routed: RoutedExperts | RoutedStream | None = None

    def forward(self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        count = self.compute.real_rows(hidden.shape[0])
        if count == hidden.shape[0]:
            return self._mix(hidden, expert_ids, weights)
        # Padding rows need no expert.
        out = torch.zeros_like(hidden)
        out[:count] = self._mix(hidden[:count], expert_ids[:count], weights[:count])
        return out

    def _mix(self, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """By the device where it has all experts, so that the host need not know who chose which."""
        if self._routed is None and self.compute.grouped is not None:
            self._routed = _routed(self.source, self.body, self.compute.grouped)
        mixed = self._routed.mix(hidden, expert_ids, weights, self.compute) if self._routed is not None else None
        if mixed is None:
            mixed = mix_experts(hidden, expert_ids, weights, self.source, self.body, self.compute)
        return mixed


def _routed(source: ExpertSource, body: ExpertBody, product: GroupedProduct) -> RoutedExperts | RoutedStream | None:
    # Imports Triton.
    from ...moe.routed_experts import RoutedExperts, RoutedStream

    if isinstance(source, HeldExperts):
        return RoutedExperts.of(source, body, product)
    return RoutedStream.of(source, body, product) if isinstance(source, StreamedExperts) else None


def register_experts(name: str) -> None:
    ExpertsInterface.register(name, _experts)


def expert_body(module: nn.Module) -> ExpertBody:
    """What the module computes around its matrices, by the attributes that transformers' decorator sets."""
    features: Any = module
    activate: Callable[[torch.Tensor], torch.Tensor] = features._apply_gate if features.has_gate else features.act_fn
    # The oldest supported transformers does not have this attribute.
    has_norm = getattr(features, "has_post_expert_norm", False)
    return ExpertBody(activate, features.post_expert_norm if has_norm else None, recognise(activate))


def _experts(module: nn.Module, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    packed: PackedExperts = module.packed  # type: ignore[assignment]
    out: torch.Tensor = packed(hidden, expert_ids, weights)
    return out


def adapt_identity_experts(model: nn.Module) -> None:
    """Gives mixtures some of whose experts return their input, which are outside transformers' experts interface, the
    attributes that `expert_body` reads; names of parameters stay.
    """
    for module in _with_identity_experts(model):
        count = module.num_experts = module.num_routed_experts
        module.is_transposed, module.has_gate, module.has_bias, module.has_post_expert_norm = False, True, False, False
        module._apply_gate = partial(_activate, activation=module.act_fn)
        module.forward = partial(_mix, module, count)


def drop_identity_matrices(model: nn.Module) -> None:
    """Leaves such mixtures the matrices that are computed: their class allocates first ones for all experts, second
    ones for those that have any."""
    for module in _with_identity_experts(model):
        up = module.gate_up_proj
        module.gate_up_proj = nn.Parameter(up.new_empty(len(module.down_proj), *up.shape[1:]), requires_grad=False)


def _with_identity_experts(model: nn.Module) -> list[Any]:
    return [each for each in model.modules() if hasattr(each, "zero_expert_num") and hasattr(each, "down_proj")]


def _activate(gate_up: torch.Tensor, activation: nn.Module) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out: torch.Tensor = activation(gate) * up
    return out


def _mix(
    experts: Any, count: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The routed sum: hidden [T, D], expert_ids and weights [T, A]; ids from `count` on return their input.

    Such a choice becomes one of another expert of the same token, which is read anyway, with weight zero.
    """
    idle = expert_ids >= count
    another = expert_ids.masked_fill(idle, count).amin(1, keepdim=True)
    chosen = torch.where(idle, another.masked_fill(another == count, 0), expert_ids)
    out: torch.Tensor = experts.packed(hidden, chosen, weights.masked_fill(idle, 0))
    return out + hidden * weights.masked_fill(~idle, 0).sum(1, keepdim=True).to(hidden.dtype)


# An attribute of an attention module: a function of queries [1, H, T, D] and positions [1, T].
RESCALE = "rescale_queries"


def adapt(model: nn.Module) -> None:
    """Changes the methods of such a model's modules; their parameters and names stay."""
    adapt_decoder(model)
    module: Any
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe":
            _adapt_experts(module)
        elif type(module).__name__ == "Step3p7Experts":
            # Outside transformers' experts interface, with the same arguments.
            module.is_transposed, module.has_gate, module.has_bias = False, True, False
            module.forward = partial(_experts, module)
        elif getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            # transformers counts positions from the pass's first token, not the sequence's.
            module.attn_temperature_tuning = False
            setattr(module, RESCALE, partial(_rescale, scale=module.attn_scale, floor=module.floor_scale))


def adapt_decoder(model: nn.Module) -> None:
    """Makes the model find its decoder: the class's own method expects the model that also reads pictures."""
    if type(model).__name__ == "Llama4ForCausalLM":
        model.get_decoder = lambda: model.model  # type: ignore[assignment]


def _adapt_experts(moe: Any) -> None:
    """Runs the chosen experts; transformers runs every expert on every token, most of them on zeros.

    In this family a router's weight multiplies an expert's input, not its output.
    """
    experts = moe.experts
    experts.is_transposed, experts.has_gate, experts.has_bias, experts.has_post_expert_norm = True, True, False, False
    experts._apply_gate = partial(_activate, activation=experts.act_fn)

    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = hidden.reshape(-1, moe.hidden_dim)
        scores, logits = moe.router(rows)
        weights, expert_ids = scores.topk(moe.top_k, dim=-1)
        inputs = (rows.unsqueeze(1) * weights.unsqueeze(-1)).flatten(0, 1)
        routed = experts.packed(inputs, expert_ids.reshape(-1, 1), weights.new_ones(len(inputs), 1))
        out = moe.shared_expert(rows) + routed.view(len(rows), moe.top_k, -1).sum(dim=1)
        return out, logits

    moe.forward = forward


def _rescale(queries: torch.Tensor, positions: torch.Tensor, scale: float, floor: float) -> torch.Tensor:
    """Scales queries by their position: layers without rotary embedding sharpen attention far from the start."""
    factors = torch.log1p(torch.floor((positions.to(queries.device).float() + 1.0) / floor)) * scale + 1.0
    return (queries * factors.unsqueeze(1).unsqueeze(-1)).to(queries.dtype)
