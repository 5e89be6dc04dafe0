"""The matmuls of a model: one at a time with a useful number of threads, or many in parallel on a worker pool."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..tensor import PackedTensor
from .matmul import GEMV_MAX_ROWS, Matmul, strips
from .thread_pool import WorkerPool, torch_threads
from .workspace import Workspace

if TYPE_CHECKING:
    # Triton is imported only if a device uses it.
    from ..kernels.product import GroupedProduct

Job = TypeVar("Job")

# Threads take about 0.1 ms to wake up and synchronize. One thread computes an operation on fewer numbers than this in a
# few tenths of a millisecond at most, so sharing the work does not pay.
FEW_NUMBERS = 1 << 20
# The same limit for products, in bytes of a matrix that are read once for every ROWS_A_SWEEP rows.
SMALL_NBYTES = 2 << 20
ROWS_A_SWEEP = 16


class ParallelMatmul(Matmul):
    """Products that use all of torch's threads if that is faster.

    `helpers` are the workspaces of further threads for `parallel_for`. `grouped` multiplies rows by many matrices at
    once, if the device has a kernel for that.
    """

    def __init__(
        self,
        workspace: Workspace,
        deterministic: bool = False,
        integer: bool = False,
        gemv_max_rows: Mapping[str, int] = GEMV_MAX_ROWS,
        helpers: Sequence[Workspace] = (),
        grouped: GroupedProduct | None = None,
    ) -> None:
        super().__init__(workspace, deterministic, integer, gemv_max_rows)
        self.grouped = grouped
        self._workers = [Matmul(each, deterministic, integer, gemv_max_rows) for each in (workspace, *helpers)]
        self._pool = WorkerPool(len(self._workers))
        self._num_threads = torch.get_num_threads()
        self._real, self._padded = 1, 1

    @property
    def nbytes(self) -> int:
        """The bytes of the scratch of all threads."""
        return sum(worker.workspace.nbytes for worker in self._workers)

    @property
    def device(self) -> torch.device:
        """The torch device on which products are computed."""
        return self.workspace.buffer.device

    @contextmanager
    def small_steps(self, numbers: int) -> Iterator[None]:
        """While entered, operations use one thread if `numbers` numbers per operation are too few for more.

        They always use one thread if bits must depend neither on the size of a pass nor on the number of threads.
        """
        if self.device.type != "cpu" or (numbers >= FEW_NUMBERS and not self.deterministic):
            yield
            return
        with torch_threads(1):
            yield

    @property
    def pads_passes(self) -> bool:
        """Whether hidden states must have a multiple of VECTOR_ROWS rows (see scratch.VECTOR_ROWS)."""
        return self.deterministic and self.device.type == "cpu"

    @contextmanager
    def padded_pass(self, num_tokens: int, num_rows: int) -> Iterator[None]:
        """While entered, only the first `num_tokens` of every `num_rows` rows of hidden states belong to tokens."""
        self._real, self._padded = num_tokens, num_rows
        try:
            yield
        finally:
            self._real, self._padded = 1, 1

    def real_rows(self, num_rows: int) -> int:
        """How many of the first `num_rows` rows belong to tokens, if every token has the same number of rows."""
        return num_rows * self._real // self._padded

    def parallel_for(self, jobs: Iterable[Job], work: Callable[[Job, Matmul], None]) -> None:
        """Calls work(job, matmul) for independent jobs, in parallel on the calling thread and the helpers."""
        with torch_threads(self._num_threads):
            self._pool.run(jobs, lambda job, worker: work(job, self._workers[worker]), deterministic=self.deterministic)

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if _is_small(x, packed):
            return super().linear(x, packed, bias, out)
        with torch_threads(self._num_threads):
            return super().linear(x, packed, bias, out)

    def _multiply_strips(self, x: Tensor, packed: PackedTensor, y: Tensor) -> None:
        """Distributes the strips of deterministic products, since threads must not share a single operation."""
        if not self.deterministic or self.device.type != "cpu" or _is_small(x, packed):
            super()._multiply_strips(x, packed, y)
            return
        self._pool.run(
            strips(packed.layout, deterministic=True),
            lambda strip, worker: self._workers[worker].multiply_strip(x, packed, y, strip),
            deterministic=True,
        )


def _is_small(x: Tensor, packed: PackedTensor) -> bool:
    """Whether a product is done before several threads would have synchronized."""
    return packed.nbytes * max(1, len(x) // ROWS_A_SWEEP) < SMALL_NBYTES
