"""Experts that the CPU computes where they are staged for a device, while others cross the link to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from ..offload.device import Device, HostMemory
from ..offload.stream.stream import ShardKey
from ..quant.kernels.operands import Gate
from ..quant.kernels.upload import upload
from ..quant.matmul import rows as products
from ..quant.matmul.thread_pool import WorkerPool
from ..quant.matmul.tiled import ExpertRows
from .division import MOST_ROWS, MOST_TOKENS, ExpertSeconds, divide
from .expert import ExpertGroups, ExpertWeights


@dataclass(slots=True)
class HostCounts:
    """Experts that the CPU computed and their rows, its seconds, and bytes of rows that went down and up."""

    experts: int = 0
    rows: int = 0
    seconds: float = 0.0
    nbytes_down: int = 0
    nbytes_up: int = 0


@dataclass(frozen=True, slots=True)
class StagedExperts:
    """Experts in host memory: those that are there now, an expert's matrices and biases by its key, and by layer the
    activation of those that the CPU can compute. A token has `width` numbers of `dtype`, a row `scratch` of float32."""

    staged: Container[ShardKey]
    weights: Callable[[ShardKey], ExpertWeights]
    gates: Mapping[int, Gate]
    width: int
    scratch: int
    dtype: torch.dtype


class HostExperts:
    """Computes experts of one layer at a time on a thread of its own and those of a pool.

    Of a layer call `expect` before its choices are read, `divider`, `begin` with what was chosen, and `finish`. A layer
    that was not finished is waited for before its memory is used again.
    """

    def __init__(self, device: Device, experts: StagedExperts, seconds: ExpertSeconds, threads: int) -> None:
        self._device, self._experts, self._seconds = device, experts, seconds
        row_nbytes = experts.width * experts.dtype.itemsize
        # Kept: tensors of a part do not keep the memory that is page-locked.
        self._memory = [HostMemory(count * row_nbytes) for count in (MOST_TOKENS, MOST_ROWS)]
        self._pins = [each.pin(device) for each in self._memory]
        self._hidden, self._out = (each.bytes.view(experts.dtype).view(-1, experts.width) for each in self._memory)
        self._scratch = torch.empty(MOST_ROWS * experts.scratch)
        self._pool = WorkerPool(threads)
        self._thread = ThreadPoolExecutor(1, "moedge-experts")
        # What the CPU computes, and the rows of the device, in their order, to which it goes.
        self._begun: tuple[Future[float], torch.Tensor] | None = None
        self._tokens = 0
        self.counts = HostCounts()

    @property
    def nbytes(self) -> int:
        """Bytes of host memory, biases left out."""
        return sum(each.nbytes for each in self._memory) + self._scratch.nbytes

    def expect(self, layer: int, hidden: torch.Tensor) -> None:
        """Sends the states of a layer's tokens [T, D] down, ahead of its choices: who waits for those has them too."""
        self._drop()
        self._tokens = len(hidden) if layer in self._experts.gates and len(hidden) <= MOST_TOKENS else 0
        if self._tokens:
            self._hidden[: self._tokens].copy_(hidden, non_blocking=True)
            self.counts.nbytes_down += hidden.nbytes

    def divider(self, layer: int, groups: ExpertGroups) -> Callable[[set[int], int], set[int]] | None:
        """Chooses from missing experts, beside which a number of others arrive, those that the CPU computes: as many as
        let both sides end together, of the fewest rows. None for a layer of which it computes none."""
        return partial(self._choose, layer, groups.counts) if self._tokens else None

    def _choose(self, layer: int, counts: Sequence[int], missing: set[int], others: int) -> set[int]:
        able = [expert for expert in missing if ShardKey(layer, expert) in self._experts.staged]
        able.sort(key=lambda expert: (counts[expert], expert))
        rows = [counts[expert] for expert in able]
        # What crosses the link whatever happens counts as if it had more rows than any.
        count, _ = divide([*rows, *[MOST_ROWS] * (len(missing) - len(able) + others)], self._seconds)
        return {expert for expert, total in zip(able[:count], accumulate(rows), strict=False) if total <= MOST_ROWS}

    def begin(self, layer: int, groups: ExpertGroups, chosen: Sequence[int]) -> None:
        """Begins to compute the chosen experts; the choices of the pass have been waited for."""
        counts = [groups.counts[expert] for expert in chosen]
        experts = [
            ExpertRows(first, count, *self._experts.weights(ShardKey(layer, expert)).operands)
            for expert, count, first in zip(chosen, counts, accumulate(counts, initial=0), strict=False)
        ]
        begins = [groups.rows(expert).start for expert in chosen]
        rows = torch.cat([torch.arange(at, at + count) for at, count in zip(begins, counts, strict=True)])
        hidden, out, token_ids = self._hidden[: self._tokens], self._out[: len(rows)], groups.host_token_ids[rows]
        gate = self._experts.gates[layer]

        def compute() -> float:
            start = time.perf_counter()
            call = self._pool.call_on_all
            products.multiply_experts(hidden, token_ids, experts, gate, out, self._scratch, call)
            return time.perf_counter() - start

        self.counts.experts += len(chosen)
        self.counts.rows += len(rows)
        # Up before the thread begins, so that nothing is between its end and its rows.
        places = upload(rows, self._device.torch_device)
        self._begun = self._thread.submit(compute), places

    def finish(self, rows: torch.Tensor) -> None:
        """Waits for the CPU and puts what it computed into its places of `rows` [P, D]. Raises what it raised."""
        if self._begun is None:
            return
        done, places = self._begun
        # Interrupted here, it is waited for by whoever wants its memory next.
        wait([done])
        self._begun = None
        self.counts.seconds += done.result()
        out = self._out[: len(places)]
        # The next layer's choices are waited for on the same stream before `out` is written again.
        rows.index_copy_(0, places, out.to(rows.device, non_blocking=True))
        self.counts.nbytes_up += out.nbytes

    def close(self) -> None:
        """Waits for what was begun, then frees the memory."""
        self._drop()
        self._thread.shutdown()
        for pinned in self._pins:
            pinned.close()

    def _drop(self) -> None:
        """An aborted pass left this behind; whatever it raises has no one to tell."""
        if self._begun is not None:
            wait([self._begun[0]])
            self._begun = None
