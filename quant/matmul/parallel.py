"""Products for a model: one at a time with as many threads as pay, or many side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..tensor import PackedTensor
from .matmul import FEW_ROWS, Matmul
from .thread_pool import WorkerPool
from .workspace import Workspace

if TYPE_CHECKING:
    # Triton is imported where a device wants it, not here.
    from ..kernels.product import GroupedProduct

Job = TypeVar("Job")

# Threads take about 0.1 ms to wake up and meet again. An operation on fewer numbers than this takes one of them no
# longer than a few tenths, so half of its work is not worth a meeting.
FEW_NUMBERS = 1 << 20
# The same for products: bytes of a matrix that are read once for every so many rows.
SMALL_NBYTES = 2 << 20
ROWS_A_SWEEP = 16


class ParallelMatmul(Matmul):
    """Products that use all of torch's threads where that pays; `helpers` are workspaces of threads for `share`.

    `grouped` multiplies rows by many matrices at once, where a device has a kernel for that.
    """

    def __init__(
        self,
        workspace: Workspace,
        deterministic: bool = False,
        integer: bool = False,
        few_rows: Mapping[str, int] = FEW_ROWS,
        helpers: Sequence[Workspace] = (),
        grouped: GroupedProduct | None = None,
    ) -> None:
        super().__init__(workspace, deterministic, integer, few_rows)
        self.grouped = grouped
        self._members = [Matmul(each, deterministic, integer, few_rows) for each in (workspace, *helpers)]
        self._crew = WorkerPool(len(self._members))
        self._num_threads = torch.get_num_threads()

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch of all threads."""
        return sum(member.workspace.nbytes for member in self._members)

    @property
    def device(self) -> torch.device:
        """Where products are computed."""
        return self.workspace.buffer.device

    @contextmanager
    def small_steps(self, numbers: int) -> Iterator[None]:
        """While inside, operations use one thread if those on `numbers` numbers are too small for more.

        Not where bits must not depend on the size of a pass.
        """
        if self.deterministic or numbers >= FEW_NUMBERS or self.workspace.buffer.device.type != "cpu":
            yield
            return
        with _threads(1):
            yield

    def share(self, jobs: Iterable[Job], work: Callable[[Job, Matmul], None]) -> None:
        """Calls work(job, products) for jobs that do not depend on each other, side by side with the helpers."""
        with _threads(self._num_threads):
            self._crew.run(jobs, lambda job, member: work(job, self._members[member]), steady=self.deterministic)

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if packed.nbytes * max(1, len(x) // ROWS_A_SWEEP) < SMALL_NBYTES:
            return super().linear(x, packed, bias, out)
        with _threads(self._num_threads):
            return super().linear(x, packed, bias, out)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Costs nothing beside an operation: no thread starts or ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
