"""Replaces a layer's linears and experts by packed modules, and binds them to the bytes of shards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...moe.expert import ExpertSource, ExpertWeights
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.tensor import PackedTensor
from ..settings.errors import UnsupportedModel
from ..shape.read import is_router
from ..shape.shards import LayerShards, ShardLayout, ShardMatrix
from .experts_seam import PackedExperts, expert_body
from .weights_seam import PackedLinear, TiledRows


class LayerAssembly:
    """One layer with its linears and experts. Call `install` once, and `bind_dense` whenever its shard arrives."""

    def __init__(self, layer: nn.Module, shards: LayerShards, compute: ParallelMatmul) -> None:
        self.shards = shards
        self.layer = layer
        self._compute = compute
        self.linears: dict[str, nn.Linear] = {
            name: module
            for name, module in layer.named_modules()
            if type(module) is nn.Linear and not is_router(f"{name}.weight")
        }
        self.experts: Any = next((module for module in layer.modules() if hasattr(module, "is_transposed")), None)
        self._packed: list[tuple[PackedLinear, ShardMatrix]] = []
        self._check()

    @property
    def up_name(self) -> str:
        """The name of the parameter with the experts' first matrices."""
        return "gate_up_proj" if self.experts.has_gate else "up_proj"

    @property
    def router(self) -> torch.Tensor | None:
        """The matrix [E, D] that scores the layer's experts; None where the router has another form."""
        count = self.shards.num_experts
        named = self.layer.named_parameters()
        return next((one for name, one in named if is_router(name) and one.dim() == 2 and len(one) == count), None)

    def install(self) -> None:
        """Replaces linears and expert parameters by packed modules without bytes; biases stay."""
        for matrix in self.shards.dense.matrices:
            linear = PackedLinear(self.linears[matrix.name].bias, self._compute)
            self.layer.set_submodule(matrix.name, linear)
            self._packed.append((linear, matrix))
        self.linears.clear()
        if self.experts is not None:
            delattr(self.experts, self.up_name)
            del self.experts.down_proj

    def bind_dense(self, shard: torch.Tensor) -> None:
        """Binds the linears to `shard`, the uint8 bytes of the dense shard."""
        for linear, matrix in self._packed:
            linear.packed = PackedTensor.bind(matrix.layout, shard[matrix.offset : matrix.end])

    def bind_expert(self, index: int, shard: torch.Tensor) -> ExpertWeights:
        """Expert `index`, bound to `shard`, the uint8 bytes of its shard."""
        assert self.shards.expert is not None
        up, down = (
            PackedTensor.bind(matrix.layout, shard[matrix.offset : matrix.end])
            for matrix in self.shards.expert.matrices
        )
        if not self.experts.has_bias:
            return ExpertWeights(up, down)
        up_bias = getattr(self.experts, f"{self.up_name}_bias")[index]
        return ExpertWeights(up, down, up_bias.detach(), self.experts.down_proj_bias[index].detach())

    def tile_routers(self) -> None:
        """Makes routers compute a fixed number of rows at a time."""
        for name, module in list(self.layer.named_modules()):
            # One family's router multiplies with the weight of its classifier itself, which therefore runs as a whole.
            weight = getattr(getattr(module, "classifier", module), "weight", None)
            inside = name.endswith(".classifier")
            if is_router(f"{name}.weight") and isinstance(weight, nn.Parameter) and not inside:
                self.layer.set_submodule(name, TiledRows(module))

    def set_experts(self, source: ExpertSource) -> None:
        """Sets where the layer's experts come from during passes."""
        self.experts.packed = PackedExperts(source, expert_body(self.experts), self._compute)

    def _check(self) -> None:
        """Raises UnsupportedModel unless the shards, which were read from headers, and transformers' module agree."""
        wanted = {matrix.name: matrix.layout.shape for matrix in self.shards.dense.matrices}
        found = {name: tuple(linear.weight.shape) for name, linear in self.linears.items()}
        count = self.experts.num_experts if self.experts is not None else 0
        if wanted != found or count != self.shards.num_experts:
            different = sorted(set(wanted.items()) ^ set(found.items()))[:4]
            raise UnsupportedModel(
                f"the checkpoint's tensors and transformers' model differ: {different}, "
                f"{self.shards.num_experts} and {count} experts"
            )


def install_head(model: Any, layout: ShardLayout | None, shard: torch.Tensor | None, compute: ParallelMatmul) -> None:
    """Binds the output head to its own shard or, if it is tied (no layout), to the embedding [V, D] in place."""
    head = model.get_output_embeddings()
    bias = None if head.bias is None else nn.Parameter(head.bias.to(compute.device), requires_grad=False)
    linear = PackedLinear(bias, compute, per_token=False)
    if layout is None or shard is None:
        linear.packed = PackedTensor.wrap(model.get_input_embeddings().weight.detach().to(compute.device))
    else:
        (matrix,) = layout.matrices
        linear.packed = PackedTensor.bind(matrix.layout, shard[: matrix.end])
    model.set_output_embeddings(linear)
