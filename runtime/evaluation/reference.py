"""The floats that an engine's answers are compared with: a checkpoint's own, or those that its packed weights mean.

Two ways lead to the numbers: transformers' own loading of the whole checkpoint, or its model definition with weights
that are dequantized and loaded a layer at a time, and of a layer as many experts at a time as the budget holds. What an
engine computes with packed weights is compared with them, not with weights that it does not have.

A layer that gets what the engine's layer got differs from it by that layer's rounding alone. From end to end rounding
adds up, and in a mixture it chooses other experts where a router's scores are nearly equal, after which all numbers
differ.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...offload.budget import gib
from ...offload.memory import return_memory, trim
from ...quant.formats.format import INTEGER_CODES, PACK_CHUNK, TILE_COLUMNS, TILES, Layout, row_chunks
from ...quant.matmul.selftest import definition, rounded
from ...quant.tensor import CODECS, bind_cleared, torch_dtype
from ..model import PreTrainedModel
from ..model.definition import define_stock, share_blocks
from ..model.experts_seam import adapt_decoder
from ..model.loading import CheckpointLoader
from ..plan.candidate import SLACK_NBYTES
from ..settings.errors import DoesNotFit
from ..settings.settings import MIB, process_nbytes
from ..settings.stages import Advance, stage
from ..shape.checkpoint_shape import open_checkpoint, read_tensors
from ..shape.config import CONFIG, ModelConfig
from ..shape.model_shape import ModelShape
from ..shape.read import SHARED
from ..shape.shards import ITEM_NBYTES, ModelShards, ShardMatrix, checkpoint_nbytes, resident_nbytes
from ..source.model_source import ModelSource
from ..source.stored_model import read_tables, row_readers
from ..weights.preparation import WINDOW_COPIES, widening_nbytes


class FormatWeights(TorchFunctionMode):
    """The matrices of a model in the formats of `shards`, a layer at a time.

    While entered, products with the matrices that were set last round activations to int8 if `integer`. Matrices
    whose codes are the checkpoint's, and those that are not packed, stay as they are.
    """

    def __init__(self, shards: ModelShards, integer: bool) -> None:
        super().__init__()
        self._shards, self._integer = shards, integer
        # The columns of a row that share a scale, by the address of the matrix.
        self._columns: dict[int, int] = {}
        self._shared: dict[int, int] = {}

    def set_dense(self, index: int, layer: nn.Module) -> None:
        """Replaces the weights of a layer's linears, which are in memory; those of other layers are no longer known,
        but for what layers share."""
        self._columns = dict(self._shared)
        for matrix in self._shards.layers[index].dense.matrices:
            linear: Any = layer.get_submodule(matrix.name)
            self._set([linear.weight], matrix)
        self._shared = self._shared or {
            address: self._columns[address]
            for name, parameter in layer.named_parameters()
            if name.startswith(SHARED) and (address := parameter.untyped_storage().data_ptr()) in self._columns
        }

    def set_experts(self, index: int, experts: Any, up_name: str) -> None:
        """Replaces the experts that are in memory, [n, N, K], or [n, K, N] where the module is transposed."""
        shard = self._shards.layers[index].expert
        assert shard is not None
        for name, matrix in zip((up_name, "down_proj"), shard.matrices, strict=True):
            stack = getattr(experts, name)
            self._set([each.t() if experts.is_transposed else each for each in stack], matrix)

    def set_head(self, head: nn.Module, embedding: Tensor) -> None:
        """Replaces the weight of an output head; one that is the `embedding` leaves that as it is."""
        self._columns.clear()
        if self._shards.head is not None:
            linear: Any = head
            tied = linear.weight is embedding
            if tied:
                linear.weight = nn.Parameter(embedding.detach().clone(), requires_grad=False)
            self._set([linear.weight], self._shards.head.matrices[0])
            if tied:
                # Nothing in front of it is rounded.
                self._columns.clear()

    def _set(self, weights: Sequence[Tensor], matrix: ShardMatrix) -> None:
        layout, columns = matrix.layout, 0
        if self._integer and layout.codes in INTEGER_CODES and (layout.order == TILES or not layout.grouped):
            columns = TILE_COLUMNS if layout.order == TILES else layout.shape[1]
        for weight in weights:
            if not matrix.kept and layout.format != "none":
                with torch.no_grad():
                    weight.copy_(as_packed(weight, layout))
            self._columns[weight.untyped_storage().data_ptr()] = columns

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Rounds the argument in front of a matrix."""
        for at, each in enumerate(args[1:]):
            if isinstance(each, Tensor) and isinstance(args[at], Tensor) and args[at].is_floating_point():
                columns = self._columns.get(each.untyped_storage().data_ptr(), 0)
                if columns and args[at].shape[-1] % columns == 0:
                    x = args[at].reshape(-1, args[at].shape[-1])
                    args = (*args[:at], rounded(x, columns).view_as(args[at]), *args[at + 1 :])
        return func(*args, **(kwargs or {}))


def as_packed(weight: Tensor, layout: Layout) -> Tensor:
    """The float32 matrix [N, K] that its codes stand for when it is packed by torch."""
    packed = bind_cleared(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))
    for rows in row_chunks(layout.shape, layout.row_block, PACK_CHUNK):
        part = weight[rows].to(torch_dtype(layout.dtype))
        CODECS[layout.codes, layout.order].pack(part, packed.rows(rows))
    return definition(packed)


# How often a layer is computed from shaken states, and how often each sequence is computed in all.
_SHAKEN = 2
_TIMES = 2 + _SHAKEN


class LocalErrors:
    """Lets a reference compute each layer from an engine's hidden states, beside its own.

    `hidden` [L, S, T, D] is what the engine's layers returned; `chosen` has for each layer the experts of every token
    [S, T, K], -1 where there are fewer, or None. `roundoff` is the unit of roundoff of the engine's dtype.

    After a pass over `repeat(token_ids)` there are for each layer, over tokens [S, T]: in `relative` the L2 differences
    of hidden states, relative to the larger of what goes into the layer and what comes out; in `shaken` by how much the
    reference's own change if its input changes by at most one unit of roundoff; `rerouted` is where the engine chose
    other experts than the reference did.
    """

    def __init__(self, hidden: Tensor, chosen: Sequence[Tensor | None], roundoff: float) -> None:
        self.relative: list[Tensor] = []
        self.shaken: list[Tensor] = []
        self.rerouted: list[Tensor] = []
        self._hidden = hidden
        self._chosen = chosen
        self._roundoff = roundoff
        self._count = hidden.shape[1]
        self._random = torch.Generator().manual_seed(0)
        self._input = torch.empty(0)
        # The experts of a layer [2 + shaken, S, T, K] that the reference chose.
        self._routed: Tensor | None = None

    def repeat(self, token_ids: Tensor) -> Tensor:
        """token_ids [S, T] once for the reference's own pass, and for what is computed beside it."""
        return token_ids.repeat(_TIMES, 1)

    def watch(self, layers: Sequence[nn.Module]) -> None:
        """Hooks the reference's layers. What is behind the last one gets 2 * S sequences, the reference's and the
        engine's."""
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True)
            for module in layer.modules():
                if type(module).__name__ == "Llama4Router":
                    # In this family all experts compute all tokens, most of them on zeros.
                    module.register_forward_hook(lambda router, _, out: self._route(out[1].topk(router.top_k).indices))
                elif getattr(getattr(module, "down_proj", None), "ndim", 0) == 3:
                    module.register_forward_pre_hook(self._choose, with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, index, index == len(layers) - 1))

    def _enter(self, index: int, layer: nn.Module, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = (args[0] if args else named["hidden_states"]).detach()
        own = hidden[: self._count]
        given = self._hidden[index - 1].to(own.dtype) if index else own
        hidden = torch.cat([own, given, *(self._shake(given) for _ in range(_SHAKEN))])
        self._input, self._routed = given, None
        return ((hidden, *args[1:]), named) if args else (args, {**named, "hidden_states": hidden})

    def _shake(self, states: Tensor) -> Tensor:
        noise = torch.rand(states.shape, generator=self._random) * 2 - 1
        return states * (1 + noise * self._roundoff)

    def _choose(self, experts: Any, args: Any, named: dict[str, Any]) -> None:
        given = (*args, *named.values())
        if len(given) == 3:
            # Choices behind the matrices return their input.
            self._route(given[1].masked_fill(given[1] >= len(experts.down_proj), -1))

    def _route(self, chosen: Tensor) -> None:
        shape = (_TIMES, *self._hidden.shape[1:3])
        if chosen.numel() and len(chosen) == shape[0] * shape[1] * shape[2]:
            self._routed = chosen.reshape(*shape, -1)[1:]

    def _leave(self, index: int, last: bool, layer: nn.Module, args: Any, out: Any) -> Any:
        states, found = hidden_of(out).detach(), self._hidden[index]
        own, wanted, *shaken = states.reshape(_TIMES, self._count, *states.shape[1:])
        size = torch.maximum(wanted.norm(dim=-1), self._input.norm(dim=-1))
        self.relative.append((found - wanted).norm(dim=-1) / size)
        moved = torch.stack([(each - wanted).norm(dim=-1) / size for each in shaken])
        rerouted = torch.zeros(found.shape[:2], dtype=torch.bool)
        if self._routed is not None:
            moved[_differ(self._routed[1:], self._routed[0])] = 0
            chosen = self._chosen[index]
            if chosen is not None and chosen.shape == self._routed[0].shape:
                rerouted = _differ(chosen, self._routed[0])
        self.shaken.append(moved.amax(0))
        self.rerouted.append(rerouted)
        if not last:
            return None
        states = torch.cat([own, found.to(own.dtype)])
        return (states, *out[1:]) if isinstance(out, tuple) else states


def _differ(chosen: Tensor, others: Tensor) -> Tensor:
    """Where two choices [..., K] of experts differ, in whatever order they are."""
    return (chosen.sort(-1).values != others.sort(-1).values).any(-1)


def hidden_of(out: Any) -> Tensor:
    """The hidden states among what a decoder layer returned."""
    states: Tensor = out[0] if isinstance(out, tuple) else out
    return states


_ITEM = ITEM_NBYTES["fp32"]
# Methods whose codes transformers widens to float32 without rounding them in between, where a CPU computes.
_WIDENED_EXACTLY = ("mxfp4",)


class Passed(NamedTuple):
    """One pass over sequences that are padded at their end: logits [S, R, V] of the rows asked for, and what every
    decoder layer returned, [L, S, T, D]; `from_engine` are the logits of what an engine's last layer returned, or None.
    """

    logits: Tensor
    hidden: Tensor
    from_engine: Tensor | None = None


class Reference(NamedTuple):
    """`by` is "transformers" or "layers"; `why` says why transformers did not load the checkpoint itself."""

    by: str
    why: str
    passed: Passed


def compute_reference(
    source: ModelSource,
    token_ids: Tensor,
    rows: Tensor,
    budget: int,
    local: Callable[[], LocalErrors] | None = None,
    formats: FormatWeights | None = None,
) -> Reference:
    """Runs token_ids [S, T] of several sequences, padded at their end, and takes the logits of `rows` [R] of them.

    Weights are the checkpoint's, or what `formats` makes of them. With `local`, called for each try, the same pass also
    computes each layer from an engine's states, and is watched by what it returns. `budget` is the bytes of host memory
    that the process may have. Raises DoesNotFit, BadCheckpoint, UnsupportedModel.
    """
    why = _refusal(source, budget)
    if not why:
        try:
            return Reference("transformers", "", _by_transformers(source, token_ids, rows, local, formats))
        except (ImportError, OSError, RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
            # Whatever transformers cannot load has another class of errors in every release.
            why = f"transformers cannot load it here ({' '.join(str(error).split())[:200]})"
        trim()
    return Reference("layers", why, _by_layers(source, token_ids, rows, budget, local, formats))


def _refusal(source: ModelSource, budget: int) -> str:
    """Why transformers' own loading is not tried; empty where it is."""
    config = json.loads((source.folder / CONFIG).read_text())
    if source.gguf is None:
        if config.get("model_type") != source.shape.model_type:
            return "transformers would load the whole model, which also has other parts than text"
        method = (config.get("quantization_config") or {}).get("quant_method")
        if method is not None and method not in _WIDENED_EXACTLY:
            return f"with weights in {method} transformers rounds in between, or needs other kernels"
    elif importlib.util.find_spec("gguf") is None:
        return "transformers needs the package gguf"
    needed = process_nbytes() + SLACK_NBYTES + source.shape.parameters * _ITEM + checkpoint_nbytes(source.shape)
    return (
        "" if needed <= budget else f"the whole model in float32 takes {gib(needed)}, and the budget is {gib(budget)}"
    )


def _by_transformers(
    source: ModelSource,
    token_ids: Tensor,
    rows: Tensor,
    local: Callable[[], LocalErrors] | None = None,
    formats: FormatWeights | None = None,
) -> Passed:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    more: dict[str, Any] = {} if source.gguf is None else {"gguf_file": source.gguf.name}
    folder = source.folder if source.gguf is None else source.gguf.parent
    with stage("loading the checkpoint with transformers"):
        return_memory()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True,
            trust_remote_code=False, **({"use_safetensors": True} | more),
        )  # fmt: skip
    adapt_decoder(model)
    share_blocks(model)
    if formats is not None:
        config = ModelConfig.read(source.folder)
        for index, layer in enumerate(model.get_decoder().layers):
            layer.register_forward_pre_hook(partial(_pack_layer, formats, index, _experts_of(layer, config)))
    return _run(model.eval(), token_ids, rows, local, formats)


def _by_layers(
    source: ModelSource,
    token_ids: Tensor,
    rows: Tensor,
    budget: int,
    local: Callable[[], LocalErrors] | None = None,
    formats: FormatWeights | None = None,
) -> Passed:
    shape = source.shape
    config = ModelConfig.read(source.folder)
    model = define_stock(config, torch.float32)
    layers = list(model.get_decoder().layers)
    count = experts_at_once(shape, budget)
    with open_checkpoint(config, source.weights) as checkpoint:
        loader = CheckpointLoader(model, checkpoint, torch.float32, read_tensors(config, checkpoint))
        loader.check()
        loader.load_rest()
        read_tables(model, checkpoint)
        sizes = [layer.streamed_numel * _ITEM for layer in shape.layers]
        with stage("computing with transformers, a layer at a time", sum(sizes)) as advance:
            for index, layer in enumerate(layers):
                mixture = _experts_of(layer, config)
                read = partial(_load_layer, loader, index, mixture, count, formats)
                layer.register_forward_pre_hook(lambda module, _, read=read: read(module))
                layer.register_forward_hook(partial(_free, advance, sizes[index]))
            try:
                return _run(model, token_ids, rows, local, formats)
            finally:
                for reader in row_readers(model):
                    reader.close()


def experts_at_once(shape: ModelShape, budget: int) -> int:
    """How many experts of a layer are in memory at a time. Raises DoesNotFit where not one is."""
    # And the head: one that is tied is copied where its format is not the embedding's.
    embedding = 2 * shape.embedding_numel * _ITEM
    stays = process_nbytes() + SLACK_NBYTES + widening_nbytes(shape) + embedding
    stays += resident_nbytes(shape, "fp32") - shape.embedding_numel * _ITEM
    stays += max(sum(matrix.numel for matrix in layer.dense) for layer in shape.layers) * _ITEM
    stays += sum(matrix.numel for matrix in shape.layers[0].dense if matrix.name.startswith(SHARED)) * _ITEM
    expert = max((each.experts.numel for each in shape.layers if each.experts), default=0) * _ITEM * WINDOW_COPIES
    if budget < stays + expert:
        raise DoesNotFit(
            f"{budget // MIB:,} MiB of host memory are too little to compute this model a layer at a time in "
            f"float32: the smallest that works is --ram {-(-(stays + expert) // MIB)}MiB"
        )
    return (budget - stays) // expert if expert else 0


def _run(
    model: PreTrainedModel,
    token_ids: Tensor,
    rows: Tensor,
    local: Callable[[], LocalErrors] | None,
    formats: FormatWeights | None,
) -> Passed:
    layers, count = list(model.get_decoder().layers), len(token_ids)
    hidden: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, _, out: hidden.append(hidden_of(out)[:count].detach().clone()))
    if local is not None:
        errors = local()
        errors.watch(layers)
        token_ids = errors.repeat(token_ids)
    if formats is not None:
        weight = model.get_input_embeddings().weight
        model.get_output_embeddings().register_forward_pre_hook(lambda head, _: formats.set_head(head, weight))
    with torch.no_grad(), formats or nullcontext():
        logits = model(input_ids=token_ids, use_cache=False, logits_to_keep=rows).logits.float()
    return Passed(logits[:count], torch.stack(hidden), None if local is None else logits[count:])


def _experts_of(layer: nn.Module, config: ModelConfig) -> Any:
    """The module with the experts' matrices; None in a dense layer."""
    module: Any
    for module in layer.modules():
        down = getattr(module, "down_proj", None)
        if isinstance(down, nn.Parameter) and down.dim() == 3:
            if not hasattr(module, "is_transposed"):
                # Outside transformers' experts interface: computed whole.
                module.is_transposed = config.family.transposed_experts
                module.in_one = True
            return module
    return None


def _pack_layer(formats: FormatWeights, index: int, experts: Any, layer: nn.Module, *_: Any) -> None:
    formats.set_dense(index, layer)
    if experts is not None:
        formats.set_experts(index, experts, _up_name(experts))


def _up_name(experts: Any) -> str:
    return "gate_up_proj" if hasattr(experts, "gate_up_proj") else "up_proj"


def _load_layer(
    loader: CheckpointLoader, index: int, experts: Any, count: int, formats: FormatWeights | None, layer: nn.Module
) -> None:
    loader.load_dense(index, layer)
    if formats is not None:
        formats.set_dense(index, layer)
    if experts is None:
        return
    name = _up_name(experts)
    total = len(experts.down_proj)

    def load(window: range) -> None:
        matrices = loader.load_experts(index, experts, name, window)
        for each, matrix in zip((name, "down_proj"), matrices, strict=True):
            turned = matrix.transpose(1, 2) if experts.is_transposed else matrix
            setattr(experts, each, nn.Parameter(turned, requires_grad=False))
        if formats is not None:
            formats.set_experts(index, experts, name)

    if count >= total or getattr(experts, "in_one", False):
        load(range(total))
        return
    experts.forward = partial(_in_windows, experts, type(experts).forward, load, range(0, total, count))


def _in_windows(
    experts: Any,
    forward: Callable[..., Tensor],
    load: Callable[[range], None],
    begins: range,
    *given: Any,
    **named: Any,
) -> Tensor:
    """The sum of what transformers' own code computes with some of the experts at a time.

    To another expert than those in memory a token goes with weight zero.
    """
    hidden, chosen, weights = (*given, *named.values())
    total, whole = experts.num_experts, dict(experts.named_parameters(recurse=False))
    out = torch.zeros_like(hidden)
    for begin in begins:
        window = range(begin, min(begin + begins.step, begins.stop))
        inside = (chosen >= window.start) & (chosen < window.stop)
        if inside.any():
            load(window)
            with _narrowed(experts, window, whole):
                ids = torch.where(inside, chosen - window.start, 0)
                out += forward(experts, hidden, ids, weights.masked_fill(~inside, 0))
            for name, parameter in whole.items():
                setattr(experts, name, parameter)
    experts.num_experts = total
    return out


@contextmanager
def _narrowed(experts: Any, window: range, whole: Mapping[str, nn.Parameter]) -> Any:
    """While open the module has the experts of `window` only: its biases, too."""
    total, experts.num_experts = experts.num_experts, len(window)
    for name, parameter in whole.items():
        if parameter.dim() < 3 and len(parameter) == total:
            part = parameter[window.start : window.stop]
            setattr(experts, name, nn.Parameter(part, requires_grad=False))
    try:
        yield
    finally:
        experts.num_experts = total


def _free(advance: Advance, nbytes: int, layer: nn.Module, *_: Any) -> None:
    """Drops the weights of a layer that was computed, but for what others share."""
    for path, module in layer.named_modules():
        if path.startswith(SHARED):
            continue
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    advance(nbytes)
