"""Products with packed matrices: their scratch, the kernel that computes one, and many in parallel."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..formats import bitsandbytes_kernels, int4, int8, nf4
from ..formats.format import (
    ALIGNMENT,
    CODE_BITS,
    INT4PACK,
    INTEGER_CODES,
    NF4PACK,
    ROWS,
    TILE_COLUMNS,
    TILES,
    FormatError,
    Layout,
    WeightFormat,
    end_of,
    get_format,
)
from ..kernels.tuning import GROUPED_ROWS
from ..native import library
from ..scratch import TILE, is_direct, row_nbytes, scratch_nbytes, scratch_planes, strip_rows
from ..tensor import PackedTensor, dtype_name, unpack_unscaled, view
from . import tiled
from .row_layouts import reads_floats
from .thread_pool import WorkerPool, torch_threads

if TYPE_CHECKING:
    from ..kernels.operands import Gate
    from ..kernels.product import GroupedProduct


class Scratch(NamedTuple):
    """The scratch of one product: a strip [rows, K], its scales, a tile [TILE, K] and the tile's product."""

    weight: Tensor
    wide: Tensor
    x: Tensor
    y: Tensor


class Workspace:
    """One flat buffer on a device. Every product uses it from its start, so two threads need two workspaces."""

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.buffer = torch.empty(-(-nbytes // ALIGNMENT) * ALIGNMENT, dtype=torch.uint8, device=device)
        # Making the views takes longer than a small product, and a model has only a handful of matrix shapes.
        self._cuts: dict[tuple[str, str, tuple[int, int], str, torch.dtype, bool], Scratch] = {}

        self._rows: dict[torch.dtype, Tensor] = {}

    @property
    def nbytes(self) -> int:
        return self.buffer.numel()

    def rows(self, num_rows: int, like: Tensor) -> Tensor:
        """An uninitialized buffer [num_rows, D] like `like` [., D]; all calls return the same memory, which only grows.

        New memory would be mapped page by page every time, which takes longer than filling it.
        """
        numel = num_rows * like.shape[1]
        memory = self._rows.get(like.dtype)
        if memory is None or memory.numel() < numel:
            # A tensor that is allocated in inference mode could not be written outside of it.
            with torch.inference_mode(False):
                memory = self._rows[like.dtype] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return memory[:numel].view(num_rows, like.shape[1])

    def cut(self, layout: Layout, dtype: torch.dtype, deterministic: bool) -> Scratch:
        """The views for a product of activations of `dtype` with such a matrix. Raises FormatError if too small."""
        key = (layout.format, layout.order, layout.shape, layout.dtype, dtype, deterministic)
        if key not in self._cuts:
            self._cuts[key] = self._cut(layout, dtype_name(dtype), deterministic)
        return self._cuts[key]

    def _cut(self, layout: Layout, dtype: str, deterministic: bool) -> Scratch:
        planes = scratch_planes(layout, dtype, deterministic)
        if end_of(planes) > self.nbytes:
            raise FormatError(
                f"A workspace of {self.nbytes} bytes was found; a product of {dtype} rows with {layout.format}"
                f" {list(layout.shape)} wants {end_of(planes)}. Make it as large as the largest scratch_nbytes."
            )
        # A view that is made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            return Scratch(*(view(self.buffer, plane) for plane in planes))


# More rows than any pass has.
ALL_ROWS = 1 << 40
# The number of rows up to which kernels on codes are used if nothing was measured.
GEMV_MAX_ROWS: Mapping[str, int] = MappingProxyType({"int8": 12, "int4": 24, "nf4": ALL_ROWS, TILES: ALL_ROWS})


class Matmul:
    """Multiplies activations by packed matrices, as fast as possible or so that a row's bits depend on that row alone.

    `deterministic`: there is one kernel per format, whatever the number of rows. Rows are multiplied TILE at a time,
    copied to the same buffer and padded with zeros, and matrices in strips, each on one thread, so that every call has
    the same shapes, strides, alignment and number of threads. Then results depend only on the machine and its
    libraries. Other products vary: among 1, 64 or 300 other rows, or with another number of threads, the same row is
    computed by kernels that sum in another order. The fused product of nf4 does not, and is used for any rows.

    `integer`: kernels round activations to int8: with one scale per 32 columns for codes of INTEGER_CODES in order
    `tiles`, with one per row for int8 matrices in order `rows` (W8A8). Integer sums are exact, so that bits of a row
    depend on nothing else.

    `gemv_max_rows`: by type of codes, and for order `tiles`, the number of rows up to which kernels on codes are used.
    """

    def __init__(
        self,
        workspace: Workspace,
        deterministic: bool = False,
        integer: bool = False,
        gemv_max_rows: Mapping[str, int] = GEMV_MAX_ROWS,
    ) -> None:
        self.workspace = workspace
        self.deterministic = deterministic
        self.integer = integer
        self.gemv_max_rows = gemv_max_rows

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x [T, K] times packed [N, K] transposed, plus bias [N]: [T, N] in x's dtype, which is any weight dtype.

        Writes to `out` if given, whose rows are contiguous and do not overlap x. Raises FormatError if the workspace is
        too small for the product (scratch.scratch_nbytes).
        """
        y = x.new_empty(x.shape[0], packed.shape[0]) if out is None else out
        if library.refused():
            self._multiply_strips(x, packed, y)
        elif self._rounds_rows(packed):
            int8.multiply_integers(x, packed.planes, y)
        elif self._is_tiled(x, packed):
            scratch = self._scratch(packed)
            tiled.multiply(x, packed, bias, y, scratch, self._on_threads(x, packed), self.integer)
            return y
        elif self._is_fused(x, packed):
            nf4.multiply(x, packed.planes, y)
        elif not self.deterministic and is_direct(packed.layout, dtype_name(x.dtype)):
            multiply_rows(x, packed.planes[0], y)
        elif not self.deterministic and (multiply := self._kernel(x, packed)):
            y.copy_(multiply(x, packed.planes)[:, : y.shape[1]])
        else:
            self._multiply_strips(x, packed, y)
        return y if bias is None else y.add_(bias)

    def rounded_columns(self, x: Tensor, packed: PackedTensor) -> int:
        """The columns of a row of x that share a scale where `linear` rounds them to int8; 0 where it does not."""
        if library.refused():
            return 0
        if self._rounds_rows(packed):
            return packed.shape[1]
        integers = self.integer and packed.layout.codes in INTEGER_CODES and self._is_tiled(x, packed)
        return TILE_COLUMNS if integers else 0

    def experts(
        self, hidden: Tensor, token_ids: Tensor, experts: Sequence[tiled.ExpertRows], gate: Gate | None, out: Tensor
    ) -> bool:
        """Computes the rows `out` [P, D] of experts in one call (tiled.multiply_experts).

        Returns False, having done nothing, where no kernel does that, or where dequantizing first is faster.
        """
        if not experts:
            return False
        scratch = self._scratch(experts[0].up, experts[0].down)
        if not tiled.takes_experts(hidden, experts, gate, scratch.numel()):
            return False
        if max(one.num_rows for one in experts) > self.tiled_rows():
            return False
        assert gate is not None
        tiled.multiply_experts(hidden, token_ids, experts, gate, out, scratch, self.call_on_all, self.integer)
        return True

    def tiled_rows(self) -> int:
        """The most rows for which codes are read by kernels, instead of being dequantized first."""
        return ALL_ROWS if self.deterministic else self.gemv_max_rows.get(TILES, 0)

    def _rounds_rows(self, packed: PackedTensor) -> bool:
        layout = packed.layout
        return self.integer and layout.codes == "int8" and layout.order == ROWS and not layout.grouped

    def _is_tiled(self, x: Tensor, packed: PackedTensor) -> bool:
        if not tiled.takes(x, packed):
            return False
        enough = self.workspace.nbytes >= row_nbytes(packed.shape[1]) and x.shape[0] <= self.tiled_rows()
        return enough or packed.layout.codes == "none"

    def _scratch(self, *matrices: PackedTensor) -> Tensor:
        """Scratch of the library's products with matrices after one another: of floats, plans have it as slack."""
        if matrices[0].layout.codes != "none":
            return self.workspace.buffer
        of_row = sum(row_nbytes(each.shape[1]) for each in matrices)
        return torch.empty(max(tiled.MOST_ROWS * of_row, FLOATS_SCRATCH_NBYTES), dtype=torch.uint8)

    def _on_threads(self, x: Tensor, packed: PackedTensor) -> tiled.OnThreads:
        """How a product calls its kernel: on the calling thread alone if it is small."""
        return self.call_on_all

    def call_on_all(self, call: Callable[[], None]) -> None:
        """Calls a kernel, which shares its work among those that call it: here one thread."""
        call()

    # Here and below `shape[0]`, since len() of a tensor takes as long as a small operation.
    def _is_fused(self, x: Tensor, packed: PackedTensor) -> bool:
        """Whether the product takes bitsandbytes' kernel, which dequantizes nf4 in registers for any number of rows."""
        if packed.layout.order != NF4PACK or x.dtype != torch.bfloat16 or not bitsandbytes_kernels.has_fused():
            return False
        return self.deterministic or x.shape[0] <= self.gemv_max_rows.get("nf4", 0)

    def _kernel(self, x: Tensor, packed: PackedTensor) -> Callable[[Tensor, tuple[Tensor, ...]], Tensor] | None:
        """The kernel that multiplies by codes in place, if there is one and rows are few; else None.

        In float32 and float16 these kernels are slower than dequantizing, even for one row.
        """
        name = packed.layout.codes
        if x.dtype != torch.bfloat16 or x.device.type != "cpu" or x.shape[0] > self.gemv_max_rows.get(name, 0):
            return None
        if name == "int8":
            return int8.multiply if packed.layout.order == ROWS and int8.has_kernel(packed.planes) else None
        return int4.multiply if packed.layout.order == INT4PACK and int4.has_kernel() else None

    def _multiply_strips(self, x: Tensor, packed: PackedTensor, y: Tensor) -> None:
        with torch_threads(1) if self.deterministic and y.device.type == "cpu" else nullcontext():
            for strip in strips(packed.layout, self.deterministic):
                self.multiply_strip(x, packed, y, strip)

    def multiply_strip(self, x: Tensor, packed: PackedTensor, y: Tensor, strip: slice) -> None:
        """Writes the product of x [T, K] with the rows `strip` of packed [N, K] into those columns of y [T, N]."""
        scratch = self.workspace.cut(packed.layout, x.dtype, self.deterministic)
        direct = is_direct(packed.layout, dtype_name(x.dtype))
        planes = packed.rows(strip)
        part = y[:, strip]
        weight, scales = (planes[0], None) if direct else unpack_unscaled(packed.layout, planes, *scratch[:2])
        weight = weight[: part.shape[1]]
        if self.deterministic:
            _multiply_tiles(x, weight, part, scratch)
        else:
            multiply_rows(x, weight, part)
        if scales is not None:
            part.mul_(scales)


# From so many rows on, torch's product in 16 bits takes longer than widening the matrix to float32 as well.
WIDENED_ROWS = 16
# The numbers of the matrix and of the rows that are widened at a time: 2 and 4 MiB, or TILE rows.
WIDENED_WEIGHTS, WIDENED_INPUTS = 1 << 19, 1 << 20
# Scratch of products of floats that the library computes.
FLOATS_SCRATCH_NBYTES = 1 << 20


def multiply_rows(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Writes x [T, K] times weight [N, K] transposed, all of one dtype, into out [T, N].

    oneDNN's products in 16 bits want AVX-512. Where a processor has AVX2 alone, torch multiplies in a loop of its own,
    seven times as long as in float32 (docs/dev/internals.md): there, rows and matrix are widened block by block.
    """
    if x.element_size() != 2 or x.device.type != "cpu" or len(x) < WIDENED_ROWS or not is_avx2_alone():
        torch.mm(x, weight.t(), out=out)
        return
    rows, outputs = max(1, WIDENED_INPUTS // x.shape[1] // TILE) * TILE, max(1, WIDENED_WEIGHTS // x.shape[1])
    for row in range(0, len(x), rows):
        wide = x[row : row + rows].float()
        for output in range(0, len(weight), outputs):
            out[row : row + rows, output : output + outputs] = wide @ weight[output : output + outputs].float().t()


@cache
def is_avx2_alone() -> bool:
    """Whether torch found AVX2 and no AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2"


def strips(layout: Layout, deterministic: bool) -> list[slice]:
    """The slices of rows of a matrix that are multiplied together."""
    # Slices, since torch.split takes eight times as long as one of them.
    rows = strip_rows(layout, deterministic)
    return [slice(start, start + rows) for start in range(0, layout.shape[0], rows)]


def _multiply_tiles(x: Tensor, weight: Tensor, y: Tensor, scratch: Scratch) -> None:
    product = scratch.y[:, : len(weight)]
    for start in range(0, len(x), TILE):
        rows = x[start : start + TILE]
        scratch.x[: len(rows)].copy_(rows)
        scratch.x[len(rows) :].zero_()
        multiply_rows(scratch.x, weight, product)
        y[start : start + TILE].copy_(product[: len(rows)])


Job = TypeVar("Job")

# Threads take about 0.1 ms to wake up and synchronize. One thread computes an operation on fewer numbers than this in a
# few tenths of a millisecond at most, so sharing the work does not pay.
FEW_NUMBERS = 1 << 20
# The same limit for products, in bytes of a matrix that are read once for every ROWS_A_SWEEP rows.
SMALL_NBYTES = 2 << 20
ROWS_A_SWEEP = 16
# The same limit for products of matrices in order `tiles`, in bytes of the matrix times rows: one thread reads memory
# almost as fast as two, and waking another takes as long as a product of 8 rows with 1024 x 2048.
SMALL_TILED = 16 << 20


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

    @contextmanager
    def in_floats(self) -> Iterator[None]:
        """While entered, products round no activation, whatever `integer` says."""
        integer, everyone = self.integer, (self, *self._workers)
        for each in everyone:
            each.integer = False
        try:
            yield
        finally:
            for each in everyone:
                each.integer = integer

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

    def for_each(self, slices: Iterable[slice], work: Callable[[slice], None]) -> None:
        """Calls work(rows) for every slice, in parallel, as tensor.pack_into wants it."""
        self.parallel_for(list(slices), lambda rows, _: work(rows))

    def _on_threads(self, x: Tensor, packed: PackedTensor) -> tiled.OnThreads:
        return super().call_on_all if packed.nbytes * x.shape[0] < SMALL_TILED else self.call_on_all

    @property
    def num_workers(self) -> int:
        """The threads that `call_on_all` calls on."""
        return self._pool.size

    def call_on_all(self, call: Callable[[], None]) -> None:
        """Calls a kernel on every thread (WorkerPool.call_on_all)."""
        self._pool.call_on_all(call)

    def linear(self, x: Tensor, packed: PackedTensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if 0 < x.shape[0] <= GROUPED_ROWS and self.by_grouped(packed.layout, x.dtype):
            assert self.grouped is not None
            y = x.new_empty(x.shape[0], packed.shape[0]) if out is None else out
            self.grouped.multiply(x, packed, y).run()
            return y if bias is None else y.add_(bias)
        if _is_small(x, packed):
            return super().linear(x, packed, bias, out)
        with torch_threads(self._num_threads):
            return super().linear(x, packed, bias, out)

    def by_grouped(self, layout: Layout, dtype: torch.dtype) -> bool:
        """Whether a kernel of the device reads the codes of a single matrix, for up to GROUPED_ROWS rows."""
        if self.grouped is None or self.deterministic or dtype == torch.float32:
            return False
        return CODE_BITS[layout.codes] > 0 and self.grouped.takes(layout)

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
    return packed.nbytes * max(1, x.shape[0] // ROWS_A_SWEEP) < SMALL_NBYTES


def kernel_order(format_name: str, dtype: torch.dtype, device_type: str) -> str:
    """The order of codes in which products with activations of `dtype` are fastest on this machine.

    A store in another order serves as well: its matrices are dequantized for products.
    """
    found = get_format(format_name)
    if device_type != "cpu":
        return ROWS
    if dtype != torch.bfloat16:
        return found.order
    if TILES in found.orders and tiled.has_kernel():
        return TILES
    return NF4PACK if NF4PACK in found.orders and bitsandbytes_kernels.has_fused() else found.order


# The matrix with which kernels on codes are compared with dequantizing first.
GEMV_SHAPE = (512, 1024)
# Enough rows for the time per row to be constant.
GEMV_ROWS = 16
# Rows for which the fused product of nf4 is compared, too: it may be the faster one for any number.
FUSED_ROWS = 256
# Beyond a tile or two of matrix units the kernels are not faster on any machine; a disturbed measurement may say so.
MOST_GEMV_ROWS = 64
GEMV_REPEATS = 5


def measure_gemv_max_rows(format_name: str, integer: bool = False) -> dict[str, int]:
    """The `gemv_max_rows` of Matmul for a model in this format; takes about ten milliseconds on the calling thread.

    A kernel that dequantizes codes on the fly takes time for every row. Dequantizing first takes its time once, and the
    product after it is almost free for few rows. Both times are proportional to the size of the matrix, so a small
    matrix shows where they are equal. That depends on the processor: matrix units speed up only one of the two.
    """
    found = get_format(format_name)
    orders = [order for order, usable in _FUSED.items() if order in found.orders and usable()]
    one, several = map(get_format, found.parts)
    limits: dict[str, int] = {}
    with torch_threads(1):
        if NF4PACK in orders:
            limits[found.codes] = _fused_max_rows(found, NF4PACK)
        elif one.whole_rows or (INT4PACK in one.orders and int4.has_kernel()):
            limits[found.codes] = _break_even_rows(one)
        if one.codes == "none" and reads_floats():
            limits[TILES] = ALL_ROWS
        if TILES in orders:
            # Rows that are rounded mean something else: no time may decide whether they are.
            limits[TILES] = ALL_ROWS if integer else _fused_max_rows(several, TILES)
    return limits


# Orders whose kernels take any number of rows, and whether they can be used here.
_FUSED: Mapping[str, Callable[[], bool]] = MappingProxyType(
    {NF4PACK: bitsandbytes_kernels.has_fused, TILES: tiled.has_kernel}
)


@torch.inference_mode()
def _break_even_rows(chosen: WeightFormat) -> int:
    """The number of rows for which both take the same time, from 1 to MOST_ROWS."""
    packed = _matrix_of_zeros(chosen)
    kernel, dequantizing = _kernel_and_dequantizing(packed, GEMV_ROWS)
    return max(1, min(MOST_GEMV_ROWS, int(GEMV_ROWS * dequantizing / kernel)))


@torch.inference_mode()
def _fused_max_rows(chosen: WeightFormat, order: str) -> int:
    """The number of rows for which the fused product of nf4 takes as long as dequantizing first; perhaps any.

    Both are compared for few and for many rows, between which their times are straight lines.
    """
    packed = _matrix_of_zeros(chosen.in_order(order))
    few, many = (_kernel_and_dequantizing(packed, rows) for rows in (GEMV_ROWS, FUSED_ROWS))
    saved, lost = few[1] - few[0], many[0] - many[1]
    if lost <= 0:
        return ALL_ROWS
    return max(1, int(GEMV_ROWS + (FUSED_ROWS - GEMV_ROWS) * max(0.0, saved) / (max(0.0, saved) + lost)))


def _matrix_of_zeros(chosen: WeightFormat) -> PackedTensor:
    """A matrix in a format of any kind: products take as long as with other numbers."""
    layout = chosen.layout(GEMV_SHAPE, "bfloat16")
    return PackedTensor.bind(layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


def _kernel_and_dequantizing(packed: PackedTensor, num_rows: int) -> tuple[float, float]:
    """Seconds of a product of `num_rows` rows by the kernel on codes, and by dequantizing first."""
    x = torch.randn(num_rows, packed.shape[1], dtype=torch.bfloat16)
    workspace = Workspace(scratch_nbytes(packed.layout, dtype_name(x.dtype), deterministic=False))
    limits = {packed.layout.codes: num_rows, packed.layout.order: num_rows}
    kernel = Matmul(workspace, gemv_max_rows=limits)
    dequantizing = Matmul(workspace, gemv_max_rows={})
    kernel_s, dequantizing_s = (_best_seconds(partial(each.linear, x, packed)) for each in (kernel, dequantizing))
    return kernel_s, dequantizing_s


def _best_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(GEMV_REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return min(times)
