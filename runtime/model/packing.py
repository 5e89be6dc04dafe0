"""Turns a loaded layer's matrices into packed shards: linears into one run of bytes, each expert into a slot."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...moe.expert import ExpertWeights
from ...moe.held import HeldExperts
from ...offload.arena import Arena, aligned
from ...offload.errors import BadCheckpoint
from ...quant.format import FormatError, Layout
from ...quant.linear import Compute
from ...quant.tensor import PackedTensor, dtype_name, pack_into
from ..shape.layouts import layout_for
from ..shape.read import is_router
from .experts_seam import PackedExperts, expert_body
from .weights_seam import PackedLinear


@dataclass(slots=True)
class WeightCensus:
    """Bytes of weights by format: what was asked for, and what was packed in the end."""

    requested: Counter[str] = field(default_factory=Counter)
    packed: Counter[str] = field(default_factory=Counter)


class Packer:
    """Packs in the requested format, and in int8 the matrices whose shape that format cannot hold."""

    def __init__(self, format_name: str, compute: Compute) -> None:
        self.census = WeightCensus()
        self._format = format_name
        self._compute = compute

    def pack_layer(self, layer: nn.Module) -> None:
        """Replaces the layer's linears and expert parameters; what they held is freed."""
        for name, module in list(layer.named_modules()):
            if hasattr(module, "is_transposed"):
                self._pack_experts(module, name)
        linears = [
            (name, module, self._layout(module.weight))
            for name, module in layer.named_modules()
            if type(module) is nn.Linear and not is_router(f"{name}.weight")
        ]
        shard = Arena(sum(layout.nbytes for _, _, layout in linears), 1).slot(0)
        for name, module, layout in linears:
            buffer, shard = shard[: layout.nbytes], shard[layout.nbytes :]
            packed = self._pack(module.weight, layout, buffer, name)
            layer.set_submodule(name, PackedLinear(packed, module.bias, self._compute))

    def pack_head(self, head: nn.Linear, tied: bool) -> PackedLinear:
        """The output head; a tied one stays the embedding's own tensor, seen as a matrix."""
        if tied:
            weight = head.weight.detach()
            packed = PackedTensor(
                layout_for((weight.shape[0], weight.shape[1]), "none", dtype_name(weight.dtype)), (weight,)
            )
        else:
            layout = self._layout(head.weight)
            packed = self._pack(head.weight, layout, Arena(layout.nbytes, 1).slot(0), "lm_head")
        return PackedLinear(packed, head.bias, self._compute)

    def _pack_experts(self, module: Any, name: str) -> None:
        up_name = "gate_up_proj" if module.has_gate else "up_proj"
        up, down = getattr(module, up_name).detach(), module.down_proj.detach()
        if module.is_transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        up_layout, down_layout = self._layout(up[0]), self._layout(down[0])
        arena = Arena(aligned(up_layout.nbytes + down_layout.nbytes), len(up))
        experts = []
        for index in range(len(up)):
            slot, where = arena.slot(index), f"{name}.{index}"
            up_bytes, down_bytes = slot[: up_layout.nbytes], slot[up_layout.nbytes :][: down_layout.nbytes]
            experts.append(
                ExpertWeights(
                    self._pack(up[index], up_layout, up_bytes, where),
                    self._pack(down[index], down_layout, down_bytes, where),
                    getattr(module, f"{up_name}_bias")[index].detach() if module.has_bias else None,
                    module.down_proj_bias[index].detach() if module.has_bias else None,
                )
            )
        delattr(module, up_name)
        del module.down_proj
        module.packed = PackedExperts(HeldExperts(experts), expert_body(module), self._compute)

    def _layout(self, weight: torch.Tensor) -> Layout:
        return layout_for((weight.shape[0], weight.shape[1]), self._format, dtype_name(weight.dtype))

    def _pack(self, weight: torch.Tensor, layout: Layout, buffer: torch.Tensor, name: str) -> PackedTensor:
        self.census.requested[self._format] += weight.numel() * weight.element_size()
        self.census.packed[layout.format] += layout.nbytes
        try:
            return pack_into(weight.detach(), layout, buffer)
        except FormatError as error:
            raise BadCheckpoint(f"{name}: {error}") from None
