"""Decoder layers of a device as CUDA graphs: one call of the driver starts all kernels of a part of a layer.

A layer is recorded between its calls of attention, whose kernels differ from pass to pass and are started as always.
The number of a pass's rows is rounded up (`rounded`); the rows behind are copies of the first, so that they want no
expert of their own. What a layer gets and gives lies in buffers that all layers and all numbers of rows share, and so
does the memory in between (one pool). Only layers that are held whole are recorded: nothing of theirs moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ...quant.kernels.upload import upload
from ..attention.protocol import AttentionBackend, AttentionCall
from ..engine.sequence import Batch
from .attention_seam import PackedPass, Visibility

# Passes of so many rows that come before they are recorded: the first compiles kernels and allocates buffers.
_UNRECORDED = 2
# How far, in relative L2, a replayed layer may be from the same layer launched kernel by kernel: products of 16-bit
# numbers differ in the order of sums.
_BOUND = 2e-2
# What a layer may be given beside tensors: it is the same in every pass.
_CONSTANTS = (type(None), bool, int, float, str, Visibility)


def rounded(rows: int) -> int:
    """The rows that are recorded for a pass of `rows`: up to an eighth more."""
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return -(-rows // step) * step


class _NotRecordable(Exception):
    """A layer is given something that may change from pass to pass."""


class _Attends(NamedTuple):
    """A call of attention between two graphs, with the buffers of its operands [the most rows, H, D]."""

    call: AttentionCall
    operands: tuple[torch.Tensor, ...]


class LayerGraphs:
    """Graphs of `layers`, each by its number of rows; replaces their `forward`.

    `lack` says why none are used (any more); layers are launched kernel by kernel then.
    """

    def __init__(self, layers: Sequence[nn.Module], device: torch.device, rows: int, sizes: int) -> None:
        """Passes of up to `rows` rows are recorded, and the graphs of `sizes` numbers of rows are kept."""
        self.lack, self._rows, self._sizes = "", rows, sizes
        self.replayed = 0
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._side: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._buffers: dict[tuple[str, torch.Size, torch.dtype], torch.Tensor] = {}
        # Parts by layer, by number of rows; the numbers that were used last are at the end.
        self._recorded: dict[int, dict[int, list[Any]]] = {}
        self._seen: Counter[int] = Counter()
        self._pass: _GraphedPass | None = None
        self.layers = layers
        for index, layer in enumerate(layers):
            layer.forward = partial(self._forward, index, layer.forward)

    @contextmanager
    def of_pass(self, batch: Batch, attention: AttentionBackend) -> Iterator[None]:
        """While entered, the layers compute this pass by graphs, if there are any for its number of rows."""
        if not self.lack and batch.num_tokens <= self._rows:
            self._pass = _GraphedPass(self, batch, attention)
        try:
            yield
        finally:
            self._pass = None

    def _forward(
        self, index: int, forward: Callable[..., Any], hidden: torch.Tensor, *others: Any, **named: Any
    ) -> Any:
        if self._pass is None:
            return forward(hidden, *others, **named)
        return self._pass.layer(index, forward, hidden, others, named)

    def buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Memory for the most rows, which are shaped as those of `like` [T, ...]; the same for the same name."""
        key = (name, like.shape[1:], like.dtype)
        if key not in self._buffers:
            self._buffers[key] = torch.empty(self._rows, *like.shape[1:], dtype=like.dtype, device=self._device)
        return self._buffers[key]

    def keep(self, rows: int, index: int, parts: list[Any]) -> None:
        """Takes the parts of a layer for this number of rows; drops those of the number that was used least lately."""
        if rows not in self._recorded and len(self._recorded) == self._sizes:
            del self._recorded[next(iter(self._recorded))]
        self._recorded.setdefault(rows, {})[index] = parts


@dataclass(slots=True)
class _Recording:
    """The parts of a layer as they are recorded. Recording runs nothing: a graph is replayed as soon as it ends."""

    pool: Any
    side: torch.cuda.Stream
    main: torch.cuda.Stream
    parts: list[Any]
    graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        torch.cuda.set_stream(self.side)
        self.graph = torch.cuda.CUDAGraph()
        # Other threads go on calling CUDA.
        self.graph.capture_begin(self.pool, capture_error_mode="thread_local")

    def end(self) -> None:
        graph, self.graph = self.graph, None
        assert graph is not None
        try:
            graph.capture_end()
        finally:
            torch.cuda.set_stream(self.main)
        graph.replay()
        self.parts.append(graph)


class _GraphedPass:
    """One pass that is not too large: the attention that its layers are given, between their parts."""

    def __init__(self, graphs: LayerGraphs, batch: Batch, attention: AttentionBackend) -> None:
        self._graphs, self._batch, self._attention = graphs, batch, attention
        self._count = batch.num_tokens
        self.num_tokens = rounded(self._count)
        sources = torch.arange(self.num_tokens)
        sources[self._count :] = 0
        # Where the rows that are computed are found among those of the pass.
        self._sources = None if self.num_tokens == self._count else upload(sources, graphs._device)
        self._given: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._recording: _Recording | None = None
        graphs._seen[self.num_tokens] += 1
        if (parts := graphs._recorded.pop(self.num_tokens, None)) is not None:
            graphs._recorded[self.num_tokens] = parts

    def layer(
        self, index: int, forward: Callable[..., Any], hidden: torch.Tensor, others: tuple[Any, ...], named: Any
    ) -> Any:
        try:
            return self._layer(index, forward, hidden, others, named)
        except _NotRecordable as error:
            self._graphs.lack, self._graphs._pass = str(error), None
            # Keys and values are stored again as they were.
            return forward(hidden[:, : self._count], *others, **named)

    def _layer(
        self, index: int, forward: Callable[..., Any], hidden: torch.Tensor, others: tuple[Any, ...], named: Any
    ) -> torch.Tensor:
        graphs = self._graphs
        state = graphs.buffer("hidden", hidden[0])[: self.num_tokens]
        if hidden.data_ptr() != state.data_ptr():
            self._fill(state, self._rows_of(hidden))
        run = partial(forward, state.unsqueeze(0), *self._static(others), **self._static(named))
        if recorded := graphs._recorded.get(self.num_tokens, {}).get(index):
            self._replay(recorded)
            return state.unsqueeze(0)
        out = run()
        if not isinstance(out, torch.Tensor) or out.shape[1:] != state.shape:
            raise _NotRecordable("its layers give more than hidden states")
        if not graphs.lack and graphs._seen[self.num_tokens] > _UNRECORDED:
            self._record(index, run, state, out[0])
        state.copy_(out[0])
        return state.unsqueeze(0)

    def attend(
        self, call: AttentionCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """As an attention backend, of all rows that are computed."""
        if call.index is not None or call.blocks is not None:
            raise _NotRecordable("its layers choose tokens themselves")
        names = zip("qkv", (q, k, v), strict=True)
        step = _Attends(call, tuple(self._graphs.buffer(name, each) for name, each in names))
        for buffer, each in zip(step.operands, (q, k, v), strict=True):
            buffer[: self.num_tokens].copy_(each)
        if self._recording is None:
            return self._run(step)
        self._recording.end()
        self._recording.parts.append(step)
        attended = self._run(step)
        self._recording.begin()
        return attended

    def _run(self, step: _Attends) -> torch.Tensor:
        q, k, v = (each[: self._count] for each in step.operands)
        attended = self._attention.attend(step.call, q, k, v, self._batch)
        out = self._graphs.buffer("attended", attended)[: self.num_tokens]
        self._fill(out, attended)
        return out

    def _replay(self, recorded: list[Any]) -> None:
        for part in recorded:
            if isinstance(part, _Attends):
                self._run(part)
            else:
                part.replay()
        self._graphs.replayed += 1

    def _record(self, index: int, run: Callable[[], Any], state: torch.Tensor, wanted: torch.Tensor) -> None:
        """Records a layer, and compares what it gives with what it gave; keys and values are stored once more."""
        graphs, before = self._graphs, state.clone()
        self._recording = _Recording(graphs._pool, graphs._side, torch.cuda.current_stream(), [])
        try:
            self._recording.begin()
            state.copy_(run()[0])
            self._recording.end()
            off, size = (float(each.float().norm()) for each in (state - wanted, wanted))
            if off <= _BOUND * size:
                graphs.keep(self.num_tokens, index, self._recording.parts)
            else:
                graphs.lack = f"a replayed layer is {off:.3g} of {size:.3g} from the same layer without a graph"
        except (RuntimeError, _NotRecordable) as error:
            graphs.lack = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            self._abandon()
            state.copy_(before)
        finally:
            self._recording = None

    def _abandon(self) -> None:
        recording = self._recording
        if recording is not None and recording.graph is not None:
            with suppress(RuntimeError):
                recording.graph.capture_end()
            torch.cuda.set_stream(recording.main)

    def _fill(self, rows: torch.Tensor, found: torch.Tensor) -> None:
        """Copies rows of the pass [T, ...] to the rows that are computed."""
        if self._sources is None:
            rows.copy_(found)
        else:
            torch.index_select(found, 0, self._sources, out=rows)

    def _rows_of(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or x.shape[0] != 1 or x.shape[1] != self._count:
            raise _NotRecordable(f"a layer is given a tensor of {list(x.shape)} in a pass of {self._count} tokens")
        return x[0]

    def _static(self, value: Any) -> Any:
        """A layer's argument with tensors in buffers, filled once a pass, in the order in which layers ask for them."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._given:
                rows = self._rows_of(value)
                buffer = self._graphs.buffer(f"argument {len(self._given)}", rows)[: self.num_tokens]
                self._fill(buffer, rows)
                self._given[id(value)] = (value, buffer.unsqueeze(0))
            return self._given[id(value)][1]
        if isinstance(value, PackedPass):
            return PackedPass(self, self, value.positions)  # type: ignore[arg-type]
        if isinstance(value, tuple):
            return tuple(self._static(each) for each in value)
        if isinstance(value, dict) and all(isinstance(name, str) for name in value):
            return {name: self._static(each) for name, each in value.items()}
        if not isinstance(value, _CONSTANTS):
            raise _NotRecordable(f"a layer is given a {type(value).__name__}")
        return value
