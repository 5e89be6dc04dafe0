"""Fills a meta model's parameters from a checkpoint, a layer at a time, by transformers' own conversions.

The only file that uses private names of transformers; tests/runtime/model/test_loading.py notices when they change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig
from transformers.utils import logging

from ...offload.checkpoint.checkpoint import Checkpoint
from ...offload.checkpoint.header import TensorEntry, described
from ...offload.errors import BadCheckpoint
from ...quant.formats.format import Layout
from ...quant.tensor import SAFETENSORS_DTYPES
from ..shape.families import family
from ..shape.quantized import ModelTensors, QuantizedWeight
from ..shape.read import (
    LAYER,
    expert_index,
    is_convolution,
    is_down,
    is_expert,
    is_extra_expert,
    is_unused,
    renamed_in,
    table_part,
)
from .dequantize import dequantize, read_rows, row_nbytes

MAX_LISTED = 10
_DTYPES = SAFETENSORS_DTYPES | {"I64": torch.int64}
NO_LAYOUTS: Mapping[str, Layout] = MappingProxyType({})


class CheckpointLoader:
    """Loads parts of a layer, or what is outside all layers; memory peaks at the size of one call's part."""

    def __init__(
        self, model: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype, tensors: ModelTensors | None = None
    ) -> None:
        """`tensors` are the model's where the files hold some of them quantized."""
        self._model = model
        self._checkpoint = checkpoint
        self._tensors = tensors or ModelTensors(checkpoint.entries)
        self._dtype = dtype
        self._renamed = family(model.config.model_type).renamed
        # transformers' loader reads with several threads; one widens at a time, so that memory is bounded.
        self._widening = Lock()
        # A progress bar for every layer would hide the job's.
        logging.disable_progress_bar()
        self._config = LoadStateDictConfig(
            weight_mapping=get_model_conversion_mapping(model), dtype=dtype, dtype_plan=model._get_dtype_plan(dtype)
        )
        # Whether experts whose tensors have these shapes are joined as they are read (_read_joined).
        self._joins: dict[_Parts, bool] = {}
        self._dense: dict[int | None, list[str]] = defaultdict(list)
        self._experts: dict[int, list[str]] = defaultdict(list)
        # Numbers that models compute, which those of the files must be.
        self._computed: dict[int, list[str]] = defaultdict(list)
        # Rows of matrices that stay in the files (source/stored_model.py), by the parameter's name.
        self._tables: dict[str, list[TensorEntry]] = defaultdict(list)
        num_layers = len(model.get_decoder().layers)
        identities = getattr(model.config, "zero_expert_num", None) or 0
        for name, entry in self._tensors.entries.items():
            match = LAYER.search(name)
            index = int(match[1]) if match else None
            if index is not None and (index >= num_layers or is_unused(name)):
                if index < num_layers and entry.dtype == "I64":
                    self._computed[index].append(name)
                continue
            if identities and is_extra_expert(name, identities, model.config.n_routed_experts):
                continue
            if part := table_part(name):
                self._tables[f"{part[0]}.weight"].append(entry)
            elif index is not None and is_expert(name, entry):
                self._experts[index].append(name)
            else:
                self._dense[index].append(name)

    def check(self) -> None:
        """Converts headers instead of tensors; raises BadCheckpoint with the first ten differences from the model."""
        names = [name for names in (*self._dense.values(), *self._experts.values()) for name in names]
        tensors = {name: _Header(self._tensors.entries[name]) for name in names}
        on_meta = replace(self._config, device_map={"": torch.device("meta")})
        found, _ = convert_and_load_state_dict_in_model(self._model, tensors, on_meta, None)
        self._model.tie_weights()
        parameters = {name for name, _ in self._model.named_parameters() if not table_part(name)}
        differences = list(self._table_differences())
        differences += [
            f"{name} is {list(have)}, wanted {list(want)}" for name, have, want in sorted(found.mismatched_keys)
        ]
        differences += [f"{name} is missing" for name in sorted(found.missing_keys & parameters)]
        differences += [f"{described(name)} belongs to no part of the model" for name in _extra(found)]
        differences += [f"{name} cannot be converted" for name in sorted(found.conversion_errors)]
        if differences:
            more = f"; and {len(differences) - MAX_LISTED} more" if len(differences) > MAX_LISTED else ""
            raise BadCheckpoint(
                f"{self._checkpoint.folder}: the tensors are not those of the model that the configuration describes: "
                f"{'; '.join(differences[:MAX_LISTED])}{more}"
            )

    def _table_differences(self) -> Iterator[str]:
        for name, parameter in self._model.named_parameters():
            if table_part(name):
                parts, want = self._tables.get(name, ()), list(parameter.shape)
                have = [sum(part.shape[0] for part in parts), *{part.shape[1] for part in parts}]
                if have != want:
                    yield f"{name} is {have}, wanted {want}"

    def load_dense(self, index: int, layer: nn.Module, kept: Mapping[str, Layout] = NO_LAYOUTS) -> None:
        """Loads all of a layer except its experts' matrices.

        Linears in `kept`, by their path in the layer, get the bytes of their rows, uint8 [N, bytes], as weight.
        """
        for path, layout in kept.items():
            rows = torch.empty(layout.shape[0], row_nbytes(layout), dtype=torch.uint8, device="meta")
            layer.get_submodule(path).weight = nn.Parameter(rows, requires_grad=False)
        self._load({name: self._stored(name, kept=self._path(name) in kept) for name in self._dense[index]})
        made = dict(layer.named_buffers())
        for name in self._computed[index]:
            own, entry = made.get(self._path(name)), self._tensors.entries[name]
            stored = _StoredTensor(self._checkpoint, name)
            if own is None or entry.shape != own.shape or not torch.equal(stored[...], own):
                raise BadCheckpoint(f"{described(name)} has other numbers than those that config.json makes")
        meta = [(name, each) for name, each in layer.named_parameters() if each.is_meta and not table_part(name)]
        missing = [name for name, each in meta if each.dim() != 3 or is_convolution(name)]
        if missing:
            raise BadCheckpoint(f"layer {index}: {len(missing)} parameters are not in the files, first {missing[:3]}")

    def _path(self, name: str) -> str:
        """The path in its layer of the module that a tensor belongs to."""
        found = LAYER.search(name)
        return renamed_in(found[2], self._renamed).removesuffix(".weight") if found else name

    def load_experts(
        self, index: int, experts: Any, up_name: str, window: range, kept: Mapping[str, Layout] = NO_LAYOUTS
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The up and down matrices [len(window), N, K] of some of a layer's experts, for packing.

        Those in `kept`, "up" or "down", are the bytes of their rows, uint8 [len(window), N, bytes].

        Once transformers' conversion of a window gave the bytes of `_read_joined`, others are read so: each number is
        copied once, not three times.
        """
        parts = None if kept else self._parts(index, window)
        if parts is not None and self._joins.get(parts):
            return self._read_joined(index, window, parts)
        up, down = self._convert_experts(index, experts, up_name, window, kept)
        if parts is not None and parts not in self._joins:
            joined = self._read_joined(index, window, parts)
            same = all(torch.equal(*pair) for pair in zip((up, down), joined, strict=True))
            self._joins[parts] = same and _are_distinct(joined[0][0], [part for part in parts if not part.down])
        return up, down

    def _convert_experts(
        self, index: int, experts: Any, up_name: str, window: range, kept: Mapping[str, Layout]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """load_experts by transformers' conversion.

        With the module's parameters narrowed to the window, it stacks the experts of the window alone, so that a layer
        that is larger than memory is loaded a few experts at a time.
        """
        whole = {name: getattr(experts, name) for name in (up_name, "down_proj")}
        for (name, parameter), side in zip(whole.items(), ("up", "down"), strict=True):
            sizes, dtype = parameter.shape[1:], parameter.dtype
            if side in kept:
                sizes = torch.Size((kept[side].shape[0], row_nbytes(kept[side])))
                sizes, dtype = sizes[::-1] if experts.is_transposed else sizes, torch.uint8
            narrow = torch.empty(len(window), *sizes, dtype=dtype, device="meta")
            setattr(experts, name, nn.Parameter(narrow, requires_grad=False))
        self._load(dict(self._expert_tensors(index, window, kept)))
        up, down = (getattr(experts, name).detach() for name in whole)
        for name, parameter in whole.items():
            setattr(experts, name, parameter)
        if up.is_meta or down.is_meta:
            raise BadCheckpoint(f"layer {index}: matrices of experts {window.start} to {window.stop - 1} are missing")
        return (up.transpose(1, 2), down.transpose(1, 2)) if experts.is_transposed else (up, down)

    def _parts(self, index: int, window: range) -> _Parts | None:
        """The tensors that every expert of the window has, if these are the same matrices of the model's dtype."""
        found: dict[int, list[_Part]] = {expert: [] for expert in window}
        for name in self._experts[index]:
            expert, entry = expert_index(name), self._tensors.entries[name]
            if expert is None or name in self._tensors.quantized or len(entry.shape) != 2:
                return None
            if expert in window:
                if SAFETENSORS_DTYPES.get(entry.dtype) != self._dtype:
                    return None
                found[expert].append(_Part(is_down(name), name.rpartition(f"experts.{expert}.")[2], *entry.shape))
        every = {tuple(sorted(parts)) for parts in found.values()}
        if len(every) > 1:
            return None
        parts = every.pop()
        # An up and a down matrix, each with as many columns in all of its parts.
        sides = {(part.down, part.columns) for part in parts}
        return parts if [down for down, _ in sorted(sides)] == [False, True] else None

    def _read_joined(self, index: int, window: range, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """The up and down matrices of a window, read into their rows: the parts of an expert one below the other."""
        up, down = (
            torch.empty(len(window), sum(part.rows for part in own), own[0].columns, dtype=self._dtype)
            for own in ([part for part in parts if part.down == side] for side in (False, True))
        )
        targets = {
            (expert, part.name): rows
            for side, matrix in ((False, up), (True, down))
            for expert, made in zip(window, matrix, strict=True)
            for part, rows in _rows_of(made, [part for part in parts if part.down == side])
        }
        reads: list[tuple[str, torch.Tensor]] = []
        for name in self._experts[index]:
            expert = expert_index(name)
            if expert is not None and expert in window:
                reads.append((name, targets[expert, name.rpartition(f"experts.{expert}.")[2]]))
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(self._read, reads))
        return up, down

    def _read(self, read: tuple[str, torch.Tensor]) -> None:
        name, target = read
        self._checkpoint.read_into(name, target.view(-1).view(torch.uint8).numpy().data)

    def load_rest(self) -> None:
        """Loads everything outside the layers: embedding, last norm, output head."""
        self._load({name: self._stored(name) for name in self._dense[None]})
        self._model.tie_weights()
        meta = [name for name, parameter in self._model.named_parameters() if parameter.is_meta]
        if outside := [name for name in meta if not LAYER.search(name)]:
            raise BadCheckpoint(f"{len(outside)} parameters are not in the files, first {outside[:3]}")

    def _expert_tensors(self, index: int, window: range, kept: Mapping[str, Layout]) -> Iterator[tuple[str, _Stored]]:
        for name in self._experts[index]:
            single, as_is = expert_index(name), ("down" if is_down(name) else "up") in kept
            if single is None:
                yield name, self._stored(name, window, as_is)
            elif single in window:
                yield name, self._stored(name, kept=as_is)

    def _stored(self, name: str, rows: range | None = None, kept: bool = False) -> _Stored:
        weight = self._tensors.quantized.get(name)
        if weight is None:
            return _StoredTensor(self._checkpoint, name, rows)
        return _QuantizedTensor(self._checkpoint, weight, None if kept else self._dtype, rows, self._widening)

    def _load(self, tensors: dict[str, _Stored]) -> None:
        found, _ = convert_and_load_state_dict_in_model(self._model, tensors, self._config, None)
        if found.conversion_errors or found.error_msgs:
            raise BadCheckpoint(f"tensors could not be converted: {found.conversion_errors or found.error_msgs}"[:600])
        if found.mismatched_keys:
            name, have, want = sorted(found.mismatched_keys)[0]
            raise BadCheckpoint(f"tensor {name} has shape {list(have)}, config.json wants {list(want)}")
        if unexpected := _extra(found):
            raise BadCheckpoint(f"{len(unexpected)} tensors belong to no part of the model, first {unexpected[:3]}")


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A tensor that transformers' loader reads by `[...]` when it needs it; `rows` selects from the first dimension."""

    checkpoint: Checkpoint
    name: str
    rows: range | None = None

    def __getitem__(self, index: Any) -> torch.Tensor:
        entry = self.checkpoint.entries[self.name]
        if entry.dtype not in _DTYPES:
            raise BadCheckpoint(f"tensor {self.name} is {entry.dtype}, wanted one of {', '.join(_DTYPES)}")
        rows = self.rows or range(entry.shape[0] if entry.shape else 1)
        shape = (len(rows), *entry.shape[1:]) if entry.shape else ()
        tensor = torch.empty(shape, dtype=_DTYPES[entry.dtype])
        if tensor.numel():
            begin = entry.nbytes // max(1, entry.shape[0]) * rows.start if entry.shape else 0
            self.checkpoint.read_into(self.name, tensor.view(-1).view(torch.uint8).numpy().data, begin)
        return tensor[index]


@dataclass(frozen=True, slots=True)
class _QuantizedTensor:
    """The same for a weight that the files hold quantized: widened to `dtype`, or without one the bytes of its rows."""

    checkpoint: Checkpoint
    weight: QuantizedWeight
    dtype: torch.dtype | None
    rows: range | None
    widening: Lock

    def __getitem__(self, index: Any) -> torch.Tensor:
        with self.widening:
            if self.dtype is None:
                return read_rows(self.checkpoint, self.weight, self.rows)[index]
            return dequantize(self.checkpoint, self.weight, self.dtype, self.rows)[index]


_Stored = _StoredTensor | _QuantizedTensor


@dataclass(frozen=True, slots=True)
class _Header:
    """A tensor without bytes, for conversions on the meta device."""

    entry: TensorEntry

    def __getitem__(self, index: Any) -> torch.Tensor:
        dtype = SAFETENSORS_DTYPES.get(self.entry.dtype, torch.uint8)
        return torch.empty(self.entry.shape, dtype=dtype, device="meta")[index]


class _Part(NamedTuple):
    """A tensor of an expert: whether it belongs to the down matrix, its name behind the expert's number, its shape."""

    down: bool
    name: str
    rows: int
    columns: int


_Parts = tuple[_Part, ...]


def _rows_of(matrix: torch.Tensor, parts: list[_Part]) -> Iterator[tuple[_Part, torch.Tensor]]:
    """The rows of each part in a matrix that has one below the other."""
    return zip(parts, torch.split(matrix, [part.rows for part in parts]), strict=True)


def _are_distinct(matrix: torch.Tensor, parts: list[_Part]) -> bool:
    """Whether the parts of a matrix have other bytes than one another, so that another order would have shown."""
    rows = [part for _, part in _rows_of(matrix, parts)]
    return not any(torch.equal(*pair) for pair in combinations(rows, 2))


def _extra(found: Any) -> list[str]:
    """Unexpected tensors, without tied heads and the buffers that old checkpoints carry and models compute."""
    return sorted(
        name for name in found.unexpected_keys if not name.endswith(("rotary_emb.inv_freq", "lm_head.weight"))
    )


def refuse_nonfinite(model: nn.Module) -> None:
    """Raises BadCheckpoint, naming the parameter, unless all loaded parameters are finite."""
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.numel():
            continue
        # NaN and infinity show in the minimum or the maximum, which cost a fraction of testing every element.
        if not torch.stack(torch.aminmax(parameter.detach())).isfinite().all():
            count = parameter.numel() - int(parameter.isfinite().sum())
            raise BadCheckpoint(
                f"{name}: {count} of {parameter.numel()} values are NaN or infinite, finite ones are wanted; "
                "the checkpoint is damaged or was saved from a diverged run: download it again"
            )
