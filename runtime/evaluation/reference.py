"""A checkpoint computed by transformers alone, in float32: what `moedge check` compares an engine with.

Two ways lead to the numbers: transformers' own loading of the whole checkpoint, or its model definition with weights
that are dequantized and loaded a layer at a time, and of a layer as many experts at a time as the budget holds.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...offload.budget import gib
from ...offload.memory import return_memory, trim
from ..model.definition import define_stock
from ..model.llama4 import adapt_decoder
from ..model.loading import CheckpointLoader
from ..plan.candidate import SLACK_NBYTES
from ..settings.errors import DoesNotFit
from ..settings.settings import MIB, process_nbytes
from ..settings.stages import Advance, stage
from ..shape.checkpoint_shape import open_checkpoint, read_tensors
from ..shape.config import CONFIG, ModelConfig
from ..shape.model_shape import ModelShape
from ..shape.shards import ITEM_NBYTES, checkpoint_nbytes, resident_nbytes
from ..source.model_source import ModelSource
from ..weights.preparation import WINDOW_COPIES, widening_nbytes
from .format_weights import FormatWeights
from .local import LocalErrors, hidden_of

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

    Weights are the checkpoint's, or what `formats` makes of them. With `local`, which is called for each try, the same
    Weights are the checkpoint's, or what `formats` makes of them. With `local`, called for each try, the same
    host memory that the process may have. Raises DoesNotFit, BadCheckpoint, UnsupportedModel.
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
        sizes = [layer.streamed_numel * _ITEM for layer in shape.layers]
        with stage("computing with transformers, a layer at a time", sum(sizes)) as advance:
            for index, layer in enumerate(layers):
                mixture = _experts_of(layer, config)
                read = partial(_load_layer, loader, index, mixture, count, formats)
                layer.register_forward_pre_hook(lambda module, _, read=read: read(module))
                layer.register_forward_hook(partial(_free, advance, sizes[index]))
            return _run(model, token_ids, rows, local, formats)


def experts_at_once(shape: ModelShape, budget: int) -> int:
    """How many experts of a layer are in memory at a time. Raises DoesNotFit where not one is."""
    embedding = (shape.embedding_numel + (shape.head.numel if shape.head else 0)) * _ITEM
    stays = process_nbytes() + SLACK_NBYTES + widening_nbytes(shape) + embedding
    stays += resident_nbytes(shape, "fp32") - shape.embedding_numel * _ITEM
    stays += max(sum(matrix.numel for matrix in layer.dense) for layer in shape.layers) * _ITEM
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
        model.get_output_embeddings().register_forward_pre_hook(lambda head, _: formats.set_head(head))
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
            _restore(experts, whole)
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


def _restore(experts: Any, whole: Mapping[str, nn.Parameter]) -> None:
    for name, parameter in whole.items():
        setattr(experts, name, parameter)


def _free(advance: Advance, nbytes: int, layer: nn.Module, *_: Any) -> None:
    """Drops the weights of a layer that was computed."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
    advance(nbytes)
