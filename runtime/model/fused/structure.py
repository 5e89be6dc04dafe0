"""Recognises decoder layers that the library's steps can compute: by their modules and by what these compute.

    hidden += o(attention(rotary(norm(q(x))), rotary(norm(k(x))), v(x)))    x = RMSNorm(hidden)
    hidden += sum of the chosen experts(x), weighed by softmax              x = RMSNorm(hidden)

The name of a family is never asked for. What looks like this and computes something else fails the
self-test (selftest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ....moe.expert import HeldExperts
from ....quant.formats.format import TILES
from ....quant.kernels.operands import Gate
from ....quant.matmul.steps import NormWeight
from ....quant.matmul.tiled import ACTIVATIONS
from ...shape.read import is_router
from ..experts_seam import PackedExperts
from ..llama4 import RESCALE
from ..weights_seam import PackedLinear, is_row_wise_norm

# The relative L2 distance that rounding to bfloat16 may make.
TOLERANCE = 0.02
# The kernels read this many elements at a time.
_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a layer, E experts of which `num_chosen` are chosen; `softmax_chosen`: weights sum to 1."""

    norms: tuple[NormWeight, NormWeight]
    head_norms: tuple[NormWeight | None, NormWeight | None]
    linears: tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]
    head_dim: int
    router: torch.Tensor
    num_chosen: int
    softmax_chosen: bool
    experts: PackedExperts
    source: HeldExperts
    gate: Gate

    @property
    def hidden_size(self) -> int:
        return int(self.router.shape[1])


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
    return _with_mixture(others[0], weights, linears, head_norms, getattr(attention, "head_dim", 0))


def _with_mixture(
    block: nn.Module,
    norms: Sequence[NormWeight],
    linears: Sequence[PackedLinear],
    head_norms: Sequence[nn.Module | None],
    dim: int,
) -> LayerParts | None:
    experts = next((each for each in block.modules() if isinstance(each, PackedExperts)), None)
    routers = [each for name, each in block.named_modules() if is_router(f"{name}.weight") and hasattr(each, "weight")]
    if experts is None or len(routers) != 1 or not _has_only(block, routers) or dim % _MULTIPLE or dim == 0:
        return None
    source, gate, weight = experts.source, experts.body.gate, routers[0].weight
    chosen = _choice(routers[0])
    heads = [None if each is None else _norm_weight(each) for each in head_norms]
    if any(found is None and each is not None for found, each in zip(heads, head_norms, strict=True)):
        return None
    if any(found is not None and found.weight.numel() != dim for found in heads):
        return None
    if not isinstance(source, HeldExperts) or gate is None or gate.activation not in ACTIVATIONS or chosen is None:
        return None
    first = source.experts[0]
    tiled = all(matrix.layout.order == TILES for matrix in (first.up, first.down))
    if experts.body.norm is not None or not tiled or not isinstance(weight, torch.Tensor) or not weight.is_contiguous():
        return None
    (norm, second), (q, k, v, o) = norms, linears
    return LayerParts((norm, second), (heads[0], heads[1]), (q, k, v, o), dim, weight, *chosen, experts, source, gate)


def _linear(attention: nn.Module, name: str) -> PackedLinear | None:
    """A linear whose kernel widens codes in registers, for any number of rows."""
    linear = getattr(attention, name, None)
    packed = getattr(linear, "packed", None)
    if not isinstance(linear, PackedLinear) or packed is None or packed.layout.order != TILES:
        return None
    return linear if linear.bias is None or linear.bias.dtype == torch.bfloat16 else None


def _has_only(module: nn.Module, known: Sequence[nn.Module | None]) -> bool:
    """Whether all parameters of a module belong to its descendants `known`."""
    theirs = {id(each) for other in known if other is not None for each in other.parameters()}
    return all(id(each) in theirs for each in module.parameters())


def _norm_weight(norm: nn.Module) -> NormWeight | None:
    """What the kernels need to compute the same as an RMSNorm; None where it is another norm."""
    weight: torch.Tensor | None = getattr(norm, "weight", None)
    eps = next(
        (value for name in ("variance_epsilon", "eps") if (value := getattr(norm, name, None)) is not None), None
    )
    if weight is None or eps is None or weight.dtype != torch.bfloat16 or weight.numel() % _MULTIPLE:
        return None
    x = torch.randn(4, weight.numel(), generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = norm(x).double()
    plain = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
    for plus_one in (False, True):
        if close(plain * (weight.double() + plus_one), expected):
            return NormWeight(weight.detach(), float(eps), plus_one)
    return None


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


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether numbers differ by no more than rounding; NaN differs."""
    return bool((actual.double() - expected.double()).norm() <= TOLERANCE * expected.double().norm())
