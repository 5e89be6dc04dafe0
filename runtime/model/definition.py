"""Instantiates transformers' own model class on the meta device, and replaces linears and experts by packed modules."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ...moe.expert import ExpertSource, ExpertWeights
from ...quant.matmul.matmul import ParallelMatmul
from ...quant.tensor import PackedTensor
from ..settings.errors import UnsupportedModel
from ..shape.config import ModelConfig
from ..shape.families import SHARING
from ..shape.read import SHARED, is_router
from ..shape.shards import LayerShards, ShardLayout, ShardMatrix
from . import experts_seam
from .attention_seam import (
    count_calls,
    hand_on_passes,
    keep_index_keys,
    keep_latents,
    number_uses,
    register_attention,
)
from .experts_seam import PackedExperts, adapt_identity_experts, drop_identity_matrices, expert_body, register_experts
from .mtp import add_head
from .recurrent.ngrams import shed_hashes
from .recurrent.seam import shed_decays
from .text_class import text_class
from .weights_seam import PackedLinear, TiledRows

SEAM = "moedge"


def define(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model without weights: parameters on the meta device, real buffers. Runs transformers' code alone.

    Raises UnsupportedModel where transformers refuses the configuration.
    """
    register_attention(SEAM)
    register_experts(SEAM)
    model = _build(config, dtype, SEAM)
    experts_seam.adapt(model)
    adapt_identity_experts(model)
    keep_latents(model, config)
    keep_index_keys(model)
    shed_decays(model)
    shed_hashes(model)
    hand_on_passes(model)
    count_calls(model, config)
    number_uses(model)
    return model.eval()


def define_stock(config: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The same without a seam: attention and experts are transformers' own."""
    model = _build(config, dtype, "eager")
    experts_seam.adapt_decoder(model)
    return model.eval()


def stock_tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor that a checkpoint of the config's family holds, as transformers writes it.

    No memory is taken. Raises UnsupportedModel where transformers refuses the configuration.
    """
    model = define_stock(config, torch.bfloat16)
    written = revert_weight_conversion(model, model.state_dict())
    if config.get("tie_word_embeddings"):
        written.pop("lm_head.weight", None)
    return {name: tuple(tensor.shape) for name, tensor in written.items()}


def _build(config: ModelConfig, dtype: torch.dtype, implementation: str) -> PreTrainedModel:
    config_class = CONFIG_MAPPING[config.family.model_type]
    values = {name: value for name, value in config.values.items() if name not in _OWN_CHOICE}
    if implementation == SEAM:
        values |= _SMALLEST_BUFFERS.get(config.family.model_type, {})
    try:
        with init_empty_weights(include_buffers=False), _LargeOnMeta():
            model: PreTrainedModel = text_class(config_class)._from_config(
                config_class(**values),
                dtype=dtype,
                attn_implementation=implementation,
                experts_implementation=implementation,
            )
    except (StrictDataclassError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        # Each class checks its config in its own way, and some sizes only fail in its own code.
        reason = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"config.json: transformers cannot build a model from it ({reason})") from None
    drop_identity_matrices(model)
    share_blocks(model)
    if config.mtp:
        add_head(model)
    return model


def share_blocks(model: Any) -> None:
    """Gives layer 0 the blocks that layers share, and those a reference each: parameters have one name."""
    if model.config.model_type not in SHARING:
        return
    layers = model.base_model.layers
    sharing = [layer for layer in layers if hasattr(layer, "shared_transformer")]
    blocks = [layer.shared_transformer for layer in sharing[: model.config.num_mem_blocks]]
    for index, layer in enumerate(sharing):
        del layer.shared_transformer
        object.__setattr__(layer, "shared_transformer", blocks[index % len(blocks)])
    layers[0].add_module(SHARED, nn.ModuleList(blocks))
    model.base_model._tied_weights_keys = {}


_LARGE_NUMEL = 1 << 26


class _LargeOnMeta(TorchFunctionMode):
    """Parameters that no memory holds have none for a moment, either: `init_empty_weights` drops them once they are
    there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named, sizes = dict(kwargs or {}), args[0] if len(args) == 1 else args
        if func is torch.empty and isinstance(sizes, tuple) and math.prod(sizes) > _LARGE_NUMEL:
            named["device"] = "meta"
        return func(*args, **named)


# Held experts, and the slots of a ring: far fewer, unless experts of several sizes share one.
MOST_BOUND = 4096
# Fields of the file that moedge decides itself.
_OWN_CHOICE = {"dtype", "torch_dtype", "architectures", "use_cache", "_name_or_path"}
# Of lightning attention: as many tokens squared for every head, which are shed at once.
_SMALLEST_BUFFERS = {"minimax": {"block_size": 1}}


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
        # The matrices of experts by the address of their bytes: slots take turns, and binding one takes 14 us.
        self._bound: dict[int, tuple[PackedTensor, PackedTensor]] = {}
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
        address = shard.data_ptr()
        if (found := self._bound.get(address)) is None:
            assert self.shards.expert is not None
            up, down = (
                PackedTensor.bind(matrix.layout, shard[matrix.offset : matrix.end])
                for matrix in self.shards.expert.matrices
            )
            if len(self._bound) >= MOST_BOUND:
                self._bound.clear()
            found = self._bound[address] = up, down
        up, down = found
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


def install_head(
    model: Any, layout: ShardLayout | None, shard: torch.Tensor | None, compute: ParallelMatmul, tied: bool
) -> None:
    """Binds the output head to its own shard or, without a layout, to the embedding [V, D] in place.

    Rows in front of one that is `tied` to the embedding are not rounded to int8: with SmolLM2 that would lose as much
    as all other products together.
    """
    head = model.get_output_embeddings()
    bias = None if head.bias is None else nn.Parameter(head.bias.to(compute.device), requires_grad=False)
    linear = PackedLinear(bias, compute, per_token=False, exact=tied)
    if layout is None or shard is None:
        linear.packed = PackedTensor.wrap(model.get_input_embeddings().weight.detach().to(compute.device))
    else:
        (matrix,) = layout.matrices
        linear.packed = PackedTensor.bind(matrix.layout, shard[: matrix.end])
    model.set_output_embeddings(linear)
