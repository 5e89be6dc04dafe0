"""Products for a model: one at a time with as many threads as pay, or many side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from ..tensor import PackedTensor
from .matmul import FEW_ROWS, Matmul, strips
from .thread_pool import WorkerPool, torch_threads
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
        self._real, self._padded = 1, 1

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

        Always one where bits must depend neither on the size of a pass nor on the number of threads.
        """
        if self.device.type != "cpu" or (numbers >= FEW_NUMBERS and not self.deterministic):
            yield
            return
        with torch_threads(1):
            yield

    @property
    def pads_passes(self) -> bool:
        """Whether hidden states are to have a multiple of VECTOR_ROWS rows: elementwise operations see all of them."""
        return self.deterministic and self.device.type == "cpu"

    @contextmanager
    def padded_pass(self, num_tokens: int, num_rows: int) -> Iterator[None]:
        """While inside, of every `num_rows` rows of hidden states the last ones stand for no token."""
        self._real, self._padded = num_tokens, num_rows
        try:
            yield
        finally:
            self._real, self._padded = 1, 1

    def real_rows(self, num_rows: int) -> int:
        """How many of the first rows are of tokens, where every token has the same number of rows."""
        return num_rows * self._real // self._padded

    def share(self, jobs: Iterable[Job], work: Callable[[Job, Matmul], None]) -> None:
        """Calls work(job, products) for jobs that do not depend on each other, side by side with the helpers."""
        with torch_threads(self._num_threads):
            self._crew.run(jobs, lambda job, member: work(job, self._members[member]), steady=self.deterministic)

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if _is_small(x, packed):
            return super().linear(x, packed, bias, out)
        with torch_threads(self._num_threads):
            return super().linear(x, packed, bias, out)

    def _multiply_strips(self, x: Tensor, packed: PackedTensor, y: Tensor) -> None:
        """Deterministic products share their strips out, since one operation must not be split among threads."""
        if not self.deterministic or self.device.type != "cpu" or _is_small(x, packed):
            super()._multiply_strips(x, packed, y)
            return
        self._crew.run(
            strips(packed.layout, deterministic=True),
            lambda strip, member: self._members[member].multiply_strip(x, packed, y, strip),
            steady=True,
        )


def _is_small(x: Tensor, packed: PackedTensor) -> bool:
    """Whether a product is over before several threads would have met."""
    return packed.nbytes * max(1, len(x) // ROWS_A_SWEEP) < SMALL_NBYTES
